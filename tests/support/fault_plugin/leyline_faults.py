"""A plugin of SGLang: steps of a Leyline turn fail, or wait, while a file of the fault's name lies in a folder.

tests/support/faults.py puts it into a server and lays the files. What a fault hit is told by a file `NAME.hit`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from array import array
from pathlib import Path

FOLDER = Path(os.environ["LEYLINE_FAULTS"])
POLL_S = 0.005

_splicing = threading.Event()
_copied = threading.Event()


class InjectedError(Exception):
    pass


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = SERVER_HOOKS if multiprocessing.parent_process() is None else SCHEDULER_HOOKS
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def strikes(name):
    """Whether the fault `name` is on; it has then hit."""
    if not (FOLDER / name).exists():
        return False
    (FOLDER / f"{name}.hit").touch()
    return True


def fail(name):
    if strikes(name):
        raise InjectedError(name)


# --- in the scheduler ------------------------------------------------------------------------------------------------


def copy_rotate(original, *args, **kwargs):
    fail("kernel")
    while strikes("hold_splice"):  # the whole scheduler waits, as it would for a slow kernel
        time.sleep(POLL_S)
    original(*args, **kwargs)
    fail("kernel_late")
    _copied.set()


def rotate_inplace(original, *args, **kwargs):
    original(*args, **kwargs)
    fail("kernel_in_place")


def splice(original, cache, rotator, plan, namespace):
    if strikes("evict_replacement"):
        from leyline_agent.integrations.sglang.forget import drop_sequence
        from leyline_agent.integrations.sglang.marks import tagged

        front = array("q", plan.prompt[: plan.copies[0].run.new_start])
        drop_sequence(cache, tagged(front, plan.marks), plan.first_edit, namespace)
    if strikes("evict_everything"):
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        cache.evict(EvictParams(num_tokens=cache.full_evictable_size()))
    _splicing.set()
    try:
        return original(cache, rotator, plan, namespace)
    finally:
        _splicing.clear()
        _copied.clear()


def make_key(original, *args, **kwargs):
    if _copied.is_set():  # the copies are about to be filed in the tree
        fail("filing")
    return original(*args, **kwargs)


def alloc(original, *args, **kwargs):
    if _splicing.is_set() and strikes("no_slots"):
        return None
    if _splicing.is_set():
        fail("allocator")
    return original(*args, **kwargs)


def poll_timeout_aborts(original, *args, **kwargs):
    """SGLang's own timeouts, read from the environment each time: any wait, or any run, has been too long."""
    for name in ("WAITING", "RUNNING"):
        timeout_s = "0.000001" if strikes(f"timeout_{name.lower()}") else "-1"
        os.environ[f"SGLANG_REQ_{name}_TIMEOUT"] = timeout_s
    return original(*args, **kwargs)


SCHEDULER_HOOKS = {
    "leyline_agent.kernels.pool.PoolRotator.copy_rotate": copy_rotate,
    "leyline_agent.kernels.pool.PoolRotator.rotate_inplace": rotate_inplace,
    "leyline_agent.integrations.sglang.cache.splice": splice,
    "leyline_agent.integrations.sglang.splice.make_key": make_key,
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.alloc": alloc,
    "sglang.srt.managers.scheduler.Scheduler._poll_timeout_aborts": poll_timeout_aborts,
}


# --- in the process that takes requests ------------------------------------------------------------------------------


async def run_helpers(original, *args, **kwargs):
    note = await original(*args, **kwargs)
    while strikes("hold_turn"):
        await asyncio.sleep(POLL_S)
    return note


async def run_helper(original, *args, **kwargs):
    fail("helper")
    return await original(*args, **kwargs)


SERVER_HOOKS = {
    "leyline_agent.integrations.sglang.requests._run_helpers": run_helpers,
    "leyline_agent.integrations.sglang.requests._run_helper": run_helper,
}
