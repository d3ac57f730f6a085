"""`leyline bench replay`: table 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leyline_agent.cli.bench.options import (
    BaseUrl,
    Budget,
    JsonFile,
    ModelPath,
    PlotFile,
    TurnsFile,
    draw,
    need_leyline,
    parse_concurrency,
    vars_of,
)  # fmt: skip
from leyline_agent.cli.console import err, out
from leyline_agent.cli.progress import progress_bar
from leyline_agent.cli.target import target_of

if TYPE_CHECKING:
    from leyline_agent.bench.script import Script
    from leyline_agent.bench.target import Target
    from leyline_agent.bench.workload import Shape
    from leyline_agent.policy import Policy


def replay(
    base_url: BaseUrl = None,
    model_path: ModelPath = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Replay these files of traces instead of generated ones.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="What to edit; for generated sessions drop_superseded edits on every turn.")
    ] = "drop_superseded",
    arms: Annotated[str, typer.Option(help="Arms, by commas.")] = "none,reprefill,forget,amortize,amortize+prepare",
    concurrency: Annotated[str, typer.Option(help="Sessions at once, by commas; N:S plays only S sessions.")] = "1",
    repetitions: Annotated[int, typer.Option(min=1)] = 1,
    output_tokens: Annotated[int, typer.Option(min=1, help="Exact length of every answer.")] = 16,
    sessions: Annotated[int, typer.Option(min=1)] = 16,
    turns: Annotated[int | None, typer.Option(min=2, help="Turns a session; 6 for generated ones, else all.")] = None,
    system_tokens: Annotated[int, typer.Option(min=1)] = 4096,
    turn_tokens: Annotated[int, typer.Option(min=4)] = 2048,
    seed: int = 0,
    warm_up: bool = True,
    budget_s: Budget = None,
    json_file: JsonFile = None,
    turns_file: TurnsFile = None,
    plot: PlotFile = None,
) -> None:
    """Table 1: histories replayed through every arm, at every concurrency, repeated and paired."""
    from leyline_agent.bench.arms import parse_arms
    from leyline_agent.bench.conversation import Settings
    from leyline_agent.bench.replay import Sweep, rows, run_sweep, warm_up_all
    from leyline_agent.bench.results import check_writable, document, write_json, write_turns
    from leyline_agent.bench.tables import sweep_table
    from leyline_agent.bench.workload import Shape
    from leyline_agent.policies.factory import from_spec

    check_writable(json_file, turns_file, plot)
    chosen, limits = from_spec(policy), parse_concurrency(concurrency)
    sweep = Sweep(parse_arms(arms), tuple(limits), repetitions, budget_s, {c: n for c, n in limits.items() if n})
    shape = Shape(sessions, turns or 6, system_tokens, turn_tokens, seed=seed)
    with target_of(base_url, model_path) as target:
        need_leyline(target, any(arm.has_leyline for arm in sweep.arms))
        scripts = _scripts(target, chosen, trace, shape, turns, sessions)
        settings = Settings(target.base_url, target.model, output_tokens)
        with progress_bar() as progress:
            task = progress.add_task("warming up", total=None)
            if warm_up:
                warm_up_all(target, sweep, scripts, settings)
            total = sum(len(s.steps) for b in sweep.blocks() for s in sweep.scripts(scripts, b.concurrency))
            progress.update(task, total=total)
            result = run_sweep(
                target,
                sweep,
                scripts,
                settings,
                on_block=lambda b: progress.update(task, description=f"C={b.concurrency} {b.arm} #{b.repetition + 1}"),
                on_turn=lambda _arm, _turn: progress.advance(task),
            )
    table = rows(result, sweep)
    out.print(sweep_table(table, f"{target.name}, {chosen.name}, {len(scripts)} sessions"))
    if result.left_out:
        planned = len(list(sweep.blocks()))
        err.print(f"[yellow]left out for lack of time:[/] {len(result.left_out)} of {planned} runs", soft_wrap=True)
    config = {
        "policy": policy,
        "workload": [str(file.name) for file in trace] if trace else vars_of(shape),
        "arms": list(sweep.arms),
        "concurrencies": limits,
        "repetitions": repetitions,
        "output_tokens": output_tokens,
        "warm_up": warm_up,
    }
    if json_file is not None:
        left = [vars_of(block) for block in result.left_out]
        write_json(json_file, document("replay", config, table, target, left_out=left))
    if turns_file is not None:
        runs = result.runs
        facts = [{"arm": run.arm, "concurrency": run.concurrency, "repetition": run.repetition} for run in runs]
        pairs = zip(facts, runs, strict=True)
        write_turns(turns_file, [(fact, turn) for fact, run in pairs for turn in run.turns])
    draw(plot, document("replay", config, table, target))
    if any(row["errors"] for row in table):
        raise typer.Exit(1)


def _scripts(
    target: Target, policy: Policy, files: Sequence[Path] | None, shape: Shape, turns: int | None, sessions: int
) -> list[Script]:
    from leyline_agent.bench.script import write_script
    from leyline_agent.bench.workload import FIRST, generate
    from leyline_agent.traces import read_traces

    if not files:
        traces = generate(shape, target.count_tokens)
        return [write_script(policy, one, first=FIRST, max_turns=turns) for one in traces]
    found = [trace for file in files for trace in read_traces(file)][:sessions]
    scripts = [write_script(policy, one, max_turns=turns) for one in found]
    return [script for script in scripts if script.steps]
