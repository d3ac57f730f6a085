"""What a renderer is: messages in, token ids and message spans out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from leyline_agent.edits import Message

Span = tuple[int, int]
"""Half-open range of token indices."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as token ids (`array("q")`), with a generation prompt at its end.

    `span_of(k)` gives the tokens of message k; it may cost a rendering or a request, so it is called only where needed.
    The first message's span begins at 0 (with tools and preamble), the last one's ends where the generation prompt
    begins or at the end. Raises RenderError when spans cannot be had. `by_server`: the server rendered it.
    """

    token_ids: array[int]
    span_of: Callable[[int], Span]
    message_count: int
    by_server: bool = False

    @property
    def spans(self) -> list[Span]:
        """The spans of all messages."""
        return [self.span_of(k) for k in range(self.message_count)]


@runtime_checkable
class Renderer(Protocol):
    """Turns messages into token ids the way the server's chat endpoint would. May be called from several threads."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt for `messages`, which are not changed. Raises RenderError.

        `options` are other fields of the chat request that the server's rendering looks at (`tool_choice`,
        `reasoning_effort`), under their wire names.
        """

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str] | None:
        """Each token sequence as text, with or without special tokens; None when this renderer cannot tell."""

    def count(self, text: str) -> int:
        """Tokens in `text`, for budgets."""


def boundary_spans(boundaries: Sequence[int], end: int) -> list[Span]:
    """Spans from where each message begins; the first is stretched to 0, the last ends at `end`."""
    starts = [0, *boundaries[1:]]
    return list(zip(starts, [*starts[1:], end], strict=True))
