"""The SGLang backend on a GPU: start-up proof, splice against a hand-made one, and what an edited turn costs.

    python benchmarks/backend_gpu.py probe  --model NAME=FOLDER ...        several at once, as memory allows
    python benchmarks/backend_gpu.py truth  --model NAME=FOLDER ...        the same, and splices against hand-made ones
    python benchmarks/backend_gpu.py turns  --model NAME=FOLDER ...        time to first token of edited turns
    python benchmarks/backend_gpu.py stock  --model NAME=FOLDER            throughput beside a stock server, paired

Folders hold a config.json (and weights, or pass `--load-format dummy`). Whatever follows `--` goes to SGLang. Results
are printed, and written to the file named by `--json`. Needs httpx beside SGLang; the prompts are random token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from leyline_agent.directives import Directive, DirectiveSet
from leyline_agent.wire import KEY, SpliceRequest

_MAIN = "leyline_agent.integrations.sglang.launch.server_main"
_VOCAB = int(os.environ.get("BENCH_VOCAB", "30000"))  # random ids below it exist in every model but tiny ones


class Server:
    """One SGLang server on this machine."""

    def __init__(
        self,
        name: str,
        folder: str,
        port: int,
        sglang_args: Sequence[str],
        *,
        leyline: bool = True,
        hand_made: HandMade | None = None,
    ) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        ours = ["--radix-cache-backend", "leyline"] if leyline else []
        self.log = Path(tempfile.gettempdir()) / f"{name}-{port}.log"
        plugins = ["leyline_cpu", *(["leyline"] if leyline else []), *(["hand_made"] if hand_made else [])]
        env = os.environ | {"SGLANG_PLUGINS": ",".join(plugins)}
        if hand_made is not None:
            env |= hand_made.environment(Path(folder) / "config.json")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", _MAIN, "--model-path", folder, "--port", str(port)),
                    *("--skip-tokenizer-init", *ours, *sglang_args),
                ],
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=self.url, timeout=300.0, trust_env=False)

    def wait_ready(self, timeout_s: float = 400.0) -> float:
        """Seconds until it answered. Raises RuntimeError with the end of its log if it did not."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if self.process.poll() is not None:
                break
            try:
                if self.http.get("/health", timeout=5.0).status_code == 200:
                    return time.monotonic() - started
            except httpx.HTTPError:
                pass
            time.sleep(1.0)
        raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-4000:]}")

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/leyline/status").json())

    def generate(
        self, ids: Sequence[int], max_new_tokens: int, wire: SpliceRequest | None = None, **fields: Any
    ) -> dict[str, Any]:
        """A greedy answer of exactly `max_new_tokens`; `seconds` is the time until it was there."""
        params: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        if wire is not None:
            params["custom_params"] = wire.custom_params()
        started = time.perf_counter()
        response = self.http.post("/generate", json={"input_ids": list(ids), "sampling_params": params} | fields)
        seconds = time.perf_counter() - started
        response.raise_for_status()
        return {**response.json(), "seconds": seconds}

    def prepare(self, ids: Sequence[int], wire: SpliceRequest, **fields: Any) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        response = self.http.post("/leyline/prepare", json={"input_ids": list(ids), KEY: wire.encode()} | fields)
        response.raise_for_status()
        return dict(response.json()["report"]), time.perf_counter() - started

    def stop(self) -> None:
        """End the server with all its processes."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(8)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def servers(models: Sequence[tuple[str, str]], args: Sequence[str], **kwargs: Any) -> Iterator[list[Server]]:
    """Servers of several models, started at the same time and stopped at the end."""
    with ExitStack() as stack:
        started = []
        for number, (name, folder) in enumerate(models):
            server = Server(name, folder, 31000 + number, args, **kwargs)
            stack.callback(server.stop)
            started.append(server)
        for server in started:
            print(f"{server.name}: up after {server.wait_ready():.0f} s", flush=True)
        yield started


# ---- a turn ----------------------------------------------------------------------------------------------------------


class Talk:
    """A base in the server's cache, and the edit of it that all arms share. The base has its marker elsewhere too."""

    def __init__(self, server: Server, base_len: int, at: int, removed_len: int, seed: int, salt: str) -> None:
        self.rng = random.Random(seed)
        self.server, self.salt = server, salt
        prompt, marker = self.tokens(base_len), self.tokens(12)
        prompt[at // 2 : at // 2 + len(marker)] = marker
        answer = server.generate(prompt, 1, SpliceRequest(), cache_salt=salt)
        self.base = [*prompt, *answer["output_ids"]]
        self.edit = DirectiveSet.of(Directive(at, at + removed_len, tuple(marker)))
        self.new = self.tokens(48)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, _VOCAB) for _ in range(count)]

    @property
    def wire(self) -> SpliceRequest:
        return SpliceRequest.build(self.base, self.edit)

    @property
    def edited(self) -> list[int]:
        return [*self.edit.apply(self.base), *self.new]


