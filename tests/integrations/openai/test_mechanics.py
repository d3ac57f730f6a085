"""The hook in the SDK: what is sent where, on a server that does as it is told."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from typing import Any

import openai
import pytest

from leyline_agent.config import Config
from leyline_agent.errors import ConfigError
from leyline_agent.integrations.openai import AsyncOpenAI, Leyline, OpenAI
from leyline_agent.report import FallbackReason
from loopback import HISTORY, cut, loopback

pytestmark = pytest.mark.client


def client_for(server: Any, **options: Any) -> OpenAI:
    options = {"policy": cut, **options}
    return OpenAI(base_url=server.base_url, api_key="k", **options)


def test_the_view_goes_out_and_the_history_stays() -> None:
    with loopback() as server:
        history = copy.deepcopy(HISTORY)
        completion = client_for(server).chat.completions.create(model="m", messages=history)
        assert history == HISTORY
        assert server.chats[0]["messages"][2]["content"] == "[cut]"
        assert type(completion) is openai.types.chat.ChatCompletion
        assert completion.leyline.edits == 1
        assert "leyline" not in json.dumps(completion.model_dump())
        assert "sglext" not in completion.model_dump()


def test_a_server_without_leyline_gets_the_view_and_no_unknown_field() -> None:
    with loopback(leyline=False, strict=True) as server:
        client = client_for(server)
        for _ in range(5):
            completion = client.chat.completions.create(model="m", messages=HISTORY)
        assert server.asked("/leyline/status") == 1
        assert server.chats[0]["messages"][2]["content"] == "[cut]"
        assert [f.reason for f in completion.leyline.fallbacks] == [FallbackReason.SERVER_WITHOUT_LEYLINE]
        assert not completion.leyline.served
        assert (completion.leyline.prompt_tokens, completion.leyline.exact) == (10, 4)


def test_a_server_that_lost_leyline_is_asked_again_and_gets_a_plain_request() -> None:
    with loopback() as server:
        client = client_for(server)
        client.chat.completions.create(model="m", messages=HISTORY)
        server.leyline, server.strict = False, True
        completion = client.chat.completions.create(model="m", messages=HISTORY)
        assert FallbackReason.SERVER_WITHOUT_LEYLINE in [f.reason for f in completion.leyline.fallbacks]


def test_the_callers_own_bad_request_stays_an_error() -> None:
    with loopback(fail=[400]) as server:
        with pytest.raises(openai.BadRequestError, match="as you wished"):
            client_for(server).chat.completions.create(model="m", messages=HISTORY)
        assert len(server.chats) == 1


def test_retries_send_the_same_body_and_commit_once() -> None:
    with loopback(fail=[503, 429]) as server:
        client = client_for(server, max_retries=2)
        client.chat.completions.create(model="m", messages=HISTORY)
        assert len(server.chats) == 3
        assert server.chats[0] == server.chats[1] == server.chats[2]
        assert len(client.leyline.manager.store) == 1


def test_a_failed_call_is_not_remembered() -> None:
    with loopback(fail=[500]) as server:
        client = client_for(server, max_retries=0)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=HISTORY)
        assert len(client.leyline.manager.store) == 0


def test_no_server_is_the_sdks_own_error() -> None:
    client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", policy=cut, max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=HISTORY)


def test_streaming_shows_the_callers_chunks_and_puts_the_report_on_the_stream() -> None:
    with loopback() as server:
        stream = client_for(server).chat.completions.create(model="m", messages=HISTORY, stream=True)
        assert type(stream) is openai.Stream
        chunks = list(stream)
        assert [bool(chunk.choices) for chunk in chunks] == [True] * 4
        assert stream.leyline.prompt_tokens == 3


def test_chunks_the_caller_asked_for_are_shown() -> None:
    with loopback() as server:
        stream = client_for(server).chat.completions.create(
            model="m", messages=HISTORY, stream=True, extra_body={"return_output_ids_in_sglext": True}
        )
        assert list(stream)[-1].model_extra["sglext"] == {"output_ids": [[1, 2, 3]]}


def test_a_stream_closed_early_leaves_a_session_that_goes_on() -> None:
    with loopback(chunks=50) as server:
        client = client_for(server)
        with client.chat.completions.create(model="m", messages=HISTORY, stream=True) as stream:
            next(iter(stream))
        more = [*HISTORY, {"role": "assistant", "content": "w0"}, {"role": "user", "content": "go on"}]
        assert client.chat.completions.create(model="m", messages=more).leyline.turn == 1


def test_the_callers_extra_body_wins_and_ours_stays_here() -> None:
    with loopback() as server:
        client_for(server).chat.completions.create(
            model="m",
            messages=HISTORY,
            extra_body={"leyline": {"session": "s"}, "custom_params": {"mine": 1}, "top_k": 5},
        )
        body = server.chats[0]
        assert "leyline" not in body
        assert body["custom_params"]["mine"] == 1
        assert "leyline" in body["custom_params"]
        assert body["top_k"] == 5


def test_token_ids_of_the_caller_pass_through_untouched() -> None:
    with loopback() as server:
        client_for(server).chat.completions.create(model="m", messages=HISTORY, extra_body={"input_ids": [1, 2]})
        assert server.chats[0]["messages"] == HISTORY
        assert "custom_params" not in server.chats[0]


def test_copies_keep_the_type_and_the_runtime() -> None:
    client = OpenAI(base_url="http://x/v1", api_key="k", policy=cut)
    for other in (client.copy(), client.with_options(timeout=3), client.session("s").client):
        assert type(other) is OpenAI
        assert other.leyline is client.leyline
    assert client.with_options(base_url="http://y/v1").leyline is client.leyline
    assert client.session("s").client.with_options(timeout=1).leyline_session == "s"


def test_a_runtime_and_a_policy_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="either"):
        OpenAI(api_key="k", leyline=Leyline(), policy=cut)


def test_switched_off_it_is_the_stock_client() -> None:
    with loopback() as server:
        client_for(server, config=Config(enabled=False)).chat.completions.create(model="m", messages=HISTORY)
        assert server.chats == [{"model": "m", "messages": HISTORY}]
        assert server.asked("/leyline/status") == 0


def test_raw_and_streamed_responses_carry_the_report_once_parsed() -> None:
    with loopback() as server:
        client = client_for(server)
        raw = client.chat.completions.with_raw_response.create(model="m", messages=HISTORY)
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().leyline.edits == 1
        with client.chat.completions.with_streaming_response.create(model="m", messages=HISTORY) as response:
            assert response.parse().leyline.edits == 1
        assert len(client.leyline.manager.store) == 1


def test_listeners_get_every_report_and_cannot_break_a_call() -> None:
    reports = []

    def listen(report: Any) -> None:
        reports.append(report)
        raise RuntimeError("my own fault")

    with loopback() as server:
        client = client_for(server, on_report=listen)
        client.chat.completions.create(model="m", messages=HISTORY)
        list(client.chat.completions.create(model="m", messages=HISTORY, stream=True))
    assert [report.edits for report in reports] == [1, 1]


def test_a_broken_policy_does_not_break_the_call() -> None:
    def broken(_: Any) -> Any:
        raise KeyError("content")

    with loopback() as server:
        completion = client_for(server, policy=broken).chat.completions.create(model="m", messages=HISTORY)
        assert server.chats[0]["messages"] == HISTORY
        assert [f.reason for f in completion.leyline.fallbacks] == [FallbackReason.POLICY_FAILED]


def test_pydantic_messages_generators_and_none_contents_survive() -> None:
    with loopback() as server:
        client = client_for(server, policy=None)
        reply = client.chat.completions.create(model="m", messages=HISTORY).choices[0].message
        client.chat.completions.create(model="m", messages=(m for m in [*HISTORY, reply, HISTORY[3]]))
        sent = server.chats[1]["messages"]
        assert sent[1]["content"] is None
        assert sent[4]["content"] == "hello"


def test_async_and_sync_do_the_same() -> None:
    async def calls(server: Any) -> list[Any]:
        async with AsyncOpenAI(base_url=server.base_url, api_key="k", policy=cut) as client:
            whole = await client.chat.completions.create(model="m", messages=HISTORY)
            stream = await client.chat.completions.create(model="m", messages=HISTORY, stream=True)
            assert type(stream) is openai.AsyncStream
            chunks = [chunk async for chunk in stream]
            raw = await client.chat.completions.with_raw_response.create(model="m", messages=HISTORY)
            return [whole.leyline.edits, stream.leyline.edits, len(chunks), raw.parse().leyline.edits]

    with loopback() as server:
        assert asyncio.run(calls(server)) == [1, 1, 4, 1]
        assert server.asked("/leyline/status") == 1


def test_a_slow_policy_does_not_hold_up_the_event_loop() -> None:
    import threading

    go = threading.Event()

    def slow(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert go.wait(10)
        return messages

    async def calls(server: Any) -> None:
        async with AsyncOpenAI(base_url=server.base_url, api_key="k", policy=slow) as client:
            task = asyncio.create_task(client.chat.completions.create(model="m", messages=HISTORY))
            await asyncio.sleep(0.2)
            go.set()  # reached only because the loop is free
            await task

    with loopback() as server:
        asyncio.run(calls(server))


def test_importing_brings_no_http_library_of_its_own_choice() -> None:
    """Version 3 of the SDK uses httpx2 instead of httpx; naming either at import breaks with the other."""
    code = (
        "import sys, openai\n"
        "before = {'httpx', 'httpx2'} & set(sys.modules)\n"
        "import leyline_agent.integrations.openai\n"
        "assert {'httpx', 'httpx2'} & set(sys.modules) == before, before\n"
        "assert not {'torch', 'sglang', 'langchain', 'transformers', 'jinja2', 'tokenizers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
