"""Faults inside the server, at every step of an edited turn.

After each: the turn was answered as a fresh prefill answers it, its report says why, no slot is lost, nothing is
locked, and the next try works. The faults are made by the plugin in tests/support/fault_plugin.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from background import StreamingRequest
from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive
from splice_client import generate_body

pytestmark = pytest.mark.server

BASE_LEN = 300

FAULTS = {
    "kernel": "internal",
    "kernel_late": "internal",
    "filing": "internal",
    "no_slots": "no_room",
    "allocator": "internal",
    "helper": "internal",
    "evict_replacement": "replacement_not_cached",
    "evict_everything": "base_not_cached",
}
"""What fails, and the reason that the report has to give first."""


@pytest.fixture(scope="session")
def live(operated):
    return operated()


@pytest.fixture
def talk(server, reference, tokens):
    server.flush()
    talk = JudgedConversation(server, reference, by_report=True)
    talk.turn(tokens(BASE_LEN))
    return talk


@pytest.fixture(autouse=True)
def nothing_is_lost(server):
    yield
    assert_whole(server)
    server.flush()
    assert server.idle_pool().free == server.pool().total


def assert_whole(server):
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0


def edits_for(tokens):
    return Directive(60, 90, tuple(tokens(40))), Directive(150, 200, tuple(tokens(20)))


def assert_served_exactly(reference, answer, reason):
    """Of two edits, the helper for the second is the first to be hit; then the turn misses what it was to prefill."""
    assert_exact(reference, answer)
    assert answer.reasons[0] == reason
    assert set(answer.reasons[1:]) <= {"replacement_not_cached"}
    assert {outcome.status for outcome in answer.the_report.directives} == {"refused"}
    assert answer.the_report.amortized == answer.the_report.rotated == 0
    assert answer.the_report.marks == ()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_edits", [1, 2])
def test_turn(talk, server, reference, tokens, faults, fault, num_edits):
    edits, new_tokens = edits_for(tokens)[:num_edits], tokens(9)
    failed, retry = talk.fork(), talk.fork()
    with faults.on(fault):
        answer = failed.turn(new_tokens, *edits)
    assert_served_exactly(reference, answer, FAULTS[fault])
    assert_whole(server)

    failed.turn(tokens(5), Directive(20, 40, tuple(tokens(3))))  # the exact answer is as good a base as any
    assert failed.last.answer.the_report.spliced
    failed.last.check()

    again = retry.turn(new_tokens, *edits)
    assert again.reasons == (["base_not_cached"] if fault == "evict_everything" else [])
    retry.last.check()


def test_in_place(server, reference, tokens, faults):
    """A base too large for a copy beside it loses its downstream to the failed try; that too is made good."""
    talk = JudgedConversation(server, reference, by_report=True)
    talk.turn(tokens(1100))
    edits = [Directive(60, 90, tuple(tokens(4)))]
    with faults.on("kernel_in_place"):
        answer = talk.turn(tokens(9), *edits)
    assert_exact(reference, answer)
    assert answer.reasons == ["internal"]
    assert_whole(server)
    assert talk.turn(tokens(9), *edits).the_report.spliced
    talk.last.check()


@pytest.mark.parametrize("fault", ["kernel", "no_slots"])
def test_streamed_chat(talk, server, reference, tokens, faults, fault):
    edits = edits_for(tokens)
    prompt = talk.prompt(tokens(9), *edits)
    with faults.on(fault):
        answer = server.chat_stream(prompt, talk.request(*edits))
    assert answer.reasons[0] == FAULTS[fault]
    expected = reference.empty().log_probs(prompt, answer.output)
    assert expected.argmax(dim=-1).tolist() == list(answer.output)


def test_prepare(talk, tokens, faults):
    """What could not be done ahead is done with the turn."""
    edits = edits_for(tokens)
    with faults.on("kernel"):
        report = talk.server.prepare(talk.prompt([], *edits), talk.request(*edits))
    assert report.fallbacks[0].reason == "internal"
    assert report.marks == ()
    assert talk.turn(tokens(9), *edits).reasons == []
    talk.last.check()


def test_crowd(talk, server, reference, tokens, faults):
    """Turns of one base, all at the same time, none of which can be spliced."""
    jobs = []
    for number in range(4):
        edits = (Directive(20 + number, 70, tuple(tokens(number))), Directive(100, 110))
        jobs.append((talk.prompt(tokens(5), *edits), talk.request(*edits)))
    with faults.on("kernel_late"), ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda job: server.again().generate(*job), jobs))
    for answer in answers:
        assert_served_exactly(reference, answer, "internal")


# --- clients that do not wait ----------------------------------------------------------------------------------------


def give_up(server, body, wait_for_hit):
    """Send a request, wait until it is at the fault, and close the connection."""
    sent = threading.Event()

    def send():
        with httpx.Client(base_url=server.url, trust_env=False, timeout=0.3) as http:
            try:
                http.post("/generate", json=body)
            except httpx.ReadTimeout:
                sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    wait_for_hit()
    thread.join()
    assert sent.is_set(), "the request was answered; it should have been held"


@pytest.mark.parametrize("fault", ["hold_turn", "hold_splice"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_client_hangs_up(talk, server, tokens, faults, fault, stream):
    """Its client's own timeout ends the request between helper and turn, or in the middle of the splice."""
    edits, new_tokens = edits_for(tokens), tokens(9)
    body = generate_body(talk.prompt(new_tokens, *edits), talk.request(*edits), max_new_tokens=200, log_probs=False)
    with faults.on(fault):
        give_up(server, body | {"stream": stream}, lambda: faults.wait_for_hit(fault))
    assert_whole(server)
    answer = talk.turn(new_tokens, *edits)
    assert answer.reasons == []
    talk.last.check()


