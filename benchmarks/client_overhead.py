"""What Leyline costs on the client's side: a call of the drop-in client beside the same call of the stock one.

    python benchmarks/client_overhead.py MODEL_FOLDER [--rounds 59] [--json benchmarks/results/client_overhead.json]

The committed result is that of ~/.cache/leyline/smollm2-135m, which `leyline serve --cpu` makes.

The history grows as an agent's does. In every measured turn one tool output ages out of the policy's window, so that
each of them renders, tokenizes, diffs, makes a directive with tens of thousands of tokens behind it, and sends the
prompt as token ids beside the messages. Answers come from memory, in the SDK's own HTTP library: no server is needed,
and none is measured.
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
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai

from leyline_agent.config import Config
from leyline_agent.integrations.openai import OpenAI
from leyline_agent.policies import TruncateToolOutputs
from leyline_agent.renderers import TemplateRenderer
from leyline_agent.report import TurnReport
from leyline_agent.wire import SpliceRequest

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


class CannedServer:
    """Answers every chat completion with what `prepare` made, in no time worth speaking of."""

    def __init__(self) -> None:
        self.library = import_module("httpx" if int(openai.__version__.split(".")[0]) < 3 else "httpx2")
        self.answer = b""
        self.asked = b""

    def prepare(self, prompt_ids: list[int] | None) -> None:
        """The next answer: 30 sampled tokens, a report, and the prompt's ids if the request will not bring them."""
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Let me look."}}
        usage = {"prompt_tokens": 1, "completion_tokens": 30, "total_tokens": 31}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        ids = {"output_ids": [[11] * 30], **({"input_ids": prompt_ids} if prompt_ids else {})}
        report = TurnReport(marks=((100, 7, 1),)).to_wire()
        self.answer = json.dumps({**head, "sglext": ids, "metadata": {"leyline": report}}).encode()

    def client(self, kind: type[openai.OpenAI], **options: Any) -> Any:
        http_client = self.library.Client(transport=self.library.MockTransport(self._respond))
        return kind(base_url="http://canned/v1", api_key="none", http_client=http_client, **options)

    def _respond(self, request: Any) -> Any:
        if request.url.path == "/leyline/ready":
            return self.library.Response(200, json={"ready": True})
        self.asked = request.content
        return self.library.Response(200, content=self.answer, headers={"content-type": "application/json"})


def measure(folder: Path, rounds: int, words: int, measured: int) -> dict[str, Any]:
    server, renderer = CannedServer(), TemplateRenderer.from_folder(folder)
    policy = TruncateToolOutputs(keep_turns=rounds - measured)
    ours = server.client(OpenAI, policy=policy, renderer=renderer, config=Config(verify_renderer=False))
    stock = server.client(openai.OpenAI)
    messages = history(rounds, words)
    _, cold = timed(lambda: TemplateRenderer.from_folder(folder).render(messages))  # once a process, not once a turn
    calls: list[dict[str, float]] = []
    tokens = directives = 0
    for turn in range(rounds + 1):
        sent = messages[: 2 + 2 * turn]
        is_edited = turn > rounds - measured
        server.prepare(None if is_edited else renderer.render(sent).token_ids.tolist())
        completion, times = timed(lambda sent=sent: ours.chat.completions.create(model="m", messages=sent))  # type: ignore[misc]
        if is_edited:
            body = json.loads(server.asked)
            directives += len(SpliceRequest.parse(body["custom_params"]["leyline"]).directives)
            tokens = len(body["input_ids"])
            server.prepare(None)
            _, of_stock = timed(lambda sent=sent: stock.chat.completions.create(model="m", messages=sent))  # type: ignore[misc]
            overhead = {f"overhead_{clock}": times[clock] - of_stock[clock] for clock in times}
            calls.append(
                {**times, **overhead, "stock_wall": of_stock["wall"], "plan": 1000 * completion.leyline.plan_s}
            )
    return {
        "messages": len(messages),
        "prompt_tokens": tokens,
        "measured_turns": len(calls),
        "directives": directives,
        "load_tokenizer_and_render_all_ms": {clock: round(ms, 2) for clock, ms in cold.items()},
        **{f"{name}_ms": spread([call[name] for call in calls]) for name in calls[0]},
    }


def timed(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `call` returns, and how long it took in ms: by the wall clock, and of this thread's processor time."""
    wall, cpu = time.perf_counter(), time.thread_time()
    result = call()
    return result, {"wall": 1000 * (time.perf_counter() - wall), "cpu": 1000 * (time.thread_time() - cpu)}


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
        "openai": version("openai"),
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
