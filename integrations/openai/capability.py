"""Does the server behind a base URL have Leyline? Asked once, remembered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leyline_agent.report import Fallback, FallbackReason

Get = Callable[[str], Any]
"""Fetches JSON from an absolute URL; raises on any failure, with `status_code` on what it raises if there was one."""


def server_root(base_url: str) -> str:
    """The root of a server from an OpenAI base URL: what is before `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether a server may be sent Leyline's fields, and why not.

    `rendering` names the tokenizer and template it renders with; token ids made for another are not for this server.
    """

    ready: bool
    detail: str = ""
    rendering: str = ""

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The reason for reports, nothing for a server with Leyline."""
        if self.ready:
            return ()
        return (Fallback(reason=FallbackReason.SERVER_WITHOUT_LEYLINE, detail=self.detail),)


class CapabilityCache:
    """What is known of each server. "Yes" holds until `forget`; "no" and "did not answer" for limited times."""

    _NO_ANSWER_TTL_S = 10.0

    def __init__(self, ttl_s: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: dict[str, tuple[Capability, float]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def of(self, root: str, get: Get) -> Capability:
        """The capability of the server at `root`, asked for with `get` when it is not known."""
        known = self._fresh(root)
        if known is not None:
            return known
        with self._lock:
            lock = self._locks.setdefault(root, threading.Lock())
        with lock:  # of many threads that start together, one asks
            known = self._fresh(root)
            if known is None:
                known, ttl_s = self._ask(root, get)
                self._known[root] = known, self._clock() + ttl_s
        return known

    def forget(self, root: str) -> None:
        """Ask again the next time."""
        self._known.pop(root, None)

    def _fresh(self, root: str) -> Capability | None:
        known = self._known.get(root)
        return known[0] if known is not None and self._clock() < known[1] else None

    def _ask(self, root: str, get: Get) -> tuple[Capability, float]:
        try:
            status = get(f"{root}/leyline/ready")
        except Exception as err:  # noqa: BLE001 - any SDK, any transport: no answer means a plain request
            code = getattr(err, "status_code", None)
            if code is None:
                return Capability(ready=False, detail=f"no answer to GET /leyline/ready: {err}"), self._NO_ANSWER_TTL_S
            if code == 503:
                return Capability(ready=False, detail=_reason(err)), self._NO_ANSWER_TTL_S
            why = f"GET /leyline/ready answered {code}"
            if code == 404:
                why += ": no Leyline there, or a router in front of it that does not pass /leyline/ on"
            return Capability(ready=False, detail=why), self._ttl_s
        if isinstance(status, dict) and status.get("ready") is True:
            return Capability(ready=True, rendering=str(status.get("rendering") or "")), float("inf")
        return Capability(ready=False, detail="GET /leyline/ready did not say `ready`"), self._ttl_s


def _reason(err: Exception) -> str:
    body = getattr(err, "body", None)
    reason = body.get("reason") if isinstance(body, dict) else None
    return f"the server has Leyline but is not ready: {reason or err}"
