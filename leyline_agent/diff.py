"""Token diff: the directives that turn a base into an edited sequence.

The cost of a directive is a splice and the prefill of its replacement, so a diff for Leyline wants few, whole spans:
a common word inside a replaced paragraph is not worth keeping. Runs shorter than `min_run` are therefore replaced with
their surroundings. What is kept is found in linear time from anchors, as rsync finds blocks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.errors import DirectiveError

MIN_RUN = 8
_BYTES = 8  # of one token in array("q")


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """How an edited prompt grows out of a base: `apply(directives, base[:base_len]) + new_tokens`.

    `base_len` is shorter than the base when its end is not in the edited sequence (a generation prompt that the
    template does not repeat in history, or a rewind): nothing lies downstream of it, so there is nothing to splice.
    """

    base_len: int
    directives: DirectiveSet
    new_tokens: tuple[int, ...]


def diff(
    base: Sequence[int], edited: Sequence[int], *, mode: Mode = Mode.AMORTIZE, min_run: int = MIN_RUN
) -> DirectiveSet:
    """Directives with `diff(base, edited).apply(base) == list(edited)`.

    Minimal: no directive begins or ends with a token that could have been kept, and kept runs between two directives
    have at least `min_run` tokens. Linear in the two lengths for histories of mostly unique text.
    Raises DirectiveError if `min_run` is below 1.
    """
    if min_run < 1:
        raise DirectiveError(f"min_run is {min_run}; it must be at least 1")
    old, new = array("q", base), array("q", edited)
    prefix_len = equal_run_len(old, 0, new, 0, min(len(old), len(new)))
    suffix_len = _equal_suffix_len(old, new, prefix_len)
    runs = _matching_runs(old, new, prefix_len, len(old) - suffix_len, prefix_len, len(new) - suffix_len, min_run)
    runs.append((len(old) - suffix_len, len(new) - suffix_len, suffix_len))

    directives: list[Directive] = []
    i, j = prefix_len, prefix_len
    for run_i, run_j, run_len in runs:
        if run_i > i or run_j > j:
            directives.append(Directive(i, run_i, tuple(new[j:run_j]), mode))
        i, j = run_i + run_len, run_j + run_len
    return DirectiveSet(tuple(directives))


def plan_tokens(
    base: Sequence[int], edited: Sequence[int], *, mode: Mode = Mode.AMORTIZE, min_run: int = MIN_RUN
) -> TokenPlan:
    """The diff of `base` and `edited`, with what follows the last kept token split off as new tokens."""
    directives = diff(base, edited, mode=mode, min_run=min_run)
    if directives and directives[-1].end == len(base):
        last = directives[-1]
        return TokenPlan(last.start, DirectiveSet(directives[:-1]), last.replacement)
    return TokenPlan(len(base), directives, ())


def equal_run_len(a: array[int], i: int, b: array[int], j: int, limit: int) -> int:
    """How many tokens from `a[i]` and `b[j]` on are equal, at most `limit`.

    Slices that double in length while they match, then halve: they compare at C speed.
    """
    length, step = 0, 32
    while length < limit and step:
        step = min(step, limit - length)
        if a[i + length : i + length + step] == b[j + length : j + length + step]:
            length += step
            step *= 2
        else:
            limit = length + step - 1  # at least one of these differs
            step //= 2
    return length


def _equal_suffix_len(a: array[int], b: array[int], prefix_len: int) -> int:
    limit = min(len(a), len(b)) - prefix_len
    return equal_run_len(a[len(a) - limit :][::-1], 0, b[len(b) - limit :][::-1], 0, limit) if limit else 0


Run = tuple[int, int, int]
"""(start in base, start in edited, length)"""


def _matching_runs(old: array[int], new: array[int], i0: int, i1: int, j0: int, j1: int, min_run: int) -> list[Run]:
    """Runs of at least `min_run` equal tokens inside old[i0:i1] and new[j0:j1], ascending in both, heaviest chain."""
    if i1 - i0 < min_run or j1 - j0 < min_run:
        return []
    block = max(1, min_run // 2)  # every common run of 1.5 * min_run tokens holds an aligned block
    index = _block_index(old, i0, i1, block)
    haystack = new.tobytes()
    candidates: list[Run] = []
    j = j0
    while j + block <= j1:
        found = index.get(haystack[j * _BYTES : (j + block) * _BYTES])
        run = _longest_extension(old, new, found, j, (i0, i1, j0, j1)) if found else None
        if run is not None and run[2] >= min_run:
            candidates.append(run)
            j = run[1] + run[2]
        else:
            j += 1
    return _trim_overlaps(_heaviest_chain(candidates), min_run)


_MAX_PLACES = 8  # of one block in the base; commoner text (rules, blank lines) anchors nothing


def _block_index(old: array[int], i0: int, i1: int, block: int) -> dict[bytes, list[int]]:
    data = old.tobytes()
    index: dict[bytes, list[int]] = {}
    for i in range(i0, i1 - block + 1, block):
        places = index.setdefault(data[i * _BYTES : (i + block) * _BYTES], [])
        if len(places) < _MAX_PLACES:
            places.append(i)
    return index


def _longest_extension(
    old: array[int], new: array[int], places: list[int], j: int, bounds: tuple[int, int, int, int]
) -> Run | None:
    i0, i1, j0, j1 = bounds
    best: Run | None = None
    for i in places:
        back = 0
        while i - back > i0 and j - back > j0 and old[i - back - 1] == new[j - back - 1]:
            back += 1
        length = back + equal_run_len(old, i, new, j, min(i1 - i, j1 - j))
        if best is None or length > best[2]:
            best = (i - back, j - back, length)
    return best


def _heaviest_chain(runs: list[Run]) -> list[Run]:
    """Of runs ascending in the edited sequence, the chain ascending in the base too that keeps the most tokens.

    A Fenwick tree over base positions holds the best weight of a chain that ends there: O(r log r).
    """
    if len(runs) < 2:
        return runs
    starts = sorted({run[0] for run in runs})
    best: list[tuple[int, int]] = [(0, -1)] * (len(starts) + 1)  # (weight, index of the chain's last run)
    previous: list[int] = []
    top = (0, -1)
    for number, (i, _, length) in enumerate(runs):
        rank = bisect_left(starts, i)
        before = (0, -1)
        k = rank
        while k:
            before = max(before, best[k])
            k -= k & -k
        here = (before[0] + length, number)
        previous.append(before[1])
        top = max(top, here)
        k = rank + 1
        while k <= len(starts):
            best[k] = max(best[k], here)
            k += k & -k
    chain: list[Run] = []
    number = top[1]
    while number >= 0:
        chain.append(runs[number])
        number = previous[number]
    return chain[::-1]


def _trim_overlaps(runs: list[Run], min_run: int) -> list[Run]:
    """Cut the head of a run that reaches into the one before it, in either sequence; drop it if too little is left."""
    kept: list[Run] = []
    i_end = j_end = 0
    for i, j, length in runs:
        overlap = max(0, i_end - i, j_end - j)
        if length - overlap >= min_run:
            kept.append((i + overlap, j + overlap, length - overlap))
            i_end, j_end = i + length, j + length
    return kept
