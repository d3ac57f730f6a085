"""The changes between a base and an edited prompt, in coordinates of both.

A turn mostly appends: the base ends somewhere in the middle of the edited prompt. Finding that place first leaves the
diff proper two small problems instead of one as long as the history.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum

from leyline_agent.diff import diff, equal_run_len
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit

_WINDOW = 32  # tokens of the base looked for in the edited prompt
_WINDOW_ENDS = (0, 64, 256, 1024, 4096)  # how far from the end of the base windows end
_MAX_PLACES = 8  # of one window in the edited prompt that are compared
_SHORT = 2048  # tokens of edited prompt below which looking for the end saves nothing
_BYTES = 8  # of one token in array("q")


class Cause(StrEnum):
    """Who wants a directive."""

    POLICY = "policy"
    CALLER = "caller"
    """The history itself came rewritten."""
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True)
class Change:
    """Base tokens `[start, end)` that became edited tokens `[new_start, new_end)`, and why."""

    start: int
    end: int
    new_start: int
    new_end: int
    mode: Mode = Mode.AMORTIZE
    cause: Cause = Cause.TEMPLATE
    edits: tuple[MessageEdit, ...] = ()

    def meets(self, start: int, end: int) -> bool:
        """Whether it touches or overlaps `[start, end]` of the edited prompt."""
        return self.new_start <= end and start <= self.new_end

    @property
    def forgotten_by_policy(self) -> bool:
        return self.mode is Mode.FORGET and self.cause is Cause.POLICY

    @property
    def delta(self) -> int:
        return (self.new_end - self.new_start) - (self.end - self.start)


def token_changes(base: array[int], edited: array[int], min_run: int, new_from: int | None = None) -> list[Change]:
    """What the diff of the two finds, ascending and disjoint. Linear in their lengths.

    `new_from` is where messages begin in the edited prompt that the base does not have. The base is compared with what
    is before it only: text that a new tool output shares with an old one was not served in the new one's place.
    """
    if new_from is None or new_from > len(edited):
        return _split_diff(base, edited, min_run)
    changes = _split_diff(base, edited[:new_from], min_run)
    start, new_start = len(base), new_from
    while changes and start - changes[-1].end < min_run:  # too little is kept between to be worth a splice
        last = changes.pop()
        start, new_start = last.start, last.new_start
    # A base that ends in a generation prompt goes on with the header of the next message, the same tokens.
    same = equal_run_len(base, start, edited, new_start, min(len(base) - start, len(edited) - new_start))
    same = same if same >= min_run else 0
    tail = Change(start + same, len(base), new_start + same, len(edited))
    return [*changes, tail] if tail.start < tail.end or tail.new_start < tail.new_end else changes


def _split_diff(base: array[int], edited: array[int], min_run: int) -> list[Change]:
    split = _meeting_point(base, edited) if len(edited) >= _SHORT else None
    if split is None:
        return _diffed(base, edited, min_run, 0, 0)
    i, j = split
    before = _diffed(base[:i], edited[:j], min_run, 0, 0)
    return before + _diffed(base[i:], edited[j:], min_run, i, j)


def _diffed(base: array[int], edited: array[int], min_run: int, i0: int, j0: int) -> list[Change]:
    changes = []
    shift = j0 - i0
    for directive in diff(base, edited, min_run=min_run):
        start = i0 + directive.start
        new_start = start + shift
        end, new_end = i0 + directive.end, new_start + len(directive.replacement)
        changes.append(Change(start, end, new_start, new_end))
        shift += directive.delta
    return changes


def _meeting_point(base: array[int], edited: array[int]) -> tuple[int, int] | None:
    """A place late in the base and where it is in the edited prompt: behind tokens that the two have in common.

    Text that occurs several times (a tool output read again) is placed where most tokens before it agree as well.
    """
    data = edited.tobytes()
    for back in _WINDOW_ENDS:
        end = len(base) - back
        if end < _WINDOW:
            return None
        best: tuple[int, int] | None = None
        for place in _places(data, base[end - _WINDOW : end].tobytes()):
            shared = _shared_before(base, end, edited, place)
            if best is None or shared > best[0]:
                best = (shared, place)
        if best is not None:
            return end, best[1]
    return None


def _places(data: bytes, window: bytes) -> list[int]:
    """Token indices behind the occurrences of a window, the last ones first."""
    places: list[int] = []
    position = data.rfind(window)
    while position >= 0 and len(places) < _MAX_PLACES:
        if position % _BYTES == 0:
            places.append((position + len(window)) // _BYTES)
        position = data.rfind(window, 0, position + len(window) - 1)
    return places


def _shared_before(base: array[int], i: int, edited: array[int], j: int) -> int:
    limit = min(i, j)
    return equal_run_len(base[i - limit : i][::-1], 0, edited[j - limit : j][::-1], 0, limit)
