"""The server as renderer: its `/v1/tokenize` renders messages exactly as its chat endpoint does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyline_agent.diff import equal_run_len
from leyline_agent.edits import Message, estimate_tokens
from leyline_agent.errors import RenderError
from leyline_agent.renderers.base import Rendered, Span

Post = Callable[[str, Mapping[str, Any]], Any]
"""Sends a JSON body to a path below the API root (`/tokenize`) and returns the JSON answer; raises on any failure."""


class ServerRenderer:
    """Renders through the server, which is the authority on its own tokens. One request a rendering.

    Spans come from rendering prefixes of the history, two requests a message, and only for messages asked about.
    """

    def __init__(self, post: Post, *, model: str | None = None) -> None:
        self._post = post
        self.model = model

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        messages = tuple(messages)
        common: dict[str, Any] = dict(options or {})
        if tools:
            common["tools"] = list(tools)
        if template_kwargs:
            common["chat_template_kwargs"] = dict(template_kwargs)
        token_ids = self._tokenize(messages, common)
        boundaries: dict[int, int] = {0: 0}

        def boundary(k: int) -> int:
            if k not in boundaries:
                prefix = self._tokenize(messages[:k], {**common, "add_generation_prompt": False})
                boundaries[k] = equal_run_len(prefix, 0, token_ids, 0, min(len(prefix), len(token_ids)))
            return boundaries[k]

        def span_of(k: int) -> Span:
            start = boundary(k)
            return start, max(start, boundary(k + 1))

        return Rendered(token_ids, span_of, len(messages), by_server=True)

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str] | None:
        if not sequences:
            return []
        body = {"tokens": [list(sequence) for sequence in sequences], "skip_special_tokens": skip_special}
        try:
            answer = self._post("/detokenize", self._with_model(body))
        except Exception as err:
            raise RenderError(f"the server's /v1/detokenize failed: {err}") from err
        text = answer.get("text") if isinstance(answer, Mapping) else None
        return [str(one) for one in text] if isinstance(text, list) else None

    def count(self, text: str) -> int:
        """An estimate (four characters a token): a request for each count would cost more than it tells."""
        return estimate_tokens(text)

    def _with_model(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "model": self.model} if self.model else body

    def _tokenize(self, messages: Sequence[Message], common: Mapping[str, Any]) -> array[int]:
        body = {**common, "messages": [dict(message) for message in messages]}
        try:
            answer = self._post("/tokenize", self._with_model(body))
        except Exception as err:
            raise RenderError(f"the server's /v1/tokenize failed: {err}") from err
        tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise RenderError(f"the server's /v1/tokenize answered {str(answer)[:200]!r}, which holds no token ids")
        return array("q", tokens)
