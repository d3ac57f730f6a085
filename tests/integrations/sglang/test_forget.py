"""FORGET: the turn is that of a fresh prefill, and nothing that saw the span stays in the cache."""

from __future__ import annotations

import time

import pytest

from background import StreamingRequest
from judge import TOLERANCE, JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.wire import SpliceRequest

pytestmark = pytest.mark.server

BASE_LEN = 160


def forget(start, end, replacement=()):
    return Directive(start, end, tuple(replacement), Mode.FORGET)


@pytest.fixture
def talk(server, reference, tokens):
    server.flush()  # with other conversations in the cache, one may begin with the same random token
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    return talk


@pytest.mark.parametrize(
    ("start", "end", "replacement_len"),
    [(50, 80, 4), (50, 80, 40), (50, 80, 0), (0, 30, 3), (0, 30, 0), (50, 50, 5), (120, 168, 6)],
)
def test_equals_a_fresh_prefill(talk, tokens, start, end, replacement_len):
    judged = talk.judged_turn(tokens(5), forget(start, end, tokens(replacement_len)))
    report = judged.answer.the_report
    assert [outcome.status for outcome in report.directives] == ["forgotten"]
    assert report.marks == ()
    assert report.amortized == report.rotated == 0
    assert judged.answer.cached == report.exact == start


def test_right_after_an_amortize_of_the_same_text(server, reference, tokens):
    """The trap: the spliced text is in the cache under exactly these token ids, and it is not what a prefill gives."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    replacement, new = tokens(6), tokens(5)
    other = talk.fork()
    amortized = talk.judged_turn(new, Directive(50, 80, tuple(replacement)))
    assert amortized.gap_to_exact() > 0.05

    forgotten = other.judged_turn(new, forget(50, 80, replacement))

    assert forgotten.answer.prompt == amortized.answer.prompt
    fresh = server.generate(forgotten.answer.prompt, cache_salt="never used before")
    assert fresh.cached == 0
    assert forgotten.answer.output == fresh.output
    assert_exact(reference, fresh)


def test_of_an_amortized_conversation(talk, tokens):
    """Marks come along with a FORGET, and are not followed."""
    talk.judged_turn(tokens(20), Directive(50, 80, tuple(tokens(6))))
    assert talk.marks
    judged = talk.judged_turn(tokens(5), forget(100, 120, tokens(3)))
    assert judged.answer.the_report.marks == talk.marks == ()
    assert judged.answer.cached <= 56, "only the prefix and the replacement of the first edit are exact"
    talk.judged_turn(tokens(5))


def test_refresh_without_an_edit(talk, tokens):
    """An empty FORGET pays for exactness again: the same text, prefilled anew from there."""
    talk.judged_turn(tokens(20), Directive(50, 80, tuple(tokens(6))))
    judged = talk.judged_turn(tokens(5), forget(56, 56))
    assert judged.answer.cached <= 56


def test_several_spans(talk, tokens):
    judged = talk.judged_turn(tokens(5), forget(30, 40, tokens(2)), forget(60, 60, tokens(9)), forget(90, 130))
    assert [outcome.status for outcome in judged.answer.the_report.directives] == ["forgotten"] * 3
    assert judged.answer.cached == 30


def test_beside_an_amortize_the_whole_turn_is_exact(talk, tokens):
    answer = talk.turn(tokens(5), Directive(20, 30, tuple(tokens(3))), forget(70, 80))
    assert answer.reasons == ["forget_in_set"]
    assert [outcome.status for outcome in answer.the_report.directives] == ["refused", "forgotten"]
    assert talk.last.gap_to_exact() < TOLERANCE
    assert answer.the_report.amortized == 0
    assert answer.the_report.marks == ()


def test_amortize_on_top_of_a_forget(talk, tokens):
    talk.judged_turn(tokens(20), forget(50, 80, tokens(6)))
    talk.judged_turn(tokens(5), Directive(20, 30, tuple(tokens(3))))


# --- what stays in the cache -----------------------------------------------------------------------------------------


def test_old_branch_is_gone(server, talk, tokens):
    old_base = list(talk.base)
    talk.turn(tokens(5), forget(50, 80, tokens(4)))
    again = server.generate(old_base)
    assert again.cached == 50
    assert_exact(talk.state.model, again)


def test_old_amortized_branch_is_gone(server, talk, tokens):
    talk.judged_turn(tokens(20), Directive(50, 80, tuple(tokens(6))))
    old_base, old_marks = list(talk.base), talk.marks
    talk.turn(tokens(5), forget(100, 120))
    again = server.generate(old_base, SpliceRequest.build(old_base, DirectiveSet(), old_marks))
    assert again.cached <= 100
    assert again.the_report.amortized <= 100 - 56


def test_later_amortize_cannot_bring_it_back(talk, tokens):
    before = talk.fork()
    talk.judged_turn(tokens(5), forget(50, 80, tokens(4)))
    answer = before.turn(tokens(5), Directive(60, 90, tuple(tokens(2))))
    assert answer.reasons == ["base_not_cached"]
    assert before.last.gap_to_exact() < TOLERANCE
    assert answer.cached <= 60 + 2, "up to the new span's start, and the replacement"


def test_what_lies_before_the_span_stays(server, talk, tokens):
    """A neighbour who shares the prefix up to the span keeps all of its cache."""
    neighbour = talk.base[:50] + tokens(40)
    server.generate(neighbour)
    talk.judged_turn(tokens(5), forget(50, 80, tokens(4)))
    again = server.generate(neighbour)
    assert again.cached == len(neighbour) - 1, "all but the last token, which is always computed"


def test_locked_branch_goes_when_it_is_released(server, talk, tokens):
    """Somebody is decoding on the old branch. That answer stays right, and its end takes the branch along."""
    old_base = list(talk.base)
    with StreamingRequest(server, old_base, max_new_tokens=800) as running:
        running.wait_for_first_token()
        talk.turn(tokens(5), forget(50, 80, tokens(4)))
        assert running.is_alive(), "the test wants the branch locked during the FORGET; make the request longer"
        answer = running.result()
    talk.last.check()
    assert_exact(talk.state.model, answer)
    deadline = time.monotonic() + 10
    while server.idle_pool().in_use and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.generate(old_base).cached <= 50


def test_twice_the_same(talk, tokens):
    """A retry of the same FORGET (the answer was lost, say) is answered as the first was."""
    replacement, new = tokens(4), tokens(5)
    retry = talk.fork()
    first = talk.judged_turn(new, forget(50, 80, replacement)).answer
    second = retry.judged_turn(new, forget(50, 80, replacement)).answer
    assert second.output == first.output
    assert second.the_report.amortized == 0
