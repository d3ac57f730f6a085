"""A local renderer: the model's own chat template and tokenizer, read from its folder."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from leyline_agent.edits import Message
from leyline_agent.errors import RenderError
from leyline_agent.renderers.base import Rendered, Span, boundary_spans
from leyline_agent.renderers.encoder import Encoder
from leyline_agent.renderers.jinja_template import ChatTemplate
from leyline_agent.renderers.sglang_messages import template_messages, template_tools

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TemplateRenderer:
    """Renders with a chat template and a `tokenizer.json`, tokenizing only what is new since the last turn.

    It repeats what SGLang does to messages before its template, as far as known; use it inside a `VerifiedRenderer`
    where the server must agree. Needs jinja2 and tokenizers (extra `tokens`); raises MissingDependencyError without.
    """

    def __init__(self, encoder: Encoder, template: str, constants: Mapping[str, Any] | None = None) -> None:
        self._encoder = encoder
        self._template = ChatTemplate(template, constants)
        self._keep_parts = self._template.loops_over_parts

    @classmethod
    def from_folder(cls, folder: str | Path) -> TemplateRenderer:
        """From a model folder with `tokenizer.json` and the template, in its own file or in the tokenizer's settings.

        Raises RenderError when either is missing.
        """
        folder = Path(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        template = _template_source(folder, settings)
        constants = {name: _token_text(settings[name]) for name in _SPECIAL_NAMES if settings.get(name)}
        path = folder / "tokenizer.json"
        try:
            return cls(Encoder(path.read_text(encoding="utf-8")), template, constants)
        except (OSError, ValueError, RenderError) as err:
            raise RenderError(f"{path} cannot be used: {err}") from err

    @classmethod
    def from_served(cls, answer: Any, rendering: str = "") -> TemplateRenderer:
        """From a server's answer to `GET /leyline/tokenizer`.

        Raises RenderError when it is not such an answer, or that of a server which renders otherwise than `rendering`
        (the name that its status had for it).
        """
        if not isinstance(answer, Mapping):
            raise RenderError(f"the server's tokenizer came as {type(answer).__name__}, not as an object")
        tokenizer, template, constants = (answer.get(key) for key in ("tokenizer", "chat_template", "constants"))
        if not isinstance(tokenizer, str) or not isinstance(template, str) or not isinstance(constants, Mapping):
            raise RenderError("the server's answer lacks `tokenizer`, `chat_template` or `constants`")
        if rendering and answer.get("rendering") != rendering:
            raise RenderError("the server renders otherwise than it did when it was asked for its status")
        return cls(Encoder(tokenizer), template, constants)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        options = {name: value for name, value in (options or {}).items() if value}
        unknown = set(options) - {"tool_choice", "reasoning_effort"}
        if unknown:
            raise RenderError(f"what the server does with {', '.join(sorted(unknown))} is not known on this side")
        prepared = template_messages(messages, keep_parts=self._keep_parts)
        variables: dict[str, Any] = {
            "tools": template_tools(tools, options.get("tool_choice")),
            "documents": None,
            "add_generation_prompt": True,
        }
        if options.get("reasoning_effort") is not None:
            variables["reasoning_effort"] = options["reasoning_effort"]
        variables.update(template_kwargs or {})
        text = self._template.render(prepared, **variables)
        token_ids = self._encoder.encode(text)

        @lru_cache(maxsize=1)
        def spans() -> list[Span]:
            return self._spans(prepared, variables, text, token_ids)

        return Rendered(token_ids, lambda k: spans()[k], len(prepared))

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str] | None:
        return [self._encoder.decode(sequence, skip_special=skip_special) for sequence in sequences]

    def count(self, text: str) -> int:
        return len(self._encoder.encode(text))

    def _spans(
        self, prepared: list[dict[str, Any]], variables: dict[str, Any], text: str, token_ids: array[int]
    ) -> list[Span]:
        offsets = self._template.boundaries(prepared, text, **variables)
        if offsets is None:
            offsets = [self._prefix_len(prepared[:k], variables, text) for k in range(len(prepared) + 1)]
            offsets = [max(offsets[: k + 1]) for k in range(len(offsets))]
        boundaries = self._encoder.token_boundaries(text, offsets)
        return boundary_spans(boundaries[:-1], min(boundaries[-1], len(token_ids)))

    def _prefix_len(self, prefix: list[dict[str, Any]], variables: dict[str, Any], text: str) -> int:
        """Characters of `text` that a rendering of the first messages alone agrees with."""
        if not prefix:
            return 0
        try:
            part = self._template.render(prefix, **{**variables, "add_generation_prompt": False})
        except RenderError:  # some templates refuse prefixes (no user message yet)
            return 0
        limit = min(len(part), len(text))
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if part[:middle] == text[:middle] else (low, middle - 1)
        return low


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise RenderError(f"{path} cannot be read: {err}") from err
    return settings if isinstance(settings, dict) else {}


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {one.get("name"): one.get("template") for one in source}
        source = named.get("default")
    if not isinstance(source, str):
        raise RenderError(f"{folder} holds no chat template; give the folder of a chat model")
    return source


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)
