"""Directives: what to change in a token sequence that the server has already served.

A directive names a half-open span of the *base* (the last prompt and what was sampled after it), the tokens that take
its place, and the mode. Directives of one turn form a `DirectiveSet`: all in base coordinates, in order, disjoint,
applied whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import overload

from leyline_agent.errors import DirectiveError


class Mode(StrEnum):
    """What happens to the KV of the tokens downstream of an edit."""

    AMORTIZE = "amortize"
    """Keys are rotated to their new positions, values stay: the model keeps what it concluded from the removed span."""

    FORGET = "forget"
    """Everything after the span is prefilled again: nothing of the span survives."""

    AUTO = "auto"
    """For policies only: Leyline chooses from measured cost. Resolved before a directive is made."""


@dataclass(frozen=True, slots=True)
class Directive:
    """Replace tokens `[start, end)` of the base by `replacement`.

    AMORTIZE, afterwards: the prefix before `start` is untouched; the replacement is prefilled on it; tokens from `end`
    on move by `delta` and their keys are rotated to the new positions; their values stay. FORGET: all after `start` is
    prefilled anew, and the branch that held the span is dropped from the cache.

    Raises DirectiveError for a span that is negative or ends before it starts, an edit that changes nothing (unless it
    is a FORGET, which may re-prefill unchanged text), negative token ids, or mode AUTO.
    """

    start: int
    end: int
    replacement: tuple[int, ...] = ()
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if self.start < 0:
            raise DirectiveError(f"span [{self.start}, {self.end}) starts before the base; positions count from 0")
        if self.end < self.start:
            raise DirectiveError(
                f"span [{self.start}, {self.end}) ends before it starts; directives take half-open [start, end)"
            )
        if self.mode is Mode.AUTO:
            raise DirectiveError("mode 'auto' is for policies; a directive is 'amortize' or 'forget'")
        if self.start == self.end and not self.replacement and self.mode is Mode.AMORTIZE:
            raise DirectiveError(f"directive at {self.start} removes nothing and inserts nothing; leave it out")
        if any(token < 0 for token in self.replacement):
            raise DirectiveError(f"replacement {self.replacement} holds a negative token id")

    @property
    def removed_len(self) -> int:
        """Number of base tokens the span covers."""
        return self.end - self.start

    @property
    def delta(self) -> int:
        """How far tokens downstream move: replacement length minus span length."""
        return len(self.replacement) - self.removed_len

    def __str__(self) -> str:
        return f"[{self.start}, {self.end}) -> {len(self.replacement)} tokens, {self.mode}"


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Base tokens `[start, end)` that survive an edit, at `start + shift` and on in the edited sequence."""

    start: int
    end: int
    shift: int

    @property
    def new_start(self) -> int:
        return self.start + self.shift

    @property
    def new_end(self) -> int:
        return self.end + self.shift

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class DirectiveSet(Sequence[Directive]):
    """The directives of one turn: in base coordinates, ascending, disjoint, applied whole or not at all.

    Two spans may touch, but two insertions at one point, or an insertion inside a span, are refused: their order would
    be a guess. Raises DirectiveError when made from directives that overlap or are out of order.
    """

    directives: tuple[Directive, ...] = ()

    def __post_init__(self) -> None:
        for before, after in pairwise(self.directives):
            if after.start < before.end:
                raise DirectiveError(
                    f"directives {before} and {after} overlap or are out of order; sort by start and merge overlaps"
                )
            if after.start == before.start:
                raise DirectiveError(f"two directives start at {after.start}; merge them into one")

    @classmethod
    def of(cls, *directives: Directive) -> DirectiveSet:
        return cls(tuple(directives))

    @overload
    def __getitem__(self, index: int) -> Directive: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Directive, ...]: ...
    def __getitem__(self, index: int | slice) -> Directive | tuple[Directive, ...]:
        return self.directives[index]

    def __len__(self) -> int:
        return len(self.directives)

    def __iter__(self) -> Iterator[Directive]:
        return iter(self.directives)

    @property
    def delta(self) -> int:
        """Length of the edited sequence minus length of the base."""
        return sum(directive.delta for directive in self.directives)

    @property
    def mode(self) -> Mode:
        """FORGET as soon as one directive forgets: a turn is served either exactly or amortized, never half."""
        return Mode.FORGET if any(d.mode is Mode.FORGET for d in self.directives) else Mode.AMORTIZE

    def check(self, base_len: int) -> None:
        """Raise DirectiveError if a span reaches beyond a base of `base_len` tokens."""
        if self.directives and self.directives[-1].end > base_len:
            raise DirectiveError(f"{self.directives[-1]} reaches beyond the base, which has {base_len} tokens")

    def apply(self, base: Sequence[int]) -> list[int]:
        """The edited sequence. `base` is not changed. Raises DirectiveError if a span reaches beyond it."""
        self.check(len(base))
        edited: list[int] = []
        position = 0
        for directive in self.directives:
            edited.extend(base[position : directive.start])
            edited.extend(directive.replacement)
            position = directive.end
        edited.extend(base[position:])
        return edited

    def removed(self, base: Sequence[int]) -> list[tuple[int, ...]]:
        """The base tokens each directive takes out, which is what undoing it needs."""
        self.check(len(base))
        return [tuple(base[d.start : d.end]) for d in self.directives]

    def invert(self, base: Sequence[int]) -> DirectiveSet:
        """The set that turns `self.apply(base)` back into `base`, in coordinates of the edited sequence."""
        shift = 0
        inverse = []
        for directive, removed in zip(self.directives, self.removed(base), strict=True):
            start = directive.start + shift
            inverse.append(Directive(start, start + len(directive.replacement), removed, directive.mode))
            shift += directive.delta
        return DirectiveSet(tuple(inverse))

    def kept_runs(self, base_len: int) -> list[KeptRun]:
        """The pieces of a base of `base_len` tokens that survive, in order, each with the shift it undergoes.

        Empty pieces (between touching spans, at either end) are left out.
        """
        self.check(base_len)
        runs: list[KeptRun] = []
        position = shift = 0
        for directive in self.directives:
            if directive.start > position:
                runs.append(KeptRun(position, directive.start, shift))
            position = directive.end
            shift += directive.delta
        if base_len > position:
            runs.append(KeptRun(position, base_len, shift))
        return runs

    def then(self, later: DirectiveSet, base: Sequence[int]) -> DirectiveSet:
        """One set that does `self` to `base` and then `later` to the result.

        Edits that touch or overlap in the intermediate sequence become one, which forgets if either did.
        Raises DirectiveError if `later` does not fit the intermediate sequence.
        """
        middle = self.apply(base)
        final = later.apply(middle)
        merged = _Composition(self, later, len(base), len(middle)).spans()
        directives = []
        for base_start, base_end, final_start, final_end, mode in merged:
            replacement = tuple(final[final_start:final_end])
            unchanged = replacement == tuple(base[base_start:base_end])
            if not (unchanged and mode is Mode.AMORTIZE):
                directives.append(Directive(base_start, base_end, replacement, mode))
        return DirectiveSet(tuple(directives))


