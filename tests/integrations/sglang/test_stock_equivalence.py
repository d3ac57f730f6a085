"""With the plugin installed and no directive sent, the server is the stock one: answers, cached tokens, errors.

The same script of requests goes to a stock server and to ours, each with an empty cache, and the transcripts are equal.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from splice_client import SpliceClient, chat_body, generate_body

pytestmark = [
    pytest.mark.server,
    pytest.mark.parametrize(
        "live", ["llama-rust", pytest.param("deepseek_v2-python", marks=pytest.mark.slow)], indirect=True
    ),
]

VOLATILE = {
    "id", "rid", "created", "e2e_latency", "weight_version", "response_sent_to_client_ts", "time",
    "decode_throughput", "queue_time", "prefill_launch_delay", "prefill_launch_latency", "request_received_ts",
}  # fmt: skip
"""Fields that differ from one run of the same server to the next."""


def text(length: int, seed: int) -> list[int]:
    return [(37 * i * i + 11 * i * seed + seed) % 250 for i in range(length)]


MESSAGES = [
    {"role": "system", "content": "You are a test."},
    {"role": "user", "content": "Say something, anything at all."},
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

SCRIPT: dict[str, tuple[str, dict[str, Any]]] = {
    "cold": ("/generate", generate_body(text(120, 1))),
    "warm": ("/generate", generate_body(text(120, 1))),
    "prefix hit": ("/generate", generate_body([*text(80, 1), *text(30, 2)])),
    "continuation": ("/generate", generate_body([*text(120, 1), *text(30, 3)], max_new_tokens=20)),
    "no log-probs": ("/generate", generate_body(text(90, 4), log_probs=False)),
    "input log-probs": ("/generate", generate_body(text(90, 4), logprob_start_len=40)),
    "one token": ("/generate", generate_body([5])),
    "no new tokens": ("/generate", generate_body(text(50, 5), max_new_tokens=0, log_probs=False)),
    "text": ("/generate", {"text": "hello there", "sampling_params": {"temperature": 0, "max_new_tokens": 5}}),
    "stop token": (
        "/generate",
        {"input_ids": text(60, 6), "sampling_params": {"temperature": 0, "stop_token_ids": list(range(100, 250))}},
    ),
    "salted": ("/generate", generate_body(text(120, 1), cache_salt="a")),
    "salted again": ("/generate", generate_body(text(120, 1), cache_salt="a")),
    "extra key": ("/generate", generate_body(text(120, 1), extra_key="b")),
    "batch": (
        "/generate",
        {"input_ids": [text(40, 7), text(50, 8)], "sampling_params": {"temperature": 0, "max_new_tokens": 4}},
    ),
    "two samples": (
        "/generate",
        {"input_ids": text(40, 9), "sampling_params": {"temperature": 0, "max_new_tokens": 4, "n": 2}},
    ),
    "custom params of somebody else": (
        "/generate",
        {
            "input_ids": text(40, 9),
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "custom_params": {"theirs": "{}"}},
        },
    ),
    "chat": ("/v1/chat/completions", chat_body(text(70, 10))),
    "chat again": ("/v1/chat/completions", chat_body(text(70, 10))),
    "chat of messages": (
        "/v1/chat/completions",
        {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 6},
    ),
    "chat with tools": (
        "/v1/chat/completions",
        {"model": "m", "messages": MESSAGES, "tools": [TOOL], "temperature": 0, "max_tokens": 6},
    ),
    "chat with an unknown field": ("/v1/chat/completions", chat_body(text(70, 10)) | {"leyline": {"v": 1}}),
    "completion": ("/v1/completions", {"model": "m", "prompt": text(30, 11), "temperature": 0, "max_tokens": 5}),
    "tokenize": ("/v1/tokenize", {"model": "m", "prompt": "some text"}),
    # errors
    "no input": ("/generate", {"sampling_params": {"max_new_tokens": 3}}),
    "no messages": ("/v1/chat/completions", {"model": "m"}),
    "bad temperature": ("/generate", generate_body([1, 2]) | {"sampling_params": {"temperature": -1}}),
    "bad max tokens": ("/generate", generate_body([1, 2]) | {"sampling_params": {"max_new_tokens": -5}}),
    "unknown field": ("/generate", generate_body([1, 2], surprise=1)),
    "prompt too long": ("/generate", generate_body([1] * 40000)),
    "unknown role": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "wizard", "content": "x"}]}),
}
STREAMED = ("cold", "chat", "chat of messages", "completion")


def transcript(server: SpliceClient) -> dict[str, Any]:
    """What the server answers to the script, from an empty cache."""
    server.flush()
    answers: dict[str, Any] = {}
    for name, (path, body) in SCRIPT.items():
        response = server.http.post(path, json=body)
        answers[name] = response.status_code, stable(response.json())
    for name in STREAMED:
        path, body = SCRIPT[name]
        with server.http.stream("POST", path, json=body | {"stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        answers[f"{name}, streamed"] = joined([stable(json.loads(line)) for line in lines])
    return answers


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's chunks as one: how many tokens come in each is a matter of timing."""
    if "meta_info" in chunks[-1]:  # /generate repeats all there is in every chunk
        return chunks[-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {
        "text": "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "fields": sorted({field for chunk in chunks for field in chunk}),
        "without choices": [chunk for chunk in chunks if not chunk["choices"]],
    }


def stable(value: Any) -> Any:
    """The JSON without what depends on the clock."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [stable(item) for item in value]
    return value


@pytest.fixture(scope="module")
def transcripts(live, cpu_server):
    stock = cpu_server(live.model_path, "--enable-cache-report", leyline=False)  # ours reports it unasked
    found = {}
    for name, url in (("stock", stock.url), ("leyline", live.url)):
        client = SpliceClient(url)
        found[name] = transcript(client)
        client.close()
    return found


@pytest.mark.parametrize("name", [*SCRIPT, *(f"{name}, streamed" for name in STREAMED)])
def test_same_answer(transcripts, name):
    assert transcripts["leyline"][name] == transcripts["stock"][name]


def test_script_reaches_cache_and_errors(transcripts):
    """The comparison is not of errors with errors: the script does hit the cache, and is refused where it should be."""
    answers = transcripts["stock"]
    assert answers["cold"][1]["meta_info"]["cached_tokens"] == 0
    assert answers["warm"][1]["meta_info"]["cached_tokens"] == 119
    assert answers["chat again"][1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 69
    assert sum(isinstance(answer, tuple) and answer[0] != 200 for answer in answers.values()) >= 6
