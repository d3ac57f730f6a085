"""Text to token ids with a memory: only text that is new since the last turn is tokenized.

Special tokens are cut out of the text before anything else happens to it, so the pieces between them can be encoded
apart and remembered. Tokenizers for which that does not hold (special tokens that take whitespace with them, a prefix
added to the first piece only) are found from their settings and encode the whole text.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from leyline_agent.errors import MissingDependencyError, RenderError

_MAX_CACHED_CHARS = 16_000_000


class Encoder:
    """The text of a `tokenizer.json`. May be called from several threads."""

    def __init__(self, source: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as err:
            raise MissingDependencyError(
                "local rendering needs tokenizers; pip install 'leyline-agent[tokens]'"
            ) from err
        try:
            settings = json.loads(source)
            self._tokenizer: Any = Tokenizer.from_str(source)
        except Exception as err:  # JSON, and the plain Exception that tokenizers raises
            raise RenderError(f"not a tokenizer.json: {err}") from err
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        specials = _barriers(settings)
        self._barrier_ids = specials or {}
        self._barrier = (
            re.compile("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")")
            if specials
            else None
        )
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()

    @property
    def encodes_pieces(self) -> bool:
        """Whether text between special tokens is encoded apart."""
        return self._barrier is not None

    def encode(self, text: str) -> array[int]:
        if self._barrier is None:
            return self._encode_whole(text)
        token_ids: array[int] = array("q")
        for number, piece in enumerate(self._barrier.split(text)):
            if number % 2:
                token_ids.append(self._barrier_ids[piece])
            elif piece:
                token_ids.extend(self._piece(piece))
        return token_ids

    def token_boundaries(self, text: str, offsets: Sequence[int]) -> list[int]:
        """For each character offset, ascending, the index of the first token that begins at or after it."""
        if self._barrier is None:
            starts = [start for start, _ in self._tokenizer.encode(text, add_special_tokens=False).offsets]
            return [bisect_right(starts, offset - 1) for offset in offsets]
        edges = [0]  # character offsets of the edges of pieces, and the tokens before each
        counts = [0]
        for number, piece in enumerate(self._barrier.split(text)):
            edges.append(edges[-1] + len(piece))
            counts.append(counts[-1] + (1 if number % 2 else len(self._piece(piece)) if piece else 0))
        found = []
        for offset in offsets:
            k = max(0, bisect_right(edges, offset) - 1)
            inside = offset - edges[k]
            tokens = counts[k]
            if inside:
                piece = text[edges[k] : edges[k + 1]]
                starts = [start for start, _ in self._tokenizer.encode(piece, add_special_tokens=False).offsets]
                tokens += bisect_right(starts, inside - 1)
            found.append(tokens)
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))

    def _encode_whole(self, text: str) -> array[int]:
        return array("q", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _piece(self, piece: str) -> array[int]:
        with self._lock:
            known = self._pieces.get(piece)
            if known is not None:
                self._pieces.move_to_end(piece)
                return known
        token_ids = self._encode_whole(piece)
        with self._lock:
            if piece not in self._pieces:
                self._pieces[piece] = token_ids
                self._cached_chars += len(piece)
            while self._cached_chars > _MAX_CACHED_CHARS and len(self._pieces) > 1:
                old, _ = self._pieces.popitem(last=False)
                self._cached_chars -= len(old)
        return token_ids


def _barriers(settings: dict[str, Any]) -> dict[str, int] | None:
    """Special tokens at which text may be cut, by content; None if pieces cannot be encoded apart."""
    specials: dict[str, int] = {}
    for token in settings.get("added_tokens") or []:
        if token.get("normalized"):
            continue  # matched after normalization, inside a piece: the tokenizer finds it there
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            return None
        specials[token["content"]] = token["id"]
    stages = [*_stages(settings.get("normalizer")), *_stages(settings.get("pre_tokenizer"))]
    for stage in stages:
        if stage["type"] == "Metaspace" and stage.get("prepend_scheme") == "first":
            return None
    return specials or None


def _stages(stage: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not stage:
        return []
    inner = stage.get("normalizers") or stage.get("pretokenizers")
    return [one for part in inner for one in _stages(part)] if inner else [stage]
