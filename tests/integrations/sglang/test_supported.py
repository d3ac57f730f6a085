"""What Leyline refuses, when, and with which words; and that what it supports is run by some test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.server_args import ServerArgs

from judge import JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.errors import ServerError, UnsupportedError
from leyline_agent.integrations.sglang import requests
from leyline_agent.integrations.sglang.launch import ServerArgs as LaunchArgs
from leyline_agent.integrations.sglang.launch import ServerProcess, ServerSpec
from leyline_agent.integrations.sglang.supported import (
    AMORTIZE_RULES,
    REQUEST_RULES,
    SERVER_RULES,
    amortize_off,
    refuse_server,
    unsupported_request,
)
from leyline_agent.report import TurnReport
from leyline_agent.wire import KEY, SpliceRequest
from servers import free_port
from splice_client import Conversation, generate_body
from tiny_models import tiny_model

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


@pytest.mark.server
@pytest.mark.slow
def test_the_real_server_does_not_start(tmp_path: Path) -> None:
    words = ("--model-path", str(tiny_model("llama")), "--port", str(free_port()), "--disable-radix-cache")
    spec = ServerSpec(LaunchArgs(words), cpu=True)
    with ServerProcess(spec, tmp_path / "server.log") as server, pytest.raises(ServerError) as caught:
        server.wait_ready(timeout_s=200)
    assert "Leyline does not work with --disable-radix-cache (there is no cache to splice)" in str(caught.value)


def test_all_refused_settings_are_named_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"--enable-lmcache .*; --pp-size > 1 "):
        refuse_server(server_args(enable_lmcache=True, pp_size=2))


@pytest.mark.parametrize(("setting", "fields"), OFF.items(), ids=OFF.keys())
def test_server_without_amortize(setting: str, fields: dict[str, Any]) -> None:
    args = server_args(**fields)
    refuse_server(args)
    (why,) = (rule.why for rule in AMORTIZE_RULES if rule.setting == setting)
    assert amortize_off(args, hybrid=False) == (
        f"keys cannot be moved with {setting} ({why}). Leave that out to have AMORTIZE"
    )


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("live", ["dfs-weight"], indirect=True)
def test_the_real_server_without_amortize(server, reference, tokens) -> None:
    """It says why, in its status and in every report; FORGET works as ever."""
    status = server.status()
    assert status["ready"] is True
    assert status["amortize"] is False
    assert "--schedule-policy dfs-weight" in status["reason"]
    talk = JudgedConversation(server, reference)
    talk.turn(tokens(150))
    answer = talk.turn(tokens(7), Directive(60, 90, tuple(tokens(5))))
    assert answer.reasons == ["amortize_disabled"]
    assert answer.the_report.fallbacks[0].detail == status["reason"]
    assert_exact(reference, answer)
    forgotten = talk.turn(tokens(7), Directive(60, 65, (), Mode.FORGET))
    assert [outcome.status for outcome in forgotten.the_report.directives] == ["forgotten"]
    assert_exact(reference, forgotten)
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0


@pytest.fixture(scope="session")
def live(request, cpu_server):
    if request.param == "operated":
        return request.getfixturevalue("operated")()
    return cpu_server("llama", "--schedule-policy", request.param)


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


def test_helpers_go_by_the_page_size_that_sglang_chose() -> None:
    """Some attention backends have one of their own. Helpers that took it for 1 left the page of the run unfilled."""
    raw = ServerArgs(model_path="somewhere")
    raw._resolved_overrides = [("an attention backend", {"page_size": 16})]
    base, edits = list(range(200)), DirectiveSet.of(Directive(50, 90, (1, 2, 3, 4, 5)))
    params = SpliceRequest.build(base, edits).custom_params()
    turn = GenerateReqInput(input_ids=edits.apply(base), sampling_params={"custom_params": params})
    prefilled: list[int] = []

    async def generate(manager: Any, helper: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        prefilled.append(len(helper.input_ids))
        yield {"meta_info": {"cached_tokens": 0, KEY: [TurnReport().to_wire()]}}

    asyncio.run(requests._run_helpers(generate, SimpleNamespace(server_args=raw), turn, None, params))
    assert prefilled == [64]  # the run would begin at 55


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


@pytest.mark.server
@pytest.mark.parametrize("live", ["operated"], indirect=True)
def test_beam_search_with_a_directive(server, tokens) -> None:
    """The beams are those that come without Leyline, and the report says why nothing was spliced."""
    talk = Conversation(server)
    talk.turn(tokens(150))
    edit = Directive(60, 90, tuple(tokens(5)))
    prompt = talk.prompt(tokens(7), edit)
    beams = []
    for leyline in (talk.request(edit), None):
        body = generate_body(prompt, leyline, log_probs=False)
        body["sampling_params"]["beam_width"] = 2
        response = server.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        beams.append(response.json())
    with_directive, without = beams
    assert with_directive["output_ids"] == without["output_ids"]
    reasons = [fallback["reason"] for fallback in with_directive["meta_info"]["leyline"]["fallbacks"]]
    assert reasons == ["request_unsupported"]
    pool = server.idle_pool()
    assert pool.lost == pool.in_use == 0


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
