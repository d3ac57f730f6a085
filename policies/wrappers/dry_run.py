"""See what a policy would do without letting it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class DryRun(Policy):
    """Ask the policy, tell `on_edits`, and edit nothing.

    The policy sees no edits in force, so one that works in batches reports its batch on every turn past its trigger.

    Cache: none.
    """

    policy: Policy
    on_edits: Callable[[Turn, Sequence[MessageEdit]], None] | None = None

    @property
    def name(self) -> str:
        return f"DryRun({self.policy.name})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        edits = self.policy.decide(turn)
        if self.on_edits is not None:
            self.on_edits(turn, edits)
        return ()
