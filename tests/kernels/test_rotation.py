"""What a rotation has to satisfy, in every form that can run here.

The truth is computed apart from the code under test: RoPE in complex float64 on the unrotated keys, at the new
positions. What may change is compared with it; all other memory is compared bit for bit.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from leyline_agent.kernels.phase import TURN, cos_sin, steps_of
from leyline_agent.kernels.pool import LayerKV, PoolRotator
from leyline_agent.kernels.rope import RopeDescriptor

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.uint8: 2.0**-4}
ARITHMETIC = 6e-7  # of the angle and of the fp32 products; the same on every machine
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Form:
    name: Literal["torch", "triton"]
    device: str
    dtypes: tuple[torch.dtype, ...]


ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FORMS = [
    pytest.param(Form("torch", "cpu", ALL_DTYPES), id="torch-cpu"),
    pytest.param(Form("torch", "cuda", ALL_DTYPES), id="torch-cuda", marks=[pytest.mark.gpu, no_cuda]),
    pytest.param(Form("triton", "cuda", ALL_DTYPES), id="triton-cuda", marks=[pytest.mark.gpu, no_cuda]),
]
if INTERPRETER:  # in a process of its own, see test_interpreter.py; fp32 only, its bf16 arithmetic is wrong
    FORMS = [pytest.param(Form("triton", "cpu", (torch.float32,)), id="triton-interpreter")]
each_form = pytest.mark.parametrize("form", FORMS)
sweep = settings(
    max_examples=12 if INTERPRETER or torch.cuda.is_available() else 40,  # there each one is interpreted, or compiled
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- pools and the truth about them -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    heads: int = 2
    half: int = 8
    before: int = 0  # columns before the rotated ones (the MLA latent)
    after: int = 0  # columns past them (partial rotary)
    value_dim: int | None = 16
    interleaved: bool = False
    gap: int = 0  # columns between rows: a view into a larger allocation
    slots: int = 64

    @property
    def dim(self) -> int:
        return self.before + 2 * self.half + self.after


MLA = Shape(heads=1, half=32, before=512, value_dim=None, interleaved=True)
SHAPES = {
    "gqa": Shape(heads=2, half=32, value_dim=64),
    "partial": Shape(heads=3, half=8, after=16, value_dim=24),
    "mla": replace(MLA, slots=40),
    "odd": Shape(heads=3, half=7, before=3, after=2, value_dim=5, interleaved=True, gap=1),
    "fused view": Shape(heads=2, half=16, value_dim=32, gap=64),
    "one pair": Shape(heads=1, half=1, value_dim=1),
}


def rope_of(shape: Shape, theta: float = 10000.0, scale: float = 1.0) -> RopeDescriptor:
    inv_freq = theta ** (-torch.arange(shape.half, dtype=torch.float64) / shape.half)
    return RopeDescriptor(inv_freq, 2 * shape.half, shape.interleaved, scale=scale)


def rows_of(shape: Shape, heads: int, dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """[S, heads, dim], possibly a view with a gap after each row."""
    stride = heads * dim + shape.gap
    whole = torch.empty(shape.slots * stride, dtype=dtype, device=device).normal_()
    return whole.as_strided((shape.slots, heads, dim), (stride, dim, 1))


def layer_of(shape: Shape, rope: RopeDescriptor | None, dtype: torch.dtype, device: str) -> LayerKV:
    keys = rows_of(shape, shape.heads, shape.dim, dtype, device)
    values = None if shape.value_dim is None else rows_of(shape, shape.heads, shape.value_dim, dtype, device)
    return LayerKV(keys, values, rope, shape.before)


def rope_truth(raw: Tensor, positions: Tensor, rope: RopeDescriptor | None) -> Tensor:
    """RoPE of unrotated keys [T, HK, R] at `positions` [T], in complex float64 on the CPU."""
    assert rope is not None
    pairs = pairs_of(raw.double().cpu(), rope.interleaved)
    angles = positions.cpu().double()[:, None, None] * rope.inv_freq
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(torch.full_like(angles, rope.scale), angles)
    return flat(torch.view_as_real(turned), rope.interleaved)


def pairs_of(rows: Tensor, interleaved: bool) -> Tensor:
    """[..., R] as [..., R / 2, 2]."""
    lead, half = rows.shape[:-1], rows.shape[-1] // 2
    return rows.reshape(*lead, half, 2) if interleaved else rows.reshape(*lead, 2, half).transpose(-1, -2)


def flat(pairs: Tensor, interleaved: bool) -> Tensor:
    """[..., R / 2, 2] as [..., R]."""
    return pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)


def pair_norm(rows: Tensor, interleaved: bool) -> Tensor:
    """Length of the pair that each element belongs to: what a rounding error is relative to."""
    pairs = pairs_of(rows, interleaved)
    return flat(torch.linalg.vector_norm(pairs, dim=-1, keepdim=True).expand_as(pairs), interleaved)


def assert_rotated(got: Tensor, truth: Tensor, interleaved: bool, roundings: int) -> None:
    """`got` is `truth` up to that many roundings to its dtype, plus fp32 arithmetic."""
    bound = (roundings * UNIT_ROUNDOFF[got.dtype] * 1.01 + ARITHMETIC) * pair_norm(truth, interleaved) + 1e-30
    if got.dtype == torch.float16:
        bound += roundings * 2.0**-25  # below its normal range fp16 has a fixed step
    error = (got.double().cpu() - truth).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} times what rounding allows"


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(BITS[rows.element_size()])


def place(layer: LayerKV, slots: Tensor, positions: Tensor) -> Tensor:
    """Put RoPE'd random keys into `slots` as a server would; returns the unrotated ones [T, HK, R], float64."""
    assert layer.rope is not None
    raw = torch.randn(len(slots), layer.keys.shape[1], layer.rope.rotary_dim, dtype=torch.float64)
    layer.keys[slots, :, layer.rotated] = rope_truth(raw, positions, layer.rope).to(layer.keys)
    return raw


