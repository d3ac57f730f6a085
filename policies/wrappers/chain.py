"""One policy after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leyline_agent.compose import compose, project
from leyline_agent.edits import MessageEdit, Turn, apply_edits
from leyline_agent.policy import MessageFunction, Policy, as_policy


@dataclass(frozen=True, init=False)
class Chain(Policy):
    """Each policy sees the view that those before it made; `Chain(a, b)` edits as `a` and then `b`.

    Where two edit one message, the later one's edit holds, with the stricter mode of both. Plain functions from
    messages to messages may stand in the chain too.

    Cache: what the policies cost, in one set of splices a turn. One FORGET among the new edits makes the turn a FORGET.
    """

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy | MessageFunction) -> None:
        object.__setattr__(self, "policies", tuple(as_policy(policy) for policy in policies))

    @property
    def name(self) -> str:
        return f"Chain({', '.join(policy.name for policy in self.policies)})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        edits: Sequence[MessageEdit] = ()
        for policy in self.policies:
            view = apply_edits(turn.messages, edits)
            in_force = project(turn.edits, edits, view, len(turn.messages))
            more = policy.decide(replace(turn, messages=view.messages, edits=tuple(in_force)))
            edits = compose(turn.messages, edits, more)
        return edits
