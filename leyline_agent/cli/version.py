"""`leyline version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from leyline_agent.cli.console import out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("version")(print_versions)


def print_versions() -> None:
    """Print the versions of Leyline, Python and SGLang."""
    out.print(f"leyline-agent {version('leyline-agent')}")
    out.print(f"Python {platform.python_version()}")
    try:
        out.print(f"SGLang {version('sglang')}")
    except PackageNotFoundError:
        out.print("SGLang is not installed")
