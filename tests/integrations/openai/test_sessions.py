"""Sessions against the real server: what is spliced, what is exact, what is found again, and what a loss costs."""

from __future__ import annotations

import asyncio
import copy
import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from leyline_agent.config import Config
from leyline_agent.directives import Mode
from leyline_agent.edits import Turn
from leyline_agent.integrations.openai import AsyncOpenAI
from leyline_agent.integrations.openai import session as sessions
from leyline_agent.renderers import TemplateRenderer
from leyline_agent.report import FallbackReason
from openai_agent import GREEDY, CutOld, History, client_for, flush, run_turns

sessions_post = sessions._post

pytestmark = [pytest.mark.client, pytest.mark.server]


def pool(server: Any) -> dict[str, int]:
    with urllib.request.urlopen(server.url + "/leyline/status", timeout=30) as answer:
        return dict(json.load(answer)["pool"])


def test_each_edit_is_spliced_and_little_is_prefilled(server: Any, history: History) -> None:
    messages = history(6)
    before = copy.deepcopy(messages)
    reports = [c.leyline for c in run_turns(client_for(server, CutOld()), messages)]
    assert messages == before
    assert [f for report in reports for f in report.fallbacks] == []
    for report in reports[3:]:
        assert [d.status for d in report.directives] == ["spliced"]
        assert report.amortized > 0
        replaced = sum(d.replacement_len for d in report.directives)
        last_output = len(messages[-1]["content"])
        assert report.prefilled <= replaced + last_output + 120  # the new messages with their markup, a byte a token
        assert report.exact + report.amortized + report.prefilled == report.prompt_tokens


def test_what_the_model_sampled_is_reused_behind_an_edit(server: Any) -> None:
    def cut_old_questions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**m, "content": "[cut]"} if m["role"] == "user" else m for m in messages[:-3]] + messages[-3:]

    client = client_for(server, cut_old_questions)
    options = {**GREEDY, "max_tokens": 200, "extra_body": {"regex": "[a-z]{150}"}}
    messages: list[Any] = []
    reports = []
    for number in range(4):
        messages.append({"role": "user", "content": f"Question {number}, which is a long one to be cut. " * 2})
        completion: Any = client.chat.completions.create(**options, messages=messages)
        messages.append(completion.choices[0].message)
        reports.append(completion.leyline)
    assert completion.usage.completion_tokens >= 150
    for report in reports[2:]:
        assert [d.status for d in report.directives] == ["spliced"]
        assert report.prefilled <= len(messages[-2]["content"]) + 60  # the new question, the marker and their markup


def test_a_stream_does_the_same(server: Any, history: History) -> None:
    client = client_for(server, CutOld())
    for rounds in range(5):
        with client.chat.completions.create(**GREEDY, messages=history(rounds), stream=True) as stream:
            list(stream)
    assert stream.leyline.spliced
    assert stream.leyline.fallbacks == ()


def test_forget_answers_as_the_stock_client_with_the_edited_messages(
    server: Any, stock: openai.OpenAI, history: History
) -> None:
    policy = CutOld(mode=Mode.FORGET)
    messages = history(4)
    ours = run_turns(client_for(server, policy), messages)
    flush(server)
    for end, completion in zip(range(2, len(messages) + 1, 2), ours, strict=True):
        view = copy.deepcopy(messages[:end])
        for edit in policy.decide(Turn(tuple(view))):
            view[edit.index]["content"] = edit.new
        assert stock.chat.completions.create(**GREEDY, messages=view).choices == completion.choices
        assert completion.leyline.amortized == 0
    assert any(d.status == "forgotten" for completion in ours for d in completion.leyline.directives)


def test_a_local_template_gives_the_servers_tokens(server: Any, history: History) -> None:
    renderer = TemplateRenderer.from_folder(server.model_path)
    local = run_turns(client_for(server, CutOld(), renderer=renderer), history(4))
    remote = run_turns(client_for(server, CutOld()), history(4))
    assert [c.leyline.prompt_tokens for c in local] == [c.leyline.prompt_tokens for c in remote]
    assert all(d.status == "already" for c in remote for d in c.leyline.directives)


def test_forgetting_later_what_was_amortized(server: Any, stock: openai.OpenAI, history: History) -> None:
    messages = history(4)
    client = client_for(server)
    session = client.session("s").client
    amortizing, forgetting = CutOld(), CutOld(mode=Mode.FORGET)
    session.leyline.manager.policy = amortizing
    run_turns(session, messages[:8])
    session.leyline.manager.policy = forgetting
    completion = session.chat.completions.create(**GREEDY, messages=messages)
    assert completion.leyline.amortized == 0
    assert {d.status for d in completion.leyline.directives} == {"forgotten"}
    view = [{**m, "content": "[cut]"} if m["role"] == "tool" else m for m in messages[:-3]] + messages[-3:]
    flush(server)
    assert completion.choices == stock.chat.completions.create(**GREEDY, messages=view).choices


