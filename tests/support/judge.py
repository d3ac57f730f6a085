"""A conversation with the reference's cache beside it: after every turn, the server's log-probs against the truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyline_agent.directives import Directive, DirectiveSet, Mode
from reference import TRUTH, KvState, ReferenceModel, Rule
from splice_client import Answer, Conversation, Marks, SpliceClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from leyline_agent.report import TurnReport

TOLERANCE = 1e-4
"""fp32, in nats, for every log-prob of every step. Measured agreement is about 2e-5."""


def gap(answer: Answer, expected: Tensor) -> float:
    """The largest difference between any log-prob of the server and the expected one [steps, V]."""
    found = torch.tensor(answer.log_probs, dtype=torch.float64)
    assert found.shape == expected.shape, f"log-probs {tuple(found.shape)}, expected {tuple(expected.shape)}"
    return (found - expected).abs().max().item()


def assert_exact(model: ReferenceModel, answer: Answer) -> None:
    """The answer is that of a fresh prefill of its prompt, step by step."""
    worst = gap(answer, model.empty().log_probs(answer.prompt, answer.output))
    assert worst < TOLERANCE, f"off a fresh prefill by {worst:.2g} nats"


@dataclass(frozen=True)
class Judged:
    """A turn, what the cache in front of it should have been, and what would have followed from a fresh prefill."""

    answer: Answer
    before: KvState
    """The reference's cache of the base."""
    directives: DirectiveSet
    spliced: KvState
    """The same after the directives: what the server reuses."""

    @property
    def rest(self) -> tuple[int, ...]:
        """Prompt tokens behind what is reused."""
        return self.answer.prompt[len(self.spliced) :]

    def gap(self, rule: Rule = TRUTH) -> float:
        """How far the server is from the reference, or from a reference that splices by another `rule`."""
        spliced = self.spliced if rule is TRUTH else self.before.splice(self.directives, rule)
        return gap(self.answer, spliced.log_probs(self.rest, self.answer.output))

    def check(self) -> None:
        """Assert that every log-prob is that of the reference."""
        worst = self.gap()
        assert worst < TOLERANCE, f"off the reference by {worst:.2g} nats"

    def gap_to_exact(self) -> float:
        """How far the server is from a fresh prefill of the prompt: what amortizing changed."""
        return gap(self.answer, self.before.model.empty().log_probs(self.answer.prompt, self.answer.output))


def reused_state(before: KvState, marks: Marks, edits: DirectiveSet, report: TurnReport, cached: int) -> KvState:
    """What the server reused for a turn if its report is true, however much had been evicted by then.

    `before` is the KV of the whole base, `marks` are its marks. The report says how much of each run stands moved; the
    rest of the run was computed behind it. Without an edit, marks that changed end where other tokens were computed
    than those of `before`. A turn without amortized KV is exact, whatever it reused.
    """
    if not report.amortized:
        return before.model.empty()
    if not edits:
        return before.head(cached if report.marks == tuple(marks) else min(cached, report.marks[-1][0]))
    state = before.head(edits[0].start)
    ends = [*(directive.start for directive in edits[1:]), len(before)]
    shift = 0
    for directive, outcome, end in zip(edits, report.directives, ends, strict=True):
        shift += directive.delta
        copied = directive.end + outcome.moved
        state = state.extend(directive.replacement)
        state = before.moved_onto(state, directive.end, copied, shift)
        state = state.extend(before.tokens[copied:end])
    return state.head(cached)


class JudgedConversation(Conversation):
    """`turn` also keeps the reference's cache; `state` is the KV that the server must be holding for the base.

    A turn is expected to be spliced in full, as in a cache without pressure. Where that cannot be expected,
    `by_report=True` takes the report's word for how much was reused; the log-probs then show whether that was true.
    """

    def __init__(self, server: SpliceClient, model: ReferenceModel, *, by_report: bool = False, **fields: Any) -> None:
        super().__init__(server, **fields)
        self.by_report = by_report
        self.state = model.empty()
        self.last: Judged | None = None

    def fork(self) -> JudgedConversation:
        other = type(self)(self.server, self.state.model, by_report=self.by_report, **self.fields)
        other.base, other.marks, other.dp_rank = list(self.base), self.marks, self.dp_rank
        other.state, other.last = self.state, self.last
        return other

    def turn(self, new_tokens: Sequence[int], *directives: Directive, max_new_tokens: int = 8, **fields: Any) -> Answer:
        base, marks = self.base, self.marks
        answer = super().turn(new_tokens, *directives, max_new_tokens=max_new_tokens, **fields)
        self.follow(base, DirectiveSet(directives), answer, marks)
        return answer

    def follow(self, base: Sequence[int], edits: DirectiveSet, answer: Answer, marks: Marks = ()) -> Judged:
        """Do in the reference what the server did when it applied `edits` to `base`, which had `marks`."""
        if self.by_report:
            spliced = reused_state(self._whole(base), marks, edits, answer.the_report, answer.cached)
        elif edits.mode is Mode.FORGET or answer.reasons:
            spliced = self.state.model.empty()
        else:
            spliced = self.splice(edits)
        self.last = Judged(answer, self.state, edits, spliced)
        self.state = spliced.extend([*self.last.rest, *answer.output[:-1]])
        return self.last

    def splice(self, edits: DirectiveSet) -> KvState:
        """The cache of the base after `edits`, all of them applied in full."""
        return self.state.splice(edits)

    def _whole(self, base: Sequence[int]) -> KvState:
        return self.state.extend(base[len(self.state) :])  # somebody else may have computed the last token

    def judged_turn(self, new_tokens: Sequence[int], *directives: Directive, **fields: Any) -> Judged:
        """A turn whose directives must all be applied, and whose every log-prob must be that of the reference."""
        answer = self.turn(new_tokens, *directives, **fields)
        assert answer.the_report.fallbacks == ()
        assert self.last is not None
        self.last.check()
        return self.last

    def prepare(self, *directives: Directive) -> TurnReport:
        """Have `directives` applied ahead of the turn; the base is the edited one afterwards."""
        edits = DirectiveSet(directives)
        edited = edits.apply(self.base)
        report = self.server.prepare(edited, self.request(*directives), **self.fields)
        self.state = reused_state(self._whole(self.base), self.marks, edits, report, len(edited))
        self.base, self.marks, self.dp_rank = edited, report.marks, report.dp_rank
        return report
