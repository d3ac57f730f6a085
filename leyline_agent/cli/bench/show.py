"""`leyline bench show`, `plot` and `merge`: results that were written before, as a table, a picture, and one result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyline_agent.cli.bench.options import draw
from leyline_agent.cli.console import out
from leyline_agent.errors import ConfigError

Result = Annotated[Path, typer.Argument(help="A result written by another command of `leyline bench`.")]


def show(
    result: Result,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it for a page of docs, with all columns.")
    ] = False,
) -> None:
    """Show a result as its table."""
    from leyline_agent.bench import tables
    from leyline_agent.bench.results import read_json

    table = tables.result_table(read_json(result), wide=markdown)
    if markdown:
        out.print(tables.markdown(table), markup=False, soft_wrap=True)
    else:
        out.print(table)


def plot(result: Result, file: Annotated[Path, typer.Argument(help="The picture to write.")]) -> None:
    """Draw a result."""
    from leyline_agent.bench.results import check_writable, read_json

    check_writable(file)
    draw(file, read_json(result))


def merge(
    files: Annotated[list[Path], typer.Argument(help="RESULT.json TURNS.jsonl, for each run: what it was written to.")],
    json_file: Annotated[Path, typer.Option("--json", help="Write the joint result to this file.")],
) -> None:
    """Make one result of several runs: more repetitions, other arms or concurrencies, other cases.

    Rows are computed anew from all turns. Runs of different arms are paired repetition by repetition, for instance
    those on a stock server with those on one with Leyline.
    """
    from leyline_agent.bench.merge import Part
    from leyline_agent.bench.merge import merge as merged
    from leyline_agent.bench.results import check_writable, read_json, read_turns, write_json

    check_writable(json_file)
    if len(files) % 2:
        raise ConfigError("every result comes with its turns: RESULT.json TURNS.jsonl [RESULT.json TURNS.jsonl ...]")
    pairs = zip(files[::2], files[1::2], strict=True)
    write_json(json_file, merged([Part(read_json(result), read_turns(turns)) for result, turns in pairs]))
