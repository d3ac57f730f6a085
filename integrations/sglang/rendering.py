"""How this server turns messages into tokens: what clients need to do the same, and a guard for when it has changed.

A client renders a history on its side and sends the token ids, which are right for one tokenizer and template only. The
server behind an address may have come back with others, so the ids carry the fingerprint of the rendering that they
were made for. With any other, they are not used: the messages beside them are rendered here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from sglang.srt.runtime_context import get_serving

from leyline_agent.report import Fallback, FallbackReason
from leyline_agent.wire import KEY, RENDERED_FOR_KEY, SpliceRequest


@dataclass(frozen=True, slots=True)
class Rendering:
    """`fingerprint` names everything that decides the tokens of a history.

    `parts` are what a client renders with, None where it cannot, and then `reason` says why.
    """

    fingerprint: str
    parts: dict[str, Any] | None
    reason: str = ""


@cache
def rendering() -> Rendering:
    """This server's rendering. The first call writes the tokenizer out, which takes a moment."""
    from sglang.srt.entrypoints import http_server

    manager, templates = http_server._global_state.tokenizer_manager, http_server._global_state.template_manager
    loaded = manager.tokenizer
    backend, template = getattr(loaded, "backend_tokenizer", None), getattr(loaded, "chat_template", None)
    text = backend.to_str() if backend is not None else None
    special = getattr(loaded, "special_tokens_map", {})
    constants = {name: str(token) for name, token in special.items() if isinstance(token, str)}
    settings = {name: manager.config_value(name) for name in ("tool_call_parser", "reasoning_parser")}
    facts = [
        text or manager.server_args.tokenizer_path,
        template,
        templates.chat_template_name,
        constants,
        get_serving().default_chat_template_kwargs,
        settings,
    ]
    fingerprint = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    if text is None or not isinstance(template, str):
        return Rendering(fingerprint, None, "the model has no fast tokenizer with a chat template")
    if templates.chat_template_name is not None:
        return Rendering(fingerprint, None, "the server's chat template is not the tokenizer's")
    return Rendering(fingerprint, {"tokenizer": text, "chat_template": template, "constants": constants})


def chat_request(original: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `OpenAIServingChat._convert_to_internal_request`: a prompt made for another rendering is rendered here."""
    params = request.custom_params if isinstance(request.custom_params, dict) else {}
    changed = rendering_changed(params.get(RENDERED_FOR_KEY)) if request.input_ids is not None else None
    if changed is not None:
        request.input_ids = None
        request.custom_params = {**params, KEY: SpliceRequest().encode()}  # its directives are in those ids, too
    adapted, processed = original(serving, request, *args, **kwargs)
    if changed is not None:
        adapted.leyline_fallbacks = [changed]
    return adapted, processed


def rendering_changed(rendered_for: object) -> Fallback | None:
    """Why token ids made for the rendering `rendered_for` are not used; None if it is this one, or was not said."""
    if not rendered_for or rendered_for == rendering().fingerprint:
        return None
    detail = "the prompt's token ids were made with another tokenizer or chat template than this server's"
    return Fallback(reason=FallbackReason.RENDERING_CHANGED, detail=detail)
