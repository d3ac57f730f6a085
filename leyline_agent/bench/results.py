"""Result files: one JSON document a table, with everything its numbers have to be read with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline_agent.bench.machine import circumstances
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.target import Target
from leyline_agent.errors import ConfigError


def document(
    kind: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], target: Target | None = None, **more: Any
) -> dict[str, Any]:
    """A result: `kind` names the table, `config` what was asked for, `rows` are the table."""
    server = {"model": target.name, **target.facts} if target is not None else None
    kernel = (target.status.get("kernel") or {}) if target is not None else {}
    return {
        "kind": kind,
        **circumstances(),
        "server": server,
        "rotation_kernel": kernel.get("form"),
        "config": dict(config),
        **more,
        "rows": list(rows),
    }


def check_writable(*files: Path | None) -> None:
    """Raise ConfigError for a file whose folder is missing, before anything is measured for it."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.absolute().parent}")


def write_json(file: Path, result: Mapping[str, Any]) -> None:
    """Write a result, one row a line where rows are short."""
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write_turns(file: Path, turns: Sequence[tuple[Mapping[str, Any], MeasuredTurn]]) -> None:
    """Write every measured turn as a JSON line, with the facts about its run."""
    lines = (json.dumps({**run, **turn.to_json()}) for run, turn in turns)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_turns(file: Path) -> list[dict[str, Any]]:
    """The lines of a file written by `write_turns`. Raises ConfigError for a file that is none."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read {file}: {err}") from err
    if not all(isinstance(line, dict) and {"arm", "trace", "turn"} <= set(line) for line in lines):
        raise ConfigError(f"{file} is no --turns-file of `leyline bench`")
    return lines


def read_json(file: Path) -> dict[str, Any]:
    """A result written by `write_json`. Raises ConfigError for a file that is none."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read {file}: {err}") from err
    if not isinstance(result, dict) or "kind" not in result or "rows" not in result:
        raise ConfigError(f"{file} is no result of `leyline bench`")
    return result
