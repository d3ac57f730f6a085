"""`leyline bench plot`: a picture of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyline_agent.cli.bench.options import draw


def plot(
    result: Annotated[Path, typer.Argument(help="A result written by another command of `leyline bench`.")],
    file: Annotated[Path, typer.Argument(help="The picture to write.")],
) -> None:
    """Draw a result that was written before."""
    from leyline_agent.bench.results import check_writable, read_json

    check_writable(file)
    draw(file, read_json(result))
