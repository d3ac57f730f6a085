"""Small histories for tests, written in one line each."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]


def system(text: str = "You are an agent.") -> Message:
    return {"role": "system", "content": text}


def user(text: str = "Do it.") -> Message:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calls(*names_and_arguments: tuple[str, dict[str, Any]], ids: str = "c", content: str | None = None) -> Message:
    """An assistant message with a call each; the ids are c0, c1, ..."""
    made = [
        {"id": f"{ids}{k}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for k, (name, arguments) in enumerate(names_and_arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(content: Any, call_id: str = "c0") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def step(name: str, output: str, *, ids: str = "c", **arguments: Any) -> list[Message]:
    """A call and its result."""
    return [calls((name, arguments), ids=ids), result(output, f"{ids}0")]


def session(turns: int, output_len: int = 400) -> list[Message]:
    """A system prompt, a task and `turns` reads of a file each."""
    history = [system(), user("Read them all.")]
    for k in range(turns):
        history += step("read_file", f"{k} " * (output_len // (len(str(k)) + 1)), ids=f"t{k}_", path=f"file{k}.py")
    return history
