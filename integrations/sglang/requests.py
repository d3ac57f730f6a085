"""What Leyline adds to the process that takes requests: replacements are prefilled ahead of the turn.

A helper is an ordinary request for no new token: its prompt ends with the replacement, it shares batches with other
work, and it is published in the cache when it finishes. The turn itself then finds every replacement cached.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.managers.io_struct import GenerateReqInput

from leyline_agent.directives import Mode
from leyline_agent.errors import WireError
from leyline_agent.report import Fallback, FallbackReason, TurnReport
from leyline_agent.wire import KEY, SpliceRequest

from .internal import NOTE_KEY, HelperNote
from .marks import first_amortized
from .metrics import finish_turn
from .plan import make_plan
from .proof import ensure_proved
from .refusal import Refusal

logger = logging.getLogger(__name__)

Generate = Callable[..., AsyncIterator[Any]]


async def generate(original: Generate, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """Around `TokenizerManager.generate_request`: run the helpers a Leyline request needs, then the request itself.

    Whatever goes wrong ahead of the turn becomes a typed fallback; the request is always forwarded.
    """
    params = _custom_params(obj)
    if params is None:
        async for response in original(manager, obj, request):
            unwrap_report(response)
            yield response
        return
    params.pop(NOTE_KEY, None)
    _make_abortable(obj)
    await ensure_proved(manager)
    _stay_on_worker(obj, params[KEY])
    note = await _run_helpers(original, manager, obj, request, params)
    note = note.model_copy(update={"fallbacks": [*getattr(obj, "leyline_fallbacks", ()), *note.fallbacks]})
    params[NOTE_KEY] = note.model_dump_json()
    report = None
    try:
        async for response in original(manager, obj, request):
            obj.leyline_report = report = unwrap_report(response)
            yield response
    finally:
        if report is not None:
            finish_turn(obj.rid, report, metrics_enabled=manager.enable_metrics)


def _custom_params(obj: Any) -> dict[str, Any] | None:
    """The request's `custom_params` if it is a Leyline request that can be handled, else None."""
    if not isinstance(obj, GenerateReqInput) or not isinstance(obj.sampling_params, dict):
        return None
    params = obj.sampling_params.get("custom_params")
    if not isinstance(params, dict) or KEY not in params:
        return None
    if not isinstance(params[KEY], str):
        params[KEY] = ""  # only text survives the way to the scheduler; the empty text is reported as malformed
    return params


def _make_abortable(obj: Any) -> None:
    """SGLang's abort on disconnect reads what it sets later, when it has begun with the request; ours waits before."""
    if hasattr(obj, "is_single"):
        return
    if (obj.sampling_params or {}).get("n", 1) in (None, 1):
        obj.normalize_batch_and_arguments()
    else:
        obj.is_single = True  # normalizing twice is an error when one prompt is sampled several times


def _stay_on_worker(obj: Any, text: str) -> None:
    """Send the request to the data-parallel worker that holds its base, unless the caller chose one."""
    if obj.routed_dp_rank is None:
        with suppress(WireError):
            obj.routed_dp_rank = SpliceRequest.parse(text).dp_rank


async def _run_helpers(original: Generate, manager: Any, obj: Any, request: Any, params: dict[str, Any]) -> HelperNote:
    prompt = obj.input_ids
    if not prompt or not isinstance(prompt[0], int):
        return HelperNote()
    try:
        wire = SpliceRequest.parse(params[KEY])
        plan = make_plan(wire, prompt, page_size=resolved_view(manager.server_args).page_size or 1)
    except (WireError, Refusal):
        return HelperNote()  # the scheduler finds the same and reports it
    if not plan.directives or plan.mode is Mode.FORGET:
        return HelperNote()
    note = HelperNote()
    started = time.perf_counter()
    for number, prompt_len in plan.prefills():
        try:
            note = await _run_helper(original, manager, obj, request, wire, number, prompt_len, note)
        except Exception as err:  # noqa: BLE001 (whatever it was, the turn itself still has to be served)
            logger.warning("leyline helper prefill failed: %s", type(err).__name__)
            failed = Fallback(reason=FallbackReason.INTERNAL, detail=f"helper prefill: {type(err).__name__}")
            note = note.model_copy(update={"fallbacks": [*note.fallbacks, failed]})
            break
    return note.model_copy(update={"helper_s": time.perf_counter() - started})


async def _run_helper(
    original: Generate,
    manager: Any,
    obj: Any,
    request: Any,
    wire: SpliceRequest,
    number: int,
    prompt_len: int,
    note: HelperNote,
) -> HelperNote:
    ahead = _ahead_of(wire, number)
    helper = GenerateReqInput(
        input_ids=list(obj.input_ids[:prompt_len]),
        sampling_params={
            "max_new_tokens": 0,
            "temperature": 0,
            "custom_params": {KEY: ahead.encode(), NOTE_KEY: HelperNote(is_helper=True).model_dump_json()},
        },
        extra_key=obj.extra_key,
        cache_salt=obj.cache_salt,
        lora_path=obj.lora_path,
        priority=obj.priority,
        routed_dp_rank=obj.routed_dp_rank,
        session_id=obj.session_id,
    )
    answer: dict[str, Any] = {}
    async for response in original(manager, helper, request):
        answer = response
    info = answer["meta_info"]
    unwrap_report(answer)
    report = TurnReport.model_validate(info[KEY])
    cached_len = info["cached_tokens"]
    border = first_amortized(report.marks)
    exact = max(0, min(border if border is not None else prompt_len, prompt_len) - cached_len)
    rotated = Counter(note.rotated)
    rotated.update({number: outcome.rotated for number, outcome in enumerate(report.directives)})
    return note.model_copy(
        update={
            "prefilled_exact": note.prefilled_exact + exact,
            "prefilled_amortized": note.prefilled_amortized + prompt_len - cached_len - exact,
            "rotated": dict(rotated),
            "splice_s": note.splice_s + report.splice_s,
            "fallbacks": [*note.fallbacks, *report.fallbacks],
        }
    )


def _ahead_of(wire: SpliceRequest, number: int) -> SpliceRequest:
    """The request for the first `number` directives alone: the base ends for it where the next one begins."""
    end = wire.directives[number].start
    return wire.model_copy(
        update={
            "directives": wire.directives[:number],
            "base_len": end,
            "marks": [mark for mark in wire.marks if mark[0] < end],
        }
    )


def unwrap_report(response: Any) -> dict[str, Any] | None:
    """Make `meta_info["leyline"]` the report itself and return it; of several samples, that of the first.

    From the scheduler it comes as a list of one, and as an empty list on the other requests of a batch, which are
    left as SGLang would have answered them.
    """
    reports = []
    for answer in response if isinstance(response, list) else (response,):
        info = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(info, dict) or KEY not in info:
            continue
        if isinstance(info[KEY], list):
            if not info[KEY]:
                del info[KEY]
                continue
            info[KEY] = info[KEY][0]
        reports.append(info[KEY])
    return reports[0] if reports else None
