"""Drop outputs that an identical call gave again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import text_of, tool_uses
from leyline_agent.policies.outputs import clear_output
from leyline_agent.policies.placeholders import REPEATED_ABOVE, REPEATED_BELOW
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class DropRepeats(Policy):
    """Show the output of identical calls with identical outputs once.

    `keep="last"` keeps the newest, where the model looks for it; `keep="first"` keeps the oldest.

    Cache: with "last", one splice when a repeat arrives. With "first" nothing that was served is ever edited: the
    repeat is replaced before the model sees it, and costs neither a splice nor a prefill of its text.
    """

    keep: Literal["first", "last"] = "last"
    min_chars: int = 200
    """Shorter outputs are left alone: an "OK" of a call that changes something is no repeat."""
    text_protocol: bool = False
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if self.keep not in ("first", "last"):
            raise ConfigError(f'keep is {self.keep!r}; it must be "first" or "last"')
        if self.min_chars < 0:
            raise ConfigError(f"min_chars is {self.min_chars}; it must be 0 or more")

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        uses = tool_uses(turn.messages, text_protocol=self.text_protocol)
        placeholder = REPEATED_ABOVE if self.keep == "first" else REPEATED_BELOW
        seen: set[tuple[tuple[str, str], str]] = set()
        edits: list[MessageEdit] = []
        for use in uses if self.keep == "first" else reversed(uses):
            text = text_of(turn.messages[use.result_at].get("content")) if use.result_at is not None else None
            if text is None or len(text) < self.min_chars:
                continue
            if (use.key, text) in seen:
                edit = clear_output(turn.messages, use, mode=self.mode, reason="repeated", placeholder=placeholder)
                edits.extend([edit] if edit is not None else [])
            seen.add((use.key, text))
        return sorted(edits, key=lambda edit: edit.index)
