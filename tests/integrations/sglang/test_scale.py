"""Several ranks, several workers, hundreds of sessions, prompts in chunks: each turn is right, whoever serves it."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet, Mode
from splice_client import generate_answer, generate_body

pytestmark = pytest.mark.server

BASE_LEN = 150
CROWD = 200

SERVERS = {
    "tp": ["--tp-size", "2", "--disable-overlap-schedule", "--enable-session-radix-cache"],
    "dp": ["--dp-size", "2", "--max-running-requests", "64", "--enable-priority-scheduling"],
}
ENVIRONMENT = {
    "tp": {"LEYLINE_SERVER_SPLICE_PLACE": "in_place"},
    "dp": {},
}
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
"""SGLang wants to be told where ranks run if there are more of them than NUMA nodes."""


@pytest.fixture(scope="session")
def live(request, cpu_server):
    if request.param == "operated":
        return request.getfixturevalue("operated")()
    return cpu_server("llama", *SERVERS[request.param], env=TWO_RANKS | ENVIRONMENT[request.param])


@pytest.fixture(autouse=True)
def pools_are_whole_afterwards(server):
    yield
    server.idle_pool()
    for rank in server.status()["ranks"]:
        pool = rank["pool"]
        assert pool["free"] + pool["cached"] == pool["total"]
        assert pool["in_use"] == 0


def edits_for(tokens):
    return Directive(60, 90, tuple(tokens(5))), Directive(120, 130)


@pytest.mark.parametrize("live", ["tp"], indirect=True)
def test_tensor_parallel(server, reference, tokens):
    """Each rank holds some of the heads; were one spliced otherwise than the other, the log-probs would show it."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    talk.judged_turn(tokens(7), *edits_for(tokens))
    talk.prepare(Directive(20, 40, tuple(tokens(30))))
    talk.judged_turn(tokens(7))
    talk.turn(tokens(7), Directive(10, 12, (), Mode.FORGET))
    talk.last.check()


@pytest.mark.parametrize("live", ["tp"], indirect=True)
def test_sessions_of_sglang_keep_their_kv(server, reference, tokens):
    """With SGLang's session-aware cache a base is copied, whatever the settings say: its session refers to it."""
    talk = JudgedConversation(server, reference, session_id="mine")
    talk.turn(tokens(BASE_LEN))
    before = talk.fork()
    assert talk.judged_turn(tokens(7), Directive(60, 90, tuple(tokens(5)))).answer.the_report.rotated
    assert before.judged_turn(tokens(3)).answer.the_report.exact == BASE_LEN + 7


@pytest.mark.parametrize("live", ["dp"], indirect=True)
def test_data_parallel(server, reference, tokens):
    """The report names the worker; a turn that goes back to it is spliced, and one that does not is exact."""
    assert [rank["amortize"] for rank in server.status()["ranks"]] == [True, True]
    talks = [JudgedConversation(server, reference) for _ in range(4)]
    for talk in talks:
        talk.turn(tokens(BASE_LEN))
    assert {talk.dp_rank for talk in talks} == {0, 1}
    for talk in talks:
        home = talk.dp_rank
        assert talk.judged_turn(tokens(7), *edits_for(tokens)).answer.the_report.dp_rank == home

        talk.dp_rank = 1 - home
        edit = Directive(20, 30, tuple(tokens(4)))
        strayed = talk.turn(tokens(7), edit)
        assert strayed.the_report.dp_rank == 1 - home
        assert strayed.reasons == ["base_not_cached"]
        assert strayed.the_report.marks == ()
        assert_exact(reference, strayed)
        assert talk.judged_turn(tokens(7), edit).answer.the_report.dp_rank == 1 - home


@pytest.mark.parametrize("live", ["operated"], indirect=True)
def test_prefill_in_chunks(server, live, reference, tokens):
    """Base, replacement and what follows the splice are each longer than a chunk of prefill."""
    server.flush()
    log_start = live.log.stat().st_size
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(400))
    report = talk.judged_turn(tokens(300), Directive(60, 90, tuple(tokens(200)))).answer.the_report
    assert report.rotated == 400 + 7 - 90
    assert report.prefilled == 200 + 1 + 300
    assert live.log_tail(lines=1000, start=log_start).count("#new-token: 128,") >= 3 + 1 + 2


@pytest.mark.parametrize("live", ["dp"], indirect=True)
def test_hundreds_of_sessions_at_once(server, reference):
    """Each takes a first turn and an edited one, all of them at the same time, with room for all."""
    server.flush()
    talks = [JudgedConversation(server, reference) for _ in range(CROWD)]
    answers = asyncio.run(all_at_once(server.url, talks))
    homes = {0: 0, 1: 0}
    for talk, (base, edits, first, second) in zip(talks, answers, strict=True):
        assert second.reasons == []
        assert second.the_report.dp_rank == first.the_report.dp_rank
        talk.follow([], DirectiveSet(), first)
        talk.follow(base, edits, second).check()
        homes[second.the_report.dp_rank] += 1
    assert min(homes.values()) > CROWD / 4


async def all_at_once(url, talks):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server closes idle ones
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as http:
        return await asyncio.gather(*(one_session(http, talk, seed) for seed, talk in enumerate(talks)))


async def one_session(http, talk, seed):
    rng = random.Random(seed)

    async def ask(new_tokens, *edits):
        prompt = talk.prompt(new_tokens, *edits)
        body = generate_body(prompt, talk.request(*edits), max_new_tokens=2)
        response = await http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return generate_answer(prompt, response.json())

    def some(length):
        return [rng.randrange(250) for _ in range(length)]

    first = await ask(some(rng.randint(40, 60)))
    talk.commit(first)
    edits = (Directive(5, rng.randrange(6, 20), tuple(some(rng.randrange(9)))),)
    second = await ask(some(rng.randint(3, 9)), *edits)
    return talk.base, DirectiveSet(edits), first, second
