"""Every token and every slot is accounted for: in the report, in the usage, in the pool."""

from __future__ import annotations

import pytest

from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.wire import SpliceRequest
from splice_client import Conversation

pytestmark = pytest.mark.server

BASE_LEN = 150


@pytest.fixture
def talk(server, reference, tokens):
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    return talk


@pytest.fixture(autouse=True)
def pool_is_whole_afterwards(server):
    """After every test here: nothing lost, nothing locked, and a flush gives every slot back."""
    yield
    pool = server.idle_pool()
    assert pool.lost == 0
    assert pool.in_use == 0
    server.flush()
    assert server.idle_pool().free == pool.total


# --- the report ------------------------------------------------------------------------------------------------------


def test_report_of_a_splice(talk, tokens):
    """[60, 90) -> 5 tokens: 60 exact, 5 + 1 + 7 prefilled, and what lies between moved by -25."""
    answer = talk.judged_turn(tokens(7), Directive(60, 90, tuple(tokens(5)))).answer
    report = answer.the_report
    moved = BASE_LEN + 7 - 90  # eight tokens were sampled; the last has no KV
    assert report.prompt_tokens == len(answer.prompt) == BASE_LEN + 8 - 25 + 7
    assert (report.exact, report.amortized, report.prefilled) == (60, moved, 5 + 1 + 7)
    assert report.rotated == moved
    assert [(o.start, o.end, o.replacement_len, o.status, o.moved) for o in report.directives] == [
        (60, 90, 5, "spliced", moved)
    ]
    assert answer.mark_positions == [65]
    assert report.splices == 1
    assert report.kernel
    assert 0 < report.splice_s < 5
    assert 0 < report.helper_s < 5
    assert answer.cached == 65 + moved


def test_report_of_three_spans(talk, tokens):
    edits = [Directive(20, 35, tuple(tokens(4))), Directive(60, 62, tuple(tokens(20))), Directive(120, 140)]
    answer = talk.judged_turn(tokens(7), *edits).answer
    report = answer.the_report
    assert [outcome.moved for outcome in report.directives] == [60 - 35, 120 - 62, BASE_LEN + 7 - 140]
    assert report.exact == 20
    assert report.amortized == report.rotated == sum(outcome.moved for outcome in report.directives)
    assert report.prefilled == 4 + 20 + 1 + 7
    assert answer.mark_positions == [24, 24 + 25 + 20, 24 + 25 + 20 + 58]


def test_report_of_the_turn_after(talk, tokens):
    """No directive, only marks: all that was amortized still is, nothing is rotated again."""
    first = talk.judged_turn(tokens(7), Directive(60, 90, tuple(tokens(5)))).answer
    report = talk.judged_turn(tokens(9)).answer.the_report
    assert report.exact == 65
    assert report.amortized == len(first.base) - 1 - 65
    assert report.prefilled == 1 + 9
    assert report.rotated == 0
    assert report.directives == ()
    assert report.marks == first.the_report.marks


def test_report_of_a_plain_turn(talk, tokens):
    report = talk.judged_turn(tokens(7)).answer.the_report
    assert (report.exact, report.amortized, report.prefilled) == (BASE_LEN + 7, 0, 1 + 7)
    assert report.marks == ()


def test_no_request_for_a_report_no_report(server, tokens):
    assert server.generate(tokens(20)).report is None


def test_same_directive_twice(talk, tokens):
    """A client that never saw the answer asks again: the splice is found, not made a second time."""
    edit, new = Directive(60, 90, tuple(tokens(5))), tokens(7)
    retry = talk.fork()
    first = talk.judged_turn(new, edit).answer
    cached_before = talk.server.idle_pool().cached
    second = retry.judged_turn(new, edit).answer
    assert [outcome.status for outcome in second.the_report.directives] == ["already"]
    assert second.the_report.rotated == 0
    assert second.the_report.marks == first.the_report.marks
    assert second.output == first.output
    assert talk.server.idle_pool().cached == cached_before


@pytest.mark.parametrize("mode", [Mode.AMORTIZE, Mode.FORGET])
def test_report_sums(talk, tokens, mode):
    for _ in range(4):
        answer = talk.judged_turn(tokens(12), Directive(40, 52, tuple(tokens(9)), mode)).answer
        report = answer.the_report
        assert report.exact + report.amortized + report.prefilled == report.prompt_tokens == len(answer.prompt)
        assert report.rotated <= report.amortized
        assert report.prefilled <= answer.report.prompt_tokens
        if mode is Mode.AMORTIZE:
            assert report.prefilled <= 9 + 12 + 16


