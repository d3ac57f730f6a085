"""An OpenTelemetry span that keeps its attributes: the API package has none that does, and it is all that is needed."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace


class RecordingSpan(trace.NonRecordingSpan):
    """`seen` is what was set on it."""

    def __init__(self) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.seen: dict[str, Any] = {}

    def is_recording(self) -> bool:
        return True

    def set_attributes(self, attributes: Any) -> None:
        self.seen.update(attributes)