def draw(shape: Shape, count: int, low: int, high: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """`count` distinct slots in random order, old positions, and shifts of both signs with a zero among them."""
    slots = torch.randperm(shape.slots)[:count]
    positions = torch.randint(0, high, (count,))
    shifts = torch.randint(low, high, (count,))
    shifts[count // 2 : count // 2 + 1] = 0
    return slots.to(device), positions, shifts.to(device)


# --- the truths -------------------------------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("name", SHAPES)
def test_every_operation_equals_rope_at_the_new_positions(form: Form, name: str) -> None:
    torch.manual_seed(0)
    shape = SHAPES[name]
    for dtype in form.dtypes:
        check_against_truth(form, shape, dtype, count=13, reach=131072)


@each_form
@sweep
@given(
    shape=st.builds(
        Shape,
        heads=st.sampled_from([1, 2, 3, 8]),
        half=st.sampled_from([1, 2, 3, 5, 8, 16, 17, 32, 64]),
        before=st.sampled_from([0, 0, 1, 7, 32, 512]),
        after=st.sampled_from([0, 0, 1, 6, 64]),
        value_dim=st.sampled_from([None, 1, 13, 64, 128]),
        interleaved=st.booleans(),
        gap=st.sampled_from([0, 0, 1, 8]),
        slots=st.sampled_from([37, 64]),
    ),
    count=st.sampled_from([0, 1, 2, 7, 13, 17]),
    reach=st.sampled_from([1, 100, 5000, 131072, 2**20]),
    dtype_index=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_sweep(form: Form, shape: Shape, count: int, reach: int, dtype_index: int, seed: int) -> None:
    torch.manual_seed(seed)
    check_against_truth(form, shape, form.dtypes[dtype_index % len(form.dtypes)], count, reach)


def check_against_truth(form: Form, shape: Shape, dtype: torch.dtype, count: int, reach: int) -> None:
    """Two rotating layers of different theta and a NoPE layer: in place, copied, and into a buffer."""
    ropes = [rope_of(shape, theta=1e4, scale=1.3), None, rope_of(shape, theta=5e5)]
    layers = [layer_of(shape, rope, dtype, form.device) for rope in ropes]
    slots, positions, shifts = draw(shape, count, -reach, reach, form.device)
    raws = [place(layer, slots, positions) if layer.rope else None for layer in layers]
    truths = [
        rope_truth(raw, positions + shifts.cpu(), layer.rope) if raw is not None and layer.rope else None
        for layer, raw in zip(layers, raws, strict=True)
    ]
    rotator = PoolRotator(layers, form=form.name)
    dst = torch.tensor(sorted(set(range(shape.slots)) - set(slots.tolist()))[:count], dtype=torch.int64).to(form.device)
    for layer in layers:
        layer.keys[dst] = math.nan  # what is not written shows
    before = [(layer.keys.clone(), None if layer.values is None else layer.values.clone()) for layer in layers]

    for i, layer in enumerate(layers):
        out = torch.full((count, *layer.keys.shape[1:]), math.nan, dtype=dtype, device=form.device)
        rotator.rotated_keys(i, slots, shifts.int(), out)
        check_rows(layer, out, before[i][0][slots], truths[i])
        assert torch.equal(bits(layer.keys), bits(before[i][0])), "reading changed the pool"

    rotator.copy_rotate(slots, dst, shifts)
    for layer, truth, (old_keys, old_values) in zip(layers, truths, before, strict=True):
        check_rows(layer, layer.keys[dst], old_keys[slots], truth)
        untouched = old_keys.clone()
        untouched[dst] = layer.keys[dst]
        assert torch.equal(bits(layer.keys), bits(untouched)), "a copy changed keys outside its destination"
        if layer.values is not None and old_values is not None:
            expected = old_values.clone()
            expected[dst] = old_values[slots]
            assert torch.equal(bits(layer.values), bits(expected)), "values are not copied bit for bit"
            layer.values.copy_(old_values)

    rotator.rotate_inplace(slots, shifts)
    for layer, truth, (old_keys, old_values) in zip(layers, truths, before, strict=True):
        check_rows(layer, layer.keys[slots], old_keys[slots], truth)
        untouched = old_keys.clone()
        untouched[slots], untouched[dst] = layer.keys[slots], layer.keys[dst]
        assert torch.equal(bits(layer.keys), bits(untouched)), "a rotation changed other slots"
        if layer.values is not None and old_values is not None:
            assert torch.equal(bits(layer.values), bits(old_values)), "a rotation changed values"


def check_rows(layer: LayerKV, rows: Tensor, old: Tensor, truth: Tensor | None) -> None:
    """`rows` are `old` moved: the rotated columns as the truth says, all others bit for bit."""
    if layer.rope is not None and truth is not None:
        assert_rotated(rows[..., layer.rotated], truth, layer.rope.interleaved, roundings=2)
    expected = old.clone()
    expected[..., layer.rotated] = rows[..., layer.rotated]
    assert torch.equal(bits(rows), bits(expected)), "columns outside the rotary width changed"


@each_form
@pytest.mark.parametrize("interleaved", [False, True])
def test_shift_zero_changes_no_bit(form: Form, interleaved: bool) -> None:
    """Neither of numbers nor of what arithmetic would lose: -0.0, infinities and NaN."""
    torch.manual_seed(1)
    shape = Shape(interleaved=interleaved)
    for dtype in form.dtypes:
        layer = layer_of(shape, rope_of(shape), dtype, form.device)
        special = torch.tensor([-0.0, 0.0, math.inf, -math.inf, math.nan, 1e-40, 3e-5], device=form.device).to(dtype)
        layer.keys[:, 0, :7] = special
        before = layer.keys.clone()
        slots = torch.randperm(shape.slots, device=form.device)[:31]
        free = torch.tensor(sorted(set(range(shape.slots)) - set(slots.tolist()))[:31], device=form.device)
        zero = torch.zeros_like(slots)
        rotator = PoolRotator([layer], form=form.name)
        rotator.rotate_inplace(slots, zero)
        assert torch.equal(bits(layer.keys), bits(before))
        rotator.copy_rotate(slots, free, zero)
        assert torch.equal(bits(layer.keys[free]), bits(before[slots]))


@each_form
def test_zero_frequencies_never_turn(form: Form) -> None:
    """Proportional RoPE pads its frequencies with zeros: those pairs keep their bits at any shift."""
    shape = Shape(half=8)
    inv_freq = rope_of(shape).inv_freq.clone()
    inv_freq[3:] = 0
    layer = layer_of(shape, RopeDescriptor(inv_freq, 16, False, kind="proportional"), torch.float32, form.device)
    layer.keys[:, :, 3:8] = -0.0
    before = layer.keys.clone()
    slots = torch.arange(shape.slots, device=form.device)
    PoolRotator([layer], form=form.name).rotate_inplace(slots, slots + 1)
    still = [*range(3, 8), *range(11, 16)]
    assert torch.equal(bits(layer.keys[..., still]), bits(before[..., still]))
    assert not torch.equal(layer.keys[..., :3], before[..., :3])


@each_form
@pytest.mark.parametrize("shift", [1, -1, 4097, -131072, 131072])
def test_there_and_back_returns(form: Form, shift: int) -> None:
    torch.manual_seed(2)
    for dtype in form.dtypes:
        layer = layer_of(Shape(), rope_of(Shape()), dtype, form.device)
        before = layer.keys.double().cpu()
        slots = torch.randperm(64, device=form.device)[:23]
        shifts = torch.full_like(slots, shift)
        rotator = PoolRotator([layer], form=form.name)
        rotator.rotate_inplace(slots, shifts)
        rotator.rotate_inplace(slots, -shifts)
        assert_rotated(layer.keys, before, interleaved=False, roundings=2)  # one each way


@each_form
@pytest.mark.parametrize(("first", "second"), [(5, -5), (100, 31), (-70000, 131072), (2**20, -3)])
def test_two_shifts_equal_their_sum(form: Form, first: int, second: int) -> None:
    torch.manual_seed(3)
    for dtype in form.dtypes:
        layer = layer_of(MLA, rope_of(MLA), dtype, form.device)
        before = layer.keys.clone()
        slots = torch.randperm(64, device=form.device)[:23]
        rotator = PoolRotator([layer], form=form.name)
        once = torch.full_like(layer.keys[slots], math.nan)
        rotator.rotated_keys(0, slots, torch.full_like(slots, first + second), once)
        rotator.rotate_inplace(slots, torch.full_like(slots, first))
        rotator.rotate_inplace(slots, torch.full_like(slots, second))
        # Twice rotated is rounded twice, and `once` once.
        assert_rotated(layer.keys[slots][..., 512:], once[..., 512:].double().cpu(), interleaved=True, roundings=3)
        assert torch.equal(bits(layer.keys[..., :512]), bits(before[..., :512]))


@each_form
def test_one_slot_and_none(form: Form) -> None:
    shape = SHAPES["gqa"]
    layer = layer_of(shape, rope_of(shape), torch.float32, form.device)
    before = layer.keys.clone()
    rotator = PoolRotator([layer], form=form.name)
    none = torch.empty(0, dtype=torch.int64, device=form.device)
    rotator.rotate_inplace(none, none)
    rotator.copy_rotate(none, none, none)
    rotator.rotated_keys(0, none, none, layer.keys[:0])
    assert torch.equal(bits(layer.keys), bits(before))
    one = torch.tensor([shape.slots - 1], device=form.device)
    rotator.rotate_inplace(one, one)
    changed = (layer.keys != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == one.tolist()


@each_form
def test_slots_and_shifts_may_be_views(form: Form) -> None:
    """Every other slot of a table, and one shift expanded to all: the kernel must not read past their strides."""
    torch.manual_seed(7)
    layer = layer_of(Shape(), rope_of(Shape()), torch.float32, form.device)
    rows = torch.randperm(60, device=form.device).reshape(20, 3)
    slots, dst, shifts = rows[:, 0], rows[:, 2], torch.tensor([-77], device=form.device).expand(20)
    raw = place(layer, slots, torch.arange(100, 120))
    truth = rope_truth(raw, torch.arange(23, 43), layer.rope)
    rotator = PoolRotator([layer], form=form.name)
    rotator.copy_rotate(slots, dst, shifts)
    rotator.rotate_inplace(slots, shifts)
    assert_rotated(layer.keys[dst], truth, interleaved=False, roundings=2)
    assert_rotated(layer.keys[slots], truth, interleaved=False, roundings=2)


@each_form
def test_a_pool_of_128k_slots(form: Form) -> None:
    """On a GPU its rows lie further apart than 2**31 elements, where 32-bit offsets would overflow."""
    torch.manual_seed(4)
    on_gpu = form.device == "cuda"
    count = 131072 if on_gpu else (5 if form.name == "triton" else 9000)
    shape = Shape(heads=4 if on_gpu else 1, half=64, value_dim=None, gap=2**15 if on_gpu else 0, slots=131072)
    layer = layer_of(shape, rope_of(shape, theta=5e5), form.dtypes[-1], form.device)
    slots, positions, shifts = draw(shape, count, -131072, 131072, form.device)
    farthest = int(slots.argmax())
    slots[[0, farthest]] = slots[[farthest, 0]]
    checked = torch.arange(0, count, max(1, count // 500))
    raw = place(layer, slots[checked], positions[checked])
    PoolRotator([layer], form=form.name).rotate_inplace(slots, shifts)
    truth = rope_truth(raw, positions[checked] + shifts.cpu()[checked], layer.rope)
    assert_rotated(layer.keys[slots[checked]], truth, interleaved=False, roundings=2)


@each_form
def test_layers_of_different_shape_share_a_pool(form: Form) -> None:
    """Widths, pairings and offsets that differ by layer; Triton then needs one launch a shape."""
    torch.manual_seed(5)
    shapes = [SHAPES["gqa"], replace(SHAPES["partial"]), replace(SHAPES["one pair"], interleaved=True)]
    layers = [layer_of(shape, rope_of(shape), torch.float32, form.device) for shape in shapes]
    slots, positions, shifts = draw(shapes[0], 11, -999, 999, form.device)
    raws = [place(layer, slots, positions) for layer in layers]
    PoolRotator(layers, form=form.name).rotate_inplace(slots, shifts)
    for layer, raw in zip(layers, raws, strict=True):
        assert layer.rope is not None
        truth = rope_truth(raw, positions + shifts.cpu(), layer.rope)
        assert_rotated(layer.keys[slots][..., layer.rotated], truth, layer.rope.interleaved, roundings=2)


@each_form
def test_a_pool_without_positions_is_copied(form: Form) -> None:
    layer = layer_of(Shape(), None, torch.float32, form.device)
    before = layer.keys.clone()
    src, dst = torch.arange(9, device=form.device), torch.arange(20, 29, device=form.device)
    rotator = PoolRotator([layer], form=form.name)
    rotator.rotate_inplace(src, src + 1)
    assert torch.equal(bits(layer.keys), bits(before))
    rotator.copy_rotate(src, dst, src + 1)
    assert torch.equal(bits(layer.keys[dst]), bits(before[src]))


@each_form
@pytest.mark.parametrize("storage", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_fp8_rounds_once_and_saturates(form: Form, storage: torch.dtype) -> None:
    if INTERPRETER:
        pytest.skip("the interpreter has no fp8 arithmetic to trust")
    torch.manual_seed(6)
    shape = Shape(half=16)
    layer = layer_of(shape, rope_of(shape), torch.float32, form.device)
    keys = layer.keys.to(torch.float8_e4m3fn)
    keys[0] = 448.0  # the largest; turned by 1/8 it would be 634, which e4m3 cannot hold
    layer = LayerKV(keys.view(storage), None, layer.rope)
    slots = torch.randperm(shape.slots, device=form.device)
    truth = rope_truth(keys.float()[..., :32], torch.full((shape.slots,), 7), layer.rope).clamp(-448, 448)
    PoolRotator([layer], form=form.name, allow_fp8=True).rotate_inplace(slots, torch.full_like(slots, 7))
    got = layer.keys.view(torch.float8_e4m3fn).double().cpu()
    bound = 2.0**-4 * truth.abs() * 1.01 + 2.0**-10 + 1e-5 * pair_norm(truth, interleaved=False)
    assert got.isfinite().all()
    assert ((got - truth).abs() <= bound).all()


# --- angles -----------------------------------------------------------------------------------------------------------


def test_phases_of_two_shifts_add_up_exactly() -> None:
    steps = rope_of(MLA).steps
    a, b = torch.randint(-(2**40), 2**40, (2, 1000))
    assert torch.equal(a[:, None] * steps + b[:, None] * steps, (a + b)[:, None] * steps)


@pytest.mark.parametrize("shift", [1, -1, 131071, -131072, 2**20 + 1])
def test_angles_are_exact_at_any_distance(shift: int) -> None:
    """Where fp32 would be off by 0.004 radians, the fixed-point angle is good to the last bit of fp32."""
    mpmath = pytest.importorskip("mpmath", reason="mpmath computes the angles to 50 digits")
    inv_freq = rope_of(MLA).inv_freq
    cos, sin = cos_sin(steps_of(inv_freq), torch.tensor([shift]))
    with mpmath.workdps(50):
        exact = [(mpmath.cos(mpmath.mpf(f) * shift), mpmath.sin(mpmath.mpf(f) * shift)) for f in inv_freq.tolist()]
    assert torch.allclose(cos[0], torch.tensor([float(c) for c, _ in exact]), rtol=0, atol=1e-7)
    assert torch.allclose(sin[0], torch.tensor([float(s) for _, s in exact]), rtol=0, atol=1e-7)


def test_steps_wrap_and_keep_zero() -> None:
    steps = steps_of(torch.tensor([0.0, math.pi / 2, math.tau, 1.5 * math.pi], dtype=torch.float64))
    assert steps[0] == 0
    assert abs(steps[1].item() - TURN // 4) < 2**12
    assert abs(steps[2].item()) < 2**12
    assert abs(steps[3].item() + TURN // 4) < 2**13
