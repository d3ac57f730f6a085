"""Descriptors read from live rotary modules, judged by what the modules themselves do to keys.

For each kind: run the module at position p and at p + shift; rotating the first by the descriptor gives the second.
The magnitude (YaRN's) is in both, so a descriptor that applied it again would be off by just that factor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyline_agent.errors import UnsupportedRopeError
from leyline_agent.kernels.pool import LayerKV, PoolRotator
from leyline_agent.kernels.rope import RopeDescriptor

OLD = torch.tensor([0, 1, 5, 100, 900, 2047])
SHIFTS = torch.tensor([3, 1000, -5, 1948, -899, -2000])
TOLERANCE = 1e-3  # a module's own fp32 angles: 4096 positions times 2**-23, twice

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DEEPSEEK: dict[str, Any] = {**YARN, "rope_type": "deepseek_yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


def move(rope: RopeDescriptor, keys: Tensor, shifts: Tensor, offset: int = 0) -> Tensor:
    """`keys` [T, HK, D] moved by a rotator over a pool that holds just them."""
    layer = LayerKV(keys.clone(), None, rope, offset)
    PoolRotator([layer]).rotate_inplace(torch.arange(len(keys)), shifts)
    return layer.keys


# --- SGLang -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sglang_rope() -> Any:
    """SGLang's rotary package, which imports on a CPU once torchvision's operators are declared."""
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    patch = pytest.MonkeyPatch()
    patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        if not hasattr(torch.ops.torchvision, "nms"):  # torchvision's CUDA build beside a CPU torch
            schema = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]
        import sglang.srt.layers.rotary_embedding.factory as factory

        yield factory
    finally:
        patch.undo()


def by_factory(*, dim: int = 64, rotary: int = 64, neox: bool = True, **scaling: Any) -> Callable[[Any], nn.Module]:
    return lambda factory: factory.get_rope(dim, rotary, 4096, 10000, neox, scaling or None, torch.float32)


SGLANG = {
    "default": (by_factory(), "default", 1.0),
    "interleaved": (by_factory(neox=False), "default", 1.0),
    "partial": (by_factory(dim=128, rotary=32), "default", 1.0),
    "linear": (by_factory(rope_type="linear", factor=4.0), "linear", 1.0),
    "llama3": (by_factory(**LLAMA3), "llama3", 1.0),
    "yarn": (by_factory(**YARN), "yarn", 1.1386),
    "yarn, factor given": (by_factory(**YARN, attn_factor=0.7), "yarn", 0.7970),
    "deepseek_yarn": (by_factory(neox=False, **DEEPSEEK, mscale=1.0, mscale_all_dim=0.5), "deepseek_yarn", 1.1557),
    "deepseek_yarn of V2-Lite": (
        by_factory(neox=False, **DEEPSEEK, mscale=0.707, mscale_all_dim=0.707), "deepseek_yarn", 1.0,
    ),
    "static NTK": (by_factory(rope_type="dynamic", factor=2.0), "dynamic_ntk", 1.0),
    "static NTK, alpha": (by_factory(rope_type="dynamic", alpha=1000.0), "dynamic_ntk", 1.0),
    "M-RoPE": (by_factory(rope_type="default", mrope_section=[16, 8, 8]), "mrope_text", 1.0),
    "M-RoPE, interleaved": (
        by_factory(rope_type="default", mrope_section=[12, 10, 10], mrope_interleaved=True), "mrope_text", 1.0,
    ),
    "M-RoPE with YaRN": (by_factory(**YARN, mrope_section=[16, 8, 8]), "mrope_text", 1.1386),
    "proportional": (by_factory(dim=128, rotary=32, rope_type="proportional"), "proportional", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_modules(sglang_rope: Any, name: str) -> None:
    build, kind, scale = SGLANG[name]
    module: Any = build(sglang_rope)
    rope = RopeDescriptor.from_module(module)
    assert rope.kind == kind
    assert rope.scale == pytest.approx(scale, abs=1e-4)
    assert rope.interleaved is not module.is_neox_style

    keys = torch.randn(len(OLD), 2, module.head_size, generator=torch.Generator().manual_seed(0))
    positions = [OLD, OLD + SHIFTS]
    if getattr(module, "mrope_section", None):  # text: temporal, height and width positions are equal
        positions = [p.expand(3, -1) for p in positions]
    old, new = (module.forward_native(p, keys.clone(), keys.clone())[1] for p in positions)
    assert (old[3:] - keys[3:]).abs().max() > 0.1, "the module does not rotate: the test would show nothing"
    torch.testing.assert_close(move(rope, old, SHIFTS), new, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sglang_table_in_low_precision_is_read_exactly(sglang_rope: Any, dtype: torch.dtype) -> None:
    """On a CPU SGLang rounds its table to the model's dtype; the frequencies do not suffer from it."""
    rounded = sglang_rope.get_rope(64, 64, 4096, 10000, True, YARN, dtype)
    exact = sglang_rope.get_rope(64, 64, 4096, 10000, True, YARN, torch.float32)
    assert rounded.cos_sin_cache.dtype == dtype
    assert RopeDescriptor.from_module(rounded).same_rotation(RopeDescriptor.from_module(exact))


