"""Renderers: the local template gives the server's tokens, knows where messages lie, and yields when it is wrong."""

from __future__ import annotations

import json
import urllib.request
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_renderer import ByteRenderer
from leyline_agent.errors import RenderError
from leyline_agent.renderers import Renderer, ServerRenderer, TemplateRenderer, VerifiedRenderer, token_counter
from leyline_agent.renderers.encoder import Encoder
from leyline_agent.renderers.jinja_template import ChatTemplate

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1, "b":"<é&>"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Look <|im_end|> at ünïcode.\n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "result }\n"},
    {"role": "assistant", "content": "ok", "unknown": 1},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server(cpu_server: Callable[..., Any]) -> Any:
    return cpu_server("llama")


def server_renderer(server: Any) -> ServerRenderer:
    def post(path: str, body: Mapping[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.base_url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    return ServerRenderer(post)


@pytest.mark.server
@pytest.mark.parametrize(
    "arguments",
    [{}, {"tools": TOOLS}, {"tools": TOOLS, "options": {"tool_choice": "none"}}],
    ids=["plain", "tools", "no tools chosen"],
)
def test_the_local_template_gives_the_servers_tokens_and_spans(server: Any, arguments: dict[str, Any]) -> None:
    local, remote = TemplateRenderer.from_folder(server.model_path), server_renderer(server)
    for count in range(1, len(HISTORY) + 1):
        ours = local.render(HISTORY[:count], **arguments)
        theirs = remote.render(HISTORY[:count], **arguments)
        assert ours.token_ids == theirs.token_ids
        if HISTORY[count - 1]["role"] != "assistant":  # which the chat endpoint turns into a user message
            assert ours.spans == theirs.spans
        sequences = [ours.token_ids, ours.token_ids[3:9]]
        for skip_special in (False, True):
            assert local.texts(sequences, skip_special=skip_special) == remote.texts(
                sequences, skip_special=skip_special
            )


@pytest.mark.server
def test_what_the_server_refuses_is_a_render_error(server: Any) -> None:
    with pytest.raises(RenderError, match="tokenize failed"):
        server_renderer(server).render([{"role": "nobody", "content": "x"}])


@pytest.mark.server
@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "a", " b", "\n", "é", "<|im", "_end|>"]), max_size=12))
@settings(max_examples=60, deadline=None)
def test_pieces_encode_as_the_whole(pieces: list[str]) -> None:
    [folder, *_] = sorted(Path(".cache/tiny-models").glob("llama-float32-*"))
    encoder = Encoder((folder / "tokenizer.json").read_text())
    assert encoder.encodes_pieces
    text = "".join(pieces)
    assert encoder.encode(text) == encoder._encode_whole(text)


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": [{"id": 2, "content": "<x>", "lstrip": True, "normalized": False}]},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}},
        {"added_tokens": []},
    ],
    ids=["stripping token", "prefix on the first piece", "no special tokens"],
)
def test_tokenizers_that_cannot_be_cut_encode_the_whole(tmp_path: Path, change: dict[str, Any]) -> None:
    token = {"id": 2, "content": "<x>", "lstrip": False, "rstrip": False, "single_word": False}
    token |= {"normalized": False, "special": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [token],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "<x>": 2}, "unk_token": "[UNK]"},
    }
    change = {
        name: [token | one for one in value] if name == "added_tokens" else value for name, value in change.items()
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer | change))
    assert not Encoder(path.read_text()).encodes_pieces
    path.write_text(json.dumps(tokenizer))
    assert Encoder(path.read_text()).encodes_pieces
    assert list(Encoder(path.read_text()).encode("a <x> a")) == [1, 2, 1]


def test_boundaries_come_from_the_loops_over_messages() -> None:
    template = ChatTemplate(
        "{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}"
        "{%- if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif -%}"
        "{%- for m in rest %}{% if not loop.last or true %}<{{ m.role }}:{{ m.content }}>{% endif %}{% endfor -%}"
        "{%- if add_generation_prompt %}<assistant:{% endif %}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "tool", "content": "t"}]
    text = template.render(messages, add_generation_prompt=True)
    assert text == "[s]<user:u><tool:t><assistant:"
    assert template.boundaries(messages, text, add_generation_prompt=True) == [0, 3, 11, 19]


def test_a_template_that_measures_what_it_wrote_gets_no_markers() -> None:
    """Markers inside a captured block change its length; then boundaries come from prefixes of the history."""
    template = ChatTemplate(
        "{%- set body %}{% for m in messages %}{{ m.content }};{% endfor %}{% endset %}{{ body | length }}:{{ body }}"
    )
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert template.boundaries(messages, template.render(messages)) is None


class Wrong(ByteRenderer):
    """A renderer that is right only while there are no tools."""

    def render(self, messages: Sequence[Any], *, tools: Any = None, **more: Any) -> Any:
        rendered = super().render(messages, **more)
        return type(rendered)(rendered.token_ids + array("q", [9]), rendered.span_of, 1) if tools else rendered


def test_the_server_wins_where_the_local_renderer_differs() -> None:
    authority = ByteRenderer()
    renderer = VerifiedRenderer(Wrong(), authority)
    for _ in range(3):
        renderer.render(HISTORY[:2])
    assert authority.renderings == 1
    for _ in range(3):
        rendered = renderer.render(HISTORY[:2], tools=TOOLS)
    assert rendered.token_ids == ByteRenderer().render(HISTORY[:2]).token_ids
    assert authority.renderings == 4
    assert len(renderer.verdicts.problems) == 1


def test_a_local_renderer_that_fails_leaves_the_server() -> None:
    class Failing(ByteRenderer):
        def render(self, *_: Any, **__: Any) -> Any:
            raise RenderError("no such message")

    renderer = VerifiedRenderer(Failing(), ByteRenderer())
    assert isinstance(renderer, Renderer)
    assert renderer.render(HISTORY[:2]).message_count == 2
    assert "no such message" in renderer.verdicts.problems[0]


def test_missing_files_and_encodings_say_so(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="no chat template"):
        TemplateRenderer.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    with pytest.raises(RenderError, match=r"tokenizer\.json"):
        TemplateRenderer.from_folder(tmp_path)
    assert token_counter()("abcde") == 2
