"""Reports as people see them: summed, in a notebook, on a span."""

from __future__ import annotations

import pytest
from opentelemetry import trace

from leyline_agent.client_report import ClientReport
from leyline_agent.directives import Mode
from leyline_agent.report import DirectiveOutcome, Fallback, FallbackReason
from leyline_agent.run_report import RunReport
from leyline_agent.telemetry import annotate_current_span
from recording_span import RecordingSpan

SPLICED = ClientReport(
    prompt_tokens=100,
    exact=40,
    amortized=50,
    prefilled=10,
    session="s",
    edits=2,
    directives=(DirectiveOutcome(start=4, end=24, replacement_len=3, mode=Mode.AMORTIZE, status="spliced"),),
)
REFUSED = ClientReport(
    prompt_tokens=100, prefilled=100, fallbacks=(Fallback(reason=FallbackReason.EVICTED, detail="<gone>"),)
)


def test_a_run_is_summed_and_shown() -> None:
    run = RunReport()
    for report in (SPLICED, REFUSED):
        run(report)
    assert run.totals.turns == 2
    assert run.totals.prefilled == 110
    assert run.totals.prefilled_share == 0.55
    assert run.totals.spliced_turns == 1
    assert run.fallbacks == {"evicted": 1}
    assert "not spliced, evicted: 1 times" in str(run)
    assert run.to_dict()["amortized_tokens"] == 50
    html = run._repr_html_()
    assert html.count("<tr>") == 3
    assert "<gone>" not in REFUSED._repr_html_()


def test_a_notebook_shows_a_run_and_a_report_as_tables() -> None:
    formatters = pytest.importorskip("IPython.core.formatters", reason="IPython is in .venv only")
    for shown in (RunReport([SPLICED, REFUSED]), SPLICED):
        formats, _ = formatters.DisplayFormatter().format(shown)
        assert "<td>50</td>" in formats["text/html"]


def test_an_empty_run_divides_by_nothing() -> None:
    assert RunReport().totals.prefilled_share == 0.0


@pytest.mark.client
def test_the_current_span_gets_the_report() -> None:
    span = RecordingSpan()
    with trace.use_span(span):
        annotate_current_span(SPLICED)
    assert span.seen["gen_ai.usage.cache_read.input_tokens"] == 90
    assert span.seen["gen_ai.conversation.id"] == "s"
    assert span.seen["leyline.tokens.spliced"] == 50
    assert span.seen["leyline.tokens.removed"] == 20
    assert span.seen["leyline.mode"] == "amortize"


def test_without_a_span_nothing_happens() -> None:
    annotate_current_span(SPLICED)