def test_sglang_refusals(sglang_rope: Any) -> None:
    factors = [1.0] * 32
    longrope: dict[str, Any] = {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 1024,
    }  # fmt: skip
    fourier = sglang_rope.FourierRotaryEmbedding(64, 64, 128, 10000, True, torch.float32, 1, device="cpu")
    dual_chunk_class = sglang_rope.DualChunkRotaryEmbedding
    dual_chunk = dual_chunk_class.__new__(dual_chunk_class)  # its __init__ needs CUDA
    two_loras = sglang_rope.LinearScalingRotaryEmbedding(64, 64, 128, 10000, True, [1.0, 2.0], torch.float32)
    for module, reason in [
        (by_factory(**longrope)(sglang_rope), "LongRoPE switches"),
        (fourier, "FoPE mixes"),
        (dual_chunk, "dual chunk"),
        (two_loras, "several factors"),
    ]:
        with pytest.raises(UnsupportedRopeError, match=reason):
            RopeDescriptor.from_module(module)


def test_a_sglang_module_that_we_do_not_know_is_refused(sglang_rope: Any) -> None:
    class NewEmbedding(sglang_rope.RotaryEmbedding):  # type: ignore[misc]
        """A subclass may compute anything, so inheriting from a known class is no proof."""

    with pytest.raises(UnsupportedRopeError, match="NewEmbedding is not a rotary module that we know"):
        RopeDescriptor.from_module(NewEmbedding(64, 64, 128, 10000, True, torch.float32))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t.flip(0), "not a rotation by position"),
        (lambda t: torch.cat((t[:700], t[700:].flip(0))), "not a rotation by position"),  # wrong from 700 on
        (lambda t: t * 1.2, "is not what its own frequencies and magnitude|not a rotation by position"),
        (lambda t: torch.cat((t[:, :32], -t[:, 32:]), dim=1), "is not what its own frequencies"),  # turns backwards
        (lambda t: t[:, :40], "table of shape"),
    ],
)
def test_a_table_that_disagrees_with_its_module_is_refused(
    sglang_rope: Any, spoil: Callable[[Tensor], Tensor], reason: str
) -> None:
    module = sglang_rope.RotaryEmbedding(64, 64, 4096, 10000, True, torch.float32)
    module.cos_sin_cache = spoil(module.cos_sin_cache)
    with pytest.raises(UnsupportedRopeError, match=reason):
        RopeDescriptor.from_module(module)


# --- transformers -----------------------------------------------------------------------------------------------------


