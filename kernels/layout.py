"""Where one layer keeps its keys and values, and which of their columns carry a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from leyline_agent.kernels.rope import RopeDescriptor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FP8_DTYPES", "STORAGE_DTYPES", "LayerKV"]

FP8_DTYPES = (torch.uint8, torch.float8_e4m3fn)
"""How e4m3 keys are stored: engines without fp8 indexing keep them as plain bytes."""
STORAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)


@dataclass(frozen=True, eq=False)
class LayerKV:
    """Keys and values of one layer, one row a slot. Rows may be views into a larger allocation.

    MHA/GQA: `keys` [S, HK, D] and `values` [S, HK, DV]. MLA: `keys` [S, 1, kv_lora_rank + R] with the latent first and
    the rotated part last (`rope_offset = kv_lora_rank`); the values are the latent, so `values` is None.
    """

    keys: Tensor
    values: Tensor | None
    rope: RopeDescriptor | None
    """None for a layer without positions (NoPE): its rows are copied, and never rotated."""
    rope_offset: int = 0
    """First rotated column of every head."""

    def __post_init__(self) -> None:
        for name, rows in (("keys", self.keys), ("values", self.values)):
            if rows is None:
                continue
            if rows.ndim != 3 or rows.stride(-1) != 1:
                raise ValueError(
                    f"{name} of shape {tuple(rows.shape)} and stride {rows.stride()}: [slots, heads, dim] with a "
                    "contiguous last dimension is needed"
                )
            if rows.dtype not in STORAGE_DTYPES:
                raise ValueError(f"{name} are {rows.dtype}; supported: {', '.join(map(str, STORAGE_DTYPES))}")
            if rows.device != self.keys.device or rows.shape[0] != self.keys.shape[0]:
                raise ValueError(
                    f"keys are {self.keys.shape[0]} slots on {self.keys.device}, "
                    f"values {rows.shape[0]} slots on {rows.device}"
                )
        if self.rope is not None:
            end = self.rope_offset + self.rope.rotary_dim
            if not 0 <= self.rope_offset < end <= self.keys.shape[2]:
                raise ValueError(
                    f"rotated columns [{self.rope_offset}, {end}) do not lie within keys of width {self.keys.shape[2]}"
                )

    @property
    def rotated(self) -> slice:
        """Columns of each head that are rotated; empty for a layer without positions."""
        return slice(self.rope_offset, self.rope_offset + (self.rope.rotary_dim if self.rope else 0))
