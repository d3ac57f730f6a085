"""From the edits a policy asked for to a view that no chat template or provider refuses.

Edits that would break the history are refused in all-or-nothing sets, each with its reason, and the others go on. A
history that is broken before any edit can be repaired by edits as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_agent.compose import units
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, View, apply_edits
from leyline_agent.errors import PolicyError
from leyline_agent.history import Pairing, pair_calls, tool_calls
from leyline_agent.invariants import Violation, ViolationKind, check_history, check_view

INTERRUPTED = "[This tool call was interrupted. It has no output.]"
"""The result given to a call that never got one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A set of edits that was not applied, and why."""

    edits: tuple[MessageEdit, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EditPlan:
    """The edits that hold, the view they make, and what was refused."""

    edits: tuple[MessageEdit, ...]
    view: View
    refused: tuple[Refusal, ...] = ()


def plan_edits(messages: Sequence[Message], edits: Iterable[MessageEdit]) -> EditPlan:
    """Apply as many of `edits` as leave a valid history.

    Edits of one group stand or fall together, and so do those that drop a call and its results: what one of them would
    leave is refused in turn. Never raises for what a policy returned: in the worst case everything is refused and the
    view is the history.
    """
    sets, refused = _applicable(messages, units(edits))
    while True:
        accepted = [edit for unit in sets for edit in unit]
        view = apply_edits(messages, accepted)
        violations = check_view(messages, view)
        if not violations:
            return EditPlan(tuple(accepted), view, tuple(refused))
        violation = violations[0]
        blamed = _blamed(messages, view, violation)
        guilty = [unit for unit in sets if any(blamed(edit) for edit in unit)] or sets
        refused.extend(Refusal(tuple(unit), str(violation)) for unit in guilty)
        sets = [unit for unit in sets if unit not in guilty]


def _exchanges(pairing: Pairing) -> dict[int, int]:
    """For each message that is part of one, the call message of its exchange."""
    exchange: dict[int, int] = {}
    for use in pairing.uses:
        exchange[use.call_at] = use.call_at
        if use.result_at is not None:
            exchange[use.result_at] = use.call_at
    return exchange


def _applicable(
    messages: Sequence[Message], sets: list[list[MessageEdit]]
) -> tuple[list[list[MessageEdit]], list[Refusal]]:
    """The sets that `apply_edits` takes together, and those it does not (out of range, two edits of one part)."""
    try:
        apply_edits(messages, [edit for unit in sets for edit in unit])
        return sets, []
    except PolicyError:
        fitting: list[list[MessageEdit]] = []
        refused: list[Refusal] = []
        for unit in sets:
            try:
                apply_edits(messages, [edit for other in [*fitting, unit] for edit in other])
                fitting.append(unit)
            except PolicyError as err:
                refused.append(Refusal(tuple(unit), str(err)))
        return fitting, refused


def _blamed(messages: Sequence[Message], view: View, violation: Violation) -> Callable[[MessageEdit], bool]:
    """Which edits can have caused a violation."""
    index = violation.index
    kept = [source for source in view.sources if source is not None]
    if violation.kind in _NEIGHBOUR_KINDS:
        before = max((source for source in kept if source < index), default=-1)
        return lambda edit: before <= edit.index <= index
    if violation.kind is ViolationKind.ENDS_WITH_ASSISTANT:
        last = max(kept, default=-1)
        return lambda edit: edit.index > last
    exchange = _exchanges(pair_calls(messages))
    home = exchange.get(index, index)
    return lambda edit: edit.index == index or exchange.get(edit.index) == home


_NEIGHBOUR_KINDS = {
    ViolationKind.SAME_ROLE_TWICE,
    ViolationKind.FIRST_NOT_USER,
    ViolationKind.SYSTEM_NOT_FIRST,
    ViolationKind.REORDERED,
}


@dataclass(frozen=True, slots=True)
class Repair:
    """Edits that mend a history, what they mend, and what is wrong that they leave."""

    edits: tuple[MessageEdit, ...]
    mended: tuple[Violation, ...]
    left: tuple[Violation, ...]


def repair_history(messages: Sequence[Message]) -> Repair:
    """Mend what would make a provider refuse `messages`: results without a call, calls without a result, bad arguments.

    A result that arrived late goes back to its call; one whose call is nowhere, or has its answer, is dropped (or gets
    a call, where two messages of one role would meet). A call that never got a result gets one that says so. Arguments
    that are no JSON object are kept as text inside one.
    """
    found = check_history(messages)
    if not found:
        return Repair((), (), ())
    edits = [*_mend_pairs(messages, pair_calls(messages)), *_mend_arguments(messages)]
    left = check_history(apply_edits(messages, edits).messages)
    kinds_left = {violation.kind for violation in left}
    return Repair(tuple(edits), tuple(v for v in found if v.kind not in kinds_left), tuple(left))


def _mend_pairs(messages: Sequence[Message], pairing: Pairing) -> list[MessageEdit]:
    edits: list[MessageEdit] = []
    late = {messages[i].get("tool_call_id"): i for i in reversed(pairing.orphans)}
    moved: set[int] = set()
    for use in pairing.uses:
        if use.result_at is not None:
            continue
        at = use.call_at + 1
        while at < len(messages) and messages[at].get("role") == "tool":
            at += 1
        source = late.get(use.call_id) if use.call_id is not None else None
        group = None
        movable = source is not None and source >= at and not _holds_apart(messages, source, source)
        if source is not None and movable and source not in moved:
            group = f"late_result:{source}"
            moved.add(source)
            edits.append(_repair(source, None, Part.MESSAGE, "late_result", group))
            result = messages[source]
        else:
            result = _interrupted(use.call_id, use.name)
        edits.append(_repair(at, result, Part.INSERT, "late_result" if group else "interrupted_call", group))
    edits.extend(_repair(index, None, Part.MESSAGE, "duplicate_result") for index in pairing.duplicates)
    for run in _runs(index for index in pairing.orphans if index not in moved):
        edits.extend(_mend_orphans(messages, run))
    return edits


def _runs(indices: Iterable[int]) -> list[list[int]]:
    """Indices in runs of neighbours."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _mend_orphans(messages: Sequence[Message], run: Sequence[int]) -> list[MessageEdit]:
    """Drop results whose call is nowhere; where two messages of one role would then meet, give them a call instead."""
    group = f"orphan_result:{run[0]}"
    if not _holds_apart(messages, run[0], run[-1]):
        return [_repair(index, None, Part.MESSAGE, "orphan_result", group) for index in run]
    calls = [_stub_call(messages[index], index) for index in run]
    edits = [
        _repair(index, {**messages[index], "tool_call_id": call["id"]}, Part.MESSAGE, "orphan_result", group)
        for index, call in zip(run, calls, strict=True)
        if messages[index].get("tool_call_id") != call["id"]
    ]
    before = messages[run[0] - 1]
    if before.get("role") == "assistant":
        called = {**before, "tool_calls": calls}
        return [_repair(run[0] - 1, called, Part.MESSAGE, "orphan_result", group), *edits]
    caller = {"role": "assistant", "content": None, "tool_calls": calls}
    return [_repair(run[0], caller, Part.INSERT, "orphan_result", group), *edits]


