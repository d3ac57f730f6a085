"""What Leyline costs on the client's side: the time of `plan` and `commit` for a long history, tokenization included.

    python benchmarks/client_overhead.py MODEL_FOLDER [--rounds 60] [--json benchmarks/results/client_overhead.json]

The history grows as an agent's does. In every measured turn one tool output ages out of the policy's window, so that
each of them renders, diffs and makes a directive with tens of thousands of tokens behind it. No server is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from leyline_agent.manager import ContextManager
from leyline_agent.policies import TruncateToolOutputs
from leyline_agent.renderers import TemplateRenderer
from leyline_agent.report import TurnReport

WORDS = ("def", "return", "import", "self", "value", "result", "error", "test", "file", "path", "line", "list", "class")


def tool_output(random_numbers: random.Random, words: int) -> str:
    lines = (
        " ".join(random_numbers.choices(WORDS, k=9)) + f" = {random_numbers.randint(0, 9999)}"
        for _ in range(words // 9)
    )
    return "\n".join(lines)


def history(rounds: int, words: int) -> list[dict[str, Any]]:
    random_numbers = random.Random(7)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful engineer. " * 20},
        {"role": "user", "content": "Find out why the tests fail and mend it."},
    ]
    for number in range(rounds):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": f'{{"n": {number}}}'}}
        messages.append({"role": "assistant", "content": f"Let me look at part {number}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": tool_output(random_numbers, words)})
    return messages


def measure(folder: Path, rounds: int, words: int, measured: int) -> dict[str, Any]:
    session = ContextManager(
        TruncateToolOutputs(keep_turns=rounds - measured), TemplateRenderer.from_folder(folder)
    ).session("bench")
    messages = history(rounds, words)
    wall_ms: list[float] = []
    cpu_ms: list[float] = []
    tokens = directives = 0
    for turn in range(rounds + 1):
        watch = Stopwatch()
        plan = session.plan(messages[: 2 + 2 * turn])
        watch.pause()
        prompt = plan.input_ids
        if prompt is None:  # nothing edited yet: the server would render, and report the ids
            assert session.renderer is not None
            prompt = session.renderer.render(plan.messages).token_ids.tolist()
        watch.go_on()
        session.commit(plan, prompt_ids=prompt, output_ids=[[11] * 30], report=TurnReport(marks=((100, 7, 1),)))
        watch.pause()
        if turn > rounds - measured:
            wall_ms.append(1000 * watch.wall_s)
            cpu_ms.append(1000 * watch.cpu_s)
            directives += len(plan.directives)
            tokens = len(prompt)
    return {
        "messages": len(messages),
        "prompt_tokens": tokens,
        "measured_turns": len(wall_ms),
        "directives": directives,
        "plan_and_commit_wall_ms": spread(wall_ms),
        "plan_and_commit_cpu_ms": spread(cpu_ms),
    }


class Stopwatch:
    """Wall clock and this thread's processor time, over several stretches."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.go_on()

    def go_on(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def pause(self) -> None:
        self.wall_s += time.perf_counter() - self._wall
        self.cpu_s += time.thread_time() - self._cpu


def spread(times_ms: list[float]) -> dict[str, float]:
    return {
        "min": round(min(times_ms), 2),
        "p50": round(statistics.median(times_ms), 2),
        "max": round(max(times_ms), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="model folder with tokenizer.json and a chat template")
    parser.add_argument("--rounds", type=int, default=59)
    parser.add_argument("--words", type=int, default=540, help="words in a tool output")
    parser.add_argument("--measured", type=int, default=15, help="turns measured, the last ones")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.folder, arguments.rounds, arguments.words, arguments.measured)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result["environment"] = {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
        "tokenizer": arguments.folder.name,
        "commit": commit.stdout.strip() or "none",
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
