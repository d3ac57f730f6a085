"""Policies by name, for configs and the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, get_type_hints

from leyline_agent.directives import Mode
from leyline_agent.errors import ConfigError
from leyline_agent.policy import KeepAll, Policy

_CLASSES = {
    "clear_thinking": "ClearThinking",
    "clear_tool_uses": "ClearToolUses",
    "drop_failed_retries": "DropFailedRetries",
    "drop_repeats": "DropRepeats",
    "drop_superseded": "DropSuperseded",
    "redact": "Redact",
    "repair_history": "RepairHistory",
    "sliding_window": "SlidingWindow",
    "summarize": "Summarize",
    "token_budget": "TokenBudget",
    "truncate_tool_outputs": "TruncateToolOutputs",
}
_WRAPPERS = {
    "hysteresis": "Hysteresis",
    "when_cold": "WhenCold",
    "cost_aware": "CostAware",
    "protect": "Protect",
    "dry_run": "DryRun",
}


def available() -> tuple[str, ...]:
    """The names that `make` knows; a policy may stand in wrappers: `hysteresis(truncate_tool_outputs)`."""
    return ("keep_all", *_CLASSES)


def wrappers() -> tuple[str, ...]:
    """The wrappers that a spec may put around a policy."""
    return tuple(_WRAPPERS)


def policy_class(name: str) -> type[Policy]:
    """The class of a policy or wrapper by its name. Raises ConfigError for a name that is none."""
    key = name.strip().replace("-", "_")
    if key == "keep_all":
        return KeepAll
    if key in _CLASSES:
        module, attribute = f"leyline_agent.policies.{key}", _CLASSES[key]
    elif key in _WRAPPERS:
        module, attribute = f"leyline_agent.policies.wrappers.{key}", _WRAPPERS[key]
    else:
        raise ConfigError(f"no policy is called {name!r}; there are {', '.join((*available(), *_WRAPPERS))}")
    found: type[Policy] = getattr(import_module(module), attribute)
    return found


def make(name: str, /, **parameters: Any) -> Policy:
    """A policy by name, its parameters by keyword. Raises ConfigError for an unknown name or parameter."""
    cls = policy_class(name)
    known = _parameters(cls)
    for key in parameters:
        if key not in known:
            raise ConfigError(f"policy {name} has no parameter {key!r}; it has {', '.join(known) or 'none'}")
    for key, hint in get_type_hints(cls).items():
        if key in parameters:
            parameters[key] = _coerce(name, key, parameters[key], hint)
    return cls(**parameters)


def from_spec(spec: str) -> Policy:
    """A policy from text: `name` or `name:parameter=value,...`, in wrappers if need be.

    `hysteresis(truncate_tool_outputs:keep_turns=3):min_tokens=800` is a policy in a wrapper, both with parameters.
    Values are JSON where they parse as such (`exclude_tools=["read_file"]`), otherwise text. `a|b` is a chain.
    Raises ConfigError for what cannot be read.
    """
    parts = _split(spec, "|")
    if len(parts) > 1:
        chain = import_module("leyline_agent.policies.wrappers.chain")
        policy: Policy = chain.Chain(*(from_spec(part) for part in parts))
        return policy
    head, _, tail = _partition(spec, ":")
    parameters = dict(_parameter(item, spec) for item in _split(tail, ",") if item.strip())
    name, bracket, inner = head.strip().partition("(")
    if bracket:
        if not inner.endswith(")"):
            raise ConfigError(f"policy {spec!r} opens a bracket that it does not close")
        parameters["policy"] = from_spec(inner[:-1])
    return make(name, **parameters)


def from_config(config: Mapping[str, Any]) -> Policy:
    """A policy from `{"name": ..., parameters...}`; a wrapper holds another such mapping as its `policy`."""
    parameters = dict(config)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"policy config {dict(config)!r} has no name")
    if isinstance(parameters.get("policy"), Mapping):
        parameters["policy"] = from_config(parameters["policy"])
    return make(name, **parameters)


def with_text_protocol(policy: Policy) -> Policy:
    """The same policy for an agent whose tools speak plain text, down through wrappers and chains."""
    if not hasattr(policy, "__dataclass_fields__"):
        return policy
    record: Any = policy  # not every Policy is a dataclass, so that its type says nothing of fields
    changes: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(policy, field.name)
        if field.name == "text_protocol":
            changes[field.name] = True
        elif isinstance(value, Policy):
            changes[field.name] = with_text_protocol(value)
        elif isinstance(value, Mapping):
            changes[field.name] = {k: with_text_protocol(v) if isinstance(v, Policy) else v for k, v in value.items()}
        elif isinstance(value, tuple) and value and all(isinstance(item, Policy) for item in value):
            chain: Policy = type(record)(*(with_text_protocol(item) for item in value))
            return chain
    changed: Policy = replace(record, **changes)
    return changed


def _parameters(cls: type[Policy]) -> dict[str, Any]:
    return {f.name: f for f in fields(cls)} if hasattr(cls, "__dataclass_fields__") else {}  # type: ignore[arg-type]


def _coerce(policy: str, key: str, value: Any, hint: Any) -> Any:
    """JSON gives lists and strings where a field wants a tuple, a mode or a number: bring it there or say why not."""
    if hint is Mode:
        try:
            return Mode(value)
        except ValueError as err:
            raise ConfigError(f"{policy}: {key} is {value!r}; it must be one of {', '.join(Mode)}") from err
    if hint == tuple[str, ...]:
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value
    if hint in (int, float, bool, str):
        fits = isinstance(value, hint) or (hint is float and isinstance(value, int))
        if not fits or (hint is not bool and isinstance(value, bool)):
            raise ConfigError(f"{policy}: {key} is {value!r}; it must be of type {hint.__name__}")
    return value


def _parameter(item: str, spec: str) -> tuple[str, Any]:
    key, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"policy {spec!r}: {item!r} is not parameter=value")
    try:
        return key.strip(), json.loads(text)
    except ValueError:
        return key.strip(), text.strip()


def _partition(text: str, separator: str) -> tuple[str, str, str]:
    first, *rest = _split(text, separator)
    return first, separator if rest else "", separator.join(rest)


def _split(text: str, separator: str) -> list[str]:
    """Split at separators that stand in no bracket and no JSON string."""
    parts, depth, quoted, escaped = [""], 0, False, False
    for char in text:
        if char == '"' and not escaped:
            quoted = not quoted
        escaped = char == "\\" and not escaped
        if not quoted:
            depth += (char in "([{") - (char in ")]}")
        if char == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    return parts
