"""The one exception with which the server side declines a splice."""

from __future__ import annotations

from leyline_agent.report import Fallback, FallbackReason


class Refusal(Exception):  # noqa: N818 (it is an answer, not an error)
    """A directive cannot be spliced; the turn is served by plain prefill. Carries no prompt text."""

    def __init__(self, reason: FallbackReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.fallback = Fallback(reason=reason, detail=detail)
