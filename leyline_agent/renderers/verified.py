"""A local renderer that the server has to agree with."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_agent.edits import Message
from leyline_agent.errors import RenderError
from leyline_agent.renderers.base import Rendered, Renderer

_MAX_KINDS = 4096


class Verdicts:
    """What came of comparing two renderers, by kind of history: "" where they agree, else why they do not."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[Any, ...], str] = {}
        self._lock = threading.Lock()

    def get(self, kind: tuple[Any, ...]) -> str | None:
        with self._lock:
            return self._verdicts.get(kind)

    def put(self, kind: tuple[Any, ...], problem: str) -> None:
        with self._lock:
            self._verdicts[kind] = problem
            if len(self._verdicts) > _MAX_KINDS:  # template arguments that differ from call to call, a date say
                del self._verdicts[next(iter(self._verdicts))]

    @property
    def problems(self) -> list[str]:
        """Why the local renderer is not used, one sentence for each thing it got wrong."""
        with self._lock:
            return sorted({problem for problem in self._verdicts.values() if problem})


class VerifiedRenderer:
    """Renders with `local`, after comparing it once with `authority` for every kind of history.

    A kind is what a template can branch on: the roles, tools, tool calls, reasoning, content parts, template arguments.
    Where the two differ, or the local one fails, `authority` renders that kind from then on and the verdicts say why.
    """

    def __init__(self, local: Renderer, authority: Renderer, verdicts: Verdicts | None = None) -> None:
        self._local, self._authority = local, authority
        self.verdicts = verdicts or Verdicts()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        kind = _kind(messages, tools, template_kwargs, options)
        problem = self.verdicts.get(kind)
        if problem:
            return self._authority.render(messages, tools=tools, template_kwargs=template_kwargs, options=options)
        try:
            local = self._local.render(messages, tools=tools, template_kwargs=template_kwargs, options=options)
        except RenderError as err:
            local, problem = None, f"the local template failed: {err}"
        if local is not None and problem == "":
            return local
        truth = self._authority.render(messages, tools=tools, template_kwargs=template_kwargs, options=options)
        if local is not None and local.token_ids != truth.token_ids:
            lengths = f"{len(local.token_ids)} tokens here, {len(truth.token_ids)} on the server"
            problem = f"the local rendering differs from the server's ({lengths})"
        self.verdicts.put(kind, problem or "")
        return local if local is not None and not problem else truth

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str] | None:
        return self._local.texts(sequences, skip_special=skip_special)

    def count(self, text: str) -> int:
        return self._local.count(text)


def _kind(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> tuple[Any, ...]:
    shapes = {
        (
            message.get("role"),
            type(message.get("content")).__name__,
            len(message.get("tool_calls") or ()) > 1,
            bool(message.get("tool_calls")),
            bool(message.get("reasoning_content")),
        )
        for message in messages
    }
    arguments = tuple(
        sorted((key, repr(value)) for key, value in {**(template_kwargs or {}), **(options or {})}.items())
    )
    last = messages[-1].get("role") if messages else None
    users = sum(message.get("role") == "user" for message in messages)
    return frozenset(shapes), bool(tools), arguments, last, min(users, 2)
