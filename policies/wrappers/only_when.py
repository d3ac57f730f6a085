"""Edit on some turns only, and hold still on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline_agent.compose import held_edits
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class OnlyWhen(Policy):
    """Let the policy make new edits when `condition(turn)` is true; otherwise leave its edits as they are.

    Cache: nothing moves on a turn on which the condition is false.
    """

    policy: Policy
    condition: Callable[[Turn], bool]

    @property
    def name(self) -> str:
        return f"OnlyWhen({self.policy.name})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        wanted = self.policy.decide(turn)
        return wanted if self.condition(turn) else held_edits(wanted, turn.edits)
