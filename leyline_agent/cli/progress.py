"""The progress bar of commands that play turns."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from leyline_agent.cli.console import err


def progress_bar(unit: str = "turns") -> Progress:
    """A bar on stderr with what is being done, how far it is, and the time passed and left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )
