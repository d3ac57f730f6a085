"""Reading and rewriting one chat completion, from the options that the SDK hands to `request()` or from its body.

Of the options, only names that every supported version has are used: `method`, `url`, `json_data`, `extra_json` and
`post_parser`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from leyline_agent.wire import KEY

_SCOPE_FIELDS = ("model", "lora_path", "extra_key", "cache_salt")
_RENDER_FIELDS = ("tool_choice", "reasoning_effort", "reasoning", "thinking", "continue_final_message", "task")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion: its options, and its body with the caller's `extra_body` merged in as the SDK will do it."""

    options: Any
    body: Mapping[str, Any]

    @classmethod
    def of(cls, options: Any) -> ChatRequest | None:
        """The request in `options`, None if it is not a chat completion or brings its own token ids."""
        if str(options.method).lower() != "post" or not str(options.url).endswith("/chat/completions"):
            return None
        if not isinstance(options.json_data, Mapping):
            return None
        return cls.of_body({**options.json_data, **(options.extra_json or {})}, options)

    @classmethod
    def of_body(cls, body: Mapping[str, Any], options: Any = None) -> ChatRequest | None:
        """The request with this body, None if it has no messages or brings its own token ids."""
        if not isinstance(body.get("messages"), list) or "input_ids" in body:
            return None
        return cls(options, body)

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        messages: list[Mapping[str, Any]] = self.body["messages"]
        return messages

    @property
    def session_id(self) -> str | None:
        """The session named in `extra_body={"leyline": {"session": "id"}}`."""
        ours = self.body.get(KEY)
        name = ours.get("session") if isinstance(ours, Mapping) else ours
        return str(name) if name is not None else None

    @property
    def on_report(self) -> Callable[[Any], None] | None:
        """Who gets the report of this call alone: `extra_body={"leyline": {"on_report": function}}`."""
        ours = self.body.get(KEY)
        listener = ours.get("on_report") if isinstance(ours, Mapping) else None
        return listener if callable(listener) else None

    @property
    def scope(self) -> str:
        """What decides which KV a prompt may share, besides its tokens."""
        return "\x1e".join(str(self.body.get(name) or "") for name in _SCOPE_FIELDS)

    @property
    def model(self) -> str | None:
        return self.body.get("model")

    @property
    def tools(self) -> list[Mapping[str, Any]] | None:
        return self.body.get("tools")

    @property
    def template_kwargs(self) -> Mapping[str, Any] | None:
        return self.body.get("chat_template_kwargs")

    @property
    def render_options(self) -> dict[str, Any]:
        """Other fields that the server's rendering looks at."""
        return {name: self.body[name] for name in _RENDER_FIELDS if self.body.get(name) is not None}

    @property
    def plain_body(self) -> dict[str, Any]:
        """The body as the stock client would send it."""
        return {key: value for key, value in self.body.items() if key != KEY}

    def with_view(self, messages: list[Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        """The body with the view's messages and `extras`; what the caller said itself wins."""
        theirs = self.plain_body
        merged = {**extras, **theirs, "messages": messages}
        if "custom_params" in extras and isinstance(theirs.get("custom_params"), Mapping):
            merged["custom_params"] = {**extras["custom_params"], **theirs["custom_params"]}
        return merged

    def options_with(self, body: dict[str, Any], post_parser: Callable[[Any], Any]) -> Any:
        """The SDK's options for another body. `post_parser` gets the parsed response before the caller's own does."""
        theirs = self.options.post_parser
        parser = _chained(post_parser, theirs) if callable(theirs) else post_parser
        return self.options.model_copy(update={"json_data": body, "extra_json": None, "post_parser": parser})


def plain_options(options: Any) -> Any:
    """The SDK's options of a request that Leyline lets through, less what was said to Leyline in its `extra_body`."""
    if not isinstance(options.extra_json, Mapping) or KEY not in options.extra_json:
        return options
    theirs = {key: value for key, value in options.extra_json.items() if key != KEY}
    return options.model_copy(update={"extra_json": theirs or None})


def _chained(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The two parsers as one; what `first` left on the response is carried over to what `second` makes of it."""

    def both(parsed: Any) -> Any:
        ours = first(parsed)
        theirs = second(ours)
        report = getattr(ours, KEY, None)
        if report is not None and theirs is not ours and hasattr(theirs, "__dict__"):
            object.__setattr__(theirs, KEY, report)
        return theirs

    return both
