"""Moving cached keys of a whole KV pool to new positions: the operation that a splice rests on."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from leyline_agent.errors import ConfigError, UnsupportedError
from leyline_agent.kernels.layout import FP8_DTYPES, LayerKV
from leyline_agent.kernels.torch_form import TorchForm

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LayerKV", "PoolRotator"]

Form = Literal["auto", "triton", "torch"]


class _Form(Protocol):
    """What does the work: TorchForm, or TritonForm."""

    def rotate_inplace(self, slots: Tensor, shifts: Tensor) -> None: ...
    def copy_rotate(self, src: Tensor, dst: Tensor, shifts: Tensor) -> None: ...
    def rotated_keys(self, layer: int, slots: Tensor, shifts: Tensor, out: Tensor) -> None: ...


class PoolRotator:
    """All layers of one KV pool. Every operation is one launch (Triton) or a loop over the layers (torch).

    Slots are row numbers of the pool, in any order; on a GPU they are trusted, because checking them would make the
    host wait. `shifts` says for each slot by how many positions it moves (new minus old, any sign), so many spans
    with different deltas are one call. A shift of zero changes no bit.

    The pool's tensors are kept, and their addresses are read once: build a new rotator if the pool is reallocated.
    """

    def __init__(self, layers: Sequence[LayerKV], *, form: Form = "auto", allow_fp8: bool = False) -> None:
        """Check the layers and choose a form.

        form: "triton", "torch", or "auto": Triton on CUDA if it is installed, torch elsewhere.
        allow_fp8: accept fp8 e4m3 keys (uint8 storage is read as e4m3). Each rotation rounds them again, which is an
        error of 2.7 % each time (docs/kernels.md): nobody should get that by accident.
        """
        self.layers = tuple(layers)
        _check_layers(self.layers, allow_fp8=allow_fp8)
        self.device = self.layers[0].keys.device
        self.num_slots = self.layers[0].keys.shape[0]
        self.form, self.form_reason = _choose_form(form, self.device)
        """"triton" or "torch", and why: shown in the server's status."""
        self._form: _Form
        if self.form == "triton":
            from leyline_agent.kernels.triton_form import TritonForm

            self._form = TritonForm(self.layers)
        else:
            self._form = TorchForm(self.layers)

    # Pools of a server are made, and used, under inference mode; their tensors refuse in-place work outside of it.
    @torch.inference_mode()
    def rotate_inplace(self, slots: Tensor, shifts: Tensor) -> None:
        """Move the keys of `slots` by `shifts` where they lie. Values, latents and all other slots stay untouched.

        slots: [T] int64, distinct. shifts: [T] int32 or int64.
        """
        self._check_slots("slots", slots)
        self._check_shifts(shifts, slots)
        if len(slots):
            self._form.rotate_inplace(slots, shifts)

    @torch.inference_mode()
    def copy_rotate(self, src: Tensor, dst: Tensor, shifts: Tensor) -> None:
        """Copy whole rows from `src` to `dst` in all layers, moving the keys by `shifts` on the way.

        src, dst: [T] int64; no slot of `dst` may be in `src` or twice in `dst`. shifts: [T] int32 or int64.
        """
        self._check_slots("src", src)
        self._check_slots("dst", dst)
        self._check_shifts(shifts, src)
        if len(src) != len(dst):
            raise ValueError(f"{len(src)} source slots, but {len(dst)} destination slots")
        if self.device.type == "cpu" and bool(torch.isin(src, dst).any()):
            both = src[torch.isin(src, dst)][:5].tolist()
            raise ValueError(f"slots {both} are both read and written; src and dst have to be disjoint")
        if len(src):
            self._form.copy_rotate(src, dst, shifts)

    @torch.inference_mode()
    def rotated_keys(self, layer: int, slots: Tensor, shifts: Tensor, out: Tensor) -> None:
        """Write into `out` the key rows that `layer` would hold for `slots` after a move by `shifts`.

        For tests and probes; the pool is only read. out: [T, HK, D] in the pool's dtype, last dimension contiguous.
        """
        self._check_slots("slots", slots)
        self._check_shifts(shifts, slots)
        keys = self.layers[layer].keys
        expected = (len(slots), *keys.shape[1:])
        if tuple(out.shape) != expected or out.dtype != keys.dtype or out.device != keys.device or out.stride(-1) != 1:
            raise ValueError(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}; {expected} {keys.dtype} on {keys.device} with "
                "a contiguous last dimension is needed"
            )
        if len(slots):
            self._form.rotated_keys(layer, slots, shifts, out)

    def _check_slots(self, name: str, slots: Tensor) -> None:
        if slots.ndim != 1 or slots.dtype != torch.int64 or slots.device != self.device:
            raise ValueError(
                f"{name} are {tuple(slots.shape)} {slots.dtype} on {slots.device}; [T] torch.int64 on {self.device} "
                "is needed"
            )
        if self.device.type == "cpu" and len(slots):
            low, high = slots.aminmax()
            if low < 0 or high >= self.num_slots:
                raise ValueError(f"{name} reach from {low} to {high}; the pool has slots 0 to {self.num_slots - 1}")

    def _check_shifts(self, shifts: Tensor, slots: Tensor) -> None:
        integers = shifts.dtype in (torch.int32, torch.int64)
        if shifts.shape != slots.shape or not integers or shifts.device != self.device:
            raise ValueError(
                f"shifts are {tuple(shifts.shape)} {shifts.dtype} on {shifts.device}; {tuple(slots.shape)} torch.int32 "
                f"or torch.int64 on {self.device} is needed, one a slot"
            )


def _check_layers(layers: tuple[LayerKV, ...], *, allow_fp8: bool) -> None:
    if not layers:
        raise ValueError("a pool needs at least one layer")
    first = layers[0].keys
    for number, layer in enumerate(layers):
        keys = layer.keys
        if keys.device != first.device or keys.dtype != first.dtype or keys.shape[0] != first.shape[0]:
            raise ValueError(
                f"layer {number} has {keys.shape[0]} slots of {keys.dtype} on {keys.device}, layer 0 has "
                f"{first.shape[0]} of {first.dtype} on {first.device}; one pool has one size, dtype and device"
            )
    if first.dtype in FP8_DTYPES and not allow_fp8:
        raise UnsupportedError(
            f"keys are stored as {first.dtype} (fp8); each rotation would round them again, to 3 bits of mantissa. "
            "Pass allow_fp8=True to accept that, if they are e4m3"
        )


def _choose_form(form: Form, device: torch.device) -> tuple[Literal["triton", "torch"], str]:
    """The form that runs, and why. Raises ConfigError if the one asked for cannot."""
    if form not in ("auto", "triton", "torch"):
        raise ConfigError(f'form is {form!r}; it has to be "auto", "triton" or "torch"')
    if form == "torch":
        return "torch", "asked for"
    missing = importlib.util.find_spec("triton") is None
    if form == "auto":
        if device.type != "cuda":
            return "torch", f"the pool is on {device.type}, and Triton needs CUDA"
        return ("torch", "Triton is not installed") if missing else ("triton", "the pool is on CUDA")
    if missing:
        raise ConfigError('form is "triton", but Triton is not installed; pass "auto" or "torch"')
    if device.type != "cuda":
        import triton

        if not triton.knobs.runtime.interpret:
            raise ConfigError(
                f'form is "triton", but the pool is on {device.type}; pass "auto" or "torch" '
                "(or set TRITON_INTERPRET=1 to run Triton's interpreter, for tests)"
            )
        return "triton", "asked for; runs in Triton's interpreter"
    return "triton", "asked for"
