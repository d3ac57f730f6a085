"""Public complaints about agents that edit their history, each as a small history with the right outcome.

The numbers are those of the table in docs/policies.md. What concerns the server alone has a reason in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from histories import calls, result, says, session, step, system, user
from leyline_agent import policies
from leyline_agent.costs import CostFacts, CostModel, FidelityReport, choose, explain
from leyline_agent.diff import plan_tokens
from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.edits import MessageEdit, Part, Turn, Usage, apply_edits, diff_messages
from leyline_agent.errors import ConfigError
from leyline_agent.invariants import check_history
from leyline_agent.planner import plan_edits, repair_history
from leyline_agent.policies.placeholders import OF_OUTPUTS, looks_failed
from leyline_agent.replay import replay
from leyline_agent.simulate import ChunkEncoder, Renderer, cost_of
from leyline_agent.testing import assert_prefix_stable
from leyline_agent.traces import Trace
from leyline_agent.undo import EditLog

SERVER_ONLY = {
    15: "the engine refuses or falls back with a typed reason, never aborts: tests/integrations/sglang",
    17: "quantised KV is refused when the server starts: tests/integrations/sglang",
    19: "rotation has unit magnitude whatever YaRN's factor: tests/kernels",
    20: "keys are rebuilt before they are published, and tagged where they are amortized: tests/integrations/sglang",
    21: "nothing is recomputed selectively: a span is rotated whole or prefilled whole",
    23: "free + cached + in use equals the pool after an abort at any step: tests/integrations/sglang",
    24: "a FORGET drops the branch that held the span: tests/integrations/sglang",
}
ROWS: dict[int, Callable[[], None]] = {}


def complaint(number: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(row: Callable[[], None]) -> Callable[[], None]:
        ROWS[number] = row
        return row

    return add


@complaint(1)
def pruning_made_the_next_request_seven_times_dearer() -> None:
    """opencode#32515: the prompt shrank, and the cached tokens went to zero."""
    trace = Trace("t", (*session(30, output_len=2_000), says("done")))
    cost = cost_of(policies.TruncateToolOutputs(), [trace], Renderer(ChunkEncoder()))
    kept = cost_of(policies.DryRun(policies.TruncateToolOutputs()), [trace], Renderer(ChunkEncoder()))
    assert cost.reprefill_tokens > 2 * kept.reprefill_tokens
    assert cost.splice_tokens < 1.2 * kept.splice_tokens
    edit = MessageEdit(3, "", mode=Mode.AUTO)
    dear = explain(edit, CostFacts(tokens_after=200_000, tokens_removed=500, amortize_available=False))
    assert dear.mode is None
    assert "more than" in dear.why, "the cost is known before the edit is made"


