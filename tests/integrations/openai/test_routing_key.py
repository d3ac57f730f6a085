"""Behind a router, a session is kept on its server by a header: whatever the client asks has to carry it."""

from __future__ import annotations

import pytest

from leyline_agent.integrations.openai import OpenAI
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
