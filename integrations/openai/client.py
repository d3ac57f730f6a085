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
from leyline_agent.errors import ConfigError
from leyline_agent.integrations.openai.runtime import Leyline, OnReport
from leyline_agent.integrations.openai.session import AsyncClientSession, ClientSession
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
        self.leyline = _runtime(leyline, policy, config, renderer, on_report)
        self.leyline_session = leyline_session
        super().__init__(**options)

    @classmethod
    def adopt(cls, client: openai.OpenAI, leyline: Leyline) -> OpenAI:
        """A client like a stock one, address, key and connections included, with Leyline in it."""
        twin = client.copy()
        twin.__class__ = cls  # its own constructor has options that only the SDK's `copy` knows how to hand on
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
        request = self.leyline.concerned(options)
        if request is None:
            return super().request(cast_to, options, stream=stream, stream_cls=stream_cls)
        transport = SyncTransport(self)
        turn = self.leyline.begin(request, transport, self.leyline_session)
        if turn is None:
            return super().request(cast_to, options, stream=stream, stream_cls=stream_cls)
        try:
            response = super().request(cast_to, turn.options, stream=stream, stream_cls=stream_cls)
        except openai.APIStatusError as err:
            if turn.plain or not self.leyline.rejects(err, transport):
                raise
            turn = turn.without_leyline(f"it answered {err.status_code}, and no longer has Leyline")
            response = super().request(cast_to, turn.options, stream=stream, stream_cls=stream_cls)
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
        self.leyline = _runtime(leyline, policy, config, renderer, on_report)
        self.leyline_session = leyline_session
        super().__init__(**options)

    @classmethod
    def adopt(cls, client: openai.AsyncOpenAI, leyline: Leyline) -> AsyncOpenAI:
        """A client like a stock one, address, key and connections included, with Leyline in it."""
        twin = client.copy()
        twin.__class__ = cls  # its own constructor has options that only the SDK's `copy` knows how to hand on
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
        request = self.leyline.concerned(options)
        if request is None:  # not by way of the executor: its threads wait for just such requests
            return await super().request(cast_to, options, stream=stream, stream_cls=stream_cls)
        loop = asyncio.get_running_loop()
        transport = AsyncTransport(self, loop)
        executor = self.leyline.executor
        turn = await loop.run_in_executor(executor, self.leyline.begin, request, transport, self.leyline_session)
        if turn is None:
            return await super().request(cast_to, options, stream=stream, stream_cls=stream_cls)
        try:
            response = await super().request(cast_to, turn.options, stream=stream, stream_cls=stream_cls)
        except openai.APIStatusError as err:
            if turn.plain or not await loop.run_in_executor(executor, self.leyline.rejects, err, transport):
                raise
            turn = turn.without_leyline(f"it answered {err.status_code}, and no longer has Leyline")
            response = await super().request(cast_to, turn.options, stream=stream, stream_cls=stream_cls)
        turn.sent()
        return response


class SyncTransport:
    """Leyline's side requests through a sync client. The probe is short and not retried."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self.base_url = str(client.base_url)

    def get(self, url: str) -> Any:
        return self._client.get(url, cast_to=object, options=_probe_options(self._client.leyline.config))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._client.post(path, cast_to=object, body=body)


class AsyncTransport:
    """Leyline's side requests through an async client, called from a planning thread while the loop runs on."""

    def __init__(self, client: AsyncOpenAI, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop
        self.base_url = str(client.base_url)

    def get(self, url: str) -> Any:
        request = self._client.get(url, cast_to=object, options=_probe_options(self._client.leyline.config))
        return asyncio.run_coroutine_threadsafe(request, self._loop).result()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = self._client.post(path, cast_to=object, body=body)
        return asyncio.run_coroutine_threadsafe(request, self._loop).result()


def _probe_options(config: Config) -> Any:
    return {"max_retries": 0, "timeout": config.probe_timeout_s}


def _runtime(
    leyline: Leyline | None,
    policy: Policy | MessageFunction | None,
    config: Config | None,
    renderer: Renderer | None,
    on_report: OnReport | None,
) -> Leyline:
    if leyline is None:
        return Leyline(policy, config=config, renderer=renderer, on_report=on_report)
    if any(value is not None for value in (policy, config, renderer, on_report)):
        raise ConfigError("give either `leyline` or policy, config, renderer and on_report; the runtime has its own")
    return leyline


def _kept(client: OpenAI | AsyncOpenAI, options: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Our own constructor arguments for a copy; `options` loses those the SDK does not know."""
    session_id = options.pop("leyline_session", client.leyline_session)
    leyline = options.pop("leyline", client.leyline)
    return {"leyline": leyline, "leyline_session": session_id, **extra}