# ---- probe -----------------------------------------------------------------------------------------------------------


def probe(models: Sequence[tuple[str, str]], args: Sequence[str]) -> list[dict[str, Any]]:
    """The start-up proof of each model, and one edited turn."""
    with servers(models, args) as running:
        return [_probe_row(server) for server in running]


def _probe_row(server: Server) -> dict[str, Any]:
    status = server.status()
    talk = Talk(server, 2000, 500, 300, 1, "probe-turn")
    report = server.generate(talk.edited, 4, talk.wire, cache_salt=talk.salt)["meta_info"][KEY]
    row = {key: status[key] for key in ("amortize", "reason", "kernel", "rope", "probe", "tree_core")}
    row |= {"model": server.name, "fallbacks": report["fallbacks"]}
    row["turn"] = {key: report[key] for key in ("exact", "amortized", "rotated", "prefilled", "splice_s")}
    print(json.dumps(row), flush=True)
    return row


# ---- truth -----------------------------------------------------------------------------------------------------------

_HAND_MADE = """
\"\"\"Splices the pool by hand, with frequencies worked out from the model's config, while the file FLAG exists.

FLAG holds "nearest" or "stochastic": how new keys are rounded. Both are right to one rounding; how far two such splices
are apart in log-probs is the scale on which a third one is judged.
\"\"\"
import json, math, os, zlib
import torch

FLAG = os.environ["LEYLINE_HAND_MADE_FLAG"]


def frequencies(config):
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    width = width or config["hidden_size"] // config["num_attention_heads"]
    theta, scaling = config["rope_theta"], config.get("rope_scaling") or {}
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "yarn":
        old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        turn = lambda beta: width * math.log(old / (beta * 2 * math.pi)) / (2 * math.log(theta))
        low = max(math.floor(turn(scaling["beta_fast"])), 0)
        high = min(math.ceil(turn(scaling["beta_slow"])), width - 1)
        ramp = [min(max((i - low) / max(high - low, 1e-3), 0), 1) for i in range(width // 2)]
        return [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp)]
    if kind == "llama3":
        old, out = scaling["original_max_position_embeddings"], []
        for f in plain:
            wave, low, high = 2 * math.pi / f, scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = min(max((old / wave - low) / (high - low), 0), 1)
            out.append((1 - smooth) * f / scaling["factor"] + smooth * f)
        return out
    return plain


def rounded(new, dtype, how):
    if dtype != torch.bfloat16 or how == "nearest":
        return new.to(dtype)
    bits = new.contiguous().view(torch.int32)
    up = torch.randint(0, 1 << 16, bits.shape, device=bits.device, dtype=torch.int32)
    return ((bits + up) >> 16 << 16).view(torch.float32).to(dtype)


def copy_rotate(original, rotator, src, dst, shifts):
    if not os.path.exists(FLAG):
        return original(rotator, src, dst, shifts)
    how = open(FLAG).read()
    config = json.load(open(os.environ["LEYLINE_HAND_MADE_CONFIG"]))
    angle = shifts.double()[:, None] * torch.tensor(frequencies(config), dtype=torch.float64, device=src.device)[None]
    cos, sin = angle.cos()[:, None].float(), angle.sin()[:, None].float()
    differing = total = worst = 0
    for number, layer in enumerate(rotator.layers):
        keys, mla = layer.keys, layer.values is None
        row = keys[src].clone()
        start = config["kv_lora_rank"] if mla else 0
        part = row[..., start:].float()
        first, second = (part[..., 0::2], part[..., 1::2]) if mla else part.chunk(2, -1)
        new = (first * cos - second * sin, second * cos + first * sin)
        size = torch.hypot(first, second)
        new, size = (
            torch.stack(two, -1).flatten(-2) if mla else torch.cat(two, -1) for two in (new, (size, size))
        )
        row[..., start:] = rounded(new, row.dtype, how)
        ours = torch.empty_like(row)
        rotator.rotated_keys(number, src, shifts, ours)
        differing += int((ours != row).sum())
        total += row[..., start:].numel()
        # in units of the largest rounding that a rotated pair of this length can have
        rounding = torch.finfo(row.dtype).eps * size.clamp_min(1e-30) / 2
        worst = max(worst, float(((ours[..., start:].float() - new).abs() / rounding).max()))
        keys[dst] = row
        if not mla:
            layer.values[dst] = layer.values[src]
    with open(FLAG + ".used", "w") as file:
        json.dump({"keys_differing": differing / total, "worst_error_in_roundings": worst}, file)


def strong_weights(result, model, *args, **kwargs):
    \"\"\"In place of SGLang's dummy weights, too small for the context to matter: weights of variance 1 / width.\"\"\"
    for name, weight in model.state_dict().items():
        if not torch.is_floating_point(weight):
            continue
        generator = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
        if weight.ndim < 2:
            weight.fill_(0.0 if "bias" in name else 1.0)
        else:
            gain = 1.0 if "embed" in name else GAIN * weight.shape[-1] ** -0.5
            weight.normal_(0.0, gain, generator=generator)
    return result


GAIN = float(os.environ.get("BENCH_GAIN", "0"))


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("leyline_agent.kernels.pool.PoolRotator.copy_rotate", copy_rotate, HookType.AROUND)
    if GAIN:
        HookRegistry.register(
            "sglang.srt.model_loader.loader.initialize_dummy_weights", strong_weights, HookType.AFTER
        )
"""


