"""What the session store keeps, finds and drops."""

from __future__ import annotations

import random
import threading
from array import array
from typing import Any

import pytest

from leyline_agent.sessions import HistoryKeys, SessionStore, TurnRecord, namespace_of


def messages(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user" if k % 2 == 0 else "assistant", "content": text} for k, text in enumerate(texts)]


def record(history: list[dict[str, Any]], namespace: str = "", *, tokens: int = 10, **fields: Any) -> TurnRecord:
    keys = HistoryKeys.of(history, namespace)
    defaults: dict[str, Any] = {"index": 0, "edits": (), "prompt_ids": array("q", range(tokens))}
    return TurnRecord(history=keys, **{**defaults, **fields})


def test_the_longest_known_prefix_is_found() -> None:
    store = SessionStore(10, 1000)
    for number, length in enumerate((1, 3)):
        store.put(record(messages(*"abc"[:length]), index=number))
    found = store.find(HistoryKeys.of(messages(*"abcde"), ""))
    assert found is not None
    assert found.index == 1
    assert store.find(HistoryKeys.of(messages("x"), "")) is None
    assert store.find(HistoryKeys.of(messages(*"abc"), "other")) is None


def test_none_and_absent_contents_are_different_histories() -> None:
    absent, none = [{"role": "assistant"}], [{"role": "assistant", "content": None}]
    assert HistoryKeys.of(absent, "").key != HistoryKeys.of(none, "").key


def test_the_oldest_turn_goes_first_and_a_used_one_stays() -> None:
    store = SessionStore(2, 1000)
    first, second, third = (messages(text) for text in "abc")
    store.put(record(first))
    store.put(record(second))
    store.find(HistoryKeys.of(first, ""))
    store.put(record(third))
    assert store.find(HistoryKeys.of(first, "")) is not None
    assert store.find(HistoryKeys.of(second, "")) is None


def test_answers_to_one_prompt_add_up_and_a_new_prompt_replaces() -> None:
    store = SessionStore(10, 1000)
    history = messages("a")
    for answer in ([1, 2], [3, 4]):
        store.put(record(history, outputs=(array("q", answer),)))
    found = store.find(HistoryKeys.of(history, ""))
    assert found is not None
    assert len(found.outputs) == 2
    assert found.base_for(array("q", [*range(10), 3, 4, 5]))[-2:] == array("q", [3, 4])
    store.put(record(history, tokens=11))
    found = store.find(HistoryKeys.of(history, ""))
    assert found is not None
    assert found.outputs == ()
    assert store.token_count == 11


def test_a_named_session_is_dropped_in_all_its_scopes() -> None:
    store = SessionStore(10, 1000)
    store.put(record(messages("a"), namespace_of("model 1", "s")))
    store.put(record(messages("b"), namespace_of("model 2", "s")))
    store.put(record(messages("c"), namespace_of("model 1", None)))
    assert len(store.drop_session("s")) == 2
    assert (len(store), store.token_count) == (1, 10)


@pytest.mark.parametrize("last_message_too", [False, True])
def test_a_rewritten_history_is_found_by_its_last_messages(last_message_too: bool) -> None:
    store = SessionStore(10, 1000)
    history = messages(*"abcdef")
    store.put(record(history))
    rewritten = [
        {**history[0], "content": "A"},
        *history[1:5],
        {**history[5], "content": "F"} if last_message_too else history[5],
    ]
    assert store.find(HistoryKeys.of(rewritten, "")) is None
    assert store.find_rewritten(HistoryKeys.of(rewritten, "")) is not None
    assert store.find_rewritten(HistoryKeys.of(messages(*"uvwxyf"), "")) is None


def test_threads_leave_the_books_in_order() -> None:
    store = SessionStore(20, 500)

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(300):
            history = messages(str(numbers.randrange(40)))
            namespace = namespace_of("", str(numbers.randrange(3)))
            match numbers.randrange(3):
                case 0:
                    store.put(record(history, namespace, tokens=numbers.randrange(60)))
                case 1:
                    store.find(HistoryKeys.of(history, namespace))
                case _:
                    store.drop(namespace) if numbers.random() < 0.05 else store.find_rewritten(
                        HistoryKeys.of(history, namespace)
                    )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [record for namespace in "012" for record in store.drop(namespace_of("", namespace))]
    assert len(held) <= 20
    assert (len(store), store.token_count) == (0, 0)
