"""Leyline below an SDK: transports for clients that take nothing but an `http_client`.

    client = SomeSDK(http_client=http_client(policy=TruncateToolOutputs()))

The fallback where `OpenAI` and `AsyncOpenAI` cannot be used. It works on bytes, so it costs a parse of each body, sees
attempts instead of calls, and has no response object to put a report on: reports go to `on_report`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import openai

from leyline_agent.errors import RenderError
from leyline_agent.integrations.openai.chat_request import ChatRequest
from leyline_agent.integrations.openai.runtime import Leyline
from leyline_agent.integrations.openai.side_requests import run_in_loop
from leyline_agent.integrations.openai.turn import ChatTurn

_PATH = "/chat/completions"
_CHANGED_HEADERS = {"content-length", "transfer-encoding", "content-encoding"}


_EVENT_END = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)|(?<=\r\r)")


def http_client(leyline: Leyline | None = None, *, module: Any = None, transport: Any = None, **options: Any) -> Any:
    """An `httpx.Client` (or `httpx2.Client`, whichever the installed openai uses) with Leyline in it.

    `options` are those of `Leyline` (`policy`, `config`, `on_report`, ...). `module` is the HTTP library to use,
    `transport` what to send through: one of the library's, where proxies or certificates matter.
    """
    library = module or _http_library()
    inner = transport or library.HTTPTransport()
    ours = sync_transport(library, inner, leyline or Leyline(**options))
    return library.Client(transport=ours, follow_redirects=True)


def async_http_client(
    leyline: Leyline | None = None, *, module: Any = None, transport: Any = None, **options: Any
) -> Any:
    """`http_client` for async SDKs."""
    library = module or _http_library()
    inner = transport or library.AsyncHTTPTransport()
    ours = async_transport(library, inner, leyline or Leyline(**options))
    return library.AsyncClient(transport=ours, follow_redirects=True)


def _http_library() -> Any:
    """The HTTP library of the installed SDK: version 3 went over to httpx2."""
    return importlib.import_module("httpx" if int(openai.__version__.split(".")[0]) < 3 else "httpx2")


def sync_transport(library: Any, inner: Any, leyline: Leyline) -> Any:
    """A transport of `library` around the transport `inner`."""

    class LeylineTransport(library.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            request.read()
            chat = _chat_of(request)
            if chat is None:
                return inner.handle_request(request)
            side = _SideRequests(library, inner, request)
            turn = leyline.begin(chat, side, None)
            if turn is None:
                return inner.handle_request(_with_body(library, request, chat.plain_body))
            try:
                response = inner.handle_request(_with_body(library, request, turn.body))
            except (library.NetworkError, library.RemoteProtocolError):
                turn.unanswered()
                raise
            if response.status_code != 200:
                response.read()
                if turn.plain or not leyline.lost(response.status_code, side):
                    return response
                turn = turn.without_leyline(response.status_code)
                response = inner.handle_request(_with_body(library, request, turn.body))
                if response.status_code != 200:
                    return response
            turn.sent()
            if chat.body.get("stream"):
                return _with_stream(library, response, _SyncEvents(library, response, turn))
            response.read()
            return _with_content(library, response, _whole(turn, response.content))

        def close(self) -> None:
            inner.close()

    return LeylineTransport()


def async_transport(library: Any, inner: Any, leyline: Leyline) -> Any:
    """An async transport of `library` around the transport `inner`."""

    class LeylineAsyncTransport(library.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            await request.aread()
            chat = _chat_of(request)
            if chat is None:
                return await inner.handle_async_request(request)
            side = _SideRequests(library, inner, request, asyncio.get_running_loop())
            turn = await leyline.in_thread(leyline.begin, chat, side, None)
            if turn is None:
                return await inner.handle_async_request(_with_body(library, request, chat.plain_body))
            try:
                response = await inner.handle_async_request(_with_body(library, request, turn.body))
            except (library.NetworkError, library.RemoteProtocolError):
                turn.unanswered()
                raise
            if response.status_code != 200:
                await response.aread()
                if turn.plain or not await leyline.in_thread(leyline.lost, response.status_code, side):
                    return response
                turn = turn.without_leyline(response.status_code)
                response = await inner.handle_async_request(_with_body(library, request, turn.body))
                if response.status_code != 200:
                    return response
            turn.sent()
            if chat.body.get("stream"):
                return _with_stream(library, response, _AsyncEvents(library, response, turn))
            await response.aread()
            return _with_content(library, response, _whole(turn, response.content))

        async def aclose(self) -> None:
            await inner.aclose()

    return LeylineAsyncTransport()


class _SideRequests:
    """Leyline's own requests, with the headers of the caller's, through the caller's transport."""

    def __init__(self, library: Any, inner: Any, request: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._library, self._inner, self._loop = library, inner, loop
        self._headers = {name: v for name, v in request.headers.items() if name.lower() not in _CHANGED_HEADERS}
        self._extensions = request.extensions
        self.base_url = str(request.url).partition(_PATH)[0]

    def get(self, url: str, timeout_s: float) -> Any:
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        extensions = {**self._extensions, "timeout": timeout}
        return self._send(self._library.Request("GET", url, headers=self._headers, extensions=extensions))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        url = path if path.startswith("http") else self.base_url + path
        content = json.dumps(body).encode()
        return self._send(
            self._library.Request("POST", url, headers=self._headers, content=content, extensions=self._extensions)
        )

    def _send(self, request: Any) -> Any:
        if self._loop is None:
            response = self._inner.handle_request(request)
            response.read()
        else:
            response = run_in_loop(self._send_async(request), self._loop)
        if response.status_code != 200:
            raise _StatusError(response.status_code)
        return json.loads(response.content)

    async def _send_async(self, request: Any) -> Any:
        response = await self._inner.handle_async_request(request)
        await response.aread()
        return response


class _StatusError(RenderError):
    """An HTTP status other than 200 for one of Leyline's own requests."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"HTTP status {status_code}")
        self.status_code = status_code
        self.body = None


def _chat_of(request: Any) -> ChatRequest | None:
    """The chat completion in an HTTP request that was read, None for any other."""
    if request.method != "POST" or not request.url.path.endswith(_PATH):
        return None
    try:
        body = json.loads(request.content)
    except ValueError:
        return None
    return ChatRequest.of_body(body) if isinstance(body, dict) else None


def _with_body(library: Any, request: Any, body: Mapping[str, Any]) -> Any:
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _CHANGED_HEADERS}
    content = json.dumps(body).encode()
    return library.Request(request.method, request.url, headers=headers, content=content, extensions=request.extensions)


def _whole(turn: ChatTurn, content: bytes) -> bytes:
    """A whole answer as the caller gets it, once Leyline has taken its facts out."""
    try:
        body = json.loads(content)
    except ValueError:
        return content
    turn.observe_json(body)
    return json.dumps(body).encode()


def _with_content(library: Any, response: Any, content: bytes) -> Any:
    headers = [(name, value) for name, value in response.headers.items() if name.lower() not in _CHANGED_HEADERS]
    return library.Response(response.status_code, headers=headers, content=content, extensions=response.extensions)


def _with_stream(library: Any, response: Any, events: Any) -> Any:
    headers = [(name, value) for name, value in response.headers.items() if name.lower() not in _CHANGED_HEADERS]
    return library.Response(
        response.status_code, headers=headers, stream=events.stream(), extensions=response.extensions
    )


class _Events:
    """Cuts a byte stream into server-sent events and drops those that only Leyline asked for."""

    def __init__(self, library: Any, response: Any, turn: ChatTurn) -> None:
        self._library, self._response, self._turn = library, response, turn
        self._rest = b""

    def _take(self, data: bytes) -> bytes:
        *events, self._rest = _EVENT_END.split(self._rest + data)
        return b"".join(event for event in events if self._wanted(event))

    def _wanted(self, event: bytes) -> bool:
        data = event.removeprefix(b"data:").strip()
        if data == b"[DONE]":  # some SDKs read no further
            self._turn.finish()
            return True
        try:
            chunk = json.loads(data)
        except ValueError:
            return True
        return self._turn.answer.take_json(chunk) if isinstance(chunk, dict) else True

    def _end(self) -> bytes:
        if not self._turn.committed:
            self._turn.finish()
        return self._rest


class _SyncEvents(_Events):
    def stream(self) -> Any:
        events = self
        base: Any = self._library.SyncByteStream

        class Stream(base):  # type: ignore[misc]
            def __iter__(self) -> Iterator[bytes]:
                for data in events._response.iter_bytes():
                    yield events._take(data)
                yield events._end()

            def close(self) -> None:
                events._response.close()

        return Stream()


class _AsyncEvents(_Events):
    def stream(self) -> Any:
        events = self
        base: Any = self._library.AsyncByteStream

        class Stream(base):  # type: ignore[misc]
            async def __aiter__(self) -> AsyncIterator[bytes]:
                async for data in events._response.aiter_bytes():
                    yield events._take(data)
                yield events._end()

            async def aclose(self) -> None:
                await events._response.aclose()

        return Stream()
