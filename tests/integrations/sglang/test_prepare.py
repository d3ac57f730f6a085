"""`POST /leyline/prepare`: helper prefill and splice while the agent's tools run, so that the turn is a plain hit."""

from __future__ import annotations

import pytest

from background import StreamingRequest
from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive, Mode
from leyline_agent.wire import KEY

pytestmark = pytest.mark.server

BASE_LEN = 150


@pytest.fixture
def talk(server, reference, tokens):
    talk = JudgedConversation(server, reference, by_report=True)
    talk.turn(tokens(BASE_LEN))
    return talk


@pytest.fixture(autouse=True)
def pool_is_whole_afterwards(server):
    yield
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0


@pytest.mark.parametrize("replacement_len", [0, 5, 60])
def test_turn_is_a_plain_hit(talk, tokens, replacement_len):
    prepared = talk.prepare(Directive(60, 90, tuple(tokens(replacement_len))))
    assert prepared.fallbacks == ()
    assert [outcome.status for outcome in prepared.directives] == ["spliced"]
    assert prepared.rotated == BASE_LEN + 7 - 90

    report = talk.judged_turn(tokens(7)).answer.the_report

    assert report.rotated == 0
    assert report.helper_s == 0
    assert report.exact + report.amortized >= len(talk.state) - 7 - 8
    assert report.prefilled <= 1 + 7


def test_turn_that_repeats_the_directives(talk, tokens):
    """A client that sends the same directives with the turn finds them done."""
    edit = Directive(60, 90, tuple(tokens(5)))
    unaware = talk.fork()
    talk.prepare(edit)
    report = unaware.judged_turn(tokens(7), edit).answer.the_report
    assert [outcome.status for outcome in report.directives] == ["already"]
    assert report.rotated == 0


def test_several_spans_then_more_on_top(talk, tokens):
    talk.prepare(Directive(20, 35, tuple(tokens(4))), Directive(60, 62, tuple(tokens(20))), Directive(120, 140))
    talk.judged_turn(tokens(7))
    talk.prepare(Directive(10, 50, tuple(tokens(3))))
    talk.judged_turn(tokens(7), Directive(70, 75))


def test_prepared_in_vain(talk, tokens):
    """The agent changes its mind: other edits, or none. What was prepared is in nobody's way."""
    other, none = talk.fork(), talk.fork()
    talk.prepare(Directive(60, 90, tuple(tokens(5))))
    other.judged_turn(tokens(7), Directive(40, 100, tuple(tokens(9))))
    none.judged_turn(tokens(7))


def test_exact_request_does_not_hit_what_was_prepared(talk, server, reference, tokens):
    talk.prepare(Directive(60, 90, tuple(tokens(5))))
    plain = server.generate([*talk.base, *tokens(3)])
    assert plain.cached <= 65
    assert_exact(reference, plain)


def test_forget(talk, tokens):
    edit = Directive(60, 90, tuple(tokens(5)), Mode.FORGET)
    report = talk.prepare(edit)
    assert report.marks == ()
    assert report.amortized == 0
    talk.judged_turn(tokens(7))


def test_base_under_a_salt(server, reference, tokens):
    talk = JudgedConversation(server, reference, cache_salt="mine")
    talk.turn(tokens(BASE_LEN))
    assert talk.prepare(Directive(60, 90, tuple(tokens(5)))).fallbacks == ()
    report = talk.judged_turn(tokens(7)).answer.the_report
    assert report.amortized > 0


def test_bad_directives(talk, tokens):
    edit = Directive(60, 90, tuple(tokens(5)))
    report = talk.server.prepare(talk.prompt([], edit), "{nonsense")
    assert [fallback.reason for fallback in report.fallbacks] == ["malformed"]
    assert report.marks == ()
    talk.judged_turn(tokens(7), edit)


def test_base_that_is_not_cached(server, reference, tokens):
    talk = JudgedConversation(server, reference)
    talk.base = tokens(BASE_LEN)
    report = talk.prepare(Directive(60, 90, tuple(tokens(5))))
    assert [fallback.reason for fallback in report.fallbacks] == ["base_not_cached"]
    talk.judged_turn(tokens(7))


@pytest.mark.parametrize("body", [{}, {"input_ids": "text"}, {"input_ids": [], KEY: "{}"}, {"input_ids": [1, 2]}, []])
def test_body_that_is_no_request(server, body):
    response = server.http.post("/leyline/prepare", json=body)
    assert response.status_code == 400
    assert response.json()


def test_while_the_base_is_in_use(talk, server, reference, tokens):
    """Somebody else decodes on the base meanwhile; neither notices the other."""
    with StreamingRequest(server, talk.base, max_new_tokens=300) as running:
        running.wait_for_first_token()
        talk.prepare(Directive(60, 90, tuple(tokens(5))))
        assert_exact(reference, running.result())
    talk.judged_turn(tokens(7))
