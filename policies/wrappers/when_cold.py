"""Edit when it costs nothing, because the cache is cold anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leyline_agent.compose import held_edits, is_in_force
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.policies.wrappers.hysteresis import free_riders
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class WhenCold(Policy):
    """Let the policy make new edits only when the server has lost the session's KV, and then exactly (FORGET).

    Cold means: the manager says so, the session's first call, or `idle_s` seconds without one (the server's eviction
    or TTL). Edits in force stay in between. A FORGET of the policy (a secret) never waits.

    Cache: none. The turn is prefilled whole in any case, and the shorter prompt makes that cheaper.
    """

    policy: Policy
    idle_s: float = 300.0

    def __post_init__(self) -> None:
        if self.idle_s <= 0:
            raise ConfigError(f"idle_s is {self.idle_s}; it must be above 0")

    @property
    def name(self) -> str:
        return f"WhenCold({self.policy.name})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        wanted = self.policy.decide(turn)
        if turn.cache_is_cold or turn.idle_s >= self.idle_s or turn.index == 0:
            return [edit if is_in_force(edit, turn.edits) else replace(edit, mode=Mode.FORGET) for edit in wanted]
        return free_riders(wanted, held_edits(wanted, turn.edits), turn)
