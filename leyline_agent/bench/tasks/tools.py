"""The agent's tools: what the model is told of them, and what they do in a workspace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from leyline_agent.bench.tasks.task import TESTS
from leyline_agent.bench.tasks.workspace import Workspace
from leyline_agent.errors import LeylineError

_SHOWN_LINES = 400
_AROUND_LINES = 4


def view(workspace: Workspace, path: str, start: int = 1, end: int | None = None) -> str:
    """Show a file with line numbers, or lines `start` to `end` of it."""
    lines = workspace.path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    first, last = max(1, int(start)), min(len(lines), int(end or len(lines)), int(start) + _SHOWN_LINES - 1)
    shown = "\n".join(f"{number:4} {lines[number - 1]}" for number in range(first, last + 1))
    return f"{path}, lines {first} to {last} of {len(lines)}\n{shown}"


def edit(workspace: Workspace, path: str, old: str, new: str) -> str:
    """Replace a text that occurs exactly once in a file by another."""
    line = workspace.replace(path, old, new)
    end = line + new.count("\n") + _AROUND_LINES
    return "Edited. " + view(workspace, path, max(1, line - _AROUND_LINES), end)


def run_tests(workspace: Workspace) -> str:
    """Run the tests. The task is solved when all of them pass."""
    return str(workspace.run_tests())


def bash(workspace: Workspace, command: str) -> str:
    """Run a shell command in the task's folder, without network."""
    return str(workspace.command(["bash", "-c", command]))


def pdb(workspace: Workspace, commands: str, test: str = "") -> str:
    """Run the tests (or one, by name) under pdb with debugger commands, one a line; every call starts anew."""
    select = ["-k", test] if test else []
    command = [workspace.sandbox.python(), "-m", "pdb", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    return str(workspace.command([*command, TESTS, *select], stdin=commands.rstrip("\n") + "\nq\n"))


_TOOLS: dict[str, tuple[Callable[..., str], dict[str, str], tuple[str, ...]]] = {
    "view": (view, {"path": "string", "start": "integer", "end": "integer"}, ("path",)),
    "edit": (edit, {"path": "string", "old": "string", "new": "string"}, ("path", "old", "new")),
    "run_tests": (run_tests, {}, ()),
    "bash": (bash, {"command": "string"}, ("command",)),
    "pdb": (pdb, {"commands": "string", "test": "string"}, ("commands",)),
}


def descriptions() -> list[dict[str, Any]]:
    """The tools as a chat completion takes them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": " ".join((function.__doc__ or "").split()),
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in parameters.items()},
                    "required": list(required),
                },
            },
        }
        for name, (function, parameters, required) in _TOOLS.items()
    ]


def call(workspace: Workspace, name: str, arguments: str) -> str:
    """Do what the model asks for; what it got wrong comes back as text, for it to read."""
    if name not in _TOOLS:
        return f"Error: there is no tool {name}; there are {', '.join(_TOOLS)}"
    function, parameters, required = _TOOLS[name]
    try:
        given = json.loads(arguments or "{}")
    except ValueError as err:
        return f"Error: the arguments are not JSON: {err}"
    if not isinstance(given, Mapping):
        return "Error: the arguments must be a JSON object"
    missing = [key for key in required if key not in given]
    unknown = [key for key in given if key not in parameters]
    if missing or unknown:
        return f"Error: {name} takes {', '.join(parameters) or 'no arguments'}; missing {missing}, unknown {unknown}"
    try:
        return function(workspace, **given)
    except (LeylineError, OSError, TypeError, ValueError) as err:
        return f"Error: {err}"
