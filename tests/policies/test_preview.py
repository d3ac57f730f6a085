"""A dry run at the height of messages: what would happen, what it would save, and why not."""

from __future__ import annotations

from dataclasses import replace

from histories import session
from leyline_agent import policies
from leyline_agent.costs import CostModel
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.policies.preview import preview
from leyline_agent.policy import FunctionPolicy

CUT = policies.TruncateToolOutputs(max_chars=20)


def test_a_preview_says_what_is_new_what_is_in_force_and_what_it_saves() -> None:
    first = Turn(tuple(session(4)))
    shown = preview(CUT, first)
    assert [(row.messages, row.mode, row.in_force) for row in shown.rows] == [
        ((3,), Mode.AMORTIZE, False),
        ((5,), Mode.AMORTIZE, False),
    ]
    assert shown.saved_tokens == sum(row.saved_tokens for row in shown.rows) > 100
    later = preview(CUT, Turn(tuple(session(5)), edits=tuple(CUT.decide(first))))
    assert [row.in_force for row in later.rows] == [True, True, False]
    assert "in force: stale_tool_output of message 3" in str(later)


def test_a_preview_says_why_not() -> None:
    auto = replace(CUT, mode=Mode.AUTO)
    shown = preview(auto, Turn(tuple(session(4))), CostModel(turns_left=0))
    assert [row.mode for row in shown.rows] == [None, None]
    assert "more than" in shown.rows[0].why
    assert shown.saved_tokens == 0


def test_a_preview_shows_refusals() -> None:
    drop_results = FunctionPolicy(lambda messages: [m for m in messages if m["role"] != "tool"])
    shown = preview(drop_results, Turn(tuple(session(2))))
    assert all(row.mode is None and "has no result" in row.why for row in shown.rows)
    assert "<br>" in shown._repr_html_()


def test_edits_that_only_work_together_are_one_row() -> None:
    window = policies.SlidingWindow(keep_turns=1, step=1)
    rows = preview(window, Turn(tuple(session(3)))).rows
    assert [row.messages for row in rows] == [(2, 3), (4, 5)]
    assert MessageEdit(2, None, Part.MESSAGE).mode is Mode.AMORTIZE
