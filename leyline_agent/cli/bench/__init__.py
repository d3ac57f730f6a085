"""`leyline bench`: the tables of docs/benchmarks.md, one command each."""

from __future__ import annotations

import typer

from leyline_agent.cli.bench.breakeven import breakeven
from leyline_agent.cli.bench.peers import peers
from leyline_agent.cli.bench.replay import replay
from leyline_agent.cli.bench.show import merge, plot, show
from leyline_agent.cli.bench.tasks import tasks


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    app = typer.Typer(help="Measure: replay, break-even, debugging tasks, peers.", no_args_is_help=True)
    for command in (replay, breakeven, tasks, peers, show, plot, merge):
        app.command(command.__name__)(command)
    parent.add_typer(app, name="bench")
