"""What SGLang 0.5.23 does to messages and tools before its chat template sees them, repeated on this side.

Only the common path is repeated (text, tools, one Jinja template). What is not (media, encoders without a template,
template arguments set on the server) shows as a difference when a rendering is verified against the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_agent.edits import Message
from leyline_agent.errors import RenderError

_GENERIC_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content", "tools", "prefix")


def template_messages(messages: Sequence[Message], *, keep_parts: bool, for_chat: bool = True) -> list[dict[str, Any]]:
    """The messages as the template gets them. `keep_parts`: the template loops over content parts itself.

    `for_chat`: a last assistant message becomes a user message, as the chat endpoint does it; not when a prefix of a
    history is rendered. Raises RenderError for content that is not text and for arguments that are not a JSON object.
    """
    prepared = [_message(message, keep_parts) for message in messages]
    if for_chat and prepared and prepared[-1]["role"] == "assistant" and isinstance(prepared[-1]["content"], str):
        prepared[-1] = {"role": "user", "content": prepared[-1]["content"]}
    return prepared


def template_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = None) -> list[dict[str, Any]] | None:
    """The tools as the template gets them: none for `tool_choice="none"`, one for a named choice."""
    if not tools or tool_choice == "none":
        return None
    if isinstance(tool_choice, Mapping):
        name = tool_choice.get("function", {}).get("name")
        tools = [tool for tool in tools if tool.get("function", {}).get("name") == name]
    return [
        {"type": tool.get("type", "function"), "function": _function(tool), "defer_loading": tool.get("defer_loading")}
        for tool in tools
    ] or None


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    known = ("description", "name", "parameters", "strict", "defer_loading")
    given = tool.get("function", {})
    function = {key: given[key] for key in given if key in known}
    for key in ("description", "parameters"):
        function.setdefault(key, None)
    return {key: value for key, value in function.items() if value is not None or key in ("description", "parameters")}


def _message(message: Message, keep_parts: bool) -> dict[str, Any]:
    role = str(message.get("role", "")).lower()
    prepared: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, keep_parts)}
    if role == "user":
        return prepared
    prepared.update({key: message[key] for key in _GENERIC_FIELDS if message.get(key) is not None})
    if message.get("tool_calls") is not None:
        prepared["tool_calls"] = [_tool_call(call, role) for call in message["tool_calls"]]
    return prepared


def _content(content: Any, role: str, keep_parts: bool) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") != "text":
            raise RenderError(f"content part of type {part.get('type')!r} cannot be rendered on this side")
        texts.append(part.get("text", "") if isinstance(part, Mapping) else str(part))
    if keep_parts and role != "tool":
        return [{"type": "text", "text": text} for text in texts]
    return " ".join(texts)


def _tool_call(call: Mapping[str, Any], role: str) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as err:
            raise RenderError(f"tool call arguments {arguments[:80]!r} are not JSON") from err
        if not isinstance(arguments, dict):
            raise RenderError(f"tool call arguments {str(arguments)[:80]!r} are not a JSON object")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": call.get("type", "function"),
        "function": {"name": function.get("name"), "arguments": arguments},
    }
