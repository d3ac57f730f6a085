"""What the server's tests share: live servers, the reference of the same model, and reproducible token sequences.

A test that takes `server` runs against every server of `SERVERS`: both attention families, both tree cores. A module
for which one is enough says so: `pytest.mark.parametrize("live", ["llama-rust"], indirect=True)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from faults import Faults
from reference import ReferenceModel
from splice_client import SpliceClient

if TYPE_CHECKING:
    from pathlib import Path

Tokens = Callable[[int], list[int]]

SERVERS = (
    "llama-rust",
    "deepseek_v2-python",
    "deepseek_v3-rust",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("llama-python", "deepseek_v2-rust", "deepseek_v3-python")
    ),
    *(pytest.param(f"{name}-rust", marks=pytest.mark.slow) for name in ("llama3_rope", "deepseek_v2_mscale")),
)
"""Model and tree core. Rust is SGLang's default; the pairs left out of the quick run have nothing new in them."""


@pytest.fixture(scope="session", params=SERVERS)
def live(request: pytest.FixtureRequest, cpu_server: Callable[..., Any]) -> Any:
    """A running server with the plugin. `small-` in front of its name gives it a pool of 2048 slots."""
    name, _, core = request.param.rpartition("-")
    environment = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core} if core != "rust" else None
    model = name.removeprefix("small-")
    arguments = ("--max-total-tokens", "2048") if model != name else ()
    return cpu_server(model, *arguments, env=environment)


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def operated(cpu_server: Callable[..., Any], faults: Faults) -> Callable[[], Any]:
    """Gives a server as an operator may run it, with little memory: metrics, short chunks of prefill, faults on demand.

    A function, because a server that other modules have pushed out meanwhile has to be started again.
    """
    chunks = ("--chunked-prefill-size", "128", "--enable-mixed-chunk")
    arguments = ("--max-total-tokens", "2048", *chunks, "--enable-metrics")
    return lambda: cpu_server("llama", *arguments, env=faults.environment)


@pytest.fixture
def server(live: Any) -> Iterator[SpliceClient]:
    client = SpliceClient(live.url)
    yield client
    client.close()


@pytest.fixture
def reference(live: Any) -> ReferenceModel:
    """The server's model in transformers. Of a wider scope, it would outlast a `live` that a module has redefined."""
    return _load_reference(live.model_path)


@cache
def _load_reference(path: Path) -> ReferenceModel:
    return ReferenceModel.load(path)


@pytest.fixture
def tokens(request: pytest.FixtureRequest) -> Tokens:
    """`tokens(n)`: the next n of a random sequence that belongs to this test."""
    rng = random.Random(request.node.nodeid)
    return lambda length: [rng.randrange(250) for _ in range(length)]
