"""What each wrapper does to the policy it holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from histories import calls, result, says, session, step, user
from leyline_agent import policies
from leyline_agent.costs import CostModel, FidelityReport
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn, apply_edits
from leyline_agent.policies import placeholders
from leyline_agent.policy import Policy
from leyline_agent.replay import ReplayedTurn, replay

TRUNCATE = policies.TruncateToolOutputs(keep_turns=2, max_chars=20)
KEY = "sk-" + "x" * 24


def moves(turns: Sequence[ReplayedTurn]) -> int:
    """Turns on which the edits in force changed."""
    edits = [turn.edits for turn in turns]
    return sum(a != b for a, b in itertools.pairwise(edits))


def test_chain_shows_each_policy_what_the_one_before_made() -> None:
    seen: list[list[Any]] = []

    def look(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        seen.append([m["content"] for m in messages if m["role"] == "tool"])
        return messages

    history = session(4)
    edits = policies.Chain(TRUNCATE, look).decide(Turn(tuple(history)))
    assert [len(text) < 200 for text in seen[0]] == [True, True, False, False]
    assert apply_edits(history, edits) == apply_edits(history, TRUNCATE.decide(Turn(tuple(history))))


def test_chain_gives_one_edit_a_message_and_the_stricter_mode() -> None:
    history = [user(), *step("read_file", f"key {KEY} " + "x" * 900, path="a"), says("ok"), user(), says("ok"), user()]
    edits = policies.Chain(policies.Redact(), TRUNCATE).decide(Turn(tuple(history)))
    assert [(e.index, e.mode, e.reason) for e in edits] == [(2, Mode.FORGET, "stale_tool_output")]
    assert edits[0].new == "key [redacted] xxxxx" + placeholders.CUT_OUTPUT


def test_chained_batches_keep_their_memory() -> None:
    chain = policies.Chain(
        policies.DropRepeats(), policies.TokenBudget(high_tokens=2_000, low_tokens=900, keep_turns=2)
    )
    assert 2 <= moves(list(replay(chain, session(50)))) <= 6


def test_only_when_holds_still_otherwise() -> None:
    policy = policies.OnlyWhen(TRUNCATE, lambda turn: turn.index % 5 == 0)
    turns = list(replay(policy, session(22)))
    moved = [b.turn.index for a, b in itertools.pairwise(turns) if a.edits != b.edits]
    assert moved == [5, 10, 15, 20]


def test_hysteresis_makes_rare_batches() -> None:
    turns = list(replay(policies.Hysteresis(TRUNCATE, min_tokens=500), session(40)))
    assert 1 <= moves(turns) <= 40 * 100 // 500
    assert moves(list(replay(TRUNCATE, session(40)))) >= 37


def test_hysteresis_never_delays_a_secret_and_takes_along_what_lies_after_it() -> None:
    history = [*session(4), *step("read_file", f"{KEY}", path="k"), *session(4)[2:]]
    policy = policies.Hysteresis(policies.Chain(TRUNCATE, policies.Redact()), min_tokens=10**6)
    turns = list(replay(policy, history))
    first_with_secret = next(turn for turn in turns if any(KEY in str(m) for m in turn.turn.messages))
    assert all(KEY not in str(turn.view.messages) for turn in turns)
    assert {e.index for e in first_with_secret.edits} == {11}, "what lies before the secret waits"
    assert moves(turns) == 1, "what ages out later waits again"


def test_when_cold_edits_exactly_and_only_then() -> None:
    history = tuple(session(12))
    policy = policies.WhenCold(TRUNCATE, idle_s=60)
    warm = Turn(history, index=7)
    assert policy.decide(warm) == []
    cold = policy.decide(replace(warm, idle_s=61.0))
    assert cold == policy.decide(replace(warm, cache_is_cold=True)) == policy.decide(replace(warm, index=0))
    assert len(cold) == 10
    assert {edit.mode for edit in cold} == {Mode.FORGET}
    longer = Turn(tuple(session(14)), index=9, edits=tuple(cold))
    assert policy.decide(longer) == list(cold), "in between they hold"


def test_when_cold_does_not_wait_with_a_secret() -> None:
    history = [user(), *step("env", KEY), says("ok"), user()]
    assert policies.WhenCold(policies.Redact()).decide(Turn(tuple(history), index=3))


def test_per_tool_edits_its_own_tool_only() -> None:
    history = [user()]
    for name in ("search", "read_file", "shell"):
        history += step(name, "x" * 900, path=name)
    history += [says("ok"), user(), says("ok"), user()]
    policy = policies.PerTool({"search": policies.TruncateToolOutputs(max_chars=5)}, default=TRUNCATE)
    lengths = [len(m["content"]) for m in apply_edits(history, policy.decide(Turn(tuple(history)))).messages[2:7:2]]
    marker = len(placeholders.CUT_OUTPUT)
    assert lengths == [5 + marker, 20 + marker, 20 + marker]
    alone = policies.PerTool({"search": TRUNCATE}).decide(Turn(tuple(history)))
    assert [edit.index for edit in alone] == [2]


def test_per_tool_leaves_what_was_said() -> None:
    redact = policies.PerTool({"env": policies.Redact()})
    history = [user(KEY), calls(("env", {"k": KEY}), content=KEY), result(KEY)]
    assert [(e.index, e.part) for e in redact.decide(Turn(tuple(history)))] == [(1, Part.ARGUMENTS), (2, Part.CONTENT)]


def test_protect_keeps_pinned_messages_latest_reads_and_what_was_asked_twice() -> None:
    history = [user()]
    history += step("read_file", "v1 " * 300, path="a") + step("read_file", "v2 " * 300, path="a")
    history += step("run", "out " * 300, command="x") + step("run", "out " * 300, command="y")
    history += [*step("run", "again " * 300, command="x"), says("ok"), user(), says("ok"), user()]
    clear = policies.ClearToolUses(trigger=0, keep=0, clear_at_least=0)
    policy = policies.Protect(clear, pinned=lambda message: message.get("pinned") is True)
    assert [e.index for e in policy.decide(Turn(tuple(history)))] == [2, 6, 8]
    history[8]["pinned"] = True
    assert [e.index for e in policy.decide(Turn(tuple(history)))] == [2, 6]


def test_protect_leaves_out_whole_sets() -> None:
    history = session(12)
    policy = policies.Protect(policies.SlidingWindow(keep_turns=2, step=1), pinned=lambda m: m is history[5])
    shown = apply_edits(history, policy.decide(Turn(tuple(history))))
    assert {4, 5} <= set(shown.sources), "a pinned result keeps its call"


def test_dry_run_tells_and_edits_nothing() -> None:
    told: list[int] = []
    policy = policies.DryRun(TRUNCATE, on_edits=lambda turn, edits: told.append(len(edits)))
    assert policy.decide(Turn(tuple(session(5)))) == ()
    assert told == [3]


def test_restore_brings_back_what_the_model_asks_for_and_keeps_it() -> None:
    history = session(6)
    ask = step("restore_output", "restored above", ids="ask", call_id="t0_0")
    turns = list(replay(policies.Restore(TRUNCATE, policies.asked_for()), [*history, *ask, *session(3)[2:]]))
    asked = [turn for turn in turns if turn.at > len(history) + 1]
    assert len(asked) > 2
    assert all(turn.view.messages[3] is history[3] for turn in asked)
    assert turns[4].view.messages[3] is not history[3]
    assert all(turn.view.messages[5] is not history[5] for turn in asked), "the others stay cut"


def auto(history: Sequence[Any], costs: CostModel, **turn: Any) -> list[MessageEdit]:
    policy: Policy = replace(TRUNCATE, mode=Mode.AUTO)
    return list(policies.CostAware(policy, costs).decide(Turn(tuple(history), index=5, **turn)))


def test_cost_aware_resolves_auto_by_cost() -> None:
    history = [*session(30, output_len=4_000)]
    rich = CostModel(turns_left=50)
    assert {edit.mode for edit in auto(history, rich)} == {Mode.AMORTIZE}
    assert auto(history, CostModel(turns_left=0)) == [], "an edit that saves nothing is not made"
    assert {e.mode for e in auto(history, CostModel(turns_left=0), cache_is_cold=True)} == {Mode.FORGET}


def test_cost_aware_forgets_in_one_batch_where_it_cannot_amortize() -> None:
    history = [*session(30, output_len=4_000)]
    unfaithful = CostModel(turns_left=30, fidelity=FidelityReport(0.12, probes=100))
    assert {edit.mode for edit in auto(history, unfaithful)} == {Mode.FORGET}
    single = [*session(3, output_len=4_000), *session(30, output_len=40)[2:]]
    few_turns = CostModel(turns_left=3, amortize_available=False)
    assert auto([*single[:4], *session(60, output_len=4_000)[4:]][:40], replace(few_turns, turns_left=0.1)) == []


def test_cost_aware_keeps_what_is_in_force_and_its_mode() -> None:
    history = session(30, output_len=4_000)
    made = auto(history, CostModel(turns_left=50))
    later = auto([*history, says("ok"), user()], CostModel(turns_left=0), edits=tuple(made))
    assert later == made


@pytest.mark.parametrize("mode", [Mode.AMORTIZE, Mode.FORGET])
def test_cost_aware_leaves_a_mode_that_was_set(mode: Mode) -> None:
    policy = policies.CostAware(replace(TRUNCATE, mode=mode), CostModel(turns_left=0))
    assert {edit.mode for edit in policy.decide(Turn(tuple(session(5))))} == {mode}


def test_wrapper_names_say_what_they_hold() -> None:
    assert policies.Hysteresis(policies.Chain(TRUNCATE, policies.Redact())).name == (
        "Hysteresis(Chain(TruncateToolOutputs, Redact))"
    )
