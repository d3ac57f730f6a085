"""What a history must satisfy so that chat templates and providers take it, and what edits may not do to one.

`check_history` looks at messages alone. `check_view` compares a view with the history it was made from: it reports what
the edits broke, and stays silent about what was already broken (`leyline_agent.planner.repair_history` mends that).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from leyline_agent.edits import Message, View
from leyline_agent.history import SYSTEM_ROLES, newest_user, pair_calls, tool_calls


class ViolationKind(StrEnum):
    """What is wrong with a message."""

    MALFORMED = "malformed"
    """No role, or content that is neither text, parts nor absent."""

    ORPHAN_RESULT = "orphan_result"
    """A tool result whose call is not in the assistant message before it."""

    UNANSWERED_CALL = "unanswered_call"
    """A tool call without a result right after it."""

    DUPLICATE_RESULT = "duplicate_result"
    """A second result for one call."""

    BAD_ARGUMENTS = "bad_arguments"
    """Arguments of a tool call that are not a JSON object; templates and servers parse them."""

    EMPTY_MESSAGE = "empty_message"
    """A message that says nothing: an assistant without content and calls, a user or system message without text."""

    SAME_ROLE_TWICE = "same_role_twice"
    """Two user or two assistant messages side by side; strict templates refuse it."""

    FIRST_NOT_USER = "first_not_user"
    """The conversation after the system prompt does not begin with the user."""

    SYSTEM_NOT_FIRST = "system_not_first"
    """A system message behind the conversation's begin."""

    SYSTEM_DROPPED = "system_dropped"
    """The system prompt is gone from the view."""

    NEWEST_USER_DROPPED = "newest_user_dropped"
    """The newest user message is gone from the view, or is no user message any more."""

    ENDS_WITH_ASSISTANT = "ends_with_assistant"
    """The view asks the model to continue an assistant message, which the history did not."""

    REORDERED = "reordered"
    """Messages of the view are not in the order of the history."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with a message. `index` counts in the original history, also for what a view did to it.

    An inserted message has the index of the original message it stands before.
    """

    kind: ViolationKind
    index: int
    message: str

    def __str__(self) -> str:
        return f"message {self.index}: {self.message} ({self.kind})"


def check_history(messages: Sequence[Message]) -> list[Violation]:
    """Everything about `messages` that a provider may answer with an error, in order of the messages."""
    violations = [v for rule in _RULES for v in rule(messages)]
    return sorted(violations, key=lambda v: v.index)


def check_view(original: Sequence[Message], view: View) -> list[Violation]:
    """What the edits behind `view` broke. Empty means that a provider that takes `original` takes the view.

    A fault that `original` already has in the same place is not reported.
    """
    faults = check_history(view.messages)
    if faults:
        already = Counter(check_history(original))
        at = _original_indices(view, len(original))
        faults = [
            moved
            for fault in faults
            if not _take(already, moved := Violation(fault.kind, at[fault.index], fault.message))
            and not _was_so(original, view, fault)
        ]
    return sorted([*faults, *_not_kept(original, view)], key=lambda v: v.index)


def _take(already: Counter[Violation], violation: Violation) -> bool:
    """Whether `violation` is among those, and then one less is."""
    found = already[violation] > 0
    already[violation] -= found
    return found


def _was_so(original: Sequence[Message], view: View, fault: Violation) -> bool:
    """Whether a fault between neighbours of the view was there before, if between other neighbours.

    A history with two user messages in a row is taken by its template; so is the view in which one of them stands
    beside a third.
    """
    roles = [message.get("role") for message in original]
    if fault.kind is ViolationKind.FIRST_NOT_USER:
        return next((role for role in roles if role not in SYSTEM_ROLES), "user") != "user"
    if fault.kind is not ViolationKind.SAME_ROLE_TWICE:
        return False
    left, right = view.sources[fault.index - 1], view.sources[fault.index]
    if left is None or right is None:
        return False
    return roles[left] in roles[left + 1 : left + 2] or roles[right] in roles[max(right - 1, 0) : right]


def _original_indices(view: View, original_len: int) -> list[int]:
    indices = [original_len] * len(view.messages)
    following = original_len
    for k in range(len(view.messages) - 1, -1, -1):
        source = view.sources[k]
        following = following if source is None else source
        indices[k] = following
    return indices


