"""The server that is measured: one that runs already, or one started for the purpose, with the facts about it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from leyline_agent import environment
from leyline_agent.errors import ServerError

_FACTS = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend", "kv_cache_dtype",
    "dtype", "device", "tp_size", "page_size", "chunked_prefill_size", "max_total_tokens", "mem_fraction_static",
    "max_running_requests", "schedule_policy", "disable_radix_cache", "radix_cache_backend", "disable_cuda_graph",
    "load_format", "enable_cache_report", "version",
)  # fmt: skip
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server by its root URL. `facts` is what SGLang says of its settings, `status` what Leyline says of itself."""

    url: str
    model: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes."""
        return f"{self.url}/v1"

    @property
    def name(self) -> str:
        """The model's name for people: without the folder it lies in."""
        return self.model.rstrip("/").rpartition("/")[2]

    @property
    def has_leyline(self) -> bool:
        """Whether the server splices."""
        return bool(self.status.get("ready") and self.status.get("amortize"))

    @classmethod
    def of(cls, url: str) -> Target:
        """Ask a server what it is. Raises ServerError where none answers, or it does not count cached tokens."""
        root = url.rstrip("/").removesuffix("/v1")
        root = root if "://" in root else f"http://{root}"
        try:
            with httpx.Client(base_url=root, timeout=_TIMEOUT_S, trust_env=False) as http:
                models = http.get("/v1/models").raise_for_status().json()
                info = _json(http, "/server_info") or _json(http, "/get_server_info") or {}
                status = _json(http, "/leyline/status") or {}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as err:
            raise ServerError(f"no OpenAI-compatible server at {root}: {err}; check --base-url") from err
        if info and not info.get("enable_cache_report", True):
            raise ServerError(f"the server at {root} does not count cached tokens; start it with --enable-cache-report")
        facts = {name: info[name] for name in _FACTS if info.get(name) is not None}
        return cls(root, str(models["data"][0]["id"]), facts, status)

    def count_tokens(self, text: str) -> int:
        """Tokens in a text, by the server's tokenizer. Raises ServerError if it does not say."""
        body = {"model": self.model, "prompt": text}
        try:
            response = httpx.post(f"{self.base_url}/tokenize", json=body, timeout=_TIMEOUT_S, trust_env=False)
            return int(response.raise_for_status().json()["count"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as err:
            raise ServerError(f"the server at {self.url} did not count the tokens of a text: {err}") from err

    def flush(self) -> None:
        """Empty the server's cache. Raises ServerError if it will not: what follows would measure leftovers."""
        try:
            httpx.post(f"{self.url}/flush_cache", timeout=_TIMEOUT_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as err:
            raise ServerError(f"the server at {self.url} did not empty its cache: {err}") from err

    def pool_used(self) -> int | None:
        """KV slots that are not free right now, None if the server does not say."""
        try:
            status = httpx.get(f"{self.url}/leyline/status", timeout=_TIMEOUT_S, trust_env=False).json()
            pool = status["pool"]
            return int(pool["total"]) - int(pool["free"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None


@contextmanager
def cpu_server(
    *args: str, model_path: Path | None = None, on_wait: Callable[[], None] = lambda: None
) -> Iterator[Target]:
    """A CPU server with Leyline on a free port, with SmolLM2-135M unless a model is named; stopped at the end."""
    from leyline_agent.integrations.sglang.launch import ServerArgs, ServerProcess, ServerSpec, check_launch
    from leyline_agent.integrations.sglang.launch.checks import check_python, check_sglang
    from leyline_agent.integrations.sglang.models import smollm2

    check_python()
    check_sglang()
    spec = ServerSpec(ServerArgs(("--port", str(free_port()), *args)), cpu=True)
    spec = spec.with_model(model_path or smollm2())
    check_launch(spec)
    logs = environment.cache_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ServerProcess(spec, log=logs / f"server-{spec.port}.log") as server:
        server.wait_ready(on_wait=on_wait)
        yield Target.of(spec.url)


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _json(http: httpx.Client, path: str) -> dict[str, Any] | None:
    response = http.get(path)
    if response.status_code == httpx.codes.NOT_FOUND:
        return None
    try:
        answer = response.json()
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
