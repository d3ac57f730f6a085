"""The edits compared with other engines, and what is said when those are not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.peers import (
    AMORTIZE,
    STOCK,
    EmptyToolOutputs,
    Played,
    Way,
    langchain_policy,
    llama_server,
    llama_way,
    policies,
    rows,
)
from leyline_agent.bench.run import ArmRun
from leyline_agent.bench.script import write_script
from leyline_agent.errors import ConfigError, MissingDependencyError, ServerError
from leyline_agent.traces import Trace
from recorded import agent_history

pytestmark = pytest.mark.client

TRACE = Trace("t", tuple(agent_history(6, output_chars=400)))


def outputs(policy: object) -> list[str]:
    script = write_script(policy, TRACE)  # type: ignore[arg-type]
    return [message["content"] for message in script.steps[-1].view if message["role"] == "tool"]


def test_every_edit_leaves_the_newest_outputs_alone() -> None:
    whole = [message["content"] for message in TRACE.messages if message["role"] == "tool"]
    for name, policy in policies().items():
        edited = outputs(policy)
        assert edited[-3:] == whole[-3:], name
        assert all(len(short) < len(long) for short, long in zip(edited[:-3], whole[:-3], strict=True)), name


def test_deletion_leaves_nothing() -> None:
    assert outputs(EmptyToolOutputs())[:2] == ["", ""]


@pytest.mark.skipif(not importlib.util.find_spec("langchain"), reason="LangChain is installed in .venv-client only")
def test_langchain_s_context_editing_is_a_policy() -> None:
    assert outputs(langchain_policy())[:2] == ["[cleared]", "[cleared]"]


@pytest.mark.skipif(bool(importlib.util.find_spec("langchain")), reason="LangChain is installed here")
def test_without_langchain_the_extra_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="langgraph"):
        langchain_policy()


def test_without_llama_cpp_it_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(MissingDependencyError, match="no-such-server"),
        llama_server("no-such-server", None, cache_reuse=0),
    ):
        pass
    with pytest.raises(MissingDependencyError, match="--gguf"), llama_server("true", None, cache_reuse=0):
        pass
    with pytest.raises(ConfigError, match="nowhere"), llama_server("true", tmp_path / "nowhere.gguf", cache_reuse=0):
        pass


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho cannot load model >&2\nexit 3\n")
    program.chmod(0o755)
    with (
        pytest.raises(ServerError, match="code 3 before it was ready: cannot load model"),
        llama_server(str(program), program, cache_reuse=0),
    ):
        pass


def played(way: Way, policy: str, answers: list[str], **facts: Any) -> Played:
    """A first turn, then one edited turn for each answer."""
    turns = [MeasuredTurn("t", 0, False, prompt_tokens=100, prefilled_tokens=100)]
    turns += [
        MeasuredTurn("t", number, True, prompt_tokens=100, output_text=text, ttft_ms=10.0 * number, **facts)
        for number, text in enumerate(answers, 1)
    ]
    return Played(way, policy, ArmRun(turns, way.arm))


def test_answers_are_held_against_those_of_the_same_engine_and_edit() -> None:
    found = rows(
        [
            played(STOCK, "delete", ["a", "b", "c"], cached_tokens=40, prefilled_tokens=60),
            played(AMORTIZE, "delete", ["a", "b", "x"], cached_tokens=30, amortized_tokens=50, prefilled_tokens=20),
            played(llama_way(32), "delete", ["q"], cached_tokens=90, prefilled_tokens=10),
            played(llama_way(0), "delete", ["a"], cached_tokens=40, prefilled_tokens=60),
            played(AMORTIZE, "marker", ["a"], prefilled_tokens=100),
        ]
    )
    assert [(row["engine"], row["way"], row["same_answers"], row["edited_turns"]) for row in found] == [
        ("SGLang", "re-prefill", 3, 3),
        ("SGLang", "AMORTIZE", 2, 3),
        ("llama.cpp", "cache-reuse 32", 0, 1),
        ("llama.cpp", "re-prefill", 1, 1),
        ("SGLang", "AMORTIZE", None, 1),
    ]
    assert found[1]["reused_tokens"] == 240
    assert found[1]["prefilled_tokens"] == 160
    assert found[1]["hit_rate"] == 0.6
    assert found[1]["ttft_ms_edited"] == {"p0": 10.0, "p50": 20.0, "p100": 30.0}


def test_rows_stand_edit_by_edit() -> None:
    some = [played(STOCK, name, []) for name in ("delete", "marker")]
    some += [played(llama_way(0), name, []) for name in ("delete", "marker")]
    assert [row["policy"] for row in rows(some)] == ["delete", "delete", "marker", "marker"]
