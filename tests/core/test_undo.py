"""The edit log: what was removed can be brought back."""

from __future__ import annotations

import pytest

from histories import result, says, session, step, system, user
from leyline_agent.edits import MessageEdit, Part, apply_edits
from leyline_agent.errors import HistoryError
from leyline_agent.undo import EditLog


def test_every_removed_text_is_in_the_log() -> None:
    history = session(4)
    log = EditLog()
    log.record(0, history, [MessageEdit(3, "[cleared]")])
    log.record(1, history, [MessageEdit(3, "[cleared]"), MessageEdit(5, None, Part.MESSAGE)])
    assert log.original(3) == history[3]
    assert log.original(5) == history[5]
    with pytest.raises(HistoryError, match="never edited"):
        log.original(7)


def test_only_changes_make_entries() -> None:
    history, edit, log = session(3), MessageEdit(3, "[cleared]"), EditLog()
    assert log.record(0, history, []) is None
    assert log.record(1, history, [edit]) is not None
    assert log.record(2, history, [edit]) is None
    taken_back = log.record(3, history, [])
    assert taken_back is not None
    assert taken_back.undone == (edit,)
    assert log.in_force(2) == (edit,)
    assert log.in_force() == ()


def test_restoring_keeps_what_came_after() -> None:
    history = [system(), user(), *step("a", "long output"), says("ok"), user()]
    log = EditLog()
    log.record(0, history, [MessageEdit(2, None, Part.MESSAGE), MessageEdit(3, None, Part.MESSAGE)])
    view = [*apply_edits(history, log.in_force()).messages, says("new"), user("newer")]
    assert log.restore(view) == [*history, says("new"), user("newer")]


def test_a_view_that_is_too_short_is_refused() -> None:
    history, log = session(3), EditLog()
    log.record(0, history, [MessageEdit(3, "[cleared]"), MessageEdit(7, "[cleared]")])
    with pytest.raises(HistoryError, match="ends before"):
        log.restore(history[:3])


def test_parts_and_repeats_of_one_text_are_kept_apart() -> None:
    history = [user(), *step("a", "same"), *step("a", "same"), result("same", "odd")]
    log = EditLog()
    log.record(0, history, [MessageEdit(2, "x"), MessageEdit(4, [{"type": "text", "text": "y"}])])
    again = EditLog.from_lines(log.to_lines())
    assert again == log
    assert again.restore(apply_edits(history, log.in_force()).messages) == history
