"""Small agent histories for tests: as many tool calls as wanted, every output of a known length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def agent_history(turns: int, output_chars: int = 160) -> list[dict[str, Any]]:
    """A history with `turns` model calls: the last one reads the last tool output."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix bugs. Call one tool at a time."},
        {"role": "user", "content": "The total is wrong on Sundays. Find out why."},
    ]
    for number in range(turns - 1):
        call = {"name": "read_file", "arguments": json.dumps({"path": f"part_{number}.py"})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        line = f"{number}: total += price * {number} # "
        output = (line * (output_chars // len(line) + 1))[:output_chars]
        messages.append({"role": "assistant", "content": f"Part {number}.", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": output})
    return messages


def write_traces(file: Path, *histories: list[dict[str, Any]]) -> Path:
    """Write histories as a trace file, with the ids h0, h1, ..."""
    lines = [json.dumps({"id": f"h{number}", "messages": messages}) for number, messages in enumerate(histories)]
    file.write_text("\n".join(lines) + "\n")
    return file
