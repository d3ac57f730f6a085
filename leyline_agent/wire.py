"""The protocol between client and server, version 1.

A request is an ordinary chat completion with two extras: `input_ids`, the edited prompt, and `custom_params.leyline`,
the JSON text of a `SpliceRequest`. The answer carries a `TurnReport` as `metadata.leyline`, or when streaming as
`sglext.leyline` of one more chunk without choices before the end. A server without the plugin ignores the extras.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.errors import WireError
from leyline_agent.report import Mark

VERSION = 1
KEY = "leyline"
"""Name of our entry in `custom_params`, `metadata`, `sglext` and `meta_info`."""

RENDERED_FOR_KEY = "leyline_rendered_for"
"""Beside it in `custom_params`: the `rendering` of `GET /leyline/ready` for which `input_ids` were made.

A server with another tokenizer or chat template renders the messages itself instead of taking the ids for its own.
"""


def hash_tokens(token_ids: Sequence[int]) -> str:
    """Content address of a token sequence: BLAKE2b-128 over its ids as little-endian int64, in hex."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()


class WireDirective(BaseModel):
    """One directive with the base tokens it removes, so that the server can rebuild the base from the prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    replacement: list[int]
    removed: list[int]
    mode: str = Field(pattern="^(amortize|forget)$")

    def to_directive(self) -> Directive:
        return Directive(self.start, self.end, tuple(self.replacement), Mode(self.mode))


class SpliceRequest(BaseModel):
    """What the client asks of the server beside the prompt.

    `base_len` and `base_hash` (see `hash_tokens`) identify the base; `directives` are in its coordinates. `marks` are
    those of the last report: where in the base amortized KV begins. A request without directives but with marks
    continues an amortized session; one with neither is an ordinary request that asks for a report.
    `reuse_replacements` lets the server copy a replacement's KV from an earlier place of the base that holds the very
    same tokens, instead of prefilling it: no forward pass at all, at the price of KV made in another context.
    `dp_rank` is that of the last report: which of several data-parallel workers holds the base.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: int = VERSION
    base_len: int = Field(default=0, ge=0)
    base_hash: str = ""
    directives: list[WireDirective] = []
    marks: list[Mark] = []
    reuse_replacements: bool = False
    dp_rank: int | None = None

    @classmethod
    def build(
        cls,
        base: Sequence[int],
        directives: DirectiveSet,
        marks: Sequence[Mark] = (),
        *,
        reuse_replacements: bool = False,
        dp_rank: int | None = None,
    ) -> SpliceRequest:
        """The request for `directives` on `base`. Raises DirectiveError if they do not fit it."""
        removed = directives.removed(base)
        return cls(
            base_len=len(base),
            base_hash=hash_tokens(base),
            directives=[
                WireDirective(
                    start=d.start, end=d.end, replacement=list(d.replacement), removed=list(gone), mode=d.mode.value
                )
                for d, gone in zip(directives, removed, strict=True)
            ],
            marks=list(marks),
            reuse_replacements=reuse_replacements,
            dp_rank=dp_rank,
        )

    @classmethod
    def parse(cls, text: object) -> SpliceRequest:
        """Raises WireError, in words, for anything but the JSON text of a version-1 request."""
        if not isinstance(text, str):
            raise WireError(f"custom_params.leyline is {type(text).__name__}; it must be JSON text")
        try:
            return cls.model_validate_json(text)
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(str(step) for step in first["loc"]) or "the text"
            raise WireError(f"custom_params.leyline: {where}: {first['msg']}") from err

    def encode(self) -> str:
        return self.model_dump_json()

    def custom_params(self) -> dict[str, Any]:
        """The value for the request's `custom_params`."""
        return {KEY: self.encode()}


def report_of(response: Any) -> dict[str, Any] | None:
    """The report inside a chat completion or chunk (as a mapping), None when there is none."""
    for field in ("metadata", "sglext"):
        holder = response.get(field) if isinstance(response, dict) else None
        if isinstance(holder, dict) and KEY in holder:
            report = holder[KEY]
            return report if isinstance(report, dict) else None
    return None
