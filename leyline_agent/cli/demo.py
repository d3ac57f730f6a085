"""`leyline demo`: an edited history served three ways on a real server, and what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from leyline_agent.cli.console import err, out
from leyline_agent.cli.progress import progress_bar
from leyline_agent.cli.target import target_of
from leyline_agent.errors import MissingDependencyError

if TYPE_CHECKING:
    from leyline_agent.bench.demo import Demo
    from leyline_agent.bench.script import Script
    from leyline_agent.bench.target import Target
    from leyline_agent.policy import Policy


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    trace: Annotated[
        Path | None, typer.Option(help='Play this history instead: JSON lines of {"id": ..., "messages": [...]}.')
    ] = None,
    trace_id: Annotated[str | None, typer.Option(help="Which history of that file; default: the first.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="What to edit; default truncate_tool_outputs:keep_turns=3,max_chars=200.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="Use this running server instead of starting one.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="Serve this model instead of SmolLM2-135M.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=2, help="Play only the first turns.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to sample on each turn.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    plot: Annotated[Path, typer.Option(help="Write the plot to this file.")] = Path("leyline-demo.png"),
) -> None:
    """Play a tool-using agent's history three ways on one real server, and show what Leyline saves.

    The policy cuts old tool outputs short. Re-prefill is what a stock server does with that, AMORTIZE splices the
    cache instead, FORGET is Leyline's exact mode. Exits with 1 if a check fails.
    """
    from leyline_agent.bench.demo import DEMO_POLICY, history_from, shipped_history, write_demo_script
    from leyline_agent.bench.results import check_writable
    from leyline_agent.policies.factory import from_spec

    check_writable(json_file, plot)
    chosen = from_spec(policy) if policy else DEMO_POLICY
    history = history_from(trace, trace_id) if trace else shipped_history()
    script = write_demo_script(chosen, history, max_turns=max_turns)
    with target_of(base_url, model_path) as target:
        finished = _play(target, chosen, script, max_tokens)
    _show(finished)
    _write(finished, json_file, plot)
    if not finished.passed:
        raise typer.Exit(1)


def _play(target: Target, policy: Policy, script: Script, max_tokens: int) -> Demo:

    from leyline_agent.bench.arms import Arm
    from leyline_agent.bench.conversation import Settings
    from leyline_agent.bench.demo import ARMS, play_demo
    from leyline_agent.bench.measured import MeasuredTurn
    from leyline_agent.bench.plots import LABELS

    edited = sum(step.edited for step in script.steps)
    out.print(
        f"[bold]{escape(script.id)}[/]: {len(script.steps)} model calls, {edited} of them after an edit by "
        f"{escape(policy.name)}, served {len(ARMS)} ways by [bold]{escape(target.name)}[/]",
        soft_wrap=True,
    )
    with progress_bar() as progress:
        task = progress.add_task(f"{'warming up':<20}", total=len(script.steps) * len(ARMS))

        def on_turn(arm: Arm, _turn: MeasuredTurn) -> None:
            progress.update(task, advance=1, description=f"{LABELS[arm]:<20}")

        settings = Settings(target.base_url, target.model, output_tokens=max_tokens)
        return play_demo(target, policy, script, settings, on_turn=on_turn)


def _show(demo: Demo) -> None:
    from leyline_agent.bench.arms import Arm
    from leyline_agent.bench.tables import totals_table, turns_table

    out.print(turns_table(demo.runs))
    out.print(totals_table(demo.runs))
    plain, spliced = demo.runs[Arm.REPREFILL], demo.runs[Arm.AMORTIZE]
    before, after = plain.total("all_prefilled"), spliced.total("all_prefilled")
    slow = plain.median("ttft_ms", lambda turn: turn.edited)
    fast = spliced.median("ttft_ms", lambda turn: turn.edited)
    if before and slow and fast:
        out.print(
            f"\n[bold green]Saved by AMORTIZE:[/] {before - after:,} of {before:,} prefilled tokens "
            f"([bold]{1 - after / before:.0%}[/]); on edited turns the first token came after [bold]{fast:,.0f} ms[/] "
            f"instead of {slow:,.0f} ms ({slow / fast:.1f} times sooner).",
            soft_wrap=True,
        )
    for name, check in demo.checks.items():
        mark = "[green]holds[/]" if check.passed else "[red]FAILS[/]"
        out.print(f"  {mark} {name.replace('_', ' ')}: {escape(check.detail)}", soft_wrap=True)


def _write(demo: Demo, json_file: Path | None, plot: Path) -> None:
    import json

    from leyline_agent.bench.plots import plot_demo

    if json_file is not None:
        json_file.write_text(json.dumps(demo.to_json(), indent=1) + "\n")
        out.print(f"numbers: {json_file}", soft_wrap=True)
    try:
        title = f"{demo.trace}: one edited history, served three ways ({demo.policy})"
        out.print(f"plot: {plot_demo(demo.runs, title, plot)}", soft_wrap=True)
    except MissingDependencyError as error:
        err.print(f"[yellow]{escape(str(error))}[/]", soft_wrap=True)