def _not_kept(original: Sequence[Message], view: View) -> Iterator[Violation]:
    kept = {source: k for k, source in enumerate(view.sources) if source is not None}
    places = [source for source in view.sources if source is not None]
    for left, right in pairwise(places):
        if right <= left:
            yield Violation(ViolationKind.REORDERED, right, f"stands behind message {left} in the view")
    if original and original[0].get("role") in SYSTEM_ROLES and not _has_role(view, kept.get(0), SYSTEM_ROLES):
        yield Violation(ViolationKind.SYSTEM_DROPPED, 0, "the system prompt was dropped; edit its text instead")
    newest = newest_user(original)
    if newest is not None and not _has_role(view, kept.get(newest), ("user",)):
        what = "the newest user message was dropped; it is what the model answers"
        yield Violation(ViolationKind.NEWEST_USER_DROPPED, newest, what)
    ends_with_assistant = bool(view.messages) and view.messages[-1].get("role") == "assistant"
    if ends_with_assistant and original[-1].get("role") != "assistant":
        yield Violation(
            ViolationKind.ENDS_WITH_ASSISTANT, len(original) - 1, "everything after an assistant message was dropped"
        )


def _has_role(view: View, k: int | None, roles: Sequence[str]) -> bool:
    return k is not None and view.messages[k].get("role") in roles


def _well_formed(messages: Sequence[Message]) -> Iterator[Violation]:
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(message.get("role"), str):
            yield Violation(ViolationKind.MALFORMED, index, f"role is {message.get('role')!r}")
        if not (content is None or isinstance(content, str) or _is_parts(content)):
            yield Violation(
                ViolationKind.MALFORMED, index, f"content is {type(content).__name__}, not text or a list of parts"
            )


def _is_parts(content: Any) -> bool:
    return isinstance(content, Sequence) and all(isinstance(part, str | Mapping) for part in content)


def _paired(messages: Sequence[Message]) -> Iterator[Violation]:
    pairing = pair_calls(messages)
    for index in pairing.orphans:
        call_id = messages[index].get("tool_call_id")
        yield Violation(ViolationKind.ORPHAN_RESULT, index, f"result of call {call_id!r}, which is not before it")
    for index in pairing.duplicates:
        call_id = messages[index].get("tool_call_id")
        yield Violation(ViolationKind.DUPLICATE_RESULT, index, f"second result of call {call_id!r}")
    for use in pairing.uses:
        if use.result_at is None:
            name = use.name or "a tool"
            yield Violation(
                ViolationKind.UNANSWERED_CALL, use.call_at, f"call {use.call_id!r} of {name} has no result after it"
            )


def _arguments(messages: Sequence[Message]) -> Iterator[Violation]:
    for index, message in enumerate(messages):
        for call in tool_calls(message):
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str) and not _is_json_object(arguments):
                yield Violation(ViolationKind.BAD_ARGUMENTS, index, "arguments of a tool call are not a JSON object")


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _not_empty(messages: Sequence[Message]) -> Iterator[Violation]:
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            empty = not content and not message.get("tool_calls") and not message.get("function_call")
        elif role == "tool":
            empty = content is None  # an empty string is how a silent tool answers
        else:
            empty = not content
        if empty:
            yield Violation(ViolationKind.EMPTY_MESSAGE, index, f"{role} message without content")


def _alternating(messages: Sequence[Message]) -> Iterator[Violation]:
    talk = [(i, m.get("role")) for i, m in enumerate(messages) if m.get("role") not in SYSTEM_ROLES]
    if talk and talk[0][1] != "user":
        yield Violation(ViolationKind.FIRST_NOT_USER, talk[0][0], f"the conversation begins with role {talk[0][1]!r}")
    for (_, before), (index, role) in pairwise(talk):
        if role == before and role in ("user", "assistant"):
            yield Violation(ViolationKind.SAME_ROLE_TWICE, index, f"second {role} message in a row")
    for index, message in enumerate(messages):
        if message.get("role") in SYSTEM_ROLES and talk and index > talk[0][0]:
            yield Violation(ViolationKind.SYSTEM_NOT_FIRST, index, "system message inside the conversation")


_RULES: tuple[Callable[[Sequence[Message]], Iterator[Violation]], ...] = (
    _well_formed,
    _paired,
    _arguments,
    _not_empty,
    _alternating,
)
