"""An OpenAI-compatible server whose answers are written down: the model of a scripted agent.

Which task a conversation is about is seen from the files it names; the n-th answer is the n-th move of that task.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

Move = dict[str, Any]


def say(text: str) -> Move:
    """An answer without a tool call."""
    return {"role": "assistant", "content": text}


def use(tool: str, /, **arguments: Any) -> Move:
    """An answer that calls one tool."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "", "type": "function", "function": function}]}


class ScriptedModel:
    """Serves in a `with` block. `requests` are the bodies it got, `base_url` is for an OpenAI client."""

    def __init__(self, moves: Mapping[str, Sequence[Move]]) -> None:
        self.moves = moves
        self.requests: list[dict[str, Any]] = []
        model = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_error(404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(model.answer(body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The next move of the conversation in a request."""
        self.requests.append(body)
        messages = body["messages"]
        task = next(name for name in self.moves if f"{name}_code.py" in messages[1]["content"])
        number = sum(message["role"] == "assistant" for message in messages)
        move = json.loads(json.dumps(self.moves[task][number]))
        for call in move.get("tool_calls", ()):
            call["id"] = f"call_{number}"
        length = len(json.dumps(messages)) // 4
        return {
            "id": f"answer-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": move, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": length, "completion_tokens": 8, "total_tokens": length + 8},
        }
