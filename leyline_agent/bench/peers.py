"""Table 4: what others do with the same edited history: llama.cpp's `--cache-reuse`, and LangChain's context editing.

llama.cpp moves KV too, where a chunk of the new prompt occurs later in its slot's old one: behind a deletion it does,
behind a replacement nothing is found. LangChain's middleware decides what to clear and sends the result as a plain
request, so it is a policy on a stock server here.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any

import httpx

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.conversation import Settings
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.run import ArmRun, OnArmTurn, ignore, run_arm
from leyline_agent.bench.script import Script, write_script
from leyline_agent.bench.stats import percentile
from leyline_agent.bench.target import Target, free_port
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError, MissingDependencyError, ServerError
from leyline_agent.history import tool_uses
from leyline_agent.policies import TruncateToolOutputs
from leyline_agent.policy import FunctionPolicy, Policy
from leyline_agent.traces import Trace

OUTPUT_TOKENS = 8
_KEEP_TURNS = 3
_WARM_UP_TURNS = 2
_SHARES = (0, 50, 100)
_START_TIMEOUT_S = 120.0

SGLANG = "SGLang"
LLAMA = "llama.cpp"
LANGCHAIN = "LangChain"


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
    """The edits that are compared: deletion, and replacement by a marker."""
    return {"delete": EmptyToolOutputs(), "marker": TruncateToolOutputs(keep_turns=_KEEP_TURNS, max_chars=0)}


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
            _wait(url, process, log)
            yield LlamaTarget(url, gguf.name, {"attention_backend": "ggml", "cache_reuse": cache_reuse})
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            said = " ".join(log.read().decode(errors="replace").split())[-300:]
            raise ServerError(f"llama-server ended with code {process.returncode} before it was ready: {said}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise ServerError(f"llama-server is not ready after {_START_TIMEOUT_S:.0f} s")


@dataclass(frozen=True, slots=True)
class Way:
    """An engine, and how it serves edits. The answers of its `exact` way are what its other ways are held to."""

    engine: str
    name: str
    arm: Arm
    exact: bool = False


STOCK = Way(SGLANG, "re-prefill", Arm.REPREFILL, exact=True)
AMORTIZE = Way(SGLANG, "AMORTIZE", Arm.AMORTIZE)
FORGET = Way(SGLANG, "FORGET", Arm.FORGET)


def llama_way(cache_reuse: int) -> Way:
    """llama.cpp with the smallest chunk that it moves; 0 is its prefix cache alone."""
    name = f"cache-reuse {cache_reuse}" if cache_reuse else "re-prefill"
    return Way(LLAMA, name, Arm.REPREFILL, exact=not cache_reuse)


@dataclass(frozen=True, slots=True)
class Played:
    """One history under one policy, served in one way."""

    way: Way
    policy: str
    run: ArmRun


def play(
    target: Target,
    ways: Sequence[Way],
    trace: Trace,
    chosen: Mapping[str, Policy],
    *,
    output_tokens: int = OUTPUT_TOKENS,
    max_turns: int | None = None,
    on_turn: OnArmTurn = ignore,
) -> list[Played]:
    """Every policy in every way on one server, after two turns that warm it up."""
    settings = Settings(target.base_url, target.model, output_tokens)
    scripts = {name: write_script(policy, trace, max_turns=max_turns) for name, policy in chosen.items()}
    for script in list(scripts.values())[:1]:
        run_arm(target, ways[0].arm, [Script("warm-up", script.steps[:_WARM_UP_TURNS], script.tools)], settings)
    return [
        Played(way, name, run_arm(target, way.arm, [script], settings, on_turn=on_turn))
        for name, script in scripts.items()
        for way in ways
    ]


def rows(played: Sequence[Played]) -> list[dict[str, Any]]:
    """One row each, edit by edit, with how many answers were those of the same engine after a fresh prefill."""
    exact = {(one.way.engine, one.policy): one.run for one in played if one.way.exact}
    edits = list(dict.fromkeys(one.policy for one in played))
    ordered = sorted(played, key=lambda one: edits.index(one.policy))
    return [_row(one, exact.get((one.way.engine, one.policy))) for one in ordered]


def _row(one: Played, exact: ArmRun | None) -> dict[str, Any]:
    run = one.run
    edited = [turn for turn in run.turns if turn.edited and not turn.error]
    ttft = [turn.ttft_ms for turn in edited]
    return {
        "engine": one.way.engine,
        "way": one.way.name,
        "policy": one.policy,
        "arm": one.way.arm.value,
        "turns": len(run.turns),
        "edited_turns": len(edited),
        "prompt_tokens": run.total("prompt_tokens"),
        "reused_tokens": run.total("cached_tokens") + run.total("amortized_tokens"),
        "prefilled_tokens": run.total("all_prefilled"),
        "hit_rate": round(run.hit_rate, 4),
        "prefilled_tokens_edited": sum(turn.all_prefilled for turn in edited),
        "ttft_ms_edited": {f"p{share}": round(percentile(ttft, share / 100), 1) for share in (0, 50, 100)}
        if ttft
        else None,
        "same_answers": _same(edited, exact) if exact is not None else None,
        "errors": [turn.error for turn in run.turns if turn.error],
    }


def _same(edited: Sequence[MeasuredTurn], exact: ArmRun) -> int:
    """How many edited turns were answered word for word as in the exact run."""
    answers = {turn.turn: turn.output_text for turn in exact.turns if not turn.error}
    return sum(answers.get(turn.turn) == turn.output_text for turn in edited)


def engine_versions(llama: str | None, gguf: Path | None) -> dict[str, str]:
    """The versions of what was compared, for what is here: llama.cpp, its model file, LangChain."""
    found = {}
    if llama is not None and gguf is not None and (program := shutil.which(llama)):
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)
        found[LLAMA] = next((line for line in (said.stderr + said.stdout).splitlines() if "version" in line), "?")
        found["gguf"] = gguf.name
    with contextlib.suppress(PackageNotFoundError):
        found[LANGCHAIN] = version("langchain")
    return found
