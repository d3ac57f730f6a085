"""Costs of a policy on a trace, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from histories import says, session, step, user
from leyline_agent import policies
from leyline_agent.directives import Mode
from leyline_agent.errors import HistoryError
from leyline_agent.policy import KeepAll
from leyline_agent.simulate import ChunkEncoder, Renderer, compare, cost_of, simulate
from leyline_agent.traces import Trace, read_traces

TRACE = Trace("t", (*session(6, output_len=400), says("done")))


def turns(policy: Any, trace: Trace = TRACE) -> list[Any]:
    return [step for step, _ in simulate(policy, trace, Renderer(ChunkEncoder()))]


def test_without_edits_only_new_tokens_are_prefilled() -> None:
    render = Renderer(ChunkEncoder())
    kept = cost_of(KeepAll(), [TRACE], render)
    everything = len(render.prompt(TRACE.messages[:-1]))
    answers = sum(len(render.message(m)) for m in TRACE.messages[:-1] if m["role"] == "assistant")
    assert kept.reprefill_tokens == kept.splice_tokens == everything - answers
    assert (kept.edits, kept.prefix_breaks, kept.turns_untouched, kept.turns) == (0, 0, 1.0, 7)


def test_a_cut_costs_its_tail_with_reprefill_and_its_replacement_with_splice() -> None:
    plain, cut = turns(KeepAll()), turns(policies.TruncateToolOutputs(keep_turns=2, max_chars=40))
    assert [turn.breaks for turn in cut] == [False, False, False, True, True, True, True]
    for before, now in zip(plain[3:], cut[3:], strict=True):
        inserted = now.splice_tokens - before.splice_tokens
        assert 10 < inserted < 40, "the marker, less what it shares with the output"
        assert now.reprefill_tokens > 200
        assert now.removed_tokens > 0


def test_forget_is_exact_and_pays_like_reprefill() -> None:
    amortized = turns(policies.TruncateToolOutputs())
    exact = turns(policies.TruncateToolOutputs(mode=Mode.FORGET))
    assert [t.splice_tokens for t in exact] == [t.reprefill_tokens for t in exact]
    assert [t.reprefill_tokens for t in exact] == [t.reprefill_tokens for t in amortized]


def test_forget_after_a_splice_prefills_all_that_is_amortized() -> None:
    key = "sk-" + "x" * 24
    history = [*session(6)[:-2], *step("env", f"key {key}", ids="k"), says("a"), user("b"), says("c")]
    history[10]["content"] = "late secret"  # read before, redacted only once the policy knows the word
    late = policies.Chain(
        policies.TruncateToolOutputs(keep_turns=1),
        policies.OnlyWhen(policies.Redact(patterns=("late secret",)), lambda turn: turn.index >= 6),
    )
    costs = turns(late, Trace("t", tuple(history)))
    forgetting = costs[6]
    assert forgetting.splice_tokens > forgetting.reprefill_tokens


def test_totals_add_up_over_traces() -> None:
    policy = policies.TruncateToolOutputs()
    one = cost_of(policy, [TRACE], Renderer(ChunkEncoder()))
    assert cost_of(policy, [TRACE, TRACE], Renderer(ChunkEncoder())) == one + one
    assert compare({"p": policy}, [TRACE])["p"] == one
    assert one.to_json()["edits"] == one.edits == 4


def test_the_last_answer_counts_and_an_open_end_does_not() -> None:
    open_end = Trace("t", TRACE.messages[:-1])
    assert cost_of(KeepAll(), [open_end], Renderer(ChunkEncoder())).turns == 6


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "not JSON"),
        ('{"id": 1}', "no list"),
        ('{"messages": [{"content": "x"}]}', "without a role"),
        ("", "no traces"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, line: str, word: str) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(line)
    with pytest.raises(HistoryError, match=word):
        list(read_traces(file))
    with pytest.raises(HistoryError, match="cannot read"):
        list(read_traces(tmp_path / "missing.jsonl"))


def test_traces_carry_their_tools(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps({"id": "a", "messages": [user()], "tools": [{"type": "function"}]}) + "\n\n")
    (trace,) = read_traces(file)
    assert (trace.id, trace.source, trace.tools) == ("a", "traces", ({"type": "function"},))
