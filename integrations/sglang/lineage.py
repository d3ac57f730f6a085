"""Lineage: which sequences of Leyline sessions hold a text, so that FORGET reaches all of them.

The radix tree cannot be asked what continues a prefix, nor where amortized KV was copied from. So the backend remembers
both for the requests that take part, within a bound: the sequences it served, and for each copy the base it was made
from. What was evicted meanwhile costs a failed match, nothing else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from leyline_agent.directives import DirectiveSet

from .marks import Marks, tagged
from .plan import SplicePlan, forgotten
from .tree import Namespace

MAX_TOKENS = 4_000_000
"""Token ids remembered in all, at 8 bytes each."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A token sequence as the tree files it: `key` is tagged with `marks`."""

    key: array[int]
    marks: Marks
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence that holds a forgotten span, at [start, end)."""

    sequence: Sequence
    start: int
    end: int

    @property
    def head(self) -> array[int]:
        return self.sequence.key[: self.end]


@dataclass(frozen=True, slots=True)
class _Copied:
    source: Sequence
    directives: DirectiveSet


class Lineage:
    """Served sequences and the sources of copies, the least recently used forgotten first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.max_tokens = max_tokens
        self._served: OrderedDict[tuple[Namespace, bytes], Sequence] = OrderedDict()
        self._copied: OrderedDict[tuple[Namespace, bytes], _Copied] = OrderedDict()
        self._num_tokens = 0

    def record_served(self, sequence: Sequence) -> None:
        """A request published `sequence` and is done."""
        name = (sequence.namespace, sequence.key.tobytes())
        self._num_tokens += len(sequence.key) * (name not in self._served)
        self._served[name] = sequence
        self._served.move_to_end(name)
        self._trim()

    def record_copy(self, plan: SplicePlan, namespace: Namespace) -> None:
        """The copies of `plan` are in the cache."""
        source = Sequence(tagged(plan.base, plan.base_marks), plan.base_marks, namespace)
        target = tagged(plan.prompt, plan.marks)
        for copy in plan.copies:
            name = (namespace, target[: copy.run.new_start + 1].tobytes())
            self._num_tokens += len(source.key) * (name not in self._copied)
            self._copied[name] = _Copied(source, plan.directives)
            self._copied.move_to_end(name)
        self._trim()

    def holders(self, plan: SplicePlan, namespace: Namespace) -> list[Held]:
        """All known sequences that hold what `plan` forgets: the base, what continues it, and what it was made from."""
        start, end = forgotten(plan.directives)
        base = Sequence(tagged(plan.base, plan.base_marks), plan.base_marks, namespace)
        found: list[Held] = []
        todo = [Held(base, start, end)]
        seen: set[bytes] = set()
        while todo:
            held = todo.pop()
            name = held.head.tobytes()
            if name in seen:
                continue
            seen.add(name)
            found.append(held)
            found.extend(self._continuing(held))
            todo.extend(self._sources(held))
        return found

    def _continuing(self, held: Held) -> Iterator[Held]:
        head = held.head.tobytes()
        for namespace, key in self._served:
            if namespace == held.sequence.namespace and key.startswith(head):
                yield Held(self._served[namespace, key], held.start, held.end)

    def _sources(self, held: Held) -> Iterator[Held]:
        sequence = held.sequence
        for position, tag, _ in sequence.marks:
            copied = self._copied.get((sequence.namespace, sequence.key[: position + 1].tobytes())) if tag else None
            if copied is not None:
                start, end = span_before(copied.directives, held.start, held.end)
                yield Held(copied.source, start, end)

    def clear(self) -> None:
        self._served.clear()
        self._copied.clear()
        self._num_tokens = 0

    def _trim(self) -> None:
        while self._num_tokens > self.max_tokens:
            if len(self._served) >= len(self._copied):
                self._num_tokens -= len(self._served.popitem(last=False)[1].key)
            else:
                self._num_tokens -= len(self._copied.popitem(last=False)[1].source.key)


def span_before(directives: DirectiveSet, start: int, end: int) -> tuple[int, int]:
    """The base span that became [start, end) of the edited sequence; whole removed spans where it touches their R."""
    base_start, base_end = start, end
    shift = 0
    for directive in directives:
        new_start = directive.start + shift
        new_end = new_start + len(directive.replacement)
        shift += directive.delta
        if new_start < start:
            base_start = directive.start if start < new_end else start - shift
        if new_start <= end:
            base_end = directive.end if end <= new_end else end - shift
    return base_start, max(base_start, base_end)
