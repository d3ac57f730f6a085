"""What a turn did, as attributes of the current OpenTelemetry span. Nothing happens without opentelemetry-api."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyline_agent.client_report import ClientReport


def annotate_current_span(report: ClientReport) -> None:
    """Add the report to the span that is being recorded, if any. No span is opened: the model call has one already.

    Names follow the GenAI conventions where they have one (`gen_ai.usage.cache_read.input_tokens`).
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return
    span = trace.get_current_span()
    if not span.is_recording():
        return
    attributes: dict[str, str | int] = {
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.reused,
        "leyline.edits": report.edits,
        "leyline.directives": len(report.directives),
        "leyline.tokens.exact": report.exact,
        "leyline.tokens.spliced": report.amortized,
        "leyline.tokens.prefilled": report.prefilled,
        "leyline.tokens.removed": sum(d.end - d.start for d in report.directives if d.status != "refused"),
    }
    if report.session is not None:
        attributes["gen_ai.conversation.id"] = report.session
    if report.directives:
        attributes["leyline.mode"] = "forget" if any(d.mode == "forget" for d in report.directives) else "amortize"
    if report.fallbacks:
        attributes["leyline.fallback_reason"] = report.fallbacks[0].reason.value
    span.set_attributes(attributes)
