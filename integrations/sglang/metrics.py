"""Prometheus metrics and log lines of Leyline turns, beside SGLang's own. No prompt text goes into either."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from leyline_agent.report import TurnReport

logger = logging.getLogger("leyline_agent.server")

_SPLICE_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class TurnMetrics:
    """Counters of one server, fed with the report of every finished turn."""

    def __init__(self) -> None:
        # SGLang points prometheus-client to its folder for several processes before this is first called; the client
        # looks at it when it is imported.
        from prometheus_client import Counter, Histogram

        self.directives = Counter(
            "leyline_directives", "Directives by mode and by what became of them.", ["mode", "outcome"]
        )
        self.tokens = Counter(
            "leyline_tokens", "Prompt tokens of Leyline turns: exact, amortized, rotated, prefilled.", ["kind"]
        )
        self.fallbacks = Counter("leyline_fallbacks", "Turns that were not spliced as asked, by reason.", ["reason"])
        self.splice_seconds = Histogram("leyline_splice_seconds", "Time of a splice.", buckets=_SPLICE_BUCKETS_S)
        self.helper_seconds = Histogram("leyline_helper_seconds", "Time of the prefills ahead of a turn.")

    def observe(self, report: TurnReport) -> None:
        """Count one turn."""
        for directive in report.directives:
            self.directives.labels(directive.mode.value, directive.status).inc()
        for kind in ("exact", "amortized", "rotated", "prefilled"):
            self.tokens.labels(kind).inc(getattr(report, kind))
        for fallback in report.fallbacks:
            self.fallbacks.labels(fallback.reason.value).inc()
        if report.splice_s:
            self.splice_seconds.observe(report.splice_s)
        if report.helper_s:
            self.helper_seconds.observe(report.helper_s)


@cache
def turn_metrics() -> TurnMetrics:
    """The metrics of this process, made when first asked for."""
    return TurnMetrics()


def finish_turn(rid: Any, raw_report: dict[str, Any], *, metrics_enabled: bool) -> None:
    """Count and log a turn that asked something of the cache; plain turns of a session leave no line."""
    report = TurnReport.model_validate(raw_report)
    if metrics_enabled:
        turn_metrics().observe(report)
    if report.directives or report.fallbacks:
        logger.info(
            "leyline turn rid=%s prompt=%d exact=%d amortized=%d rotated=%d prefilled=%d directives=%s fallbacks=%s "
            "splice_ms=%.2f helper_ms=%.2f",
            rid,
            report.prompt_tokens,
            report.exact,
            report.amortized,
            report.rotated,
            report.prefilled,
            ",".join(f"{d.mode}:{d.status}" for d in report.directives) or "-",
            ",".join(fallback.reason for fallback in report.fallbacks) or "-",
            report.splice_s * 1e3,
            report.helper_s * 1e3,
        )
