"""Drop failed calls that a later attempt made good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import ToolUse, tool_calls, tool_uses
from leyline_agent.policies.outputs import clear_output, drop_message
from leyline_agent.policies.placeholders import RETRIED, looks_failed
from leyline_agent.policy import Policy

_REASON = "failed_retry"


@dataclass(frozen=True)
class DropFailedRetries(Policy):
    """Drop a failed call once the same call has succeeded.

    `match="arguments"` asks for the same tool with the same arguments; `match="tool"` takes the next success of the
    tool within `within_turns` turns, for agents that correct their arguments. A call that stands alone in a message
    without text goes whole, with its result; otherwise its output is replaced by a line that says it failed and was
    retried.

    Cache: one splice per failed call, a turn or a few after it, so that little lies after it. AMORTIZE lets the model
    keep what it learned from the failure; FORGET takes that away too.
    """

    match: Literal["arguments", "tool"] = "arguments"
    within_turns: int = 3
    text_protocol: bool = False
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if self.match not in ("arguments", "tool"):
            raise ConfigError(f'match is {self.match!r}; it must be "arguments" or "tool"')
        if self.within_turns < 1:
            raise ConfigError(f"within_turns is {self.within_turns}; it must be at least 1")

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        messages = turn.messages
        answered = [u for u in tool_uses(messages, text_protocol=self.text_protocol) if u.result_at is not None]
        good = [use for use in answered if use.result_at is not None and not looks_failed(messages[use.result_at])]
        edits: list[MessageEdit] = []
        for use in answered:
            failed = use not in good and use.age > 0
            if failed and any(self._makes_good(later, use) for later in good):
                edits.extend(self._drop(messages, use))
        return edits

    def _makes_good(self, later: ToolUse, failed: ToolUse) -> bool:
        if later.call_at <= failed.call_at or later.name != failed.name:
            return False
        if self.match == "arguments":
            return later.key == failed.key
        return failed.age - later.age <= self.within_turns

    def _drop(self, messages: Sequence[Message], use: ToolUse) -> list[MessageEdit]:
        if use.result_at is not None and _stands_alone(messages, use):
            group = f"{_REASON}:{use.call_at}"
            indices = (use.call_at, use.result_at)
            return [drop_message(index, mode=self.mode, reason=_REASON, group=group) for index in indices]
        edit = clear_output(messages, use, mode=self.mode, reason=_REASON, placeholder=RETRIED)
        return [] if edit is None else [edit]


def _stands_alone(messages: Sequence[Message], use: ToolUse) -> bool:
    """Whether call and result can go without a trace: one call, no text or reasoning, an assistant message next."""
    call = messages[use.call_at]
    following = messages[use.call_at + 2 : use.call_at + 3]
    return (
        use.result_at == use.call_at + 1
        and len(tool_calls(call)) == 1
        and not call.get("content")
        and not call.get("reasoning_content")
        and bool(following)
        and following[0].get("role") == "assistant"
    )
