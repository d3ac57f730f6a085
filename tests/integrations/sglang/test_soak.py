"""Many sessions, edited turn after turn by several threads, on a pool far too small for all of them.

Every turn is judged: what the server says it reused is rebuilt in the reference, and every log-prob must be that of the
rebuilt cache. The short run belongs to every test run; the long one takes its length from `LEYLINE_SOAK_TURNS`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from judge import TOLERANCE, JudgedConversation
from leyline_agent.directives import Directive, DirectiveSet, Mode

pytestmark = [
    pytest.mark.server,
    pytest.mark.parametrize(
        "live",
        ["small-llama-rust", pytest.param("small-deepseek_v2-python", marks=pytest.mark.slow)],
        indirect=True,
    ),
]

THREADS = 4
SESSIONS = 64
LONGEST_BASE = 350
TURNS_IN_A_ROW = 4
"""Turns of a session come in bursts, as an agent's do; with its KV gone after each, nothing would ever be spliced."""


def shrinking_edits(rng: random.Random, base_len: int) -> DirectiveSet:
    """One to three edits; those of a long base take out more than they put in."""
    made, position = [], rng.randrange(base_len // 2)
    for _ in range(rng.randint(1, 3)):
        end = min(base_len, position + rng.randrange(1, 120 if base_len > LONGEST_BASE else 25))
        replacement = tuple(rng.randrange(250) for _ in range(rng.randrange(20)))
        mode = Mode.FORGET if rng.random() < 0.05 else Mode.AMORTIZE
        made.append(Directive(position, end, replacement, mode))
        position = end + rng.randrange(1, 40)
        if position >= base_len:
            break
    return DirectiveSet(tuple(made))


class Worker:
    """A thread's sessions and what became of their turns."""

    def __init__(self, server, reference, number: int) -> None:
        self.server, self.reference = server.again(), reference
        self.rng = random.Random(number)
        self.sessions: dict[int, JudgedConversation] = {}
        self.seen: Counter[str] = Counter()
        self.worst = 0.0

    def run(self, turns: int) -> None:
        while self.seen["turns"] < turns:
            number = self.rng.randrange(SESSIONS // THREADS)
            for _ in range(self.rng.randint(1, TURNS_IN_A_ROW)):
                self.take_turn(number)

    def take_turn(self, number: int) -> None:
        rng, talk = self.rng, self.sessions.get(number)
        new_tokens = [rng.randrange(250) for _ in range(rng.randint(5, 40))]
        if talk is None:
            talk = self.sessions[number] = JudgedConversation(self.server, self.reference, by_report=True)
            answer = talk.turn([number, *new_tokens, *(rng.randrange(250) for _ in range(120))], max_new_tokens=4)
        else:
            answer = talk.turn(new_tokens, *shrinking_edits(rng, len(talk.base)), max_new_tokens=rng.randint(1, 6))
        worst = talk.last.gap()
        assert worst < TOLERANCE, f"off the reference by {worst:.2g} nats: {answer.the_report}"
        report = answer.the_report
        assert report.exact + report.amortized + report.prefilled == len(answer.prompt)
        self.worst = max(self.worst, worst)
        self.seen["turns"] += 1
        self.seen.update({outcome.status for outcome in report.directives} | set(answer.reasons))


def soak(server, reference, turns: int) -> Counter[str]:
    server.flush()
    workers = [Worker(server, reference, number) for number in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as threads:
        for job in [threads.submit(worker.run, turns // THREADS) for worker in workers]:
            job.result()
    seen = sum((worker.seen for worker in workers), Counter())
    print(f"{dict(seen)}, worst gap {max(worker.worst for worker in workers):.1e} nats")
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0
    server.flush()
    assert server.idle_pool().free == pool.total
    return seen


def test_short(server, reference):
    seen = soak(server, reference, 240)
    assert seen["spliced"] >= 40
    assert seen["base_not_cached"] >= 10, "the pool is large enough for all; then this is no soak"


@pytest.mark.slow
@pytest.mark.skipif(
    "LEYLINE_SOAK_TURNS" not in os.environ, reason="eight minutes and more: set LEYLINE_SOAK_TURNS=10000 to run it"
)
@pytest.mark.timeout(4 * 3600)
def test_long(server, reference):
    turns = int(os.environ["LEYLINE_SOAK_TURNS"])
    seen = soak(server, reference, turns)
    assert seen["turns"] >= turns
