"""Reading a history: which result answers which call, how old a message is, what it says.

Everything here takes messages as they come (ids missing or repeated, turns interrupted, fields unknown) and answers
without raising: what is not understood is left out, and so never edited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_agent.edits import Message, canonical

SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call and, once it is there, its result.

    `call_at` is the index of the assistant message, `call` the place in its `tool_calls`; in a text protocol, where an
    action stands in the text and the observation is a user message, `call` is None. `result_at` is the index of the
    result, None while there is none. `age` counts the model calls since the result arrived: 0 means that no model has
    seen it yet.
    """

    call_at: int
    call: int | None
    result_at: int | None
    call_id: str | None
    name: str
    arguments: str
    age: int

    @property
    def key(self) -> tuple[str, str]:
        """Equal keys mean the same call: the name, and the arguments whatever their spacing and order."""
        return self.name, _normal_json(self.arguments)


@dataclass(frozen=True, slots=True)
class Pairing:
    """What pairing found: every call in order, and results that answer no call or one that has its answer."""

    uses: tuple[ToolUse, ...]
    orphans: tuple[int, ...]
    duplicates: tuple[int, ...]


def pair_calls(messages: Sequence[Message]) -> Pairing:
    """Pair calls and results as a chat template sees them: a result belongs to the assistant message before its run.

    By id where both have one (the first call that waits, so ids may repeat), otherwise in order.
    """
    ages = message_ages(messages)
    uses: list[ToolUse] = []
    orphans: list[int] = []
    duplicates: list[int] = []
    waiting: list[int] = []  # places in `uses` that still have no result, of the current run
    answered: set[str | None] = set()
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            result_id = message.get("tool_call_id")
            place = _find_waiting(uses, waiting, result_id)
            if place is None:
                (duplicates if result_id is not None and result_id in answered else orphans).append(index)
                continue
            waiting.remove(place)
            answered.add(uses[place].call_id)
            uses[place] = _answered(uses[place], index, ages[index])
            continue
        waiting, answered = [], set()
        for position, call in enumerate(tool_calls(message)):
            waiting.append(len(uses))
            uses.append(_new_use(index, position, call))
    return Pairing(tuple(uses), tuple(orphans), tuple(duplicates))


def tool_uses(messages: Sequence[Message], *, text_protocol: bool = False) -> list[ToolUse]:
    """The tool uses of a history, in order of their calls.

    With `text_protocol`, a user message that answers an assistant message with an action in its text (a fenced block,
    an `Action:` line, an `<execute>`-like tag) is a result as well. It is off by default because in a plain chat such
    a user message is a person.
    """
    uses = list(pair_calls(messages).uses)
    if text_protocol:
        ages = message_ages(messages)
        for index, message in enumerate(messages[:-1]):
            answer = messages[index + 1]
            if message.get("role") != "assistant" or answer.get("role") != "user" or tool_calls(message):
                continue
            action = _text_action(text_of(message.get("content")) or "")
            if action is not None:
                uses.append(ToolUse(index, None, index + 1, None, *action, ages[index + 1]))
        uses.sort(key=lambda use: (use.call_at, use.call or 0))
    return uses


def speaks_text_protocol(messages: Sequence[Message]) -> bool:
    """Whether a history has no tool calls at all, and most of its assistant messages hold an action in their text."""
    if any(m.get("role") == "tool" or tool_calls(m) for m in messages):
        return False
    texts = [text_of(m.get("content")) or "" for m in messages if m.get("role") == "assistant"]
    return bool(texts) and 2 * sum(_text_action(text) is not None for text in texts) > len(texts)


def tool_calls(message: Message) -> Sequence[Mapping[str, Any]]:
    """The tool calls of an assistant message, () for any other and for calls in a shape we do not know."""
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
        return ()
    return calls if all(isinstance(call, Mapping) for call in calls) else ()


def message_ages(messages: Sequence[Message]) -> list[int]:
    """For each message, how many model calls have come after it (for an assistant message, after itself)."""
    ages = [0] * len(messages)
    later = 0
    for index in range(len(messages) - 1, -1, -1):
        ages[index] = later
        later += messages[index].get("role") == "assistant"
    return ages


def head_len(messages: Sequence[Message]) -> int:
    """Messages before the first assistant message: the system prompt and the task."""
    return next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))


def blocks(messages: Sequence[Message]) -> list[range]:
    """The history behind its head, cut before each assistant message.

    A block is an assistant message, its results and what the user then said. Blocks can be left out of the middle
    whole without orphaning a result or putting two messages of one role side by side.
    """
    starts = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(messages)], strict=True)] if starts else []


def newest_user(messages: Sequence[Message]) -> int | None:
    """Index of the newest user message."""
    return next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "user"), None)


def text_of(content: Any) -> str | None:
    """The text of a content, joined when it comes in parts; None if it is absent or holds anything but text."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and content and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return None


def with_text(content: Any, text: str) -> str | list[dict[str, Any]]:
    """`text` in the shape of `content`: a string for a string, one text part for parts."""
    return text if isinstance(content, str) else [{"type": "text", "text": text}]


def texts_in(message: Message) -> Iterator[str]:
    """Every piece of text of a message that the model reads, tool calls included: what token counts are made of."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        yield from (part["text"] for part in content if _is_text_part(part))
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        yield reasoning
    for call in tool_calls(message):
        yield _function(call, "name")
        yield _function(call, "arguments")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _new_use(index: int, position: int, call: Mapping[str, Any]) -> ToolUse:
    call_id = call.get("id")
    return ToolUse(
        index, position, None, call_id if isinstance(call_id, str) else None,
        _function(call, "name"), _function(call, "arguments"), 0,
    )  # fmt: skip


def _answered(use: ToolUse, index: int, age: int) -> ToolUse:
    return ToolUse(use.call_at, use.call, index, use.call_id, use.name, use.arguments, age)


def _function(call: Mapping[str, Any], key: str) -> str:
    function = call.get("function")
    value = function.get(key) if isinstance(function, Mapping) else None
    return value if isinstance(value, str) else "" if value is None else canonical({key: value})


def _find_waiting(uses: Sequence[ToolUse], waiting: Sequence[int], result_id: Any) -> int | None:
    for place in waiting:
        if result_id is None or uses[place].call_id == result_id:
            return place
    return next((place for place in waiting if uses[place].call_id is None), None)


def _normal_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text.strip()


_ACTION = re.compile(
    r"```[^\n`]*\n(?P<fence>.*?)```"
    r"|^Action:[ \t]*(?P<line>[^\n]+)"
    r"|<(?:execute\w*|function|tool_call|invoke)\b[^>]*>(?P<tag>[^<]*)",
    re.DOTALL | re.MULTILINE,
)


def _text_action(text: str) -> tuple[str, str] | None:
    """(first word, rest) of the last action in an assistant's text."""
    found = [match.groups() for match in _ACTION.finditer(text)]
    if not found:
        return None
    action = next(group for group in found[-1] if group is not None).strip()
    name, _, rest = action.partition(" ")
    return name.strip(), rest.strip()
