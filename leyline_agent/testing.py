"""Try your own policy: `check_policy` runs it through everything the built-in ones go through.

    from leyline_agent.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy(keep=3))

What fails raises AssertionError and says which history, turn and message it was.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leyline_agent.compose import is_in_force
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, canonical
from leyline_agent.history import newest_user
from leyline_agent.policies.placeholders import looks_failed
from leyline_agent.policy import MessageFunction, Policy, as_policy
from leyline_agent.replay import ReplayedTurn, replay
from leyline_agent.samples import sample_histories
from leyline_agent.undo import edit_to_json

__all__ = ["Stability", "assert_prefix_stable", "check_policy", "sample_histories"]

Histories = Iterable[Sequence[Message]]


@dataclass(frozen=True, slots=True)
class Stability:
    """How still a policy holds: turns looked at, turns on which something served was edited, and edits made."""

    turns: int = 0
    moved: int = 0
    edits: int = 0

    @property
    def still(self) -> float:
        """Share of turns on which nothing changed."""
        return 1 - self.moved / self.turns if self.turns else 1.0


def check_policy(
    policy: Policy | MessageFunction, histories: Histories | None = None, *, may_undo: bool = False
) -> Stability:
    """Raise AssertionError unless the policy keeps every promise, over `histories` or the built-in samples.

    - It is pure: the same turn gives the same edits, also after other sessions, and nothing it is given changes.
    - Its edits are accepted: no result loses its call, roles alternate as before, the system prompt and the newest user
      message stay, arguments stay JSON.
    - Only a FORGET edits the newest user message; a replaced message keeps its role and its call.
    - What it puts in place of an output that worked does not read like a failure.
    - It holds still, as `assert_prefix_stable` checks. `may_undo` allows it to take edits back.
    """
    checked = as_policy(policy)
    samples = _samples(histories)
    stability = Stability()
    first: list[tuple[MessageEdit, ...]] = []
    for number, messages in enumerate(samples):
        for step, before in _steps(checked, messages):
            where = f"{checked.name}, history {number}, turn {step.turn.index}"
            _check_edits(step, where)
            _check_same(checked, step, where)
            stability = _check_still(before, step, where, stability, may_undo=may_undo)
            if number == 0:
                first.append(step.returned)
    again = [step.returned for step in replay(checked, samples[0])] if samples else []
    assert again == first, f"{checked.name} decides otherwise after other sessions: it keeps memory of them"
    return stability


def assert_prefix_stable(
    policy: Policy | MessageFunction, histories: Histories | None = None, *, may_undo: bool = False
) -> Stability:
    """Raise AssertionError unless consecutive turns share their prefix up to the first edit that came into force.

    The same history must give the same edits, also when it comes back from JSON. A message, once edited, may be cut
    further or dropped, or be taken over by an edit with another reason; it may not change in any other way (a counter
    or a date in a placeholder does that) or come back, unless `may_undo`. Inserted messages stay as they are.
    """
    checked = as_policy(policy)
    stability = Stability()
    for number, messages in enumerate(_samples(histories)):
        for step, before in _steps(checked, messages):
            where = f"{checked.name}, history {number}, turn {step.turn.index}"
            _check_same(checked, step, where)
            stability = _check_still(before, step, where, stability, may_undo=may_undo)
    return stability


def _samples(histories: Histories | None) -> list[Sequence[Message]]:
    return [list(history) for history in (sample_histories() if histories is None else histories)]


def _steps(policy: Policy, messages: Sequence[Message]) -> Iterator[tuple[ReplayedTurn, ReplayedTurn | None]]:
    """The turns of a history, each with the one before it."""
    unchanged = copy.deepcopy(list(messages))
    before: ReplayedTurn | None = None
    for step in replay(policy, messages):
        assert list(step.turn.messages) == unchanged[: step.at], (
            f"{policy.name}: decide changed the messages it was given"
        )
        yield step, before
        before = step


def _check_same(policy: Policy, step: ReplayedTurn, where: str) -> None:
    """The same turn, come back from JSON, gives the same edits."""
    plain = json.dumps([dict(message) for message in step.turn.messages], default=_not_json)
    copied = replace(step.turn, messages=tuple(json.loads(plain)))
    again = tuple(policy.decide(copied))
    assert again == step.returned, f"{where}: decide gave other edits for the same turn: {_first_unlike(step, again)}"


def _first_unlike(step: ReplayedTurn, again: Sequence[MessageEdit]) -> str:
    unlike = [edit for edit in (*step.returned, *again) if edit not in step.returned or edit not in again]
    return str(unlike[0]) if unlike else "in another order"


def _check_edits(step: ReplayedTurn, where: str) -> None:
    for refusal in step.refused:
        raise AssertionError(f"{where}: {refusal.reason}; the edits {list(refusal.edits)} would be refused")
    newest = newest_user(step.turn.messages)
    for edit in step.returned:
        json.dumps(edit_to_json(edit), default=_not_json)
        if edit.part is Part.INSERT:
            continue
        old = step.turn.messages[edit.index]
        if edit.index == newest:
            assert edit.mode is Mode.FORGET, f"{where}: it edits the newest user message, {edit.index}, by {edit.mode}"
        if edit.part is Part.MESSAGE and isinstance(edit.new, Mapping):
            for key in ("role", "tool_call_id"):
                assert edit.new.get(key) == old.get(key), f"{where}: it changes {key!r} of message {edit.index}"
        if edit.part is Part.CONTENT and old.get("role") == "tool" and not looks_failed(old):
            new = {**old, "content": edit.new}
            assert not looks_failed(new), (
                f"{where}: message {edit.index} worked, but now reads like a failure: {edit.new!r}"
            )


def _not_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise AssertionError(f"an edit holds a {type(value).__name__}, which is not JSON: {value!r}")


def _check_still(
    before: ReplayedTurn | None, now: ReplayedTurn, where: str, so_far: Stability, *, may_undo: bool
) -> Stability:
    """Check a turn against the one before it, and count it."""
    changed = _changed_indices(before, now) if before is not None else set()
    if before is not None:
        _check_held(before, now, where, may_undo=may_undo)
        _check_prefix(before, now, min(changed, default=before.at), where)
    moved = before is not None and any(index < before.at for index in changed)
    made = sum(1 for edit in now.edits if before is None or not is_in_force(edit, before.edits))
    return Stability(so_far.turns + 1, so_far.moved + moved, so_far.edits + made)


def _check_held(before: ReplayedTurn, now: ReplayedTurn, where: str, *, may_undo: bool) -> None:
    for edit in before.edits:
        if is_in_force(edit, now.edits):
            continue
        at = [e for e in now.edits if e.index == edit.index and (e.part is Part.INSERT) == (edit.part is Part.INSERT)]
        if not at:
            assert may_undo, f"{where}: the edit of message {edit.index} ({edit.reason}) was taken back"
            continue
        assert edit.part is not Part.INSERT, f"{where}: the message inserted before {edit.index} has changed"
        shorter = _len_shown(now, edit.index) < _len_shown(before, edit.index)
        other_reason = all(e.reason != edit.reason for e in at)
        assert shorter or other_reason or may_undo, (
            f"{where}: message {edit.index} was edited before and is edited differently now, from {edit.new!r} "
            f"to {at[0].new!r}; what was served must hold still"
        )


def _len_shown(step: ReplayedTurn, index: int) -> int:
    if index not in step.view.sources:
        return 0
    return len(canonical(step.view.messages[step.view.sources.index(index)]))


def _check_prefix(before: ReplayedTurn, now: ReplayedTurn, first: int, where: str) -> None:
    """Messages before the first change of an edit, at `first`, are the same on both turns."""
    old, new = (list(_shown_before(step, first)) for step in (before, now))
    assert new[: len(old)] == old, f"{where}: the prefix moved before message {first}, where no edit says so"


def _shown_before(step: ReplayedTurn, index: int) -> Iterator[Message]:
    for message, source, edits in zip(step.view.messages, step.view.sources, step.view.edited, strict=True):
        if (source if source is not None else edits[0].index) < index:
            yield message


def _changed_indices(before: ReplayedTurn, now: ReplayedTurn) -> set[int]:
    changed = {e.index for e in now.edits if not is_in_force(e, before.edits)}
    return changed | {e.index for e in before.edits if not is_in_force(e, now.edits)}
