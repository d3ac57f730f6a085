"""What a recorded history sends turn by turn under a policy: decided once, so that every arm sends the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.edits import Message, MessageEdit, Turn, canonical
from leyline_agent.planner import plan_edits
from leyline_agent.policy import Policy
from leyline_agent.replay import ReplayedTurn, replay
from leyline_agent.traces import Trace


@dataclass(frozen=True, slots=True)
class Step:
    """One model call of a history.

    `messages` is the original history before it, `view` what the policy makes of it through `edits`. `edited` says that
    the view is not the last one with messages added: something already served changed. `ahead` are the edits the policy
    makes of the history up to the last answer, which is known while the tools run, and `ahead_len` is its length.
    """

    index: int
    messages: tuple[Message, ...]
    view: tuple[Message, ...]
    edits: tuple[MessageEdit, ...]
    edited: bool
    ahead: tuple[MessageEdit, ...] = ()
    ahead_len: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """All model calls of one history."""

    id: str
    steps: tuple[Step, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def write_script(policy: Policy, trace: Trace, *, first: int = 0, max_turns: int | None = None) -> Script:
    """Walk a trace with a policy; every recorded model call is a turn, and one at the end that has no answer yet.

    `first` turns are left out at the beginning, and at most `max_turns` are played.
    """
    turns = list(replay(policy, trace.messages, tools=trace.tools))[first:]
    turns = turns[:max_turns]
    steps: list[Step] = []
    before: ReplayedTurn | None = None
    for turn in turns:
        view = turn.view.messages
        step = Step(
            index=len(steps),
            messages=turn.turn.messages,
            view=view,
            edits=turn.edits,
            edited=before is not None and not _extends(view, before.view.messages),
        )
        if before is not None:
            step = _with_ahead(step, before, policy)
        steps.append(step)
        before = turn
    return Script(trace.id, tuple(steps), trace.tools)


def _with_ahead(step: Step, before: ReplayedTurn, policy: Policy) -> Step:
    length = before.at + 1
    turn = Turn(step.messages[:length], step.index, before.edits, before.turn.usage, tools=before.turn.tools)
    ahead = plan_edits(turn.messages, tuple(policy.decide(turn))).edits
    return Step(step.index, step.messages, step.view, step.edits, step.edited, ahead, length)


def _extends(view: Sequence[Message], earlier: Sequence[Message]) -> bool:
    return len(view) >= len(earlier) and all(
        ours is theirs or canonical(ours) == canonical(theirs) for ours, theirs in zip(view, earlier, strict=False)
    )


@dataclass(frozen=True)
class Scripted(Policy):
    """Returns what was decided when the script was written, looked up by the length of the history.

    Cache: whatever the recorded edits cost.
    """

    edits: Mapping[int, tuple[MessageEdit, ...]] = field(repr=False)

    @classmethod
    def of(cls, script: Script) -> Scripted:
        """The decisions of a script."""
        ahead = {step.ahead_len: step.ahead for step in script.steps if step.ahead_len}
        return cls(ahead | {len(step.messages): step.edits for step in script.steps})

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        return self.edits.get(len(turn.messages), ())
