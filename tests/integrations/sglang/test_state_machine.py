"""Random sessions, forks, edits of both modes, aborts, flushes and memory pressure against the real server.

After every step: each log-prob is that of the reference, no request reused more than the naive model allows (and no
less, while nothing can have been evicted), and every slot of the pool is accounted for.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from background import StreamingRequest
from cache_model import CacheModel
from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet, Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.server,
    pytest.mark.parametrize(
        "live",
        ["small-llama-rust", pytest.param("small-deepseek_v2-python", marks=pytest.mark.slow)],
        indirect=True,
    ),
]

EXPECTED_REASONS = {
    "base_not_cached", "replacement_not_cached", "nothing_downstream", "no_room", "evicted", "drift_budget",
    "forget_in_set",
}  # fmt: skip
"""Why a good directive may not be spliced here: something was evicted, flushed, forgotten or rotated too often."""


def text(seed: int, length: int) -> list[int]:
    """The same seed gives texts that begin alike, so that sessions share prefixes."""
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


def random_edits(base_len: int, rng: random.Random, modes: Sequence[Mode]) -> DirectiveSet:
    """Up to three edits of a base of `base_len` tokens: deletions, insertions, replacements that grow and shrink."""
    count = rng.randint(1, 3)
    made, position = [], 0
    for number in range(count):
        if position > base_len:
            break
        start = position + rng.randrange(max(1, (base_len - position) // count))
        end = min(base_len, start + rng.choice([0, 1, rng.randrange(60)]))
        replacement = text(rng.randrange(6), rng.choice([0, 1, rng.randrange(40)]))
        if start < end or replacement:
            made.append(Directive(start, end, tuple(replacement), modes[number % len(modes)]))
            position = end + 1
    return DirectiveSet(tuple(made))


AMORTIZE, FORGET, BOTH = [Mode.AMORTIZE], [Mode.FORGET], [Mode.AMORTIZE, Mode.FORGET]

STEPS = {
    "start": 2,
    "fork": 2,
    "continue_": 2,
    "amortize": 6,
    "forget": 2,
    "amortize and forget": 1,
    "prepare": 2,
    "go back": 1,
    "lose marks": 1,
    "ask exactly": 3,
    "hang up": 1,
    "press": 3,
    "flush": 1,
}
"""What may happen, and how often beside the rest."""


class ServerMachine(RuleBasedStateMachine):
    """One server, a few sessions, and what the model says about them."""

    def __init__(self, server, reference, seen: Counter[str]) -> None:
        super().__init__()
        self.server, self.reference, self.seen = server, reference, seen
        self.pool_size = server.pool().total
        self.model = CacheModel()
        self.talks: list[JudgedConversation] = []
        server.flush()

    @rule(
        what=st.sampled_from([what for what, weight in STEPS.items() for _ in range(weight)]),
        who=st.integers(0, 5),
        seed=st.integers(0, 2**32),
    )
    def step(self, what, who, seed):
        """One rule for all, because hypothesis switches rules off at random, and a game without edits shows nothing."""
        rng = random.Random(seed)
        if what == "start" or not self.talks:
            self.start(rng)
        else:
            getattr(self, what.replace(" ", "_"))(self.talks[who % len(self.talks)], rng)
        self.seen[what] += 1

    # --- steps ---

    def start(self, rng):
        fields = {"cache_salt": "a"} if rng.random() < 0.3 else {}
        talk = JudgedConversation(self.server, self.reference, by_report=True, **fields)
        self.talks.append(talk)
        self.take_turn(talk, text(rng.randrange(6), rng.randrange(30, 250)))

    def fork(self, talk, rng):
        self.talks.append(talk.fork())

    def continue_(self, talk, rng):
        self.take_turn(talk, text(rng.randrange(6), rng.randrange(1, 40)))

    def amortize(self, talk, rng):
        self.edit(talk, rng, AMORTIZE)

    def forget(self, talk, rng):
        self.edit(talk, rng, FORGET)

    def amortize_and_forget(self, talk, rng):
        self.edit(talk, rng, BOTH)

    def edit(self, talk, rng, modes):
        edits = random_edits(len(talk.base), rng, modes)
        new_tokens = text(rng.randrange(6), rng.randrange(1, 40))
        retry = talk.fork()
        self.take_turn(talk, new_tokens, edits)
        if rng.random() < 0.2:  # the answer was lost, say
            self.take_turn(retry, new_tokens, edits)

    def prepare(self, talk, rng):
        edits = random_edits(len(talk.base), rng, AMORTIZE)
        if edits:
            exact_len = edits[0].start + len(edits[0].replacement)
            report = talk.prepare(*edits)
            assert {fallback.reason.value for fallback in report.fallbacks} <= EXPECTED_REASONS
            self.model.only_plain = False
            salt = talk.fields.get("cache_salt")
            self.model.serve(talk, salt, talk.base, report.marks, slots=2 * len(talk.base))
            self.model.serve(talk, salt, talk.base[:exact_len], slots=0)

    def go_back(self, talk, rng):
        """The agent drops its last turns."""
        length = rng.randrange(1, len(talk.base))
        talk.base = talk.base[:length]
        talk.marks = tuple(mark for mark in talk.marks if mark[0] < length)
        talk.state = talk.state.head(length)

    def lose_marks(self, talk, rng):
        """A session restored without its marks: from here on, only exact KV is its own."""
        talk.marks = ()
        talk.state = self.reference.prefill(talk.base)

    def ask_exactly(self, talk, rng):
        """A stock client asks for what a session holds."""
        salt = talk.fields.get("cache_salt")
        prompt = [*talk.base, 1]
        bound = self.model.bound(salt, prompt)
        answer = self.server.generate(prompt, max_new_tokens=2, **talk.fields)
        assert_exact(self.reference, answer)
        self.check_reuse(answer, bound)
        self.model.serve(None, salt, answer.base[:-1])

    def hang_up(self, talk, rng):
        edits = random_edits(len(talk.base), rng, AMORTIZE)
        prompt = [*talk.prompt([], *edits), 3]
        options = {"max_new_tokens": 60, "log_probs": False, **talk.fields}
        with StreamingRequest(self.server, prompt, talk.request(*edits), **options):
            time.sleep(rng.choice([0.0, 0.005, 0.02, 0.05]))
        self.model.serve_unfinished(None, talk.fields.get("cache_salt"), prompt)

    def press(self, talk, rng):
        """Somebody else's long prompt pushes out what was not used for longest: much of it, or the end of one base."""
        much, little = self.pool_size // 2, self.server.idle_pool().free + rng.randrange(200)
        length = min(rng.choice([rng.randrange(much // 2, much), little]), self.pool_size - 300)
        prompt = text(rng.randrange(10, 2**32), length)
        answer = self.server.generate(prompt, max_new_tokens=1, log_probs=False)
        self.model.serve(None, None, answer.prompt)
        if length == little:
            self.edit(self.talks[0], rng, AMORTIZE)

    def flush(self, talk, rng):
        self.server.idle_pool()
        self.server.flush()
        self.model.flush()

    # --- checks ---

    @invariant()
    def every_slot_is_accounted_for(self):
        pool = self.server.idle_pool()
        assert pool.lost == 0
        assert pool.in_use == 0

    def take_turn(self, talk, new_tokens, edits=None) -> None:
        self.talks.sort(key=lambda other: other is talk)  # the first is the one not used for longest
        edits = edits or DirectiveSet()
        salt, base, marks = talk.fields.get("cache_salt"), list(talk.base), talk.marks
        prompt = talk.prompt(new_tokens, *edits)
        answer = talk.turn(new_tokens, *edits, max_new_tokens=3)
        talk.last.check()
        assert set(answer.reasons) <= EXPECTED_REASONS
        report = answer.the_report
        self.seen.update([*answer.reasons, *(outcome.status for outcome in report.directives)])
        if report.spliced:
            last, whole = report.directives[-1], len(base) - 1 - edits[-1].end
            self.seen["spliced in part"] += 0 < last.moved < whole
            self.seen["several spliced"] += len(edits) > 1
        assert report.exact + report.amortized + report.prefilled == report.prompt_tokens == len(prompt)
        assert report.amortized == 0 or report.marks
        if edits and edits.mode is Mode.FORGET:
            assert report.amortized == 0
            start = min(edit.start for edit in edits if edit.mode is Mode.FORGET)
            self.model.forget(talk, salt, base, marks, start)
        if edits:
            self.model.only_plain = False
            exact_len = edits[0].start + len(edits[0].replacement)
            self.model.serve(talk, salt, prompt[:exact_len], slots=exact_len)
        else:
            self.check_reuse(answer, self.model.bound(salt, prompt, report.marks))
        self.model.serve(talk, salt, answer.base[:-1], report.marks)

    def check_reuse(self, answer, bound: int) -> None:
        assert answer.cached <= bound, "reused what this request could not have found"
        if self.model.only_plain and self.model.tokens_served + len(answer.base) < self.pool_size // 2:
            self.seen["reuse foretold"] += 1
            assert answer.cached == bound, "lost what nothing can have evicted"


def run(server, reference, examples: int, *, derandomize: bool) -> Counter[str]:
    """Play `examples` games of 20 steps; tells what happened how often."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: ServerMachine(server, reference, seen),
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            derandomize=derandomize,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            print_blob=True,
        ),
    )
    print(f"what happened: {dict(seen)}")
    return seen


@pytest.mark.timeout(900)
def test_any_order_of_events(server, reference):
    seen = run(server, reference, 25, derandomize=True)
    for happened in (
        "spliced", "several spliced", "already", "forgotten", "forget_in_set", "base_not_cached", "fork",
        "reuse foretold",
    ):  # fmt: skip
        assert seen[happened] >= 3, f"{happened} is too rare for this test to mean anything: {dict(seen)}"


@pytest.mark.slow
@pytest.mark.skipif(
    "LEYLINE_STATE_MACHINE_EXAMPLES" not in os.environ,
    reason="half an hour and more: set LEYLINE_STATE_MACHINE_EXAMPLES=300 to run it",
)
@pytest.mark.timeout(7200)
def test_any_order_of_events_at_length(server, reference):
    run(server, reference, int(os.environ["LEYLINE_STATE_MACHINE_EXAMPLES"]), derandomize=False)
