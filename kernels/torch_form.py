"""The three operations in plain torch: the reference, and what runs where Triton does not.

Layer by layer, a block of slots at a time. Products in fp32, rounded once when they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from leyline_agent.kernels.layout import FP8_DTYPES, LayerKV
from leyline_agent.kernels.phase import cos_sin
from leyline_agent.kernels.rope import RopeDescriptor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TorchForm", "turn_pairs"]

BLOCK_SLOTS = 4096  # bounds the fp32 temporaries: 16 MB for 8 heads of 128


def turn_pairs(keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate each pair of the last dimension by its slot's angle; a pair that does not turn keeps its very bits.

    keys: [T, HK, R] bf16, fp16, fp32 or fp8 e4m3 (as such or as uint8). cos, sin: [T, R / 2] fp32.
    Returns a new [T, HK, R] tensor of the same dtype.
    """
    lead, half = keys.shape[:-1], keys.shape[-1] // 2
    pairs = keys.reshape(*lead, half, 2) if interleaved else keys.reshape(*lead, 2, half).transpose(-1, -2)
    first, second = _to_fp32(pairs).unbind(-1)  # [T, HK, R / 2]
    cos, sin = cos[:, None], sin[:, None]
    turned = _from_fp32(torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1), keys.dtype)
    # Not `x * 1 - y * 0`: that turns -0.0 into 0.0, and infinities into NaN.
    turned = torch.where((sin == 0)[..., None] & (cos == 1)[..., None], _bits(pairs), _bits(turned)).view(keys.dtype)
    return turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)


class TorchForm:
    """Rotates, copies and reads rows of `layers`. Arguments are checked by PoolRotator."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self.layers = layers

    def rotate_inplace(self, slots: Tensor, shifts: Tensor) -> None:
        angles = _Angles(shifts)
        for layer in self.layers:
            if layer.rope is None:
                continue
            part = _bits(layer.keys[..., layer.rotated])
            for block in _blocks(slots):
                keys = part[slots[block]].view(layer.keys.dtype)
                turned = turn_pairs(keys, *angles.of(layer.rope, block), interleaved=layer.rope.interleaved)
                part[slots[block]] = _bits(turned)

    def copy_rotate(self, src: Tensor, dst: Tensor, shifts: Tensor) -> None:
        angles = _Angles(shifts)
        for layer in self.layers:
            keys = _bits(layer.keys)
            for block in _blocks(src):
                keys[dst[block]] = _bits(_rotated_rows(layer, src[block], block, angles))
                if layer.values is not None:
                    values = _bits(layer.values)
                    values[dst[block]] = values[src[block]]

    def rotated_keys(self, layer: int, slots: Tensor, shifts: Tensor, out: Tensor) -> None:
        angles = _Angles(shifts)
        for block in _blocks(slots):
            out[block] = _rotated_rows(self.layers[layer], slots[block], block, angles)


def _rotated_rows(layer: LayerKV, slots: Tensor, block: slice, angles: _Angles) -> Tensor:
    """Whole key rows of one block, rotated: a copy."""
    rows = _bits(layer.keys)[slots].view(layer.keys.dtype)
    if layer.rope is not None:
        cos, sin = angles.of(layer.rope, block)
        turned = turn_pairs(rows[..., layer.rotated], cos, sin, interleaved=layer.rope.interleaved)
        _bits(rows)[..., layer.rotated] = _bits(turned)
    return rows


class _Angles:
    """Cosines and sines of one call's shifts, computed once a distinct shift and a distinct rotation."""

    def __init__(self, shifts: Tensor) -> None:
        self.shifts, self.row = torch.unique(shifts, return_inverse=True)
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, rope: RopeDescriptor, block: slice) -> tuple[Tensor, Tensor]:
        """[T, R / 2] cosines and sines for the slots of one block."""
        if id(rope) not in self.tables:
            self.tables[id(rope)] = cos_sin(rope.steps.to(self.shifts.device), self.shifts)
        cos, sin = self.tables[id(rope)]
        return cos[self.row[block]], sin[self.row[block]]


def _blocks(slots: Tensor) -> Iterator[slice]:
    for start in range(0, len(slots), BLOCK_SLOTS):
        yield slice(start, start + BLOCK_SLOTS)


def _bits(rows: Tensor) -> Tensor:
    """fp8 as bytes, because torch cannot index or select fp8; any other dtype as it is."""
    return rows.view(torch.uint8) if rows.dtype in FP8_DTYPES else rows


def _to_fp32(rows: Tensor) -> Tensor:
    return (rows.view(torch.float8_e4m3fn) if rows.dtype in FP8_DTYPES else rows).to(torch.float32)


def _from_fp32(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype not in FP8_DTYPES:
        return rows.to(dtype)
    # A pair can grow by sqrt(2) in one component; beyond e4m3's range torch would store NaN.
    limit = torch.finfo(torch.float8_e4m3fn).max
    return rows.clamp(-limit, limit).to(torch.float8_e4m3fn).view(dtype)
