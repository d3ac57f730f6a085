"""Entry point of the SGLang plugin: what is hooked where, checked before anything is changed.

This is the list of SGLang's inner parts that Leyline relies on, for the versions in `SUPPORTED`. SGLang only logs a
plugin that fails, so the launcher and `GET /leyline/status` tell whether this one is at work.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

from leyline_agent.errors import UnsupportedError

BACKEND = "leyline"
SUPPORTED = ("0.5.23",)
"""SGLang versions whose inner parts were checked against this file."""
ANY_VERSION_ENV = "LEYLINE_ALLOW_SGLANG_VERSION"


@dataclass(frozen=True, slots=True)
class Hook:
    """One of SGLang's functions and what we put around, before or after it (names in this package)."""

    target: str
    kind: str  # a member of SGLang's HookType
    ours: str


SCHEDULER_HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler._create_generation_req", "AROUND", "scheduler:create_req"),
    Hook("sglang.srt.managers.schedule_batch.Req.init_next_round_input", "AROUND", "scheduler:admit"),
    Hook("sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class", "AFTER", "scheduler:streamer_class"),
    Hook("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "AFTER", "scheduler:internal_state"),
)
SERVER_HOOKS = (
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", "AROUND", "requests:generate"),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "AROUND",
        "rendering:chat_request",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
        "AFTER",
        "http:chat_response",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        "AROUND",
        "http:chat_stream",
    ),
    Hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", "BEFORE", "http:add_routes"),
)
CACHE_METHODS = (
    "match_prefix",
    "checkpoint_into_tree",
    "insert",
    "lock",
    "unlock",
    "inc_lock_ref",
    "dec_lock_ref",
    "path_device_indices",
    "full_evictable_size",
    "full_protected_size",
    "_apply_eviction_result",
)
"""Methods of UnifiedRadixCache that the backend overrides or calls."""


def register() -> None:
    """Register the backend `leyline` and the hooks of this process. Called by SGLang in each of its processes.

    Raises UnsupportedError, before anything is registered, if SGLang is not one that this file was written for.
    """
    check_version(version("sglang"))
    hooks = SERVER_HOOKS if multiprocessing.parent_process() is None else SCHEDULER_HOOKS
    for hook in hooks:
        _require(hook.target)
    for method in CACHE_METHODS:
        _require(f"sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.{method}")

    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_radix_cache_backend(BACKEND, _build_cache)
    for hook in hooks:
        HookRegistry.register(hook.target, _ours(hook.ours), HookType[hook.kind])


def check_version(sglang_version: str) -> None:
    """Raise UnsupportedError for a SGLang that was not checked, unless the environment says to go on."""
    if sglang_version not in SUPPORTED and not os.environ.get(ANY_VERSION_ENV):
        raise UnsupportedError(
            f"SGLang {sglang_version} is installed; Leyline works inside {', '.join(SUPPORTED)}. "
            f"Install that, or set {ANY_VERSION_ENV}=1 to try anyway"
        )


def _require(name: str) -> None:
    try:
        resolve_name(name)
    except (ImportError, AttributeError) as err:
        raise UnsupportedError(f"SGLang {version('sglang')} has no {name}, which Leyline relies on") from err


def _ours(name: str) -> Any:
    module, function = name.split(":")
    return getattr(import_module(f"{__package__}.{module}"), function)


def _build_cache(ctx: Any) -> Any:
    from .scheduler import build_cache

    return build_cache(ctx)
