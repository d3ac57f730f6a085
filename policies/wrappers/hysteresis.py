"""Wait until the edits are worth it, then make them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.compose import held_edits, is_in_force, tokens_saved, units
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class Hysteresis(Policy):
    """Hold the policy's new edits back until together they save `min_tokens`, then make them in one batch.

    Edits in force stay. A FORGET (a secret, a correction) never waits, and what lies after it comes along for free.
    What the policy takes back is taken back at once.

    Cache: one batch of splices for every `min_tokens` the policy wants gone, instead of one splice a turn. On a server
    without splicing this is what makes such a policy affordable at all.
    """

    policy: Policy
    min_tokens: int = 4_000

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must be at least 1")

    @property
    def name(self) -> str:
        return f"Hysteresis({self.policy.name})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        wanted = self.policy.decide(turn)
        held = held_edits(wanted, turn.edits)
        gain = tokens_saved(turn.messages, wanted, turn.count_tokens) - tokens_saved(
            turn.messages, held, turn.count_tokens
        )
        return wanted if gain >= self.min_tokens else free_riders(wanted, held, turn)


def free_riders(wanted: Sequence[MessageEdit], held: Sequence[MessageEdit], turn: Turn) -> Sequence[MessageEdit]:
    """`held`, and of `wanted` the new FORGET edits with all that lies after the first of them.

    A FORGET prefills everything after it, so that other edits there cost nothing more.
    """
    new_forgets = [e.index for e in wanted if e.mode is Mode.FORGET and not is_in_force(e, turn.edits)]
    if not new_forgets:
        return held
    first = min(new_forgets)
    riders = [e for unit in units(wanted) if all(edit.index >= first for edit in unit) for e in unit]
    taken = {edit.index for edit in riders}
    stay = [e for unit in units(held) if not any(edit.index in taken for edit in unit) for e in unit]
    return [*stay, *riders]
