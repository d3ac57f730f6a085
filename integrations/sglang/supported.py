"""Which server configurations Leyline works in, and what it says of the others.

`refuse_server` holds what would make the backend wrong even for ordinary requests, or silently useless: the server does
not start. `amortize_off` holds what only rules out moving keys: the server starts, FORGET works, AMORTIZE is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leyline_agent.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting that is refused when `applies` to SGLang's ServerArgs."""

    setting: str
    applies: Callable[[Any], bool]
    why: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, 1) or 1) > 1


SERVER_RULES = (
    Rule("--disable-radix-cache", _is_set("disable_radix_cache"), "there is no cache to splice"),
    Rule("--enable-hierarchical-cache", _is_set("enable_hierarchical_cache"), "host copies are filed without marks"),
    Rule("--enable-lmcache", _is_set("enable_lmcache"), "its copies are filed without marks"),
    Rule("--enable-flexkv", _is_set("enable_flexkv"), "its copies are filed without marks"),
    Rule(
        "--enable-unified-cache-external-linker",
        _is_set("enable_unified_cache_external_linker"),
        "remote copies are filed without marks",
    ),
    Rule(
        "--disaggregation-mode",
        lambda args: getattr(args, "disaggregation_mode", "null") not in (None, "null"),
        "KV in transfer cannot be spliced",
    ),
    Rule("--enable-pdmux", _is_set("enable_pdmux"), "its scheduler loop has no point where a splice is safe"),
    Rule("--tokenizer-worker-num > 1", _above_one("tokenizer_worker_num"), "plugins are not loaded in its workers"),
    Rule("--pp-size > 1", _above_one("pp_size"), "each stage holds only some of the layers"),
    Rule("--dllm-algorithm", _is_set("dllm_algorithm"), "diffusion models do not fill the cache left to right"),
    Rule("--kv-canary", lambda args: getattr(args, "kv_canary", "none") not in (None, "none"), "it forbids copies"),
)

AMORTIZE_RULES = (
    Rule(
        "--speculative-algorithm",
        lambda args: getattr(args, "speculative_algorithm", None) not in (None, "NGRAM"),
        "the draft model's KV is not moved along",
    ),
    Rule("--dcp-size > 1", _above_one("dcp_size"), "KV is sharded over ranks"),
    Rule("--attn-cp-size > 1", _above_one("attn_cp_size"), "KV is sharded over ranks"),
    Rule("--enable-streaming-session", _is_set("enable_streaming_session"), "its KV stays outside of the tree"),
    Rule(
        "--schedule-policy dfs-weight",
        lambda args: getattr(args, "schedule_policy", "") == "dfs-weight",
        "it keeps tree nodes over calls that a splice may change",
    ),
)


def refuse_server(args: Any) -> None:
    """Raise UnsupportedError, naming every setting that has to go, if the server must not start."""
    broken = [f"{rule.setting}: {rule.why}" for rule in SERVER_RULES if rule.applies(args)]
    if broken:
        raise UnsupportedError("leyline does not work with " + "; ".join(broken))


def amortize_off(args: Any, *, hybrid: bool) -> str:
    """Why AMORTIZE has to be off under these settings, in one sentence, or ""."""
    off = [f"{rule.setting}: {rule.why}" for rule in AMORTIZE_RULES if rule.applies(args)]
    if hybrid:
        off.append("sliding-window and state-space layers keep state that cannot be moved")
    return "; ".join(off)
