"""`leyline bench`: the tables of docs/benchmarks.md, one command each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from leyline_agent.cli.console import err, out
from leyline_agent.cli.progress import progress_bar
from leyline_agent.cli.target import target_of
from leyline_agent.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from leyline_agent.bench.script import Script
    from leyline_agent.bench.target import Target
    from leyline_agent.bench.workload import Shape
    from leyline_agent.policy import Policy

app = typer.Typer(help="Measure: replay, break-even, debugging tasks, peers.", no_args_is_help=True)

BaseUrl = Annotated[str | None, typer.Option(help="A running server; without it, one with SmolLM2 on the CPU.")]
ModelPath = Annotated[Path | None, typer.Option(help="Start the CPU server with this model instead of SmolLM2.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
PlotFile = Annotated[Path | None, typer.Option(help="Draw the result into this file.")]
Budget = Annotated[float | None, typer.Option(help="Seconds; what would not end in time is left out, and said.")]


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="bench")


@app.command("replay")
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
    turns_file: Annotated[Path | None, typer.Option(help="Write every measured turn to this file.")] = None,
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
        _need_leyline(target, any(arm.has_leyline for arm in sweep.arms))
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
        err.print(f"[yellow]left out for lack of time:[/] {', '.join(map(str, result.left_out))}", soft_wrap=True)
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


@app.command("breakeven")
def breakeven(
    base_url: BaseUrl = None,
    model_path: ModelPath = None,
    lengths: Annotated[str, typer.Option(help="Cached prompt lengths in tokens, by commas.")] = "1024,2048",
    positions: Annotated[str, typer.Option(help="Where the edit is, 0 to 1, by commas.")] = "0,0.25,0.5,0.75,1",
    replacements: Annotated[str, typer.Option(help="Lengths of R in tokens, by commas.")] = "16,256",
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    output_tokens: Annotated[int, typer.Option(min=1)] = 4,
    budget_s: Budget = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Table 2: where a splice beats re-prefill: edit position x prompt length x length of R."""
    from leyline_agent.bench import breakeven as table2
    from leyline_agent.bench.conversation import Settings
    from leyline_agent.bench.results import check_writable, document, write_json
    from leyline_agent.bench.tables import breakeven_table

    check_writable(json_file, plot)
    wanted = list(table2.cases(_numbers(lengths, int), _numbers(positions, float), _numbers(replacements, int)))
    with target_of(base_url, model_path) as target:
        _need_leyline(target, needed=True)
        settings = Settings(target.base_url, target.model, output_tokens)
        with progress_bar("cases") as progress:
            task = progress.add_task("break-even", total=len(wanted))
            measured = table2.measure(
                target,
                wanted,
                settings,
                repetitions=repetitions,
                budget_s=budget_s,
                on_case=lambda _: progress.advance(task),
            )
    rows = table2.rows(measured)
    out.print(breakeven_table(rows, f"{target.name}: time to first token of the edited turn, ms"))
    if len(rows) < len(wanted):
        err.print(f"[yellow]left out for lack of time:[/] {len(wanted) - len(rows)} of {len(wanted)} cases")
    config = {"lengths": lengths, "positions": positions, "replacements": replacements, "repetitions": repetitions}
    result = document("breakeven", config, rows, target, cost_model=vars_of(table2.fitted(measured)))
    if json_file is not None:
        write_json(json_file, result)
    draw(plot, result)
    if any(row["errors"] for row in rows):
        raise typer.Exit(1)


@app.command("plot")
def plot_result(
    result: Annotated[Path, typer.Argument(help="A result written by another command of `leyline bench`.")],
    file: Annotated[Path, typer.Argument(help="The picture to write.")],
) -> None:
    """Draw a result that was written before."""
    from leyline_agent.bench.results import check_writable, read_json

    check_writable(file)
    draw(file, read_json(result))


# ---- what the commands share -----------------------------------------------------------------------------------------


def parse_concurrency(text: str) -> dict[int, int | None]:
    """`1:4,8` as {1: 4, 8: None}: sessions at once, and how many of them are played."""
    limits: dict[int, int | None] = {}
    for part in text.split(","):
        count, _, limit = part.strip().partition(":")
        if not count.isdecimal() or not int(count) or (limit and not limit.isdecimal()):
            raise ConfigError(f"concurrency {part!r} is neither N nor N:SESSIONS")
        limits[int(count)] = int(limit) if limit else None
    return limits


def draw(file: Path | None, result: dict[str, Any]) -> None:
    """Draw a result if a file is named; without matplotlib, say how to get it."""
    from leyline_agent.bench.plots import plot_result

    if file is None:
        return
    try:
        out.print(f"plot: {plot_result(result, file)}", soft_wrap=True)
    except MissingDependencyError as error:
        err.print(f"[yellow]{escape(str(error))}[/]", soft_wrap=True)


def vars_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass with plain values."""
    from dataclasses import asdict

    return asdict(value)


def _numbers(text: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of numbers separated by commas") from error


def _need_leyline(target: Target, needed: bool) -> None:
    if needed and not target.has_leyline:
        reason = target.status.get("reason") or "it has no Leyline"
        raise ConfigError(f"the server at {target.url} does not splice: {reason}; name other --arms for it")


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