def _holds_apart(messages: Sequence[Message], first: int, last: int) -> bool:
    """Whether two user or two assistant messages would meet without messages first..last.

    The end of the history counts as an assistant message, which comes next.
    """
    before = messages[first - 1] if first else {}
    after = messages[last + 1].get("role") if last + 1 < len(messages) else "assistant"
    return before.get("role") == after and after in ("user", "assistant") and not tool_calls(before)


def _stub_call(result: Message, index: int) -> dict[str, Any]:
    """A call for a result that has none."""
    call_id = result.get("tool_call_id")
    function = {"name": str(result.get("name") or "unknown_tool"), "arguments": "{}"}
    return {"id": call_id if isinstance(call_id, str) else f"call_{index}", "type": "function", "function": function}


def _interrupted(call_id: str | None, name: str) -> dict[str, Any]:
    result: dict[str, Any] = {"role": "tool", "content": INTERRUPTED}
    if call_id is not None:
        result["tool_call_id"] = call_id
    elif name:
        result["name"] = name
    return result


def _mend_arguments(messages: Sequence[Message]) -> list[MessageEdit]:
    bad = {v.index for v in check_history(messages) if v.kind is ViolationKind.BAD_ARGUMENTS}
    edits = []
    for index in sorted(bad):
        for position, call in enumerate(tool_calls(messages[index])):
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str) and not _parses_to_object(arguments):
                new = json.dumps({"text": arguments}) if arguments.strip() else "{}"
                edits.append(
                    MessageEdit(index, new, Part.ARGUMENTS, Mode.FORGET, reason="bad_arguments", call=position)
                )
    return edits


def _parses_to_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _repair(index: int, new: Message | None, part: Part, reason: str, group: str | None = None) -> MessageEdit:
    return MessageEdit(index, new, part, Mode.FORGET, reason, group=group)
