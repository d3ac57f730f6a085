"""Mend a broken history before anything else is done to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.planner import repair_history
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class RepairHistory(Policy):
    """Give every call a result and every result its call, so that no provider refuses the history.

    For agents that interrupt turns or compact on their own: a late result moves to its call, an orphan is dropped, a
    call that never got a result gets one that says so (see `repair_history`). Put it first in a chain.

    Cache: nothing on a valid history. A repair is a FORGET, since the broken turn was hardly ever served; it lies near
    the end when it is made, so that little is prefilled, and holds still from then on.
    """

    default_mode = Mode.FORGET

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        return repair_history(turn.messages).edits
