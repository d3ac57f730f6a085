"""What the commands of `leyline bench` share: options, lists on the command line, pictures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from leyline_agent.cli.console import err, out
from leyline_agent.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from leyline_agent.bench.target import Target

BaseUrl = Annotated[str | None, typer.Option(help="A running server; without it, one with SmolLM2 on the CPU.")]
ModelPath = Annotated[Path | None, typer.Option(help="Start the CPU server with this model instead of SmolLM2.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
TurnsFile = Annotated[
    Path | None, typer.Option(help="Write every measured turn to this file, for `leyline bench merge`.")
]
PlotFile = Annotated[Path | None, typer.Option(help="Draw the result into this file.")]
Budget = Annotated[float | None, typer.Option(help="Seconds; what would not end in time is left out, and said.")]


def parse_concurrency(text: str) -> dict[int, int | None]:
    """`1:4,8` as {1: 4, 8: None}: sessions at once, and how many of them are played."""
    limits: dict[int, int | None] = {}
    for part in text.split(","):
        count, _, limit = part.strip().partition(":")
        if not count.isdecimal() or not int(count) or (limit and not limit.isdecimal()):
            raise ConfigError(f"concurrency {part!r} is neither N nor N:SESSIONS")
        limits[int(count)] = int(limit) if limit else None
    return limits


def numbers(text: str, kind: Any) -> list[Any]:
    """Numbers separated by commas. Raises ConfigError for what is none."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of numbers separated by commas") from error


def draw(file: Path | None, result: dict[str, Any]) -> None:
    """Draw a result if a file is named; without matplotlib, say how to get it."""
    from leyline_agent.bench.result_plots import plot_result

    if file is None:
        return
    try:
        out.print(f"plot: {plot_result(result, file)}", soft_wrap=True)
    except MissingDependencyError as error:
        err.print(f"[yellow]{escape(str(error))}[/]", soft_wrap=True)


def vars_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass with plain values."""
    return asdict(value)


def need_leyline(target: Target, needed: bool) -> None:
    """Raise ConfigError for a server without Leyline, if the measurement needs it."""
    if needed and not target.has_leyline:
        reason = target.status.get("reason") or "it has no Leyline"
        raise ConfigError(f"the server at {target.url} does not splice: {reason}; name other --arms for it")