class HandMade:
    """The hand-made splice as a plugin of SGLang, as any package can bring one; the file `flag` switches it on."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder)
        self.flag = self.root / "flag"
        (self.root / "leyline_hand_made.py").write_text(_HAND_MADE)
        info = self.root / "leyline_hand_made-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leyline-hand-made\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nhand_made = leyline_hand_made:register\n")

    def environment(self, config: Path) -> dict[str, str]:
        """What the server's processes need to find the plugin, and the plugin to find the model's config."""
        return {
            "PYTHONPATH": f"{self.root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "LEYLINE_HAND_MADE_FLAG": str(self.flag),
            "LEYLINE_HAND_MADE_CONFIG": str(config),
        }

    @contextmanager
    def active(self, rounding: str) -> Iterator[dict[str, float]]:
        """While this lasts, splices are made by hand. Yields what is filled in at its end: how our keys compare.

        Raises AssertionError if there was no splice.
        """
        comparison: dict[str, float] = {}
        self.flag.write_text(rounding)
        yield comparison
        self.flag.unlink()
        used = Path(f"{self.flag}.used")
        assert used.exists(), "the hand-made splice was not used"
        comparison.update(json.loads(used.read_text()))
        used.unlink()


def truth(models: Sequence[tuple[str, str]], args: Sequence[str]) -> list[dict[str, Any]]:
    """Next-token log-probs after our splice and after hand-made ones, and for scale after a fresh prefill.

    The hand-made ones round to the nearest number and stochastically: two splices that are both right to one rounding.
    With dummy weights the context hardly matters; BENCH_GAIN=1.5 in the environment gives random weights that use it.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        hand_made = HandMade(folder)
        with servers(models, args, hand_made=hand_made) as running:
            for server in running:
                rows.append(_probe_row(server))
                rows.extend(_truth_row(server, hand_made, seed) for seed in range(4))
    return rows


