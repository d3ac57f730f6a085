"""Requests that run while a test does something else: streamed, so that they can be watched, awaited or hung up on."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Self

from splice_client import Answer, SpliceClient, generate_answer, generate_body

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


class StreamingRequest:
    """One streamed `/generate` in a thread of its own. Leaving the `with` block early hangs up."""

    def __init__(self, server: SpliceClient, prompt: Sequence[int], leyline: object = None, **options: Any) -> None:
        self.prompt = list(prompt)
        self._body = generate_body(prompt, leyline, **options) | {"stream": True}
        self._client = server.again()
        self._first_token = threading.Event()
        self._hang_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._last: dict[str, Any] = {}
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up.set()
        self._thread.join(timeout=60)
        self._client.close()

    def wait_for_first_token(self, timeout_s: float = 60.0) -> None:
        assert self._first_token.wait(timeout_s), f"no token after {timeout_s} s; error: {self._error!r}"

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the end, of whatever kind."""
        self._thread.join(timeout_s)

    def result(self, timeout_s: float = 120.0) -> Answer:
        """The whole answer, once it is there."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still running after {timeout_s} s"
        if self._error is not None:
            raise self._error
        return generate_answer(self.prompt, self._last)

    def _run(self) -> None:
        try:
            with self._client.http.stream("POST", "/generate", json=self._body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._last = json.loads(line.removeprefix("data: "))
                        self._first_token.set()
                    if self._hang_up.is_set():
                        return
        except Exception as err:  # noqa: BLE001  (told to whoever asks for the result)
            self._error = err
            self._first_token.set()