def test_forks_and_interleaved_conversations_need_no_names(server: Any, history: History) -> None:
    client = client_for(server, CutOld())
    one = history(5)
    other = [{**one[0], "content": "Another agent."}, *copy.deepcopy(one[1:])]
    fork = [*one[:8], {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why not?"}]
    for rounds in range(4):
        for messages in (one, other):
            client.chat.completions.create(**GREEDY, messages=messages[: 2 + 2 * rounds])
    for messages in (one[:10], other[:10], fork):
        report = client.chat.completions.create(**GREEDY, messages=messages).leyline
        assert report.turn == 4
        assert report.fallbacks == ()
        assert report.amortized > 0


def test_a_repeated_call_is_served_from_the_cache(server: Any, history: History) -> None:
    client = client_for(server, CutOld())
    first = run_turns(client, history(3))[-1]
    again = client.chat.completions.create(**GREEDY, messages=history(3))
    assert again.choices == first.choices
    assert again.leyline.prefilled <= 2
    assert again.leyline.fallbacks == ()


def test_prepare_makes_the_turn_a_plain_hit(server: Any, history: History) -> None:
    messages = history(4)
    policy = CutOld(keep=0)
    with client_for(server).session("prepared") as session:
        manager = session.client.leyline.manager
        run_turns(session, messages[:8])
        manager.policy = policy
        answer = ChatCompletionMessage.model_validate(messages[8])  # as the SDK gives it to those who append it
        prepared = session.prepare([*messages[:8], answer])
        assert prepared is not None
        assert prepared.rotated > 0
        report = session.chat.completions.create(**GREEDY, messages=messages).leyline
        assert report.rotated == 0
        assert {d.status for d in report.directives} == {"already"}


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "mine"}])
def test_a_session_that_ends_takes_its_amortized_tokens_with_it(
    server: Any, history: History, monkeypatch: pytest.MonkeyPatch, salt: dict[str, str]
) -> None:
    flush(server)
    requests = []
    monkeypatch.setattr(sessions, "_post", lambda *args: requests.append(args) or sessions_post(*args))
    client = client_for(server, CutOld())
    with client.session("short") as session:
        run_turns(session, history(6)[:6], extra_body=salt)
        unedited = pool(server)["cached"]
        markers = [
            r.leyline.directives[-1].replacement_len for r in run_turns(session, history(6), extra_body=salt)[3:]
        ]
        assert pool(server)["cached"] > unedited + sum(markers)
        assert len(client.leyline.manager.store) == 7
    assert len(client.leyline.manager.store) == 0
    assert pool(server)["cached"] <= unedited + sum(markers)  # what it held exactly, anybody may use
    assert len(requests) == 1  # not one for each of its turns


def test_an_async_session_is_prepared_and_released(server: Any, history: History) -> None:
    messages = history(4)

    async def converse() -> tuple[Any, Any, int, int]:
        async with AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            async with client.session("async") as session:
                for end in range(2, 9, 2):
                    await session.chat.completions.create(**GREEDY, messages=messages[:end])  # type: ignore[arg-type]
                unedited = pool(server)["cached"]
                client.leyline.manager.policy = CutOld(keep=0)
                prepared = await session.prepare(messages[:9])
                last = await session.chat.completions.create(**GREEDY, messages=messages)  # type: ignore[arg-type]
            return prepared, last.leyline, len(client.leyline.manager.store), unedited

    flush(server)
    prepared, report, remembered, unedited = asyncio.run(converse())
    assert prepared.rotated > 0
    assert {d.status for d in report.directives} == {"already"}
    assert remembered == 0
    assert pool(server)["cached"] <= unedited + sum(directive.replacement_len for directive in report.directives)


def test_a_marker_that_stands_elsewhere_is_copied_if_the_config_allows_it(server: Any, history: History) -> None:
    def last_of(config: Config) -> Any:
        flush(server)
        return run_turns(client_for(server, CutOld(), config=config), history(5))[-1].leyline

    prefilled, copied = last_of(Config()), last_of(Config(reuse_replacements=True))
    marker = copied.directives[-1].replacement_len
    assert copied.rotated == prefilled.rotated + marker
    assert copied.prefilled == prefilled.prefilled - marker


def test_a_flushed_cache_gives_a_right_answer_and_a_reason(server: Any, history: History) -> None:
    client = client_for(server, CutOld())
    messages = history(4)
    run_turns(client, messages[:8])
    flush(server)
    lost = client.chat.completions.create(**GREEDY, messages=messages)
    assert [f.reason for f in lost.leyline.fallbacks] == [FallbackReason.BASE_NOT_CACHED]
    assert lost.leyline.amortized == 0
    run_turns(client_for(server, CutOld(mode=Mode.FORGET)), messages)
    exact = client_for(server, CutOld(mode=Mode.FORGET)).chat.completions.create(**GREEDY, messages=messages)
    assert lost.choices == exact.choices


