"""Message edits: what a policy wants the model to see instead of what happened.

Edits are declarative. A policy returns, for the whole original history, the edits that make the view of this turn; an
edit it no longer returns is undone. Messages are OpenAI chat messages (plain mappings) and are never changed in place.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any

from leyline_agent.directives import Mode
from leyline_agent.errors import PolicyError

Message = Mapping[str, Any]
"""One OpenAI chat message: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`, `name`, ..."""


class Part(StrEnum):
    """Which part of a message an edit replaces."""

    CONTENT = "content"
    """The content: new text, new content parts, or None for no content."""

    REASONING = "reasoning_content"
    """The model's reasoning, where the provider keeps it in the history."""

    ARGUMENTS = "arguments"
    """The JSON arguments of one tool call; `call` says which."""

    MESSAGE = "message"
    """The whole message: another message, or None to drop it."""

    INSERT = "insert"
    """A new message before `index`; `index` may be the length of the history."""


@dataclass(frozen=True, slots=True)
class MessageEdit:
    """Replace one part of message `index` of the original history by `new`.

    `reason` is a short word for reports ("stale_tool_output"). Edits that share a `group` are applied all or none: use
    it wherever half an edit would break the history (a tool call and its result, say).
    Raises PolicyError for an edit that cannot be: a negative index, ARGUMENTS without `call`, an insertion of nothing.
    """

    index: int
    new: str | Sequence[Any] | Message | None
    part: Part = Part.CONTENT
    mode: Mode = Mode.AMORTIZE
    reason: str = ""
    call: int | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        if self.index < 0:
            raise PolicyError(f"edit of message {self.index}; messages count from 0")
        if (self.part is Part.ARGUMENTS) != (self.call is not None):
            raise PolicyError(f"edit of message {self.index}: `call` goes with Part.ARGUMENTS, and only with it")
        if self.part is Part.INSERT and not isinstance(self.new, Mapping):
            raise PolicyError(f"edit before message {self.index} inserts {self.new!r}; it must be a message")
        if self.part is Part.MESSAGE and not (self.new is None or isinstance(self.new, Mapping)):
            raise PolicyError(f"edit of message {self.index} replaces it by {self.new!r}; give a message or None")


@dataclass(frozen=True, slots=True)
class View:
    """The messages the model sees, and where each comes from.

    `sources[k]` is the index in the original history of view message `k`, or None for an inserted one.
    `edited[k]` are the edits that touched it. `dropped` are edits that removed whole messages.
    """

    messages: tuple[Message, ...]
    sources: tuple[int | None, ...]
    edited: tuple[tuple[MessageEdit, ...], ...]
    dropped: tuple[MessageEdit, ...] = ()


def apply_edits(messages: Sequence[Message], edits: Sequence[MessageEdit]) -> View:
    """The view of `messages` under `edits`. Messages without an edit are the very same objects.

    Raises PolicyError for an index out of range, a call the message does not have, or two edits of the same part.
    """
    by_index: dict[int, list[MessageEdit]] = defaultdict(list)
    seen: set[tuple[int, Part, int | None]] = set()
    for edit in edits:
        last = len(messages) if edit.part is Part.INSERT else len(messages) - 1
        if edit.index > last:
            raise PolicyError(f"edit of message {edit.index}, but the history has {len(messages)} messages")
        key = (edit.index, edit.part, edit.call)
        if key in seen and edit.part is not Part.INSERT:
            raise PolicyError(f"two edits of the {edit.part} of message {edit.index}; merge them into one")
        seen.add(key)
        by_index[edit.index].append(edit)

    out: list[Message] = []
    sources: list[int | None] = []
    edited: list[tuple[MessageEdit, ...]] = []
    dropped: list[MessageEdit] = []
    for index in range(len(messages) + 1):
        here = by_index.get(index, [])
        for insertion in (e for e in here if e.part is Part.INSERT):
            assert isinstance(insertion.new, Mapping)
            out.append(insertion.new)
            sources.append(None)
            edited.append((insertion,))
        if index == len(messages):
            break
        changes = [e for e in here if e.part is not Part.INSERT]
        message = _edit_message(messages[index], changes)
        if message is None:
            dropped.extend(changes)
            continue
        out.append(message)
        sources.append(index)
        edited.append(tuple(changes))
    return View(tuple(out), tuple(sources), tuple(edited), tuple(dropped))


def _edit_message(message: Message, edits: Sequence[MessageEdit]) -> Message | None:
    if not edits:
        return message
    whole = next((e for e in edits if e.part is Part.MESSAGE), None)
    if whole is not None:
        if len(edits) > 1:
            raise PolicyError(f"message {whole.index} is replaced whole and edited in part as well; do one of the two")
        assert whole.new is None or isinstance(whole.new, Mapping)
        return whole.new
    changed = dict(message)
    for edit in edits:
        if edit.part is Part.ARGUMENTS:
            changed["tool_calls"] = _with_arguments(changed.get("tool_calls") or [], edit)
        elif edit.part is Part.REASONING and edit.new is None:
            changed.pop(Part.REASONING, None)
        else:
            changed[edit.part] = edit.new
    return changed


def _with_arguments(calls: Sequence[Any], edit: MessageEdit) -> list[Any]:
    assert edit.call is not None
    if edit.call >= len(calls):
        raise PolicyError(f"edit of tool call {edit.call} of message {edit.index}, which has {len(calls)} tool calls")
    changed = list(calls)
    call = dict(changed[edit.call])
    call["function"] = {**call.get("function", {}), "arguments": edit.new if edit.new is not None else "{}"}
    changed[edit.call] = call
    return changed


def canonical(message: Message) -> str:
    """A message as JSON with sorted keys: equal strings mean equal messages. None and absent stay different."""
    return json.dumps(message, sort_keys=True, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True)
    raise TypeError(f"a message holds a {type(value).__name__}, which is not JSON: {value!r}")


def diff_messages(
    before: Sequence[Message], after: Sequence[Message], *, mode: Mode = Mode.AMORTIZE, reason: str = ""
) -> list[MessageEdit]:
    """Edits with `apply_edits(before, diff_messages(before, after)).messages == tuple(after)`.

    Messages that stay are matched first; in the gaps between them, messages of equal role are paired in order and
    become edits of the parts that differ, the rest is dropped or inserted.
    """
    keys_before, keys_after = [canonical(m) for m in before], [canonical(m) for m in after]
    edits: list[MessageEdit] = []
    matcher = SequenceMatcher(None, keys_before, keys_after, autojunk=False)
    for tag, i0, i1, j0, j1 in matcher.get_opcodes():
        if tag != "equal":
            edits.extend(_gap_edits(before, after, (i0, i1, j0, j1), mode, reason))
    return edits


def _gap_edits(
    before: Sequence[Message], after: Sequence[Message], gap: tuple[int, int, int, int], mode: Mode, reason: str
) -> list[MessageEdit]:
    i0, i1, j0, j1 = gap
    roles = SequenceMatcher(
        None, [_identity(m) for m in before[i0:i1]], [_identity(m) for m in after[j0:j1]], autojunk=False
    )
    edits: list[MessageEdit] = []
    for tag, a0, a1, b0, b1 in roles.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(i0 + a0, i0 + a1), range(j0 + b0, j0 + b1), strict=True):
                edits.extend(_part_edits(i, before[i], after[j], mode, reason))
            continue
        edits.extend(MessageEdit(i, None, Part.MESSAGE, mode, reason) for i in range(i0 + a0, i0 + a1))
        edits.extend(MessageEdit(i0 + a1, after[j], Part.INSERT, mode, reason) for j in range(j0 + b0, j0 + b1))
    return edits


def _identity(message: Message) -> tuple[Any, Any]:
    return message.get("role"), message.get("tool_call_id")


def _part_edits(index: int, old: Message, new: Message, mode: Mode, reason: str) -> list[MessageEdit]:
    changed = {key for key in {*old, *new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)}
    if changed == {"content"} and "content" in new:
        return [MessageEdit(index, new["content"], Part.CONTENT, mode, reason)]
    return [MessageEdit(index, new, Part.MESSAGE, mode, reason)]


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server reported for the last turn of a session, in tokens."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


def estimate_tokens(text: str) -> int:
    """Tokens in `text` at four characters a token: what `Turn.count_tokens` does when no tokenizer is at hand."""
    return (len(text) + 3) // 4


@dataclass(frozen=True, slots=True)
class Turn:
    """All a policy may look at when it decides. Nothing in it may be changed.

    `messages` is the original history, the newest message last. `edits` are the edits in force on the last turn, so
    that a policy without memory can hold a cut where it was. `index` counts the model calls of the session from 0.
    `usage` is the server's report of the last turn, None on the first or when the server gives none. `idle_s` is the
    time since the last turn ended; `cache_is_cold` is True when the server is known to have lost the session's KV.
    """

    messages: tuple[Message, ...]
    index: int = 0
    edits: tuple[MessageEdit, ...] = ()
    usage: Usage | None = None
    idle_s: float = 0.0
    cache_is_cold: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    count_tokens: Callable[[str], int] = field(default=estimate_tokens, compare=False)
