"""The transport below an SDK: the fallback for clients that only take an `http_client`."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from leyline_agent.integrations.openai import Leyline, async_http_client, http_client
from leyline_agent.run_report import RunReport
from loopback import HISTORY, cut, loopback

pytestmark = pytest.mark.client


def stock_client(server: Any, run: RunReport) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="k", http_client=http_client(policy=cut, on_report=run))


def test_a_stock_client_sends_the_view_and_sees_its_own_answer() -> None:
    run = RunReport()
    with loopback() as server:
        completion = stock_client(server, run).chat.completions.create(model="m", messages=HISTORY)
        assert server.chats[0]["messages"][2]["content"] == "[cut]"
        assert "custom_params" in server.chats[0]
        assert completion.choices[0].message.content == "hello"
        assert "sglext" not in completion.model_dump()
    assert [(report.edits, report.prompt_tokens) for report in run.reports] == [(1, 10)]


def test_a_stream_loses_only_what_leyline_asked_for() -> None:
    run = RunReport()
    with loopback() as server, stock_client(server, run) as client:
        chunks = list(client.chat.completions.create(model="m", messages=HISTORY, stream=True))
        assert [bool(chunk.choices) for chunk in chunks] == [True] * 4
    assert [report.prompt_tokens for report in run.reports] == [3]


def test_errors_retries_and_other_paths_are_the_sdks_own() -> None:
    with loopback(fail=[503]) as server, stock_client(server, RunReport()) as client:
        assert client.chat.completions.create(model="m", messages=HISTORY).choices
        server.fail.append(400)
        with pytest.raises(openai.BadRequestError, match="as you wished"):
            client.chat.completions.create(model="m", messages=HISTORY)
        with pytest.raises(openai.NotFoundError):
            client.models.list()


def test_a_server_without_leyline_gets_no_unknown_field() -> None:
    with loopback(leyline=False, strict=True) as server, stock_client(server, RunReport()) as client:
        assert client.chat.completions.create(model="m", messages=HISTORY).choices


def test_async_clients() -> None:
    run = RunReport()

    async def calls(server: Any) -> int:
        client = async_http_client(Leyline(cut, on_report=run))
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k", http_client=client) as sdk:
            await sdk.chat.completions.create(model="m", messages=HISTORY)
            stream = await sdk.chat.completions.create(model="m", messages=HISTORY, stream=True)
            return len([chunk async for chunk in stream])

    with loopback() as server:
        assert asyncio.run(calls(server)) == 4
        assert server.chats[1]["messages"][2]["content"] == "[cut]"
    assert len(run.reports) == 2
