"""Replace old turns by a summary of them, a batch at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_agent.compose import units
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, Turn
from leyline_agent.errors import ConfigError, PolicyError
from leyline_agent.history import blocks, head_len, newest_user, text_of, tool_uses
from leyline_agent.policies.outputs import drop_message, prompt_tokens
from leyline_agent.policy import Policy

_REASON = "summarized"
_HEADING = "Summary of earlier work, of which the details were removed to save context:\n"
_GO_ON = "Go on from this summary."
PROMPT = (
    "Summarize the work above for yourself, so that you can go on with it from the summary alone: the goal, what was "
    "found and decided, names and values that will be needed, what failed, what is left to do. No preamble."
)

Summarizer = Callable[[Sequence[Message]], str]


def outline(messages: Sequence[Message]) -> str:
    """A summary without a model: what was said after the task, the first line of each message, and the calls made."""
    calls: dict[int, list[str]] = defaultdict(list)
    for use in tool_uses(messages):
        calls[use.call_at].append(f"- called {use.name}({use.arguments})"[:120])
    lines = []
    for index in range(head_len(messages), len(messages)):
        role, text = messages[index].get("role"), text_of(messages[index].get("content")) or ""
        if role in ("assistant", "user") and text.strip():
            lines.append(f"- {role}: {text.strip().splitlines()[0][:120]}")
        lines.extend(calls[index])
    return "\n".join(lines)


def chat_summarizer(client: Any, model: str, *, prompt: str = PROMPT, max_tokens: int = 1024) -> Summarizer:
    """A summarizer from any OpenAI-compatible client: `client.chat.completions.create` is all that is used.

    Give it the stock client, not one that has this policy. The request begins as the agent's own does, so that the
    agent's cache serves most of it.
    """

    def summarize(messages: Sequence[Message]) -> str:
        request = [dict(message) for message in messages]
        if request and request[-1].get("role") == "user" and isinstance(request[-1].get("content"), str):
            request[-1]["content"] += "\n\n" + prompt
        else:
            request.append({"role": "user", "content": prompt})
        answer = client.chat.completions.create(model=model, messages=request, max_tokens=max_tokens, temperature=0)
        return answer.choices[0].message.content or ""

    return summarize


@dataclass(frozen=True)
class Summarize(Policy):
    """When the prompt passes `trigger` tokens, replace all turns but the newest `keep_turns` by one summary.

    Only if these are at least `batch_turns` turns: a summary for every turn past the trigger would be a creeping cut.

    `model` is any function from messages (the system prompt, the task, the turns to replace) to text:
    `chat_summarizer(client, "name")`, or the default `outline`, which needs no model. A summary is written once and
    then stays, word for word; the next batch adds a second one behind it. The system prompt, the task and the turn with
    the newest user message stay. If the model gives no text, the policy raises PolicyError and the turn goes on with
    the last good view.

    Cache: one splice per batch, which prefills the summary. With AMORTIZE the turns after it keep what they knew of the
    details.
    """

    model: Summarizer = outline
    trigger: int = 50_000
    keep_turns: int = 5
    batch_turns: int = 5
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise ConfigError(f"model is {self.model!r}; give a function from messages to a summary")
        for name, least in (("trigger", 0), ("keep_turns", 1), ("batch_turns", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        held = [edit for edit in turn.edits if edit.reason == _REASON]
        if prompt_tokens(turn) <= self.trigger:
            return held
        gone = {edit.index for edit in held if edit.part is Part.MESSAGE}
        newest = newest_user(turn.messages)
        old = [
            block
            for block in blocks(turn.messages)[: -self.keep_turns]
            if newest not in block and block.start not in gone
        ]
        if len(old) < self.batch_turns:
            return held
        return [*held, *self._batch(turn, [index for block in old for index in block], len(units(held)))]

    def _batch(self, turn: Turn, old: Sequence[int], number: int) -> list[MessageEdit]:
        head = turn.messages[: head_len(turn.messages)]
        summary = self.model([*head, *(turn.messages[index] for index in old)]).strip()
        if not summary:
            raise PolicyError(f"the summarizer returned no text for messages {old[0]} to {old[-1]}")
        group = f"{_REASON}:{number}"
        pair = ({"role": "assistant", "content": _HEADING + summary}, {"role": "user", "content": _GO_ON})
        inserted = [MessageEdit(old[0], message, Part.INSERT, self.mode, _REASON, group=group) for message in pair]
        return [*inserted, *(drop_message(i, mode=self.mode, reason=_REASON, group=group) for i in old)]
