"""What Leyline refuses, when, and with which words; and that what it supports is run by some test."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leyline_agent.errors import UnsupportedError
from leyline_agent.integrations.sglang.supported import (
    AMORTIZE_RULES,
    REQUEST_RULES,
    SERVER_RULES,
    amortize_off,
    refuse_server,
    unsupported_request,
)

pytest.importorskip("sglang")

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402 (SGLang is not in every environment)
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

HERE = Path(__file__).parent


def server_args(**fields: Any) -> Any:
    """What the backend's factory looks at, for the settings `fields`."""
    return resolved_view(ServerArgs(model_path="somewhere", **fields))


# --- refused at start-up ---------------------------------------------------------------------------------------------

REFUSED = {
    "--disable-radix-cache": {"disable_radix_cache": True},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-unified-cache-external-linker": {"enable_unified_cache_external_linker": True},
    "--disaggregation-mode": {"disaggregation_mode": "prefill"},
    "--enable-pdmux": {"enable_pdmux": True},
    "--tokenizer-worker-num > 1": {"tokenizer_worker_num": 2},
    "--pp-size > 1": {"pp_size": 2},
    "--smg-grpc-mode": {"smg_grpc_mode": True},
    "SGLANG_RUST_SERVER": {},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--kv-canary": {"kv_canary": "log"},
}

OFF = {
    "--speculative-algorithm": {"speculative_algorithm": "EAGLE"},
    "--dcp-size > 1": {"dcp_size": 2},
    "--attn-cp-size > 1": {"attn_cp_size": 2},
    "--enable-kv-cache-sharding": {"enable_kv_cache_sharding": True},
    "--device": {"device": "xpu"},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--schedule-policy dfs-weight": {"schedule_policy": "dfs-weight"},
}


def test_every_rule_has_its_case() -> None:
    assert list(REFUSED) == [rule.setting for rule in SERVER_RULES]
    assert sorted(OFF) == sorted(rule.setting for rule in AMORTIZE_RULES)


@pytest.mark.parametrize(("setting", "fields"), REFUSED.items(), ids=REFUSED.keys())
def test_server_that_must_not_start(monkeypatch: pytest.MonkeyPatch, setting: str, fields: dict[str, Any]) -> None:
    if setting == "SGLANG_RUST_SERVER":
        monkeypatch.setenv(setting, "1")
    with pytest.raises(UnsupportedError) as caught:
        refuse_server(server_args(**fields))
    (why,) = (rule.why for rule in SERVER_RULES if rule.setting == setting)
    assert str(caught.value) == (
        f"Leyline does not work with {setting} ({why}). "
        "Leave that out, or serve without Leyline (`leyline serve --stock`)"
    )


def test_all_refused_settings_are_named_at_once() -> None:
    with pytest.raises(UnsupportedError, match="--enable-lmcache .*; --pp-size > 1 "):
        refuse_server(server_args(enable_lmcache=True, pp_size=2))


@pytest.mark.parametrize(("setting", "fields"), OFF.items(), ids=OFF.keys())
def test_server_without_amortize(setting: str, fields: dict[str, Any]) -> None:
    args = server_args(**fields)
    refuse_server(args)
    (why,) = (rule.why for rule in AMORTIZE_RULES if rule.setting == setting)
    assert amortize_off(args, hybrid=False) == (
        f"keys cannot be moved with {setting} ({why}). Leave that out to have AMORTIZE"
    )


def test_hybrid_model() -> None:
    assert "sliding-window" in amortize_off(server_args(), hybrid=True)
    both = amortize_off(server_args(dcp_size=2), hybrid=True)
    assert "--dcp-size" in both
    assert "sliding-window" in both


def test_settings_are_read_as_sglang_resolved_them() -> None:
    """`--grpc-mode` is an old name: SGLang turns it into another setting, which the raw arguments do not show."""
    raw = ServerArgs(model_path="somewhere", grpc_mode=True)
    refuse_server(resolved_view(raw))
    raw._resolved_overrides = [("an old name", {"smg_grpc_mode": True})]
    with pytest.raises(UnsupportedError, match="--smg-grpc-mode"):
        refuse_server(resolved_view(raw))


# --- pools -----------------------------------------------------------------------------------------------------------


