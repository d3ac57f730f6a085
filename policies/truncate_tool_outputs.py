"""Cut old tool outputs short: the paper's ten-line rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import text_of, tool_uses, with_text
from leyline_agent.policies.outputs import check_names, touched_before
from leyline_agent.policies.placeholders import CUT_FAILURE, CUT_OUTPUT, is_placeholder, looks_failed
from leyline_agent.policy import Policy

_REASON = "stale_tool_output"


@dataclass(frozen=True)
class TruncateToolOutputs(Policy):
    """Cut tool outputs older than `keep_turns` turns to `max_chars` characters and a marker.

    The outputs of the last `keep_turns` turns stay whole; one that the model has not seen yet is never cut. An output
    that the cut would not shorten stays as it is.

    Cache: one splice per output that ages out, each turn: what lies after it moves, nothing else is prefilled. With
    re-prefill everything after it is paid for again; `Hysteresis` around this policy makes that rare.
    """

    keep_turns: int = 2
    max_chars: int = 200
    exclude_tools: tuple[str, ...] = ()
    text_protocol: bool = False
    """Treat user messages that answer an action in an assistant's text as tool outputs."""
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if self.keep_turns < 1:
            raise ConfigError(f"keep_turns is {self.keep_turns}; keep at least the 1 newest turn, still to be answered")
        if self.max_chars < 0:
            raise ConfigError(f"max_chars is {self.max_chars}; it must be 0 or more")
        check_names("exclude_tools", self.exclude_tools)

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        edits = []
        cut_before = touched_before(turn, _REASON)
        for use in tool_uses(turn.messages, text_protocol=self.text_protocol):
            if use.result_at is None or use.name in self.exclude_tools:
                continue
            if use.age < self.keep_turns and use.result_at not in cut_before:
                continue
            result = turn.messages[use.result_at]
            text = text_of(result.get("content"))
            if text is None or is_placeholder(text):
                continue
            short = text[: self.max_chars] + (CUT_FAILURE if looks_failed(result) else CUT_OUTPUT)
            if len(short) < len(text):
                new = with_text(result["content"], short)
                edits.append(MessageEdit(use.result_at, new, mode=self.mode, reason=_REASON))
        return edits
