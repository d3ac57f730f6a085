"""`ChatLeyline`: a `ChatOpenAI` whose requests go through Leyline's clients.

LangChain's messages lose and re-serialize things on their way to the wire, so nothing is decided on them: the clients
see the payload as it is sent, and diff that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import Field, model_validator

from leyline_agent.client_report import ClientReport
from leyline_agent.integrations.openai import AsyncOpenAI, Leyline, OpenAI
from leyline_agent.wire import KEY


class ChatLeyline(ChatOpenAI):
    """`ChatOpenAI` with a policy. Takes the same arguments, and `policy`, or `leyline` for a runtime to share.

    Every answer carries its report in `response_metadata["leyline"]`, and the reused tokens in `usage_metadata`.
    Calls belong to the session `session`, else to that of LangGraph's thread, else to the one their messages tell.
    """

    policy: Any = Field(default=None, exclude=True)
    leyline: Any = Field(default=None, exclude=True)
    session: str | None = None
    root_client: Any = Field(default=None, exclude=True)  # as in ChatOpenAI, whose types may be absent
    root_async_client: Any = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _use_leyline_clients(self) -> Self:
        """Put Leyline's clients in the place of the stock ones that ChatOpenAI has made or was given."""
        if self.leyline is None:
            self.leyline = Leyline(self.policy)
        stock = self.root_client
        if stock is not None and not isinstance(stock, OpenAI):
            client = OpenAI.adopt(stock, self.leyline)
            self.root_client, self.client = client, client.chat.completions
        stock = self.root_async_client
        if stock is not None and not isinstance(stock, AsyncOpenAI):
            async_client = AsyncOpenAI.adopt(stock, self.leyline)
            self.root_async_client, self.async_client = async_client, async_client.chat.completions
        return self

    def wire_messages(self, messages: list[BaseMessage]) -> list[dict[str, Any]]:
        """The messages as they are sent."""
        payload: list[dict[str, Any]] = self._get_request_payload(messages)["messages"]
        return payload

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return super()._generate(messages, stop, run_manager, **self._with_session(kwargs, run_manager))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await super()._agenerate(messages, stop, run_manager, **self._with_session(kwargs, run_manager))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        reports: list[ClientReport] = []
        kwargs = self._with_session(kwargs, run_manager, reports.append)
        yield from super()._stream(messages, stop, run_manager, **kwargs)
        for report in reports:
            yield _report_chunk(report)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        reports: list[ClientReport] = []
        kwargs = self._with_session(kwargs, run_manager, reports.append)
        async for chunk in super()._astream(messages, stop, run_manager, **kwargs):
            yield chunk
        for report in reports:
            yield _report_chunk(report)

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        report = getattr(response, KEY, None)
        if isinstance(report, ClientReport):
            for generation in result.generations:
                if isinstance(generation.message, AIMessage):
                    _annotate(generation.message, report)
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
        thread_id = (getattr(run_manager, "metadata", None) or {}).get("thread_id")
        ours.setdefault("session", self.session or thread_id)
        if on_report is not None:
            ours["on_report"] = on_report
        return {**kwargs, "extra_body": {**body, KEY: ours}}


def leyline_chat(model: ChatOpenAI, leyline: Leyline) -> ChatLeyline:
    """The same model through Leyline: its settings, its connections, and the runtime `leyline`."""
    settings = {name: getattr(model, name) for name in model.model_fields_set if name not in ("policy", "leyline")}
    return ChatLeyline(**settings, leyline=leyline)


def _report_chunk(report: ClientReport) -> ChatGenerationChunk:
    metadata = {KEY: report.model_dump(mode="json")}
    return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=metadata))


def _annotate(message: AIMessage, report: ClientReport) -> None:
    message.response_metadata[KEY] = report.model_dump(mode="json")
    if message.usage_metadata is not None and report.served:
        details = {**(message.usage_metadata.get("input_token_details") or {}), "cache_read": report.reused}
        message.usage_metadata["input_token_details"] = details  # type: ignore[typeddict-item]
