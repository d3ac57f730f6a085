"""The radix backend `leyline`: SGLang's unified radix cache with amortized KV filed apart, and a splice.

An ordinary request takes exactly the stock path. A request with Leyline state has its radix keys tagged with its marks
(see `marks`), whoever builds them: `match_prefix` when it is admitted, `checkpoint_into_tree` when its KV is published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from leyline_agent.report import FallbackReason
from leyline_agent.wire import KEY

from .forget import bury, forget
from .lineage import Held, Lineage, Sequence
from .marks import Marks, prefilled_from, tagged
from .refusal import Refusal
from .request_state import RequestState, state_of
from .settings import ServerSettings
from .splice import splice
from .tree import Namespace

if TYPE_CHECKING:
    from leyline_agent.kernels.pool import PoolRotator

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PoolCount:
    """Slots of the KV pool. When nothing runs, `free + cached + in_use == total` with `in_use == 0`."""

    total: int
    free: int
    cached: int
    in_use: int


class LeylineRadixCache(UnifiedRadixCache):  # type: ignore[misc]  # SGLang ships no types
    """UnifiedRadixCache whose keys may carry marks, and which can splice. Both tree cores.

    `rotator` moves keys, None while AMORTIZE is disabled; `disabled_reason` then says why. `forward_stream` is the
    stream that forward passes run on, None on a CPU. `dp_rank` is None unless there are several workers.
    """

    rotator: PoolRotator | None = None
    disabled_reason: str = "the server has not proved its position encoding yet"
    forward_stream: Any = None
    dp_rank: int | None = None
    _publishing: RequestState | None = None

    def __init__(self, params: Any) -> None:
        self.settings = ServerSettings.from_env()
        self.lineage = Lineage(self.settings.lineage_tokens)
        self.unburied: list[Held] = []
        super().__init__(params)

    # ---- keys -------------------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Stock match under the request's marks. Modifies the cache if the request is being admitted with a splice.

        The result is valid until the next call that modifies the cache, as in SGLang. A splice that fails leaves the
        tree as it was and the request served by plain prefill; this method raises nothing of its own.
        """
        state = state_of(params.req) if params.req is not None else None
        if state is None:
            return super().match_prefix(params)
        if state.admitting:
            self._before_run(params.req, state)
        result = super().match_prefix(replace(params, key=_tagged_key(params.key, state.marks)))
        if not state.admitting:
            return result
        while (held := prefilled_from(state.marks, result.device_prefix_len)) != state.marks:
            # What was evicted is prefilled, so it must not be filed as moved; prefilled KV may reach further.
            state.marks = held
            result = super().match_prefix(replace(params, key=_tagged_key(params.key, held)))
        self._write_report(params.req, state, result.device_prefix_len)
        return result

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._publishing = state_of(req)
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._publishing = None

    def insert(self, params: InsertParams) -> InsertResult:
        if self._publishing is not None:
            params = replace(params, key=_tagged_key(params.key, self._publishing.marks))
        return super().insert(params)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        state = state_of(req)
        if state is None and not self.unburied:
            return
        marks = state.marks if state else ()
        key = tagged(req.origin_input_ids + req.output_ids, marks)
        published = Sequence(key, marks, Namespace(req.extra_key, req.cache_salt))
        if self.unburied:
            self.unburied = bury(self, self.unburied, published)
        if state is not None and checkpointed:
            self.lineage.record_served(published)

    def reset(self) -> None:
        super().reset()
        self.lineage.clear()
        self.unburied.clear()

    # ---- splice -----------------------------------------------------------------------------------------------------

    def _before_run(self, req: Any, state: RequestState) -> None:
        """Do what the request's directives ask of the cache, unless an earlier round did and it is still there."""
        if req.output_ids or state.plan is None:
            return
        namespace = Namespace(req.extra_key, req.cache_salt)
        if state.forgets:
            self.unburied.extend(forget(self, state.plan, namespace))
            return
        if not state.wants_splice:
            return
        started = time.perf_counter()
        if self.rotator is None:
            state.refuse(Refusal(FallbackReason.AMORTIZE_DISABLED, self.disabled_reason))
            return
        depth, limit = state.plan.depth, self.settings.max_splices
        if limit and depth > limit:
            detail = f"a key would have gone through {depth} rotations, {limit} are allowed; it is prefilled again"
            state.refuse(Refusal(FallbackReason.DRIFT_BUDGET, detail))
            return
        try:
            spliced = splice(self, self.rotator, state.plan, namespace)
        except Refusal as refusal:
            logger.info("leyline refused rid=%s reason=%s", req.rid, refusal.fallback.reason)
            state.refuse(refusal)
        except Exception as err:  # the turn must be answered; the cause goes to the log and, typed, to the client
            logger.exception("leyline splice failed rid=%s", req.rid)
            state.refuse(Refusal(FallbackReason.INTERNAL, type(err).__name__))
        else:
            state.record(spliced, time.perf_counter() - started)
            self.lineage.record_copy(state.plan, namespace)

    def _write_report(self, req: Any, state: RequestState, cached_len: int) -> None:
        kernel = self.rotator.form if self.rotator is not None else ""
        if not req.output_ids:
            state.report = state.make_report(len(req.origin_input_ids), cached_len, kernel, self.dp_rank)
        elif state.report is not None:  # it ran, lost its slots to others and runs again: only the marks may be others
            state.report = state.report.model_copy(update={"marks": state.marks})
        if state.report is not None:
            req.customized_info = {**(req.customized_info or {}), KEY: [state.report.to_wire()]}

    def wait_for_forward(self) -> None:
        """Order pool writes on the current stream behind forward passes in flight.

        With overlapped scheduling a finished request may still have one surplus decode step under way, which writes to
        a slot that the allocator has handed out again.
        """
        stream = self.forward_stream
        if stream is not None:
            torch.get_device_module(stream.device).current_stream().wait_stream(stream)

    # ---- accounting -------------------------------------------------------------------------------------------------

    def pool_count(self) -> PoolCount:
        """Slots by state, from the allocator and the tree's own counts. Modifies nothing."""
        allocator = self.token_to_kv_pool_allocator
        free, cached = allocator.available_size(), self.full_evictable_size()
        return PoolCount(allocator.size, free, cached, self.full_protected_size())

    @contextmanager
    def held(self, *nodes: int) -> Iterator[None]:
        """Keep the paths to `nodes` from eviction."""
        locks = [self.lock(node) for node in nodes]
        try:
            yield
        finally:
            for lock in locks:
                self.unlock(lock)


def _tagged_key(key: RadixKey, marks: Marks) -> RadixKey:
    token_ids = tagged(key.token_ids, marks)
    if token_ids is key.token_ids:
        return key
    return RadixKey(token_ids, key.extra_key, is_bigram=key.is_bigram, limit=key.limit, cache_salt=key.cache_salt)
