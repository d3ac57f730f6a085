"""Keep the head of a history and its newest turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import blocks, newest_user
from leyline_agent.policies.outputs import drop_message, touched_before
from leyline_agent.policy import Policy

_REASON = "outside_window"


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """Keep the system prompt, the task, the first `head_turns` turns and at least the last `keep_turns`; drop the rest.

    A turn is an assistant message with its tool results and what the user then said. The cut moves in steps of `step`
    turns, so it holds still in between: the view has between `keep_turns` and `keep_turns + step - 1` turns behind its
    head. The turn that holds the newest user message always stays.

    Cache: every `step` turns the messages of `step` turns go, in one splice. With AMORTIZE the model still carries what
    it concluded from them; with FORGET the whole window is prefilled again, every `step` turns.
    """

    keep_turns: int = 20
    step: int = 10
    head_turns: int = 0
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if self.keep_turns < 1 or self.step < 1 or self.head_turns < 0:
            raise ConfigError(
                f"keep_turns {self.keep_turns}, step {self.step}, head_turns {self.head_turns}: "
                "the first two must be at least 1, the last 0 or more"
            )

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        turns = blocks(turn.messages)
        excess = len(turns) - self.head_turns - self.keep_turns
        cut = max(0, excess) // self.step * self.step
        newest = newest_user(turn.messages)
        before = touched_before(turn, _REASON, Part.MESSAGE)
        return [
            drop_message(index, mode=self.mode, reason=_REASON, group=f"{_REASON}:{block.start}")
            for number, block in enumerate(turns)
            if (self.head_turns <= number < self.head_turns + cut or block.start in before) and newest not in block
            for index in block
        ]