class _Composition:
    """Spans changed by either of two successive sets, found in the sequence between them."""

    def __init__(self, first: DirectiveSet, second: DirectiveSet, base_len: int, middle_len: int) -> None:
        self.first, self.second = first, second
        self.base_len, self.middle_len = base_len, middle_len

    def spans(self) -> list[tuple[int, int, int, int, Mode]]:
        """(base start, base end, final start, final end, mode) of each merged edit, ascending."""
        touched: list[tuple[int, int, Mode]] = []
        shift = 0
        for directive in self.first:
            start = directive.start + shift
            touched.append((start, start + len(directive.replacement), directive.mode))
            shift += directive.delta
        touched.extend((directive.start, directive.end, directive.mode) for directive in self.second)

        merged: list[tuple[int, int, Mode]] = []
        for start, end, mode in sorted(touched):
            if merged and start <= merged[-1][1]:
                last_start, last_end, last_mode = merged[-1]
                joined = Mode.FORGET if Mode.FORGET in (mode, last_mode) else Mode.AMORTIZE
                merged[-1] = (last_start, max(last_end, end), joined)
            else:
                merged.append((start, end, mode))
        return [
            (
                self._to_base(start, left=True),
                self._to_base(end, left=False),
                self._to_final(start, left=True),
                self._to_final(end, left=False),
                mode,
            )
            for start, end, mode in merged
        ]

    def _to_base(self, position: int, *, left: bool) -> int:
        """The base position that a boundary of a merged edit in the middle sequence came from.

        `left` boundaries lie before an edit that starts there, right ones behind an edit that ends there.
        """
        shift = 0
        for directive in self.first:
            start = directive.start + shift
            end = start + len(directive.replacement)
            if position < start or (position == start and left):
                break
            if position < end:  # inside a replacement: only possible at a boundary of `first` itself
                return directive.start if left else directive.end
            shift += directive.delta
        return position - shift

    def _to_final(self, position: int, *, left: bool) -> int:
        shift = 0
        for directive in self.second:
            if position < directive.start or (position == directive.start and left):
                break
            if position < directive.end:
                return directive.start + shift if left else directive.start + shift + len(directive.replacement)
            shift += directive.delta
        return position + shift
