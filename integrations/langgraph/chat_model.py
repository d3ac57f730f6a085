"""`ChatLeyline`: a `ChatOpenAI` whose requests go through Leyline's clients.

LangChain's messages lose and re-serialize things on their way to the wire, so nothing is decided on them: the clients
see the payload as it is sent, and diff that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables.config import ensure_config
from langchain_openai import ChatOpenAI
from pydantic import Field, model_validator

from leyline_agent.client_report import ClientReport
from leyline_agent.integrations.langgraph.reports import annotate, as_metadata
from leyline_agent.integrations.openai import AsyncOpenAI, Leyline, OpenAI
from leyline_agent.integrations.openai.session import prepare
from leyline_agent.integrations.openai.side_requests import SyncSideRequests
from leyline_agent.wire import KEY

logger = logging.getLogger("leyline_agent")


class ChatLeyline(ChatOpenAI):
    """`ChatOpenAI` with a policy. Takes the same arguments, and `policy`, or `leyline` for a runtime to share.

    Every answer carries its report in `response_metadata["leyline"]`, and the reused tokens in `usage_metadata`.
    Calls belong to the session `session`, else to that of LangGraph's thread, else to the one their messages tell.
    `prepare_ahead`: when an answer of a session asks for tools, the server already splices what the next call will
    need, while they run.
    """

    policy: Any = Field(default=None, exclude=True)
    leyline: Any = Field(default=None, exclude=True)
    session: str | None = None
    prepare_ahead: bool = True
    root_client: Any = Field(default=None, exclude=True)  # as in ChatOpenAI, whose types may be absent
    root_async_client: Any = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _use_leyline_clients(self) -> Self:
        """Put Leyline's clients in the place of the stock ones that ChatOpenAI has made or was given."""
        self.leyline, self.policy = Leyline.of(self.leyline, policy=self.policy), None
        stock = self.root_client
        if stock is not None and not isinstance(stock, OpenAI):
            client = OpenAI.adopt(stock, self.leyline)
            self.root_client, self.client = client, client.chat.completions
        stock = self.root_async_client
        if stock is not None and not isinstance(stock, AsyncOpenAI):
            async_client = AsyncOpenAI.adopt(stock, self.leyline)
            self.root_async_client, self.async_client = async_client, async_client.chat.completions
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs = self._with_session(kwargs, run_manager)
        result = super()._generate(messages, stop, run_manager, **kwargs)
        self._prepare(messages, result.generations[0].message, kwargs)
        return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs = self._with_session(kwargs, run_manager)
        result = await super()._agenerate(messages, stop, run_manager, **kwargs)
        self._prepare(messages, result.generations[0].message, kwargs)
        return result

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        streamed = _Streamed()
        kwargs = self._with_session(kwargs, run_manager, streamed.reports.append)
        for chunk in super()._stream(messages, stop, run_manager, **kwargs):
            streamed.chunks.append(chunk)
            yield chunk
        yield from streamed.report_chunks()
        self._prepare(messages, streamed.message, kwargs)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        streamed = _Streamed()
        kwargs = self._with_session(kwargs, run_manager, streamed.reports.append)
        async for chunk in super()._astream(messages, stop, run_manager, **kwargs):
            streamed.chunks.append(chunk)
            yield chunk
        for chunk in streamed.report_chunks():
            yield chunk
        self._prepare(messages, streamed.message, kwargs)

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        report = getattr(response, KEY, None)
        if isinstance(report, ClientReport):
            for generation in result.generations:
                if isinstance(generation.message, AIMessage):
                    annotate(generation.message, report)
        return result

    def _with_session(
        self,
        kwargs: dict[str, Any],
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        on_report: Callable[[ClientReport], None] | None = None,
    ) -> dict[str, Any]:
        """The call's arguments with its session, past the shallow merge in which a call's body replaces the model's."""
        body = {**(self.extra_body or {}), **(kwargs.get("extra_body") or {})}
        named = body.get(KEY)
        ours: dict[str, Any] = dict(named) if isinstance(named, dict) else {}
        ours.setdefault("session", self.session or _thread_id(run_manager))
        if on_report is not None:
            ours["on_report"] = on_report
        return {**kwargs, "extra_body": {**body, KEY: ours}}

    def _prepare(self, messages: list[BaseMessage], answer: BaseMessage | None, kwargs: dict[str, Any]) -> None:
        """Start splicing for the next call, in the background, when this one asked for tools."""
        session = kwargs["extra_body"][KEY]["session"]
        if self.prepare_ahead and session and self.root_client and isinstance(answer, AIMessage) and answer.tool_calls:
            self.leyline.executor.submit(self._prepare_quietly, session, [*messages, answer], kwargs)

    def _prepare_quietly(self, session: str, messages: list[BaseMessage], kwargs: dict[str, Any]) -> None:
        try:
            payload = self._get_request_payload(messages, **kwargs)
            history = payload.pop("messages", None)  # there is none where the Responses API is used
            if history is not None:
                prepare(self.leyline, SyncSideRequests(self.root_client), session, history, payload)
        except Exception as err:  # noqa: BLE001 - work ahead; the turn itself does without
            logger.info("splicing ahead failed, the turn will do it: %s", err)


def _thread_id(run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> str | None:
    """The thread of the LangGraph run around a call. A model that streams inside `invoke` gets no run manager."""
    metadata = getattr(run_manager, "metadata", None) or {}
    thread_id = metadata.get("thread_id") or ensure_config().get("configurable", {}).get("thread_id")
    return str(thread_id) if thread_id is not None else None


class _Streamed:
    """What came of a streamed call: its chunks, and its report once the stream was read."""

    def __init__(self) -> None:
        self.chunks: list[ChatGenerationChunk] = []
        self.reports: list[ClientReport] = []

    @property
    def message(self) -> BaseMessage | None:
        """The whole answer, if it calls tools; nobody needs it put together otherwise."""
        messages: list[Any] = [chunk.message for chunk in self.chunks]
        return sum(messages[1:], messages[0]) if any(one.tool_call_chunks for one in messages) else None

    def report_chunks(self) -> Iterator[ChatGenerationChunk]:
        """One more chunk for the report. Usage adds up over chunks, so what the server counted as cached comes off."""
        usages = [u for chunk in self.chunks if (u := getattr(chunk.message, "usage_metadata", None)) is not None]
        counted = sum((usage.get("input_token_details") or {}).get("cache_read") or 0 for usage in usages)
        for report in self.reports:
            usage = None
            if usages and report.served:
                details = {"cache_read": report.reused - counted}
                usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, "input_token_details": details}
            message = AIMessageChunk(content="", response_metadata=as_metadata(report), usage_metadata=usage)  # type: ignore[arg-type]
            yield ChatGenerationChunk(message=message)


def leyline_chat(model: ChatOpenAI, leyline: Leyline, *, prepare_ahead: bool = True) -> ChatLeyline:
    """The same model through Leyline: its class, its settings, its connections, and the runtime `leyline`."""
    kind: type[ChatLeyline] = ChatLeyline
    if type(model) is not ChatOpenAI:  # one of the user's own, with methods of its own
        kind = type(f"Leyline{type(model).__name__}", (ChatLeyline, type(model)), {})
    settings = {name: getattr(model, name) for name in model.model_fields_set}
    return kind(**{**settings, "policy": None, "leyline": leyline, "prepare_ahead": prepare_ahead})
