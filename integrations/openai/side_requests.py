"""Leyline's own requests beside a call (is it there, how would it render this), through the caller's client.

They go to the same server with the caller's key, headers and time limit, so that a gateway treats them as it treats the
call itself. A call that fails shows its own error, so these are retried once at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import openai

_OPEN_LOOP_CHECK_S = 1.0
_OWN_HEADERS = "x-stainless-"  # in which the SDK tells itself how to return an answer


class SideRequests(Protocol):
    """JSON from the server of a client. Raises whatever the client raises."""

    base_url: str

    def get(self, url: str, timeout_s: float) -> Any:
        """JSON from an absolute URL, asked for once, or twice where there was no connection."""

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON from a path below the base URL, or from an absolute URL."""


class SyncSideRequests:
    """Through a sync client; `call` are the SDK's options of the call that they are for."""

    def __init__(self, client: openai.OpenAI, call: Any = None) -> None:
        self._client, self._options = client, _options_of(call)
        self.base_url = str(client.base_url)

    def get(self, url: str, timeout_s: float) -> Any:
        options: Any = {**self._options, "max_retries": 0, "timeout": timeout_s}
        return _once_more_if_unconnected(lambda: self._client.get(url, cast_to=object, options=options))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._client.post(path, cast_to=object, body=body, options=self._options)


class AsyncSideRequests:
    """Through an async client, in its event loop; called from another thread while that loop runs."""

    def __init__(self, client: openai.AsyncOpenAI, loop: asyncio.AbstractEventLoop, call: Any = None) -> None:
        self._client, self._loop, self._options = client, loop, _options_of(call)
        self.base_url = str(client.base_url)

    def get(self, url: str, timeout_s: float) -> Any:
        options: Any = {**self._options, "max_retries": 0, "timeout": timeout_s}
        return _once_more_if_unconnected(
            lambda: run_in_loop(self._client.get(url, cast_to=object, options=options), self._loop)
        )

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return run_in_loop(self._client.post(path, cast_to=object, body=body, options=self._options), self._loop)


def _once_more_if_unconnected(call: Callable[[], Any]) -> Any:
    """What `call` returns, at once tried again when it got no connection.

    A kept connection may be dead: its server was restarted, or it belongs to an event loop that is gone, which some
    HTTP libraries tell with a RuntimeError. Calls would then go without Leyline for a while.
    """
    try:
        return call()
    except openai.APITimeoutError:
        raise
    except (openai.APIConnectionError, RuntimeError):
        return call()


def run_in_loop(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """What `coroutine` returns in the running `loop` of another thread. RuntimeError if that loop is closed first.

    A loop that ends (the program was interrupted, say) would otherwise leave this thread waiting for ever, and the
    interpreter waits for its threads.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise
    while True:
        try:
            return future.result(_OPEN_LOOP_CHECK_S)
        except TimeoutError:
            if future.done():  # the coroutine's own
                return future.result()
            if loop.is_closed():
                raise RuntimeError("the event loop was closed during a request") from None


def _options_of(call: Any) -> Any:
    """What side requests take over from a call: its headers, query and time limit, where it has some of its own."""
    options: dict[str, Any] = {"max_retries": 1}
    if call is None:
        return options
    if not isinstance(call.timeout, openai.NotGiven):
        options["timeout"] = call.timeout
    if call.params:
        options["params"] = call.params
    if isinstance(call.headers, Mapping):
        options["headers"] = {
            name: value for name, value in call.headers.items() if not name.lower().startswith(_OWN_HEADERS)
        }
    return options
