"""Tables 1 and 2 on one GPU, with random weights: start a server for each model, measure, stop it.

    python benchmarks/h200.py NAME=FOLDER [NAME=FOLDER ...] --tokenizer FOLDER --out FOLDER --budget-s 500 [-- SGLANG]

A model's FOLDER holds its config.json; --tokenizer one with tokenizer.json, tokenizer_config.json and
chat_template.jinja, which every model is given (ids past its vocabulary never occur in a prompt). The budget is for
all of it, the starts included, and is shared between the models; what does not fit is left out, and the result says so.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from leyline_agent.bench.target import free_port
from leyline_agent.integrations.sglang.launch import ServerArgs, ServerProcess, ServerSpec, check_launch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SERVER = {
    "--load-format": "dummy",
    "--attention-backend": "triton",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--context-length": "40960",
    "--mem-fraction-static": "0.6",
    "--cuda-graph-max-bs-decode": "16",
}
REPLAY_SHARE = 0.75  # of the time that is left when the server is up; the rest is for break-even


def main() -> None:
    words = sys.argv[1:]
    ours, theirs = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=500.0)
    parser.add_argument("--suffix", default="nvidia-h200")
    parser.add_argument("--cpu", action="store_true", help="try the script itself, without a GPU")
    parser.add_argument("--concurrency", default="1:2,4:4,8:8,16:16")
    parser.add_argument("--arms", default="reprefill,amortize,amortize+prepare,none")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--shape", nargs="*", default=[], help="more options for `leyline bench replay`, without --")
    options = parser.parse_args(ours)
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    for number, model in enumerate(options.models):
        share = (deadline - time.monotonic()) / (len(options.models) - number)
        name, _, folder = model.partition("=")
        measure(name, Path(folder), theirs, options, time.monotonic() + share)


def measure(name: str, folder: Path, theirs: list[str], options: argparse.Namespace, until: float) -> None:
    with tempfile.TemporaryDirectory() as made:
        model = Path(made) / name
        shutil.copytree(folder, model)
        for file in TOKENIZER_FILES:
            shutil.copy(options.tokenizer / file, model / file)
        args = ServerArgs(
            ("--model-path", str(model), "--served-model-name", name, "--port", str(free_port()), *theirs)
        )
        defaults = {key: value for key, value in SERVER.items() if not options.cpu or key == "--load-format"}
        spec = ServerSpec(args.with_defaults(defaults), cpu=options.cpu)
        check_launch(spec)
        log = options.out / f"server-{name}.log"
        started = time.monotonic()
        try:
            with ServerProcess(spec, log=log) as server:
                server.wait_ready(timeout_s=until - started)
                print(f"{name}: ready after {time.monotonic() - started:.0f} s", flush=True)
                bench(name, spec.url, options, until)
        finally:
            shorten(log)


def bench(name: str, url: str, options: argparse.Namespace, until: float) -> None:
    stem = f"{name}-{options.suffix}"
    left = until - time.monotonic()
    leyline(
        "replay", "--base-url", url, "--arms", options.arms, "--concurrency", options.concurrency, "--repetitions", "9",
        "--budget-s", str(REPLAY_SHARE * left - 30), *(f"--{word}" for word in options.shape),
        "--json", str(options.out / f"replay-{stem}.json"), "--turns-file", str(options.out / f"turns-{stem}.jsonl"),
    )  # fmt: skip
    leyline(
        "breakeven", "--base-url", url, "--lengths", options.lengths, "--positions", "0,0.5,0.9",
        "--replacements", "16,256", "--repetitions", "2", "--budget-s", str(until - time.monotonic() - 15),
        "--json", str(options.out / f"breakeven-{stem}.json"),
        "--turns-file", str(options.out / f"breakeven-turns-{stem}.jsonl"),
    )  # fmt: skip


def leyline(*words: str) -> None:
    print("leyline bench", *words, flush=True)
    done = subprocess.run([sys.executable, "-P", "-m", "leyline_agent.cli", "bench", *words], check=False)
    if done.returncode:
        print(f"ended with code {done.returncode}", flush=True)


def shorten(log: Path, lines: int = 200) -> None:
    """Keep the end of a server's log, without the line of all its settings."""
    kept = [line for line in log.read_text(errors="replace").splitlines() if len(line) < 2000][-lines:]
    log.write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    main()
