"""From a base, an edited prompt and the policy's edits to the directives of a turn: who caused each, and its mode.

All functions here are pure. Positions in the base and in the edited prompt stay together as `Change`s until the end:
attribution happens in the edited prompt, where messages have spans, and directives are written in the base.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from leyline_agent.diff import TokenPlan
from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.edits import MessageEdit, Part, View, canonical
from leyline_agent.errors import RenderError
from leyline_agent.renderers.base import Rendered
from leyline_agent.token_changes import Cause, Change


@dataclass(frozen=True, slots=True)
class PlannedDirective:
    """A directive, who caused it, and the policy edits behind it (none for the template's own)."""

    directive: Directive
    cause: Cause
    edits: tuple[MessageEdit, ...] = ()


@dataclass(frozen=True, slots=True)
class ModeQuestion:
    """What a `ModeChooser` decides on: an edit of mode AUTO, its cost in tokens either way.

    `downstream` tokens would be rotated by AMORTIZE and prefilled by FORGET; `replaced` are prefilled in both.
    """

    edits: tuple[MessageEdit, ...]
    start: int
    replaced: int
    downstream: int


ModeChooser = Callable[[ModeQuestion], Mode]
"""Gives AMORTIZE or FORGET for an edit that left the choice to Leyline."""


def always_amortize(_question: ModeQuestion) -> Mode:
    """The default chooser: an edit that does not ask to forget is amortized."""
    return Mode.AMORTIZE


@dataclass(frozen=True, slots=True)
class EditChange:
    """An edit that was not in force on the base's turn, or was in another way, or no longer is.

    `mode` is that of the edit now, or, for one that is undone, what it was. `was_amortized`: the same part was edited
    before without forgetting, so that KV behind it may still know the original.
    """

    edit: MessageEdit
    mode: Mode
    was_amortized: bool = False


def changed_edits(before: Sequence[MessageEdit], now: Sequence[MessageEdit], message_count: int) -> list[EditChange]:
    """What is different between two turns' edits, as far as it touches the base.

    The base's turn had `message_count` messages and its answer; edits behind these touch only new tokens. An edit that
    was amortized and is now to be forgotten is a change, though the view stays as it is.
    """
    old, new = ({_identity(edit): edit for edit in edits} for edits in (before, now))
    changes = []
    for key, edit in new.items():
        previous = old.get(key)
        was_amortized = previous is not None and previous.mode is not Mode.FORGET
        same = previous is not None and previous.new == edit.new
        if not same or (edit.mode is Mode.FORGET and was_amortized):
            changes.append(EditChange(edit, edit.mode, was_amortized))
    changes.extend(EditChange(edit, edit.mode) for key, edit in old.items() if key not in new)
    return [change for change in changes if change.edit.index <= message_count]


def _identity(edit: MessageEdit) -> tuple[object, ...]:
    inserted = canonical(edit.new) if edit.part is Part.INSERT and isinstance(edit.new, dict) else None
    return edit.index, edit.part, edit.call, inserted


def attribute(
    changes: Sequence[Change],
    edit_changes: Sequence[EditChange],
    view: View,
    rendered: Rendered,
    base_len: int,
    choose: ModeChooser,
) -> list[Change]:
    """The changes with the policy edits behind each, and changes of their own for text that is only to be forgotten.

    Where the renderer cannot say where messages lie, every change is laid to every edit, and one that forgets makes all
    forget: nothing that should be forgotten may survive for want of a span.
    """
    try:
        regions = [(change, _region(change.edit, view, rendered)) for change in edit_changes]
    except RenderError:
        regions = [(change, (0, len(rendered.token_ids))) for change in edit_changes]
    result = list(changes)
    for change, (start, end) in regions:
        if change.mode is not Mode.FORGET:
            continue
        removed = any(one.end > one.start and one.meets(start, end) for one in result)
        if change.was_amortized or not removed:
            result = _with_region(result, start, end, base_len)
    return [_attributed(one, regions, base_len, choose) for one in result]


def _region(edit: MessageEdit, view: View, rendered: Rendered) -> tuple[int, int]:
    """Tokens of the edited prompt in which the traces of an edit must lie.

    Its message, if the view has it, with the one before where a template writes a result into the call's message; else
    from the end of the message before to the end of the one after, because a diff
    may shift a removed message along the beginning that two messages share.
    """
    if edit.part is Part.INSERT:
        shown = next((k for k, edits in enumerate(view.edited) if edit in edits), None)
    else:
        shown = next((k for k, source in enumerate(view.sources) if source == edit.index), None)
    if shown is not None:
        start, end = rendered.span_of(shown)
        return (start, end) if start < end or not shown else (rendered.span_of(shown - 1)[0], end)
    after = next((k for k, source in enumerate(view.sources) if source is not None and source >= edit.index), None)
    if after is None:
        after = rendered.message_count
    start = rendered.span_of(after - 1)[1] if after else 0
    end = rendered.span_of(after)[1] if after < rendered.message_count else len(rendered.token_ids)
    return start, end


def _with_region(changes: list[Change], start: int, end: int, base_len: int) -> list[Change]:
    """`changes` with all of `[start, end)` of the edited prompt in one of them, cut to what the base has of it."""
    before = [change for change in changes if change.new_end < start]
    inside = [change for change in changes if change.meets(start, end)]
    after = [change for change in changes if change.new_start > end]
    base_start = start - sum(change.delta for change in before)
    if inside and inside[0].new_start <= start:
        start, base_start = inside[0].new_start, inside[0].start
    end = max([end, *(change.new_end for change in inside)])
    base_end = base_start + (end - start) - sum(change.delta for change in inside)
    if base_end > base_len:  # the region reaches into new tokens, which nothing has served yet
        end, base_end = end - (base_end - base_len), base_len
    if base_start >= base_len:
        return changes
    return [*before, Change(base_start, base_end, start, end), *after]


def _attributed(
    change: Change, regions: Sequence[tuple[EditChange, tuple[int, int]]], base_len: int, choose: ModeChooser
) -> Change:
    causes = [one for one, (start, end) in regions if change.meets(start, end)]
    if not causes:
        return change
    edits = tuple(one.edit for one in causes)
    modes = {one.mode for one in causes}
    if Mode.FORGET in modes:
        mode = Mode.FORGET
    elif Mode.AUTO in modes:
        mode = choose(ModeQuestion(edits, change.start, change.new_end - change.new_start, base_len - change.end))
    else:
        mode = Mode.AMORTIZE
    return replace(change, mode=mode, cause=Cause.POLICY, edits=edits)


@dataclass(frozen=True, slots=True)
class DirectivePlan:
    """What is sent: the prompt, how it grows out of the base, and the directives with their causes."""

    tokens: TokenPlan
    directives: tuple[PlannedDirective, ...]
    input_ids: list[int]


def settle(base: array[int], edited: array[int], changes: Sequence[Change]) -> DirectivePlan:
    """Directives for changes whose mode is decided.

    FORGET of the template or the caller only asks for exact KV, so the base simply ends before the first of these, and
    all from there on is new. But if a policy edit forgets, nothing behind it is amortized anyway: then all directives
    reach the server, and those of the template or the caller forget as well. A change at the end of the base becomes
    new tokens, unless a policy wants it forgotten.
    """
    kept = list(changes)
    base_len, new_from = len(base), len(edited)
    cut = None
    if any(change.forgotten_by_policy for change in kept):
        kept = [one if one.cause is Cause.POLICY else replace(one, mode=Mode.FORGET) for one in kept]
    else:
        cut = next((k for k, change in enumerate(kept) if change.mode is Mode.FORGET), None)
    if cut is None and kept and kept[-1].end == base_len and not kept[-1].forgotten_by_policy:
        cut = len(kept) - 1
    if cut is not None:
        base_len, new_from = kept[cut].start, kept[cut].new_start
        kept = kept[:cut]
    planned = tuple(
        PlannedDirective(
            Directive(change.start, change.end, tuple(edited[change.new_start : change.new_end]), change.mode),
            change.cause,
            change.edits,
        )
        for change in kept
    )
    directives = DirectiveSet(tuple(one.directive for one in planned))
    new_tokens = tuple(edited[new_from:])
    input_ids = directives.apply(base[:base_len].tolist()) + list(new_tokens)
    return DirectivePlan(TokenPlan(base_len, directives, new_tokens), planned, input_ids)
