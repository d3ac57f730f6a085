"""What a policy is: a pure function from a turn to message edits.

Two heights: subclass `Policy` for any logic, or pass a plain `messages -> messages` function for a ten-line rule.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Turn, diff_messages
from leyline_agent.errors import PolicyError

MessageFunction = Callable[[list[dict[str, Any]]], Sequence[Message]]


class Policy(ABC):
    """Decides which parts of a history the model should no longer see.

    Concrete policies are frozen dataclasses whose fields are their parameters. `decide` reads the turn, changes none of
    it, keeps no memory, and gives the same edits for the same turn: two sessions may share one policy object.
    """

    default_mode: Mode = Mode.AMORTIZE
    """The mode its edits carry unless a parameter says otherwise."""

    @property
    def name(self) -> str:
        """The name in reports and tables."""
        return type(self).__name__

    @abstractmethod
    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        """All edits that make the view of this turn, in coordinates of `turn.messages`."""


class FunctionPolicy(Policy):
    """A `messages -> messages` function as a policy: its result is diffed against the history.

    The function gets a deep copy and may change it freely. Cost to the cache: whatever the function's edits cost.
    """

    def __init__(self, function: MessageFunction, *, mode: Mode = Mode.AMORTIZE) -> None:
        self.function = function
        self.mode = mode

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        result = self.function([copy.deepcopy(dict(message)) for message in turn.messages])
        if not isinstance(result, Sequence):
            raise PolicyError(f"policy function {self.name} returned {result!r}; it must return a list of messages")
        return diff_messages(turn.messages, result, mode=self.mode, reason=self.name)


class KeepAll(Policy):
    """Edits nothing: the view is the history."""

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:  # noqa: ARG002 (part of the interface)
        return ()


def as_policy(policy: Policy | MessageFunction | None) -> Policy:
    """A Policy from a Policy, a `messages -> messages` function, or None (keep everything)."""
    if policy is None:
        return KeepAll()
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return FunctionPolicy(policy)
    raise PolicyError(f"{policy!r} is not a policy; give a Policy or a function from messages to messages")
