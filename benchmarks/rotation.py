"""How fast the rotation kernels are, as a share of what plain copying reaches on the same GPU.

    python benchmarks/rotation.py --out benchmarks/results          # truth tests, then all numbers: about a minute
    python benchmarks/rotation.py --out DIR --variants              # also other tile sizes, and parts left out
    python benchmarks/rotation.py --table FILE.json                 # the tables of docs/kernels.md

The truth tests run first, on this GPU; if one fails, nothing is timed. Every operation is captured in a CUDA graph
that walks through disjoint sets of slots, so that no set is still in the L2 cache when its turn comes again. A
bandwidth counts each byte once read and once written: of the rotated columns in place, of whole rows for a copy.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from leyline_agent.kernels.pool import LayerKV, PoolRotator  # noqa: E402
from leyline_agent.kernels.rope import RopeDescriptor  # noqa: E402

REPEATS = 15
Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layout:
    """A model's pool, with all that its rows hold."""

    name: str
    layers: int
    heads: int
    dim: int
    rotary_dim: int
    offset: int
    value_dim: int | None
    interleaved: bool
    pool_slots: int

    def plane_bytes(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * self.rotary_dim * dtype.itemsize

    def row_bytes(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.dim + (self.value_dim or 0)) * dtype.itemsize


MLA = Layout("DeepSeek-V2-Lite (MLA)", 27, 1, 576, 64, 512, None, interleaved=True, pool_slots=147456)
GQA = Layout("Llama-3.1-8B (GQA)", 32, 8, 128, 128, 0, 128, interleaved=False, pool_slots=73728)


def pool_of(layout: Layout, dtype: torch.dtype) -> list[LayerKV]:
    half = layout.rotary_dim // 2
    rope = RopeDescriptor(
        10000.0 ** (-torch.arange(half, dtype=torch.float64) / half), layout.rotary_dim, layout.interleaved
    )

    def rows(dim: int) -> Tensor:
        shape = (layout.pool_slots, layout.heads, dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)

    return [
        LayerKV(rows(layout.dim), None if layout.value_dim is None else rows(layout.value_dim), rope, layout.offset)
        for _ in range(layout.layers)
    ]


def slot_sets(layout: Layout, count: int, order: str, sets: int) -> list[Tensor]:
    """Disjoint sets of `count` slots: "contiguous" runs, or a random sample of the pool, "sorted" or "random"."""
    if order == "contiguous":
        return list(torch.arange(1, 1 + sets * count, device="cuda").reshape(sets, count))
    drawn = torch.randperm(layout.pool_slots - 1, device="cuda")[: sets * count].reshape(sets, count) + 1
    return [part.sort().values if order == "sorted" else part for part in drawn]


# --- timing -----------------------------------------------------------------------------------------------------------


def time_us(run: Callable[[], object], calls: int, before: Callable[[], object] | None = None) -> dict[str, float]:
    """Median, least and greatest time of one call in microseconds; `run` makes `calls` of them."""
    run()
    torch.cuda.synchronize()
    samples = []
    for _ in range(REPEATS):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / calls)
    return spread(samples)


def spread(samples: list[float]) -> dict[str, float]:
    return {"median_us": statistics.median(samples), "min_us": min(samples), "max_us": max(samples)}


