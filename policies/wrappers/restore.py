"""Bring back what was removed, when the model asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from leyline_agent.compose import filter_units
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.history import tool_uses
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class Restore(Policy):
    """Withdraw the policy's edits of the messages that `wanted(turn)` names: the view shows them as they were.

    `wanted` must keep naming a message once it did, or the text would come and go; a function of the history, such as
    `asked_for()`, does.

    Cache: bringing a span back is a splice like taking it out; the span itself is prefilled.
    """

    policy: Policy
    wanted: Callable[[Turn], Collection[int]]

    @property
    def name(self) -> str:
        return f"Restore({self.policy.name})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        back = self.wanted(turn)
        wanted = self.policy.decide(turn)
        return filter_units(wanted, turn.edits, lambda unit: not any(edit.index in back for edit in unit))


def asked_for(tool: str = "restore_output", argument: str = "call_id") -> Callable[[Turn], set[int]]:
    """The results whose call the model named in a call of `tool`, by the id of the call it wants to see again.

    Give the model such a tool (it may return anything; "restored above" will do), and what it asks for comes back.
    """

    def wanted(turn: Turn) -> set[int]:
        uses = tool_uses(turn.messages)
        ids = {_argument(use.arguments, argument) for use in uses if use.name == tool}
        return {use.result_at for use in uses if use.result_at is not None and use.call_id in ids}

    return wanted


def _argument(arguments: str, name: str) -> str | None:
    try:
        value = json.loads(arguments).get(name)
    except (ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None
