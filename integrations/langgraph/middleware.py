"""`LeylineMiddleware`: an entry of `create_agent(middleware=[...])`. Put it last, so that it sees others' edits."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage
from langchain_openai import ChatOpenAI

from leyline_agent.config import Config
from leyline_agent.directives import Mode
from leyline_agent.errors import ConfigError
from leyline_agent.integrations.langgraph.chat_model import ChatLeyline, leyline_chat
from leyline_agent.integrations.langgraph.messages import edited_messages
from leyline_agent.integrations.openai import Leyline
from leyline_agent.integrations.openai.client import SyncTransport
from leyline_agent.integrations.openai.runtime import OnReport
from leyline_agent.integrations.openai.session import prepare
from leyline_agent.policy import MessageFunction, Policy
from leyline_agent.renderers import Renderer
from leyline_agent.wire import KEY

logger = logging.getLogger("leyline_agent")

_MAX_MODELS = 32


class LeylineMiddleware(AgentMiddleware):
    """Applies a policy to what the model sees, and has the server splice what changed. The agent's state stays whole.

    Works for any `ChatOpenAI` model; with another one, the policy applies and nothing is spliced. Edits that other
    middleware makes (context editing, summaries) become directives too, by default amortized: `config.rewrite_mode`.
    `prepare_ahead`: while tools run, the server already splices what the next call will need.
    """

    def __init__(
        self,
        policy: Policy | MessageFunction | None = None,
        *,
        config: Config | None = None,
        renderer: Renderer | None = None,
        on_report: OnReport | None = None,
        leyline: Leyline | None = None,
        prepare_ahead: bool = True,
    ) -> None:
        super().__init__()
        self._has_policy = policy is not None
        config = config or dataclasses.replace(Config.from_env(), rewrite_mode=Mode.AMORTIZE)
        self.leyline = leyline or Leyline(policy, config=config, renderer=renderer, on_report=on_report)
        self.prepare_ahead = prepare_ahead
        self._chats: OrderedDict[int, tuple[ChatOpenAI, ChatLeyline]] = OrderedDict()
        self._lock = threading.Lock()

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Send the call through Leyline."""
        ours = self._bound(request)
        response = handler(ours)
        self._prepare(ours, response)
        return response

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send the call through Leyline."""
        ours = self._bound(request)
        response = await handler(ours)
        self._prepare(ours, response)
        return response

    def _bound(self, request: Any) -> Any:
        """The request with Leyline's model and its session; for other models, with the policy's messages."""
        model = request.model
        if not isinstance(model, ChatOpenAI):
            return request.override(messages=edited_messages(self.leyline.manager, request.messages, _session(request)))
        settings = dict(request.model_settings)
        body = dict(settings.get("extra_body") or {})
        settings["extra_body"] = {**body, KEY: {"session": _session(request), **dict(body.get(KEY) or {})}}
        return request.override(model=self._chat(model), model_settings=settings)

    def _chat(self, model: ChatOpenAI) -> ChatLeyline:
        if isinstance(model, ChatLeyline):
            if self._has_policy and model.leyline is not self.leyline:
                raise ConfigError(
                    "the model is a ChatLeyline with a runtime of its own; give the policy to one of them"
                )
            return model
        with self._lock:
            known = self._chats.get(id(model))
            if known is None or known[0] is not model:
                known = self._chats[id(model)] = model, leyline_chat(model, self.leyline)
            self._chats.move_to_end(id(model))
            while len(self._chats) > _MAX_MODELS:
                self._chats.popitem(last=False)
            return known[1]

    def _prepare(self, request: Any, response: Any) -> None:
        """Start splicing for the next call, in the background, when this one asked for tools."""
        answer = _last_message(response)
        if not (self.prepare_ahead and isinstance(request.model, ChatLeyline) and isinstance(answer, AIMessage)):
            return
        if not answer.tool_calls or request.model.root_client is None:
            return
        system = [request.system_message] if request.system_message is not None else []
        messages: list[BaseMessage] = [*system, *request.messages, answer]
        session = request.model_settings["extra_body"][KEY]["session"]
        model = request.model
        model.leyline.executor.submit(_prepare_quietly, model, session, messages)


def _prepare_quietly(model: ChatLeyline, session: str | None, messages: list[BaseMessage]) -> None:
    try:
        prepare(model.leyline, SyncTransport(model.root_client), session, model.wire_messages(messages), {})
    except Exception as err:  # noqa: BLE001 - work ahead; the turn itself does without
        logger.info("splicing ahead failed, the turn will do it: %s", err)


def _session(request: Any) -> str | None:
    """The thread of the checkpointer; without one, the id that LangGraph gave the first message."""
    info = getattr(request.runtime, "execution_info", None)
    thread_id = getattr(info, "thread_id", None)
    if thread_id is not None:
        return str(thread_id)
    messages: Sequence[BaseMessage] = request.state.get("messages") or request.messages
    return messages[0].id if messages else None


def _last_message(response: Any) -> Any:
    """The model's message in any of the shapes a handler may return."""
    response = getattr(response, "model_response", response)
    result = getattr(response, "result", None)
    return result[-1] if isinstance(result, list) and result else response