@complaint(2)
def a_counter_in_the_placeholder_changed_bytes_every_turn() -> None:
    """tetsuo-ai/agenc-core#2244, #2252."""

    def counting(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        old = [m for m in messages if m["role"] == "tool"][:-5]
        for message in old:
            message["content"] = f"[{len(old)} results cleared]"
        return messages

    with pytest.raises(AssertionError, match="edited differently"):
        assert_prefix_stable(counting, [session(12)])
    assert_prefix_stable(policies.ClearToolUses(trigger=300, keep=5, clear_at_least=0), [session(12)])


@complaint(3)
def the_drop_point_moved_every_turn() -> None:
    """qwen-code#8464, LLMKube#1286: clear down to a low mark, then hold."""
    history = [session(60)]
    creeping = assert_prefix_stable(policies.TruncateToolOutputs(), history)
    for policy in (
        policies.TokenBudget(high_tokens=2_000, low_tokens=1_000),
        policies.Hysteresis(policies.TruncateToolOutputs(max_chars=20), min_tokens=1_000),
        policies.SlidingWindow(keep_turns=10, step=10),
    ):
        assert assert_prefix_stable(policy, history).moved <= 8 < creeping.moved


@complaint(4)
def edits_and_cache_expiry_were_not_aligned() -> None:
    """claude-code#94177: a prune two calls after an expiry cost what it could have had for nothing."""
    policy = policies.WhenCold(policies.TruncateToolOutputs(), idle_s=300)
    turn = Turn(tuple(session(10, 2_000)), index=4, idle_s=10.0)
    assert policy.decide(turn) == []
    assert len(policy.decide(Turn(turn.messages, index=4, idle_s=400.0))) == 8
    facts = CostFacts(tokens_after=80_000, tokens_removed=500, suffix_is_cold=True)
    assert choose(MessageEdit(3, "", mode=Mode.AUTO), facts) is Mode.FORGET


@complaint(5)
def the_model_ran_cleared_tools_again() -> None:
    """wave-agent#1276: 106 calls, 96 cleared, and read again."""
    clear = policies.ClearToolUses(trigger=0, keep=1, clear_at_least=0)
    history = [user(), *step("read_file", "a " * 300, path="a"), *step("run", "b " * 300, command="b")]
    history += [*step("run", "b " * 300, command="b"), says("ok"), user(), *step("ls", "c"), says("ok"), user()]
    shown = apply_edits(history, policies.Protect(clear).decide(Turn(tuple(history))))
    assert shown.messages[2] is history[2], "the latest read of a file stays"
    assert shown.messages[6] is history[6], "what was asked for twice stays"
    assert shown.messages[4] is not history[4]


@complaint(6)
def the_placeholder_looked_like_a_failed_tool() -> None:
    """HKUDS/nanobot#4647: the model chased it."""
    completed = [text for text in OF_OUTPUTS if "completed" in text]
    assert completed
    assert not any(looks_failed({"role": "tool", "content": text}) for text in completed)
    with pytest.raises(ConfigError, match="reads like a failure"):
        policies.ClearToolUses(placeholder="Error: output not available")


@complaint(7)
def the_cut_kept_a_result_without_its_call() -> None:
    """langchain#38352, #34282, deepagents#270."""
    history = session(6)
    plan = plan_edits(history, [MessageEdit(k, None, Part.MESSAGE) for k in (2, 3, 4)])  # between call 4 and result 5
    assert plan.view.sources == (0, 1, *range(4, 14)), "the whole exchange goes, the half one stays"
    assert check_history(plan.view.messages) == []
    assert "orphan_result" in plan.refused[0].reason
    window = policies.SlidingWindow(keep_turns=2, step=1)
    assert all(not check_history(turn.view.messages) for turn in replay(window, history))


@complaint(8)
def compaction_left_orphans_and_the_session_was_bricked() -> None:
    """openclaw#3243, #4839, #28377, #93320; agent-os#3170; maki#641: siblings, interrupted turns."""
    siblings = [user(), calls(("a", {}), ("b", {}), ("c", {})), result("1", "c0"), user("stop")]
    orphan = [user(), result("of nobody", "gone"), says("ok"), user()]
    late = [user(), calls(("a", {})), user("wait"), says("ok"), result("late", "c0"), user()]
    for history in (siblings, orphan, late):
        assert check_history(history)
        mended = plan_edits(history, repair_history(history).edits)
        assert mended.refused == ()
        assert check_history(mended.view.messages) == []
    shown = apply_edits(late, repair_history(late).edits).messages
    assert [m.get("content") for m in shown] == ["Do it.", None, "late", "wait", "ok", "Do it."]


@complaint(9)
def removal_by_id_failed_where_ids_were_missing() -> None:
    """langchain#29086, langgraph#5112, langgraphjs#1152: edits go by position, and twice is once."""
    history: list[dict[str, Any]] = [user()]
    for k in range(5):
        call = {"type": "function", "function": {"name": "read", "arguments": f'{{"path": "{k}"}}'}}
        history += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x " * 300}]
    clear = policies.ClearToolUses(trigger=0, keep=1, clear_at_least=0)
    edits = clear.decide(Turn(tuple(history)))
    assert [edit.index for edit in edits] == [2, 4, 6, 8]
    assert list(clear.decide(Turn(tuple(history), edits=tuple(edits)))) == list(edits)


@complaint(10)
def the_stored_state_differed_from_what_was_sent() -> None:
    """langchain#37815, #39265: both follow from the log."""
    history, log = session(12), EditLog()
    turns = list(replay(policies.Summarize(trigger=500, keep_turns=2, batch_turns=3), history))
    for turn in turns:
        log.record(turn.turn.index, turn.turn.messages, turn.edits)
    stored = EditLog.from_lines(list(log.to_lines()))
    for turn in turns:
        assert apply_edits(turn.turn.messages, stored.in_force(turn.turn.index)).messages == turn.view.messages
        assert stored.restore(turn.view.messages, turn.turn.index) == list(turn.turn.messages)


@complaint(11)
def an_empty_think_block_in_the_generation_prompt_cost_the_whole_tail() -> None:
    """Qwen3#1826: it is a tiny deletion, and the tail stays."""
    prompt, think, answer, tail = range(1_000), [1, 2, 3, 4], range(2_000, 2_050), range(3_000, 3_900)
    base = [*prompt, *think, *answer, *tail]
    edited = [*prompt, *answer, *tail, *range(5_000, 5_020)]
    plan = plan_tokens(base, edited)
    assert plan.directives == DirectiveSet.of(Directive(1_000, 1_004))
    assert len(plan.new_tokens) == 20


@complaint(12)
def reasoning_stripped_on_replay_made_every_turn_miss() -> None:
    """opencode#19081, oh-my-pi#3541, ds4#56: an edit like any other, whose mode is said."""
    history = [user()]
    for k in range(6):
        history += [says(f"answer {k} " * 20, reasoning_content=f"thought {k} " * 50), user("next")]
    trace = Trace("t", (*history, says("end")))
    cost = cost_of(policies.ClearThinking(keep=1), [trace], Renderer(ChunkEncoder()))
    assert cost.edits == 5
    assert cost.splice_tokens < cost.reprefill_tokens
    assert policies.ClearThinking().mode is Mode.AMORTIZE


@complaint(13)
def clients_altered_timestamps_inside_old_messages() -> None:
    """ds4#364, #378; Kai#349: a changed history is diffed like any other."""
    before = [system("Now: 12:00. " + "rules " * 200), user("hi"), says("hello"), user("next")]
    after = [system("Now: 12:05. " + "rules " * 200), *before[1:]]
    edits = diff_messages(before, after)
    assert [(edit.index, edit.part) for edit in edits] == [(0, Part.CONTENT)]
    render = Renderer(ChunkEncoder())
    plan = plan_tokens(render.prompt(before), render.prompt(after))
    assert sum(len(d.replacement) for d in plan.directives) + len(plan.new_tokens) <= 2


@complaint(14)
def repeating_an_exact_prefix_was_a_mismatch() -> None:
    """ds4#668: a rewind drops the end and prefills nothing."""
    base = list(range(48_000))
    plan = plan_tokens(base, base[:40_000])
    assert (plan.base_len, len(plan.directives), plan.new_tokens) == (40_000, 0, ())


@complaint(16)
def bookkeeping_after_a_shift_removed_valid_tokens() -> None:
    """llama.cpp#12160, #14059: several spans at once equal one after the other, from the right."""
    base = list(range(40))
    spans = DirectiveSet.of(Directive(3, 9, (90,)), Directive(12, 12, (91, 92, 93)), Directive(20, 33))
    naive = list(base)
    for directive in reversed(spans):
        naive[directive.start : directive.end] = directive.replacement
    assert spans.apply(base) == naive
    for run in spans.kept_runs(len(base)):
        assert naive[run.new_start : run.new_end] == base[run.start : run.end]


@complaint(18)
def quality_fell_after_shifts_and_nobody_knew() -> None:
    """llama.cpp#6002, #19915; LMCache#4666: a model that does not bear it is not amortized."""
    facts = CostFacts(tokens_after=30_000, tokens_removed=5_000, turns_left=100)
    edit = MessageEdit(3, "", mode=Mode.AUTO)
    assert choose(edit, facts) is Mode.AMORTIZE
    bad = CostModel(turns_left=100, fidelity=FidelityReport(0.56, probes=16)).facts(30_000, 5_000)
    assert choose(edit, bad) is not Mode.AMORTIZE
    assert "56%" in explain(edit, bad).why


@complaint(22)
def encoding_again_what_was_decoded_changed_ids() -> None:
    """trl#5224, vllm#28185, verl#6719: the base is what was sampled, so a different split is a small splice."""
    base = [*range(500), 7, 8, 9, *range(1_000, 1_400)]
    rendered = [*range(500), 78, 9, *range(1_000, 1_400), *range(2_000, 2_010)]
    plan = plan_tokens(base, rendered)
    assert plan.directives == DirectiveSet.of(Directive(500, 502, (78,)))
    assert len(plan.new_tokens) == 10


@complaint(25)
def tokens_were_counted_without_tools_or_with_cache_totals() -> None:
    """langchain#34664, openclaw#99864: the server's own prompt count decides."""
    budget = policies.TokenBudget(high_tokens=3_000, low_tokens=1_500, keep_turns=1)
    history = (*session(20), says("ok"), user())
    assert budget.decide(Turn(history, usage=Usage(prompt_tokens=1_000, cached_tokens=900_000))) == []
    assert budget.decide(Turn(history, usage=Usage(prompt_tokens=4_000)))
    tools = ({"type": "function", "function": {"name": "t", "description": "d" * 8_000}},)
    assert budget.decide(Turn(history)) == []
    assert budget.decide(Turn(history, tools=tools))


@pytest.mark.parametrize("number", range(1, 26))
def test_complaint(number: int) -> None:
    if number in SERVER_ONLY:
        pytest.skip(SERVER_ONLY[number])
    ROWS[number]()


def test_every_complaint_has_a_row_or_a_reason() -> None:
    assert set(ROWS) | set(SERVER_ONLY) == set(range(1, 26))
    assert not set(ROWS) & set(SERVER_ONLY)
