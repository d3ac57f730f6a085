"""The server as a process: started, watched until it is ready, stopped with everything it spawned."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from leyline_agent.errors import ServerError
from leyline_agent.integrations.sglang.launch.command import ServerSpec

START_TIMEOUT_S = 1800.0
"""Loading a large model from a slow disk takes a while; a server that dies is noticed at once anyway."""

_GRACE_S = 60.0  # from "answers HTTP" to "the plugin is ready"
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.2


class ServerProcess:
    """One SGLang server, in a session of its own so that all its processes can be ended together.

    with ServerProcess(spec, log=Path("server.log")) as server:
        server.wait_ready()
        ...  # server.spec.url
    """

    def __init__(self, spec: ServerSpec, log: Path | None = None) -> None:
        """Start the process. Its output goes to the file `log`, or to this process's own output."""
        self.spec = spec
        self.log = log
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            self._process = subprocess.Popen(
                spec.command(),
                env=spec.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """How the server ended; None while it runs."""
        return self._process.poll()

    def wait_ready(
        self, timeout_s: float = START_TIMEOUT_S, on_wait: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait until the server answers and, with Leyline, its plugin is ready; return what /leyline/status says.

        `on_wait` is called every fifth of a second. Raises ServerError, with the reason, if that cannot happen.
        """
        started_at = time.monotonic()
        healthy_at: float | None = None
        reason = "it does not answer yet"
        with httpx.Client(base_url=self.spec.url, timeout=5.0, trust_env=False) as http:
            while True:
                if self.exit_code is not None:
                    raise ServerError(self._describe_death())
                now = time.monotonic()
                if _answers(http):
                    healthy_at = healthy_at or now
                    status = self._leyline_status(http)
                    if status["ready"]:
                        return status
                    reason = str(status.get("reason") or "its status gives no reason")
                if now - started_at > timeout_s:
                    raise ServerError(
                        f"the server on port {self.spec.port} is not ready after {timeout_s:.0f} s: {reason}"
                    )
                if healthy_at and now - healthy_at > _GRACE_S:
                    raise ServerError(f"the server runs, but Leyline is not ready on it: {reason}")
                on_wait()
                time.sleep(_POLL_S)

    def wait(self) -> int:
        """Wait until the server ends by itself, and return its exit code."""
        return self._process.wait()

    def stop(self) -> None:
        """End the server and every process it spawned: asked first, then forced. Calling it again changes nothing."""
        if self.exit_code is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the session's leader, so its id is the group's
        self._process.wait()

    def _leyline_status(self, http: httpx.Client) -> dict[str, Any]:
        if not self.spec.leyline:
            return {"ready": True}
        response = http.get("/leyline/status")
        if response.status_code == httpx.codes.NOT_FOUND:
            return {"ready": False, "reason": "SGLang did not load the plugin; its log says why"}
        status = response.json()
        return status if isinstance(status, dict) and "ready" in status else {"ready": False}

    def _describe_death(self) -> str:
        said = _last_error(self.log) if self.log else None
        where = f"{said} (all of it in {self.log})" if said else "its output above says why"
        return f"SGLang ended with code {self.exit_code} before it was ready: {where}"


def _answers(http: httpx.Client) -> bool:
    """Tell whether the server is past its start: until then it refuses the connection or answers 503."""
    try:
        return http.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _last_error(log: Path) -> str | None:
    """Find the last line of a log that reads like the message of an exception."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|[\w.]+: error:", line)]
    return errors[-1] if errors else next((line for line in reversed(lines) if line.strip()), None)
