"""`leyline doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from leyline_agent import environment
from leyline_agent.cli.console import out, print_json
from leyline_agent.errors import LeylineError

_COLOURS = {"ok": "green", "missing": "yellow", "wrong": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. `state` is ok, missing (something optional) or wrong."""

    subject: str
    state: str
    text: str


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check what Leyline needs on this machine; exits with 1 if something is wrong."""
    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            out.print(
                f"[{_COLOURS[finding.state]}]{finding.state:8}[/]{finding.subject:18}{escape(finding.text)}",
                soft_wrap=True,
            )
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Look at everything, without importing torch or SGLang."""
    from leyline_agent.integrations.sglang.launch import checks

    return [
        _checked("Python", checks.check_python, platform.python_version()),
        _checked("SGLang", checks.check_sglang, "installed, in a version the plugin was checked with"),
        _plugin(),
        _gpu(),
        _optional("LangGraph", "langgraph", "langgraph"),
        _optional("local renderer", "tokenizers", "tokens"),
        _optional("tracing", "opentelemetry", "otel"),
        Finding("cache folder", "ok", str(environment.cache_folder())),
    ]


def _checked(subject: str, check: Callable[[], None], if_fine: str) -> Finding:
    try:
        check()
    except LeylineError as err:
        return Finding(subject, "wrong", str(err))
    return Finding(subject, "ok", if_fine)


def _plugin() -> Finding:
    names = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
    if "leyline" in names:
        return Finding("plugin", "ok", "SGLang finds it")
    return Finding("plugin", "wrong", "SGLang does not find it; install this package with pip, not by its path")


def _gpu() -> Finding:
    if Path("/dev/nvidiactl").exists():
        return Finding("GPU", "ok", "NVIDIA driver found")
    return Finding("GPU", "missing", "no NVIDIA driver; `leyline serve --cpu` works without one")


def _optional(subject: str, module: str, extra: str) -> Finding:
    if find_spec(module):
        return Finding(subject, "ok", "installed")
    return Finding(subject, "missing", f"pip install 'leyline-agent[{extra}]'")
