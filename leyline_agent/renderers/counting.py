"""Counting tokens for budgets, where no renderer of the model itself is at hand."""

from __future__ import annotations

from collections.abc import Callable

from leyline_agent.edits import estimate_tokens
from leyline_agent.errors import MissingDependencyError, RenderError


def token_counter(encoding: str | None = None) -> Callable[[str], int]:
    """A function from text to its number of tokens: tiktoken's `encoding` ("o200k_base"), or an estimate for None.

    Raises MissingDependencyError without tiktoken, RenderError when it does not know or cannot load the encoding.
    """
    if encoding is None:
        return estimate_tokens
    try:
        import tiktoken
    except ImportError as err:
        raise MissingDependencyError("counting with tiktoken needs it; pip install 'leyline-agent[tokens]'") from err
    try:
        tokenizer = tiktoken.get_encoding(encoding)
    except Exception as err:  # tiktoken raises ValueError for a name, requests' errors for a failed download
        raise RenderError(f"tiktoken cannot load encoding {encoding!r}: {err}") from err
    return lambda text: len(tokenizer.encode(text, disallowed_special=()))
