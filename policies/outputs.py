"""What policies about tool outputs share: clearing one, and how long the prompt is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from leyline_agent.compose import message_tokens
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import ToolUse, text_of, with_text
from leyline_agent.policies.placeholders import REMOVED_FAILURE, REMOVED_OUTPUT, is_placeholder, looks_failed


def clear_output(
    messages: Sequence[Message], use: ToolUse, *, mode: Mode, reason: str, placeholder: str = REMOVED_OUTPUT,
    group: str | None = None,
) -> MessageEdit | None:  # fmt: skip
    """The edit that puts a placeholder in the place of an output.

    A failure keeps saying that it failed. None if there is no output, it holds more than text, it is a placeholder
    already, or the placeholder would be no shorter.
    """
    if use.result_at is None:
        return None
    message = messages[use.result_at]
    content = message.get("content")
    text = text_of(content)
    if text is None or is_placeholder(text):
        return None
    new = REMOVED_FAILURE if placeholder == REMOVED_OUTPUT and looks_failed(message) else placeholder
    if len(new) >= len(text):
        return None
    return MessageEdit(use.result_at, with_text(content, new), mode=mode, reason=reason, group=group)


def drop_message(index: int, *, mode: Mode, reason: str, group: str) -> MessageEdit:
    """The edit that drops a whole message, all or none with its group."""
    return MessageEdit(index, None, Part.MESSAGE, mode, reason, group=group)


def touched_before(turn: Turn, reason: str, part: Part = Part.CONTENT) -> set[int]:
    """Messages that an edit for `reason` touched on the last turn: what a policy without memory goes by."""
    return {e.index for e in turn.edits if e.reason == reason and e.part is part}


def prompt_tokens(turn: Turn) -> int:
    """Tokens of this turn's prompt if the edits in force stay and no others come.

    The server's own count of the last prompt where there is one, plus what was added since; else an estimate that
    counts tools and system prompt too.
    """
    if turn.usage is not None and turn.usage.prompt_tokens > 0:
        added = _since_last_call(turn.messages)
        return turn.usage.prompt_tokens + turn.usage.completion_tokens + _count(added, turn)
    dropped = {e.index for e in turn.edits if e.part is Part.MESSAGE and e.new is None}
    contents = {e.index: e.new for e in turn.edits if e.part is Part.CONTENT}
    shown = [
        {**message, "content": contents[index]} if index in contents else message
        for index, message in enumerate(turn.messages)
        if index not in dropped
    ]
    inserted = [e.new for e in turn.edits if e.part is Part.INSERT]
    tools = sum(turn.count_tokens(str(dict(tool))) for tool in turn.tools)
    return tools + _count(shown, turn) + _count(inserted, turn)


def check_names(field: str, names: Any) -> None:
    """Raise ConfigError unless `names` is a collection of strings and not a string itself."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{field} is {names!r}; it must be a tuple of names")


def check_placeholder(placeholder: str) -> None:
    """Raise ConfigError for a placeholder that a model would take for a failed call, or for no output at all."""
    if not placeholder.strip():
        raise ConfigError("placeholder is empty; the model would read a tool that returned nothing")
    if looks_failed({"role": "tool", "content": placeholder}):
        raise ConfigError(f"placeholder {placeholder!r} reads like a failure, so the model would call the tool again")


def _since_last_call(messages: Sequence[Message]) -> Sequence[Message]:
    last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=-1)
    return messages[last + 1 :]


def _count(messages: Iterable[Any], turn: Turn) -> int:
    return sum(message_tokens(message, turn.count_tokens) for message in messages)
