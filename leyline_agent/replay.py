"""Walk a recorded history as an agent would have: turn by turn, with a policy deciding before each model call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_agent.compose import message_tokens
from leyline_agent.edits import Message, MessageEdit, Turn, Usage, View, estimate_tokens
from leyline_agent.planner import Refusal, plan_edits
from leyline_agent.policy import Policy


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One turn: what the policy was asked, what it returned, what came of it, and the answer in the recording.

    `answer` is None for the turn at the end of a history that stops before the model answered.
    """

    turn: Turn
    returned: tuple[MessageEdit, ...]
    edits: tuple[MessageEdit, ...]
    view: View
    refused: tuple[Refusal, ...]
    answer: Message | None

    @property
    def at(self) -> int:
        """How many messages of the history the turn had."""
        return len(self.turn.messages)


def replay(
    policy: Policy,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    count_tokens: Callable[[str], int] = estimate_tokens,
    with_usage: bool = True,
) -> Iterator[ReplayedTurn]:
    """The turns of a history: one before each assistant message, and one at the end if something is left to answer.

    Edits in force are carried from turn to turn as a session does; `with_usage` also reports to the policy what a
    server would have counted. Raises what the policy raises.
    """
    edits: tuple[MessageEdit, ...] = ()
    usage: Usage | None = None
    stops = [i for i, message in enumerate(messages) if i and message.get("role") == "assistant"]
    if messages and messages[-1].get("role") != "assistant":
        stops.append(len(messages))
    for index, at in enumerate(stops):
        turn = Turn(tuple(messages[:at]), index, edits, usage, tools=tuple(tools), count_tokens=count_tokens)
        returned = tuple(policy.decide(turn))
        plan = plan_edits(turn.messages, returned)
        answer = messages[at] if at < len(messages) else None
        yield ReplayedTurn(turn, returned, plan.edits, plan.view, plan.refused, answer)
        edits = plan.edits
        if with_usage:
            prompt = sum(message_tokens(message, count_tokens) for message in plan.view.messages)
            prompt += sum(count_tokens(str(dict(tool))) for tool in tools)
            usage = Usage(prompt, 0, message_tokens(answer, count_tokens) if answer is not None else 0)
