"""What a rotary embedding did to the cached keys: all that moving them needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from leyline_agent.kernels.phase import steps_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["RopeDescriptor"]


@dataclass(frozen=True, eq=False)
class RopeDescriptor:
    """A rotation by position: a key at position p was turned by `p * inv_freq`, pair by pair.

    Moving a key by `shift` positions turns each pair once more, by `shift * inv_freq`. Nothing else of the embedding
    takes part: its magnitude (`scale`) is in the stored key already.
    """

    inv_freq: Tensor
    """[R / 2] float64 on the CPU: radians per position of each pair, position scaling (linear, YaRN, ...) included."""
    rotary_dim: int
    """R, the rotated width; it starts at the layer's `rope_offset`, and dimensions past it stay as they are."""
    interleaved: bool
    """Pairs (2i, 2i + 1) if true, (i, i + R / 2) if false."""
    kind: str = "default"
    """Which family: "default", "linear", "llama3", "yarn", "deepseek_yarn", "dynamic_ntk", "mrope_text", ..."""
    scale: float = 1.0
    """Magnitude that the embedding gave the keys (YaRN's attention factor). For reports; never applied again."""

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim {self.rotary_dim} is not a positive even number")
        if self.inv_freq.dtype != torch.float64 or self.inv_freq.device.type != "cpu":
            where = f"{self.inv_freq.dtype} on {self.inv_freq.device}"
            raise ValueError(f"inv_freq is {where}; it has to be torch.float64 on cpu: large shifts need the digits")
        if tuple(self.inv_freq.shape) != (self.rotary_dim // 2,):
            raise ValueError(
                f"inv_freq has shape {tuple(self.inv_freq.shape)}; rotary_dim {self.rotary_dim} needs "
                f"({self.rotary_dim // 2},), one angle a pair"
            )
        if not bool(self.inv_freq.isfinite().all()):
            raise ValueError(f"inv_freq holds values that are not finite: {self.inv_freq.tolist()}")

    @classmethod
    def from_module(cls, module: nn.Module, *, layer_type: str | None = None) -> RopeDescriptor:
        """Read the rotation from a live rotary module of SGLang or of transformers, and check it against its output.

        `layer_type` picks one rotation of a transformers module that holds several (Gemma 3's local and global ones).
        Raises UnsupportedRopeError, with the module's name and the reason, for anything that is not a rotation by
        position or that is not known.
        """
        from leyline_agent.kernels.rope_modules import describe

        return describe(module, layer_type=layer_type)

    @cached_property
    def steps(self) -> Tensor:
        """[R / 2] int64: phase units per position of each pair (see phase.py)."""
        return steps_of(self.inv_freq)

    def same_rotation(self, other: RopeDescriptor) -> bool:
        """Whether both turn every pair alike, so that one table of angles serves both."""
        return self.interleaved == other.interleaved and torch.equal(self.steps, other.steps)

    def __str__(self) -> str:
        pairing = "interleaved" if self.interleaved else "half-split"
        return f"{self.kind} RoPE, {self.rotary_dim} dims, {pairing}, scale {self.scale:.6g}"
