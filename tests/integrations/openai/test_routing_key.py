"""Behind a router, a session is kept on its server by a header: whatever the client asks has to carry it."""

from __future__ import annotations

import pytest

from leyline_agent.integrations.openai import OpenAI
from leyline_agent.report import FallbackReason
from loopback import HISTORY, cut, loopback

pytestmark = pytest.mark.client


def test_every_request_of_a_session_carries_its_key() -> None:
    with loopback() as server:
        client = OpenAI(base_url=server.base_url, api_key="k", policy=cut)
        for name in ("one", "two"):
            keyed = client.with_options(default_headers={"X-SMG-Routing-Key": name})
            asked_before = len(server.headers)
            with keyed.session(name) as session:
                first = session.chat.completions.create(model="m", messages=HISTORY)
                answer = {"role": "assistant", "content": first.choices[0].message.content}
                more = [*HISTORY, answer, {"role": "user", "content": "go on"}]
                session.chat.completions.create(model="m", messages=more)
            assert {headers.get("x-smg-routing-key") for headers in server.headers[asked_before:]} == {name}
        paths = {path for path, _ in server.requests}
        assert paths >= {"/v1/chat/completions", "/leyline/ready", "/leyline/tokenizer", "/v1/tokenize"}


def test_a_router_that_does_not_pass_leyline_on_leaves_plain_calls_and_is_named_as_a_possible_reason() -> None:
    with loopback(leyline=False, strict=True) as router:
        client = OpenAI(base_url=router.base_url, api_key="k", policy=cut)
        with client.session("s") as session:
            completion = session.chat.completions.create(model="m", messages=HISTORY)
            answer = {"role": "assistant", "content": completion.choices[0].message.content}
            assert session.prepare([*HISTORY, answer]) is None
        assert [path for path, _ in router.requests] == ["/leyline/ready", "/v1/chat/completions"]
    (fallback,) = completion.leyline.fallbacks
    assert fallback.reason is FallbackReason.SERVER_WITHOUT_LEYLINE
    assert "answered 404: no Leyline there, or a router" in fallback.detail


def test_a_proxy_that_answers_prepare_with_nothing_is_no_error() -> None:
    with loopback(empty_prepare=True, ids=False) as proxy:
        client = OpenAI(base_url=proxy.base_url, api_key="k", policy=lambda m: cut(m) if len(m) > len(HISTORY) else m)
        with client.session("s") as session:
            first = session.chat.completions.create(model="m", messages=HISTORY)
            answer = {"role": "assistant", "content": first.choices[0].message.content}
            assert session.prepare([*HISTORY, answer]) is None
        assert proxy.asked("/leyline/prepare") == 1
