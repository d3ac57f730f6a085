"""Telling a re-tokenization from an edit.

Models sample tokens that a tokenizer would not have chosen for the same text. When the template renders such an answer
as history, its tokens differ though its text does not. There the sampled tokens, whose KV the server holds, may stay.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict

from leyline_agent.errors import RenderError
from leyline_agent.renderers.base import Renderer

_CONTEXT = 4  # kept tokens compared along on both sides, so that what joins pieces of text is part of the comparison
_MAX_REMEMBERED = 4096
_MAX_TOKENS = 8192  # longer changes are edits


class Retokenizations:
    """Answers "is this only another tokenization of the same text?", and remembers. For any number of threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, bytes, bytes], bool] = OrderedDict()
        self._lock = threading.Lock()

    def same_text(
        self,
        base: array[int],
        base_span: tuple[int, int],
        edited: array[int],
        edited_span: tuple[int, int],
        renderer: Renderer,
        namespace: str = "",
    ) -> bool:
        """Whether two spans, with kept tokens around them, are the same text and the same special tokens.

        `namespace` keeps apart what renderers with different tokenizers said of the same ids.

        False whenever that cannot be proven: text that is not whole UTF-8, a renderer that cannot turn tokens to text.
        """
        (i0, i1), (j0, j1) = base_span, edited_span
        if i0 == i1 or j0 == j1 or max(i1 - i0, j1 - j0) > _MAX_TOKENS:
            return False
        before = min(_CONTEXT, i0, j0)
        after = min(_CONTEXT, len(base) - i1, len(edited) - j1)
        old, new = base[i0 - before : i1 + after], edited[j0 - before : j1 + after]
        key = namespace, old.tobytes(), new.tobytes()
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = _same(old, new, renderer)
            with self._lock:
                self._known[key] = known
                while len(self._known) > _MAX_REMEMBERED:
                    self._known.popitem(last=False)
        return known


def _same(old: array[int], new: array[int], renderer: Renderer) -> bool:
    try:
        for skip_special in (False, True):  # equal both with and without special tokens: the special ones are equal too
            texts = renderer.texts([old, new], skip_special=skip_special)
            if texts is None or texts[0] != texts[1] or "\ufffd" in texts[0]:
                return False
    except RenderError:
        return False
    return True


def split_at_barrier(base: array[int], start: int, edited: array[int], edited_start: int) -> int | None:
    """Where in `edited` the end of the base is reached again: behind the token that ends the base, None if never.

    The same number of these tokens is counted from the two starts, so that a stop token inside the span is passed over.
    """
    if start >= len(base):
        return None
    last = base[-1]
    wanted = base[start:].count(last)
    position = edited_start
    for _ in range(wanted):
        try:
            position = edited.index(last, position) + 1
        except ValueError:
            return None
    return position
