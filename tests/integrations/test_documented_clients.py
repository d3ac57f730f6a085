"""The code of docs/clients.md runs as it stands there, from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from histories import session

pytestmark = [pytest.mark.client, pytest.mark.server]

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
def test_the_code_of_the_page_runs(cpu_server: Callable[..., Any]) -> None:
    langchain = pytest.importorskip("langchain_core.tools", reason="LangChain is in .venv-client only")
    server = cpu_server("llama")

    @langchain.tool
    def look(part: str) -> str:
        """Look at a part."""
        return f"part {part}"

    names: dict[str, Any] = {"history": session(6), "tools": [look]}
    here = {
        "http://127.0.0.1:30000/v1": server.base_url,
        "/models/my-model": str(server.model_path),
        'model="any"': 'model="any", max_tokens=8',  # a random model does not know when to stop
    }
    page = PAGE.read_text()
    for there, ours in here.items():
        assert there in page
        page = page.replace(there, ours)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["run"].totals.turns == names["callback"].run.totals.turns == 1
