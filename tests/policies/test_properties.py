"""Properties of edits, for any history and any edits a policy might come up with."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_agent.compose import compose, held_edits, project, tokens_saved, units
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn, apply_edits, estimate_tokens
from leyline_agent.errors import PolicyError
from leyline_agent.history import pair_calls, tool_calls
from leyline_agent.invariants import ViolationKind, check_history, check_view
from leyline_agent.planner import plan_edits, repair_history
from leyline_agent.replay import replay
from leyline_agent.samples import sample_history
from leyline_agent.undo import EditLog, edit_from_json, edit_to_json, invert
from policy_table import POLICIES

PROVIDER_ERRORS = {ViolationKind.ORPHAN_RESULT, ViolationKind.UNANSWERED_CALL, ViolationKind.DUPLICATE_RESULT}
FEW = settings(max_examples=40, deadline=None)

rngs = st.randoms(use_true_random=False)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    return sample_history(draw(rngs))


@st.composite
def arbitrary_edits(draw: st.DrawFn, messages: Sequence[Any]) -> list[MessageEdit]:
    """Edits that `apply_edits` takes, sensible or not: most break a history."""
    edits: list[MessageEdit] = []
    for index, message in enumerate(messages):
        kind = draw(st.sampled_from(["keep"] * 4 + ["content", "drop", "replace", "arguments", "insert"]))
        mode = draw(st.sampled_from(list(Mode)))
        group = draw(st.sampled_from([None, None, "a", "b"]))
        text = draw(st.sampled_from(["", "x", "[cleared]", None]))
        if kind == "content":
            edits.append(MessageEdit(index, text, Part.CONTENT, mode, "content", group=group))
        elif kind == "drop":
            edits.append(MessageEdit(index, None, Part.MESSAGE, mode, "drop", group=group))
        elif kind == "replace":
            role = draw(st.sampled_from(["user", "assistant", "tool", message["role"]]))
            edits.append(MessageEdit(index, {"role": role, "content": text}, Part.MESSAGE, mode, group=group))
        elif kind == "arguments" and tool_calls(message):
            edits.append(MessageEdit(index, "{}", Part.ARGUMENTS, mode, "arguments", 0, group))
        elif kind == "insert":
            new = {"role": draw(st.sampled_from(["user", "assistant"])), "content": "inserted"}
            edits.append(MessageEdit(index, new, Part.INSERT, mode, "insert", group=group))
    return edits


@FEW
@given(st.data())
def test_the_planner_lets_no_edit_break_a_history(data: st.DataObject) -> None:
    messages = data.draw(histories())
    plan = plan_edits(messages, data.draw(arbitrary_edits(messages)))
    assert check_view(messages, plan.view) == []
    assert plan.view == apply_edits(messages, plan.edits)


@FEW
@given(st.data())
def test_the_planner_neither_invents_nor_loses_edits_and_keeps_groups_whole(data: st.DataObject) -> None:
    messages = data.draw(histories())
    edits = data.draw(arbitrary_edits(messages))
    plan = plan_edits(messages, edits)
    refused = [edit for refusal in plan.refused for edit in refusal.edits]
    assert sorted(map(str, [*plan.edits, *refused])) == sorted(map(str, edits))
    assert not {e.group for e in plan.edits if e.group} & {e.group for e in refused if e.group}


@FEW
@given(st.data())
def test_edits_compose(data: st.DataObject) -> None:
    messages = data.draw(histories())
    first = data.draw(arbitrary_edits(messages))
    middle = apply_edits(messages, first).messages
    second = data.draw(arbitrary_edits(middle))
    both = compose(messages, first, second)
    assert apply_edits(messages, both).messages == apply_edits(middle, second).messages


@FEW
@given(st.data())
def test_composition_keeps_what_forgets(data: st.DataObject) -> None:
    messages = data.draw(histories())
    first = data.draw(arbitrary_edits(messages))
    second = data.draw(arbitrary_edits(apply_edits(messages, first).messages))
    both = {edit.index: edit.mode for edit in compose(messages, first, second) if edit.part is not Part.INSERT}
    for edit in first:
        if edit.part is not Part.INSERT and edit.mode is Mode.FORGET and edit.index in both:
            same = [e for e in compose(messages, first, second) if e.index == edit.index and e.part is not Part.INSERT]
            assert Mode.FORGET in {e.mode for e in same}


@FEW
@given(st.data())
def test_projected_edits_do_to_the_view_what_they_did_to_the_history(data: st.DataObject) -> None:
    messages = data.draw(histories())
    edits = data.draw(arbitrary_edits(messages))
    unchanged = apply_edits(messages, ())
    assert project(edits, (), unchanged, len(messages)) == list(edits)
    view = apply_edits(messages, edits)
    assert project(edits, edits, view, len(messages)) == []


@FEW
@given(st.data())
def test_undo_restores_the_history(data: st.DataObject) -> None:
    messages = data.draw(histories())
    edits = data.draw(arbitrary_edits(messages))
    view = apply_edits(messages, edits)
    assert list(apply_edits(view.messages, invert(messages, edits)).messages) == messages

    log = EditLog()
    log.record(0, messages, edits)
    log = EditLog.from_lines(log.to_lines())
    assert log.restore(view.messages) == messages
    assert log.in_force() == tuple(edits)


@FEW
@given(histories(), st.sampled_from(sorted(POLICIES)))
def test_the_log_of_a_session_restores_every_turn(messages: list[dict[str, Any]], name: str) -> None:
    log = EditLog()
    turns = list(replay(POLICIES[name], messages))
    for turn in turns:
        log.record(turn.turn.index, turn.turn.messages, turn.edits)
    for turn in turns:
        assert log.restore(turn.view.messages, turn.turn.index) == list(turn.turn.messages)


@FEW
@given(st.data())
def test_edits_survive_json(data: st.DataObject) -> None:
    messages = data.draw(histories())
    for edit in data.draw(arbitrary_edits(messages)):
        assert edit_from_json(edit_to_json(edit)) == edit


@FEW
@given(histories())
def test_a_repaired_history_is_taken_by_providers(messages: list[dict[str, Any]]) -> None:
    repair = repair_history(messages)
    mended = apply_edits(messages, repair.edits)
    assert not PROVIDER_ERRORS & {violation.kind for violation in check_history(mended.messages)}
    assert check_view(messages, mended) == []
    assert repair_history(mended.messages).edits == ()


@FEW
@given(histories(), rngs)
def test_shuffled_and_cut_histories_are_repaired_or_left(messages: list[dict[str, Any]], rng: random.Random) -> None:
    """What a caller's own compaction leaves behind: messages missing, results out of place."""
    broken = [message for message in messages if rng.random() < 0.8]
    if len(broken) > 2 and rng.random() < 0.5:
        i = rng.randrange(len(broken) - 1)
        broken[i], broken[i + 1] = broken[i + 1], broken[i]
    plan = plan_edits(broken, repair_history(broken).edits)
    assert check_view(broken, plan.view) == []
    before = [v.kind for v in check_history(broken) if v.kind in PROVIDER_ERRORS]
    after = [v.kind for v in check_history(plan.view.messages) if v.kind in PROVIDER_ERRORS]
    assert len(after) <= len(before)