# --- where the report and the counts appear --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat_carries_report_and_usage(server, reference, tokens, stream):
    talk = Conversation(server)
    talk.turn(tokens(BASE_LEN))
    edit = Directive(60, 90, tuple(tokens(5)))
    prompt = talk.prompt(tokens(7), edit)
    ask = server.chat_stream if stream else server.chat
    answer = ask(prompt, talk.request(edit))
    assert answer.the_report.spliced
    assert answer.the_report.fallbacks == ()
    assert answer.cached == answer.the_report.exact + answer.the_report.amortized + 5
    spliced = reference.prefill(talk.base[:-1]).splice([edit])
    expected = spliced.log_probs(prompt[len(spliced) :], answer.output)
    assert expected.argmax(dim=-1).tolist() == list(answer.output)


def test_chat_and_generate_share_a_session(server, reference, tokens):
    """Marks from one route are good on the other."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    talk.judged_turn(tokens(7), Directive(60, 90, tuple(tokens(5))))
    answer = server.chat([*talk.base, *tokens(3)], talk.request())
    assert answer.the_report.amortized == len(talk.base) - 1 - 65


def test_several_samples_of_one_prompt(server, reference, tokens):
    """n > 1: however the server takes the directive, each sample is right."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    edit, new = Directive(60, 90, tuple(tokens(5))), tokens(7)
    prompt = talk.prompt(new, edit)
    custom = talk.request(edit).custom_params()
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": 2, "custom_params": custom}
    response = server.http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    samples = response.json()
    assert len(samples) == 2
    spliced = talk.state.splice([edit])
    for sample in samples:
        amortized = sample["meta_info"]["leyline"]["amortized"] > 0
        state = spliced if amortized else reference.empty()
        expected = state.log_probs(prompt[len(state) :], sample["output_ids"])
        assert expected.argmax(dim=-1).tolist() == sample["output_ids"]


# --- the pool --------------------------------------------------------------------------------------------------------


def test_status_counts_every_slot(server, tokens):
    server.flush()
    empty = server.idle_pool()
    assert empty.free == empty.total > 1000
    server.generate(tokens(100), max_new_tokens=5)
    pool = server.idle_pool()
    assert pool.cached == 100 + 4
    assert pool.lost == 0


def test_status_tells_what_runs(server, live, request):
    status = server.status()
    assert status["ready"] is True
    assert not status["reason"]
    assert ("Rust" in status["tree_core"]) == request.node.callspec.params["live"].endswith("rust")
    for field in ("kernel", "rope", "probe", "versions"):
        assert status[field], field


def test_splice_costs_what_it_copies(talk, tokens):
    """At most: the replacement, the copies and the new tokens. (In place, the copies cost nothing.)"""
    before = talk.server.idle_pool().cached
    answer = talk.judged_turn(tokens(7), Directive(60, 90, tuple(tokens(5)))).answer
    grown = talk.server.idle_pool().cached - before
    moved = answer.the_report.rotated
    assert 5 + 7 + 8 - 30 <= grown <= 5 + moved + 1 + 7 + 7


def test_long_session_of_edits_leaks_nothing(talk, tokens):
    for turn in range(25):
        directive = Directive(30 + turn, 45 + turn, tuple(tokens(turn % 20)))
        talk.judged_turn(tokens(10), directive, max_new_tokens=3)
        assert talk.server.idle_pool().lost == 0


def test_base_evicted_in_part(server, reference, tokens):
    """A base of which only the head is cached: what is there is used, the answer is exact where nothing was spliced."""
    server.flush()
    base = tokens(BASE_LEN)
    server.generate(base[:100], max_new_tokens=1)
    edit = Directive(120, 130, tuple(tokens(4)))
    prompt = [*DirectiveSet.of(edit).apply(base), *tokens(6)]
    answer = server.generate(prompt, SpliceRequest.build(base, DirectiveSet.of(edit)))
    assert answer.reasons == ["base_not_cached"]
    assert 100 <= answer.cached <= 124, "what was cached, and at most what a helper prefilled in vain"
    assert_exact(reference, answer)


def test_downstream_cached_in_part(server, reference, tokens):
    """A run shorter than asked for is copied as far as it goes; the rest is prefilled behind it."""
    server.flush()
    base = tokens(BASE_LEN)
    first = server.generate(base[:100], max_new_tokens=1)
    talk = JudgedConversation(server, reference)
    talk.base, talk.state = base, reference.prefill(first.prompt)
    judged = talk.judged_turn(tokens(6), Directive(40, 50, tuple(tokens(4))))
    assert judged.answer.the_report.rotated == 100 - 50
    assert judged.answer.cached == 100 - 6
