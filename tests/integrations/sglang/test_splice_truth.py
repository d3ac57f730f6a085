"""AMORTIZE on the real server equals the hand-made splice, in every log-prob of the next eight tokens.

Every turn here is judged by tests/support/judge.py: fp32, 1e-4 nats, all 320 log-probs of each step, teacher-forced on
the server's own tokens. That the judge can tell right from wrong is shown at the end, by mutation.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from judge import JudgedConversation
from leyline_agent.directives import Directive, DirectiveSet
from reference import MUTATIONS

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Edit:
    """A span of the base, and how many random tokens take its place."""

    start: int
    end: int
    replacement_len: int

    def directive(self, tokens) -> Directive:
        return Directive(self.start, self.end, tuple(tokens(self.replacement_len)))


BASE_LEN = 200  # prompt tokens of the first turn; three sampled ones follow, of which the last has no KV yet
SAMPLED_LEN = 3

ONE_SET = {
    "one span, replacement shorter": [Edit(60, 90, 5)],
    "one span, replacement longer": [Edit(60, 90, 47)],
    "one span, replacement as long": [Edit(60, 90, 30)],
    "one span, no replacement": [Edit(60, 90, 0)],
    "one token for another": [Edit(60, 61, 1)],
    "insertion": [Edit(60, 60, 9)],
    "span at the start of the base": [Edit(0, 40, 6)],
    "span at the start of the base, no replacement": [Edit(0, 40, 0)],
    "insertion at the start of the base": [Edit(0, 0, 6)],
    "all but the first token and the last ten": [Edit(1, 190, 0)],
    "three spans, different deltas": [Edit(20, 35, 4), Edit(60, 62, 20), Edit(120, 140, 0)],
    "three spans, deltas that cancel": [Edit(20, 30, 4), Edit(60, 62, 8), Edit(120, 121, 1)],
    "three spans, only deletions": [Edit(20, 35, 0), Edit(60, 80, 0), Edit(120, 140, 0)],
    "two spans that touch": [Edit(20, 35, 2), Edit(35, 50, 30)],
    "two spans one token apart": [Edit(20, 35, 2), Edit(36, 50, 30)],
    "downstream of one cached token": [Edit(60, 201, 5)],
}


@pytest.mark.parametrize("edits", ONE_SET.values(), ids=ONE_SET.keys())
def test_one_set(server, reference, tokens, edits):
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN), max_new_tokens=SAMPLED_LEN)
    directives = DirectiveSet(tuple(edit.directive(tokens) for edit in edits))

    judged = talk.judged_turn(tokens(7), *directives)

    report = judged.answer.the_report
    assert [outcome.status for outcome in report.directives] == ["spliced"] * len(edits)
    moved = sum(len(run) for run in directives.kept_runs(BASE_LEN + SAMPLED_LEN - 1) if run.end > edits[0].start)
    assert report.rotated == moved
    assert judged.answer.cached == len(judged.spliced)


def test_the_first_edit_changes_what_the_model_says(server, reference, tokens):
    """Without this, a server that silently prefills everything again would pass all the rest."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    judged = talk.judged_turn(tokens(7), Edit(60, 90, 5).directive(tokens))
    assert judged.gap_to_exact() > 0.05


@pytest.fixture
def edited(server, reference, tokens):
    """A conversation whose base [0, 200) was edited at [60, 90) -> 5 tokens: amortized KV begins at 65."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    assert talk.judged_turn(tokens(7), Edit(60, 90, 5).directive(tokens)).answer.mark_positions == [65]
    return talk


ON_TOP = {
    "inside the amortized part": [Edit(100, 120, 3)],
    "upstream of the first edit": [Edit(20, 40, 6)],
    "upstream, touching the first replacement": [Edit(40, 60, 6)],
    "the first replacement itself": [Edit(60, 65, 11)],
    "part of the first replacement": [Edit(62, 64, 0)],
    "swallowing the first edit": [Edit(50, 80, 4)],
    "from the first replacement into its downstream": [Edit(62, 70, 4)],
    "ending where the downstream starts": [Edit(50, 65, 2)],
    "at the very start of the downstream": [Edit(65, 80, 4)],
    "at the very start of the downstream, no replacement": [Edit(65, 80, 0)],
    "insertion at the very start of the downstream": [Edit(65, 65, 4)],
    "in what was sampled": [Edit(177, 180, 4)],
    "spans on both sides": [Edit(30, 35, 9), Edit(130, 150, 0)],
    "spans that touch the first edit on both sides": [Edit(55, 60, 2), Edit(65, 66, 3)],
}


@pytest.mark.parametrize("edits", ON_TOP.values(), ids=ON_TOP.keys())
def test_second_edit_on_top_of_the_first(edited, tokens, edits):
    judged = edited.judged_turn(tokens(6), *(edit.directive(tokens) for edit in edits))
    assert judged.answer.cached == len(judged.spliced)


def test_conversation_of_many_turns(server, reference, tokens):
    """Plain and edited turns in turn; each base holds what the model said, edits stack up, marks travel along."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(150))
    for edits in (
        [Edit(40, 70, 6)],
        [],
        [Edit(20, 21, 4), Edit(100, 130, 2)],
        [Edit(10, 60, 3)],
        [],
        [Edit(0, 5, 1), Edit(30, 31, 0), Edit(70, 75, 9)],
    ):
        judged = talk.judged_turn(tokens(25), *(edit.directive(tokens) for edit in edits), max_new_tokens=11)
        assert judged.answer.cached == len(judged.spliced)


def test_undo(server, reference, tokens):
    """An edit and its inverse: rotated there and back, what stood behind the span still knows what it knew."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    edit = DirectiveSet.of(Edit(60, 90, 5).directive(tokens))
    undo = edit.invert(talk.base)
    talk.judged_turn(tokens(4), *edit)
    talk.judged_turn(tokens(4), *undo)


def test_directive_that_reaches_the_end_has_nothing_to_move(server, reference, tokens):
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN), max_new_tokens=1)
    answer = talk.turn(tokens(7), Edit(60, BASE_LEN + 1, 5).directive(tokens))
    assert answer.reasons == ["nothing_downstream"]
    assert answer.the_report.rotated == answer.the_report.amortized == 0
    assert talk.last.gap_to_exact() < 1e-4


@pytest.fixture
def three_spans(server, reference, tokens):
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    edits = ONE_SET["three spans, different deltas"]
    return talk.judged_turn(tokens(7), *(edit.directive(tokens) for edit in edits))


@pytest.mark.parametrize("rule", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_rotation_would_be_noticed(three_spans, rule):
    """The server agrees with the reference; with a reference that rotates wrongly it disagrees by far."""
    assert three_spans.gap(rule) > 0.05
