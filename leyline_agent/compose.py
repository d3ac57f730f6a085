"""Working with sets of message edits: units, what is held, what they save, and one set after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, View, apply_edits
from leyline_agent.history import texts_in

MESSAGE_OVERHEAD_TOKENS = 4
"""What a template adds around a message (role, delimiters), near enough for budgets."""


def message_tokens(message: Message, count_tokens: Callable[[str], int]) -> int:
    """Tokens of a message as a policy counts them."""
    return MESSAGE_OVERHEAD_TOKENS + sum(count_tokens(text) for text in texts_in(message))


def tokens_saved(messages: Sequence[Message], edits: Sequence[MessageEdit], count_tokens: Callable[[str], int]) -> int:
    """Tokens by which the view under `edits` is shorter than `messages`; negative if it is longer."""
    by_index: dict[int, list[MessageEdit]] = defaultdict(list)
    saved = 0
    for edit in edits:
        if edit.part is Part.INSERT:
            assert isinstance(edit.new, Mapping)
            saved -= message_tokens(edit.new, count_tokens)
        else:
            by_index[edit.index].append(replace(edit, index=0))
    for index, changes in by_index.items():
        after = apply_edits([messages[index]], changes).messages
        saved += message_tokens(messages[index], count_tokens)
        saved -= sum(message_tokens(message, count_tokens) for message in after)
    return saved


def units(edits: Iterable[MessageEdit]) -> list[list[MessageEdit]]:
    """The edits in all-or-nothing sets, in order: those of one group together, each of the others alone."""
    found: list[list[MessageEdit]] = []
    by_group: dict[str, list[MessageEdit]] = {}
    for edit in edits:
        if edit.group is not None and edit.group in by_group:
            by_group[edit.group].append(edit)
            continue
        found.append([edit])
        if edit.group is not None:
            by_group[edit.group] = found[-1]
    return found


def same_effect(a: MessageEdit, b: MessageEdit) -> bool:
    """Whether two edits make the same change, whatever their mode, reason and group."""
    return (a.index, a.part, a.call, a.new) == (b.index, b.part, b.call, b.new)


def is_in_force(edit: MessageEdit, in_force: Iterable[MessageEdit]) -> bool:
    """Whether an edit with the same effect was in force on the last turn."""
    return any(same_effect(edit, other) for other in in_force)


def held_edits(wanted: Sequence[MessageEdit], in_force: Sequence[MessageEdit]) -> list[MessageEdit]:
    """Of the edits in force, those that whoever wants `wanted` made and does not take back: "leave it as it was".

    An edit in force counts as theirs if `wanted` has an edit of the same message for the same reason.
    """
    theirs = {(edit.index, edit.part is Part.INSERT, edit.reason) for edit in wanted}
    held: list[MessageEdit] = []
    for unit in units(in_force):
        if all((edit.index, edit.part is Part.INSERT, edit.reason) in theirs for edit in unit):
            held.extend(unit)
    return held


def filter_units(
    wanted: Sequence[MessageEdit],
    in_force: Sequence[MessageEdit],
    allowed: Callable[[Sequence[MessageEdit]], bool],
) -> list[MessageEdit]:
    """The units of `wanted` that are allowed.

    Where one that is not was to go further than an edit in force, and that one is allowed, it stays.
    """
    kept = [edit for unit in units(wanted) if allowed(unit) for edit in unit]
    touched = {edit.index for edit in kept}
    held = units(held_edits(wanted, in_force))
    return kept + [e for unit in held if allowed(unit) and not any(x.index in touched for x in unit) for e in unit]


def join_modes(modes: Collection[Mode]) -> Mode:
    """The mode of edits that became one: FORGET if one forgets, else AUTO if one leaves it open."""
    return next((mode for mode in (Mode.FORGET, Mode.AUTO) if mode in modes), Mode.AMORTIZE)


def compose(
    messages: Sequence[Message], first: Sequence[MessageEdit], second: Sequence[MessageEdit]
) -> list[MessageEdit]:
    """One set of edits of `messages` that does `first`, and then `second` to the view that `first` makes.

    `apply_edits(messages, compose(messages, a, b)).messages` equals
    `apply_edits(apply_edits(messages, a).messages, b).messages`. Where both edit one message, the edit has the reason
    of the second, the stricter mode and the groups of both. Raises PolicyError as `apply_edits` does.
    """
    view = apply_edits(messages, first)
    apply_edits(view.messages, second)  # raises for edits that do not fit
    inserts: dict[int, list[MessageEdit]] = defaultdict(list)
    changes: dict[int, list[MessageEdit]] = defaultdict(list)
    for edit in second:
        (inserts if edit.part is Part.INSERT else changes)[edit.index].append(edit)

    result = list(view.dropped)
    joined: list[tuple[str, str]] = []
    where = original_positions(view, len(messages))
    for k, index in enumerate(where):
        result.extend(replace(edit, index=index) for edit in inserts[k])
        if k < len(view.messages):
            result.extend(_merge(messages, view, k, changes[k], joined))
    return _join_groups(result, joined)


def project(edits: Sequence[MessageEdit], first: Sequence[MessageEdit], view: View, total: int) -> list[MessageEdit]:
    """Edits of an original history of `total` messages in coordinates of `view`, which `first` made of it.

    What `first` does already, and edits of messages it dropped, are left out.
    """
    where = original_positions(view, total)
    place = {source: k for k, source in enumerate(view.sources) if source is not None}
    projected = []
    for edit in edits:
        if is_in_force(edit, first):
            continue
        if edit.part is Part.INSERT:
            k = next(k for k, index in enumerate(where) if index >= min(edit.index, total))
            projected.append(replace(edit, index=k))
        elif edit.index in place:
            projected.append(replace(edit, index=place[edit.index]))
    return projected


def original_positions(view: View, total: int) -> list[int]:
    """For each view message, and for the end, the index in the original history at which it stands.

    An inserted message has the index its edit named.
    """
    where = [
        changes[0].index if source is None else source
        for source, changes in zip(view.sources, view.edited, strict=True)
    ]
    return [*where, total]


def _merge(
    messages: Sequence[Message], view: View, k: int, second: list[MessageEdit], joined: list[tuple[str, str]]
) -> list[MessageEdit]:
    """The edits of view message `k` after `second` came on top of those that made it."""
    first = view.edited[k]
    if not second:
        return list(first)
    source = view.sources[k]
    index = first[0].index if source is None else source
    whole = source is None or any(edit.part is Part.MESSAGE for edit in (*first, *second))
    if not whole:
        parts = {(edit.part, edit.call): edit for edit in first}
        for edit in second:
            before = parts.pop((edit.part, edit.call), None)
            parts[edit.part, edit.call] = _over(replace(edit, index=index), [before] if before else [], joined)
        return [edit for edit in parts.values() if not _changes_nothing(messages[index], edit)]

    after = apply_edits([view.messages[k]], [replace(edit, index=0) for edit in second]).messages
    new: Any = after[0] if after else None
    if source is None and new is None:
        return []
    part = Part.INSERT if source is None else Part.MESSAGE
    merged = _over(replace(second[-1], index=index, new=new, part=part, call=None), [*first, *second[:-1]], joined)
    return [] if source is not None and _changes_nothing(messages[index], merged) else [merged]


def _over(edit: MessageEdit, before: Sequence[MessageEdit], joined: list[tuple[str, str]]) -> MessageEdit:
    """`edit` in place of itself and those `before` it."""
    groups = [e.group for e in (edit, *before) if e.group is not None]
    joined.extend((groups[0], group) for group in groups[1:])
    return replace(
        edit,
        mode=join_modes([e.mode for e in (edit, *before)]),
        reason=edit.reason or next((e.reason for e in before if e.reason), ""),
        group=groups[0] if groups else None,
    )


def _changes_nothing(message: Message, edit: MessageEdit) -> bool:
    return apply_edits([message], [replace(edit, index=0)]).messages == (message,)


def _join_groups(edits: list[MessageEdit], joined: Sequence[tuple[str, str]]) -> list[MessageEdit]:
    name: dict[str, str] = {}
    for one, other in joined:
        kept, gone = name.get(one, one), name.get(other, other)
        if kept != gone:
            name.update({old: kept for old, new in name.items() if new == gone})
            name[gone] = kept
    return [replace(e, group=name.get(e.group, e.group)) if e.group is not None else e for e in edits]