def test_abort_during_the_splice(talk, server, tokens, faults):
    """The copies are in the cache before the abort is read: the retry finds them."""
    edits, new_tokens = edits_for(tokens), tokens(9)
    prompt, request = talk.prompt(new_tokens, *edits), talk.request(*edits)
    with StreamingRequest(server, prompt, request, max_new_tokens=300, log_probs=False, rid="to-abort") as running:
        with faults.on("hold_splice"):
            faults.wait_for_hit("hold_splice")
            server.http.post("/abort_request", json={"rid": "to-abort"})
        running.join(30)
        assert not running.is_alive()
    assert_whole(server)
    answer = talk.turn(new_tokens, *edits)
    assert {outcome.status for outcome in answer.the_report.directives} == {"already"}
    talk.last.check()


def test_timeout_in_the_queue(talk, server, tokens, faults):
    """Memory is short, so the turn waits, until SGLang's limit for that drops it (and its helper before it)."""
    edits, new_tokens = edits_for(tokens), tokens(9)
    body = generate_body(talk.prompt(new_tokens, *edits), talk.request(*edits), log_probs=False)
    hold = server.pool().total - 150
    with StreamingRequest(server, tokens(hold - 300), max_new_tokens=300, log_probs=False) as running:
        running.wait_for_first_token()
        with faults.on("timeout_waiting"):
            response = server.http.post("/generate", json=body)
        assert running.is_alive()
        assert response.status_code == 503, response.text
        running.result()
    assert_whole(server)
    talk.turn(new_tokens, *edits)
    talk.last.check()


def test_timeout_while_it_runs(talk, server, tokens, faults):
    edits, new_tokens = edits_for(tokens), tokens(9)
    prompt, request = talk.prompt(new_tokens, *edits), talk.request(*edits)
    with StreamingRequest(server, prompt, request, max_new_tokens=1000, log_probs=False) as running:
        running.wait_for_first_token()
        with faults.on("timeout_running"):
            answer = running.result()
    assert answer.body["meta_info"]["finish_reason"]["type"] == "abort"
    assert_whole(server)
    answer = talk.turn(new_tokens, *edits)
    assert {outcome.status for outcome in answer.the_report.directives} == {"already"}
    talk.last.check()