def pools_with_other_layouts() -> list[type]:
    """Every KV pool of SGLang, but for the two whose layout is known."""
    from sglang.srt.mem_cache import memory_pool, page_interleave_pool, swa_memory_pool, unified_memory_pool

    known = (memory_pool.MHATokenToKVPool, memory_pool.MLATokenToKVPool)
    modules = (memory_pool, page_interleave_pool, swa_memory_pool, unified_memory_pool)
    found = {item for module in modules for item in vars(module).values() if isinstance(item, type)} - set(known)
    pools = (item for item in found if issubclass(item, memory_pool.KVCache) and not inspect.isabstract(item))
    return sorted(pools, key=str)


@pytest.mark.parametrize("pool_class", pools_with_other_layouts(), ids=lambda item: item.__name__)
def test_pool_with_another_layout(pool_class: type) -> None:
    from leyline_agent.integrations.sglang.pool_layers import pool_layers

    pool = pool_class.__new__(pool_class)
    pool.start_layer, pool.layer_num = 0, 1
    with pytest.raises(UnsupportedError, match=rf"KV pool {pool_class.__name__}: its layout is not known"):
        pool_layers(SimpleNamespace(model=torch.nn.Module()), pool)


def test_pool_with_keys_in_blocks() -> None:
    """The pool's class is a known one, its keys lie as [pages, heads, page, dim] or in five dimensions."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from leyline_agent.integrations.sglang.pool_layers import pool_layers

    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.start_layer, pool.layer_num, pool.k_buffer = 0, 1, [torch.zeros(4, 2, 16, 8)]
    with pytest.raises(UnsupportedError, match=r"\(4, 2, 16, 8\); only \[slots, heads, dim\] is known"):
        pool_layers(SimpleNamespace(model=torch.nn.Module()), pool)


# --- requests --------------------------------------------------------------------------------------------------------

REQUESTS = {
    "input_embeds": {"input_embeds": [[0.0]]},
    "positional_embed_overrides": {"positional_embed_overrides": object()},
    "images, audio or video": {"mm_inputs": object()},
    "beam_width > 1": {"sampling_params": SimpleNamespace(beam_width=2)},
    "session_params": {"session_params": {"id": "mine"}},
}


@pytest.mark.parametrize(("what", "fields"), REQUESTS.items(), ids=REQUESTS.keys())
def test_request_that_cannot_be_amortized(what: str, fields: dict[str, Any]) -> None:
    known = {field for base in TokenizedGenerateReqInput.__mro__ for field in getattr(base, "__annotations__", {})}
    assert set(fields) <= known
    request = SimpleNamespace(sampling_params=SimpleNamespace(beam_width=None))
    assert not unsupported_request(request)
    vars(request).update(fields)
    (why,) = (rule.why for rule in REQUEST_RULES if rule.setting == what)
    assert unsupported_request(request) == f"cannot be amortized with {what} ({why})"


def test_every_request_rule_has_its_case() -> None:
    assert list(REQUESTS) == [rule.setting for rule in REQUEST_RULES]


# --- supported -------------------------------------------------------------------------------------------------------

SUPPORTED = {
    "--page-size": ("test_pages.py", {"page_size": 16}),
    "--tp-size": ("test_scale.py", {"tp_size": 2}),
    "--dp-size": ("test_scale.py", {"dp_size": 2}),
    "--disable-overlap-schedule": ("test_scale.py", {"disable_overlap_schedule": True}),
    "--enable-session-radix-cache": ("test_scale.py", {"enable_session_radix_cache": True}),
    "--enable-priority-scheduling": ("test_scale.py", {"enable_priority_scheduling": True}),
    "--chunked-prefill-size": ("conftest.py", {"chunked_prefill_size": 128}),
    "--enable-mixed-chunk": ("conftest.py", {"enable_mixed_chunk": True}),
    "--enable-metrics": ("conftest.py", {"enable_metrics": True}),
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": ("conftest.py", {}),
}
"""And where the real server runs with it; all else in these tests runs with SGLang's defaults."""


@pytest.mark.parametrize(("setting", "case"), SUPPORTED.items(), ids=SUPPORTED.keys())
def test_supported_setting_is_run_by_a_test(setting: str, case: tuple[str, dict[str, Any]]) -> None:
    file, fields = case
    refuse_server(server_args(**fields))
    assert not amortize_off(server_args(**fields), hybrid=False)
    assert f'"{setting}"' in (HERE / file).read_text()


def test_ngram_speculation_has_no_draft_model() -> None:
    refuse_server(server_args(speculative_algorithm="NGRAM"))
    assert not amortize_off(server_args(speculative_algorithm="NGRAM"), hybrid=False)
