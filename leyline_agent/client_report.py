"""The report a caller sees: what the server says of a turn, with what only the client knows."""

from __future__ import annotations

from html import escape
from typing import Any

from pydantic import ValidationError

from leyline_agent.edits import Usage
from leyline_agent.report import Fallback, FallbackReason, TurnReport
from leyline_agent.turn_plan import BaseSource, RenderedBy, TurnPlan

_MUCH_LESS = 0.5  # of the tokens that should have been reused; below it, the report says that they were not there


class ClientReport(TurnReport):
    """A `TurnReport` with the client's side. `served` is False when the server sent no report.

    Then `prompt_tokens` and `exact` are the usage the server gave, and nothing was spliced. `edits` counts the policy
    edits in force, `turn` the model calls of the session from 0. `rendered_by` says who made the token ids of a turn
    that needed them. `plan_s` is the time spent on this side, in seconds.
    """

    served: bool = False
    session: str | None = None
    turn: int = 0
    edits: int = 0
    base: BaseSource = BaseSource.NONE
    rendered_by: RenderedBy = RenderedBy.NOBODY
    plan_s: float = 0.0

    @classmethod
    def of(
        cls,
        plan: TurnPlan,
        report: TurnReport | None,
        *,
        session: str | None = None,
        usage: Usage | None = None,
        fallbacks: tuple[Fallback, ...] = (),
    ) -> ClientReport:
        """The report of a turn from its plan, the server's report if there is one, and its usage."""
        facts: dict[str, Any] = report.model_dump() if report is not None else {}
        if report is None and usage is not None:
            facts["prompt_tokens"] = usage.prompt_tokens
            facts["exact"] = usage.cached_tokens
            facts["prefilled"] = usage.prompt_tokens - usage.cached_tokens
        theirs = report.fallbacks if report is not None else ()
        missing = _missing_reuse(plan, report) if report is not None and not theirs else ()
        facts["fallbacks"] = (*plan.fallbacks, *fallbacks, *theirs, *missing)
        return cls(
            **facts,
            served=report is not None,
            session=session,
            turn=plan.index,
            edits=len(plan.edits),
            base=plan.base_source,
            rendered_by=plan.rendered_by,
            plan_s=plan.plan_s,
        )

    def _repr_html_(self) -> str:
        shown = {
            "prompt": self.prompt_tokens,
            "exact": self.exact,
            "amortized": self.amortized,
            "prefilled": self.prefilled,
            "directives": ", ".join(f"[{d.start}, {d.end}) {d.status}" for d in self.directives) or "none",
            "fallbacks": ", ".join(fallback.reason for fallback in self.fallbacks) or "none",
        }
        cells = "".join(f"<td>{escape(str(value))}</td>" for value in shown.values())
        heads = "".join(f"<th>{escape(name)}</th>" for name in shown)
        return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>"


def parse_report(raw: Any) -> tuple[TurnReport | None, tuple[Fallback, ...]]:
    """A server's report from JSON, or why it is none."""
    if raw is None:
        return None, ()
    try:
        return TurnReport.model_validate(raw), ()
    except ValidationError as err:
        detail = f"the server's report cannot be read: {err.errors()[0]['msg']}"
        return None, (Fallback(reason=FallbackReason.UNSUPPORTED_VERSION, detail=detail),)


def _missing_reuse(plan: TurnPlan, report: TurnReport) -> tuple[Fallback, ...]:
    """Says that the server lost the KV of the turn before (restart, flush, eviction), which it does not know itself."""
    predicted = plan.predicted
    if predicted is not None:
        expected = predicted.exact + predicted.amortized
    elif plan.previous is not None and plan.input_ids is None:
        expected = len(plan.previous.prompt_ids)
    else:
        expected = 0
    if report.reused >= _MUCH_LESS * expected:
        return ()
    detail = f"the server still had {report.reused} of the {expected} tokens that the turn before left in its cache"
    return (Fallback(reason=FallbackReason.EVICTED, detail=detail),)
