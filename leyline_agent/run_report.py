"""A run summed up: what its turns reused, what they computed, what was refused. Displays itself in a notebook."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from leyline_agent.client_report import ClientReport


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Sums over the turns of a run. `spliced_turns` counts turns with a directive that was spliced."""

    turns: int = 0
    prompt_tokens: int = 0
    exact: int = 0
    amortized: int = 0
    prefilled: int = 0
    spliced_turns: int = 0

    @property
    def prefilled_share(self) -> float:
        """The part of all prompt tokens that was computed, 0 to 1."""
        return self.prefilled / self.prompt_tokens if self.prompt_tokens else 0.0


class RunReport:
    """Collects the reports of a run; give it to a client as `on_report`. For any number of threads.

    run = RunReport()
    client = OpenAI(policy=..., on_report=run)
    ...
    print(run)  # or just `run` in a notebook
    """

    def __init__(self, reports: Iterable[ClientReport] = ()) -> None:
        self._reports = list(reports)
        self._lock = threading.Lock()

    def __call__(self, report: ClientReport) -> None:
        with self._lock:
            self._reports.append(report)

    @property
    def reports(self) -> tuple[ClientReport, ...]:
        """The reports so far, in the order they came."""
        with self._lock:
            return tuple(self._reports)

    @property
    def totals(self) -> RunTotals:
        """Sums over all turns."""
        reports = self.reports
        return RunTotals(
            turns=len(reports),
            prompt_tokens=sum(report.prompt_tokens for report in reports),
            exact=sum(report.exact for report in reports),
            amortized=sum(report.amortized for report in reports),
            prefilled=sum(report.prefilled for report in reports),
            spliced_turns=sum(report.spliced for report in reports),
        )

    @property
    def fallbacks(self) -> Counter[str]:
        """How often each reason for not splicing was given."""
        return Counter(fallback.reason.value for report in self.reports for fallback in report.fallbacks)

    def to_dict(self) -> dict[str, Any]:
        """Totals, reasons and turns as plain data."""
        totals = self.totals
        return {
            "turns": totals.turns,
            "prompt_tokens": totals.prompt_tokens,
            "exact_tokens": totals.exact,
            "amortized_tokens": totals.amortized,
            "prefilled_tokens": totals.prefilled,
            "spliced_turns": totals.spliced_turns,
            "fallbacks": dict(self.fallbacks),
            "reports": [report.model_dump(mode="json") for report in self.reports],
        }

    def __str__(self) -> str:
        totals = self.totals
        summary = (
            f"{totals.turns} turns, {totals.prompt_tokens} prompt tokens: {totals.exact} reused as they were, "
            f"{totals.amortized} reused behind a splice, {totals.prefilled} computed ({totals.prefilled_share:.0%})"
        )
        lines = [summary]
        lines.extend(f"not spliced, {reason}: {times} times" for reason, times in self.fallbacks.most_common())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = ("turn", "session", "prompt", "exact", "amortized", "prefilled", "edits", "directives", "not done")
        rows = [
            (
                report.turn,
                report.session or "",
                report.prompt_tokens,
                report.exact,
                report.amortized,
                report.prefilled,
                report.edits,
                len(report.directives),
                ", ".join(fallback.reason.value for fallback in report.fallbacks),
            )
            for report in self.reports
        ]
        head = "".join(f"<th>{name}</th>" for name in heads)
        body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<p>{escape(str(self))}</p><table><tr>{head}</tr>{body}</table>"
