"""Whatever happens to a request, at any moment: no slot is lost, nothing stays locked, the next answer is right."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from background import StreamingRequest
from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet, Mode
from splice_client import generate_body

pytestmark = [
    pytest.mark.server,
    pytest.mark.parametrize(
        "live",
        ["small-llama-rust", pytest.param("small-deepseek_v2-python", marks=pytest.mark.slow)],
        indirect=True,
    ),
]

BASE_LEN = 300
MOMENTS_S = (0.0, 0.003, 0.01, 0.02, 0.04, 0.2)
"""Before a cut, an abort: from "not even parsed" to "in the middle of decoding"."""


@pytest.fixture
def talk(server, reference, tokens):
    server.flush()
    talk = JudgedConversation(server, reference, by_report=True)
    talk.turn(tokens(BASE_LEN))
    return talk


@pytest.fixture(autouse=True)
def nothing_is_lost(server):
    yield
    pool = server.idle_pool()
    assert pool.in_use == 0
    assert pool.lost == 0
    server.flush()
    assert server.idle_pool().free == pool.total


def edits_for(tokens):
    return Directive(60, 90, tuple(tokens(40))), Directive(150, 200, tuple(tokens(20)))


@pytest.mark.parametrize("mode", [Mode.AMORTIZE, Mode.FORGET])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_client_hangs_up(talk, server, tokens, stream, mode):
    for moment_s in MOMENTS_S:
        edits = [Directive(d.start, d.end, d.replacement, mode) for d in edits_for(tokens)]
        body = generate_body(talk.prompt(tokens(9), *edits), talk.request(*edits), max_new_tokens=150, log_probs=False)
        hang_up_after(server, body | {"stream": stream}, moment_s)
        pool = server.idle_pool()
        assert pool.in_use == pool.lost == 0
        edits = edits_for(tokens)
        answer = talk.fork().turn(tokens(9), *edits)
        assert_spliced_or_exact(talk, edits, answer)


def hang_up_after(server, body, moment_s):
    """Send a request, wait a moment, close the connection."""
    with httpx.Client(
        base_url=server.url, timeout=httpx.Timeout(30, read=max(moment_s, 0.001)), trust_env=False
    ) as http:
        try:
            with http.stream("POST", "/generate", json=body) as response:
                deadline = time.monotonic() + moment_s
                for _ in response.iter_raw():
                    if time.monotonic() > deadline:
                        break
        except httpx.TimeoutException:
            pass


def assert_spliced_or_exact(talk, edits, answer):
    """Right by its own report, and spliced unless the report says why not."""
    talk.fork().follow(talk.base, DirectiveSet(tuple(edits)), answer).check()
    assert answer.reasons or answer.the_report.spliced or any(edit.mode is Mode.FORGET for edit in edits)


def test_abort(talk, server, tokens):
    """The server's own abort, by request id, which may find the helper, the splice or the decoding under way."""
    for number, moment_s in enumerate(MOMENTS_S):
        edits, rid = edits_for(tokens), f"to-abort-{number}"
        prompt, request = talk.prompt(tokens(9), *edits), talk.request(*edits)
        with StreamingRequest(server, prompt, request, max_new_tokens=150, log_probs=False, rid=rid) as running:
            time.sleep(moment_s)
            server.http.post("/abort_request", json={"rid": rid})
            running.join(30)
            assert not running.is_alive()
        assert server.idle_pool().in_use == 0
        answer = talk.fork().turn(tokens(9), *edits)
        assert_spliced_or_exact(talk, edits, answer)


