"""Histories that somebody rewrote between two turns (LangChain's context editing, a summary): which message is which.

Edits count messages of the history they were made for. When that history changed, they are moved to where their
messages are now; edits of messages that are gone are gone with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from leyline_agent.edits import MessageEdit, Part


class Relocation:
    """Where the messages of an older history are in a newer one, by their digests."""

    def __init__(self, before: Sequence[bytes], now: Sequence[bytes]) -> None:
        self._places: dict[int, int] = {}
        matcher = SequenceMatcher(None, before, now, autojunk=False)
        for old, new, length in matcher.get_matching_blocks():
            self._places.update({old + k: new + k for k in range(length)})
        self._end = max(self._places.values(), default=-1) + 1

    @property
    def served_count(self) -> int:
        """How many messages of the newer history reach up to the end of the older one."""
        return self._end

    def moved(self, edits: Sequence[MessageEdit]) -> tuple[MessageEdit, ...]:
        """The edits in coordinates of the newer history."""
        result = []
        for edit in edits:
            place = self._places.get(edit.index)
            if place is None and edit.part is Part.INSERT and edit.index - 1 in self._places:
                place = self._places[edit.index - 1] + 1
            if place is not None:
                result.append(replace(edit, index=place))
        return tuple(result)
