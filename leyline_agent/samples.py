"""Made-up agent histories with everything that trips policies up: the samples behind `check_policy`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

History = list[dict[str, Any]]

_FILES = ("src/app.py", "src/parser.py", "README.md", "tests/test_app.py")
_WORDS = ("the", "cache", "keeps", "what", "a", "model", "has", "read", "and", "splice", "moves", "it", "when", "span")
_ERRORS = (
    "Error: connection reset",
    "Traceback (most recent call last):\n  ValueError: bad input",
    '{"error": "busy"}',
)


def sample_histories(count: int = 24, seed: int = 0) -> list[History]:
    """`count` histories, the same for the same seed. Some are broken before any policy saw them, as real ones are."""
    return [sample_history(random.Random(f"{seed}:{number}")) for number in range(count)]  # noqa: S311 - not for secrets


def sample_history(rng: random.Random) -> History:
    """One history, made by `rng`: a system prompt (mostly), a task, and up to fifteen turns of several kinds."""
    history: History = []
    if rng.random() < 0.8:
        history.append({"role": "system", "content": "You are a careful engineer. " + _text(rng, 40)})
    history.append({"role": "user", "content": "Please fix the bug. " + _text(rng, 20)})
    if rng.random() < 0.15:
        _text_protocol(history, rng)
        return history
    kinds = rng.choices(_KINDS, weights=_WEIGHTS, k=rng.randint(1, 15))
    for number, kind in enumerate(kinds):
        kind(history, rng, number)
    if history[-1]["role"] == "assistant" and rng.random() < 0.7:
        history.append({"role": "user", "content": "And now the next thing. " + _text(rng, 10)})
    return history


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=max(1, words)))


def _lines(rng: random.Random, words: int) -> str:
    """Text in lines of at most twelve words, as tools print it."""
    return "\n".join(_text(rng, min(12, words - start)) for start in range(0, words, 12))


def _call(name: str, arguments: dict[str, Any], call_id: str | None) -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return call if call_id is None else {"id": call_id, **call}


def _result(content: Any, call_id: str | None, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"role": "tool", "content": content, **more}
    return result if call_id is None else {**result, "tool_call_id": call_id}


def _read(history: History, rng: random.Random, number: int) -> None:
    path = rng.choice(_FILES)
    call_id = rng.choice([f"call_{number}", "call_0", None])  # fresh, repeated, missing
    history.append({"role": "assistant", "content": None, "tool_calls": [_call("read_file", {"path": path}, call_id)]})
    history.append(_result(f"# {path}\n" + _lines(rng, rng.choice([3, 60, 400])), call_id))


def _parallel(history: History, rng: random.Random, number: int) -> None:
    ids = [f"call_{number}_{k}" for k in range(rng.randint(2, 4))]
    calls = [_call(rng.choice(["search", "read_file"]), {"query": rng.choice(_WORDS)}, i) for i in ids]
    history.append(
        {"role": "assistant", "content": rng.choice(["", "Looking at several things."]), "tool_calls": calls}
    )
    history.extend(_result(_lines(rng, rng.choice([5, 200])), i) for i in rng.sample(ids, len(ids)))


def _retry(history: History, rng: random.Random, number: int) -> None:
    arguments = {"command": "make test", "n": rng.choice([1, number])}
    for attempt, output in enumerate([rng.choice(_ERRORS), "3 passed.\n" + _lines(rng, 50)]):
        call_id = f"call_{number}_{attempt}"
        text = rng.choice([None, "Trying."])
        history.append({"role": "assistant", "content": text, "tool_calls": [_call("run", arguments, call_id)]})
        history.append(_result(output, call_id))


def _repeat(history: History, rng: random.Random, number: int) -> None:
    output = "same listing " * 40
    for attempt in range(rng.randint(2, 3)):
        call_id = f"call_{number}_{attempt}"
        history.append({"role": "assistant", "tool_calls": [_call("list_dir", {"path": "."}, call_id)]})
        history.append(_result(output, call_id))


def _think(history: History, rng: random.Random, number: int) -> None:
    reasoning = _text(rng, 80)
    message: dict[str, Any] = {"role": "assistant", "content": f"Done with step {number}."}
    if rng.random() < 0.5:
        message["reasoning_content"] = reasoning
    else:
        message["content"] = f"<think>\n{rng.choice([reasoning, ''])}\n</think>\n\n" + message["content"]
    history.append(message)
    history.append({"role": "user", "content": "Good. " + _text(rng, 5)})


def _media(history: History, rng: random.Random, number: int) -> None:
    call_id = f"call_{number}"
    history.append({"role": "assistant", "content": None, "tool_calls": [_call("screenshot", {}, call_id)]})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": _lines(rng, 150)}
    history.append(
        _result(rng.choice([[text], [text, image], [text, text]]), call_id, name="screenshot", extra={"a": 1})
    )


def _secret(history: History, rng: random.Random, number: int) -> None:
    key = "sk-" + "a1B2" * 8
    call_id = f"call_{number}"
    arguments = {"command": f"curl -H 'Authorization: {key}' {rng.choice(_FILES)}"}
    history.append({"role": "assistant", "content": f"I use {key}.", "tool_calls": [_call("run", arguments, call_id)]})
    history.append(_result(f"key {key} accepted", call_id))


def _interrupted(history: History, rng: random.Random, number: int) -> None:
    ids = [f"call_{number}_{k}" for k in range(2)]
    history.append(
        {"role": "assistant", "content": None, "tool_calls": [_call("run", {"command": "sleep"}, i) for i in ids]}
    )
    if rng.random() < 0.5:
        history.append(_result(_text(rng, 100), ids[0]))
    history.append({"role": "user", "content": "Stop, that takes too long."})


def _odd(history: History, rng: random.Random, number: int) -> None:
    """A result without a call, a role nobody knows, two assistant messages in a row."""
    history.append({"role": "assistant", "content": f"Hm, {number}.", "custom": {"kept": True}})
    history.append(
        rng.choice(
            [
                _result(_text(rng, 60), "call_of_nobody"),
                {"role": "observer", "content": "unknown role", "tool_calls": "odd"},
                {"role": "assistant", "content": "And one more thing."},
            ]
        )
    )


def _text_protocol(history: History, rng: random.Random) -> None:
    for _ in range(rng.randint(3, 12)):
        command = f"{rng.choice(['open', 'cat', 'python'])} {rng.choice(_FILES)}"
        history.append({"role": "assistant", "content": f"Let me see.\n\n```\n{command}\n```"})
        history.append({"role": "user", "content": _text(rng, rng.choice([5, 60, 300]))})


_KINDS: tuple[Callable[[History, random.Random, int], None], ...] = (
    _read, _parallel, _retry, _repeat, _think, _media, _secret, _interrupted, _odd,
)  # fmt: skip
_WEIGHTS = (8, 3, 3, 2, 3, 1, 1, 1, 1)
