"""The agent of the LangGraph tests: real tools, and a middleware that says when the model must call one.

A random model calls no tool by itself. With `tool_choice="required"` and strict schemas the server's grammar makes it.
"""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.policy import Policy

Part = Literal["a", "b", "c"]


@tool
def look(part: Part) -> str:
    """Look at a part."""
    return f"part {part}: " + "-".join(str(ord(part) * 10 + k) for k in range(40))


class CallToolsFirst(AgentMiddleware):
    """Demands tool calls until the history has `count` results since the last user message, then an answer.

    Not for ever, though: another middleware may take results out of the history.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.demands = 0

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(self._demanding(request))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(self._demanding(request))

    def _demanding(self, request: Any) -> Any:
        last_user = max(k for k, message in enumerate(request.messages) if message.type == "human")
        results = sum(isinstance(message, ToolMessage) for message in request.messages[last_user:])
        choice = "required" if results < self.count and self.demands < 2 * self.count else "auto"
        self.demands += choice == "required"
        return request.override(tool_choice=choice, model_settings={"strict": True})


class CutOld(Policy):
    """Cuts every tool output but the last `keep`."""

    def __init__(self, mode: Mode = Mode.AMORTIZE, keep: int = 2) -> None:
        self.mode, self.keep = mode, keep

    def decide(self, turn: Turn) -> list[MessageEdit]:
        tools = [k for k, message in enumerate(turn.messages) if message["role"] == "tool"]
        return [MessageEdit(k, "[cut]", mode=self.mode) for k in tools[: -self.keep or None]]


NO_WHITESPACE = {str(token): -100 for token in (197, 198, 201, 220)}
"""Tab, newline, return, space in the byte vocabulary: a random model fills JSON with them until it has to stop."""


def settings(server: Any, **options: Any) -> dict[str, Any]:
    """What a chat model of these tests is made with."""
    defaults: dict[str, Any] = {"model": "tiny", "api_key": "none", "temperature": 0, "max_tokens": 80}
    return {**defaults, "base_url": server.base_url, "logit_bias": NO_WHITESPACE, **options}


def chat(server: Any, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(**settings(server, **options))


def make_agent(model: Any, *middleware: Any, calls: int = 4, **options: Any) -> Any:
    return create_agent(
        model, [look], system_prompt="Be brief.", middleware=[CallToolsFirst(calls), *middleware], **options
    )


def plain(messages: list[BaseMessage]) -> list[Any]:
    """Messages less ids and metadata."""
    return [
        (message.type, message.content, [(call["name"], call["args"]) for call in getattr(message, "tool_calls", [])])
        for message in messages
    ]
