"""`LeylineMiddleware`: an entry of `create_agent(middleware=[...])`. Put it last, so that it sees others' edits."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage
from langchain_openai import ChatOpenAI

from leyline_agent.client_report import ClientReport
from leyline_agent.config import Config
from leyline_agent.directives import Mode
from leyline_agent.edits import Usage
from leyline_agent.errors import ConfigError
from leyline_agent.integrations.langgraph.chat_model import ChatLeyline, leyline_chat
from leyline_agent.integrations.langgraph.messages import plan_view
from leyline_agent.integrations.langgraph.reports import annotate
from leyline_agent.integrations.openai import Leyline
from leyline_agent.integrations.openai.runtime import OnReport
from leyline_agent.policy import MessageFunction, Policy
from leyline_agent.renderers import Renderer
from leyline_agent.report import Fallback, FallbackReason
from leyline_agent.wire import KEY

_MAX_MODELS = 32


class LeylineMiddleware(AgentMiddleware):
    """Applies a policy to what the model sees, and has the server splice what changed. The agent's state stays whole.

    Works for any `ChatOpenAI` model; with another one, the policy applies, nothing is spliced, and the report says so.
    Edits that other middleware makes (context editing, summaries) become directives too, by default amortized:
    `config.rewrite_mode`. `prepare_ahead`: while tools run, the server already splices what the next call will need;
    for a `ChatLeyline`, its own setting counts.
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
        self._is_bare = all(value is None for value in (policy, config, renderer, on_report, leyline))
        if leyline is None:
            config = _amortizing_rewrites(config or Config.from_env())
        self.leyline = Leyline.of(leyline, policy=policy, config=config, renderer=renderer, on_report=on_report)
        self.prepare_ahead = prepare_ahead
        self._chats: OrderedDict[int, tuple[ChatOpenAI, ChatLeyline]] = OrderedDict()
        self._lock = threading.Lock()

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Send the call through Leyline."""
        if isinstance(request.model, ChatOpenAI):
            return handler(self._bound(request))
        turn = _PlainTurn(self.leyline, request)
        return turn.finished(handler(turn.request))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send the call through Leyline; a policy may take its time, so it does not run in the event loop."""
        if isinstance(request.model, ChatOpenAI):
            return await handler(self._bound(request))
        turn = await self.leyline.in_thread(_PlainTurn, self.leyline, request)
        return turn.finished(await handler(turn.request))

    def _bound(self, request: Any) -> Any:
        """The request with Leyline's model and its session."""
        settings = dict(request.model_settings)
        body = dict(settings.get("extra_body") or {})
        settings["extra_body"] = {**body, KEY: {"session": _session(request), **dict(body.get(KEY) or {})}}
        return request.override(model=self._chat(request.model), model_settings=settings)

    def _chat(self, model: ChatOpenAI) -> ChatLeyline:
        if isinstance(model, ChatLeyline):
            if not self._is_bare and model.leyline is not self.leyline:
                raise ConfigError("the model is a ChatLeyline with a runtime of its own; give settings to one of them")
            return model
        with self._lock:
            known = self._chats.get(id(model))
            if known is None or known[0] is not model:
                known = self._chats[id(model)] = (
                    model,
                    leyline_chat(model, self.leyline, prepare_ahead=self.prepare_ahead),
                )
            self._chats.move_to_end(id(model))
            while len(self._chats) > _MAX_MODELS:
                self._chats.popitem(last=False)
            return known[1]


class _PlainTurn:
    """A turn of a model that does not speak to Leyline's clients: the policy's view, and a report about it."""

    def __init__(self, leyline: Leyline, request: Any) -> None:
        self._leyline, self._model = leyline, type(request.model).__name__
        self._session = leyline.manager.session(_session(request))
        messages, self._plan = plan_view(self._session, request.messages)
        self.request = request.override(messages=messages)

    def finished(self, response: Any) -> Any:
        """The handler's response, with the report on its message."""
        answer = _last_message(response)
        usage = _usage(answer)
        self._session.commit(self._plan, usage=usage)
        why = Fallback(reason=FallbackReason.SERVER_WITHOUT_LEYLINE, detail=f"{self._model} is no ChatOpenAI")
        session_id = self._session.session_id
        report = ClientReport.of(self._plan, None, session=session_id, usage=usage, fallbacks=(why,))
        if isinstance(answer, AIMessage):
            annotate(answer, report)
        self._leyline.publish(report)
        return response


def _last_message(response: Any) -> Any:
    """The model's message in any of the shapes a handler may return."""
    response = getattr(response, "model_response", response)
    result = getattr(response, "result", None)
    return result[-1] if isinstance(result, list) and result else response


def _usage(answer: Any) -> Usage | None:
    usage = getattr(answer, "usage_metadata", None)
    if usage is None:
        return None
    cached = (usage.get("input_token_details") or {}).get("cache_read") or 0
    return Usage(usage["input_tokens"], cached, usage["output_tokens"])


def _amortizing_rewrites(config: Config) -> Config:
    """What other middleware edits is rarely a secret: unless the config says otherwise, it is amortized."""
    return dataclasses.replace(config, rewrite_mode=Mode.AMORTIZE) if config.rewrite_mode is Mode.AUTO else config


def _session(request: Any) -> str | None:
    """The thread of the checkpointer; without one, the id that LangGraph gave the first message."""
    info = getattr(request.runtime, "execution_info", None)
    thread_id = getattr(info, "thread_id", None)
    if thread_id is not None:
        return str(thread_id)
    messages: Sequence[BaseMessage] = request.state.get("messages") or request.messages
    return messages[0].id if messages else None
