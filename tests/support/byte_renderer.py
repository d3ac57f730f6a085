"""A renderer without a server: ChatML, a token a byte, role markers as special tokens. For tests of planning alone."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_agent.edits import Message
from leyline_agent.renderers import Rendered

START, END = 256, 257
_NAMES = {START: "<|im_start|>", END: "<|im_end|>"}
GENERATION_PROMPT = [START, *b"assistant\n"]


def encode(text: str) -> list[int]:
    return list(text.encode())


def message_tokens(message: Message) -> list[int]:
    text = str(message.get("content") or "")
    if message.get("reasoning_content"):
        text = f"<think>{message['reasoning_content']}</think>{text}"
    for call in message.get("tool_calls") or ():
        text += json.dumps(call["function"])
    return [START, *encode(f"{message['role']}\n{text}"), END, *encode("\n")]


class ByteRenderer:
    """Counts its renderings. Like Qwen3's template, it drops reasoning that stands before the last user message.

    Ids from 1000 on stand for two bytes `(id - 1000)`, so one text has many tokenizations.
    """

    def __init__(self) -> None:
        self.renderings = 0

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        self.renderings += 1
        ids: list[int] = []
        spans = []
        last_user = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for k, message in enumerate(messages):
            begin = len(ids)
            ids += message_tokens(message if k > last_user else {**message, "reasoning_content": None})
            spans.append((begin, len(ids)))
        return Rendered(array("q", ids + GENERATION_PROMPT), spans.__getitem__, len(spans))

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str] | None:
        return [_text(sequence, skip_special) for sequence in sequences]

    def count(self, text: str) -> int:
        return len(text.encode())


def pair_token(two: str) -> int:
    """The id that stands for two ASCII characters at once."""
    return 1000 + ord(two[0]) * 256 + ord(two[1])


def _text(ids: Sequence[int], skip_special: bool) -> str:
    data = b""
    for token in ids:
        if token in _NAMES:
            data += b"" if skip_special else _NAMES[token].encode()
        elif token >= 1000:
            data += bytes(divmod(token - 1000, 256))
        else:
            data += bytes([token])
    return data.decode(errors="replace")