@FEW
@given(histories(), st.sampled_from(sorted(POLICIES)))
def test_policies_never_reorder_or_orphan_and_leave_the_rest_untouched(
    messages: list[dict[str, Any]], name: str
) -> None:
    before = copy.deepcopy(messages)
    for turn in replay(POLICIES[name], messages):
        assert turn.refused == ()
        sources = [source for source in turn.view.sources if source is not None]
        assert sources == sorted(sources)
        for message, source, edits in zip(turn.view.messages, turn.view.sources, turn.view.edited, strict=True):
            if not edits:
                assert source is not None
                assert message is turn.turn.messages[source]
        known = {v.index for v in check_history(turn.turn.messages)}
        orphans = set(pair_calls(turn.view.messages).orphans)
        assert orphans <= {k for k, source in enumerate(turn.view.sources) if source in known}
    assert messages == before


@FEW
@given(st.data())
def test_tokens_saved_is_the_difference_of_the_views(data: st.DataObject) -> None:
    messages = data.draw(histories())
    edits = data.draw(arbitrary_edits(messages))

    def tokens(shown: Sequence[Any]) -> int:
        return -tokens_saved([], [MessageEdit(0, m, Part.INSERT) for m in shown], estimate_tokens)

    expected = tokens(messages) - tokens(apply_edits(messages, edits).messages)
    assert tokens_saved(messages, edits, estimate_tokens) == expected


@FEW
@given(st.data())
def test_held_edits_are_whole_units_in_force(data: st.DataObject) -> None:
    messages = data.draw(histories())
    in_force = data.draw(arbitrary_edits(messages))
    wanted = data.draw(arbitrary_edits(messages))
    held = held_edits(wanted, in_force)
    assert all(edit in in_force for edit in held)
    for unit in units(in_force):
        assert all(edit in held for edit in unit) or not any(edit in held for edit in unit)


def test_a_unit_of_which_a_part_is_taken_back_is_not_held() -> None:
    unit = [MessageEdit(k, None, Part.MESSAGE, reason="drop", group="g") for k in (1, 2)]
    alone = MessageEdit(4, "x", reason="cut")
    assert held_edits([unit[0], MessageEdit(4, "y", reason="cut")], [*unit, alone]) == [alone]


def test_edits_that_do_not_fit_are_refused_one_by_one() -> None:
    messages = [{"role": "user", "content": "hello"}]
    good = MessageEdit(0, "hi")
    plan = plan_edits(messages, [good, MessageEdit(7, "no such message"), MessageEdit(0, "twice")])
    assert plan.edits == (good,)
    assert [refusal.edits[0].new for refusal in plan.refused] == ["no such message", "twice"]
    with pytest.raises(PolicyError):
        compose(messages, [good], [MessageEdit(7, "no such message")])


def test_decide_is_pure_over_shared_policy_objects() -> None:
    one, other = (sample_history(random.Random(seed)) for seed in (1, 2))
    for policy in POLICIES.values():
        turn = Turn(tuple(one))
        alone = policy.decide(turn)
        policy.decide(Turn(tuple(other)))
        assert policy.decide(turn) == alone
