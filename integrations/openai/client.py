"""`OpenAI` and `AsyncOpenAI`: the stock clients, hooked where all their calls meet.

`request()` is the one public method that every resource, helper and raw-response wrapper of the SDK goes through, once
a call (retries happen inside). Chat completions are planned there; everything else passes through untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import openai

from leyline_agent.config import Config
from leyline_agent.integrations.openai.chat_request import ChatRequest, plain_options
from leyline_agent.integrations.openai.runtime import Leyline, OnReport
from leyline_agent.integrations.openai.session import AsyncClientSession, ClientSession
from leyline_agent.integrations.openai.side_requests import AsyncSideRequests, SyncSideRequests
from leyline_agent.policy import MessageFunction, Policy
from leyline_agent.renderers import Renderer


class OpenAI(openai.OpenAI):
    """`openai.OpenAI` with a policy. Takes the same arguments, and some of Leyline's own.

    `policy`: what the model should no longer see; None keeps everything. `config`, `renderer`, `on_report`: see
    `Leyline`. `leyline`: a runtime to share with other clients, instead of the others.
    """

    def __init__(
        self,
        *,
        policy: Policy | MessageFunction | None = None,
        config: Config | None = None,
        renderer: Renderer | None = None,
        on_report: OnReport | None = None,
        leyline: Leyline | None = None,
        leyline_session: str | None = None,
        **options: Any,
    ) -> None:
        self.leyline = Leyline.of(leyline, policy=policy, config=config, renderer=renderer, on_report=on_report)
        self.leyline_session = leyline_session
        super().__init__(**options)

    @classmethod
    def adopt(cls, client: openai.OpenAI, leyline: Leyline) -> OpenAI:
        """A client like another one, class, address, key and connections included, with Leyline in it."""
        twin = client.copy()  # the constructor has options that only the SDK's `copy` knows how to hand on
        twin.__class__ = _with_leyline(cls, type(twin))
        assert isinstance(twin, OpenAI)
        twin.leyline, twin.leyline_session = leyline, None
        return twin

    def session(self, session_id: str) -> ClientSession:
        """A named conversation: `with client.session("id") as session: session.chat.completions.create(...)`."""
        return ClientSession(self.copy(leyline_session=session_id), session_id)

    def copy(self, *, _extra_kwargs: Mapping[str, Any] = {}, **options: Any) -> Self:
        """The SDK's `copy`, with the same Leyline behind the new client."""
        return super().copy(_extra_kwargs=_kept(self, options, _extra_kwargs), **options)

    with_options = copy

    def request(self, cast_to: Any, options: Any, *, stream: bool = False, stream_cls: Any = None) -> Any:
        """The SDK's `request`, once a logical call, with chat completions planned and committed."""
        how: dict[str, Any] = {"stream": stream, "stream_cls": stream_cls}
        request, side = ChatRequest.of(options), SyncSideRequests(self, options)
        turn = self.leyline.begin(request, side, self.leyline_session) if request is not None else None
        if turn is None:
            return super().request(cast_to, plain_options(options), **how)
        try:
            response = super().request(cast_to, turn.options, **how)
        except openai.APIConnectionError as err:
            if not isinstance(err, openai.APITimeoutError):
                turn.unanswered()
            raise
        except openai.APIStatusError as err:
            if turn.plain or not self.leyline.lost(err.status_code, side):
                raise
            turn = turn.without_leyline(err.status_code)
            response = super().request(cast_to, turn.options, **how)
        turn.sent()
        return response


class AsyncOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` with a policy. Takes what `OpenAI` takes."""

    def __init__(
        self,
        *,
        policy: Policy | MessageFunction | None = None,
        config: Config | None = None,
        renderer: Renderer | None = None,
        on_report: OnReport | None = None,
        leyline: Leyline | None = None,
        leyline_session: str | None = None,
        **options: Any,
    ) -> None:
        self.leyline = Leyline.of(leyline, policy=policy, config=config, renderer=renderer, on_report=on_report)
        self.leyline_session = leyline_session
        super().__init__(**options)

    @classmethod
    def adopt(cls, client: openai.AsyncOpenAI, leyline: Leyline) -> AsyncOpenAI:
        """A client like another one, class, address, key and connections included, with Leyline in it."""
        twin = client.copy()  # the constructor has options that only the SDK's `copy` knows how to hand on
        twin.__class__ = _with_leyline(cls, type(twin))
        assert isinstance(twin, AsyncOpenAI)
        twin.leyline, twin.leyline_session = leyline, None
        return twin

    def session(self, session_id: str) -> AsyncClientSession:
        """A named conversation: `async with client.session("id") as session: ...`."""
        return AsyncClientSession(self.copy(leyline_session=session_id), session_id)

    def copy(self, *, _extra_kwargs: Mapping[str, Any] = {}, **options: Any) -> Self:
        """The SDK's `copy`, with the same Leyline behind the new client."""
        return super().copy(_extra_kwargs=_kept(self, options, _extra_kwargs), **options)

    with_options = copy

    async def request(self, cast_to: Any, options: Any, *, stream: bool = False, stream_cls: Any = None) -> Any:
        """The SDK's `request`; planning runs in a thread, its own requests in this event loop."""
        how: dict[str, Any] = {"stream": stream, "stream_cls": stream_cls}
        request = ChatRequest.of(options)
        if request is None:  # not by way of a thread: those wait for just such requests
            return await super().request(cast_to, plain_options(options), **how)
        side = AsyncSideRequests(self, asyncio.get_running_loop(), options)
        turn = await self.leyline.in_thread(self.leyline.begin, request, side, self.leyline_session)
        if turn is None:
            return await super().request(cast_to, plain_options(options), **how)
        try:
            response = await super().request(cast_to, turn.options, **how)
        except openai.APIConnectionError as err:
            if not isinstance(err, openai.APITimeoutError):
                turn.unanswered()
            raise
        except openai.APIStatusError as err:
            if turn.plain or not await self.leyline.in_thread(self.leyline.lost, err.status_code, side):
                raise
            turn = turn.without_leyline(err.status_code)
            response = await super().request(cast_to, turn.options, **how)
        turn.sent()
        return response


def _with_leyline(ours: type, theirs: type) -> type:
    """Our class, or if theirs is not the stock one, both: a client of the user's own keeps its methods."""
    return ours if theirs is ours.__bases__[0] else type(f"Leyline{theirs.__name__}", (ours, theirs), {})


def _kept(client: OpenAI | AsyncOpenAI, options: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Our own constructor arguments for a copy; `options` loses those the SDK does not know."""
    session_id = options.pop("leyline_session", client.leyline_session)
    leyline = options.pop("leyline", client.leyline)
    return {"leyline": leyline, "leyline_session": session_id, **extra}
