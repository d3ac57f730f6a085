"""Angles as fixed-point turns: exact for any shift, and the same on every device.

An fp32 angle loses what matters: at a shift of 131,072 positions it is off by up to 0.004 radians. So a pair's angle
per position is stored as a 64-bit fraction of a turn, the *step*, and a shift's angle is `shift * step` in wrapping
int64 arithmetic. Whole turns fall off the top by themselves, and for any two shifts
`phase(a) + phase(b) == phase(a + b)` holds bit for bit. README.md in this folder has the derivation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TURN = 2**64
"""Phase units in one turn. An int64 phase covers [-1/2, 1/2) turns."""


def steps_of(inv_freq: Tensor) -> Tensor:
    """Phase units per position of each pair, for frequencies in radians per position.

    inv_freq: [R / 2] float64. Returns [R / 2] int64; a frequency of zero gives a step of zero, which never rotates.
    """
    turns = inv_freq / math.tau
    units = [round(turn * TURN) for turn in torch.remainder(turns, 1.0).tolist()]  # scaling by 2**64 is exact
    signed = [(unit + TURN // 2) % TURN - TURN // 2 for unit in units]
    return torch.tensor(signed, dtype=torch.int64)


def cos_sin(steps: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each pair's angle for each shift, accurate to the last fp32 bit.

    steps: [R / 2] int64. shifts: [T] integer, any sign. Returns two [T, R / 2] float32 tensors.
    """
    phases = shifts.to(torch.int64)[:, None] * steps  # [T, R / 2], wraps: whole turns do not count
    angles = phases.to(torch.float64) * (math.tau / TURN)
    return angles.cos().to(torch.float32), angles.sin().to(torch.float32)
