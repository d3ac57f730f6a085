"""What an OpenAI client and its copies share: the context manager, what is known of servers, who gets the reports."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from leyline_agent.client_report import ClientReport
from leyline_agent.config import Config
from leyline_agent.errors import ConfigError
from leyline_agent.integrations.openai.capability import Capability, CapabilityCache, Get, server_root
from leyline_agent.integrations.openai.chat_request import ChatRequest
from leyline_agent.integrations.openai.served_tokenizer import LazyRenderer, ServedTokenizers
from leyline_agent.integrations.openai.side_requests import SideRequests
from leyline_agent.integrations.openai.turn import ChatTurn
from leyline_agent.manager import ContextManager, Session
from leyline_agent.policy import MessageFunction, Policy
from leyline_agent.renderers import Renderer, ServerRenderer, TemplateRenderer, VerifiedRenderer
from leyline_agent.telemetry import annotate_current_span

logger = logging.getLogger("leyline_agent")

OnReport = Callable[[ClientReport], None]

_TOKENIZER_TIMEOUT_S = 60.0
_REJECTED = (400, 404, 422)  # how servers answer to fields they do not know


class Leyline:
    """Shared by all copies of a client (`with_options`), and by several clients if you like. For threads and tasks.

    `renderer` renders on this side, by default with the tokenizer of the server; the server verifies it unless
    the config says otherwise. `on_report` is called with the report of every turn, in the thread that read the answer.
    `tokenizers` and `capabilities` let several of these share what they know of servers.
    """

    def __init__(
        self,
        policy: Policy | MessageFunction | None = None,
        *,
        config: Config | None = None,
        renderer: Renderer | None = None,
        on_report: OnReport | None = None,
        manager: ContextManager | None = None,
        tokenizers: ServedTokenizers | None = None,
        capabilities: CapabilityCache | None = None,
    ) -> None:
        if manager is not None and (policy is not None or config is not None):
            raise ConfigError("give either `manager` or policy and config; the manager has its own")
        self.config = manager.config if manager is not None else config or Config.from_env()
        self.manager = manager or ContextManager(policy, config=self.config)
        if renderer is None and self.config.tokenizer is not None:
            renderer = TemplateRenderer.from_folder(self.config.tokenizer)
        self.renderer = renderer
        self.listeners: list[OnReport] = [on_report] if on_report is not None else []
        self.capabilities = capabilities or CapabilityCache(self.config.probe_ttl_s)
        self.tokenizers = tokenizers or ServedTokenizers()
        self._last_fields: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, leyline: Leyline | None, **options: Any) -> Leyline:
        """`leyline` itself, or without one a new runtime with these options. Raises ConfigError for both together."""
        if leyline is None:
            return cls(**options)
        if any(value is not None for value in options.values()):
            raise ConfigError(f"give either `leyline` or {', '.join(options)}; the runtime has its own")
        return leyline

    @property
    def executor(self) -> ThreadPoolExecutor:
        """Threads in which async clients plan, so that neither rendering nor a policy holds up the event loop."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="leyline")
            return self._executor

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in one of these threads, in the caller's context: its span, its LangChain run."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self.executor, context.run, function, *args)

    def begin(self, request: ChatRequest, side: SideRequests, session_id: str | None) -> ChatTurn | None:
        """The turn to make of a request, None if Leyline is switched off or no plan can be made."""
        if not self.config.enabled:
            return None
        try:
            return self._plan(request, side, session_id)
        except Exception:
            # Never the reason for a failed model call: without a plan, the request is the caller's own.
            logger.exception("leyline could not plan this request; it is sent as the stock client would")
            return None

    def session(self, request: ChatRequest, side: SideRequests, session_id: str | None) -> Session:
        """The session a request belongs to."""
        return self.manager.session(
            request.session_id or session_id,
            renderer=self._renderer(side, request.model),
            scope=self.address(side) + request.scope,
        )

    def address(self, side: SideRequests) -> str:
        """What the scope of every session on a server begins with. Another tokenizer at the same URL is another one."""
        return f"{side.base_url}\x1e{self.capability(side).rendering}\x1e"

    def lost(self, status_code: int, side: SideRequests) -> bool:
        """Whether an error status means that the server at this address has no Leyline any more. Asks it again."""
        if status_code not in _REJECTED:
            return False
        self.capabilities.forget(server_root(side.base_url))
        return not self.capability(side).ready

    def publish(self, report: ClientReport, of_this_call: OnReport | None = None) -> None:
        """Hand a finished turn's report to the span and the listeners."""
        annotate_current_span(report)
        for listener in (*self.listeners, *([of_this_call] if of_this_call is not None else [])):
            try:
                listener(report)
            except Exception:
                logger.exception("a listener for Leyline's reports failed")

    def capability(self, side: SideRequests) -> Capability:
        """Whether the server has Leyline."""
        return self.capabilities.of(server_root(side.base_url), _getter(side, self.config.probe_timeout_s))

    def _plan(self, request: ChatRequest, side: SideRequests, session_id: str | None) -> ChatTurn:
        capability = self.capability(side)
        session = self.session(request, side, session_id)
        if session.session_id is not None:
            self._remember(session.session_id, request)
        plan = session.plan(
            request.messages,
            tools=request.tools,
            template_kwargs=request.template_kwargs,
            options=request.render_options,
            use_tokens=capability.ready,
        )
        return ChatTurn(self, session, request, plan, capability, server_root(side.base_url))

    def last_fields(self, session_id: str | None) -> Mapping[str, Any]:
        """What the last request of a named session said besides its messages: model, tools, template arguments."""
        with self._lock:
            return self._last_fields.get(session_id or "", {})

    def forget(self, session_id: str) -> None:
        """Forget what `last_fields` knows of a session."""
        with self._lock:
            self._last_fields.pop(session_id, None)

    def _remember(self, session_id: str, request: ChatRequest) -> None:
        with self._lock:
            self._last_fields[session_id] = {key: v for key, v in request.body.items() if key != "messages"}
            self._last_fields.move_to_end(session_id)
            while len(self._last_fields) > self.config.max_turns:
                self._last_fields.popitem(last=False)

    def _renderer(self, side: SideRequests, model: str | None) -> Renderer:
        server = ServerRenderer(side.post, model=model)
        if self.renderer is not None:
            return self._verified(self.renderer, server, side)
        return LazyRenderer(lambda: self._verified(self._served(side), server, side))

    def _served(self, side: SideRequests) -> Renderer | None:
        capability = self.capability(side)
        if not self.config.fetch_tokenizer or not capability.ready:
            return None
        getter = _getter(side, _TOKENIZER_TIMEOUT_S)
        return self.tokenizers.of(server_root(side.base_url), getter, capability.rendering)

    def _verified(self, local: Renderer | None, server: ServerRenderer, side: SideRequests) -> Renderer:
        if local is None:
            return server
        if not self.config.verify_renderer:
            return local
        rendering = self.capability(side).rendering
        return VerifiedRenderer(local, server, self.tokenizers.verdicts(local, side.base_url, server.model, rendering))


def _getter(side: SideRequests, timeout_s: float) -> Get:
    return lambda url: side.get(url, timeout_s)
