"""Histories to measure with, made in the paper's shape."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leyline_agent.errors import ConfigError
from leyline_agent.traces import Trace

CountTokens = Callable[[str], int]

FIRST = 1
"""Model calls at the beginning of a generated session that are not played: they have asked for files, no more."""

_SAMPLE_WORDS = 2000
_TEXT = (
    "return value import class index total price order store cache token line error test file path name list item key "
    "user data time date open close read write check build merge split parse print match count first last next before "
    "after under over again around because while where other another every number little great small large early late "
    "right left high water light paper house world school state city country company system program question work "
    "government night point home room mother area money story fact month lot study book eye job word business issue "
    "side kind head far black white long away turn help start show hear play run move live believe bring happen"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Shape:
    """Sessions of a coding agent, in the paper's shape: about 4k tokens of system prompt and 2k more on every turn.

    A turn begins with the outputs of `reads` files, read in parallel, that together have
    `turn_tokens` tokens. Unless it is the first, one of them is the oldest file whose earlier copy is still whole, read
    again; the others are new. So a policy that drops superseded reads edits one old message on every turn, and one that
    truncates by age edits all outputs of one turn. System prompts and files are the session's own. The call before the
    first outputs is part of the history, but no turn (`FIRST`).
    """

    sessions: int = 16
    turns: int = 6
    system_tokens: int = 4096
    turn_tokens: int = 2048
    reads: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "system_tokens", "turn_tokens", "reads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


def generate(shape: Shape, count_tokens: CountTokens) -> list[Trace]:
    """The sessions of a shape; equal for an equal seed. `count_tokens` is asked once, for the tokens in a word."""
    sample = words(random.Random("tokens in a word"), _SAMPLE_WORDS)  # noqa: S311 - not for secrets
    words_per_token = _SAMPLE_WORDS / count_tokens(sample)
    return [_session(shape, number, words_per_token) for number in range(shape.sessions)]


def _session(shape: Shape, number: int, words_per_token: float) -> Trace:
    rng = random.Random(f"{shape.seed}:{number}")  # noqa: S311 - not for secrets

    def text(tokens: float) -> str:
        return words(rng, max(1, round(tokens * words_per_token)))

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Session {shape.seed}.{number}. " + text(shape.system_tokens)},
        {"role": "user", "content": f"Find the bug in part {number}. " + text(16)},
    ]
    live: list[str] = []
    for turn in range(shape.turns):
        paths = [live.pop(0)] if turn else []
        paths += [f"src/part_{turn}_{k}.py" for k in range(shape.reads - len(paths))]
        live += paths
        calls = [_call(f"call_{turn}_{k}", path) for k, path in enumerate(paths)]
        messages.append({"role": "assistant", "content": f"Step {turn}.", "tool_calls": calls})
        for call, path in zip(calls, paths, strict=True):
            content = f"# {path}, step {turn}\n" + text(shape.turn_tokens / shape.reads)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return Trace(f"session-{number:02}", tuple(messages), source="generated")


def _call(call_id: str, path: str) -> dict[str, Any]:
    arguments = json.dumps({"path": path})
    return {"id": call_id, "type": "function", "function": {"name": "read_file", "arguments": arguments}}


def words(rng: random.Random, count: int) -> str:
    """`count` common words, twelve a line."""
    lines = [" ".join(rng.choices(_WORDS, k=min(12, count - start))) for start in range(0, count, 12)]
    return "\n".join(lines)
