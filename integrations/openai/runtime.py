"""What an OpenAI client and its copies share: the context manager, what is known of servers, who gets the reports."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from leyline_agent.client_report import ClientReport
from leyline_agent.config import Config
from leyline_agent.integrations.openai.capability import Capability, CapabilityCache, server_root
from leyline_agent.integrations.openai.chat_request import ChatRequest
from leyline_agent.integrations.openai.turn import ChatTurn
from leyline_agent.manager import ContextManager, Session
from leyline_agent.policy import MessageFunction, Policy
from leyline_agent.renderers import Renderer, ServerRenderer, TemplateRenderer, VerifiedRenderer
from leyline_agent.renderers.verified import Verdicts
from leyline_agent.telemetry import annotate_current_span

logger = logging.getLogger("leyline_agent")

OnReport = Callable[[ClientReport], None]

_REJECTED = (400, 404, 422)  # how servers answer to fields they do not know


class Transport(Protocol):
    """The caller's own client, for Leyline's side requests: same host, key, proxies and certificates."""

    base_url: str

    def get(self, url: str) -> Any:
        """JSON from an absolute URL."""

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON from a path below the base URL, or from an absolute URL."""


class Leyline:
    """Shared by all copies of a client (`with_options`), and by several clients if you like. For threads and tasks.

    `renderer` renders on this side; it is verified against the server unless the config says otherwise. `on_report` is
    called with the report of every turn, in the thread that read the answer.
    """

    def __init__(
        self,
        policy: Policy | MessageFunction | None = None,
        *,
        config: Config | None = None,
        renderer: Renderer | None = None,
        on_report: OnReport | None = None,
        manager: ContextManager | None = None,
    ) -> None:
        self.config = config or (manager.config if manager is not None else Config.from_env())
        self.manager = manager or ContextManager(policy, config=self.config)
        if renderer is None and self.config.tokenizer is not None:
            renderer = TemplateRenderer.from_folder(self.config.tokenizer)
        self.renderer = renderer
        self.listeners: list[OnReport] = [on_report] if on_report is not None else []
        self.capabilities = CapabilityCache(self.config.probe_ttl_s)
        self._verdicts: dict[str, Verdicts] = {}
        self._last_fields: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def executor(self) -> ThreadPoolExecutor:
        """Threads in which async clients plan, so that neither rendering nor a policy holds up the event loop."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="leyline")
            return self._executor

    def concerned(self, options: Any) -> ChatRequest | None:
        """The request in the SDK's options, None for one that goes out as it is."""
        return ChatRequest.of(options) if self.config.enabled else None

    def begin(self, request: ChatRequest, transport: Transport, session_id: str | None) -> ChatTurn | None:
        """The turn to make of a request, None if no plan can be made."""
        try:
            return self._plan(request, transport, session_id)
        except Exception:
            # Never the reason for a failed model call: without a plan, the request is the caller's own.
            logger.exception("leyline could not plan this request; it is sent as the stock client would")
            return None

    def session(self, request: ChatRequest, transport: Transport, session_id: str | None) -> Session:
        """The session a request belongs to."""
        return self.manager.session(
            request.session_id or session_id,
            renderer=self._renderer(transport, request.model),
            scope=f"{transport.base_url}\x1e{request.scope}",
        )

    def rejects(self, error: Exception, transport: Transport) -> bool:
        """Whether an error means that the server at this address has no Leyline (any more). Asks it again."""
        if getattr(error, "status_code", None) not in _REJECTED:
            return False
        root = server_root(transport.base_url)
        self.capabilities.forget(root)
        return not self.capabilities.of(root, transport.get).ready

    def publish(self, report: ClientReport, of_this_call: OnReport | None = None) -> None:
        """Hand a finished turn's report to the span and the listeners."""
        annotate_current_span(report)
        for listener in (*self.listeners, *([of_this_call] if of_this_call is not None else [])):
            try:
                listener(report)
            except Exception:
                logger.exception("a listener for Leyline's reports failed")

    def capability(self, transport: Transport) -> Capability:
        """Whether the transport's server has Leyline."""
        return self.capabilities.of(server_root(transport.base_url), transport.get)

    def _plan(self, request: ChatRequest, transport: Transport, session_id: str | None) -> ChatTurn:
        capability = self.capability(transport)
        session = self.session(request, transport, session_id)
        if session.session_id is not None:
            self._remember(session.session_id, request)
        plan = session.plan(
            request.messages,
            tools=request.tools,
            template_kwargs=request.template_kwargs,
            options=request.render_options,
            use_tokens=capability.ready,
        )
        return ChatTurn(self, session, request, plan, capability.fallbacks, plain=not capability.ready)

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

    def _renderer(self, transport: Transport, model: str | None) -> Renderer:
        server = ServerRenderer(transport.post, model=model)
        if self.renderer is None:
            return server
        if not self.config.verify_renderer:
            return self.renderer
        key = f"{transport.base_url}\x1e{model}"
        return VerifiedRenderer(self.renderer, server, self._verdicts.setdefault(key, Verdicts()))
