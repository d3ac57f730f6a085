"""An agent's history and what a real server makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="session")
def server(cpu_server: Callable[..., Any]) -> Any:
    return cpu_server("llama")


@pytest.fixture
def history(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, Any]]]:
    """`history(n)`: a task and n tool calls with their results, different in each test."""
    task = request.node.name

    def make(rounds: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are an agent. Your task: {task}"},
            {"role": "user", "content": "Look at all of it."},
        ]
        for number in range(rounds):
            function = {"name": "look", "arguments": f'{{"part":{number}}}'}
            call = {"id": f"c{number}", "type": "function", "function": function}
            output = f"part {number} " + "-".join(str(number * 37 + k) for k in range(60))
            messages.append({"role": "assistant", "content": f"Part {number}.", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": output})
        return messages

    return make


@pytest.fixture
def stock(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none")
