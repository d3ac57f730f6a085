"""The ways to serve a history whose past is edited. They are compared with each other on the same server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.policy import Policy


class Arm(StrEnum):
    """One way to serve a history."""

    NONE = "none"
    """No policy: the whole history, a prefix hit on every turn."""

    REPREFILL = "reprefill"
    """The policy's view as a plain request: the prefix cache serves what stands before the first edit."""

    AMORTIZE = "amortize"
    """The policy through Leyline: the server splices its cache."""

    PREPARE = "amortize+prepare"
    """AMORTIZE, with the edits sent ahead while the tools run."""

    FORGET = "forget"
    """The policy through Leyline with every edit in mode FORGET: as exact as re-prefill."""

    @property
    def has_leyline(self) -> bool:
        """Whether requests carry directives."""
        return self in (Arm.AMORTIZE, Arm.PREPARE, Arm.FORGET)

    @property
    def mode(self) -> Mode:
        """The mode of its edits."""
        return Mode.FORGET if self is Arm.FORGET else Mode.AMORTIZE


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Arms from names separated by commas. Raises ConfigError for a name that is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in list(Arm):
            raise ConfigError(f"no arm is called {name!r}; there are {', '.join(Arm)}")
    if not names:
        raise ConfigError(f"no arm named; there are {', '.join(Arm)}")
    return tuple(Arm(name) for name in dict.fromkeys(names))


@dataclass(frozen=True)
class InMode(Policy):
    """Another policy's edits, all in one mode. Cache: what that mode costs."""

    inner: Policy
    mode: Mode

    @property
    def name(self) -> str:
        return f"{self.inner.name}, {self.mode}"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        return [replace(edit, mode=self.mode) for edit in self.inner.decide(turn)]
