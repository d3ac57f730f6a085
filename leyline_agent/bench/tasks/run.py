"""Every task with every policy and seed, and what the attempts say together."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from leyline_agent.bench.stats import bootstrap, mcnemar, wilson
from leyline_agent.bench.tasks.agent import Agent, Episode
from leyline_agent.bench.tasks.sandbox import Sandbox
from leyline_agent.bench.tasks.task import Task
from leyline_agent.bench.tasks.tools import descriptions
from leyline_agent.bench.tasks.workspace import Workspace
from leyline_agent.integrations.openai import OpenAI
from leyline_agent.policy import Policy

_MEANS = (
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "amortized_tokens",
    "prefilled_tokens",
    "completion_tokens",
    "wall_s",
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The model: any OpenAI-compatible server. With Leyline on it, edits are spliced; without, they are only sent."""

    base_url: str
    model: str
    api_key: str = "none"
    temperature: float = 0.6
    max_tokens: int = 2048
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is tried. `policies` by the spec that made them; the first is the baseline of the paired tests."""

    tasks: Sequence[Task]
    policies: Mapping[str, Policy]
    seeds: Sequence[int]
    max_steps: int = 50
    parallel: int = 1
    sandbox: Sandbox = field(default_factory=Sandbox)
    histories: Path | None = None
    """A folder for the histories, a trace file for each task and seed, or None to keep none."""

    def cells(self) -> list[tuple[Task, str, int]]:
        """All attempts, seeds outermost, so that what is cut short is still paired."""
        return [(task, spec, seed) for seed, task, spec in product(self.seeds, self.tasks, self.policies)]


def run(matrix: Matrix, endpoint: Endpoint, *, on_episode: Callable[[Episode], None] = lambda _: None) -> list[Episode]:
    """Play all attempts, `parallel` at a time. Raises UnsupportedError first if commands cannot be isolated."""
    matrix.sandbox.check()
    with ThreadPoolExecutor(max_workers=matrix.parallel, thread_name_prefix="episode") as pool:
        played = pool.map(lambda cell: _attempt(matrix, endpoint, *cell), matrix.cells())
        return list(_reported(played, on_episode))


def _reported(played: Iterator[Episode], on_episode: Callable[[Episode], None]) -> Iterator[Episode]:
    for episode in played:
        on_episode(episode)
        yield episode


def _attempt(matrix: Matrix, endpoint: Endpoint, task: Task, spec: str, seed: int) -> Episode:
    episode = Episode(task.name, spec, seed)
    name = f"{task.name}-{seed}-{spec}"
    with (
        Workspace.of(task, matrix.sandbox) as workspace,
        OpenAI(
            policy=matrix.policies[spec],
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            timeout=endpoint.timeout_s,
        ) as client,
        client.session(name) as session,
    ):

        def ask(messages: list[dict[str, Any]]) -> Any:
            return session.chat.completions.create(
                model=endpoint.model,
                messages=messages,  # type: ignore[arg-type]
                tools=descriptions(),  # type: ignore[arg-type]
                temperature=endpoint.temperature,
                max_tokens=endpoint.max_tokens,
                seed=seed,
            )

        messages = Agent(ask, matrix.max_steps).solve(workspace, episode)
    if matrix.histories is not None:
        matrix.histories.mkdir(parents=True, exist_ok=True)
        trace = {"id": name, "messages": messages, "tools": descriptions(), "episode": episode.to_json()}
        with (matrix.histories / f"{task.name}-{seed}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(trace) + "\n")
    return episode


def rows(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """One row a policy: solve rate with its interval, tests against the first policy, what an attempt cost."""
    specs = list(dict.fromkeys(episode.policy for episode in episodes))
    return [_row(spec, specs[0], episodes) for spec in specs]


def _row(spec: str, baseline: str, episodes: Sequence[Episode]) -> dict[str, Any]:
    ours = [episode for episode in episodes if episode.policy == spec]
    solved = sum(episode.solved for episode in ours)
    row = {
        "policy": spec,
        "attempts": len(ours),
        "solved": solved,
        "solve_rate": wilson(solved, len(ours)).to_json(),
        **{name: round(statistics.mean(getattr(episode, name) for episode in ours), 2) for name in _MEANS},
        "by_task": {
            task: [sum(e.solved for e in ours if e.task == task), sum(e.task == task for e in ours)]
            for task in sorted({episode.task for episode in ours})
        },
        "ended": {how: sum(e.ended == how for e in ours) for how in sorted({episode.ended for episode in ours})},
    }
    if spec != baseline:
        row["against"] = _paired(ours, [episode for episode in episodes if episode.policy == baseline], baseline)
    return row


def _paired(ours: Sequence[Episode], theirs: Sequence[Episode], baseline: str) -> dict[str, Any]:
    """Attempts at the same task with the same seed; the interval draws whole tasks, whose seeds hang together."""
    other = {(episode.task, episode.seed): episode for episode in theirs}
    pairs = [(e, other[e.task, e.seed]) for e in ours if (e.task, e.seed) in other]
    wins = sum(a.solved and not b.solved for a, b in pairs)
    losses = sum(b.solved and not a.solved for a, b in pairs)
    tasks = sorted({a.task for a, _ in pairs})
    by_task = [[(a, b) for a, b in pairs if a.task == task] for task in tasks]

    def points(drawn: Sequence[Sequence[tuple[Episode, Episode]]]) -> float:
        flat = [pair for some in drawn for pair in some]
        return 100 * sum(a.solved - b.solved for a, b in flat) / len(flat) if flat else 0.0

    return {
        "baseline": baseline,
        "pairs": len(pairs),
        "wins": wins,
        "losses": losses,
        "ties": len(pairs) - wins - losses,
        "mcnemar_p": round(mcnemar(wins, losses), 4),
        "solve_rate_points": bootstrap(by_task, points).to_json(),
    }
