"""`reuse_replacements`: a replacement that the base holds elsewhere is copied from there and rotated, not prefilled.

The reference does the same by hand, from the place that the test names.
"""

from __future__ import annotations

import pytest

from judge import TOLERANCE, JudgedConversation, assert_exact
from leyline_agent.directives import Directive

pytestmark = [
    pytest.mark.server,
    pytest.mark.parametrize(
        "live",
        ["llama-rust", "deepseek_v2-python", pytest.param("deepseek_v3-rust", marks=pytest.mark.slow)],
        indirect=True,
    ),
]

PLACE, MARKER_LEN, BASE_LEN = 20, 8, 200
SAMPLED_LEN = 3
HELD_LEN = BASE_LEN + SAMPLED_LEN - 1


class ReusingConversation(JudgedConversation):
    """A conversation that opts in. `places` says from where in the base each replacement has to come."""

    def __init__(self, server, model, **fields) -> None:
        super().__init__(server, model, **fields)
        self.places = {}

    def request(self, *directives):
        return super().request(*directives).model_copy(update={"reuse_replacements": True})

    def splice(self, edits):
        base, position, shift = self.state, 0, 0
        spliced = base.head(0)
        for edit in edits:
            spliced = base.moved_onto(spliced, position, edit.start, shift)
            place = self.places.get(edit.replacement)
            if place is None:
                spliced = spliced.extend(edit.replacement)
            else:
                spliced = base.moved_onto(spliced, place, place + len(edit.replacement), len(spliced) - place)
            position, shift = edit.end, shift + edit.delta
        return base.moved_onto(spliced, position, len(base), shift)


@pytest.fixture
def marker(tokens):
    return tuple(tokens(MARKER_LEN))


@pytest.fixture
def talk(server, reference, tokens, marker):
    """A conversation whose base holds the marker at PLACE."""
    talk = ReusingConversation(server, reference)
    rest = tokens(BASE_LEN - PLACE - MARKER_LEN)
    talk.turn([*tokens(PLACE), *marker, *rest], max_new_tokens=SAMPLED_LEN)
    talk.places = {marker: PLACE}
    return talk


@pytest.fixture(autouse=True)
def pool_is_whole_afterwards(server):
    yield
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0


def test_copied_and_rotated(talk, tokens, marker):
    judged = talk.judged_turn(tokens(7), Directive(80, 110, marker))
    report, moved = judged.answer.the_report, HELD_LEN - 110
    (outcome,) = report.directives
    assert (outcome.status, outcome.moved, outcome.reused) == ("spliced", moved, MARKER_LEN)
    assert outcome.rotated == report.rotated == report.amortized == MARKER_LEN + moved
    assert (report.exact, report.prefilled) == (80, 1 + 7)
    assert judged.answer.mark_positions == [80, 80 + MARKER_LEN]


def test_prefilled_unless_asked_for(talk, tokens, marker):
    """The default differs, in the report and in what the model says."""
    reusing, plain = talk, JudgedConversation(talk.server, talk.state.model)
    plain.base, plain.state = list(talk.base), talk.state
    edit, new_tokens = Directive(80, 110, marker), tokens(7)
    report = plain.judged_turn(new_tokens, edit).answer.the_report
    assert (report.directives[0].reused, report.rotated) == (0, HELD_LEN - 110)
    assert (report.exact, report.prefilled) == (80, MARKER_LEN + 1 + 7)
    reusing.judged_turn(new_tokens, edit)
    assert reusing.last.answer.log_probs[0] != pytest.approx(plain.last.answer.log_probs[0], abs=0.01)


def test_nothing_else_finds_it(talk, server, reference, tokens, marker):
    answer = talk.judged_turn(tokens(7), Directive(80, 110, marker)).answer
    plain = server.generate(answer.prompt)
    assert plain.cached == 80
    assert_exact(reference, plain)


def test_retry(talk, tokens, marker):
    edit, new_tokens = Directive(80, 110, marker), tokens(7)
    retry = talk.fork()
    retry.places = talk.places
    first = talk.judged_turn(new_tokens, edit).answer.the_report
    second = retry.judged_turn(new_tokens, edit).answer.the_report
    (outcome,) = second.directives
    assert (outcome.status, outcome.moved, outcome.reused, outcome.rotated) == (
        "already", HELD_LEN - 110, MARKER_LEN, 0,
    )  # fmt: skip
    assert second.marks == first.marks


def test_last_of_several_places(server, reference, tokens, marker):
    talk = ReusingConversation(server, reference)
    talk.turn([*tokens(20), *marker, *tokens(30), *marker, *tokens(100), *marker, *tokens(20)])
    talk.places = {marker: 58}  # the third stands behind the edit
    assert talk.judged_turn(tokens(7), Directive(80, 110, marker)).answer.the_report.directives[0].reused == MARKER_LEN


def test_with_other_replacements(talk, tokens, marker):
    """One in front that has to be prefilled, one behind that is the marker again, one that is empty."""
    edits = [
        Directive(50, 60, tuple(tokens(5))),
        Directive(80, 110, marker),
        Directive(120, 121),
        Directive(140, 145, marker),
    ]
    report = talk.judged_turn(tokens(7), *edits).answer.the_report
    assert [outcome.reused for outcome in report.directives] == [0, MARKER_LEN, 0, MARKER_LEN]
    assert [outcome.moved for outcome in report.directives] == [20, 10, 19, HELD_LEN - 145]
    assert report.prefilled == 5 + 1 + 7


def test_place_that_is_itself_removed(talk, tokens, marker):
    talk.judged_turn(tokens(7), Directive(PLACE - 5, PLACE + 20), Directive(80, 110, marker))
    assert talk.last.answer.the_report.directives[1].reused == MARKER_LEN


def test_marker_after_marker(talk, tokens, marker):
    """An agent's session: each edit takes the marker from where the one before put it, already moved once or twice."""
    for start in (60, 70, 80):
        report = talk.judged_turn(tokens(30), Directive(start, start + 12, marker)).answer.the_report
        assert report.directives[0].reused == MARKER_LEN
        talk.places = {marker: start}
        talk.judged_turn(tokens(5))


def test_nothing_downstream_but_the_marker(talk, tokens, marker):
    report = talk.judged_turn(tokens(7), Directive(80, HELD_LEN, marker)).answer.the_report
    assert (report.directives[0].moved, report.directives[0].reused) == (0, MARKER_LEN)


def test_replacement_that_the_base_does_not_hold(talk, tokens, marker):
    report = talk.judged_turn(tokens(7), Directive(80, 110, (*marker, 7))).answer.the_report
    assert (report.directives[0].reused, report.directives[0].moved) == (0, HELD_LEN - 110)


def test_base_that_is_gone(talk, server, reference, tokens, marker):
    server.flush()
    answer = talk.turn(tokens(7), Directive(80, 110, marker))
    assert answer.reasons == ["base_not_cached"]
    assert talk.last.gap_to_exact() < TOLERANCE
