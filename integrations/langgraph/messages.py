"""Policies on LangChain messages, for models of other protocols: the view applies, nothing is spliced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages, convert_to_openai_messages

from leyline_agent.edits import Message, MessageEdit, Part
from leyline_agent.manager import ContextManager


def edited_messages(
    manager: ContextManager, messages: Sequence[BaseMessage], session_id: str | None = None
) -> list[BaseMessage]:
    """The messages as the policy wants them seen. Those it does not touch are the very same objects."""
    wire: Any = convert_to_openai_messages(list(messages))
    session = manager.session(session_id)
    plan = session.plan(wire, use_tokens=False)
    session.commit(plan)
    view = plan.view
    return [
        messages[source] if source is not None and not edits else _edited(messages, source, edits, message)
        for message, source, edits in zip(view.messages, view.sources, view.edited, strict=True)
    ]


def _edited(
    messages: Sequence[BaseMessage], source: int | None, edits: Sequence[MessageEdit], message: Message
) -> BaseMessage:
    if source is not None and all(edit.part is Part.CONTENT for edit in edits):
        return messages[source].model_copy(update={"content": message["content"] or ""})
    return convert_to_messages([dict(message)])[0]
