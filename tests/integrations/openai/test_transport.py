"""The transport below an SDK: the fallback for clients that only take an `http_client`."""

from __future__ import annotations

import asyncio
import importlib
import threading
from typing import Any

import openai
import pytest

from leyline_agent.config import Config
from leyline_agent.integrations.openai import Leyline, async_http_client, http_client
from leyline_agent.report import FallbackReason
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


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_events_are_handed_on_as_they_come(line_end: str) -> None:
    go = threading.Event()

    def wait(number: int) -> None:
        assert not number or go.wait(10)  # the second event comes when the caller has seen the first

    with loopback(line_end=line_end, before_chunk=wait) as server, stock_client(server, RunReport()) as client:
        stream = iter(client.chat.completions.create(model="m", messages=HISTORY, stream=True))
        assert next(stream).choices[0].delta.content == "w0 "
        go.set()
        assert len(list(stream)) == 3


def test_a_server_that_lost_leyline_gets_a_plain_request() -> None:
    run = RunReport()
    with loopback() as server, stock_client(server, run) as client:
        client.chat.completions.create(model="m", messages=HISTORY)
        server.leyline, server.strict = False, True
        assert client.chat.completions.create(model="m", messages=HISTORY).choices
        assert server.chats[-1]["messages"][2]["content"] == "[cut]"
    assert FallbackReason.SERVER_WITHOUT_LEYLINE in [f.reason for f in run.reports[1].fallbacks]


def test_what_is_said_to_leyline_never_reaches_a_server() -> None:
    off = http_client(policy=cut, config=Config(enabled=False))
    with loopback() as server, openai.OpenAI(base_url=server.base_url, api_key="k", http_client=off) as client:
        client.chat.completions.create(model="m", messages=HISTORY, extra_body={"leyline": {"session": "s"}})
        assert server.chats == [{"model": "m", "messages": HISTORY}]


def test_it_goes_through_the_callers_own_transport() -> None:
    library = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
    inner = library.HTTPTransport(retries=1)
    client = http_client(policy=cut, transport=inner)
    with loopback() as server, openai.OpenAI(base_url=server.base_url, api_key="k", http_client=client) as sdk:
        assert sdk.chat.completions.create(model="m", messages=HISTORY).choices
        assert inner._pool.connections  # all of it went here: the probe, too


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
