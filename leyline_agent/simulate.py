"""What a policy would have cost and saved on a recorded history, without a server.

A turn is the prompt before an assistant message. Prompts are rendered with a plain template of our own (a delimiter,
the role, what the message says, a delimiter) and tokenized message by message, so that numbers compare policies; they
are not those of a particular model. The base of a turn is the prompt before it and the answer recorded after that.

- with re-prefill, a turn prefills all behind the longest common prefix of base and prompt: what a prefix cache does;
- with splice, it prefills the replacements and what follows the last kept token, as `plan_tokens` finds them. A turn on
  which a FORGET edit comes into force is served exactly: it prefills all behind the common prefix, and behind the first
  token that is amortized from earlier splices.

The first prompt of a trace is prefilled whole in both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from leyline_agent.compose import is_in_force
from leyline_agent.diff import TokenPlan, plan_tokens
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, canonical
from leyline_agent.history import text_of, tool_calls
from leyline_agent.policy import Policy
from leyline_agent.replay import ReplayedTurn, replay
from leyline_agent.traces import Trace

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One turn of one trace, in tokens. `breaks` says that the prompt does not extend the base."""

    history_tokens: int
    prompt_tokens: int
    new_edits: int
    breaks: bool
    reprefill_tokens: int
    splice_tokens: int

    @property
    def removed_tokens(self) -> int:
        """By how much the prompt is shorter than without the policy."""
        return self.history_tokens - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Totals of a policy over the turns of all traces."""

    traces: int = 0
    turns: int = 0
    history_tokens: int = 0
    """Tokens of all prompts without the policy."""
    prompt_tokens: int = 0
    """Tokens of all prompts with it."""
    removed_tokens: int = 0
    """Prompt tokens not sent, over all turns: an output that is gone counts on every turn it would have been sent."""
    removed_at_end: int = 0
    """Tokens by which the last prompts of the traces are shorter."""
    edits: int = 0
    """Edits that came into force; one that stays counts once."""
    edited_turns: int = 0
    """Turns on which an edit came into force or was taken back."""
    prefix_breaks: int = 0
    """Turns whose prompt does not extend the base."""
    reprefill_tokens: int = 0
    """Tokens prefilled on a server with a prefix cache."""
    splice_tokens: int = 0
    """Tokens prefilled on a server that splices."""
    refused: int = 0
    """Sets of edits refused because they would have broken the history."""

    @property
    def turns_untouched(self) -> float:
        """Share of turns on which nothing already served was touched."""
        return 1 - self.prefix_breaks / self.turns if self.turns else 1.0

    def __add__(self, other: PolicyCost) -> PolicyCost:
        return PolicyCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_json(self) -> dict[str, float]:
        """The totals by name, and the share of turns untouched."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "turns_untouched": self.turns_untouched}


@dataclass(slots=True)
class Renderer:
    """Our plain template: messages to tokens, each message on its own and remembered."""

    encode: Encode
    _memory: dict[str, list[int]] = field(default_factory=dict)

    def message(self, message: Message) -> list[int]:
        """Tokens of one message; a delimiter keeps it apart from its neighbours."""
        key = canonical(message)
        if key not in self._memory:
            self._memory[key] = [_BEGIN, *self.encode(_text(message)), _END]
        return self._memory[key]

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Tokens of a prompt, without the header of the answer."""
        return [token for message in messages for token in self.message(message)]

    def count(self, text: str) -> int:
        """Tokens in `text`, for the policies' own budgets."""
        key = f"\0{text}"
        if key not in self._memory:
            self._memory[key] = [len(self.encode(text))]
        return self._memory[key][0]


_BEGIN, _END = 1 << 40, (1 << 40) + 1  # beyond any vocabulary


def _text(message: Message) -> str:
    content = message.get("content")
    text = text_of(content)
    pieces = [
        str(message.get("role")),
        text if text is not None else canonical({"content": content}) if content else "",
    ]
    if message.get("reasoning_content"):
        pieces.insert(1, f"<think>{message['reasoning_content']}</think>")
    pieces.extend(canonical(call) for call in tool_calls(message))
    return "\n".join(pieces)


