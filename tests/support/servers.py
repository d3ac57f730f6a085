"""The real SGLang server on the CPU, started through `leyline serve` and shared by the tests of a session.

    def test_something(cpu_server):                      # a fixture of tests/conftest.py
        server = cpu_server("deepseek_v2", "--page-size", "16")
        httpx.get(server.url + "/leyline/status")

The same model and arguments give the same server; `leyline=False` gives a stock one. From a shell, in the foreground:

    python tests/support/servers.py llama --port 30000
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

_ROOT = Path(__file__).resolve().parents[2]
_LOGS = _ROOT / ".cache" / "server-logs"
_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 45.0
_MAX_RUNNING = 4
"""Servers kept at the same time, 1.5 GB each. The one not asked for longest makes room."""


@dataclass
class CpuServer:
    """A running server. `url` is its root, `base_url` the OpenAI one."""

    url: str
    model_path: Path
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as `base_url`."""
        return self.url + "/v1"

    def log_tail(self, lines: int = 60, start: int = 0) -> str:
        """Return the end of the server's log, of what was written after byte `start`."""
        text = self.log.read_bytes()[start:].decode(errors="replace")
        useful = [line for line in text.splitlines() if "Ignore import error" not in line]
        return "\n".join(useful[-lines:])

    def ask_to_stop(self) -> None:
        """Tell the server to end, without waiting for it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self) -> None:
        """End the server and all its processes."""
        self.ask_to_stop()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the server asked the kernel to be ended with it
            self.process.wait()


class ServerPool:
    """Servers by what they were started with."""

    def __init__(self) -> None:
        self._servers: dict[tuple[object, ...], CpuServer] = {}

    def get(self, model: str | Path, *args: str, leyline: bool = True, env: dict[str, str] | None = None) -> CpuServer:
        """Return a server for this model (a tiny model's name, or a folder) and these SGLang arguments."""
        key = (str(model), args, leyline, tuple(sorted((env or {}).items())))
        server = self._servers.pop(key, None)
        if server is None or server.process.poll() is not None:
            self._make_room()
            server = start_server(model, *args, leyline=leyline, env=env)
        self._servers[key] = server  # the latest is last
        return server

    def running(self) -> list[CpuServer]:
        """Return the servers of this pool."""
        return list(self._servers.values())

    def close(self) -> None:
        """End all servers, at the same time."""
        for server in self.running():
            server.ask_to_stop()
        for server in self.running():
            server.stop()
        self._servers.clear()

    def _make_room(self) -> None:
        while len(self._servers) >= _MAX_RUNNING:
            self._servers.pop(next(iter(self._servers))).stop()


def start_server(model: str | Path, *args: str, leyline: bool = True, env: dict[str, str] | None = None) -> CpuServer:
    """Start a server on a free port and return it once it is ready."""
    model_path = _model_path(model)
    port = free_port()
    _LOGS.mkdir(parents=True, exist_ok=True)
    log = _LOGS / f"{model_path.name}-{port}.log"
    log.touch()
    process = subprocess.Popen(
        [*_serve_command(model_path, port, leyline), "--log-file", str(log), *args],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (env or {}),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 (it touches nothing that a thread could hold)
    )
    server = CpuServer(f"http://127.0.0.1:{port}", model_path, log, process)
    try:
        _wait_ready(server)
    except BaseException:
        server.stop()
        raise
    return server


def free_port() -> int:
    """Return a port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_python() -> str | None:
    """Return a Python that has SGLang: this one, or that of `.venv` when the tests run elsewhere; None without any."""
    if importlib.util.find_spec("sglang"):
        return sys.executable
    other = _ROOT / ".venv" / "bin" / "python"
    return str(other) if other.exists() else None


def _wait_ready(server: CpuServer) -> None:
    """Wait for the line that `leyline serve` prints when the server is ready."""
    assert server.process.stderr is not None
    os.set_blocking(server.process.stderr.fileno(), False)
    said = ""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "ready at" not in said:
        said += (server.process.stderr.read() or b"").decode(errors="replace")
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no server: {said.strip()}\n--- end of {server.log}:\n{server.log_tail()}")
        time.sleep(0.1)
    httpx.get(server.url + "/model_info", timeout=10.0, trust_env=False).raise_for_status()


def _serve_command(model_path: Path, port: int, leyline: bool) -> list[str]:
    python = server_python()
    if python is None:
        raise RuntimeError("SGLang is not installed; `make env` creates an environment that has it")
    command = [python, "-P", "-m", "leyline_agent.cli", "serve", "--cpu", *([] if leyline else ["--stock"])]
    return [*command, "--model-path", str(model_path), "--port", str(port)]


def _model_path(model: str | Path) -> Path:
    if isinstance(model, Path):
        return model
    python = server_python()
    assert python is not None, "SGLang is not installed"
    script = Path(__file__).with_name("tiny_models.py")
    made = subprocess.run([python, "-P", str(script), model], check=True, capture_output=True, text=True)
    return Path(made.stdout.strip())


def _end_with_parent() -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG: a test run that is killed leaves no server behind
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    name, *rest = sys.argv[1:] or ["llama"]
    stock = "--stock" in rest
    port = int(rest[rest.index("--port") + 1]) if "--port" in rest else 30000
    command = _serve_command(_model_path(name), port, leyline=not stock)
    os.execv(command[0], [*command, *(word for word in rest if word != "--stock")])
