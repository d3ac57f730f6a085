"""The edits compared with other engines, and what is said when those are not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from leyline_agent.bench.peers import EmptyToolOutputs, langchain_policy, llama_server, policies
from leyline_agent.bench.script import write_script
from leyline_agent.errors import ConfigError, MissingDependencyError
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
