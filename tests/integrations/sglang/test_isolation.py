"""Poisoning: amortized KV serves those who made it and nobody else, however alike the text is."""

from __future__ import annotations

import pytest

from judge import TOLERANCE, JudgedConversation, assert_exact, gap
from leyline_agent.directives import Directive, DirectiveSet
from leyline_agent.wire import SpliceRequest

pytestmark = pytest.mark.server

BASE_LEN = 160


@pytest.fixture
def talk(server, reference, tokens):
    """A conversation in mid-life: its base was edited at [50, 80) -> 6 tokens, so amortized KV begins at 56."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    talk.judged_turn(tokens(5), Directive(50, 80, tuple(tokens(6))))
    assert talk.last.gap_to_exact() > 0.05, "or this file would prove nothing"
    return talk


def without_marks(base):
    return SpliceRequest.build(base, DirectiveSet())


@pytest.mark.parametrize("asks_for_report", [False, True])
def test_exact_request_for_the_same_text(server, reference, talk, asks_for_report):
    """The same ids, without marks: what a stock client sends, or ours after it lost its session."""
    prompt = talk.last.answer.prompt
    plain = server.generate(prompt, without_marks(prompt) if asks_for_report else None)
    assert_exact(reference, plain)
    assert plain.cached == 56, "the prefix and the replacement were prefilled, so they are shared; no more is"
    if asks_for_report:
        assert plain.the_report.amortized == 0
        assert plain.the_report.marks == ()


def test_exact_continuation_of_what_was_sampled(server, reference, talk, tokens):
    """Tokens sampled behind amortized KV are as amortized as what is before them."""
    plain = server.generate([*talk.base, *tokens(9)])
    assert_exact(reference, plain)
    assert plain.cached == 56


@pytest.mark.parametrize("part_len", [57, 80, 130])
def test_exact_request_for_a_part_of_it(server, reference, talk, part_len):
    plain = server.generate(talk.base[:part_len])
    assert_exact(reference, plain)
    assert plain.cached <= 56


def test_replacement_prefilled_on_amortized_kv(server, reference, tokens):
    """The second of two replacements saw amortized KV; a plain request for that prefix must not find it."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    talk.judged_turn(tokens(5), Directive(20, 30, tuple(tokens(4))), Directive(80, 100, tuple(tokens(12))))
    plain = server.generate(talk.base[: 80 - 6 + 12])
    assert_exact(reference, plain)
    assert plain.cached <= 24


def test_exact_and_amortized_live_side_by_side(server, reference, talk, tokens):
    """Once both are cached, each request finds its own kind."""
    fork = talk.fork()
    server.generate(talk.base)
    amortized = talk.judged_turn(tokens(4)).answer
    assert amortized.cached == len(fork.base) - 1
    exact = server.generate(amortized.prompt)
    assert exact.cached == len(fork.base)
    assert_exact(reference, exact)
    assert fork.judged_turn(tokens(4)).answer.the_report.amortized > 0


