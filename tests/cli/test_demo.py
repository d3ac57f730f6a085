"""`leyline demo` on tiny models: its numbers are the server's, and its checks hold (times are not judged)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline_agent.bench.demo import DEMO_POLICY, shipped_history, write_demo_script
from leyline_agent.history import pair_calls
from recorded import agent_history, write_traces
from servers import CpuServer

TURNS = 6
POLICY = "truncate_tool_outputs:keep_turns=2,max_chars=20"


def leyline_demo(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "leyline_agent.cli", "demo", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_shipped_history_is_long_enough_and_whole() -> None:
    history = shipped_history()
    script = write_demo_script(DEMO_POLICY, history)
    assert len(script.steps) >= 12
    assert sum(step.edited for step in script.steps) >= 8
    pairing = pair_calls(history.messages)
    assert not pairing.orphans
    assert not pairing.duplicates
    assert all(use.result_at is not None for use in pairing.uses)


@pytest.fixture(scope="module", params=["llama", "deepseek_v2"])
def played(
    request: pytest.FixtureRequest, cpu_server: Callable[..., CpuServer], tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]:
    """The demo, played on one tiny model."""
    server = cpu_server(request.param)
    folder = tmp_path_factory.mktemp("demo")
    trace = write_traces(folder / "trace.jsonl", agent_history(TURNS))
    files = ("--json", folder / "demo.json", "--plot", folder / "demo.png")
    done = leyline_demo("--base-url", server.base_url, "--trace", trace, "--policy", POLICY, *files)
    assert done.returncode in (0, 1), done.stderr
    return done, json.loads((folder / "demo.json").read_text()), folder


@pytest.mark.server
def test_arms_send_the_same_prompts(played: Any) -> None:
    _, result, _ = played
    prompts = [[turn["prompt_tokens"] for turn in arm["turns"]] for arm in result["arms"].values()]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(prompts[0]) == TURNS


@pytest.mark.server
def test_tokens_add_up(played: Any) -> None:
    _, result, _ = played
    for arm in result["arms"].values():
        for turn in arm["turns"]:
            parts = turn["cached_tokens"] + turn["amortized_tokens"] + turn["prefilled_tokens"]
            assert parts == turn["prompt_tokens"]
        for name in ("prompt_tokens", "cached_tokens", "amortized_tokens", "prefilled_tokens"):
            assert arm[name] == sum(turn[name] for turn in arm["turns"])


@pytest.mark.server
def test_an_edited_turn_prefills_the_replacement_and_what_is_new(played: Any) -> None:
    _, result, _ = played
    amortize = result["arms"]["amortize"]["turns"]
    edited = [turn["turn"] for turn in amortize if turn["edited"]]
    assert edited == [3, 4, 5]
    for turn in amortize:
        assert turn["edited"] == (turn["replacement_tokens"] > 0)
        # What the model sampled is not what was recorded; a first byte in common is all that may be saved.
        assert -1 <= turn["replacement_tokens"] + turn["new_tokens"] - turn["prefilled_tokens"] <= 1
    for arm in ("reprefill", "forget"):
        turns = result["arms"][arm]["turns"]
        assert all(turns[k]["prefilled_tokens"] > amortize[k]["prefilled_tokens"] for k in edited)
        assert result["arms"][arm]["amortized_tokens"] == 0


@pytest.mark.server
def test_checks_hold(played: Any) -> None:
    done, result, _ = played
    untimed = {name: held for name, held in result["checks"].items() if not name.startswith("ttft")}
    # Two turns are kept, so a splice can save at most half of what is prefilled; that check is for the shipped history.
    assert untimed.pop("amortize_prefills_at_most_half") in (True, False)
    assert len(untimed) == 3
    assert all(untimed.values()), result["check_details"]
    assert done.returncode == (0 if all(result["checks"].values()) else 1)


@pytest.mark.server
def test_what_the_user_sees(played: Any) -> None:
    done, _, folder = played
    for words in ("Turn by turn", "In total", "Saved by AMORTIZE", "holds", str(folder / "demo.json")):
        assert words in done.stdout
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--base-url", "http://127.0.0.1:9"], ["http://127.0.0.1:9"]),
        (["--trace", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--policy", "no_such_policy"], ["no_such_policy"]),
        (["--policy", "keep_all"], ["changes nothing"]),
        (["--json", "no/such/folder.json"], ["no/such"]),
    ],
    ids=["no server", "no trace file", "no policy", "nothing edited", "no folder"],
)
def test_bad_input_is_one_line(args: list[str], words: list[str]) -> None:
    done = leyline_demo(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("leyline: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
