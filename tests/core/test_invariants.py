"""Which histories providers refuse, and what edits may not do to one."""

from __future__ import annotations

from typing import Any

import pytest

from histories import calls, result, says, step, system, user
from leyline_agent.edits import MessageEdit, Part, View, apply_edits
from leyline_agent.invariants import ViolationKind as Kind
from leyline_agent.invariants import check_history, check_view

TWO: list[tuple[str, dict[str, Any]]] = [("a", {}), ("b", {})]


def drop(*indices: int) -> list[MessageEdit]:
    return [MessageEdit(index, None, Part.MESSAGE) for index in indices]


@pytest.mark.parametrize(
    ("messages", "kinds"),
    [
        ([], []),
        ([system(), user(), says("hi"), user()], []),
        ([user(), calls(*TWO), result("1", "c1"), result("0", "c0")], []),
        ([user(), *step("a", ""), says("ok")], []),
        ([user(), *step("a", "1", ids="x"), *step("a", "2", ids="x")], []),  # ids may repeat
        (
            [
                user(),
                {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]},
                {"role": "tool", "content": ""},
            ],
            [],
        ),
        ([user(), calls(*TWO), result("0", "c0"), user()], [Kind.UNANSWERED_CALL]),
        ([user(), calls(("a", {}))], [Kind.UNANSWERED_CALL]),
        ([user(), result("0", "gone"), says("ok")], [Kind.ORPHAN_RESULT]),
        ([user(), calls(("a", {})), user(), result("0")], [Kind.UNANSWERED_CALL, Kind.ORPHAN_RESULT]),
        ([user(), *step("a", "1"), result("again")], [Kind.DUPLICATE_RESULT]),
        ([user(), user()], [Kind.SAME_ROLE_TWICE]),
        ([user(), says("a"), says("b")], [Kind.SAME_ROLE_TWICE]),
        ([says("a"), user()], [Kind.FIRST_NOT_USER]),
        ([user(), system(), says("a")], [Kind.SYSTEM_NOT_FIRST]),
        ([user(), {"role": "assistant", "content": None}], [Kind.EMPTY_MESSAGE]),
        ([user("")], [Kind.EMPTY_MESSAGE]),
        ([{"content": "no role"}, user()], [Kind.MALFORMED, Kind.FIRST_NOT_USER]),
        ([{"role": "user", "content": 3}], [Kind.MALFORMED]),
    ],
)
def test_histories(messages: list[dict[str, Any]], kinds: list[Kind]) -> None:
    assert [violation.kind for violation in check_history(messages)] == kinds


@pytest.mark.parametrize("arguments", ["", "[]", "{", "not json"])
def test_arguments_must_be_a_json_object(arguments: str) -> None:
    call = {"id": "c0", "function": {"name": "a", "arguments": arguments}}
    history = [user(), {"role": "assistant", "tool_calls": [call]}, result("x")]
    assert [v.kind for v in check_history(history)] == [Kind.BAD_ARGUMENTS]


HISTORY = [
    system(),
    user("task"),
    *step("a", "1"),
    says("half"),
    user("go on"),
    calls(*TWO),
    result("0"),
    result("1", "c1"),
]


@pytest.mark.parametrize(
    ("edits", "kinds"),
    [
        ([], []),
        (drop(2, 3), []),
        (drop(6, 7, 8), []),
        ([MessageEdit(3, "[cleared]")], []),
        (drop(2), [Kind.ORPHAN_RESULT]),
        (drop(3), [Kind.UNANSWERED_CALL, Kind.SAME_ROLE_TWICE]),
        (drop(8), [Kind.UNANSWERED_CALL]),
        (drop(0), [Kind.SYSTEM_DROPPED]),
        (drop(1, 2, 3), [Kind.FIRST_NOT_USER]),
        (drop(5), [Kind.NEWEST_USER_DROPPED, Kind.SAME_ROLE_TWICE]),
        (drop(2, 3, 4), [Kind.SAME_ROLE_TWICE]),
        ([MessageEdit(5, "")], [Kind.EMPTY_MESSAGE]),
        ([MessageEdit(3, None)], [Kind.EMPTY_MESSAGE]),
        ([MessageEdit(2, "x", Part.ARGUMENTS, call=0)], [Kind.BAD_ARGUMENTS]),
        ([MessageEdit(4, {"role": "system", "content": "x"}, Part.INSERT)], [Kind.SYSTEM_NOT_FIRST]),
        ([MessageEdit(9, {"role": "assistant", "content": "x"}, Part.INSERT)], [Kind.ENDS_WITH_ASSISTANT]),
        ([MessageEdit(5, {"role": "assistant", "content": "x"}, Part.MESSAGE)], None),
    ],
)
def test_views(edits: list[MessageEdit], kinds: list[Kind] | None) -> None:
    found = [violation.kind for violation in check_view(HISTORY, apply_edits(HISTORY, edits))]
    assert found == kinds if kinds is not None else Kind.NEWEST_USER_DROPPED in found


def test_what_was_broken_before_is_not_blamed_on_the_edits() -> None:
    history = [user(), user(), calls(*TWO), result("0"), user("stop"), says("ok"), user()]
    assert check_history(history)
    assert check_view(history, apply_edits(history, [MessageEdit(3, "[cleared]")])) == []
    worse = check_view(history, apply_edits(history, drop(3)))
    assert [(v.kind, v.index) for v in worse] == [(Kind.UNANSWERED_CALL, 2)]


def test_indices_are_those_of_the_original_history() -> None:
    history = [user(), *step("a", "1"), *step("a", "2"), says("ok"), user()]
    violations = check_view(history, apply_edits(history, drop(1, 2, 3)))
    assert [(v.kind, v.index) for v in violations] == [(Kind.ORPHAN_RESULT, 4)]
    assert "message 4" in str(violations[0])


def test_a_reordered_view_is_seen() -> None:
    history = [user("a"), says("b"), user("c")]
    view = View((history[2], history[1], history[0]), (2, 1, 0), ((), (), ()))
    assert Kind.REORDERED in {violation.kind for violation in check_view(history, view)}