def test_exact_first_then_amortized(server, reference, tokens):
    """The edited text is cached already, exactly. The splice must neither mix with it nor damage it."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    directive, new = Directive(50, 80, tuple(tokens(6))), tokens(5)
    prompt = talk.prompt(new, directive)
    for part_len in (100, len(prompt)):
        server.generate(prompt[:part_len])
    talk.judged_turn(new, directive)
    again = server.generate(prompt)
    assert again.cached == len(prompt) - 1
    assert_exact(reference, again)


def test_same_text_from_two_pasts(server, reference, tokens):
    """Two bases differ only in the span that both edits replace: afterwards the ids are equal and the KV is not."""
    prefix, downstream, replacement, new = tokens(50), tokens(80), tokens(6), tokens(5)
    talks = []
    for _ in range(2):
        talk = JudgedConversation(server, reference)
        talk.turn([*prefix, *tokens(30), *downstream], max_new_tokens=1)
        talks.append(talk)
    edits = [Directive(50, 80, tuple(replacement)), Directive(160, 161, tuple(tokens(1)))]
    first, second = (talk.judged_turn(new, *edits[:1], max_new_tokens=1) for talk in talks)
    if talks[0].base == talks[1].base:  # the token each sampled may differ
        assert first.answer.log_probs != second.answer.log_probs
    assert first.answer.the_report.marks != second.answer.the_report.marks
    for talk in talks:
        judged = talk.judged_turn(tokens(3))
        assert judged.answer.the_report.amortized > 0


def test_marks_of_another(server, reference, tokens):
    """Marks are no key to somebody else's KV: with those of other text, or made up, the turn is exact."""
    one, other = (JudgedConversation(server, reference) for _ in range(2))
    for talk in (one, other):
        talk.turn(tokens(BASE_LEN))
        talk.judged_turn(tokens(5), Directive(50, 80, tuple(tokens(6))))
    position, tag, depth = other.marks[0]
    for marks in (one.marks, [(position, 123456789, 1)], [(0, 1, 1)], [(position, tag + 1, depth)]):
        prompt = [*other.base, *tokens(4)]
        answer = server.generate(prompt, SpliceRequest.build(other.base, DirectiveSet(), marks))
        assert_exact(reference, answer)
        assert answer.the_report.amortized == 0
        assert answer.the_report.marks == (), "marks that lead nowhere do not go on"


def test_some_of_the_marks(server, reference, tokens):
    """A request that lost one of two marks gets neither the KV behind it nor a wrong answer."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    talk.judged_turn(tokens(5), Directive(20, 30, tuple(tokens(4))), Directive(80, 100, tuple(tokens(12))))
    first_mark, second_mark = (mark for mark in talk.marks if mark[1])
    prompt = [*talk.base, *tokens(4)]

    only_first = server.generate(prompt, SpliceRequest.build(talk.base, DirectiveSet(), [first_mark]))
    reused = talk.state.head(only_first.cached)
    assert only_first.cached <= second_mark[0]
    assert gap(only_first, reused.log_probs(prompt[len(reused) :], only_first.output)) < TOLERANCE

    only_second = server.generate(prompt, SpliceRequest.build(talk.base, DirectiveSet(), [second_mark]))
    assert only_second.cached <= first_mark[0]
    assert_exact(reference, only_second)


# --- tenants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_tenants_never_meet(server, reference, tokens, field):
    """Another salt sees neither the base, nor the spliced branch, even with the right marks."""
    mine = JudgedConversation(server, reference, **{field: "mine"})
    mine.turn(tokens(BASE_LEN))
    theirs = mine.fork()
    theirs.fields = {field: "theirs"}
    directive, new = Directive(50, 80, tuple(tokens(6))), tokens(5)

    judged = mine.judged_turn(new, directive)
    refused = theirs.turn(new, directive)
    assert refused.reasons == ["base_not_cached"]
    assert refused.cached in (0, 56), "nothing, or what a helper prefilled for them in vain"
    assert_exact(reference, refused)

    stolen = SpliceRequest.build(mine.base, DirectiveSet(), mine.marks)
    for fields in ({field: "theirs"}, {field: "somebody else's"}, {}):
        answer = server.generate([*mine.base, *new], stolen, **fields)
        assert answer.the_report.amortized == 0
        assert_exact(reference, answer)
    assert mine.judged_turn(tokens(3)).answer.cached == len(judged.answer.base) - 1


def test_same_splice_under_two_salts(server, reference, tokens):
    prompt, directive, new = tokens(BASE_LEN), Directive(50, 80, tuple(tokens(6))), tokens(5)
    for salt in ("first", "second", None):
        talk = JudgedConversation(server, reference, **({"cache_salt": salt} if salt else {}))
        talk.turn(prompt)
        talk.judged_turn(new, directive)
        talk.judged_turn(new)
