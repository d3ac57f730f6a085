"""FORGET: every branch that holds the forgotten span leaves the cache."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from .lineage import Held, Sequence
from .plan import SplicePlan
from .tree import Namespace, drop_leaf, is_locked, match

if TYPE_CHECKING:
    from .cache import LeylineRadixCache


def forget(cache: LeylineRadixCache, plan: SplicePlan, namespace: Namespace) -> list[Held]:
    """Drop all KV made under the spans that `plan` forgets, whichever sequence holds it.

    Modifies the cache. Returns the sequences of which a running request still holds some: `bury` drops them when it
    is released.
    """
    holders = cache.lineage.holders(plan, namespace)
    for held in holders:
        drop_sequence(cache, held.sequence.key, held.start, namespace)
    return [held for held in holders if is_cached(cache, held)]


def bury(cache: LeylineRadixCache, left: list[Held], published: Sequence) -> list[Held]:
    """Drop what a released request published of forgotten spans; returns what other requests still hold."""
    for held in left:
        if held.sequence.namespace == published.namespace and published.key[: held.end] == held.head:
            drop_sequence(cache, published.key, held.start, published.namespace)
    return [held for held in left if is_cached(cache, held)]


def is_cached(cache: LeylineRadixCache, held: Held) -> bool:
    """Whether any token of the forgotten span is still in the cache."""
    return match(cache, held.head, held.sequence.namespace)[0] > held.start


def drop_sequence(cache: LeylineRadixCache, key: array[int], start: int, namespace: Namespace) -> int:
    """Drop what is cached of `key` from position `start` on; returns the number of tokens dropped."""
    match(cache, key[:start], namespace)  # makes a node boundary there
    cached_len, node = match(cache, key, namespace)
    return drop_path(cache, node, start) if cached_len > start else 0


def drop_path(cache: LeylineRadixCache, node: int, start: int) -> int:
    """Drop the path to `node` from position `start` on, where a node begins; returns the number of tokens dropped.

    Modifies the cache, leaf by leaf: what a running request holds, or what other sequences continue, stays, and so
    does everything in front of it.
    """
    dropped = 0
    (path,) = cache.tree_core.collect_path_info([node])
    for info in reversed(path):
        # An inner node becomes a leaf once its only child is gone; the counts in `path` are from before.
        children = info.num_children - (1 if dropped else 0)
        if info.path_start < start or children or is_locked(cache, info.node_id):
            break
        drop_leaf(cache, info.node_id)
        dropped += info.path_end - info.path_start
    return dropped
