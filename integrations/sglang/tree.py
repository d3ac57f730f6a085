"""The few questions Leyline asks of SGLang's radix tree, on either tree core."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


@dataclass(frozen=True, slots=True)
class Namespace:
    """What beside token ids tells KV apart: LoRA and tenant (`extra_key`), salt. Edits never cross it."""

    extra_key: str | None = None
    cache_salt: str | None = None


def make_key(token_ids: array[int], namespace: Namespace) -> RadixKey:
    """The radix key of `token_ids`, tags included, in a namespace."""
    return RadixKey(token_ids, namespace.extra_key, cache_salt=namespace.cache_salt)


def match(cache: UnifiedRadixCache, token_ids: array[int], namespace: Namespace) -> tuple[int, int]:
    """(tokens cached from the start, node where they end), with a node boundary made exactly there.

    Modifies the tree (nodes split, recency), not what it holds. Valid until the next call that modifies the tree.
    """
    result = cache.match_prefix(MatchPrefixParams(key=make_key(token_ids, namespace)))
    return result.device_prefix_len, result.last_device_node


def is_locked(cache: UnifiedRadixCache, node: int) -> bool:
    """Whether a running request holds the node.

    Locks reach from a node to the root, so taking one more on `node` covers new tokens exactly if it had none.
    """
    receipt = cache.inc_lock_ref(node)
    cache.dec_lock_ref(node, receipt.to_dec_params())
    return not receipt.delta


def downstream_path(cache: UnifiedRadixCache, node: int, start: int) -> list[Any] | None:
    """The nodes from position `start`, where one begins, down to `node`; None if anybody else uses them.

    Others are running requests that hold the first of them, and sequences that branch off any of them or go on behind
    the last. Modifies nothing. Each entry has node_id, path_start, path_end and num_children.
    """
    (path,) = cache.tree_core.collect_path_info([node])
    nodes = [info for info in path if info.path_start >= start]
    children = [info.num_children for info in nodes]
    if not nodes or nodes[0].path_start != start or children != [1] * (len(nodes) - 1) + [0]:
        return None
    return None if is_locked(cache, nodes[0].node_id) else nodes


def drop_leaf(cache: UnifiedRadixCache, node: int) -> None:
    """Take an unlocked leaf out of the tree and free its slots. The tree core panics if it is no such leaf."""
    cache._apply_eviction_result(cache.tree_core.evict_device_leaf(node, cache.is_write_back))


def steal_leaf(cache: UnifiedRadixCache, node: int) -> None:
    """Take an unlocked leaf out of the tree but keep its slots allocated: they are the caller's now."""
    result = cache.tree_core.evict_device_leaf(node, cache.is_write_back)
    result.device_frees.clear()
    cache._apply_eviction_result(result)
