"""Taking Leyline's facts out of an answer: token ids and the report, from a completion or the chunks of a stream.

What only Leyline asked for is removed, so that the caller sees what the stock client would show.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from leyline_agent.client_report import ClientReport
from leyline_agent.edits import Usage
from leyline_agent.wire import KEY

_IDS = {"input_ids": "return_input_ids_in_sglext", "output_ids": "return_output_ids_in_sglext"}


@dataclass(slots=True)
class Answer:
    """What a server said beside the text. `wanted` are the ids the caller asked for itself."""

    wanted: frozenset[str] = frozenset()
    prompt_ids: list[int] | None = None
    output_ids: tuple[list[int], ...] = ()
    raw_report: dict[str, Any] | None = None
    usage: Usage | None = None

    @classmethod
    def for_request(cls, body: Any) -> Answer:
        return cls(wanted=frozenset(name for name, field in _IDS.items() if body.get(field)))

    def take(self, response: Any) -> bool:
        """Read one completion or chunk and strip it; returns whether anything is left for the caller."""
        usage = getattr(response, "usage", None)
        if usage is not None:
            self.usage = _usage(usage)
        extra = getattr(response, "model_extra", None)
        had_extension = bool(extra and extra.get("sglext"))
        if extra is not None:
            self._take_metadata(response, extra)
            self._take_extension(extra)
        empty = not getattr(response, "choices", None) and usage is None and not (extra and extra.get("sglext"))
        return not (had_extension and empty)

    def take_json(self, body: dict[str, Any]) -> bool:
        """`take` for a completion or chunk that is still JSON."""
        usage = body.get("usage")
        if isinstance(usage, dict):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.usage = Usage(usage.get("prompt_tokens") or 0, cached, usage.get("completion_tokens") or 0)
        metadata = body.get("metadata")
        if isinstance(metadata, dict) and KEY in metadata:
            self._take_report(metadata.pop(KEY))
        had_extension = bool(body.get("sglext"))
        self._take_extension(body)
        return not (had_extension and not body.get("choices") and usage is None and "sglext" not in body)

    def _take_metadata(self, response: Any, extra: dict[str, Any]) -> None:
        metadata = getattr(response, "metadata", None)  # a field of its own in newer SDKs, an extra in older ones
        if isinstance(metadata, dict) and KEY in metadata:
            self._take_report(metadata[KEY])
            rest = {name: value for name, value in metadata.items() if name != KEY}
            if "metadata" in extra:
                extra["metadata"] = rest
            else:
                response.metadata = rest

    def _take_extension(self, extra: dict[str, Any]) -> None:
        extension = extra.get("sglext")
        if not isinstance(extension, dict):
            return
        if KEY in extension:
            self._take_report(extension[KEY])
        if extension.get("input_ids"):
            self.prompt_ids = extension["input_ids"]
        if extension.get("output_ids"):
            self.output_ids = tuple(extension["output_ids"])
        ours = {KEY, *(name for name in _IDS if name not in self.wanted)}
        rest = {name: value for name, value in extension.items() if name not in ours}
        if any(rest.values()):
            extra["sglext"] = rest
        else:
            del extra["sglext"]

    def _take_report(self, report: Any) -> None:
        if isinstance(report, str):
            report = json.loads(report)
        if isinstance(report, dict):
            self.raw_report = report


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=usage.prompt_tokens or 0,
        cached_tokens=getattr(details, "cached_tokens", None) or 0,
        completion_tokens=usage.completion_tokens or 0,
    )


def report_of(response: object) -> ClientReport | None:
    """The report of a completion, or of a stream that was read; None where there is none.

    `response.leyline` for type checkers, and for the `.stream()` helper, which keeps the stream to itself.
    """
    report = getattr(getattr(response, "_raw_stream", response), KEY, None)
    return report if isinstance(report, ClientReport) else None
