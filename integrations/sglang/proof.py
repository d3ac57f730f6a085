"""The start-up proof as seen from the process that takes requests: when it is run, and what came of it on each rank."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from sglang.srt.managers.io_struct import GenerateReqInput

from leyline_agent.wire import KEY

from .probe import PROBE_LEN, PROBE_SALT, PROBE_TOKEN

RankStatuses = list[dict[str, Any] | None]
"""Each scheduler's own status, None for one that runs without the backend."""

_proved: WeakKeyDictionary[Any, asyncio.Task[RankStatuses]] = WeakKeyDictionary()


async def rank_statuses(manager: Any) -> RankStatuses:
    """The status as it is now, after the proof. Schedulers answer between two batches."""
    await ensure_proved(manager)
    return await _states(manager)


async def ensure_proved(manager: Any) -> RankStatuses:
    """Run the proof on every data-parallel worker, once a server, however many requests wait for it.

    It costs one short prefill and is run by the first that asks: a Leyline request, or `GET /leyline/ready`. Returns
    the status right after it, from memory from then on.
    """
    task = _proved.get(manager)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = asyncio.get_running_loop().create_task(_prove(manager))
        _proved[manager] = task
    return await asyncio.shield(task)


async def _prove(manager: Any) -> RankStatuses:
    states = await _states(manager)
    ranks = [None] if len(states) == 1 else range(len(states))
    await asyncio.gather(
        *(_prefill_probe(manager, rank) for rank, state in zip(ranks, states, strict=True) if state and state["rope"])
    )
    return await _states(manager)  # each scheduler judges the probe when it is asked for its state


async def _states(manager: Any) -> RankStatuses:
    return [state.get(KEY) for state in await manager.get_internal_state()]


async def _prefill_probe(manager: Any, dp_rank: int | None) -> None:
    probe = GenerateReqInput(
        input_ids=[PROBE_TOKEN] * PROBE_LEN,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        cache_salt=PROBE_SALT,
        routed_dp_rank=dp_rank,
    )
    async for _ in manager.generate_request(probe):
        pass
