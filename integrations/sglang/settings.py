"""Settings of the server side. They travel to SGLang's processes as environment variables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal, cast

from leyline_agent.environment import server_settings
from leyline_agent.errors import ConfigError


class SplicePlace(StrEnum):
    """Where spliced KV goes."""

    AUTO = "auto"
    """To new slots while there is room for them beside the base; else in place, where that is possible."""

    COPY = "copy"
    """Always to new slots: the unedited history stays cached for forks and retries, until it ages out."""

    IN_PLACE = "in_place"
    """In place wherever nobody else uses the downstream: no slot more, half the memory traffic, no way back."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the backend behaves. Raises ConfigError for a value out of range."""

    splice_place: SplicePlace = SplicePlace.AUTO
    """See `SplicePlace`."""

    kernel: Literal["auto", "triton", "torch"] = "auto"
    """What rotates keys: "triton", "torch", or "auto": Triton on a GPU, torch elsewhere."""

    allow_fp8: bool = False
    """Whether keys kept in fp8 may be rotated: each rotation rounds them again, by some percent (docs/kernels.md)."""

    max_splices: int = 64
    """Rotations a key may go through before its KV is prefilled again instead, since each one rounds it anew
    (docs/kernels.md). 0: no limit."""

    lineage_tokens: int = 4_000_000
    """Token ids remembered so that FORGET reaches every branch, at 8 bytes each."""

    def __post_init__(self) -> None:
        if self.kernel not in ("auto", "triton", "torch"):
            raise ConfigError(f"kernel is {self.kernel!r}; give auto, triton or torch")
        if self.max_splices < 0:
            raise ConfigError(f"max_splices is {self.max_splices}; give 0 for no limit, or a positive number")
        if self.lineage_tokens < 0:
            raise ConfigError(f"lineage_tokens is {self.lineage_tokens}; it cannot be negative")

    @classmethod
    def from_env(cls) -> ServerSettings:
        """Settings from LEYLINE_SERVER_<FIELD>. Raises ConfigError for a value that cannot be read."""
        found = server_settings(field.name for field in fields(cls))
        try:
            return cls(
                splice_place=SplicePlace(found.get("splice_place", SplicePlace.AUTO)),
                kernel=cast("Literal['auto', 'triton', 'torch']", found.get("kernel", "auto")),
                allow_fp8=found.get("allow_fp8", "0") not in ("0", "false", "no"),
                max_splices=int(found.get("max_splices", 64)),
                lineage_tokens=int(found.get("lineage_tokens", 4_000_000)),
            )
        except ValueError as err:
            raise ConfigError(f"LEYLINE_SERVER_* settings {found}: {err}") from err
