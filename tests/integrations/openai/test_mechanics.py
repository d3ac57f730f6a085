"""The hook in the SDK: what is sent where, on a server that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from opentelemetry import trace

from leyline_agent.config import Config
from leyline_agent.edits import MessageEdit, Turn, Usage
from leyline_agent.errors import ConfigError
from leyline_agent.integrations.openai import AsyncOpenAI, Leyline, OpenAI, report_of
from leyline_agent.integrations.openai.side_requests import run_in_loop
from leyline_agent.manager import ContextManager
from leyline_agent.policy import Policy
from leyline_agent.report import FallbackReason
from leyline_agent.wire import SpliceRequest
from loopback import HISTORY, cut, loopback
from recording_span import RecordingSpan
from switched import Switched

pytestmark = pytest.mark.client


def client_for(server: Any, **options: Any) -> OpenAI:
    options = {"policy": cut, **options}
    return OpenAI(base_url=server.base_url, api_key="k", **options)


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=HISTORY, **options)


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
        assert server.asked("/leyline/ready") == 1
        assert server.chats[0]["messages"][2]["content"] == "[cut]"
        assert [f.reason for f in completion.leyline.fallbacks] == [FallbackReason.SERVER_WITHOUT_LEYLINE]
        assert not completion.leyline.served
        assert (completion.leyline.prompt_tokens, completion.leyline.exact) == (10, 4)


def test_of_many_calls_that_begin_together_one_asks_the_server() -> None:
    async def calls(server: Any) -> None:
        async with AsyncOpenAI(base_url=server.base_url, api_key="k", policy=cut) as client:
            await asyncio.gather(*(chat(client) for _ in range(20)))

    with loopback(leyline=False, strict=True) as server:
        with ThreadPoolExecutor(20) as executor:
            list(executor.map(chat, [client_for(server)] * 20))
        asyncio.run(calls(server))
        assert len(server.chats) == 40
        assert server.asked("/leyline/ready") == 2  # each client once


def test_a_server_that_lost_leyline_is_asked_again_and_gets_a_plain_request() -> None:
    with loopback() as server:
        client = client_for(server)
        client.chat.completions.create(model="m", messages=HISTORY)
        server.leyline, server.strict = False, True
        completion = client.chat.completions.create(model="m", messages=HISTORY)
        assert FallbackReason.SERVER_WITHOUT_LEYLINE in [f.reason for f in completion.leyline.fallbacks]


def test_an_answer_without_a_report_shows_that_leyline_is_gone() -> None:
    """A server that takes unknown fields, and does nothing with them, in the place of one with Leyline."""
    with loopback() as server:
        client = client_for(server)
        chat(client)
        server.leyline = False
        reports = [chat(client).leyline for _ in range(2)]
        list(chat(client, stream=True))
        assert ["custom_params" in body for body in server.chats] == [True, True, False, False]
    for report in reports:
        assert [f.reason for f in report.fallbacks] == [FallbackReason.SERVER_WITHOUT_LEYLINE]
        assert not report.served


def test_a_server_that_did_not_answer_is_asked_again_who_it_is() -> None:
    with loopback() as server:
        address = Switched(server.url)
        client = OpenAI(
            base_url=address.base_url, api_key="k", policy=cut, http_client=address.http_client, max_retries=0
        )
        chat(client)
        address.url = "http://127.0.0.1:9"
        with pytest.raises(openai.APIConnectionError):
            chat(client)
        address.url, server.leyline, server.strict = server.url, False, True
        chat(client)
        assert server.asked("/leyline/ready") == 2
        assert "custom_params" not in server.chats[-1]


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


def test_an_adopted_client_of_ones_own_keeps_its_methods() -> None:
    class Mine(openai.OpenAI):
        def _prepare_options(self, options: Any) -> Any:
            options.json_data["user"] = "mine"
            return super()._prepare_options(options)

    with loopback() as server:
        client = OpenAI.adopt(Mine(base_url=server.base_url, api_key="k"), Leyline(cut))
        chat(client)
        assert server.chats[0]["user"] == "mine"
        assert server.chats[0]["messages"][2]["content"] == "[cut]"
    assert type(OpenAI.adopt(openai.OpenAI(api_key="k"), Leyline())) is OpenAI


def test_a_runtime_and_a_policy_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="either"):
        OpenAI(api_key="k", leyline=Leyline(), policy=cut)
    with pytest.raises(ConfigError, match="either"):
        Leyline(cut, manager=ContextManager())


def test_switched_off_it_is_the_stock_client() -> None:
    with loopback() as server:
        client_for(server, config=Config(enabled=False)).chat.completions.create(model="m", messages=HISTORY)
        assert server.chats == [{"model": "m", "messages": HISTORY}]
        assert server.asked("/leyline/ready") == 0


OURS = {"leyline": {"session": "s", "on_report": print}, "mine": 1}
PASSED_THROUGH: dict[str, Callable[[Any], Any]] = {
    "chat": lambda client: chat(client, extra_body=OURS),
    "token ids of the caller": lambda client: chat(client, extra_body={**OURS, "input_ids": [1]}),
    "responses": lambda client: client.responses.create(model="m", input="x", extra_body=OURS),
    "embeddings": lambda client: client.embeddings.create(model="m", input="x", extra_body=OURS),
}


@pytest.mark.parametrize("state", ["on", "off", "broken"])
@pytest.mark.parametrize("call", PASSED_THROUGH)
def test_what_is_said_to_leyline_never_reaches_a_server(call: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ChatLeyline says it on every call, with a function in it that no JSON could hold."""
    with loopback() as server:
        client = client_for(server, config=Config(enabled=state != "off"))
        if state == "broken":  # no plan can be made
            monkeypatch.setattr(client.leyline, "manager", None)
        with contextlib.suppress(openai.NotFoundError):  # this server knows chat alone
            PASSED_THROUGH[call](client)
        body = server.requests[-1][1]
        assert body["mine"] == 1
        assert "leyline" not in body


