"""Pages larger than a token: runs are moved in whole pages of the prompt, and the rest of them is prefilled.

The reference looks at the prompt page by page: one whose tokens all come from the same kept run, and there from pages
that are kept whole or begin in the span before, is moved; every other page is run through the model.
"""

from __future__ import annotations

import pytest

from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet, Mode

pytestmark = pytest.mark.server

BASE_LEN = 150
SAMPLED_LEN = 3


@pytest.fixture(scope="session", params=[("llama", 4), ("deepseek_v2", 16)], ids=lambda param: f"{param[0]}-{param[1]}")
def live(request, cpu_server):
    model, page_size = request.param
    return cpu_server(model, "--page-size", str(page_size))


@pytest.fixture(autouse=True)
def pool_is_whole_afterwards(server):
    yield
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0
    server.flush()
    assert server.idle_pool().free == pool.total


class PagedConversation(JudgedConversation):
    """A conversation on a server with pages. `moved` counts the tokens that the last edit should have moved."""

    def __init__(self, server, model, **fields) -> None:
        super().__init__(server, model, **fields)
        self.page_size = server.status()["page_size"]
        self.moved = 0

    def splice(self, edits):
        if not edits:
            return self.state
        base, self.moved, spliced = self.state, 0, self.state.model.empty()
        edited = edits.apply(base.tokens)
        source = {}
        for run in edits.kept_runs(len(base)):
            source |= {old + run.shift: old for old in range(run.start, run.end - run.end % self.page_size)}
        for start in range(0, len(edited), self.page_size):
            end = start + self.page_size
            first, last = source.get(start), source.get(end - 1)
            if first is not None and last == first + self.page_size - 1:
                spliced = base.moved_onto(spliced, first, last + 1, start - first)
                self.moved += self.page_size if first > edits[0].start else 0
            else:
                spliced = spliced.extend(edited[start:end])
        return spliced


@pytest.fixture
def talk(server, reference, tokens):
    talk = PagedConversation(server, reference)
    talk.turn(tokens(BASE_LEN), max_new_tokens=SAMPLED_LEN)
    return talk


EDITS = {
    "on page boundaries": [(48, 96, 16)],
    "off page boundaries, replacement shorter": [(50, 90, 5)],
    "replacement longer": [(50, 59, 30)],
    "as long": [(50, 90, 40)],
    "no replacement": [(50, 91, 0)],
    "insertion": [(37, 37, 9)],
    "at the start": [(0, 21, 2)],
    "three spans": [(20, 35, 4), (60, 62, 20), (101, 120, 0)],
    "two spans with less than a page between": [(20, 35, 2), (37, 60, 30)],
    "two spans that touch": [(20, 35, 2), (35, 60, 30)],
}


@pytest.mark.parametrize("spans", EDITS.values(), ids=EDITS.keys())
def test_one_set(talk, tokens, spans):
    edits = [Directive(start, end, tuple(tokens(length))) for start, end, length in spans]
    judged = talk.judged_turn(tokens(7), *edits)
    report = judged.answer.the_report
    assert report.rotated == sum(outcome.moved for outcome in report.directives) == talk.moved > 0
    assert judged.gap_to_exact() > 0.01


def test_edits_upon_edits(talk, tokens):
    for spans in ([(50, 90, 5)], [], [(30, 41, 3), (80, 83, 11)], [(20, 25, 40)], []):
        edits = [Directive(start, end, tuple(tokens(length))) for start, end, length in spans]
        talk.judged_turn(tokens(21), *edits, max_new_tokens=5)


def test_retry(talk, tokens):
    edit, new_tokens = Directive(50, 90, tuple(tokens(5))), tokens(7)
    retry = talk.fork()
    first = talk.judged_turn(new_tokens, edit).answer.the_report
    second = retry.judged_turn(new_tokens, edit).answer.the_report
    assert [(outcome.status, outcome.moved) for outcome in second.directives] == [("already", talk.moved)]
    assert second.marks == first.marks
    assert second.rotated == 0


def test_no_whole_page_downstream(talk, tokens):
    answer = talk.turn(tokens(7), Directive(60, BASE_LEN + 1, tuple(tokens(5))))
    assert answer.reasons == ["nothing_downstream"]
    assert_exact(talk.state.model, answer)


def test_nobody_else_finds_moved_pages(talk, server, reference, tokens):
    answer = talk.judged_turn(tokens(7), Directive(50, 90, tuple(tokens(5)))).answer
    plain = server.generate(answer.prompt)
    assert_exact(reference, plain)
    assert plain.cached < 50 + 5 + talk.page_size, "the page behind the replacement was prefilled too"


def test_forget(talk, server, reference, tokens):
    base = list(talk.base)
    talk.judged_turn(tokens(7), Directive(50, 90, tuple(tokens(5))))
    talk.turn(tokens(7), Directive(30, 45, (), Mode.FORGET))
    assert_exact(reference, talk.last.answer)
    for text in (base, talk.last.answer.prompt):
        assert_exact(reference, server.generate(text))


def test_base_cached_in_part(server, reference, tokens):
    """The cached head of a run is moved, and a try that finds it there says no more than that."""
    base = tokens(BASE_LEN)
    edit, new_tokens = Directive(33, 50, tuple(tokens(4))), tokens(9)
    for status in ("spliced", "already"):
        talk = PagedConversation(server, reference)
        if status == "spliced":
            server.generate(base[:101], max_new_tokens=1)
        talk.base, talk.state = base, reference.prefill(base[:101])
        outcome = talk.judged_turn(new_tokens, edit).answer.the_report.directives[0]
        assert (outcome.status, outcome.moved) == (status, talk.moved)


def test_replacements_are_not_reused(talk, tokens):
    """A marker rarely lies on page boundaries at both places, so with pages it is always prefilled."""
    edit, new_tokens = Directive(50, 90, tuple(talk.base[16:32])), tokens(7)
    request = talk.request(edit).model_copy(update={"reuse_replacements": True})
    base = talk.base
    answer = talk.server.generate(talk.prompt(new_tokens, edit), request)
    talk.follow(base, DirectiveSet.of(edit), answer).check()
    assert [(outcome.status, outcome.reused) for outcome in answer.the_report.directives] == [("spliced", 0)]
