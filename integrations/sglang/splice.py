"""The splice: kept runs of the base are moved to their new positions and filed under the edited prompt.

By copy-on-write, to new slots: the base stays as it is for whoever else uses it, and ages out of the cache by itself.
Or in place, where nobody else uses the downstream: its slots leave the base and are filed anew.

    base      [ prefix | removed | run 0        | removed | run 1     ]      KV in the tree
    prompt    [ prefix | R0 | run 0        | R1 | run 1     | new tokens ]
                       ^    ^ have                          ^ end
    R0 was prefilled ahead of the turn (or is empty); slots for [have, end) are filled in one launch over all layers and
    inserted in one call, so a set of runs is in the cache whole or not at all.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import evict_from_tree_cache

from leyline_agent.report import FallbackReason

from .marks import tagged
from .plan import Copy, SplicePlan
from .refusal import Refusal
from .settings import SplicePlace
from .tree import Namespace, downstream_path, make_key, match, steal_leaf

if TYPE_CHECKING:
    from leyline_agent.kernels.pool import PoolRotator

    from .cache import LeylineRadixCache


@dataclass(frozen=True, slots=True)
class Spliced:
    """Copies stand in the prompt up to token `reached`; `rotated` were made now, by directive (the index)."""

    reached: int
    rotated: Mapping[int, int]


def splice(cache: LeylineRadixCache, rotator: PoolRotator, plan: SplicePlan, namespace: Namespace) -> Spliced:
    """Bring the plan's copies into the cache, or what is missing of them after an earlier try.

    Modifies the cache: it evicts what is needed for room, or takes the base's own slots, and inserts the moved KV. On
    any error before the insert no slot is lost.
    Raises Refusal if the base or a replacement is not cached, nothing lies downstream, or there is no room.
    """
    if not plan.copies:
        raise Refusal(FallbackReason.NOTHING_DOWNSTREAM, "no cached token lies behind the edits")
    target_key = tagged(plan.prompt[: plan.copies[-1].run.new_end], plan.marks)
    source_key = tagged(plan.base, plan.base_marks)

    have, target_node = match(cache, target_key, namespace)
    with cache.held(target_node):
        cached_base_len, source_node = match(cache, source_key, namespace)
        pending = _pending(plan, have, cached_base_len, cache.page_size)
        if not pending:
            return Spliced(have, {})
        prefix = cache.path_device_indices(target_node)
        slots = _move_in_place(cache, rotator, source_key, namespace, cached_base_len, pending)
        if slots is None:
            slots = _copy(cache, rotator, source_node, pending)
        with _freed_on_error(cache, slots):
            key = make_key(target_key[: have + len(slots)], namespace)
            filed = InsertParams(key=key, value=torch.cat((prefix, slots)).to(torch.int64), prev_prefix_len=have)
        cache.insert(filed)
    rotated: dict[int, int] = {}
    for copy, piece in pending:
        rotated[copy.directive] = rotated.get(copy.directive, 0) + len(piece)
    return Spliced(have + len(slots), rotated)


def _copy(
    cache: LeylineRadixCache, rotator: PoolRotator, source_node: int, pending: list[tuple[Copy, range]]
) -> torch.Tensor:
    """Copy the pending pieces to new slots, which the caller owns, in one launch over all layers."""
    with cache.held(source_node):
        slots = _allocate(cache, sum(len(piece) for _, piece in pending))
        with _freed_on_error(cache, slots):
            source = cache.path_device_indices(source_node)
            cache.wait_for_forward()
            rotator.copy_rotate(
                torch.cat([source[piece.start : piece.stop] for _, piece in pending]).to(torch.int64),
                slots.to(torch.int64),
                torch.cat([_shifts(copy, piece, slots.device) for copy, piece in pending]),
            )
    return slots


def _move_in_place(
    cache: LeylineRadixCache,
    rotator: PoolRotator,
    source_key: array[int],
    namespace: Namespace,
    cached_base_len: int,
    pending: list[tuple[Copy, range]],
) -> torch.Tensor | None:
    """Take the downstream's own slots out of the tree and rotate their keys where they lie; None if that is not to be.

    It is not if settings or free memory speak for a copy, if pages are larger than a token, if more than one run is
    pending, or if anybody else uses the downstream. The slots are the caller's.
    """
    (copy, piece), *others = pending
    if (
        others
        or cache.page_size > 1
        or piece.stop != cached_base_len
        or not _prefers_in_place(cache, cached_base_len, len(piece))
    ):
        return None
    match(cache, source_key[: piece.start], namespace)  # makes a node boundary at the head of the run
    _, node = match(cache, source_key, namespace)
    path = downstream_path(cache, node, piece.start)
    if path is None:
        return None
    slots: torch.Tensor = cache.path_device_indices(node)[piece.start : piece.stop].to(torch.int64)
    for info in reversed(path):
        steal_leaf(cache, info.node_id)
    with _freed_on_error(cache, slots):
        cache.wait_for_forward()
        rotator.rotate_inplace(slots, _shifts(copy, piece, slots.device))
    return slots


def _prefers_in_place(cache: LeylineRadixCache, base_len: int, num_slots: int) -> bool:
    if cache.enable_session_radix_cache:  # SGLang's sessions refer to nodes, which would lose their slots
        return False
    place = cache.settings.splice_place
    if place is SplicePlace.AUTO:  # the base cannot make room for its own copy
        room = cache.token_to_kv_pool_allocator.available_size() + cache.full_evictable_size() - base_len
        return bool(room < num_slots)
    return place is SplicePlace.IN_PLACE


def _pending(plan: SplicePlan, have: int, cached_base_len: int, page_size: int) -> list[tuple[Copy, range]]:
    """Base tokens still to copy, as (copy, range of base positions): contiguous in the prompt from `have` on.

    A copy that is cached already, or in part, is skipped as far as it is. The last may end early, where the cached base
    does: the request prefills the rest.
    """
    last = plan.copies[-1]
    pending: list[tuple[Copy, range]] = []
    reached = have
    for copy in plan.copies:
        run = copy.run
        if run.new_end <= have:
            continue
        start = max(reached, run.new_start) - run.shift
        end = min(run.end, cached_base_len)
        end -= (end + run.shift) % page_size  # only whole pages are filed
        if end <= start and (copy is not last or have <= run.new_start):
            raise Refusal(
                FallbackReason.BASE_NOT_CACHED,
                f"the base is cached up to {cached_base_len} of {len(plan.base)} tokens; "
                f"the run of directive {copy.directive} begins at {run.start}",
            )
        if reached < run.new_start:
            raise Refusal(
                FallbackReason.REPLACEMENT_NOT_CACHED,
                f"the prompt is cached up to {reached}, but the run of directive {copy.directive} begins at "
                f"{run.new_start}; its replacement has to be prefilled first",
            )
        if end > start:
            pending.append((copy, range(start, end)))
            reached = end + run.shift
    return pending


@contextmanager
def _freed_on_error(cache: LeylineRadixCache, slots: torch.Tensor) -> Iterator[None]:
    """The slots are nobody's but ours so far: whatever goes wrong, they go back to the allocator."""
    try:
        yield
    except BaseException:
        cache.token_to_kv_pool_allocator.free(slots)
        raise


def _allocate(cache: LeylineRadixCache, num_slots: int) -> torch.Tensor:
    evict_from_tree_cache(cache, num_slots)
    slots: torch.Tensor | None = cache.token_to_kv_pool_allocator.alloc(num_slots)
    if slots is None:
        free = cache.token_to_kv_pool_allocator.available_size()
        raise Refusal(FallbackReason.NO_ROOM, f"{num_slots} slots needed, {free} free and nothing left to evict")
    return slots


def _shifts(copy: Copy, piece: range, device: torch.device) -> torch.Tensor:
    return torch.full((len(piece),), copy.run.shift, dtype=torch.int32, device=device)