def test_side_requests_carry_the_headers_of_the_call() -> None:
    """A gateway may route or bill by them, and would answer the probe for all clients with a 401 without them."""
    with loopback() as server:
        client = client_for(server)
        for _ in range(2):  # the second is found, and rendered
            client.chat.completions.with_raw_response.create(
                model="m", messages=HISTORY, extra_headers={"X-Tenant": "t"}, extra_query={"v": "2"}
            ).parse()
        paths = {path for path, _ in server.requests}
        assert {"/leyline/ready?v=2", "/v1/tokenize?v=2"} <= paths
        assert {headers.get("x-tenant") for headers in server.headers} == {"t"}


def test_side_requests_keep_to_the_time_limit_of_the_call() -> None:
    go = threading.Event()
    with loopback(before_tokenize=lambda: go.wait(30)) as server:
        client = client_for(server)
        chat(client)  # the second is found, and rendered
        completion = chat(client, timeout=0.2)
        go.set()
        assert completion.choices
        assert FallbackReason.RENDERER_UNAVAILABLE in [f.reason for f in completion.leyline.fallbacks]
        assert server.asked("/v1/tokenize") == 2  # once more, then the request goes out as messages


class Edits(Policy):
    """Gives the edits that the test last put here, and keeps what it was told of usage."""

    def __init__(self) -> None:
        self.edits: list[MessageEdit] = []
        self.usage: Usage | None = None

    def decide(self, turn: Turn) -> list[MessageEdit]:
        self.usage = turn.usage
        return list(self.edits)


def test_policies_know_the_usage_of_a_stream_whose_caller_asked_for_none() -> None:
    policy = Edits()
    with loopback() as server:
        client = client_for(server, policy=policy)
        list(chat(client, stream=True))
        chat(client)
    assert policy.usage == Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=3)


