"""Which server configurations and requests Leyline works with, and what it says of the others.

`refuse_server` holds what would make the backend wrong even for ordinary requests, or silently useless: the server does
not start. `amortize_off` holds what only rules out moving keys: the server starts, FORGET works, AMORTIZE is off. A
pool whose layout is not known (`pool_layers`) and a position encoding that is no rotation (`kernels/rope_modules.py`)
have the same effect, and so has a failed start-up proof. `unsupported_request` holds what rules out AMORTIZE for one
request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.environ import envs

from leyline_agent.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting that is refused when `applies` to SGLang's ServerArgs (or, of a request, to the request)."""

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
    Rule("--smg-grpc-mode", _is_set("smg_grpc_mode"), "its server has no HTTP routes, so that no helper is ever run"),
    Rule("SGLANG_RUST_SERVER", lambda args: envs.SGLANG_RUST_SERVER.get(), "its server runs no plugins"),
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
    Rule("--enable-kv-cache-sharding", _is_set("enable_kv_cache_sharding"), "KV is sharded over ranks"),
    Rule(
        "--device",
        lambda args: getattr(args, "device", "cuda") not in ("cuda", "cpu", None),
        "moving keys was checked on CUDA and on the CPU only",
    ),
    Rule("--enable-streaming-session", _is_set("enable_streaming_session"), "its KV stays outside of the tree"),
    Rule(
        "--schedule-policy dfs-weight",
        lambda args: getattr(args, "schedule_policy", "") == "dfs-weight",
        "it keeps tree nodes over calls that a splice may change",
    ),
)


REQUEST_RULES = (
    Rule("input_embeds", _is_set("input_embeds"), "token ids do not say what its KV holds"),
    Rule("positional_embed_overrides", _is_set("positional_embed_overrides"), "token ids do not say what its KV holds"),
    Rule("images, audio or video", _is_set("mm_inputs"), "their positions do not count like those of text"),
    Rule(
        "beam_width > 1",
        lambda request: (getattr(request.sampling_params, "beam_width", None) or 1) > 1,
        "beams are not filed in the cache",
    ),
    Rule("session_params", _is_set("session_params"), "SGLang's session puts the prompt together itself"),
)


def refuse_server(args: Any) -> None:
    """Raise UnsupportedError, naming every setting that has to go, if the server must not start."""
    broken = _broken(SERVER_RULES, args)
    if broken:
        raise UnsupportedError(
            f"Leyline does not work with {broken}. Leave that out, or serve without Leyline (`leyline serve --stock`)"
        )


def amortize_off(args: Any, *, hybrid: bool) -> str:
    """Why AMORTIZE has to be off under these settings and what to change, in one line, or ""."""
    off = _broken(AMORTIZE_RULES, args)
    if hybrid:
        layers = "sliding-window and state-space layers keep state that cannot be moved"
        return f"{off}; {layers}" if off else layers
    return f"keys cannot be moved with {off}. Leave that out to have AMORTIZE" if off else ""


def unsupported_request(request: Any) -> str:
    """Why a request, as the scheduler receives it, cannot be amortized, or ""."""
    broken = _broken(REQUEST_RULES, request)
    return f"cannot be amortized with {broken}" if broken else ""


def _broken(rules: tuple[Rule, ...], subject: Any) -> str:
    return "; ".join(f"{rule.setting} ({rule.why})" for rule in rules if rule.applies(subject))
