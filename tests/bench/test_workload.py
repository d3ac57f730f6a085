"""The generated sessions have the paper's shape, and the script decides each turn once for all arms."""

from __future__ import annotations

import pytest

from leyline_agent.bench.arms import Arm, InMode, parse_arms
from leyline_agent.bench.breakeven import cases, script_of
from leyline_agent.bench.script import Scripted, write_script
from leyline_agent.bench.workload import FIRST, Shape, generate
from leyline_agent.cli.bench.options import parse_concurrency
from leyline_agent.directives import Mode
from leyline_agent.edits import Turn, apply_edits, estimate_tokens
from leyline_agent.errors import ConfigError
from leyline_agent.history import pair_calls, text_of
from leyline_agent.policies import DropSuperseded, TruncateToolOutputs
from leyline_agent.traces import Trace
from recorded import agent_history


def test_the_papers_shape() -> None:
    (trace, *others) = generate(Shape(), estimate_tokens)
    assert len(others) == 15
    script = write_script(DropSuperseded(), trace, first=FIRST)
    sizes = [sum(estimate_tokens(text_of(m["content"]) or "") for m in step.messages) for step in script.steps]
    assert len(sizes) == 6
    assert sizes[0] == pytest.approx(4096 + 2048, rel=0.03)
    assert sizes[-1] == pytest.approx(4096 + 6 * 2048, rel=0.03)
    assert not pair_calls(trace.messages).orphans


def test_a_policy_that_drops_superseded_reads_edits_every_turn_but_the_first() -> None:
    (trace, *_) = generate(Shape(sessions=1), estimate_tokens)
    script = write_script(DropSuperseded(), trace, first=FIRST)
    assert [step.edited for step in script.steps] == [False, True, True, True, True, True]
    assert [len(step.edits) for step in script.steps] == [0, 1, 2, 3, 4, 5]


def test_generation_depends_on_the_seed_alone() -> None:
    shape = Shape(sessions=2, system_tokens=50, turn_tokens=40)
    assert generate(shape, estimate_tokens) == generate(shape, estimate_tokens)
    first, second = generate(shape, estimate_tokens)
    assert first.messages[0] != second.messages[0]


def test_a_script_gives_the_policy_s_edits_again() -> None:
    trace = Trace("t", tuple(agent_history(6)))
    script = write_script(TruncateToolOutputs(max_chars=20), trace)
    policy = Scripted.of(script)
    for step in script.steps:
        edits = policy.decide(Turn(step.messages))
        assert apply_edits(step.messages, edits).messages == step.view


def test_what_can_be_prepared_is_what_the_turn_then_needs() -> None:
    script = write_script(TruncateToolOutputs(max_chars=20), Trace("t", tuple(agent_history(6))))
    for step in script.steps[1:]:
        assert step.ahead == step.edits
        assert step.messages[step.ahead_len - 1]["role"] == "assistant"


def test_arms_carry_their_mode() -> None:
    turn = Turn(tuple(agent_history(6)))
    for arm in (Arm.AMORTIZE, Arm.FORGET):
        edits = InMode(TruncateToolOutputs(max_chars=20), arm.mode).decide(turn)
        assert {edit.mode for edit in edits} == {arm.mode}
    assert Arm.FORGET.mode is Mode.FORGET


def test_breakeven_cases_cover_positions_and_keep_the_prompt_s_length() -> None:
    some = list(cases([2048], [0, 0.5, 1], [16]))
    assert {case.prefix_tokens + case.downstream_tokens for case in some} == {2048 - 512}
    assert [round(case.position, 1) for case in some] == [0.0, 0.5, 1.0]
    script = script_of(some[1], 0.25, seed=1)
    assert [step.edited for step in script.steps] == [False, True]


def test_lists_on_the_command_line() -> None:
    assert parse_concurrency("1:4,8") == {1: 4, 8: None}
    assert parse_arms("forget, none") == (Arm.FORGET, Arm.NONE)
    for bad in ("", "0", "x", "1:y"):
        with pytest.raises(ConfigError):
            parse_concurrency(bad)
    with pytest.raises(ConfigError, match="reprefill"):
        parse_arms("reprefil")