def test_a_server_that_gives_no_ids_is_worked_out_by_rendering() -> None:
    """What is lost is the sampled answer, which is rendered and prefilled anew; the report says so."""
    policy = Edits()
    with loopback(ids=False) as server:
        client = client_for(server, policy=policy)
        chat(client)
        policy.edits.append(MessageEdit(2, "[cut]"))
        answer = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
        report = client.chat.completions.create(model="m", messages=[*HISTORY, *answer]).leyline
        sent = SpliceRequest.parse(server.chats[1]["custom_params"]["leyline"])
    assert report.base == "recomputed"
    assert bytes(sent.directives[0].removed).decode() in json.dumps(HISTORY)


def test_a_stream_closed_early_takes_nothing_from_what_is_known() -> None:
    with loopback(chunks=50) as server:
        client = client_for(server, policy=None)
        chat(client)
        with chat(client, stream=True) as stream:
            next(iter(stream))
        (record,) = client.leyline.manager.store._records.values()
        assert record.prompt_ids.tolist() == [7, 8, 9]
        assert [output.tolist() for output in record.outputs] == [[1, 2]]


def test_the_report_is_found_on_whatever_the_sdk_returns() -> None:
    with loopback() as server:
        client = client_for(server)
        with client.chat.completions.stream(model="m", messages=HISTORY) as helper:
            list(helper)
        stream = chat(client, stream=True)
        list(stream)
        plain = openai.OpenAI(base_url=server.base_url, api_key="k")
        for holder in (helper, stream, chat(client)):
            assert report_of(holder).edits == 1
        assert report_of(chat(plain)) is None


def test_raw_and_streamed_responses_carry_the_report_once_parsed() -> None:
    with loopback() as server:
        client = client_for(server)
        raw = client.chat.completions.with_raw_response.create(model="m", messages=HISTORY)
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().leyline.edits == 1
        with client.chat.completions.with_streaming_response.create(model="m", messages=HISTORY) as response:
            assert response.parse().leyline.edits == 1
        assert len(client.leyline.manager.store) == 1


def test_the_callers_span_gets_the_report() -> None:
    spans = [RecordingSpan() for _ in range(3)]

    async def call(server: Any) -> None:
        async with AsyncOpenAI(base_url=server.base_url, api_key="k", policy=cut) as client:
            with trace.use_span(spans[2]):
                await client.chat.completions.create(model="m", messages=HISTORY)

    with loopback() as server:
        with trace.use_span(spans[0]):
            chat(client_for(server))
        with trace.use_span(spans[1]):
            list(chat(client_for(server), stream=True))
        asyncio.run(call(server))
    assert [span.seen["leyline.edits"] for span in spans] == [1, 1, 1]
    assert [span.seen["gen_ai.usage.cache_read.input_tokens"] for span in spans] == [4, 0, 4]


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
        assert server.asked("/leyline/ready") == 1


def test_connections_of_an_event_loop_that_is_gone_hide_nothing() -> None:
    """LangChain keeps its connections for the whole process. A probe that met a dead one left calls without Leyline."""
    with loopback() as server:
        client = AsyncOpenAI(base_url=server.base_url, api_key="k", policy=cut)
        asyncio.run(chat(client))
        client.leyline.capabilities.forget(server.url)
        assert asyncio.run(chat(client)).leyline.served


def test_a_policy_in_an_async_client_sees_the_callers_context() -> None:
    """A policy that calls a model does so in the caller's span and run."""
    where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")
    seen = []

    def look(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        seen.append(where.get())
        return messages

    async def calls(server: Any) -> None:
        where.set("here")
        async with AsyncOpenAI(base_url=server.base_url, api_key="k", policy=look) as client:
            await client.chat.completions.create(model="m", messages=HISTORY)

    with loopback() as server:
        asyncio.run(calls(server))
    assert set(seen) == {"here"}


def test_a_thread_does_not_wait_for_a_loop_that_is_gone() -> None:
    loop = asyncio.new_event_loop()

    async def never() -> None:
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(run_in_loop, never(), loop)
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(10)


def test_a_slow_policy_does_not_hold_up_the_event_loop() -> None:
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
