"""The server that a command measures: a running one, or one started for the time of the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from leyline_agent.cli.console import err
from leyline_agent.errors import ConfigError

if TYPE_CHECKING:
    from leyline_agent.bench.target import Target

POOL_TOKENS = 24576
"""KV slots of a server started here: a few sessions side by side."""


@contextmanager
def target_of(base_url: str | None, model_path: Path | None, *, pool_tokens: int = POOL_TOKENS) -> Iterator[Target]:
    """The server at `base_url`; or one on the CPU, with the model in `model_path` or SmolLM2-135M."""
    from leyline_agent.bench.target import Target, cpu_server

    if base_url and model_path:
        raise ConfigError("--base-url is a server that runs, --model-path a model to start one with; give one")
    if base_url:
        yield Target.of(base_url)
        return
    from leyline_agent.integrations.sglang.models import smollm2

    model = model_path or smollm2(err)
    with (
        err.status(f"starting SGLang on the CPU with {escape(model.name)} (half a minute)") as status,
        cpu_server("--max-total-tokens", str(pool_tokens), model_path=model) as target,
    ):
        status.stop()
        yield target
