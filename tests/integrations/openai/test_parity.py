"""The same calls through the stock client and ours, on the real server: equal types, equal contents, equal errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from leyline_agent.integrations.openai import AsyncOpenAI, OpenAI

pytestmark = [pytest.mark.client, pytest.mark.server]

USER = {"role": "user", "content": "Say something."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"place":"here"}'}}
AGENT: list[Any] = [
    {"role": "system", "content": "You are an agent."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "A table, a chair. " * 8},
]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}


class Verdict(BaseModel):
    good: bool


def create(**options: Any) -> Callable[[Any], Any]:
    return lambda client: client.chat.completions.create(**{**GREEDY, "messages": [USER], **options})


def conversation(client: Any) -> Any:
    """Two turns, the second with the SDK's own message object in its history."""
    first = client.chat.completions.create(**GREEDY, messages=[USER])
    return client.chat.completions.create(**GREEDY, messages=[USER, first.choices[0].message, USER])


def helper_stream(client: Any) -> Any:
    with client.chat.completions.stream(**GREEDY, messages=[USER]) as stream:
        events = {(type(event).__name__, event.type) for event in stream}
        return [sorted(events), stream.get_final_completion()]


def raw(client: Any) -> Any:
    response = client.chat.completions.with_raw_response.create(**GREEDY, messages=[USER])
    return [type(response), response.status_code, response.parse()]


def raw_stream(client: Any) -> Any:
    response = client.chat.completions.with_raw_response.create(**GREEDY, messages=[USER], stream=True)
    return [type(response), response.parse()]


def streaming_response(client: Any) -> Any:
    with client.chat.completions.with_streaming_response.create(**GREEDY, messages=[USER]) as response:
        return [type(response), response.parse()]


def streamed_lines(client: Any) -> Any:
    with client.chat.completions.with_streaming_response.create(**GREEDY, messages=[USER]) as response:
        return [type(response), sorted(set(response.json()) - {"sglext"})]  # the wire itself shows the ids we asked for


def raw_of_the_client(client: Any) -> Any:
    response = client.with_raw_response.chat.completions.create(**GREEDY, messages=[USER])
    return [type(response), response.status_code, response.parse()]


async def async_helper_stream(client: Any) -> Any:
    async with client.chat.completions.stream(**GREEDY, messages=[USER]) as stream:
        events = {(type(event).__name__, event.type) async for event in stream}
        return [sorted(events), await stream.get_final_completion()]


async def async_raw(client: Any) -> Any:
    response = await client.chat.completions.with_raw_response.create(**GREEDY, messages=[USER])
    return [type(response), response.status_code, response.parse()]


async def async_streaming_response(client: Any) -> Any:
    async with client.chat.completions.with_streaming_response.create(**GREEDY, messages=[USER]) as response:
        return [type(response), await response.parse()]


PARSED: dict[str, Any] = {**GREEDY, "max_tokens": 40, "messages": [USER]}

CALLS: dict[str, Callable[[Any], Any]] = {
    "plain": create(),
    "system": create(messages=AGENT[:2]),
    "developer": create(messages=[{"role": "developer", "content": "Be brief."}, USER]),
    "conversation": conversation,
    "content parts": create(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]),
    "tool history": create(messages=AGENT),
    "tools": create(messages=AGENT, tools=[TOOL]),
    "tool choice none": create(tools=[TOOL], tool_choice="none"),
    "tool choice required": create(tools=[TOOL], tool_choice="required", max_tokens=60),
    "last message of the assistant": create(messages=[USER, {"role": "assistant", "content": "Well"}]),
    "continued message": create(
        messages=[USER, {"role": "assistant", "content": "Well"}], extra_body={"continue_final_message": True}
    ),
    "generator": lambda client: client.chat.completions.create(**GREEDY, messages=(m for m in AGENT)),
    "n": create(n=2),
    "logprobs": create(logprobs=True, top_logprobs=2),
    "stop": create(stop=["e"]),
    "seed and penalties": create(seed=3, presence_penalty=0.5, frequency_penalty=0.1),
    "max completion tokens": lambda client: client.chat.completions.create(
        model="tiny", temperature=0, max_completion_tokens=4, messages=[USER]
    ),
    "JSON": create(response_format={"type": "json_object"}, max_tokens=30),
    "template arguments": create(extra_body={"chat_template_kwargs": {"add_generation_prompt": True}}),
    "extra body and headers": create(extra_body={"top_k": 1}, extra_headers={"x-mine": "1"}),
    "asked for ids": create(extra_body={"return_output_ids_in_sglext": True}),
    "stream": create(stream=True),
    "stream with usage": create(stream=True, stream_options={"include_usage": True}),
    "stream with tools": create(stream=True, messages=AGENT, tools=[TOOL]),
    "stream with ids": create(stream=True, extra_body={"return_output_ids_in_sglext": True}),
    "stream helper": helper_stream,
    "parse": lambda client: client.chat.completions.parse(**PARSED, response_format=Verdict),
    "parse of the beta": lambda client: client.beta.chat.completions.parse(**PARSED, response_format=Verdict),
    "raw": raw,
    "raw of the client": raw_of_the_client,
    "raw stream": raw_stream,
    "streaming response": streaming_response,
    "streaming response as JSON": streamed_lines,
    "with options": lambda client: client.with_options(timeout=30, max_retries=1).chat.completions.create(
        **GREEDY, messages=[USER]
    ),
    "completions": lambda client: client.completions.create(**GREEDY, prompt="Once"),
    "models": lambda client: [type(client.models.list()), [model.id for model in client.models.list()]],
    "responses": lambda client: client.responses.create(model="tiny", input="Hi."),
    "too long": create(max_tokens=10**6),
    "bad role": create(messages=[{"role": "nobody", "content": "x"}]),
    "no messages": create(messages=[]),
    "bad type": create(temperature="hot"),
    "bad tool arguments": create(
        messages=[USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]
    ),
    "wrong argument": lambda client: client.chat.completions.create(**GREEDY, messages=[USER], nonsense=1),
}