class ChunkEncoder:
    """Four characters a token, equal chunks equal ids: an estimate for when there is no tokenizer."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        return [self._ids.setdefault(text[i : i + 4], len(self._ids)) for i in range(0, len(text), 4)]


def simulate(policy: Policy, trace: Trace, renderer: Renderer) -> Iterator[tuple[SimulatedTurn, ReplayedTurn]]:
    """The turns of a trace under a policy, with what each would prefill."""
    base: list[int] = []
    before: tuple[MessageEdit, ...] = ()
    amortized_from: int | None = None
    for turn in replay(policy, trace.messages, tools=trace.tools, count_tokens=renderer.count):
        if turn.answer is None:  # nobody called the model here
            return
        prompt = renderer.prompt(turn.view.messages)
        new = [edit for edit in turn.edits if not is_in_force(edit, before)]
        undone = [edit for edit in before if not is_in_force(edit, turn.edits)]
        plan = plan_tokens(base, prompt)
        breaks = bool(plan.directives) or plan.base_len < len(base)
        common = plan.directives[0].start if plan.directives else plan.base_len
        spliced = sum(len(d.replacement) for d in plan.directives) + len(plan.new_tokens)
        if breaks and any(edit.mode is Mode.FORGET for edit in (*new, *undone)):
            exact = common if amortized_from is None else min(common, amortized_from)
            spliced, amortized_from = len(prompt) - exact, None
        elif plan.directives:
            amortized_from = _first_amortized(plan, amortized_from)
        yield (
            SimulatedTurn(
                history_tokens=len(renderer.prompt(turn.turn.messages)),
                prompt_tokens=len(prompt),
                new_edits=len(new),
                breaks=breaks,
                reprefill_tokens=len(prompt) - common,
                splice_tokens=spliced,
            ),
            turn,
        )
        base = prompt + renderer.message(turn.answer)
        before = turn.edits


def _first_amortized(plan: TokenPlan, known: int | None) -> int:
    first = plan.directives[0]
    start = first.start + len(first.replacement)
    return start if known is None else min(start, known)


def cost_of(policy: Policy, traces: Iterable[Trace], renderer: Renderer) -> PolicyCost:
    """A policy's totals over `traces`."""
    totals = dict.fromkeys((f.name for f in fields(PolicyCost)), 0)
    for trace in traces:
        steps = list(simulate(policy, trace, renderer))
        totals["traces"] += 1
        for step, turn in steps:
            totals["turns"] += 1
            for name in ("history_tokens", "prompt_tokens", "removed_tokens", "reprefill_tokens", "splice_tokens"):
                totals[name] += getattr(step, name)
            totals["edits"] += step.new_edits
            totals["prefix_breaks"] += step.breaks
            totals["refused"] += len(turn.refused)
        totals["removed_at_end"] += steps[-1][0].removed_tokens if steps else 0
        totals["edited_turns"] += _edited_turns([turn for _, turn in steps])
    return PolicyCost(**totals)


def _edited_turns(turns: Sequence[ReplayedTurn]) -> int:
    force = [(), *(turn.edits for turn in turns)]
    return sum(
        any(not is_in_force(e, before) for e in now) or any(not is_in_force(e, now) for e in before)
        for before, now in pairwise(force)
    )


def compare(
    policies: Mapping[str, Policy],
    traces: Sequence[Trace],
    encode: Encode | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> dict[str, PolicyCost]:
    """Each policy's totals over the same traces. `progress` is told the name of each policy as it is begun."""
    renderer = Renderer(encode or ChunkEncoder())
    costs = {}
    for name, policy in policies.items():
        if progress is not None:
            progress(name)
        costs[name] = cost_of(policy, traces, renderer)
    return costs


def to_json(costs: Mapping[str, PolicyCost]) -> str:
    """`{"policies": {name: totals}}`."""
    return json.dumps({"policies": {name: cost.to_json() for name, cost in costs.items()}}, indent=2)
