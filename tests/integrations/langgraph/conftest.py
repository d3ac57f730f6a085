"""A LangGraph agent on the real server: a tiny random model whose grammar makes it call tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SERVER_FLAGS = ("--constrained-json-disable-any-whitespace", "--tool-call-parser", "hermes")


@pytest.fixture(scope="session")
def server(cpu_server: Callable[..., Any]) -> Any:
    return cpu_server("llama", *SERVER_FLAGS)


@pytest.fixture
def task(request: pytest.FixtureRequest) -> str:
    """A first message that no other test has."""
    return f"Look at every part. ({request.node.name})"
