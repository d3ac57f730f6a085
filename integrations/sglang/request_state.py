"""What the scheduler knows of one Leyline request, from arrival to report."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.directives import Directive, Mode
from leyline_agent.errors import WireError
from leyline_agent.report import DirectiveOutcome, Fallback, FallbackReason, TurnReport
from leyline_agent.wire import SpliceRequest

from .internal import HelperNote
from .marks import Marks, first_amortized, prefilled_from
from .plan import SplicePlan, make_plan
from .refusal import Refusal
from .splice import Spliced


@dataclass(slots=True)
class RequestState:
    """Hangs on SGLang's `Req` as `req.leyline`.

    `marks` are those its radix keys carry now: before the splice only the marks in front of the first edit, afterwards
    all of them, and none at all for a request that is served exactly. Of a splice, copies stand up to token `reached`,
    and `rotated` counts those made for this turn, by directive. `admitting` is True while the scheduler matches the
    request in order to run it, the one moment to splice. `report` is what the client will be told.
    """

    plan: SplicePlan | None
    note: HelperNote
    marks: Marks = ()
    fallbacks: list[Fallback] = field(default_factory=list)
    reached: int = 0
    rotated: Counter[int] = field(default_factory=Counter)
    splice_s: float = 0.0
    refused: bool = False
    admitting: bool = False
    report: TurnReport | None = None

    @classmethod
    def from_wire(cls, text: object, note: HelperNote, prompt: array[int], page_size: int) -> RequestState:
        """The state of a request that carries `text`. Never raises: what does not fit becomes a typed fallback."""
        state = cls(plan=None, note=note, fallbacks=list(note.fallbacks), rotated=Counter(note.rotated))
        try:
            state.plan = make_plan(SpliceRequest.parse(text), prompt, page_size=page_size, partial=note.is_helper)
        except WireError as err:
            state.refuse(Refusal(FallbackReason.MALFORMED, str(err)))
        except Refusal as refusal:
            state.refuse(refusal)
        else:
            state.marks = () if state.forgets else state.plan.kept_marks
            if state.forgets:
                state._tell_of_mixed_modes()
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

    def _tell_of_mixed_modes(self) -> None:
        assert self.plan is not None
        for directive in self.plan.directives:
            if directive.mode is Mode.AMORTIZE:
                detail = f"[{directive.start}, {directive.end}) came with a FORGET; the turn is served exactly"
                self.fallbacks.append(Fallback(reason=FallbackReason.FORGET_IN_SET, detail=detail))

    def refuse(self, refusal: Refusal) -> None:
        """Serve the request exactly, as a FORGET would, and say why: no mark stays, so no amortized KV is hit."""
        self.refused = True
        self.fallbacks.append(refusal.fallback)
        self.marks = ()

    def record(self, spliced: Spliced, splice_s: float) -> None:
        """The splice is in the cache, after this round of the scheduler."""
        assert self.plan is not None
        self.marks = prefilled_from(self.plan.marks, spliced.reached)
        self.reached = spliced.reached
        self.rotated.update(spliced.rotated)
        self.splice_s += splice_s

    def make_report(self, prompt_len: int, cached_len: int, kernel: str, dp_rank: int | None) -> TurnReport:
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
        outcomes = self._outcomes(min(self.reached, cached_len))
        return TurnReport(
            prompt_tokens=prompt_len,
            exact=exact - helper_exact,
            amortized=amortized - helper_amortized,
            rotated=sum(outcome.rotated for outcome in outcomes),
            prefilled=prompt_len - cached_len + helper_exact + helper_amortized,
            directives=outcomes,
            fallbacks=tuple({fallback.reason: fallback for fallback in self.fallbacks}.values()),
            marks=tuple(mark for mark in self.marks if mark[0] <= prompt_len),
            splices=max((depth for _, _, depth in self.marks), default=0),
            kernel=kernel,
            dp_rank=dp_rank,
            splice_s=self.splice_s + self.note.splice_s,
            helper_s=self.note.helper_s,
        )

    def _outcomes(self, reached: int) -> tuple[DirectiveOutcome, ...]:
        """What became of each directive, if copies stand up to `reached`."""
        directives = self.plan.directives if self.plan is not None else ()
        return tuple(self._outcome(number, directive, reached) for number, directive in enumerate(directives))

    def _outcome(self, number: int, directive: Directive, reached: int) -> DirectiveOutcome:
        assert self.plan is not None
        outcome = DirectiveOutcome(
            start=directive.start,
            end=directive.end,
            replacement_len=len(directive.replacement),
            mode=directive.mode,
            status="refused",
        )
        if self.refused:
            return outcome
        if self.forgets:
            return outcome.model_copy(update={"status": "forgotten"}) if directive.mode is Mode.FORGET else outcome
        copies = [copy for copy in self.plan.copies if copy.directive == number]
        rotated = self.rotated[number]
        return outcome.model_copy(
            update={
                "status": "already" if copies and not rotated else "spliced",
                "moved": sum(copy.len_up_to(reached) for copy in copies if not copy.is_replacement),
                "reused": sum(copy.len_up_to(reached) for copy in copies if copy.is_replacement),
                "rotated": rotated,
            }
        )


def state_of(req: Any) -> RequestState | None:
    """The Leyline state of a SGLang `Req`, None for an ordinary request."""
    return getattr(req, "leyline", None)