VOLATILE = {"id", "created", "cached_tokens", "prompt_tokens_details", "x_request_id", "created_at"}


def normalized(value: Any) -> Any:
    """A result as types and plain contents, less what differs between any two calls."""
    if isinstance(value, BaseModel):
        return type(value).__name__, normalized(value.model_dump())
    if isinstance(value, openai.Stream):
        return type(value).__name__, [normalized(chunk) for chunk in value]
    if isinstance(value, dict):
        return {key: normalized(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [normalized(item) for item in value]
    return value


def outcome(call: Callable[[Any], Any], client: Any) -> Any:
    try:
        return normalized(call(client))
    except (openai.OpenAIError, TypeError, ValueError) as err:
        return type(err), getattr(err, "status_code", None), getattr(err, "body", None)


def merged_text(result: Any) -> Any:
    """Streams cut their text where the server happened to be; equal are the chunks' shape and the text as a whole."""
    if isinstance(result, list):
        return [merged_text(one) for one in result]
    if not (isinstance(result, tuple) and result and result[0] == "Stream"):
        return result
    chunks = [chunk[1] for chunk in result[1]]
    texts = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    extras = [{key: chunk.get(key) for key in ("usage", "sglext")} for chunk in chunks if not chunk["choices"]]
    return texts, finishes, extras, sorted({key for chunk in chunks for key in chunk})


@pytest.fixture(scope="module")
def server(cpu_server: Any) -> Any:
    return cpu_server("llama")


@pytest.mark.parametrize("name", CALLS)
def test_same_as_the_stock_client(server: Any, name: str) -> None:
    options: dict[str, Any] = {"base_url": server.base_url, "api_key": "none", "max_retries": 0}
    stock = outcome(CALLS[name], openai.OpenAI(**options))
    ours = outcome(CALLS[name], OpenAI(**options))
    assert merged_text(ours) == merged_text(stock)


async def async_raw_stream(client: Any) -> Any:
    response = await client.chat.completions.with_raw_response.create(**GREEDY, messages=[USER], stream=True)
    return [type(response), response.parse()]


async def normalized_async(value: Any) -> Any:
    if isinstance(value, openai.AsyncStream):
        return "Stream", [normalized(chunk) async for chunk in value]
    return [await normalized_async(one) for one in value] if isinstance(value, list) else normalized(value)


ASYNC_CALLS: dict[str, Callable[[Any], Any]] = {
    **{name: CALLS[name] for name in ("plain", "tools", "n", "logprobs", "parse", "with options", "generator", "JSON")},
    **{name: CALLS[name] for name in ("stream", "stream with usage", "stream with tools", "stream with ids")},
    **{name: CALLS[name] for name in ("bad role", "responses", "completions", "too long", "wrong argument")},
    "stream helper": async_helper_stream,
    "raw": async_raw,
    "raw stream": async_raw_stream,
    "streaming response": async_streaming_response,
}


@pytest.mark.parametrize("name", ASYNC_CALLS)
def test_same_as_the_stock_async_client(server: Any, name: str) -> None:
    options: dict[str, Any] = {"base_url": server.base_url, "api_key": "none", "max_retries": 0}

    async def run(kind: type) -> Any:
        async with kind(**options) as client:
            try:
                result = ASYNC_CALLS[name](client)
                result = await result if inspect.isawaitable(result) else result
                return await normalized_async(result)
            except (openai.OpenAIError, TypeError) as err:
                return type(err), getattr(err, "status_code", None), getattr(err, "body", None)

    assert merged_text(asyncio.run(run(AsyncOpenAI))) == merged_text(asyncio.run(run(openai.AsyncOpenAI)))
