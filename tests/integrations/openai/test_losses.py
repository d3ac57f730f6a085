"""Servers that lose what they held: the next turn is right, and its report says why it was slower.

In one environment only: what is tested is between two servers, whatever the SDK.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import servers
from leyline_agent.directives import Mode
from leyline_agent.report import FallbackReason
from openai_agent import GREEDY, CutOld, History, client_for, flush, run_turns

pytestmark = [pytest.mark.server, pytest.mark.slow]


def reasons(completion: Any) -> list[FallbackReason]:
    return [fallback.reason for fallback in completion.leyline.fallbacks]


def test_eviction_in_mid_run_gives_a_right_answer_and_a_reason(
    cpu_server: Callable[..., Any], history: History
) -> None:
    small = cpu_server("llama", "--max-total-tokens", "2600")
    messages = history(5)
    client = client_for(small, CutOld())
    run_turns(client, messages[:10])
    run_turns(client_for(small), [{**messages[0], "content": "Somebody else."}, *history(6)[1:]])
    lost = client.chat.completions.create(**GREEDY, messages=messages)
    assert reasons(lost) == [FallbackReason.BASE_NOT_CACHED]
    assert lost.leyline.amortized == 0
    assert lost.leyline.prefilled > lost.leyline.prompt_tokens / 2
    flush(small)
    exact = client_for(small, CutOld(mode=Mode.FORGET)).chat.completions.create(**GREEDY, messages=messages)
    assert lost.choices == exact.choices


def test_a_server_restart_gives_a_right_answer_and_a_reason(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    if servers.server_python() is None:
        pytest.skip("SGLang is not installed; `make env` creates an environment that has it")
    messages = history(4)
    first = servers.start_server("llama")
    client = client_for(first, CutOld())
    try:
        run_turns(client, messages[:8])
    finally:
        first.stop()
    monkeypatch.setattr(servers, "free_port", lambda: int(first.url.rpartition(":")[2]))
    second = servers.start_server("llama")
    try:
        lost = client.chat.completions.create(**GREEDY, messages=messages)
        flush(second)
        exact = client_for(second, CutOld(mode=Mode.FORGET)).chat.completions.create(**GREEDY, messages=messages)
    finally:
        second.stop()
    assert reasons(lost) == [FallbackReason.BASE_NOT_CACHED]
    assert lost.leyline.amortized == 0
    assert lost.choices == exact.choices
