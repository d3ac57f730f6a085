"""From two token sequences and edits to directives: what is sent always makes the edited prompt."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_agent.attribution import Cause, changed_edits, settle
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part
from leyline_agent.token_changes import Change, token_changes

TOKENS = st.lists(st.integers(0, 5), max_size=60)
CAUSES = st.sampled_from(Cause)
MODES = st.sampled_from([Mode.AMORTIZE, Mode.FORGET])


@given(TOKENS, TOKENS, st.integers(1, 9), st.data())
@settings(max_examples=300, deadline=None)
def test_what_is_sent_makes_the_edited_prompt(
    base: list[int], edited: list[int], min_run: int, data: st.DataObject
) -> None:
    new_from = data.draw(st.one_of(st.none(), st.integers(0, len(edited))))
    old, new = array("q", base), array("q", edited)
    changes = token_changes(old, new, min_run, new_from)
    check_alignment(old, new, changes)
    attributed = [Change(c.start, c.end, c.new_start, c.new_end, data.draw(MODES), data.draw(CAUSES)) for c in changes]
    plan = settle(old, new, attributed)
    assert plan.input_ids == edited
    assert plan.tokens.directives.apply(base[: plan.tokens.base_len]) + list(plan.tokens.new_tokens) == edited
    assert [one.directive for one in plan.directives] == list(plan.tokens.directives)
    forgotten = [c for c in attributed if c.forgotten_by_policy]
    spans = {(one.directive.start, one.directive.end) for one in plan.directives if one.directive.mode is Mode.FORGET}
    assert {(c.start, c.end) for c in forgotten} <= spans


def check_alignment(base: array[int], edited: array[int], changes: list[Change]) -> None:
    """Between changes the two sequences are the same."""
    i = j = 0
    for change in [*changes, Change(len(base), len(base), len(edited), len(edited))]:
        assert i <= change.start
        assert base[i : change.start] == edited[j : change.new_start]
        i, j = change.end, change.new_end


def test_a_long_history_is_split_where_the_base_ends() -> None:
    listing = list(range(100, 140))
    base = array("q", [*range(3000), *listing, *range(5000, 5100)])
    edited = array("q", [*range(1000), 7, *range(1200, 3000), *listing, *range(5000, 5100), 9, *listing, 9])
    [cut, tail] = token_changes(base, edited, 8)
    assert (cut.start, cut.end) == (1000, 1200)
    assert (tail.start, tail.new_end) == (len(base), len(edited))


def test_edits_are_compared_by_part_content_and_mode() -> None:
    cut = MessageEdit(3, "[cut]")
    assert changed_edits([cut], [cut], 9) == []
    [later] = changed_edits([cut], [MessageEdit(3, "[cut]", mode=Mode.FORGET)], 9)
    assert (later.mode, later.was_amortized) == (Mode.FORGET, True)
    [undone] = changed_edits([cut], [], 9)
    assert undone.mode is Mode.AMORTIZE
    assert changed_edits([], [MessageEdit(10, "new")], 9) == []
    first, second = ({"role": "user", "content": text} for text in "ab")
    inserted = MessageEdit(3, first, Part.INSERT)
    assert changed_edits([inserted], [inserted], 9) == []
    assert len(changed_edits([inserted], [MessageEdit(3, second, Part.INSERT)], 9)) == 2
