"""Start-up proof that cached keys can be moved: a prompt of one token, repeated.

Every position of such a prompt has the same hidden state in every layer (attention averages equal values), so its keys
differ by position alone: K_i = R(i - j) K_j, and values and latents are equal. That is checked on every layer with the
rotation that a splice will use. It proves layout, pairing, rotated width, frequencies and scale of this very model and
pool, or shows that one of them is not what Leyline takes it for. Where the Triton form rotates, it is held against the
torch form on the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from leyline_agent.kernels.pool import PoolRotator

PROBE_LEN = 160
PROBE_SALT = "leyline-probe"
PROBE_TOKEN = 5
"""Any ordinary token does; a small id exists in every vocabulary."""

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}
"""Relative L2 error a layer may show: the model's own rounding over its layers. A wrong rotation shows about 1."""

_FP8_TOLERANCE = 0.2
_LONG_COPY = 16384
"""Slots for which the Triton form takes its tiling for long copies, however few layers and heads a rank has."""

_ROUNDINGS = 1.0
"""Roundings of the stored dtype by which the two forms of the kernel may differ."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe showed: the worst relative error of a layer, and how far Triton and torch are apart.

    `form_difference` is in units of one rounding of the stored keys, None where only the torch form runs.
    """

    passed: bool
    worst_error: float
    layer: int
    form_difference: float | None
    detail: str


def check_probe(rotator: PoolRotator, slots: torch.Tensor) -> ProbeResult:
    """Compare the probe prompt's keys, stored at `slots` in order of position, with its first key moved along.

    slots: [T] int64. Reads the pool, changes nothing.
    """
    reference = PoolRotator(rotator.layers, form="torch", allow_fp8=True) if rotator.form != "torch" else None
    count = len(slots)
    positions = torch.arange(count, device=slots.device, dtype=torch.int32)
    first = slots[:1].expand(count).contiguous()
    worst, where, difference = 0.0, 0, 0.0
    for number, layer in enumerate(rotator.layers):
        actual = layer.keys[slots]
        moved = torch.empty_like(actual)
        rotator.rotated_keys(number, first, positions, moved)
        error = _relative_error(actual, moved)
        if layer.values is not None:
            values = layer.values[slots]
            error = max(error, _relative_error(values, values[:1].expand_as(values)))
        if not error <= worst:  # NaN counts as worse
            worst, where = error, number
        if reference is not None:
            expected = torch.empty_like(actual)
            reference.rotated_keys(number, first, positions, expected)
            difference = max(difference, _roundings_apart(moved, expected))
    limit = _TOLERANCE.get(rotator.layers[0].keys.dtype, _FP8_TOLERANCE)
    follows, agrees = worst <= limit, difference <= _ROUNDINGS
    verdict = f"worst relative error {worst:.2g} of {limit:g} allowed, in layer {where}"
    if not follows:
        verdict = f"keys do not follow the rotation: {verdict}"
    if not agrees:
        verdict = f"the Triton form is {difference:.2g} roundings from the torch form; {verdict}"
    return ProbeResult(follows and agrees, worst, where, difference if reference is not None else None, verdict)


def warm_up(rotator: PoolRotator, slots: torch.Tensor, allocator: Any) -> None:
    """Copy the probe prompt to free slots, as a splice would, so that the first splice compiles no kernel.

    The Triton form has one tiling for short copies and one for long ones. Modifies slots that nobody owns, which are
    free again afterwards.

    slots: [T] int64, where the probe prompt lies.
    """
    for num_slots in (len(slots), _LONG_COPY) if rotator.form == "triton" else (len(slots),):
        free = allocator.alloc(min(num_slots, allocator.available_size()))
        source = slots.repeat(-(-len(free) // len(slots)))[: len(free)]
        rotator.copy_rotate(source, free.to(torch.int64), torch.ones_like(source, dtype=torch.int32))
        allocator.free(free)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp_min(1e-30))


def _roundings_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two tensors of one dtype, in steps between neighbouring numbers of that dtype there."""
    if not a.dtype.is_floating_point or a.dtype.itemsize == 1:
        return float((a != b).any())
    x, y = a.double(), b.double()
    largest = torch.maximum(x.abs(), y.abs()).clamp_min(torch.finfo(a.dtype).tiny)
    step = torch.finfo(a.dtype).eps * torch.exp2(torch.floor(torch.log2(largest)))
    # Sums of products near zero keep the absolute error of their terms, which the row's scale stands for.
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    floor = torch.finfo(torch.float32).eps * 8 * scale
    return float(((x - y).abs() / torch.maximum(step, floor)).max())