def _truth_row(server: Server, hand_made: HandMade, seed: int) -> dict[str, Any]:
    answers = {}
    keys: dict[str, float] = {}
    for arm in ("ours", "again", "nearest", "stochastic", "prefill"):
        talk = Talk(server, 3000, 400, 700, seed, f"truth-{seed}-{arm}")
        by_hand = hand_made.active(arm) if arm in ("nearest", "stochastic") else nullcontext({})
        with by_hand as comparison:
            answers[arm] = server.generate(
                talk.edited,
                1,
                SpliceRequest() if arm == "prefill" else talk.wire,
                cache_salt=talk.salt,
                return_logprob=True,
                top_logprobs_num=200,
            )
        keys = comparison if arm == "nearest" else keys
        assert not answers[arm]["meta_info"][KEY]["fallbacks"], answers[arm]["meta_info"][KEY]
    row: dict[str, Any] = {"model": server.name, "seed": seed, **keys}
    row |= {f"ours_vs_{arm}": _gap(answers["ours"], answers[arm]) for arm in answers if arm != "ours"}
    row["nearest_vs_stochastic"] = _gap(answers["nearest"], answers["stochastic"])
    row["nearest_vs_prefill"] = _gap(answers["nearest"], answers["prefill"])
    print(json.dumps(row), flush=True)
    return row


def _gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of a log-prob among the tokens that both answers list."""
    a, b = ({entry[1]: entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]} for answer in (one, other))
    return max(abs(a[token] - b[token]) for token in a.keys() & b.keys())


# ---- turns -----------------------------------------------------------------------------------------------------------


def turns(
    models: Sequence[tuple[str, str]], args: Sequence[str], repeats: int, base_lens: Sequence[int]
) -> list[dict[str, Any]]:
    """Time to first token of edited turns."""
    with servers(models, args) as running:
        return [_turn_cost(server, base_len, repeats) for server in running for base_len in base_lens]


def _turn_cost(server: Server, base_len: int, repeats: int) -> dict[str, Any]:
    """Time to first token of one and the same next turn: unedited, and edited in four ways. Paired, shuffled."""
    seconds: dict[str, list[float]] = {}
    splice_ms: list[float] = []
    for repeat in range(-2, repeats):  # the first two compile and warm up
        arms = ["unedited", "prepared", "reused", "amortize", "reprefill"]
        random.Random(repeat).shuffle(arms)
        for arm in arms:
            talk = Talk(server, base_len, 512, 1024, 7 * repeat, f"turn-{base_len}-{repeat}-{arm}")
            took, report = _arm(server, talk, arm)
            if repeat >= 0:
                seconds.setdefault(arm, []).append(took)
                if arm == "amortize":
                    splice_ms.append(report["splice_s"] * 1e3)
    row: dict[str, Any] = {"model": server.name, "base_len": base_len, "edit": "tokens 512 to 1536 become 12"}
    row |= {arm: _spread(values) for arm, values in sorted(seconds.items())}
    row["splice_ms"] = _spread(splice_ms)
    print(json.dumps(row), flush=True)
    return row


def _arm(server: Server, talk: Talk, arm: str) -> tuple[float, dict[str, Any]]:
    if arm == "unedited":
        answer = server.generate([*talk.base, *talk.new], 1, SpliceRequest(), cache_salt=talk.salt)
    elif arm == "reprefill":
        answer = server.generate(talk.edited, 1, SpliceRequest(), cache_salt=talk.salt)
    elif arm == "amortize":
        answer = server.generate(talk.edited, 1, talk.wire, cache_salt=talk.salt)
    elif arm == "reused":
        copied = talk.wire.model_copy(update={"reuse_replacements": True})
        answer = server.generate(talk.edited, 1, copied, cache_salt=talk.salt)
    else:
        ahead, _ = server.prepare(talk.edited[: -len(talk.new)], talk.wire, cache_salt=talk.salt)
        continued = SpliceRequest(marks=[tuple(mark) for mark in ahead["marks"]])
        answer = server.generate(talk.edited, 1, continued, cache_salt=talk.salt)
    report = answer["meta_info"][KEY]
    assert not report["fallbacks"], report
    return answer["seconds"], report


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[-1 - len(ordered) // 10],
        "runs": len(ordered),
    }


# ---- stock -----------------------------------------------------------------------------------------------------------


def stock(models: Sequence[tuple[str, str]], args: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Ordinary requests on a server with the plugin, and on a stock server beside it."""
    ((name, folder),) = models
    both = Server(name, folder, 31000, args), Server(f"{name}-stock", folder, 31001, args, leyline=False)
    with ExitStack() as stack:
        for server in both:
            stack.callback(server.stop)
        for server in both:
            print(f"{server.name}: up after {server.wait_ready():.0f} s", flush=True)
        return [_against_stock(*both, repeats)]


