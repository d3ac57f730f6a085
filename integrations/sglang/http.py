"""What Leyline adds to SGLang's HTTP server: the report in chat answers, and its own routes.

GET /leyline/ready says whether the server splices and why not, GET /leyline/status with all the facts behind it. GET
/leyline/tokenizer is what a client needs to render histories on its own side. POST /leyline/prepare does a turn's
helper prefills and splice ahead of it, so that the turn itself is a plain cache hit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from leyline_agent.report import TurnReport
from leyline_agent.wire import KEY, RENDERED_FOR_KEY, VERSION

from .proof import RankStatuses, ensure_proved, rank_statuses
from .rendering import rendering, rendering_changed

router = APIRouter(prefix="/leyline")


# ---- chat answers ----------------------------------------------------------------------------------------------------


def chat_response(result: Any, serving: Any, request: Any, ret: Any, *args: Any, **kwargs: Any) -> Any:
    """After `OpenAIServingChat._build_chat_response`: the report goes into the response's `metadata`."""
    report = ret[0]["meta_info"].get(KEY) if isinstance(ret, list) and ret else None
    if report is not None and hasattr(result, "metadata"):
        result.metadata = {**(result.metadata or {}), KEY: report}
    return result


async def chat_stream(
    original: Any, serving: Any, adapted_request: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    """Around `OpenAIServingChat._generate_chat_stream`: one more chunk, without choices, before the end."""
    last = ""
    async for event in original(serving, adapted_request, request, raw_request):
        if event.startswith("data: {"):
            last = event
        elif event.strip() == "data: [DONE]":
            report = getattr(adapted_request, "leyline_report", None)
            if report is not None:
                yield _report_event(last, report)
        yield event


def _report_event(last: str, report: dict[str, Any]) -> str:
    head = json.loads(last[len("data: ") :]) if last else {}
    chunk = {key: head.get(key) for key in ("id", "created", "model")}
    chunk |= {"object": "chat.completion.chunk", "choices": [], "sglext": {KEY: report}}
    return f"data: {json.dumps(chunk)}\n\n"


# ---- routes ----------------------------------------------------------------------------------------------------------


def add_routes(*args: Any, **kwargs: Any) -> None:
    """Before `_setup_and_run_http_server`, that is before the app gets its authorization and begins to serve."""
    from sglang.srt.entrypoints import http_server

    http_server.app.include_router(router)


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


@router.get("/ready")
async def ready() -> JSONResponse:
    """Whether this server splices; 503 while it does not. It never waits for schedulers that are busy."""
    return await _ready_response(await ensure_proved(_manager()))


@router.get("/status")
async def status() -> JSONResponse:
    """What /ready says, and the facts behind it as they are now: each scheduler answers between two batches."""
    ranks = await rank_statuses(_manager())
    first = next((state for state in ranks if state), {})
    facts = {
        "versions": {name: version(name) for name in ("leyline-agent", "sglang", "torch")},
        "model": _manager().served_model_name,
        **{key: value for key, value in first.items() if key not in ("amortize", "reason")},
        "ranks": ranks,
    }
    return await _ready_response(ranks, facts)


async def _ready_response(ranks: RankStatuses, facts: Mapping[str, Any] = MappingProxyType({})) -> JSONResponse:
    complete = all(ranks)
    if complete:
        reason = next((state["reason"] for state in ranks if state and state["reason"]), "")
    else:
        reason = "the server runs without --radix-cache-backend leyline"
    body = {"ready": complete, "amortize": not reason, "reason": reason, "protocol": VERSION}
    fingerprint = (await asyncio.to_thread(rendering)).fingerprint
    return JSONResponse({**body, "rendering": fingerprint, **facts}, status_code=200 if complete else 503)


@router.get("/tokenizer")
def tokenizer() -> JSONResponse:
    """The tokenizer as the text of a `tokenizer.json`, the chat template, and the special tokens templates may name."""
    ours = rendering()
    if ours.parts is None:
        return JSONResponse({"error": ours.reason}, status_code=404)
    return JSONResponse({**ours.parts, "rendering": ours.fingerprint})


@router.post("/prepare")
async def prepare(raw_request: Request) -> JSONResponse:
    """Body: `input_ids`, the edited prompt, and `leyline`, the text of a SpliceRequest. Answer: the report.

    With the `leyline_rendered_for` of another tokenizer or template, nothing is done, and the report says so.
    """
    try:
        body = await raw_request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return JSONResponse({"error": "the body has to be a JSON object"}, status_code=400)
    ids, text = body.get("input_ids"), body.get(KEY)
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids) or not ids:
        return JSONResponse({"error": "`input_ids` has to be a list of token ids that is not empty"}, status_code=400)
    if not isinstance(text, str):
        return JSONResponse({"error": "`leyline` has to be the JSON text of a splice request"}, status_code=400)
    changed = rendering_changed(body.get(RENDERED_FOR_KEY))
    if changed is not None:
        return JSONResponse({"report": TurnReport(fallbacks=(changed,)).to_wire()})
    ahead = GenerateReqInput(
        input_ids=ids,
        sampling_params={"max_new_tokens": 0, "temperature": 0, "custom_params": {KEY: text}},
        **{key: body[key] for key in ("extra_key", "cache_salt", "lora_path", "routed_dp_rank") if key in body},
    )
    answer: dict[str, Any] = {}
    async for response in _manager().generate_request(ahead, raw_request):
        answer = response
    return JSONResponse({"report": answer["meta_info"][KEY]})
