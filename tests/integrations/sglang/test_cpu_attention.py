"""Attention behind a cached prefix on the CPU: the same numbers as SGLang's own, at the cost of the new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from leyline_agent.integrations.sglang.cpu import attention, enable

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = {
    "gqa": (8, 2, 16, 16),
    "mha": (4, 4, 16, 16),
    "mla, absorbed": (8, 1, 24, 16),
}
"""Query heads, KV heads, width of a key, width of a value."""

PREFIX_LENS, NEW_LENS = (0, 70, 33), (9, 1, 20)


@pytest.fixture
def backend() -> Iterator[Any]:
    """SGLang's backend as the plugin leaves it; the class is as it was afterwards."""
    enable()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from leyline_agent.integrations.sglang.cpu.plugin import register

    before = TorchNativeAttnBackend._run_sdpa_forward_extend
    register()
    yield TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    TorchNativeAttnBackend._run_sdpa_forward_extend = before


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_new_tokens_attend_as_in_sglang(backend: Any, shape: tuple[int, int, int, int], monkeypatch: Any) -> None:
    heads, kv_heads, width, value_width = shape
    rng = torch.Generator().manual_seed(0)
    num_new, lengths = sum(NEW_LENS), [sum(pair) for pair in zip(PREFIX_LENS, NEW_LENS, strict=True)]
    query = torch.randn(num_new, heads, width, generator=rng)
    keys = torch.randn(300, kv_heads, width, generator=rng)
    values = keys[..., :value_width] if width != value_width else torch.randn(300, kv_heads, width, generator=rng)
    table = torch.stack([torch.randperm(300, generator=rng)[:100] for _ in lengths])
    places = torch.arange(len(lengths)), torch.tensor(lengths), torch.tensor(PREFIX_LENS), torch.tensor(NEW_LENS)
    options = {"scaling": width**-0.5, "enable_gqa": heads != kv_heads, "causal": True}

    ours, theirs = (torch.empty(num_new, heads, value_width) for _ in range(2))
    seen: list[int] = []
    real = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention,
        "scaled_dot_product_attention",
        lambda q, *args, **kw: seen.append(q.shape[-2]) or real(q, *args, **kw),
    )
    run = type(backend)._run_sdpa_forward_extend
    run(backend, query, ours, keys, values, table, *places, None, **options)
    run.leyline_original(backend, query, theirs, keys, values, table, *places, None, **options)
    assert seen == list(NEW_LENS)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
