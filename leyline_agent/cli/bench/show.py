"""`leyline bench show` and `plot`: a result that was written before, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyline_agent.cli.bench.options import draw
from leyline_agent.cli.console import out

Result = Annotated[Path, typer.Argument(help="A result written by another command of `leyline bench`.")]


def show(
    result: Result, markdown: Annotated[bool, typer.Option("--markdown", help="Print it for a page of docs.")] = False
) -> None:
    """Show a result as its table."""
    from leyline_agent.bench import tables
    from leyline_agent.bench.results import read_json

    table = tables.result_table(read_json(result))
    if markdown:
        out.print(tables.markdown(table), markup=False, soft_wrap=True)
    else:
        out.print(table)


def plot(result: Result, file: Annotated[Path, typer.Argument(help="The picture to write.")]) -> None:
    """Draw a result."""
    from leyline_agent.bench.results import check_writable, read_json

    check_writable(file)
    draw(file, read_json(result))
