"""What became of a turn: the typed answer to "what was kept, moved, refused, and why"."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from leyline_agent.directives import Mode

Mark = tuple[int, int, int]
"""(position, tag, depth): from `position` on, up to the next mark, KV went through `depth` rotations.

A `tag` other than 0 is part of the radix key at `position`: it keeps this KV apart from exact KV of the same text. A
mark is made by the server and opaque to clients.
"""


class FallbackReason(StrEnum):
    """Why a directive was not spliced. The turn is then served exactly, only slower."""

    # found by the client, before anything is sent
    SERVER_WITHOUT_LEYLINE = "server_without_leyline"
    RENDERER_UNAVAILABLE = "renderer_unavailable"
    BASE_UNKNOWN = "base_unknown"
    HISTORY_REFUSED = "history_refused"
    POLICY_FAILED = "policy_failed"
    # found by the server, in the request
    MALFORMED = "malformed"
    UNSUPPORTED_VERSION = "unsupported_version"
    BASE_MISMATCH = "base_mismatch"
    SPAN_OUTSIDE_BASE = "span_outside_base"
    OVERLAPPING = "overlapping"
    REPLACEMENT_MISMATCH = "replacement_mismatch"
    RENDERING_CHANGED = "rendering_changed"
    # found by the server, in its cache and its state
    BASE_NOT_CACHED = "base_not_cached"
    REPLACEMENT_NOT_CACHED = "replacement_not_cached"
    NOTHING_DOWNSTREAM = "nothing_downstream"
    NO_ROOM = "no_room"
    EVICTED = "evicted"
    DRIFT_BUDGET = "drift_budget"
    FORGET_IN_SET = "forget_in_set"
    AMORTIZE_DISABLED = "amortize_disabled"
    REQUEST_UNSUPPORTED = "request_unsupported"
    INTERNAL = "internal"


class Fallback(BaseModel):
    """One thing that did not happen as asked: a typed reason and a sentence for people, without prompt text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: FallbackReason
    detail: str = ""


class DirectiveOutcome(BaseModel):
    """What became of one directive, in tokens.

    `moved` of the run behind it stand at their new places, and `reused` of its replacement come from an earlier place
    of the base; what is left of either was prefilled. `rotated` of both were copied for this turn; none if an earlier
    try or a `prepare` had done it ("already").
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int
    end: int
    replacement_len: int
    mode: Mode
    status: str = Field(pattern="^(spliced|already|forgotten|refused)$")
    moved: int = 0
    reused: int = 0
    rotated: int = 0


class TurnReport(BaseModel):
    """The server's account of one turn, as it travels back to the client.

    `exact + amortized + prefilled == prompt_tokens`: reused KV identical to a fresh prefill, reused KV at or behind an
    amortized splice, and tokens computed for this turn (replacements prefilled ahead of it included). `rotated` counts
    tokens copied and rotated for this turn; they are part of `amortized`. `marks` says where in the prompt amortized KV
    begins (see `wire.Mark`) and goes into the next request as it is. `splices` is the longest chain of rotations that a
    key in the prompt went through. `kernel` is the form that rotated ("triton" or "torch"). `dp_rank` is the worker
    that served the turn, where there are several; it goes into the next request too. Times are in seconds.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = 1
    prompt_tokens: int = 0
    exact: int = 0
    amortized: int = 0
    rotated: int = 0
    prefilled: int = 0
    directives: tuple[DirectiveOutcome, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    marks: tuple[Mark, ...] = ()
    splices: int = 0
    kernel: str = ""
    dp_rank: int | None = None
    splice_s: float = 0.0
    helper_s: float = 0.0

    @property
    def spliced(self) -> bool:
        """Whether amortized KV was made or found for a directive of this turn."""
        return any(d.status in ("spliced", "already") for d in self.directives)

    @property
    def reused(self) -> int:
        """Prompt tokens whose KV was not computed again."""
        return self.exact + self.amortized

    def to_wire(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
