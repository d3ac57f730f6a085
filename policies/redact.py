"""Take secrets out of a history, everywhere, and out of what the model remembers of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import tool_calls
from leyline_agent.policies.outputs import check_names
from leyline_agent.policies.placeholders import REDACTED
from leyline_agent.policy import Policy

SECRETS = (
    r"\bsk-[A-Za-z0-9_\-]{20,}",
    r"\bgh[pousr]_[A-Za-z0-9]{30,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bxox[abprs]-[A-Za-z0-9\-]{10,}",
    r"\beyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----",
)
"""Keys and tokens with a form of their own. Extend it by what your users call a secret."""


@dataclass(frozen=True)
class Redact(Policy):
    """Replace what the patterns find by `placeholder`, in content, reasoning and tool arguments of every message.

    `find` is a function from a text to the text without its secrets, for what no pattern can say; it runs after the
    patterns, must be pure, and must leave its own results alone.

    Cache: always FORGET, since under AMORTIZE the model would still know the secret: everything after the first one is
    prefilled again, once, and the branch that held it is dropped. A secret in the newest message costs nothing.
    """

    patterns: tuple[str, ...] = SECRETS
    find: Callable[[str], str] | None = None
    placeholder: str = REDACTED

    default_mode = Mode.FORGET

    def __post_init__(self) -> None:
        check_names("patterns", self.patterns)
        for pattern in self.patterns:
            try:
                compiled = re.compile(pattern)
            except re.error as err:
                raise ConfigError(f"pattern {pattern!r} is not a regular expression: {err}") from err
            if compiled.search("") is not None:
                raise ConfigError(f"pattern {pattern!r} matches the empty text, so it would match everywhere")
            if compiled.search(self.placeholder):
                raise ConfigError(f"pattern {pattern!r} matches the placeholder {self.placeholder!r}; choose another")

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        return [edit for index, message in enumerate(turn.messages) for edit in self._redact(index, message)]

    def _redact(self, index: int, message: Message) -> Iterator[MessageEdit]:
        for part in (Part.CONTENT, Part.REASONING):
            old = message.get(part)
            new = self._clean_parts(old) if part is Part.CONTENT else self._clean(old) if isinstance(old, str) else old
            if new != old:
                yield MessageEdit(index, new, part, Mode.FORGET, "redacted")
        for position, call in enumerate(tool_calls(message)):
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str) and (cleaned := self._clean_json(arguments)) != arguments:
                yield MessageEdit(index, cleaned, Part.ARGUMENTS, Mode.FORGET, "redacted", call=position)

    def _clean(self, text: str) -> str:
        for pattern in self.patterns:
            text = re.sub(pattern, lambda _: self.placeholder, text)
        return self.find(text) if self.find is not None else text

    def _clean_parts(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._clean(content)
        if not isinstance(content, Sequence):
            return content
        return [
            {**part, "text": self._clean(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]

    def _clean_json(self, text: str) -> str:
        """Arguments with their strings cleaned, one by one, so that they stay JSON; the same text if none changed."""
        try:
            value = json.loads(text)
        except ValueError:
            return self._clean(text)
        cleaned = self._clean_value(value)
        return text if cleaned == value else json.dumps(cleaned, ensure_ascii=False)

    def _clean_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._clean(value)
        if isinstance(value, list):
            return [self._clean_value(item) for item in value]
        if isinstance(value, dict):
            return {key: self._clean_value(item) for key, item in value.items()}
        return value
