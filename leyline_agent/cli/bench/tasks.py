"""`leyline bench tasks`: table 3."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leyline_agent.cli.bench.options import JsonFile
from leyline_agent.cli.console import out
from leyline_agent.cli.progress import progress_bar
from leyline_agent.errors import ConfigError

if TYPE_CHECKING:
    from leyline_agent.bench.tasks.agent import Episode


def tasks(
    base_url: Annotated[
        str, typer.Option(help="Any OpenAI-compatible endpoint; with Leyline on it, edits are spliced.")
    ],
    model: Annotated[str, typer.Option(help="The model to ask for.")],
    folder: Annotated[
        Path, typer.Option("--tasks", help="A folder of tasks in the layout of debug-gym's mini_nightmare.")
    ] = Path("benchmarks/tasks"),
    task: Annotated[list[str] | None, typer.Option(help="Only this task; may be given again.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies, the first one the baseline; default keep_all and truncation.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 4,
    max_steps: Annotated[int, typer.Option(min=1)] = 50,
    temperature: float = 0.6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 2048,
    parallel: Annotated[int, typer.Option(min=1, help="Attempts at once.")] = 1,
    isolation: Annotated[
        str, typer.Option(help="namespaces, or none: only in a container or virtual machine made for this.")
    ] = "namespaces",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", show_default=False)] = "none",
    histories: Annotated[Path | None, typer.Option(help="Keep every attempt's history in this folder.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Table 3: an agent debugs programs under several policies; solve rates, and what they cost.

    The model's commands run without network, without this machine's files, and with limits of time and output.
    """
    from leyline_agent.bench.results import check_writable, document, write_json
    from leyline_agent.bench.tables import tasks_table
    from leyline_agent.bench.tasks.run import Endpoint, Matrix, rows, run
    from leyline_agent.bench.tasks.sandbox import Isolation, Sandbox
    from leyline_agent.bench.tasks.task import read_tasks
    from leyline_agent.policies.factory import from_spec

    check_writable(json_file)
    if isolation not in list(Isolation):
        raise ConfigError(f"--isolation is {isolation!r}; it is one of {', '.join(Isolation)}")
    specs = policy or ["keep_all", "truncate_tool_outputs:keep_turns=2,max_chars=200"]
    matrix = Matrix(
        tasks=read_tasks(folder, task or ()),
        policies={spec: from_spec(spec) for spec in specs},
        seeds=range(seeds),
        max_steps=max_steps,
        parallel=parallel,
        sandbox=Sandbox(Isolation(isolation)),
        histories=histories,
    )
    with progress_bar("attempts") as progress:
        bar = progress.add_task("debugging", total=len(matrix.cells()))
        solved = 0

        def on_episode(episode: Episode) -> None:
            nonlocal solved
            solved += episode.solved
            progress.update(bar, advance=1, description=f"{solved} solved")

        endpoint = Endpoint(base_url, model, api_key, temperature, max_tokens)
        episodes = run(matrix, endpoint, on_episode=on_episode)
    table = rows(episodes)
    out.print(tasks_table(table, f"{model}: {len(matrix.tasks)} tasks, {seeds} seeds"))
    if json_file is not None:
        config = {
            "model": model,
            "tasks": [one.name for one in matrix.tasks],
            "policies": specs,
            "seeds": seeds,
            "max_steps": max_steps,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "parallel": parallel,
            "isolation": isolation,
        }
        result = document("tasks", config, table, episodes=[episode.to_json() for episode in episodes])
        write_json(json_file, result)
