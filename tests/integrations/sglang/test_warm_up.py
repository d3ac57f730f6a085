"""The start-up proof leaves nothing for the first splice to compile, and every slot where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from leyline_agent.integrations.sglang.probe import PROBE_LEN, warm_up
from leyline_agent.kernels.pool import LayerKV, PoolRotator
from leyline_agent.kernels.rope import RopeDescriptor

NUM_SLOTS = 50_000
SHAPES = {
    "DeepSeek-V2-Lite": (27, 1, 576, 64),
    "DeepSeek-V3": (61, 1, 576, 64),
    "Llama-3.1-8B": (32, 8, 128, 128),
    "Qwen3-8B": (36, 8, 128, 128),
    "one layer of a rank": (1, 1, 128, 128),
}
"""Layers, key heads, width of a head, and how much of it is rotated."""


def rope_of(rotated: int, *, interleaved: bool) -> RopeDescriptor:
    return RopeDescriptor(torch.linspace(1, 0.01, rotated // 2, dtype=torch.float64), rotated, interleaved=interleaved)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_variant_of_the_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """What Triton compiles by, its compile-time arguments, is the same for splices of all lengths."""
    triton_form = pytest.importorskip("leyline_agent.kernels.triton_form", reason="Triton is not installed")
    kernel = RecordedKernel()
    monkeypatch.setattr(triton_form, "move_rows_kernel", kernel)
    num_layers, heads, width, rotated = shape
    mla = rotated < width
    rope = rope_of(rotated, interleaved=mla)
    rows = torch.empty(NUM_SLOTS, heads, width, dtype=torch.bfloat16)  # one for all layers: only addresses are taken
    layer = LayerKV(rows, None if mla else rows, rope, rope_offset=width - rotated)
    rotator = PoolRotator([layer] * num_layers)
    rotator.form, rotator._form = "triton", triton_form.TritonForm(rotator.layers)

    allocator = TokenToKVPoolAllocator(NUM_SLOTS - 1, torch.bfloat16, "cpu", None, False)
    warm_up(rotator, allocator.alloc(PROBE_LEN), allocator)
    assert allocator.available_size() == NUM_SLOTS - 1 - PROBE_LEN

    compiled = kernel.variants.copy()
    assert len(compiled) == 2
    for length in (1, 17, PROBE_LEN, 1000, 5000, 16384, 24999):
        slots = torch.arange(2 * length)
        shifts = torch.full((length,), -7, dtype=torch.int32)
        rotator.copy_rotate(slots[:length], slots[length:], shifts)
        rotator.rotate_inplace(slots[:length], shifts)
        assert kernel.variants == compiled, f"a splice of {length} tokens compiles another variant"


class RecordedKernel:
    """Stands where the Triton kernel is launched, and notes what it would have been compiled for."""

    def __init__(self) -> None:
        self.variants: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, src: torch.Tensor, dst: torch.Tensor, shifts: torch.Tensor, *args: Any, **constants: Any) -> None:
        dtypes = (src.dtype, dst.dtype, shifts.dtype)
        self.variants.add((*map(str, dtypes), *sorted((name, str(value)) for name, value in constants.items())))


def test_probe_keeps_its_keys_and_a_small_pool_is_enough() -> None:
    keys, values = torch.randn(200, 2, 8), torch.randn(200, 2, 8)
    rotator = PoolRotator([LayerKV(keys, values, rope_of(8, interleaved=False))])
    allocator = TokenToKVPoolAllocator(199, torch.float32, "cpu", None, False)
    slots = allocator.alloc(PROBE_LEN)
    before = keys[slots].clone(), values[slots].clone()
    warm_up(rotator, slots, allocator)
    assert allocator.available_size() == 199 - PROBE_LEN
    assert torch.equal(keys[slots], before[0])
    assert torch.equal(values[slots], before[1])
    moved = slice(PROBE_LEN + 1, 200)
    assert torch.equal(values[moved], before[1][: 199 - PROBE_LEN]), "what fitted was copied, values too"
