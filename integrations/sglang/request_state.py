"""What the scheduler knows of one Leyline request, from arrival to report."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.directives import Directive, Mode
from leyline_agent.errors import WireError
from leyline_agent.report import DirectiveOutcome, Fallback, FallbackReason, TurnReport
from leyline_agent.wire import SpliceRequest

from .internal import HelperNote
from .marks import Marks, first_amortized
from .plan import SplicePlan, make_plan
from .refusal import Refusal


@dataclass(slots=True)
class RequestState:
    """Hangs on SGLang's `Req` as `req.leyline`.

    `marks` are those its radix keys carry now: before the splice only the marks in front of the first edit, afterwards
    all of them, and none at all for a request that is served exactly. `admitting` is True while the scheduler matches
    the request in order to run it, the one moment to splice.
    """

    plan: SplicePlan | None
    note: HelperNote
    marks: Marks = ()
    fallbacks: list[Fallback] = field(default_factory=list)
    outcomes: dict[int, DirectiveOutcome] = field(default_factory=dict)
    splice_s: float = 0.0
    spliced: bool = False
    refused: bool = False
    admitting: bool = False

    @classmethod
    def from_wire(cls, text: object, note: HelperNote, prompt: array[int], page_size: int) -> RequestState:
        """The state of a request that carries `text`. Never raises: what does not fit becomes a typed fallback."""
        state = cls(plan=None, note=note, fallbacks=list(note.fallbacks))
        try:
            state.plan = make_plan(SpliceRequest.parse(text), prompt, page_size=page_size, partial=note.is_helper)
        except WireError as err:
            state.refuse(Refusal(FallbackReason.MALFORMED, str(err)))
        except Refusal as refusal:
            state.refuse(refusal)
        else:
            state.marks = () if state.forgets else state.plan.kept_marks
            if state.forgets:
                state._forget()
        return state

    @property
    def forgets(self) -> bool:
        return self.plan is not None and bool(self.plan.directives) and self.plan.mode is Mode.FORGET

    @property
    def wants_splice(self) -> bool:
        """Whether there is something to copy before the request runs."""
        if self.plan is None or not self.plan.directives or self.forgets or self.refused:
            return False
        return bool(self.plan.copies) or not self.note.is_helper

    def _forget(self) -> None:
        assert self.plan is not None
        for number, directive in enumerate(self.plan.directives):
            if directive.mode is Mode.AMORTIZE:
                self.outcomes[number] = _outcome(directive, "refused")
                detail = f"[{directive.start}, {directive.end}) came with a FORGET; the turn is served exactly"
                self.fallbacks.append(Fallback(reason=FallbackReason.FORGET_IN_SET, detail=detail))
            else:
                self.outcomes[number] = _outcome(directive, "forgotten")

    def refuse(self, refusal: Refusal) -> None:
        """Serve the request exactly, as a FORGET would, and say why: no mark stays, so no amortized KV is hit."""
        self.refused = True
        self.spliced = False
        self.fallbacks.append(refusal.fallback)
        if self.plan is not None:
            self.marks = ()
            for number, directive in enumerate(self.plan.directives):
                self.outcomes[number] = _outcome(directive, "refused")

    def record(self, moved: dict[int, int], splice_s: float) -> None:
        """The splice is in the cache; `moved` counts the tokens copied for each directive in this round."""
        assert self.plan is not None
        self.spliced = True
        self.marks = self.plan.marks
        self.splice_s += splice_s
        with_run = {copy.directive for copy in self.plan.copies}
        for number, directive in enumerate(self.plan.directives):
            count = moved.get(number, 0)
            if number in self.outcomes:
                count += self.outcomes[number].moved
            elif number < len(self.note.moved):
                count += self.note.moved[number]
            status = "already" if number in with_run and not count else "spliced"
            self.outcomes[number] = _outcome(directive, status, count)

    def report(self, prompt_len: int, cached_len: int, kernel: str, dp_rank: int | None) -> TurnReport:
        """The account of the turn, given how many prompt tokens the cache serves.

        Replacements that a helper prefilled for this turn count as prefilled, though the request then finds them in
        the cache: they are `note.prefilled_exact` tokens in front of the first mark and `note.prefilled_amortized`
        behind it.
        """
        border = first_amortized(self.marks)
        exact = cached_len if border is None else min(cached_len, border)
        amortized = cached_len - exact
        helper_exact = min(self.note.prefilled_exact, exact)
        helper_amortized = min(self.note.prefilled_amortized, amortized)
        return TurnReport(
            prompt_tokens=prompt_len,
            exact=exact - helper_exact,
            amortized=amortized - helper_amortized,
            rotated=sum(outcome.moved for outcome in self.outcomes.values()),
            prefilled=prompt_len - cached_len + helper_exact + helper_amortized,
            directives=tuple(self.outcomes[number] for number in sorted(self.outcomes)),
            fallbacks=tuple({fallback.reason: fallback for fallback in self.fallbacks}.values()),
            marks=tuple(mark for mark in self.marks if mark[0] <= prompt_len),
            splices=max((depth for _, _, depth in self.marks), default=0),
            kernel=kernel,
            dp_rank=dp_rank,
            splice_s=self.splice_s + self.note.splice_s,
            helper_s=self.note.helper_s,
        )


def _outcome(directive: Directive, status: str, moved: int = 0) -> DirectiveOutcome:
    return DirectiveOutcome(
        start=directive.start,
        end=directive.end,
        replacement_len=len(directive.replacement),
        mode=directive.mode,
        status=status,
        moved=moved,
    )


def state_of(req: Any) -> RequestState | None:
    """The Leyline state of a SGLang `Req`, None for an ordinary request."""
    return getattr(req, "leyline", None)
