"""Undo: the edit log keeps what every edit took out, so that any removed text can be brought back.

In a session nothing is ever lost: the agent keeps its full history, and an edit that a policy no longer returns is
undone. The log is for what lives longer or elsewhere: an audit, a view that was stored in place of the history, a tool
through which the model asks for an output that was removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, apply_edits
from leyline_agent.errors import HistoryError


def invert(messages: Sequence[Message], edits: Sequence[MessageEdit]) -> list[MessageEdit]:
    """The edits of the view, in its coordinates, that turn it back into `messages`.

    `apply_edits(apply_edits(messages, edits).messages, invert(messages, edits)).messages == tuple(messages)`.
    """
    view = apply_edits(messages, edits)
    modes = {edit.index: edit.mode for edit in edits if edit.part is not Part.INSERT}
    inverse: list[MessageEdit] = []
    expected = 0  # the next original message that the view should show
    for k, source in enumerate(view.sources):
        if source is None:
            inverse.append(MessageEdit(k, None, Part.MESSAGE, view.edited[k][0].mode, "undo"))
            continue
        inverse.extend(_put_back(messages, range(expected, source), k, modes))
        if view.edited[k]:
            inverse.append(MessageEdit(k, messages[source], Part.MESSAGE, modes[source], "undo"))
        expected = source + 1
    inverse.extend(_put_back(messages, range(expected, len(messages)), len(view.messages), modes))
    return inverse


def _put_back(messages: Sequence[Message], missing: range, k: int, modes: Mapping[int, Mode]) -> Iterator[MessageEdit]:
    for index in missing:
        yield MessageEdit(k, messages[index], Part.INSERT, modes[index], "undo")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The edits that came into force or were taken back on one turn, and the original messages they touched."""

    turn: int
    made: tuple[MessageEdit, ...]
    undone: tuple[MessageEdit, ...]
    originals: Mapping[int, Message]


@dataclass
class EditLog:
    """An append-only account of a session's edits, from which the history, and any part of it, can be restored."""

    entries: list[LogEntry] = field(default_factory=list)

    def record(self, turn: int, messages: Sequence[Message], edits: Sequence[MessageEdit]) -> LogEntry | None:
        """Note the edits in force on a turn. Only what changed since the last turn makes an entry."""
        before = self.in_force()
        made = tuple(edit for edit in edits if edit not in before)
        undone = tuple(edit for edit in before if edit not in edits)
        if not made and not undone:
            return None
        touched = sorted({edit.index for edit in made if edit.part is not Part.INSERT})
        entry = LogEntry(turn, made, undone, {index: messages[index] for index in touched})
        self.entries.append(entry)
        return entry

    def in_force(self, turn: int | None = None) -> tuple[MessageEdit, ...]:
        """The edits in force after `turn` (by default, after the last one)."""
        edits: list[MessageEdit] = []
        for entry in self.entries:
            if turn is not None and entry.turn > turn:
                break
            edits = [edit for edit in edits if edit not in entry.undone]
            edits.extend(entry.made)
        return tuple(edits)

    def original(self, index: int) -> Message:
        """Message `index` of the history as it was. Raises HistoryError for a message that no edit touched."""
        for entry in reversed(self.entries):
            if index in entry.originals:
                return entry.originals[index]
        raise HistoryError(f"message {index} was never edited; the view shows it as it was")

    def restore(self, view: Sequence[Message], turn: int | None = None) -> list[Message]:
        """The original messages from the view of a turn. Raises HistoryError if `view` is not of that turn's shape.

        Messages that came after the turn may follow in `view`; they are kept as they are.
        """
        edits = self.in_force(turn)
        dropped = {e.index for e in edits if e.part is Part.MESSAGE and e.new is None}
        edited = {e.index for e in edits if e.part is not Part.INSERT} - dropped
        inserted = sorted(e.index for e in edits if e.part is Part.INSERT)
        restored: list[Message] = []
        shown = iter(view)
        last = max([*dropped, *edited, *inserted], default=-1)
        for index in range(last + 1):
            for _ in range(inserted.count(index)):
                next(shown, None)
            if index in dropped:
                restored.append(self.original(index))
                continue
            message = next(shown, None)
            if message is None and index < last:
                raise HistoryError(f"the view ends before message {index}, but turn {turn} edits message {last}")
            if message is not None:
                restored.append(self.original(index) if index in edited else message)
        restored.extend(shown)
        return restored

    def to_lines(self) -> Iterator[str]:
        """The log as JSON lines."""
        for entry in self.entries:
            yield json.dumps(
                {
                    "turn": entry.turn,
                    "made": [edit_to_json(edit) for edit in entry.made],
                    "undone": [edit_to_json(edit) for edit in entry.undone],
                    "originals": {str(index): message for index, message in entry.originals.items()},
                },
                ensure_ascii=False,
            )

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> EditLog:
        """The log that `to_lines` wrote."""
        entries = []
        for line in lines:
            entry = json.loads(line)
            entries.append(
                LogEntry(
                    entry["turn"],
                    tuple(edit_from_json(edit) for edit in entry["made"]),
                    tuple(edit_from_json(edit) for edit in entry["undone"]),
                    {int(index): message for index, message in entry["originals"].items()},
                )
            )
        return cls(entries)


def edit_to_json(edit: MessageEdit) -> dict[str, Any]:
    """An edit as plain JSON; fields at their defaults are left out."""
    plain: dict[str, Any] = {"index": edit.index, "new": edit.new, "part": edit.part.value, "mode": edit.mode.value}
    plain.update({key: value for key in ("reason", "call", "group") if (value := getattr(edit, key)) not in (None, "")})
    return plain


def edit_from_json(plain: Mapping[str, Any]) -> MessageEdit:
    """The edit that `edit_to_json` wrote."""
    return MessageEdit(**{**plain, "part": Part(plain["part"]), "mode": Mode(plain["mode"])})
