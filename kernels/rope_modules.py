"""Which rotary modules we know, how their frequencies are read, and how we check that we read them right.

Two families, read from the live object and never from a config file:

- SGLang's modules keep a table of cosines and sines by position. We ask the module for its frequencies, then compare
  the table with them at sampled positions; a wrong reading, or a table that is no rotation, cannot pass.
- transformers' modules keep the frequencies, but the pairing lives in a function beside them. We run module and
  function on random keys and see which pairing explains the result.

Neither package is imported here: modules are told apart by the name of their class, exactly, because a subclass may
compute something else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from leyline_agent.errors import UnsupportedRopeError
from leyline_agent.kernels.rope import RopeDescriptor

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["describe"]

# Why each of these cannot be moved. The rotation by a shift would have to be the same wherever the key stands.
NOT_A_ROTATION = {
    "Phi3LongRoPEScaledRotaryEmbedding": "LongRoPE switches between two sets of frequencies with the prompt's length",
    "FourierRotaryEmbedding": "FoPE mixes frequencies with learned coefficients",
    "DualChunkRotaryEmbedding": "dual chunk attention wraps positions at chunk borders",
    "Llama4VisionRotaryEmbedding": "its positions lie on an image grid",
    "Embedding": "learned positions are added to the hidden state, they do not rotate the key",
}
NOT_A_ROTATION_TYPE = {
    "longrope": "LongRoPE switches between two sets of frequencies with the prompt's length",
    "dynamic": "transformers' dynamic NTK changes its frequencies with the prompt's length",
}


def describe(module: nn.Module, *, layer_type: str | None = None) -> RopeDescriptor:
    """Build the descriptor of a live rotary module. See RopeDescriptor.from_module."""
    name = type(module).__name__
    if name in NOT_A_ROTATION:
        raise UnsupportedRopeError(f"{name} cannot be moved by rotation: {NOT_A_ROTATION[name]}")
    if "alibi" in name.lower():
        raise UnsupportedRopeError(f"{name} cannot be moved by rotation: ALiBi biases the scores and leaves keys alone")
    # Frequencies of a model built under inference_mode are inference tensors; so are ours then, which is fine.
    with torch.no_grad():
        if isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor):
            return _describe_sglang(module)
        if hasattr(module, "compute_default_rope_parameters") or isinstance(
            getattr(module, "inv_freq", None), torch.Tensor
        ):
            return _describe_transformers(module, layer_type)
    raise UnsupportedRopeError(
        f"{name} is not a rotary module that we know: it has neither SGLang's cos_sin_cache nor transformers' inv_freq"
    )


# --- SGLang -----------------------------------------------------------------------------------------------------------


def _frequencies(module: Any, argument: float) -> Tensor:
    inv_freq: Tensor = module._compute_inv_freq(argument)  # noqa: SLF001 (its only door to them)
    return inv_freq.double()


def _plain(module: Any) -> Tensor:
    return _frequencies(module, module.base)


def _linear(module: Any) -> Tensor:
    if len(module.scaling_factors) != 1:
        raise UnsupportedRopeError(
            f"linear RoPE with several factors {module.scaling_factors} (one a LoRA) has no single rotation"
        )
    return _frequencies(module, module.base) / float(module.scaling_factors[0])


def _yarn(module: Any) -> Tensor:
    return _frequencies(module, module.scaling_factor)


def _static_ntk(module: Any) -> Tensor:
    # SGLang's "dynamic" NTK computes one base from the factor, once; prompt length plays no part.
    factor, width = module.scaling_factor, module.rotary_dim
    return _frequencies(module, module.base * (factor * factor - (factor - 1)) ** (width / (width - 2)))


def _static_ntk_alpha(module: Any) -> Tensor:
    width = module.rotary_dim
    return _frequencies(module, module.base * module.scaling_alpha ** (width / (width - 2)))


# class name -> (kind, how to ask it for its frequencies)
SGLANG_MODULES: dict[str, tuple[str, Callable[[Any], Tensor]]] = {
    "RotaryEmbedding": ("default", _plain),
    "LinearScalingRotaryEmbedding": ("linear", _linear),
    "Llama3RotaryEmbedding": ("llama3", _plain),
    "YaRNScalingRotaryEmbedding": ("yarn", _yarn),
    "DeepseekScalingRotaryEmbedding": ("deepseek_yarn", _yarn),
    "DynamicNTKScalingRotaryEmbedding": ("dynamic_ntk", _static_ntk),
    "DynamicNTKAlphaRotaryEmbedding": ("dynamic_ntk", _static_ntk_alpha),
    "Gemma4RotaryEmbedding": ("proportional", _plain),
    # Text tokens have equal temporal, height and width positions: there, and only there, M-RoPE is plain RoPE.
    "MRotaryEmbedding": ("mrope_text", _plain),
    "YaRNScalingMRotaryEmbedding": ("mrope_text", _yarn),
    "Ernie4_5_VLRotaryEmbedding": ("mrope_text", _plain),
}


def _describe_sglang(module: Any) -> RopeDescriptor:
    name = type(module).__name__
    if name not in SGLANG_MODULES:
        raise UnsupportedRopeError(f"{name} is not a rotary module that we know; known: {', '.join(SGLANG_MODULES)}")
    kind, read = SGLANG_MODULES[name]
    with module.cos_sin_cache.device:  # the device that computed the table: fp32 powers differ in the last bit
        inv_freq = read(module).cpu()
    rope = RopeDescriptor(
        inv_freq=inv_freq,
        rotary_dim=int(module.rotary_dim),
        interleaved=not module.is_neox_style,
        kind=kind,
        scale=float(getattr(module, "mscale", 1.0)),
    )
    _check_table(name, module.cos_sin_cache, rope, first_position=getattr(module, "position_start", 0))
    return rope


def _check_table(name: str, table: Tensor, rope: RopeDescriptor, first_position: int) -> None:
    """Compare the module's own table with the descriptor at sampled positions.

    table: [N, R], cosines then sines, times the module's magnitude; row i belongs to position `first_position + i`.
    Raises UnsupportedRopeError if the rows are not rotations that add up, or not those of `rope`.
    """
    if table.ndim != 2 or table.shape[1] != rope.rotary_dim:
        raise UnsupportedRopeError(f"{name}: table of shape {tuple(table.shape)}, expected [N, {rope.rotary_dim}]")
    powers = [2**k for k in range(31) if 2**k < table.shape[0]]
    rows = torch.tensor(sorted({0, *powers, *(p - 1 for p in powers), table.shape[0] - 1}))
    cos, sin = table[rows.to(table.device)].to("cpu", torch.float64).chunk(2, dim=-1)
    turned = torch.complex(cos, sin) / rope.scale  # [rows, R / 2]

    angles = (rows.double() + first_position)[:, None] * rope.inv_freq
    # The table's own rounding: of its entries, and of angles that were computed in fp32.
    slack = 8 * torch.finfo(table.dtype).eps + 4 * torch.finfo(torch.float32).eps * angles.abs()

    # Rotations add up: row 2^k, then 2^k - 1, is row 2^(k+1) - 1 (and row 0, which holds a start offset if any).
    index = {int(row): i for i, row in enumerate(rows)}
    for power in powers:
        if (total := index.get(2 * power - 1)) is not None:
            both = turned[index[power]] * turned[index[power - 1]]
            off = (both - turned[total] * turned[0]).abs() / (3 * slack[total])
            if float(off.max()) > 1:
                raise UnsupportedRopeError(
                    f"{name} is not a rotation by position: turning by {power} and by {power - 1} positions differs "
                    f"from turning by {2 * power - 1} (pair {int(off.argmax())})"
                )

    off = (turned - torch.polar(torch.ones_like(angles), angles)).abs() / slack
    if float(off.max()) > 1:
        row, pair = divmod(int(off.argmax()), off.shape[1])
        raise UnsupportedRopeError(
            f"{name}: its table at position {int(rows[row]) + first_position}, pair {pair}, is not what its own "
            f"frequencies and magnitude {rope.scale:.6g} give; this version of the module is not known to us"
        )


# --- transformers -----------------------------------------------------------------------------------------------------


def _describe_transformers(module: Any, layer_type: str | None) -> RopeDescriptor:
    name = type(module).__name__
    rope_type = getattr(module, "rope_type", "default")
    prefix = ""
    if isinstance(rope_type, dict):
        if layer_type not in rope_type:
            raise UnsupportedRopeError(f"{name} holds several rotations; name one with layer_type: {sorted(rope_type)}")
        rope_type, prefix = rope_type[layer_type], f"{layer_type}_"
    elif layer_type is not None:
        raise UnsupportedRopeError(f"{name} holds one rotation; layer_type {layer_type!r} names none")
    if rope_type in NOT_A_ROTATION_TYPE:
        raise UnsupportedRopeError(f"{name} cannot be moved by rotation: {NOT_A_ROTATION_TYPE[rope_type]}")

    inv_freq = getattr(module, f"{prefix}inv_freq").to("cpu", torch.float64)
    kind = "mrope_text" if hasattr(module, "mrope_section") else rope_type
    scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    for interleaved in (False, True):
        rope = RopeDescriptor(inv_freq, 2 * inv_freq.numel(), interleaved, kind, scale)
        if _explains(rope, module, layer_type):
            return rope
    raise UnsupportedRopeError(f"{name} ({rope_type}): neither pairing explains what its own code does to a key")


def _explains(rope: RopeDescriptor, module: Any, layer_type: str | None) -> bool:
    """Whether the code beside `module` turns random keys as `rope` says."""
    apply = _apply_function(module)
    device = getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq").device
    positions = torch.tensor([0, 1, 2, 17, 300])
    keys = torch.randn(1, 1, len(positions), rope.rotary_dim, generator=torch.Generator().manual_seed(0))
    extra = {} if layer_type is None else {"layer_type": layer_type}
    tables = module(keys.to(device), positions[None].to(device), **extra)
    tables = tables if isinstance(tables, tuple) else (tables,)
    one_key = next(iter(inspect.signature(apply).parameters)) == "x"  # Gemma 4 turns one tensor at a time
    turned = apply(keys.to(device), *tables) if one_key else apply(keys.to(device), keys.to(device), *tables)[1]

    angles = positions.double()[:, None] * rope.inv_freq
    return torch.allclose(turned.cpu().double(), _turn(keys.double(), angles, rope), rtol=0, atol=1e-3)


def _apply_function(module: Any) -> Callable[..., Any]:
    """The function that its file's attention layers call with the module's output."""
    beside = sys.modules[type(module).__module__]
    for name in ("apply_rotary_pos_emb", "apply_rotary_emb"):
        if (found := getattr(beside, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    raise UnsupportedRopeError(
        f"{type(module).__name__}: no apply_rotary_pos_emb beside it in {beside.__name__}, so its pairing is unknown"
    )


def _turn(keys: Tensor, angles: Tensor, rope: RopeDescriptor) -> Tensor:
    """Turn `keys` [..., T, R] by `angles` [T, R / 2], in complex numbers: nothing shared with the kernels' code."""
    half = rope.rotary_dim // 2
    lead = keys.shape[:-1]
    pairs = keys.reshape(*lead, half, 2) if rope.interleaved else keys.reshape(*lead, 2, half).transpose(-1, -2)
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(torch.full_like(angles, rope.scale), angles)
    turned = torch.view_as_real(turned)
    return turned.flatten(-2) if rope.interleaved else turned.transpose(-1, -2).flatten(-2)
