"""Which tool uses read something, and what: files, URLs, queries."""

from __future__ import annotations

import json
import re

from leyline_agent.history import ToolUse

RESOURCE_KEYS = (
    "path", "file_path", "filepath", "file", "filename", "file_name", "notebook_path", "url", "uri", "link", "query",
    "q", "pattern", "search", "search_term", "directory", "dir",
)  # fmt: skip
"""Arguments that name what a tool reads, the most telling first. After them come those called `id` or `..._id`."""

READ_TOOLS = r"(?i)(^|[_\-.])(read|open|view|cat|get|fetch|load|list|ls|search|find|grep|query|browse|look|show)"
"""Names of tools that read and change nothing: one of these words at the begin of the name or of a part of it."""

_WRITE_TOOLS = re.compile(
    r"(?i)(^|[_\-.])(write|edit|create|update|delete|remove|set|put|post|move|append|insert|replace)"
)


def resource_of(use: ToolUse, reads: re.Pattern[str]) -> tuple[str, str] | None:
    """What a use reads, as (resource, the whole call): two uses with equal answers read the same thing.

    None for a tool that does not look like a reader, or names nothing that is read.
    """
    if not reads.search(use.name) or _WRITE_TOOLS.search(use.name):
        return None
    if use.call is None:  # a text protocol: the command's arguments are the resource
        return (use.arguments, use.name) if use.arguments else None
    try:
        arguments = json.loads(use.arguments)
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    ids = (key for key in sorted(arguments) if key == "id" or key.endswith("_id"))
    for key in (*RESOURCE_KEYS, *ids):
        value = arguments.get(key)
        if isinstance(value, str | int) and value != "":
            return str(value), repr(use.key)
    return None
