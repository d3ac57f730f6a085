"""A few lines of HTTP on this machine, for what a real server does not do on demand: fail, hang up, reject fields.

For tests of the client's mechanics alone. What a server makes of a request is tested on the real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from leyline_agent.renderers import TemplateRenderer

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "a long result"},
    {"role": "user", "content": "so?"},
]


def cut(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A policy: tool results are cut."""
    return [{**m, "content": "[cut]"} if m["role"] == "tool" else m for m in messages]


KNOWN_FIELDS = {"messages", "model", "stream", "stream_options", "max_tokens", "temperature", "n", "tools", "stop"}


@dataclass
class Loopback:
    """What the server was asked, and how it is to behave."""

    url: str = ""
    leyline: bool = True
    """Whether there is a `/leyline/ready`, and reports for those who ask for them."""
    rendering: dict[str, Any] | None = None
    """What `/leyline/tokenizer` answers and `/v1/tokenize` goes by; without it, messages become bytes of JSON."""
    strict: bool = False
    """Whether unknown fields are an error 400, as at hosted APIs."""
    fail: list[int] = field(default_factory=list)
    """Statuses to answer the next chat requests with, first to last."""
    empty_prepare: bool = False
    """Whether `/leyline/prepare` answers `{}`, as a proxy does that docs/backend.md puts before a router."""
    chunks: int = 3
    ids: bool = True
    """Whether token ids are given to those who ask for them."""
    line_end: str = "\n"
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of every request, beside `requests`."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    before_chunk: Callable[[int], None] = lambda _: None
    before_tokenize: Callable[[], object] = lambda: None

    @property
    def base_url(self) -> str:
        return self.url + "/v1"

    @property
    def chats(self) -> list[dict[str, Any]]:
        return [body for path, body in self.requests if path == "/v1/chat/completions"]

    def asked(self, path: str) -> int:
        return sum(one == path for one, _ in self.requests)


@contextmanager
def loopback(**behaviour: Any) -> Iterator[Loopback]:
    state = Loopback(**behaviour)

    class Handler(_Handler):
        server_state = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Loopback

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._note({})
        if self.path.partition("?")[0] == "/leyline/ready" and self.server_state.leyline:
            self._json({"ready": True, "rendering": (self.server_state.rendering or {}).get("rendering")})
        elif self.path == "/leyline/tokenizer" and self.server_state.rendering is not None:
            self._json(self.server_state.rendering)
        else:
            self._json({"error": {"message": "not here"}}, 404)

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._note(body)
        if self.path.partition("?")[0] == "/v1/tokenize":
            state.before_tokenize()
            return self._json({"tokens": _tokens(body["messages"], state.rendering)})
        if self.path == "/leyline/prepare" and state.empty_prepare:
            return self._json({})
        if self.path.partition("?")[0] != "/v1/chat/completions":
            return self._json({"error": {"message": "not here"}}, 404)
        if state.fail:
            return self._json({"error": {"message": "as you wished"}}, state.fail.pop(0))
        unknown = set(body) - KNOWN_FIELDS
        if state.strict and unknown:
            return self._json({"error": {"message": f"Unrecognized request arguments: {sorted(unknown)}"}}, 400)
        return self._stream(body) if body.get("stream") else self._json(_completion(body, state))

    def _note(self, body: dict[str, Any]) -> None:
        self.server_state.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server_state.requests.append((self.path, body))

    def _json(self, answer: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for number in range(self.server_state.chunks):
                self.server_state.before_chunk(number)
                self._event(_chunk({"content": f"w{number} "}, None))
            self._event(_chunk({}, "stop"))
            if self.server_state.ids and body.get("return_output_ids_in_sglext"):
                ids = {"output_ids": [[1, 2, 3]], "input_ids": [7, 8, 9]}
                self._event({**_chunk({}, None), "choices": [], "sglext": ids})
            if self.server_state.leyline and "custom_params" in body:
                report = {"leyline": {"prompt_tokens": 3, "prefilled": 3}}
                self._event({**_chunk({}, None), "choices": [], "sglext": report})
            self._write("data: [DONE]")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client hung up, as the test wanted

    def _event(self, chunk: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(chunk)}")

    def _write(self, event: str) -> None:
        self.wfile.write((event + 2 * self.server_state.line_end).encode())
        self.wfile.flush()


_HEAD = {"id": "chat-1", "created": 1, "model": "m"}


def _tokens(messages: list[dict[str, Any]], rendering: dict[str, Any] | None) -> list[int]:
    if rendering is None:
        return list(json.dumps(messages).encode())
    return TemplateRenderer.from_served(rendering).render(messages).token_ids.tolist()


def _completion(body: dict[str, Any], state: Loopback) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    answer: dict[str, Any] = {**_HEAD, "object": "chat.completion", "choices": [choice], "usage": usage}
    if state.ids and body.get("return_output_ids_in_sglext"):
        answer["sglext"] = {"output_ids": [[1, 2]], "input_ids": [7, 8, 9]}
    if state.leyline and "custom_params" in body:
        answer["metadata"] = {"leyline": {"prompt_tokens": 10, "exact": 4, "prefilled": 6}}
    return answer


def _chunk(delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}
