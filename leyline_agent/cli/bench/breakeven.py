"""`leyline bench breakeven`: table 2."""

from __future__ import annotations

from typing import Annotated

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
    numbers,
    vars_of,
)  # fmt: skip
from leyline_agent.cli.console import err, out
from leyline_agent.cli.progress import progress_bar
from leyline_agent.cli.target import target_of


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
    turns_file: TurnsFile = None,
    plot: PlotFile = None,
) -> None:
    """Table 2: where a splice beats re-prefill: edit position x prompt length x length of R."""
    from leyline_agent.bench import breakeven as table2
    from leyline_agent.bench.conversation import Settings
    from leyline_agent.bench.results import check_writable, document, write_json, write_turns
    from leyline_agent.bench.tables import breakeven_table

    check_writable(json_file, turns_file, plot)
    wanted = list(table2.cases(numbers(lengths, int), numbers(positions, float), numbers(replacements, int)))
    with target_of(base_url, model_path) as target:
        need_leyline(target, needed=True)
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
    outcome = table2.outcome(measured)
    rows = outcome.pop("rows")
    out.print(breakeven_table(rows, f"{target.name}: time to first token of the edited turn, ms"))
    if len(rows) < len(wanted):
        err.print(f"[yellow]left out for lack of time:[/] {len(wanted) - len(rows)} of {len(wanted)} cases")
    config = {
        "lengths": lengths,
        "positions": positions,
        "replacements": replacements,
        "repetitions": repetitions,
        "output_tokens": output_tokens,
    }
    left = [vars_of(case) for case in wanted[len(rows) :]]
    result = document("breakeven", config, rows, target, left_out=left, **outcome)
    if json_file is not None:
        write_json(json_file, result)
    if turns_file is not None:
        write_turns(turns_file, table2.turn_lines(measured))
    draw(plot, result)
    if any(row["errors"] for row in rows):
        raise typer.Exit(1)