def test_abort_of_everything(talk, server, tokens):
    for moment_s in MOMENTS_S:
        edits = edits_for(tokens)
        prompts = [talk.prompt(tokens(9), *edits) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            for prompt in prompts:
                body = generate_body(prompt, talk.request(*edits), max_new_tokens=300, log_probs=False)
                threads.submit(httpx.post, f"{server.url}/generate", json=body, timeout=60, trust_env=False)
            time.sleep(moment_s)
            server.http.post("/abort_request", json={"abort_all": True})
        assert server.idle_pool().lost == 0
    talk.turn(tokens(9), *edits_for(tokens))
    talk.last.check()


def test_same_request_many_times_at_once(talk, server, tokens):
    """A retry storm: all are right, and the splice's slots are not taken more than once for long."""
    edits = edits_for(tokens)
    prompt, request = talk.prompt(tokens(9), *edits), talk.request(*edits)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: server.again().generate(prompt, request), range(16)))
    for answer in answers:
        assert_spliced_or_exact(talk, edits, answer)
    assert any("already" in {o.status for o in answer.the_report.directives} for answer in answers)


def test_different_edits_of_one_base_at_once(talk, server, tokens):
    jobs = []
    for number in range(12):
        edits = [Directive(20 + number, 70 + number, tuple(tokens(number)))]
        if number % 4 == 3:
            edits = [Directive(200, 210, tuple(tokens(3)), Mode.FORGET)]
        jobs.append((edits, talk.prompt(tokens(5), *edits), talk.request(*edits)))
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda job: server.again().generate(job[1], job[2]), jobs))
    for (edits, _, _), answer in zip(jobs, answers, strict=True):
        assert_spliced_or_exact(talk, edits, answer)


def test_splice_of_a_base_that_is_being_decoded_on(talk, server, reference, tokens):
    """The base is locked, so it is copied; whoever holds it is not disturbed."""
    edits = edits_for(tokens)
    with StreamingRequest(server, talk.base, max_new_tokens=400) as running:
        running.wait_for_first_token()
        answer = talk.fork().turn(tokens(9), *edits)
        assert running.is_alive()
        assert_spliced_or_exact(talk, edits, answer)
        assert answer.the_report.spliced
        assert_exact(reference, running.result())


def test_flush_between_turns(talk, server, tokens):
    """An operator empties the cache: the next turn of an amortized session is exact, and says why."""
    talk.turn(tokens(9), *edits_for(tokens))
    server.flush()
    answer = talk.turn(tokens(9), Directive(20, 30))
    assert answer.reasons == ["base_not_cached"]
    assert answer.cached == 0
    talk.last.check()
    server.flush()
    assert talk.turn(tokens(9)).the_report.amortized == 0
    talk.last.check()


# --- eviction pressure -----------------------------------------------------------------------------------------------


def test_no_room_for_copies(talk, server, tokens):
    """All slots but a few are held by a running request; the splice falls back, or makes room, and says so."""
    pool = server.pool()
    hold = pool.total - BASE_LEN - 350
    with StreamingRequest(server, tokens(hold - 200), max_new_tokens=200, log_probs=False) as running:
        running.wait_for_first_token()
        edits = [Directive(10, 20, tuple(tokens(200)))]
        answer = talk.fork().turn(tokens(9), *edits)
        assert_spliced_or_exact(talk, edits, answer)
        running.result()


def test_base_evicted_by_others(talk, server, tokens):
    """Noise pushes the base out between two turns; the turn is exact and says that the base was gone."""
    for _ in range(6):
        server.generate(tokens(server.pool().total // 4), max_new_tokens=1, log_probs=False)
    answer = talk.turn(tokens(9), *edits_for(tokens))
    talk.last.check()
    assert answer.reasons == ["base_not_cached"]
    assert answer.the_report.amortized == 0


def test_noise_during_turns(talk, server, tokens):
    """Others keep evicting while a session is edited turn after turn. Spliced, in part or not at all, it is right."""
    stop = threading.Event()

    def noise():
        client, seed = server.again(), 0
        while not stop.is_set():
            seed += 1
            prompt = [(seed * 31 + i * i * (seed % 7 + 1)) % 250 for i in range(client.pool().total // 3)]
            client.generate(prompt, max_new_tokens=4, log_probs=False)

    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(noise) for _ in range(2)]
        try:
            for turn in range(12):
                talk.turn(tokens(12), Directive(40 + turn, 60 + turn, tuple(tokens(turn))), Directive(120, 130))
                talk.last.check()
        finally:
            stop.set()
        for job in jobs:
            job.result()