def captured(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """All `calls` as one CUDA graph."""
    calls[0]()  # compiles, and builds the tables
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def host_us(call: Callable[[], None]) -> dict[str, float]:
    """Time that the host spends on one call, the GPU running behind."""
    samples = []
    for _ in range(200):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    return spread(samples)


def copy_bandwidth() -> dict[str, float]:
    """What torch's device-to-device copy of 4 GB reaches, in GB/s, counting bytes read and written."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    timed = time_us(lambda: target.copy_(source), 1)
    return {"gb_per_s": 2 * source.nbytes / timed["median_us"] / 1e3, **timed}


class Report:
    """Collects numbers, prints each as it comes."""

    def __init__(self, copy_gb_per_s: float) -> None:
        self.copy = copy_gb_per_s
        self.cases: list[dict[str, Any]] = []

    def add(self, moved_bytes: int, timed: dict[str, float], **what: Any) -> dict[str, Any]:
        speed = moved_bytes / timed["median_us"] / 1e3
        case = {**what, "bytes": moved_bytes, **timed, "gb_per_s": speed, "share_of_copy": speed / self.copy}
        self.cases.append(case)
        label = " ".join(str(value) for value in what.values())
        print(
            f"{label:86} {timed['median_us']:10.1f} us ({timed['min_us']:.1f} to {timed['max_us']:.1f}) "
            f"{speed:7.0f} GB/s {100 * speed / self.copy:5.1f} %",
            flush=True,
        )
        return case


# --- what is timed ----------------------------------------------------------------------------------------------------


def calls_of(rotator: PoolRotator, operation: str, slots: list[Tensor], shifts: Tensor) -> Sequence[Callable[[], None]]:
    """One call for each set of slots (in place) or each pair of sets (copy)."""
    if operation == "in place":
        return [partial(rotator.rotate_inplace, part, shifts) for part in slots]
    return [partial(rotator.copy_rotate, a, b, shifts) for a, b in zip(slots[::2], slots[1::2], strict=True)]


def measure(
    report: Report, layout: Layout, rotator: PoolRotator, operation: str, count: int, order: str, sets: int, **more: Any
) -> dict[str, Any]:
    dtype = rotator.layers[0].keys.dtype
    shifts = torch.full((count,), -300, dtype=torch.int32, device="cuda")
    if more.get("shifts") == "all distinct":
        shifts = torch.randint(-131072, 131072, (count,), device="cuda", dtype=torch.int32)
    calls = calls_of(rotator, operation, slot_sets(layout, count, order, sets), shifts)
    per_slot = layout.plane_bytes(dtype) if operation == "in place" else layout.row_bytes(dtype)

    def all_calls() -> None:
        for call in calls:
            call()

    run = captured(calls) if rotator.form == "triton" else all_calls
    what: dict[str, Any] = {"layout": layout.name, "dtype": str(dtype).removeprefix("torch."), "form": rotator.form}
    what |= {"operation": operation, "slots": count, "order": order, **more}
    return report.add(2 * per_slot * count, time_us(run, len(calls)), **what)


def sets_for(layout: Layout, count: int, operation: str) -> int:
    """As many disjoint sets as fit, at most 400: together several times the L2. A copy needs pairs of them."""
    fit = min(400, (layout.pool_slots - 1) // count)
    return fit // 2 * 2 if operation == "copy" else fit


def main_cases(report: Report, layout: Layout, layers: list[LayerKV]) -> None:
    triton, per_layer = PoolRotator(layers), PoolRotator(layers, form="torch")
    assert triton.form == "triton", triton.form_reason
    for operation in ("in place", "copy"):
        for order in ("contiguous", "sorted", "random"):
            sets = sets_for(layout, 32768, operation)
            fast = measure(report, layout, triton, operation, 32768, order, sets)
            slow = measure(report, layout, per_layer, operation, 32768, order, sets)
            fast["times_faster_than_torch"] = slow["median_us"] / fast["median_us"]
        for count in (64, 256, 1024, 4096, 16384):
            sets = sets_for(layout, count, operation)
            fast = measure(report, layout, triton, operation, count, "sorted", sets)
            slow = measure(report, layout, per_layer, operation, count, "sorted", min(sets, 8))
            fast["times_faster_than_torch"] = slow["median_us"] / fast["median_us"]
    measure(report, layout, triton, "in place", 32768, "sorted", sets_for(layout, 32768, ""), shifts="all distinct")


def short_span(report: Report, layout: Layout, layers: list[LayerKV]) -> None:
    """256 slots as a server meets them: one launch, as a graph of its own with cold and warm cache, and without."""
    rotator = PoolRotator(layers)
    (slots,) = slot_sets(layout, 256, "sorted", 1)
    shifts = torch.full((256,), -300, dtype=torch.int32, device="cuda")
    call = partial(rotator.rotate_inplace, slots, shifts)
    replay, replays = captured([call]), captured([call] * 50)
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # several times the L2
    moved = 2 * 256 * layout.plane_bytes(layers[0].keys.dtype)
    for name, timed in (
        ("graph replay, cache cold", time_us(replay, 1, before=flush.zero_)),
        ("in a graph of 50, cache warm", time_us(replays, 50)),
        ("host's time, no graph", host_us(call)),
    ):
        report.add(moved, timed, layout=layout.name, operation=name, slots=256)


def other_dtypes(report: Report, layout: Layout) -> None:
    for dtype in (torch.float16, torch.float32, torch.float8_e4m3fn):
        rotator = PoolRotator(pool_of(layout, dtype), allow_fp8=True)
        for operation in ("in place", "copy"):
            measure(report, layout, rotator, operation, 32768, "sorted", sets_for(layout, 32768, operation))
        del rotator
        torch.cuda.empty_cache()


# --- variants: which tiles, and what bounds the time ------------------------------------------------------------------


def variants(report: Report, layout: Layout, layers: list[LayerKV], count: int) -> None:
    """Other tile sizes, and the same memory traffic without any arithmetic (the ceiling of the access pattern)."""
    from leyline_agent.kernels.triton_form import LARGE, Table, Tiles, TritonForm, launch

    (table,) = TritonForm(layers).tables
    # No arithmetic: all is pieces, of the rotated columns (copied onto themselves) or of whole rows.
    (bare_planes,) = TritonForm([LayerKV(layer.keys[..., layer.rotated], None, None) for layer in layers]).tables
    (bare_rows,) = TritonForm([LayerKV(layer.keys, layer.values, None) for layer in layers]).tables
    shifts = torch.full((count,), -300, dtype=torch.int32, device="cuda")
    in_place, whole_rows = (2 * count * width(layers[0].keys.dtype) for width in (layout.plane_bytes, layout.row_bytes))

    def add(variant: str, order: str, table: Table, pairs: Pairs, tiles: Tiles, moved: int, *, pieces: bool) -> None:
        calls = [partial(launch, table, a, b, shifts, tiles=tiles, pieces=pieces) for a, b in pairs]
        timed = time_us(captured(calls), len(calls))
        report.add(moved, timed, layout=layout.name, variant=variant, slots=count, order=order, **asdict(tiles))

    for order in ("sorted", "random"):
        slots = slot_sets(layout, count, order, sets_for(layout, count, "copy"))
        to_themselves: Pairs = list(zip(slots, slots, strict=True))
        to_others: Pairs = list(zip(slots[::2], slots[1::2], strict=True))
        for chunk, planes, pairs, stages, warps in PLANE_VARIANTS:
            tiles = Tiles(chunk, planes, pairs, stages, 16384, warps)
            add("in place", order, table, to_themselves, tiles, in_place, pieces=False)
        for piece_bytes in (4096, 16384):
            tiles = replace(LARGE, piece_bytes=piece_bytes)
            add("in place, no arithmetic", order, bare_planes, to_themselves, tiles, in_place, pieces=True)
        for piece_bytes, warps in PIECE_VARIANTS:
            tiles = replace(LARGE, piece_bytes=piece_bytes, num_warps=warps)
            add("copy", order, table, to_others, tiles, whole_rows, pieces=True)
            add("copy, no arithmetic", order, bare_rows, to_others, tiles, whole_rows, pieces=True)


# chunk, planes at a time, pairs, stages, warps
PLANE_VARIANTS = [
    (2, 2, 512, 1, 4), (4, 4, 512, 1, 4), (9, 1, 512, 3, 4), (9, 1, 1024, 1, 4), (9, 1, 1024, 2, 4), (9, 1, 1024, 3, 4),
    (27, 1, 1024, 3, 4), (10, 2, 512, 3, 4), (9, 1, 2048, 3, 8),
]  # fmt: skip
PIECE_VARIANTS = [(4096, 4), (16384, 4), (32768, 8)]


# --- running ----------------------------------------------------------------------------------------------------------


def truth_tests() -> str:
    """Run the GPU truth tests; returns pytest's last line, exits if one failed."""
    folder = ROOT / "tests/kernels"
    # Above this folder conftest.py wants SGLang; the kernels do not.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--confcutdir={folder}", str(folder)]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "8"]  # nearly all of the time is spent compiling
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    if done.returncode != 0:
        print(done.stdout[-8000:], done.stderr[-2000:])
        sys.exit(f"truth tests failed, so nothing is timed: {summary}")
    return summary


def result_of(report: Report, tests: str, copy: dict[str, float]) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "source": source(),
        "tests": tests,
        "repeats": REPEATS,
        "copy": copy,
        "cases": report.cases,
    }


