"""Table 4: what others do with the same edited history: llama.cpp's `--cache-reuse`, and LangChain's context editing.

llama.cpp shifts KV too, slot by slot, where a chunk of the new prompt occurs later in the old one. LangChain's
middleware decides what to clear and sends the result as a plain request, so it is a policy on a stock server here.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import httpx

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.conversation import Settings
from leyline_agent.bench.demo import DEMO_POLICY
from leyline_agent.bench.replay import hit_rate
from leyline_agent.bench.run import ArmRun, OnArmTurn, ignore, run_arm
from leyline_agent.bench.script import Script, write_script
from leyline_agent.bench.target import Target, free_port
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError, MissingDependencyError, ServerError
from leyline_agent.history import tool_uses
from leyline_agent.policies import TruncateToolOutputs
from leyline_agent.policy import FunctionPolicy, Policy
from leyline_agent.traces import Trace

_KEEP_TURNS = 3
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class EmptyToolOutputs(Policy):
    """Leave nothing of tool outputs older than `keep_turns` turns, as a pure deletion: for comparison, not for use.

    Cache: one splice with an empty R per output that ages out.
    """

    keep_turns: int = _KEEP_TURNS

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        old = [use for use in tool_uses(turn.messages) if use.result_at is not None and use.age >= self.keep_turns]
        return [MessageEdit(use.result_at, "", reason="deletion") for use in old if use.result_at is not None]


def policies() -> dict[str, Policy]:
    """The edits that are compared: deletion, replacement by a marker, and the demo's cut."""
    return {
        "delete": EmptyToolOutputs(),
        "marker": TruncateToolOutputs(keep_turns=_KEEP_TURNS, max_chars=0),
        "cut": DEMO_POLICY,
    }


def langchain_policy(keep: int = _KEEP_TURNS) -> Policy:
    """LangChain's ClearToolUsesEdit on every turn. Raises MissingDependencyError without LangChain."""
    try:
        from langchain.agents.middleware import ClearToolUsesEdit
        from langchain_core.messages import convert_to_messages
    except ImportError as err:
        raise MissingDependencyError("LangChain is not installed; pip install 'leyline-agent[langgraph]'") from err
    edit = ClearToolUsesEdit(trigger=0, keep=keep)

    def context_editing(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        theirs = convert_to_messages([{**message, "content": message.get("content") or ""} for message in messages])
        edit.apply(theirs, count_tokens=len)
        return [
            {**message, "content": edited.content} if message["role"] == "tool" else message
            for message, edited in zip(messages, theirs, strict=True)
        ]

    return FunctionPolicy(context_editing)


@dataclass(frozen=True, slots=True)
class LlamaTarget(Target):
    """A llama-server with one slot."""

    def flush(self) -> None:
        """Fill the slot with something that shares nothing with what comes."""
        body = {"prompt": "0 1 2 3 4 5 6 7 8 9 " * 8, "n_predict": 1, "cache_prompt": False}
        try:
            httpx.post(f"{self.url}/completion", json=body, timeout=120.0, trust_env=False).raise_for_status()
        except httpx.HTTPError as err:
            raise ServerError(f"llama-server at {self.url} does not answer: {err}") from err

    def pool_used(self) -> int | None:
        return None


@contextmanager
def llama_server(binary: str, gguf: Path | None, *, cache_reuse: int, context: int = 8192) -> Iterator[LlamaTarget]:
    """A llama-server on a free port, with the chat template of our own SmolLM2 folder, so that prompts are the same.

    `cache_reuse` is the smallest chunk it moves, in tokens; 0 turns that off. Raises MissingDependencyError without the
    program, ServerError if it does not start.
    """
    program = shutil.which(binary)
    if program is None:
        raise MissingDependencyError(
            f"llama.cpp, since there is no program {binary}; docs/benchmarks.md says how to get it"
        )
    if gguf is None:
        raise MissingDependencyError("llama.cpp, since --gguf names no model for it")
    if not gguf.is_file():
        raise ConfigError(f"no model at {gguf}; name a GGUF file")
    template = files("leyline_agent.integrations.sglang.launch") / "chatml_tools.jinja"
    url = f"http://127.0.0.1:{(port := free_port())}"
    with as_file(template) as file, tempfile.TemporaryFile() as log:
        command = [program, "--model", str(gguf), "--port", str(port), "--ctx-size", str(context), "--parallel", "1"]
        command += ["--cache-reuse", str(cache_reuse), "--cache-ram", "0", "--threads", "1", "--no-webui"]
        command += ["--jinja", "--chat-template-file", str(file)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(url, process)
            yield LlamaTarget(url, gguf.name, {"attention_backend": "ggml", "cache_reuse": cache_reuse})
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"llama-server ended with code {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise ServerError(f"llama-server is not ready after {_START_TIMEOUT_S:.0f} s")


def compare(
    target: Target,
    engine: str,
    arms: Sequence[Arm],
    trace: Trace,
    chosen: Mapping[str, Policy],
    *,
    output_tokens: int = 4,
    max_turns: int | None = None,
    on_turn: OnArmTurn = ignore,
) -> list[dict[str, Any]]:
    """One row for each policy and arm on one server."""
    settings = Settings(target.base_url, target.model, output_tokens)
    out = []
    for name, policy in chosen.items():
        script = write_script(policy, trace, max_turns=max_turns)
        for arm in arms:
            run = run_arm(target, arm, [script], settings, on_turn=on_turn)
            out.append(_row(engine, name, script, run))
    return out


def _row(engine: str, policy: str, script: Script, run: ArmRun) -> dict[str, Any]:
    edited = run.median("ttft_ms", lambda turn: turn.edited)
    return {
        "engine": engine,
        "policy": policy,
        "arm": run.arm.value,
        "turns": len(run.turns),
        "edited_turns": sum(step.edited for step in script.steps),
        "prompt_tokens": run.total("prompt_tokens"),
        "reused_tokens": run.total("cached_tokens") + run.total("amortized_tokens"),
        "prefilled_tokens": run.total("all_prefilled"),
        "hit_rate": round(hit_rate([tuple(run.turns)]), 4),
        "ttft_ms_edited": round(edited, 1) if edited is not None else None,
        "errors": [turn.error for turn in run.turns if turn.error],
    }