def _against_stock(ours: Server, plain: Server, repeats: int) -> dict[str, Any]:
    """Throughput of ordinary requests with the plugin and without; the two servers of one GPU take turns."""
    rates: dict[str, list[float]] = {"leyline": [], "stock": []}
    for repeat in range(-1, repeats):
        order = [("leyline", ours), ("stock", plain)]
        for label, server in order[:: 1 if repeat % 2 else -1]:
            rate = _throughput(server, repeat)
            if repeat >= 0:
                rates[label].append(rate)
    ratios = [a / b for a, b in zip(rates["leyline"], rates["stock"], strict=True)]
    row = {"model": ours.name, "throughput_ratio": _spread(ratios)}
    row |= {f"{label}_requests_per_s": _spread(values) for label, values in rates.items()}
    print(json.dumps(row), flush=True)
    return row


def _throughput(server: Server, seed: int) -> float:
    """Requests a second: 64 of 512 tokens in and 64 out, 16 at a time, half of each prompt shared by all."""
    rng = random.Random(seed)
    shared = [rng.randrange(10, _VOCAB) for _ in range(256)]
    prompts = [shared + [rng.randrange(10, _VOCAB) for _ in range(256)] for _ in range(64)]
    started = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda ids: server.generate(ids, 64), prompts))
    return len(prompts) / (time.perf_counter() - started)


# ---- main ------------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What the numbers belong to."""
    import torch

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = os.environ.get("LEYLINE_COMMIT", "")
    names = ("leyline-agent", "sglang", "torch", "triton")
    return {
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in names},
        "commit": commit,
    }


def main() -> None:
    """Run one of the tables."""
    own, _, sglang_args = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["probe", "truth", "turns", "stock"])
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--base-lens", default="4096,16384", help="tokens, by commas; for turns")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(own.split())
    models = [tuple(model.split("=", 1)) for model in options.model]
    args = sglang_args.split()
    tables: dict[str, Any] = {
        "probe": lambda: probe(models, args),
        "truth": lambda: truth(models, args),
        "turns": lambda: turns(models, args, options.repeats, [int(length) for length in options.base_lens.split(",")]),
        "stock": lambda: stock(models, args, options.repeats),
    }
    rows = tables[options.table]()
    result = {"table": options.table, "environment": environment(), "sglang_args": args, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
