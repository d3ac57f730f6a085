"""`leyline serve --cpu` starts the real engine."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from servers import CpuServer

pytestmark = pytest.mark.server


@pytest.mark.parametrize("model", ["llama", "deepseek_v2", "deepseek_v3"])
def test_a_stock_cpu_server_answers(cpu_server: Callable[..., CpuServer], model: str) -> None:
    server = cpu_server(model, leyline=False)

    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    answer = httpx.post(server.base_url + "/chat/completions", json=body, timeout=60).raise_for_status().json()

    assert answer["usage"]["completion_tokens"] == 4
