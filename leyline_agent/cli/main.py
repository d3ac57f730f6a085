"""Find the command, run it, and turn what a user can get wrong into one line.

To add a command NAME: a row in `COMMANDS`, and a module `leyline_agent/cli/NAME.py` with a function `register(app)`
that adds the command to the typer app. The module imports what is heavy (torch, SGLang, ...) inside its functions.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

import typer

from leyline_agent import environment
from leyline_agent.cli.console import print_error
from leyline_agent.errors import LeylineError

COMMANDS = {
    "demo": "Replay an agent's edited history three ways on a real server, and show what was saved.",
    "serve": "Start SGLang with Leyline, on a GPU or (--cpu) without one.",
    "status": "Ask a running server what it supports and what it has spliced.",
    "policies": "List policies, and compare them on recorded histories.",
    "bench": "Measure: replay, break-even, debugging tasks, peers.",
    "doctor": "Check this machine: Python, packages, plugin, models.",
    "version": "Print the versions of Leyline and SGLang.",
}
"""Name and summary of each command, in the order of `leyline --help`."""

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


def main(args: Sequence[str] | None = None) -> None:
    """Run `leyline`; exits with 0, or 2 after one line on stderr, or 130 after Ctrl-C."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        _build_app(wanted=words[0] if words else "")(words, prog_name="leyline")
    except LeylineError as err:
        if environment.debug():
            raise
        print_error(err)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `leyline ... | head`: what we had to say is no longer wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _build_app(wanted: str) -> typer.Typer:
    """Build the app with the wanted command loaded; of the others it only knows the summary."""
    app = typer.Typer(
        help="Edit an agent's history without paying for it again.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for name, summary in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"leyline_agent.cli.{name}").register(app)
        else:
            app.command(name, help=summary)(_not_loaded)
    app.callback()(_no_options)  # with a callback, typer keeps the command's name even if there is only one
    return app


def _no_options() -> None:
    pass


def _not_loaded() -> None:
    raise AssertionError("a command runs only after its module has registered it")