def hf(family: str, config: str, rotary: str, **overrides: Any) -> nn.Module:
    """A rotary module of transformers, from `transformers.models.<family>`."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed in this environment")
    import importlib

    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
    return getattr(modeling, rotary)(getattr(transformers, config)(**(sizes | overrides)))  # type: ignore[no-any-return]


def theta(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **rope}}


LLAMA = ("llama", "LlamaConfig", "LlamaRotaryEmbedding")
TRANSFORMERS: dict[str, tuple[tuple[str, str, str], dict[str, Any], str, bool, float]] = {
    "default": (LLAMA, theta(rope_type="default"), "default", False, 1.0),
    "linear": (LLAMA, theta(rope_type="linear", factor=4.0), "linear", False, 1.0),
    "llama3": (LLAMA, theta(**LLAMA3), "llama3", False, 1.0),
    "yarn": (LLAMA, theta(**YARN), "yarn", False, 1.1386),
    "complex numbers, yarn": (
        ("deepseek_v2", "DeepseekV2Config", "DeepseekV2RotaryEmbedding"),
        {**theta(**YARN), "qk_rope_head_dim": 64}, "yarn", True, 1.1386,
    ),
    "interleaved tables": (("cohere", "CohereConfig", "CohereRotaryEmbedding"), theta(), "default", True, 1.0),
    "interleaved by its function": (
        ("glm", "GlmConfig", "GlmRotaryEmbedding"), theta(partial_rotary_factor=0.5), "default", True, 1.0,
    ),
    "M-RoPE": (
        ("qwen2_vl", "Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding"),
        theta(rope_type="default", mrope_section=[16, 8, 8]), "mrope_text", False, 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_modules(name: str) -> None:
    where, overrides, kind, interleaved, scale = TRANSFORMERS[name]
    module = hf(*where, **overrides)
    rope = RopeDescriptor.from_module(module)
    assert (rope.kind, rope.interleaved) == (kind, interleaved)
    assert rope.scale == pytest.approx(scale, abs=1e-4)

    keys = torch.randn(len(OLD), 1, rope.rotary_dim, generator=torch.Generator().manual_seed(0))
    old, new = (hf_rotated(module, keys, positions) for positions in (OLD, OLD + SHIFTS))
    torch.testing.assert_close(move(rope, old, SHIFTS), new, rtol=0, atol=TOLERANCE * scale)


def hf_rotated(module: nn.Module, keys: Tensor, positions: Tensor, **extra: Any) -> Tensor:
    """Keys [T, 1, R] as the attention layers beside `module` rotate them."""
    beside = inspect.getmodule(type(module))
    apply = getattr(beside, "apply_rotary_pos_emb", None) or beside.apply_rotary_emb  # type: ignore[union-attr]
    rows = keys.transpose(0, 1)[None]  # [1, heads, T, R]
    tables = module(rows, positions[None], **extra)
    rotated = apply(rows, rows, *(tables if isinstance(tables, tuple) else (tables,)))[1]
    return rotated[0].transpose(0, 1)  # type: ignore[no-any-return]


def test_a_transformers_module_with_two_rotations() -> None:
    """Gemma 3: local layers turn with another theta than global ones, and one module serves both."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    layers = ["sliding_attention", "full_attention"]
    module = hf(
        "gemma3", "Gemma3TextConfig", "Gemma3RotaryEmbedding", rope_parameters=rope, layer_types=layers,
        num_hidden_layers=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedRopeError, match="several rotations"):
        RopeDescriptor.from_module(module)
    local, globally = (RopeDescriptor.from_module(module, layer_type=name) for name in layers)
    assert (local.kind, globally.kind) == ("default", "linear")
    assert not local.same_rotation(globally)
    keys = torch.randn(len(OLD), 1, 64, generator=torch.Generator().manual_seed(0))
    for descriptor, name in ((local, layers[0]), (globally, layers[1])):
        old, new = (hf_rotated(module, keys, p, layer_type=name) for p in (OLD, OLD + SHIFTS))
        torch.testing.assert_close(move(descriptor, old, SHIFTS), new, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 4.0,
             "original_max_position_embeddings": 1024}, "LongRoPE switches",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic NTK changes"),
    ],
)  # fmt: skip
def test_transformers_refusals(rope: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedRopeError, match=reason):
        RopeDescriptor.from_module(hf(*LLAMA, **theta(**rope)))


# --- anything else ----------------------------------------------------------------------------------------------------


class BloomAlibi(nn.Module):
    pass


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(16, 8), "Embedding cannot be moved by rotation: learned positions"),
        (BloomAlibi(), "ALiBi biases the scores"),
        (nn.Linear(4, 4), "Linear is not a rotary module that we know"),
    ],
)
def test_what_is_not_rope_is_refused_by_name(module: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedRopeError, match=reason):
        RopeDescriptor.from_module(module)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rotary_dim": 7}, "positive even"),
        ({"inv_freq": torch.ones(4)}, "torch.float64"),
        ({"inv_freq": torch.ones(3, dtype=torch.float64)}, "one angle a pair"),
        ({"inv_freq": torch.full((4,), torch.inf, dtype=torch.float64)}, "not finite"),
    ],
)
def test_a_descriptor_is_checked_when_it_is_made(changes: dict[str, Any], reason: str) -> None:
    good: dict[str, Any] = {"inv_freq": torch.ones(4, dtype=torch.float64), "rotary_dim": 8, "interleaved": False}
    with pytest.raises(ValueError, match=reason):
        RopeDescriptor(**(good | changes))