def machine() -> dict[str, Any]:
    import triton

    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "l2_bytes": gpu.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def source() -> dict[str, str | None]:
    """The commit, and a hash of the kernels' files, which says the same without a repository."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kernels").glob("*.py")):
        digest.update(path.read_bytes())
    return {"commit": git.stdout.strip() if git.returncode == 0 else None, "kernels_sha256": digest.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--variants", action="store_true", help="also time other tile sizes and bare memory traffic")
    parser.add_argument("--only-variants", action="store_true", help="nothing but the variants")
    parser.add_argument("--table", type=Path, help="print the tables of a JSON file, and time nothing")
    args = parser.parse_args()
    if args.table:
        print("\n".join(tables(json.loads(args.table.read_text()))))
        return
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    os.environ.setdefault("PYTHONPATH", str(ROOT / "src"))
    tests = truth_tests()
    print(tests, flush=True)
    torch.manual_seed(0)
    copy = copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"copy bandwidth {copy['gb_per_s']:.0f} GB/s", flush=True)
    report = Report(copy["gb_per_s"])
    for layout in (MLA, GQA):
        layers = pool_of(layout, torch.bfloat16)
        if not args.only_variants:
            main_cases(report, layout, layers)
            short_span(report, layout, layers)
        if args.variants or args.only_variants:
            for count in (32768, 4096, 256) if layout is MLA else (32768,):
                variants(report, layout, layers, count)
        del layers
        torch.cuda.empty_cache()
    if not args.only_variants:
        other_dtypes(report, MLA)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"rotation-{machine()['gpu'].lower().replace(' ', '-')}{'-variants' if args.only_variants else ''}.json"
        (args.out / name).write_text(json.dumps(result_of(report, tests, copy), indent=1) + "\n")


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Markdown tables of one result file."""
    yield f"{result['machine']['gpu']}, copy bandwidth {result['copy']['gb_per_s']:.0f} GB/s"
    yield ""
    yield "| pool | operation | slots | order | time, us (least to greatest) | GB/s | of copy | per-layer torch takes |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in result["cases"]:
        if "variant" in case or case.get("form") == "torch":
            continue
        order = ", ".join(str(case[key]) for key in ("order", "shifts") if key in case)
        pool = case["layout"] + (f", {case['dtype']}" if case.get("dtype", "bfloat16") != "bfloat16" else "")
        times = f"{case['times_faster_than_torch']:.0f} times as long" if "times_faster_than_torch" in case else ""
        yield f"| {pool} | {case['operation']} | {case['slots']:,} | {order} | {timing_cells(case)} | {times} |"
    yield ""
    yield "| pool | variant | slots | order | chunk | planes | pairs | stages | piece | warps | us | GB/s | of copy |"
    yield "|" + "---|" * 13
    for case in result["cases"]:
        if "variant" in case:
            tile = " | ".join(
                str(case[key]) for key in ("chunk", "planes", "pairs", "stages", "piece_bytes", "num_warps")
            )
            what = f"{case['layout']} | {case['variant']} | {case['slots']:,} | {case['order']}"
            yield f"| {what} | {tile} | {timing_cells(case)} |"


def timing_cells(case: dict[str, Any]) -> str:
    times = f"{case['median_us']:,.1f} ({case['min_us']:,.1f} to {case['max_us']:,.1f})"
    return f"{times} | {case['gb_per_s']:,.0f} | {100 * case['share_of_copy']:.0f} %"


if __name__ == "__main__":
    main()
