"""One address, and behind it the server that a test puts there: how a client meets a server that was replaced."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import openai


class Switched:
    """`http_client` is for an OpenAI client with `base_url`; its requests go to `url`, which a test may change."""

    base_url = "http://switched/v1"

    def __init__(self, url: str) -> None:
        self.url = url
        library: Any = import_module("httpx" if int(openai.__version__.split(".")[0]) < 3 else "httpx2")
        inner, switched = library.HTTPTransport(), self

        class Transport(library.BaseTransport):  # type: ignore[misc]
            def handle_request(self, request: Any) -> Any:
                target = urlsplit(switched.url)
                request.url = request.url.copy_with(host=target.hostname, port=target.port)
                return inner.handle_request(request)

            def close(self) -> None:
                inner.close()

        self.http_client = library.Client(transport=Transport())
