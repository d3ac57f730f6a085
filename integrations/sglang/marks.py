"""Marks: how amortized KV is told from exact KV of the same text.

The radix tree is keyed by token ids. Where amortized KV begins, the id in the *key* (never the model's input) becomes
`id + (tag << 32)`, so that everything below hangs on an edge of its own: a request without the mark cannot reach it.
Marks are part of the wire protocol (`leyline_agent.report.Mark`); they live with the session, not with the server.

A tagged key says which KV lies under it, whoever files it and when. The tag at the head of a moved run names the edit
and the end of the run; where KV is prefilled inside a run, since the rest was not cached or a later edit begins, FRESH
says so. So what is "already" there is exactly what the splice would make, and a report can tell how far it reaches.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from leyline_agent.directives import DirectiveSet, KeptRun
from leyline_agent.report import FallbackReason, Mark

from .refusal import Refusal

Marks = tuple[Mark, ...]

TAG_BITS = 30
"""`id + (tag << 32)` stays a positive int64: SGLang's KV events reject negative token ids."""
_TAG_SHIFT = 32

FRESH = 1
"""The tag where prefilled KV follows inside a run that was moved. No edit has it."""


def check_marks(marks: Iterable[Sequence[int]], base_len: int) -> Marks:
    """Marks from the wire as a tuple. Raises Refusal(MALFORMED) unless they ascend inside the base with valid tags."""
    checked = tuple((int(position), int(tag), int(depth)) for position, tag, depth in marks)
    for position, tag, depth in checked:
        if not 0 <= position <= base_len or not 0 <= tag < 1 << TAG_BITS or depth < 0:
            raise Refusal(
                FallbackReason.MALFORMED,
                f"mark ({position}, {tag}, {depth}) does not fit a base of {base_len} tokens; send marks as reported",
            )
    if any(after[0] <= before[0] for before, after in pairwise(checked)):
        raise Refusal(FallbackReason.MALFORMED, "marks are not in ascending order; send them as reported")
    return checked


def tagged(token_ids: array[int], marks: Marks) -> array[int]:
    """The radix key of `token_ids` under `marks`: a tagged copy, or `token_ids` itself where no tag applies."""
    hits = [(position, tag) for position, tag, _ in marks if tag and position < len(token_ids)]
    if not hits:
        return token_ids
    key = array("q", token_ids)
    for position, tag in hits:
        key[position] += tag << _TAG_SHIFT
    return key


def first_amortized(marks: Marks) -> int | None:
    """Position from which KV under `marks` is not what a fresh prefill gives, None if all of it is."""
    return next((position for position, tag, _ in marks if tag), None)


def before(marks: Marks, position: int) -> Marks:
    """The marks in front of `position`."""
    return tuple(mark for mark in marks if mark[0] < position)


def prefilled_from(marks: Marks, position: int) -> Marks:
    """The marks if all from `position` on is prefilled: those of the KV in front of it, and FRESH if they need it."""
    kept = tuple(mark for mark in marks if mark[0] < position or (mark[0] == position and not mark[2]))
    if first_amortized(kept) is None:
        return ()
    return (*kept, (position, FRESH, 0)) if depth_at(kept, position) else kept


def depth_at(marks: Marks, position: int) -> int:
    """How many rotations the key at `position` went through."""
    return next((depth for start, _, depth in reversed(marks) if start <= position), 0)


def carry(marks: Marks, run: KeptRun, tag: int) -> Marks:
    """The marks of a run after it was copied: the base's marks inside it one rotation deeper, and `tag` at its head.

    A run that kept its place and its neighbours was still copied, since its values were made under the removed span.
    What follows the run was not moved, until another mark says so.
    """
    head = (run.new_start, tag, depth_at(marks, run.start) + 1)
    inside = tuple(
        (position + run.shift, mark, depth + 1) for position, mark, depth in marks if run.start < position < run.end
    )
    return (head, *inside, (run.new_end, 0, 0))


def make_tag(marks: Marks, run: KeptRun, directives: DirectiveSet, removed: Sequence[Sequence[int]]) -> int:
    """Content address, 2 to 2^30 - 1, of what makes KV behind these directives differ from exact KV.

    Equal edits of equal bases give equal tags, so a retry finds what the first try spliced. `directives` and `removed`
    are those up to the run that is tagged, `marks` the base's marks in front of it.
    """
    digest = hashlib.blake2b(array("q", (run.start, run.end, run.shift)).tobytes(), digest_size=8)
    for mark in marks:
        digest.update(array("q", mark).tobytes())
    for directive, gone in zip(directives, removed, strict=True):
        digest.update(array("q", (directive.start, directive.end, len(directive.replacement))).tobytes())
        digest.update(array("q", directive.replacement).tobytes())
        digest.update(array("q", gone).tobytes())
    return 2 + int.from_bytes(digest.digest(), "little") % ((1 << TAG_BITS) - 2)
