"""Policies on LangChain messages, for models of other protocols: the view applies, nothing is spliced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages, convert_to_openai_messages

from leyline_agent.edits import Message, MessageEdit, Part
from leyline_agent.manager import Session
from leyline_agent.turn_plan import TurnPlan


def plan_view(session: Session, messages: Sequence[BaseMessage]) -> tuple[list[BaseMessage], TurnPlan]:
    """The messages as the policy wants them seen, and the plan. Those it does not touch are the very same objects."""
    plan = session.plan([_on_the_wire(message) for message in messages], use_tokens=False)
    view = plan.view
    shown = [
        messages[source] if source is not None and not edits else _edited(messages, source, edits, message)
        for message, source, edits in zip(view.messages, view.sources, view.edited, strict=True)
    ]
    return shown, plan


def _on_the_wire(message: BaseMessage) -> Message:
    """The message as policies know it.

    One that would be several of them (a user message with the results of tools, as some providers have it) keeps its
    own content, which policies leave alone.
    """
    converted: Any = convert_to_openai_messages([message])
    if len(converted) == 1 and (converted[0]["role"] == "tool") == (message.type == "tool"):
        return dict(converted[0])
    return {"role": "user", "content": message.content}


def _edited(
    messages: Sequence[BaseMessage], source: int | None, edits: Sequence[MessageEdit], message: Message
) -> BaseMessage:
    if source is not None and all(edit.part is Part.CONTENT for edit in edits):
        return messages[source].model_copy(update={"content": message["content"] or ""})
    return convert_to_messages([dict(message)])[0]
