"""From a request to a splice plan: all that can be checked and computed without looking into the cache.

Everything here is plain Python on token ids, the same in the process that takes requests and in every scheduler rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leyline_agent.directives import DirectiveSet, KeptRun, Mode
from leyline_agent.errors import DirectiveError
from leyline_agent.report import FallbackReason
from leyline_agent.wire import VERSION, SpliceRequest, WireDirective, hash_tokens

from .marks import Marks, before, carry, check_marks, make_tag, prefilled_from
from .refusal import Refusal


@dataclass(frozen=True, slots=True)
class Copy:
    """One run to copy: base tokens [run.start, run.end) become prompt tokens [run.new_start, run.new_end).

    `directive` is the index of the last directive in front of the run, or of the one whose replacement it is.
    """

    run: KeptRun
    directive: int
    is_replacement: bool = False

    def len_up_to(self, prompt_len: int) -> int:
        """How many tokens of the run lie in front of `prompt_len`."""
        return max(0, min(prompt_len, self.run.new_end) - self.run.new_start)


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """A checked request. `base` is rebuilt from the prompt and the removed tokens; `base_marks` are its marks.

    `copies` are in order; each needs the prompt in front of it to be in the cache when its turn comes: the copy before
    it, and the replacement between the two. `marks` are the prompt's marks once all of them are done, `kept_marks`
    those that hold whether or not anything is spliced: of what stands in front of the first edit.
    """

    prompt: array[int]
    base: array[int]
    base_marks: Marks
    directives: DirectiveSet
    copies: tuple[Copy, ...]
    kept_marks: Marks
    marks: Marks

    @property
    def mode(self) -> Mode:
        return self.directives.mode

    @property
    def first_edit(self) -> int:
        """Where prompt and base part."""
        return self.directives[0].start if self.directives else len(self.base)

    @property
    def depth(self) -> int:
        """The longest chain of rotations that a key of the prompt goes through."""
        return max((depth for _, _, depth in self.marks), default=0)

    def prefills(self) -> list[tuple[int, int]]:
        """What has to be prefilled before each copy, as (number of directives in front, length of the prompt up to it).

        That is a replacement, several that touch, or the tokens up to a page boundary.
        """
        needed: list[tuple[int, int]] = []
        number, reached = 0, self.first_edit
        for copy in self.copies:
            if copy.run.new_start > reached:
                needed.append((number, copy.run.new_start))
            number, reached = copy.directive + 1, copy.run.new_end
        return needed


def make_plan(
    request: SpliceRequest, prompt: Sequence[int], *, page_size: int = 1, partial: bool = False
) -> SplicePlan:
    """Check `request` against the prompt and work out what to copy where.

    The cache files whole pages, so each copy begins and ends at a page boundary of the prompt, and nothing of it comes
    from a page of the base that an edit begins in. What lies between copies is prefilled. So is the last token of the
    base: sampled, it has no KV yet.

    `partial` is for prefills ahead of a turn, whose prompt ends inside the edited base: the base is then rebuilt as far
    as it goes and its hash is not compared. Raises Refusal with a typed reason for whatever does not fit.
    """
    if request.v != VERSION:
        raise Refusal(FallbackReason.UNSUPPORTED_VERSION, f"protocol version {request.v}; this server speaks {VERSION}")
    ids = array("q", prompt)
    base_marks = check_marks(request.marks, request.base_len if request.directives else len(ids))
    if not request.directives:
        kept = _kept(base_marks, request.base_len, page_size) if request.base_len else base_marks
        return SplicePlan(ids, ids, base_marks, DirectiveSet(), (), kept, kept)
    directives = _directives(request)
    removed = [array("q", wire.removed) for wire in request.directives]
    base = _rebuild_base(ids, request, directives, removed, partial=partial)
    edit = _Edit(base, len(base) if partial else len(base) - 1, directives, len(ids), page_size)
    copies = tuple(edit.copies(reuse=request.reuse_replacements and page_size == 1))
    kept = marks = _kept(base_marks, directives[0].start, page_size)
    for copy in copies:
        done = slice(copy.directive + 1)
        seen = before(base_marks, copy.run.start + 1)
        tag = make_tag(seen, copy.run, DirectiveSet(directives[done]), removed[done])
        marks = (*before(marks, copy.run.new_start), *carry(base_marks, copy.run, tag))
    return SplicePlan(ids, base, base_marks, directives, copies, kept, marks)


def _kept(marks: Marks, new_from: int, page_size: int) -> Marks:
    """The marks of a base in front of `new_from`, where other tokens follow; a page that holds both is prefilled."""
    return prefilled_from(marks, _whole_pages(new_from, page_size))


def _whole_pages(length: int, page_size: int) -> int:
    return length - length % page_size


def _directives(request: SpliceRequest) -> DirectiveSet:
    for wire in request.directives:
        if wire.end < wire.start or len(wire.removed) != wire.end - wire.start:
            raise Refusal(
                FallbackReason.MALFORMED,
                f"directive [{wire.start}, {wire.end}) comes with {len(wire.removed)} removed tokens",
            )
        if wire.end > request.base_len:
            raise Refusal(
                FallbackReason.SPAN_OUTSIDE_BASE,
                f"span [{wire.start}, {wire.end}) reaches beyond the base of {request.base_len} tokens",
            )
        _check_ids(wire)
    try:
        made = [wire.to_directive() for wire in request.directives]
    except DirectiveError as err:
        raise Refusal(FallbackReason.MALFORMED, str(err)) from err
    try:
        return DirectiveSet(tuple(made))
    except DirectiveError as err:
        raise Refusal(FallbackReason.OVERLAPPING, str(err)) from err


def _check_ids(wire: WireDirective) -> None:
    if any(not 0 <= token < 1 << 32 for token in (*wire.removed, *wire.replacement)):
        raise Refusal(
            FallbackReason.MALFORMED, f"directive [{wire.start}, {wire.end}) holds a number that is not a token id"
        )


def _rebuild_base(
    prompt: array[int],
    request: SpliceRequest,
    directives: DirectiveSet,
    removed: Sequence[array[int]],
    *,
    partial: bool,
) -> array[int]:
    """The base, from the prompt with each replacement checked and swapped for what it replaced.

    Raises Refusal(REPLACEMENT_MISMATCH) where the prompt holds something else than the replacement, and
    Refusal(BASE_MISMATCH) where the result is not the base that the client named.
    """
    base = array("q")
    position = 0  # in the prompt
    for directive, gone in zip(directives, removed, strict=True):
        kept_len = directive.start - len(base)
        base.extend(prompt[position : position + kept_len])
        position += kept_len
        found = prompt[position : position + len(directive.replacement)]
        if found != array("q", directive.replacement[: len(found)]) or (
            not partial and len(found) < len(directive.replacement)
        ):
            raise Refusal(
                FallbackReason.REPLACEMENT_MISMATCH,
                f"the prompt does not hold the replacement of [{directive.start}, {directive.end}) at {position}",
            )
        base.extend(gone)
        position += len(directive.replacement)
    base.extend(prompt[position : position + request.base_len - len(base)])
    if not partial and (len(base) != request.base_len or hash_tokens(base) != request.base_hash):
        raise Refusal(
            FallbackReason.BASE_MISMATCH,
            f"the prompt and the removed tokens give a base of {len(base)} tokens whose hash is not the one sent",
        )
    return base


@dataclass(frozen=True, slots=True)
class _Edit:
    """What the copies of a checked request follow from. Of the base, `held_len` tokens may have KV."""

    base: array[int]
    held_len: int
    directives: DirectiveSet
    prompt_len: int
    page_size: int

    def copies(self, *, reuse: bool) -> Iterator[Copy]:
        """The run behind each directive, and with `reuse` the replacements that the base holds elsewhere, in order.

        A run that the prompt cuts short is cut too.
        """
        shift = 0
        for number, directive in enumerate(self.directives):
            new_start = directive.start + shift
            shift += directive.delta
            reusable = reuse and directive.replacement and directive.start <= self.held_len
            found = self._find(directive.replacement, directive.start) if reusable else -1
            if found >= 0 and new_start + len(directive.replacement) <= self.prompt_len:
                run = KeptRun(found, found + len(directive.replacement), new_start - found)
                yield Copy(run, number, is_replacement=True)
            start = directive.end + -(directive.end + shift) % self.page_size
            end = self.directives[number + 1].start if number + 1 < len(self.directives) else self.held_len
            end = _whole_pages(min(end, self.held_len, self.prompt_len - shift), self.page_size)
            end -= (end + shift) % self.page_size
            if end > start:  # otherwise spans touch, or nearly so
                yield Copy(KeptRun(start, end, shift), number)

    def _find(self, tokens: Sequence[int], end: int) -> int:
        """The last place in front of `end` where the base holds exactly `tokens`, -1 if there is none."""
        needle, haystack = array("q", tokens).tobytes(), self.base[:end].tobytes()
        at = haystack.rfind(needle)
        while at > 0 and at % 8:
            at = haystack.rfind(needle, 0, at + len(needle) - 1)
        return at // 8 if at >= 0 else -1


def forgotten(directives: DirectiveSet) -> tuple[int, int]:
    """The first span of the set that is to be forgotten, in base coordinates."""
    first = next(directive for directive in directives if directive.mode is Mode.FORGET)
    return first.start, first.end
