"""A directive that does not fit gets a typed reason; the turn is answered exactly, and the cache is unharmed.

Each case spoils a good request in one way. The good one is sent afterwards, and must still work.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive
from leyline_agent.wire import KEY

pytestmark = [pytest.mark.server, pytest.mark.parametrize("live", ["llama-rust"], indirect=True)]

BASE_LEN = 120
Spoil = Callable[[dict[str, Any]], object]
"""Takes the good SpliceRequest as JSON, changes it, and may return something else to send in its place."""


def setting(**fields: Any) -> Spoil:
    return lambda request: request.update(fields)


def setting_in_first(**fields: Any) -> Spoil:
    return lambda request: request["directives"][0].update(fields)


def sending(text: object) -> Spoil:
    return lambda request: text


def directive(start: int, end: int, replacement: list[int], removed: list[int], mode: str = "amortize") -> dict:
    return {"start": start, "end": end, "replacement": replacement, "removed": removed, "mode": mode}


def swap_directives(request: dict[str, Any]) -> None:
    request["directives"].reverse()


def repeat_first(request: dict[str, Any]) -> None:
    request["directives"].insert(1, request["directives"][0])


def widen_first_over_second(request: dict[str, Any]) -> None:
    first, second = request["directives"]
    first["end"] = second["start"] + 2
    first["removed"] = [0] * (first["end"] - first["start"])


def change_removed(request: dict[str, Any]) -> None:
    request["directives"][0]["removed"][3] ^= 1


def shorten_removed(request: dict[str, Any]) -> None:
    request["directives"][0]["removed"].pop()


def change_replacement(request: dict[str, Any]) -> None:
    request["directives"][0]["replacement"][1] ^= 1


def lengthen_replacement(request: dict[str, Any]) -> None:
    request["directives"][0]["replacement"].append(7)


def shift_first(request: dict[str, Any]) -> None:
    request["directives"][0]["start"] += 1
    request["directives"][0]["end"] += 1


def reach_beyond_base(request: dict[str, Any]) -> None:
    last = request["directives"][-1]
    last["end"] = request["base_len"] + 5
    last["removed"] = [0] * (last["end"] - last["start"])


MALFORMED = {
    "not JSON": sending("{nonsense"),
    "empty text": sending(""),
    "JSON that is no object": sending("[1, 2, 3]"),
    "null": sending("null"),
    "a number in place of text": sending(17),
    "a list in place of text": sending([1, 2, 3]),
    "an object in place of text": sending({"v": 1}),
    "very deep JSON": sending("[" * 100_000),
    "unknown field": setting(surprise=1),
    "unknown field in a directive": setting_in_first(surprise=1),
    "directives are no list": setting(directives="all"),
    "mode unknown": setting_in_first(mode="hope"),
    "mode that only policies may use": setting_in_first(mode="auto"),
    "start is text": setting_in_first(start="30"),
    "start is negative": setting_in_first(start=-30),
    "start is a fraction": setting_in_first(start=30.5),
    "end before start": setting_in_first(end=10),
    "base length is negative": setting(base_len=-1),
    "replacement holds text": setting_in_first(replacement=["a"]),
    "replacement holds a negative id": setting_in_first(replacement=[1, -2, 3]),
    "replacement holds a huge id": setting_in_first(replacement=[1, 2**70, 3]),
    "a mark is cut short": setting(marks=[[40, 2]]),
    "a mark is at no position": setting(marks=[[-40, 5, 1]]),
    "a mark has a negative tag": setting(marks=[[40, -5, 1]]),
    "a mark has a huge tag": setting(marks=[[40, 2**80, 1]]),
    "marks are no list": setting(marks="all"),
}

MISFIT: dict[str, tuple[Spoil, set[str]]] = {
    "base hash of something else": (setting(base_hash="0" * 32), {"base_mismatch"}),
    "base hash missing": (setting(base_hash=""), {"base_mismatch"}),
    "base hash is no hash": (setting(base_hash="hello"), {"base_mismatch"}),
    "base length too long": (setting(base_len=BASE_LEN + 400), {"base_mismatch", "replacement_mismatch"}),
    "base length too short": (setting(base_len=90), {"base_mismatch"}),
    "removed tokens differ": (change_removed, {"base_mismatch"}),
    "removed tokens too few": (shorten_removed, {"base_mismatch", "malformed"}),
    "span shifted by one": (shift_first, {"base_mismatch", "replacement_mismatch"}),
    "span beyond the base": (reach_beyond_base, {"span_outside_base"}),
    "span far beyond the base": (
        setting(directives=[directive(5000, 5001, [1], [2])]),
        {"span_outside_base"},
    ),
    "spans overlap": (widen_first_over_second, {"overlapping"}),
    "spans out of order": (swap_directives, {"overlapping"}),
    "the same span twice": (repeat_first, {"overlapping"}),
    "replacement differs": (change_replacement, {"replacement_mismatch"}),
    "replacement longer than in the prompt": (lengthen_replacement, {"replacement_mismatch", "base_mismatch"}),
    "version of the future": (setting(v=2), {"unsupported_version"}),
    "version of the past": (setting(v=0), {"unsupported_version"}),
    "version of the future, other fields too": (
        setting(v=2, surprise=1),
        {"unsupported_version", "malformed"},
    ),
    "edit that changes nothing": (setting_in_first(start=40, end=40, replacement=[], removed=[]), {"malformed"}),
}


@pytest.fixture
def talk(server, reference, tokens):
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(BASE_LEN))
    return talk


def spoiled(good: str, spoil: Spoil) -> object:
    request = json.loads(good)
    replaced = spoil(request)
    return json.dumps(request) if replaced is None else replaced


def check(talk, tokens, spoil: Spoil, reasons: set[str]) -> None:
    edits = (Directive(30, 50, tuple(tokens(6))), Directive(80, 85, tuple(tokens(2))))
    prompt = talk.prompt(tokens(9), *edits)
    bad = spoiled(talk.request(*edits).encode(), spoil)

    answer = talk.server.generate(prompt, bad)

    assert_exact(talk.state.model, answer)
    assert answer.reasons
    assert set(answer.reasons) <= reasons
    assert all(fallback.detail for fallback in answer.the_report.fallbacks)
    assert answer.the_report.amortized == answer.the_report.rotated == 0
    assert answer.the_report.marks == ()
    assert answer.the_report.exact + answer.the_report.prefilled == len(prompt)
    pool = talk.server.idle_pool()
    assert pool.lost == pool.in_use == 0
    talk.judged_turn(tokens(9), *edits)


@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed(talk, tokens, spoil):
    check(talk, tokens, spoil, {"malformed"})


@pytest.mark.parametrize(("spoil", "reasons"), MISFIT.values(), ids=MISFIT.keys())
def test_misfit(talk, tokens, spoil, reasons):
    check(talk, tokens, spoil, reasons)


@pytest.mark.parametrize("spoil", [sending("{nonsense"), setting(base_hash="0" * 32), change_replacement, setting(v=2)])
def test_in_an_amortized_session(talk, tokens, spoil):
    """A bad directive costs the session its amortized KV for this turn, marks or no marks: the turn is exact."""
    talk.judged_turn(tokens(9), Directive(10, 20, tuple(tokens(3))))
    check(talk, tokens, spoil, {"malformed", "base_mismatch", "replacement_mismatch", "unsupported_version"})


def test_base_that_was_never_served(server, reference, tokens):
    talk = JudgedConversation(server, reference)
    talk.base = tokens(BASE_LEN)
    answer = talk.turn(tokens(5), Directive(30, 50, tuple(tokens(6))))
    assert answer.reasons == ["base_not_cached"]
    assert [outcome.status for outcome in answer.the_report.directives] == ["refused"]
    assert_exact(reference, answer)


def test_prompt_that_ends_inside_the_edited_base(talk, tokens):
    """`input_ids` must hold the whole edited base."""
    edit = Directive(30, 50, tuple(tokens(6)))
    prompt = talk.prompt([], edit)[:-20]
    answer = talk.server.generate(prompt, talk.request(edit))
    assert set(answer.reasons) <= {"replacement_mismatch", "base_mismatch"}
    assert answer.reasons
    assert_exact(talk.state.model, answer)


def test_prompt_of_something_else_altogether(talk, tokens):
    answer = talk.server.generate(tokens(100), talk.request(Directive(30, 50, tuple(tokens(6)))))
    assert set(answer.reasons) <= {"replacement_mismatch", "base_mismatch"}
    assert answer.reasons
    assert_exact(talk.state.model, answer)


def test_a_bad_forget_forgets_nothing(talk, tokens):
    """A directive that is refused must not drop the branch it named either."""
    old_base = list(talk.base)
    edit = Directive(30, 50, tuple(tokens(6)))
    bad = json.loads(talk.request(edit).encode())
    bad["directives"][0]["mode"] = "forget"
    bad["base_hash"] = "0" * 32
    answer = talk.server.generate(talk.prompt(tokens(5), edit), json.dumps(bad))
    assert answer.reasons == ["base_mismatch"]
    assert talk.server.generate(old_base).cached == len(old_base) - 1


def test_thousands_of_directives(server, reference, tokens):
    """Every other token replaced: allowed, and however the server takes it, it answers right and stays alive."""
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(400))
    edits = [Directive(start, start + 1, tuple(tokens(1))) for start in range(0, 400, 2)]
    answer = talk.turn(tokens(5), *edits)
    if answer.reasons:
        assert_exact(reference, answer)
    else:
        assert talk.last.gap() < 1e-4
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0


@pytest.mark.parametrize("spoil", [sending("{nonsense"), setting(base_hash="0" * 32), setting(v=2)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_over_chat(talk, tokens, spoil, stream):
    edit = Directive(30, 50, tuple(tokens(6)))
    prompt = talk.prompt(tokens(9), edit)
    bad = spoiled(talk.request(edit).encode(), spoil)
    ask = talk.server.chat_stream if stream else talk.server.chat
    answer = ask(prompt, bad)
    assert len(answer.reasons) == 1
    assert answer.output == talk.server.generate(prompt).output


def test_stock_errors_stay_errors(server, tokens):
    """What SGLang itself refuses is still refused, not swallowed."""
    body = {"input_ids": tokens(5), "sampling_params": {"max_new_tokens": -1, "custom_params": {KEY: "{}"}}}
    response = server.http.post("/generate", json=body)
    assert response.status_code == 400
    assert server.generate(tokens(5)).output
