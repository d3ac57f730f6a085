"""An agent that debugs: the model is asked and its tool calls are done, until tests pass or its steps are used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import openai

from leyline_agent.bench.tasks import tools
from leyline_agent.bench.tasks.task import TESTS, Task
from leyline_agent.bench.tasks.workspace import Workspace

SYSTEM = (
    "You debug Python programs. You work in a folder through tools; nothing outside it is reachable, and there is no "
    "network. Find the bug, fix it in the code, and run the tests; you are done when all tests pass. Tests cannot be "
    "changed. Call one tool at a time, and say briefly what you expect of it."
)
_NUDGE = f"Call a tool. You are done when `run_tests` shows that all tests in {TESTS} pass."
_MAX_NUDGES = 3


@dataclass(slots=True)
class Episode:
    """One attempt at one task: how it ended, and what it cost. `cached_tokens` are exact; `prefilled` were computed."""

    task: str
    policy: str
    seed: int
    solved: bool = False
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    amortized_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    wall_s: float = 0.0
    ended: str = ""

    def to_json(self) -> dict[str, Any]:
        """All of it by name."""
        return {**asdict(self), "wall_s": round(self.wall_s, 2)}


Ask = Callable[[list[dict[str, Any]]], Any]
"""Gives a chat completion for messages."""


@dataclass(slots=True)
class Agent:
    """Plays one episode. `ask` is the model, `max_steps` how many times it is asked at most."""

    ask: Ask
    max_steps: int = 50

    def solve(self, workspace: Workspace, episode: Episode) -> list[dict[str, Any]]:
        """Work until the tests pass; fills the episode and returns the history, which is never edited here."""
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": _assignment(workspace.task)},
        ]
        nudges = 0
        started = time.perf_counter()
        while not episode.ended and episode.steps < self.max_steps:
            episode.steps += 1
            try:
                answer = self.ask(messages)
            except openai.OpenAIError as err:
                episode.ended = f"{type(err).__name__}: {err}"
                break
            _count(episode, answer)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            if not message.tool_calls:
                nudges += 1
                if nudges > _MAX_NUDGES:
                    episode.ended = "it stopped calling tools"
                messages.append({"role": "user", "content": _NUDGE})
                continue
            for one in message.tool_calls:
                result = tools.call(workspace, one.function.name, one.function.arguments)
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
            if any(one.function.name in ("run_tests", "edit") for one in message.tool_calls):
                episode.solved = workspace.run_tests().exit_code == 0
                episode.ended = "solved" if episode.solved else ""
        if not episode.ended:
            episode.ended = f"{self.max_steps} steps"
        if not episode.solved:  # a fix by a shell command counts as well
            episode.solved = workspace.run_tests().exit_code == 0
        episode.wall_s = time.perf_counter() - started
        return messages


def _assignment(task: Task) -> str:
    files = "\n".join(f"- {path}{' (read-only)' if task.is_readonly(path) else ''}" for path in task.files())
    return f"The tests in {TESTS} fail. Fix the program so that they pass. The files:\n{files}"


def _count(episode: Episode, answer: Any) -> None:
    usage = getattr(answer, "usage", None)
    report = getattr(answer, "leyline", None)
    if usage is not None:
        episode.completion_tokens += usage.completion_tokens or 0
    if report is not None:
        episode.prompt_tokens += report.prompt_tokens
        episode.cached_tokens += report.exact
        episode.amortized_tokens += report.amortized
        episode.prefilled_tokens += report.prefilled
    elif usage is not None:
        cached = getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0
        episode.prompt_tokens += usage.prompt_tokens
        episode.cached_tokens += cached
        episode.prefilled_tokens += usage.prompt_tokens - cached