def test_a_flush_is_named_even_when_nothing_was_to_be_spliced(server: Any, history: History) -> None:
    client = client_for(server)
    run_turns(client, history(3)[:6])
    flush(server)
    report = client.chat.completions.create(**GREEDY, messages=history(3)).leyline
    assert [f.reason for f in report.fallbacks] == [FallbackReason.EVICTED]


def test_a_client_restart_recomputes_the_base(server: Any, history: History) -> None:
    messages = history(3)
    policy = CutOld(keep=2)
    run_turns(client_for(server, policy), messages[:6])  # nothing amortized yet: the server holds exact KV
    fresh = client_for(server, policy).chat.completions.create(**GREEDY, messages=messages).leyline
    assert fresh.base == "recomputed"
    assert [d.status for d in fresh.directives] == ["spliced"]


def test_a_client_restart_after_splices_gives_a_right_answer_and_a_reason(server: Any, history: History) -> None:
    """The marks are gone with the old client, and nothing else can find amortized KV: it is prefilled, and said so."""
    messages = history(5)
    flush(server)
    assert run_turns(client_for(server, CutOld()), messages[:10])[-1].leyline.amortized > 0
    lost = client_for(server, CutOld()).chat.completions.create(**GREEDY, messages=messages)
    assert lost.leyline.base == "recomputed"
    assert [f.reason for f in lost.leyline.fallbacks] == [FallbackReason.BASE_NOT_CACHED]
    assert lost.leyline.amortized == 0
    flush(server)
    exact = client_for(server, CutOld(mode=Mode.FORGET)).chat.completions.create(**GREEDY, messages=messages)
    assert lost.choices == exact.choices


def agent_messages(history: History, number: int, rounds: int) -> list[dict[str, Any]]:
    messages = history(rounds)
    return [{**messages[0], "content": f"Agent {number}. {messages[0]['content']}"}, *messages[1:]]


def check_no_cross_talk(results: list[list[Any]], alone: list[list[Any]]) -> None:
    """`results` of all agents, and of the first of them again, each on its own."""
    for turns in results:
        assert [c.leyline.turn for c in turns] == list(range(len(turns)))
    lengths = {tuple(c.leyline.prompt_tokens for c in turns) for turns in results}
    assert len(lengths) == 2  # their histories differ in the agent's number alone, of one digit or two
    for together, single in zip(results, alone, strict=False):
        assert [c.leyline.prompt_tokens for c in together] == [c.leyline.prompt_tokens for c in single]
        for one, other in zip(together, single, strict=True):
            if one.leyline.amortized == other.leyline.amortized:  # with a full pool, less may have been there to splice
                assert one.choices[0].message == other.choices[0].message


def test_fifty_threads_share_one_client(server: Any, history: History) -> None:
    client = client_for(server, CutOld(), config=Config())
    conversations = [agent_messages(history, number, 3) for number in range(50)]
    with ThreadPoolExecutor(50) as executor:
        results = list(executor.map(lambda messages: run_turns(client, messages), conversations))
    flush(server)
    alone = [run_turns(client_for(server, CutOld()), messages) for messages in conversations[:5]]
    check_no_cross_talk(results, alone)


def test_fifty_tasks_share_one_async_client(server: Any, history: History) -> None:
    conversations = [agent_messages(history, number, 3) for number in range(50)]

    async def converse(client: AsyncOpenAI, messages: list[dict[str, Any]]) -> list[Any]:
        ends = range(2, len(messages) + 1, 2)
        return [await client.chat.completions.create(**GREEDY, messages=messages[:end]) for end in ends]  # type: ignore[arg-type]

    async def together() -> list[list[Any]]:
        async with AsyncOpenAI(base_url=server.base_url, api_key="none", policy=CutOld()) as client:
            return await asyncio.gather(*(converse(client, messages) for messages in conversations))

    results = asyncio.run(together())
    flush(server)
    check_no_cross_talk(results, [run_turns(client_for(server, CutOld()), m) for m in conversations[:5]])


def test_a_stock_server_gets_the_view_and_says_so(cpu_server: Callable[..., Any], history: History) -> None:
    stock_server = cpu_server("llama", leyline=False)
    messages = history(3)
    completion = run_turns(client_for(stock_server, CutOld()), messages)[-1]
    view = [{**m, "content": "[cut]"} if m["role"] == "tool" else m for m in messages[:-3]] + messages[-3:]
    plain = openai.OpenAI(base_url=stock_server.base_url, api_key="none").chat.completions.create(
        **GREEDY,
        messages=view,  # type: ignore[arg-type]
    )
    assert completion.choices == plain.choices
    assert FallbackReason.SERVER_WITHOUT_LEYLINE in [f.reason for f in completion.leyline.fallbacks]
