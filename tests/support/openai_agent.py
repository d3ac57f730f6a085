"""The agent of the client tests on the real server: its policy, its calls, and a server that forgets."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.integrations.openai import OpenAI
from leyline_agent.policy import Policy

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
History = Callable[[int], list[dict[str, Any]]]


@dataclass(frozen=True)
class CutOld(Policy):
    """Cuts every tool output but the last `keep`."""

    keep: int = 2
    mode: Mode = Mode.AMORTIZE

    def decide(self, turn: Turn) -> list[MessageEdit]:
        tools = [k for k, message in enumerate(turn.messages) if message["role"] == "tool"]
        return [MessageEdit(k, "[cut]", mode=self.mode) for k in tools[: -self.keep or None]]


def client_for(server: Any, policy: Any = None, **options: Any) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", policy=policy, **options)


def run_turns(client: Any, messages: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The agent's model calls up to the whole of `messages`; its own answers are those already in there."""
    ends = [end for end in range(2, len(messages) + 1) if messages[end - 1]["role"] in ("user", "tool")]
    return [client.chat.completions.create(**GREEDY, messages=messages[:end], **options) for end in ends]


def flush(server: Any) -> None:
    urllib.request.urlopen(urllib.request.Request(server.url + "/flush_cache", method="POST"), timeout=30).read()
