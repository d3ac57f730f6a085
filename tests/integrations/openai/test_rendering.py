"""Who turns histories into tokens: the client with the server's tokenizer, as the server does, never with another's."""

from __future__ import annotations

import copy
import json
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

import openai
import pytest

from leyline_agent.config import Config
from leyline_agent.edits import Turn
from leyline_agent.integrations.openai import OpenAI
from leyline_agent.renderers import ServerRenderer, TemplateRenderer
from leyline_agent.report import FallbackReason
from leyline_agent.wire import SpliceRequest
from loopback import HISTORY, cut, loopback
from openai_agent import GREEDY, CutOld, History, client_for, flush, run_turns
from switched import Switched

pytestmark = [pytest.mark.client, pytest.mark.server]

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
OTHER_TEMPLATE = "{% for m in messages %}{{ m.role | upper }}> {{ m.content }}\n{% endfor %}ASSISTANT> "


def get(server: Any, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return json.load(answer)


def reasons(completion: Any) -> list[FallbackReason]:
    return [fallback.reason for fallback in completion.leyline.fallbacks]


@pytest.mark.parametrize("arguments", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
def test_the_tokenizer_that_a_server_gives_renders_as_the_server(
    server: Any, history: History, arguments: dict[str, Any]
) -> None:
    def post(path: str, body: Mapping[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.base_url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    ours = TemplateRenderer.from_served(get(server, "/leyline/tokenizer"), get(server, "/leyline/ready")["rendering"])
    theirs = ServerRenderer(post)
    messages = history(3)
    for count in range(2, len(messages) + 1):
        assert (
            ours.render(messages[:count], **arguments).token_ids
            == theirs.render(messages[:count], **arguments).token_ids
        )


@pytest.mark.parametrize("without", ["the tokenizer", "jinja2"])
def test_a_client_that_cannot_render_has_the_server_do_it_and_says_so(
    server: Any, history: History, without: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if without == "jinja2":
        monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    here = run_turns(client_for(server, CutOld()), history(3)) if without != "jinja2" else None
    config = Config(fetch_tokenizer=without == "jinja2")
    there = run_turns(client_for(server, CutOld(), config=config), history(3))
    assert [c.leyline.rendered_by for c in there] == ["nobody", "nobody", "nobody", "server"]
    if here is not None:
        assert [c.leyline.rendered_by for c in here] == ["nobody", "nobody", "nobody", "client"]
        assert [c.leyline.prompt_tokens for c in here] == [c.leyline.prompt_tokens for c in there]
    else:
        (warning,) = caplog.messages
        assert "pip install 'leyline-agent[tokens]'" in warning


def test_a_server_with_no_tokenizer_to_give_renders_and_is_asked_for_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with loopback() as old:
        client = OpenAI(base_url=old.base_url, api_key="k", policy=cut)
        for _ in range(3):
            completion: Any = client.chat.completions.create(model="m", messages=HISTORY)  # type: ignore[arg-type]
        assert old.asked("/leyline/tokenizer") == 1
    assert completion.leyline.rendered_by == "server"
    assert len(caplog.messages) == 1


def test_a_server_that_came_back_with_another_template_is_not_sent_the_old_ones_tokens(
    server: Any, stock: openai.OpenAI, history: History
) -> None:
    """The client knows that its rendering is the server's, and the server is another by now."""
    messages, policy = history(5), CutOld()
    parts = {**get(server, "/leyline/tokenizer"), "chat_template": OTHER_TEMPLATE, "rendering": "other"}
    flush(server)
    with loopback(rendering=parts) as old:
        address = Switched(old.url)
        client = OpenAI(base_url=address.base_url, api_key="k", policy=policy, http_client=address.http_client)
        before = run_turns(client, messages[:8])
        assert before[-1].leyline.rendered_by == "client"
        assert old.chats[-1]["custom_params"]["leyline_rendered_for"] == "other"
    address.url = server.url
    first: Any = client.chat.completions.create(**GREEDY, messages=messages[:10])  # type: ignore[arg-type]
    assert reasons(first) == [FallbackReason.RENDERING_CHANGED]
    view = copy.deepcopy(messages[:10])
    for edit in policy.decide(Turn(tuple(view))):
        view[edit.index]["content"] = edit.new
    assert first.choices == stock.chat.completions.create(**GREEDY, messages=view).choices  # type: ignore[arg-type]
    later: Any = client.chat.completions.create(**GREEDY, messages=messages)  # type: ignore[arg-type]
    assert reasons(later) == []
    assert later.leyline.rendered_by == "client"
    assert [outcome.status for outcome in later.leyline.directives] == ["spliced"]


def test_nothing_is_prepared_with_the_tokens_of_another_template(server: Any) -> None:
    flush(server)
    body = {"input_ids": [70] * 30, "leyline": SpliceRequest().encode()}
    for rendering, cached in (("other", False), (get(server, "/leyline/ready")["rendering"], True)):
        data = json.dumps({**body, "leyline_rendered_for": rendering}).encode()
        with urllib.request.urlopen(server.url + "/leyline/prepare", data, timeout=30) as answer:
            report = json.load(answer)["report"]
        assert [one["reason"] for one in report["fallbacks"]] == ([] if cached else ["rendering_changed"])
        assert bool(get(server, "/leyline/status")["pool"]["cached"]) is cached
