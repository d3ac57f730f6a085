"""Settings of the client side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from leyline_agent.directives import Mode
from leyline_agent.environment import client_settings
from leyline_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Config:
    """How a `ContextManager` and the clients on top of it behave. Raises ConfigError for a value out of range."""

    enabled: bool = True
    """False sends every request as the stock client would: no policy, no directives, no reports."""

    template_mode: Mode = Mode.AUTO
    """Mode of edits that the chat template makes by itself (reasoning stripped, output tokenized anew). AMORTIZE
    splices them and keeps sampled tokens where only their tokenization differs; FORGET prefills from the first of them
    on, as a stock server does; AUTO amortizes them only where the policy amortizes, so that exact stays exact."""

    rewrite_mode: Mode = Mode.AUTO
    """Mode of edits that the caller made in its own history between turns (another middleware, say); AUTO likewise."""

    reuse_replacements: bool = False
    """Whether the server may copy a replacement's KV from another place of the prompt that holds the same tokens."""

    min_run: int = 32
    """Tokens that two edits must have between them to stay two directives; closer ones become one. A splice costs about
    as much as the prefill of so many tokens."""

    recompute_base: bool = True
    """Whether a history that no session knows (after a restart, say) gets its base by running the policy on the history
    before the last answer. A wrong guess is refused by the server and costs nothing."""

    max_turns: int = 4096
    """Turns remembered over all sessions; the least recently used one is dropped first."""

    max_tokens: int = 16_000_000
    """Token ids remembered over all sessions, at eight bytes each."""

    cache_ttl_s: float | None = None
    """Seconds without a turn after which `Turn.cache_is_cold` is True. None: never assumed."""

    tokenizer: str | None = None
    """Folder with `tokenizer.json` and the chat template, for rendering on this side; it is compared with the server's
    rendering, which wins if they differ. None: the server's own tokenizer, if it is to be fetched."""

    fetch_tokenizer: bool = True
    """Whether a client that has no tokenizer takes the server's, once. Otherwise, and where the server has none to give
    or this environment lacks the extra `tokens`, the server renders: some requests more on each turn that edits."""

    verify_renderer: bool = True
    """Whether a local rendering is compared with the server's, once for every kind of history."""

    probe_ttl_s: float = 300.0
    """Seconds for which "this server has no Leyline" is believed before the server is asked again."""

    probe_timeout_s: float = 3.0
    """Seconds to wait for the server's answer to "do you have Leyline?"."""

    def __post_init__(self) -> None:
        for name in ("template_mode", "rewrite_mode"):
            if not isinstance(getattr(self, name), Mode):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a Mode: {', '.join(Mode)}")
        for name in ("min_run", "max_turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("cache_ttl_s", "probe_ttl_s", "probe_timeout_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; seconds cannot be negative")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Config:
        """A Config from names and values. Raises ConfigError for a name it does not know or a value it cannot read."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}; known are {', '.join(sorted(known))}")
            values[name] = _read(name, str(known[name].type), value)
        return cls(**values)

    @classmethod
    def from_env(cls) -> Config:
        """A Config from LEYLINE_<FIELD> variables, defaults where they are unset or empty."""
        return cls.from_mapping(client_settings(field.name for field in dataclasses.fields(cls)))


def _read(name: str, kind: str, value: Any) -> Any:
    """`value` as the type a field is declared with; text comes from the environment or a file."""
    if not isinstance(value, str):
        return value
    try:
        return _READERS[kind](value)
    except (KeyError, ValueError) as err:
        raise ConfigError(f"setting {name} is {value!r}, which is not a {kind}") from err


def _boolean(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        text.strip().lower()
    ]


_READERS: dict[str, Callable[[str], Any]] = {
    "bool": _boolean,
    "int": int,
    "float": float,
    "float | None": float,
    "str | None": str,
    "Mode": lambda text: Mode(text.strip().lower()),
}
