"""What Leyline adds to SGLang's scheduler process, in each rank."""

from __future__ import annotations

import logging
from array import array
from dataclasses import asdict
from typing import Any

import torch.distributed
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_parallel

from leyline_agent.errors import ConfigError, UnsupportedError
from leyline_agent.kernels.pool import PoolRotator
from leyline_agent.report import FallbackReason
from leyline_agent.wire import KEY

from .cache import LeylineRadixCache
from .forget import drop_path
from .internal import read_note
from .pool_layers import pool_layers
from .probe import PROBE_LEN, PROBE_SALT, PROBE_TOKEN, ProbeResult, check_probe, warm_up
from .refusal import Refusal
from .request_state import RequestState, state_of
from .supported import amortize_off, refuse_server, unsupported_request
from .tree import Namespace, match

logger = logging.getLogger(__name__)


# ---- the backend --------------------------------------------------------------------------------------------------


def build_cache(ctx: Any) -> Any:
    """Factory of the radix backend `leyline`: the unified cache, and a rotator if this model's keys can be moved.

    Raises UnsupportedError for settings under which the server must not start.
    """
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    refuse_server(resolved_view(ctx.server_args))
    cache = create_unified_radix_cache(ctx, cache_class=LeylineRadixCache)
    runner = ctx.tp_worker.model_runner
    cache.leyline = BackendState(cache, ctx, runner)
    return cache


class BackendState:
    """Whether AMORTIZE is on, and the facts behind it. One a rank."""

    def __init__(self, cache: LeylineRadixCache, ctx: Any, runner: Any) -> None:
        self.cache = cache
        self.rotator: PoolRotator | None = None
        self.probe: ProbeResult | None = None
        self.tp_group = ctx.params.tp_cache_group
        settings = resolved_view(ctx.server_args)
        self.reason = amortize_off(settings, hybrid=ctx.is_hybrid_swa or ctx.is_hybrid_ssm)
        if not self.reason:
            try:
                pool = cache.token_to_kv_pool_allocator.get_kvcache()
                self.rotator = PoolRotator(
                    pool_layers(runner, pool), form=cache.settings.kernel, allow_fp8=cache.settings.allow_fp8
                )
            except (ConfigError, UnsupportedError) as err:
                self.reason = str(err)
        if self.reason:
            cache.disabled_reason = self.reason
            logger.warning("leyline: AMORTIZE is off: %s", self.reason)
        parallel = get_parallel()
        if parallel.num_dp_ranks > 1:
            cache.dp_rank = parallel.dp_rank
        if str(runner.device) != "cpu":
            cache.forward_stream = runner.forward_stream

    def run_probe(self) -> None:
        """Judge the probe prompt if it is in the cache, and switch AMORTIZE on or off. The prompt is dropped then."""
        if self.rotator is None or self.probe is not None:
            return
        namespace = Namespace(cache_salt=PROBE_SALT)
        cached_len, node = match(self.cache, array("q", [PROBE_TOKEN]) * PROBE_LEN, namespace)
        if cached_len < PROBE_LEN - 1:
            return
        slots = self.cache.path_device_indices(node).long()
        self.probe = check_probe(self.rotator, slots)
        if not self.probe.passed:
            self.reason = f"the start-up probe failed: {self.probe.detail}"
        if not _on_all_ranks(self.probe.passed, self.tp_group):  # they splice alike or not at all
            self.reason = self.reason or "the start-up probe failed on another rank"
        else:
            warm_up(self.rotator, slots, self.cache.token_to_kv_pool_allocator)
            self.cache.rotator = self.rotator
        self.cache.disabled_reason = self.reason
        drop_path(self.cache, node, 0)

    def status(self) -> dict[str, Any]:
        pool = self.cache.pool_count()
        rotator = self.rotator
        ropes = {id(layer.rope): layer.rope for layer in rotator.layers if layer.rope} if rotator else {}
        return {
            "amortize": self.cache.rotator is not None,
            "reason": self.cache.disabled_reason if self.cache.rotator is None else "",
            "tree_core": type(self.cache.tree_core).__name__,
            "kernel": {"form": rotator.form, "reason": rotator.form_reason} if rotator else None,
            "rope": [
                {
                    "kind": rope.kind,
                    "rotary_dim": rope.rotary_dim,
                    "interleaved": rope.interleaved,
                    "scale": float(rope.scale),
                }
                for rope in ropes.values()
            ],
            "probe": asdict(self.probe) if self.probe else None,
            "pool": {"total": pool.total, "free": pool.free, "cached": pool.cached, "in_use": pool.in_use},
            "page_size": self.cache.page_size,
            "settings": asdict(self.cache.settings),
        }


def _on_all_ranks(value: bool, group: Any) -> bool:
    """Whether `value` is True on each rank of the process group; every rank has to ask."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return value
    flag = torch.tensor(int(value))
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
    return bool(flag)


# ---- hooks ----------------------------------------------------------------------------------------------------------


def create_req(original: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler._create_generation_req`: give the request its Leyline state."""
    req = original(scheduler, recv_req, *args, **kwargs)
    params = getattr(recv_req.sampling_params, "custom_params", None)
    if isinstance(params, dict) and KEY in params and isinstance(scheduler.tree_cache, LeylineRadixCache):
        prompt = array("q", recv_req.input_ids)
        state = RequestState.from_wire(params[KEY], read_note(params), prompt, scheduler.tree_cache.page_size)
        problem = unsupported_request(recv_req)
        if problem and not state.forgets:
            state.refuse(Refusal(FallbackReason.REQUEST_UNSUPPORTED, problem))
        req.leyline = state
    return req


def admit(original: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Req.init_next_round_input`: the match inside it is the one that runs the request, so splice there.

    Scheduling policies also match requests that merely wait; those must not take memory for a splice yet.
    """
    state = state_of(req)
    if state is None:
        return original(req, *args, **kwargs)
    state.admitting = True
    try:
        return original(req, *args, **kwargs)
    finally:
        state.admitting = False


def streamer_class(result: Any, scheduler: Any) -> Any:
    """After `Scheduler.get_output_streamer_class`: our report belongs to the request, not to its tokens."""

    class LeylineOutputStreamer(result):  # type: ignore[misc]
        __slots__ = ()

        def is_request_level_customized_info_key(self, key: str) -> bool:
            return key == KEY or bool(result.is_request_level_customized_info_key(self, key))

    return LeylineOutputStreamer


def internal_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
    """After `Scheduler.get_internal_state`: add this rank's Leyline status, and judge the probe if it is due."""
    backend = getattr(scheduler.tree_cache, "leyline", None)
    if isinstance(backend, BackendState):
        backend.run_probe()
        result.internal_state[KEY] = backend.status()
    return result
