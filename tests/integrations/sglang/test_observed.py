"""What an operator sees: the status, metrics that count what reports say, log lines without a word of any prompt."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from leyline_agent.directives import Directive, Mode
from leyline_agent.wire import SpliceRequest
from splice_client import Conversation

pytestmark = pytest.mark.server

BASE_LEN = 200


@pytest.fixture(scope="session")
def live(operated):
    return operated()


def metrics(server) -> Counter[tuple[str, ...]]:
    """Our samples, by name and the values of their labels."""
    found: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(server.http.get("/metrics/").raise_for_status().text):
        for sample in family.samples:
            if sample.name.startswith("leyline_") and "le" not in sample.labels:
                labels = {name: value for name, value in sample.labels.items() if name != "pid"}
                found[(sample.name, *labels.values())] += sample.value
    return found


def counted(reports) -> Counter[tuple[str, ...]]:
    """What the metrics should have counted of turns with these reports."""
    expected: Counter[tuple[str, ...]] = Counter()
    for report in reports:
        for outcome in report.directives:
            expected["leyline_directives_total", outcome.mode.value, outcome.status] += 1
        for kind in ("exact", "amortized", "rotated", "prefilled"):
            expected["leyline_tokens_total", kind] += getattr(report, kind)
        for fallback in report.fallbacks:
            expected["leyline_fallbacks_total", fallback.reason.value] += 1
        for name in ("splice", "helper"):
            seconds = getattr(report, f"{name}_s")
            expected[f"leyline_{name}_seconds_count",] += bool(seconds)
            expected[f"leyline_{name}_seconds_sum",] += seconds
    return expected


def test_metrics_count_what_the_reports_say(server, tokens, faults):
    server.flush()
    before = metrics(server)
    talk = Conversation(server)
    reports = [talk.turn(tokens(BASE_LEN)).the_report]
    edits, new_tokens = (Directive(60, 90, tuple(tokens(5))), Directive(120, 130)), tokens(7)
    retry, failed = talk.fork(), talk.fork()
    with faults.on("kernel"):
        reports.append(failed.turn(tokens(7), *edits).the_report)
    reports.append(talk.turn(new_tokens, *edits).the_report)
    reports.append(retry.turn(new_tokens, *edits).the_report)
    reports.append(talk.turn(tokens(7)).the_report)
    reports.append(talk.turn(tokens(7), Directive(20, 30, (), Mode.FORGET)).the_report)
    reports.append(server.chat_stream(talk.base, "{nonsense").the_report)

    expected = counted(reports)
    outcomes = {key[2] for key in expected if key[0] == "leyline_directives_total"}
    assert outcomes == {"spliced", "already", "refused", "forgotten"}
    assert expected["leyline_fallbacks_total", "malformed"] == 1
    prefilled = ("leyline_tokens_total", "prefilled")
    deadline = time.monotonic() + 15  # a turn is counted right behind its answer
    while (found := metrics(server) - before)[prefilled] < expected[prefilled] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == pytest.approx(expected)


def test_log_lines_hold_no_prompt_text(server, live, faults):
    """Neither as text nor as token ids, whether the turn went well or not."""
    secret = "correct horse battery staple"
    text = f"my password is {secret}, do not tell"
    ids = list(text.encode())
    start = live.log.stat().st_size
    talk = Conversation(server)
    talk.turn(ids * 4)
    at = len(ids) + ids.index(ord("c"))
    edit = Directive(at, at + len(secret), tuple(b"[redacted]"))
    forget = Directive(at, at + len(secret), (), Mode.FORGET)
    with faults.on("kernel"):
        talk.fork().turn(ids, edit)
    for directive in (edit, forget):
        talk.fork().turn(ids, directive)
    wrong = talk.request(edit).model_copy(update={"base_hash": "0" * 32})
    assert server.chat(talk.prompt(ids, edit), wrong).reasons == ["base_mismatch"]
    assert server.generate(ids, SpliceRequest(base_len=3, marks=[(999, 9, 9)])).reasons == ["malformed"]
    messages = [{"role": "user", "content": text}]
    body = {"model": "any", "messages": messages, "max_tokens": 2, "custom_params": {"leyline": text}}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200

    deadline = time.monotonic() + 15  # a turn's line comes right behind its answer
    while (log := live.log_tail(lines=10_000, start=start)).count("leyline turn rid=") < 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ours = [line for line in log.splitlines() if "leyline" in line]
    assert sum("leyline turn rid=" in line for line in ours) == 6
    assert any("directives=amortize:spliced fallbacks=-" in line for line in ours)
    assert any("directives=amortize:refused fallbacks=internal" in line for line in ours)
    for piece in (secret, "password", "[redacted]", *(str(list(part))[1:-1] for part in (b"corr", b"[red"))):
        assert piece not in log


def test_status(server, live, faults):
    status = server.status()
    assert status["ready"] is True
    assert status["amortize"] is True
    assert status["reason"] == ""
    assert set(status["versions"]) == {"leyline-agent", "sglang", "torch"}
    assert status["model"] == str(live.model_path)
    assert status["tree_core"] == "RustUnifiedTreeCore"
    assert status["kernel"]["form"] == "torch"
    assert "cpu" in status["kernel"]["reason"]
    assert status["rope"] == [{"kind": "default", "rotary_dim": 16, "interleaved": False, "scale": 1.0}]
    assert status["probe"]["passed"] is True
    assert 0 <= status["probe"]["worst_error"] < 2e-3
    assert status["page_size"] == 1
    assert status["settings"]["max_splices"] == 64
