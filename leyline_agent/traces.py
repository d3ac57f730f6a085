"""Recorded histories: JSON lines of `{"id": ..., "messages": [...]}`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_agent.edits import Message
from leyline_agent.errors import HistoryError


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded history, its tools if they were recorded, and where it comes from."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""


def read_traces(path: str | Path) -> Iterator[Trace]:
    """The traces of a file. Raises HistoryError, with file and line, for one that cannot be read."""
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise HistoryError(f"cannot read traces from {file}: {err}") from err
    found = False
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found = True
            yield _trace(line, f"{file}:{number}", file.stem)
    if not found:
        raise HistoryError(f'{file} holds no traces; it takes one {{"id": ..., "messages": [...]}} a line')


def _trace(line: str, where: str, source: str) -> Trace:
    try:
        entry = json.loads(line)
    except ValueError as err:
        raise HistoryError(f"{where}: not JSON: {err}") from err
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise HistoryError(f'{where}: no list of messages; a trace is {{"id": ..., "messages": [...]}}')
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        raise HistoryError(f"{where}: it has no messages, or one without a role")
    tools: Sequence[Mapping[str, Any]] = entry.get("tools") or ()
    return Trace(str(entry.get("id", where)), tuple(messages), tuple(tools), source)
