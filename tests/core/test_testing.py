"""`check_policy` and `assert_prefix_stable` find what is wrong with a policy: each test is a policy that must fail."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from histories import session
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.policy import Policy
from leyline_agent.testing import Stability, assert_prefix_stable, check_policy, sample_histories


class Written(Policy):
    """A policy from a function of the turn."""

    def __init__(self, decide: Callable[[Turn], Sequence[MessageEdit]]) -> None:
        self._decide = decide

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        return self._decide(turn)


def outputs(turn: Turn) -> list[int]:
    return [index for index, message in enumerate(turn.messages) if message["role"] == "tool"]


def newest_user(turn: Turn) -> int:
    return max(index for index, message in enumerate(turn.messages) if message["role"] == "user")


ticks = itertools.count()


def changes_its_input(turn: Turn) -> list[MessageEdit]:
    for message in turn.messages:
        message["seen"] = True  # type: ignore[index]
    return []


FAULTY: dict[str, tuple[str, Callable[[Turn], Sequence[MessageEdit]]]] = {
    "random": ("other edits", lambda t: [MessageEdit(k, str(random.random())) for k in outputs(t)]),
    "clock": ("other edits", lambda t: [MessageEdit(k, f"cleared at {next(ticks)}") for k in outputs(t)]),
    "impure": ("changed the messages", changes_its_input),
    "orphans": ("orphan_result", lambda t: [MessageEdit(k - 1, None, Part.MESSAGE) for k in outputs(t)]),
    "no system": ("system_dropped", lambda t: [MessageEdit(0, None, Part.MESSAGE)]),
    "no user": ("newest_user_dropped", lambda t: [MessageEdit(newest_user(t), None, Part.MESSAGE)]),
    "shortens the task": ("newest user message", lambda t: [MessageEdit(newest_user(t), "short")]),
    "out of range": ("has", lambda t: [MessageEdit(len(t.messages) + 5, "x")]),
    "reads like a failure": ("reads like a failure", lambda t: [MessageEdit(k, "Error: cleared") for k in outputs(t)]),
    "counter": ("edited differently", lambda t: [MessageEdit(k, f"{len(t.messages)} gone") for k in outputs(t)]),
    "takes back": ("taken back", lambda t: [MessageEdit(k, "x") for k in outputs(t)[-1:]]),
    "moving note": (
        "inserted before",
        lambda t: [
            MessageEdit(2, m, Part.INSERT)
            for m in ({"role": "assistant", "content": f"{len(t.messages)} so far"}, {"role": "user", "content": "ok"})
        ],
    ),
    "not json": ("not JSON", lambda t: [MessageEdit(k, [{"type": object()}]) for k in outputs(t)[:1]]),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_policy_is_found(name: str) -> None:
    words, decide = FAULTY[name]
    with pytest.raises(AssertionError, match=words):
        check_policy(Written(decide), [session(6)])


def test_memory_is_found() -> None:
    class Remembers(Policy):
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def decide(self, turn: Turn) -> Sequence[MessageEdit]:
            texts = {str(turn.messages[k]["content"]): k for k in outputs(turn)}
            fresh = [MessageEdit(k, "[gone]") for text, k in texts.items() if text in self.seen]
            self.seen.update(texts)
            return fresh

    with pytest.raises(AssertionError, match=r"other edits|taken back|memory"):
        check_policy(Remembers(), [session(3), session(4)])


def test_the_message_names_history_turn_and_message() -> None:
    with pytest.raises(AssertionError, match=r"Written, history 1, turn 3: .*message 3"):
        check_policy(Written(lambda t: [MessageEdit(3, f"{len(t.messages)}")] if len(t.messages) > 4 else []),
                     [session(1), session(6)])  # fmt: skip


def test_a_plain_function_is_a_policy_too() -> None:
    def shorten(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in messages[:-2]:
            if message["role"] == "tool":
                message["content"] = message["content"][:50]
        return messages

    assert check_policy(shorten, [session(6)]) == Stability(turns=7, moved=5, edits=5)
    assert assert_prefix_stable(shorten, [session(6)]).still == pytest.approx(2 / 7)


def test_undo_is_allowed_where_it_is_asked_for() -> None:
    toggles = Written(lambda t: [MessageEdit(3, "x")] if len(t.messages) % 4 == 0 else [])
    check_policy(toggles, [session(6)], may_undo=True)


def test_forget_may_edit_the_newest_user_message() -> None:
    check_policy(Written(lambda t: [MessageEdit(newest_user(t), "redacted", mode=Mode.FORGET)]), [session(4)])


def test_samples_are_the_same_for_the_same_seed_and_hold_every_difficulty() -> None:
    assert sample_histories(5) == sample_histories(5)
    assert sample_histories(5) != sample_histories(5, seed=1)
    text = str(sample_histories(40))
    for trait in ("reasoning_content", "<think>", "image_url", "sk-", "call_of_nobody", "observer", "```"):
        assert trait in text
