"""What the process that takes requests tells the scheduler about prefills it ran ahead of a turn.

It travels beside the client's text in `custom_params`, under a key that is removed from whatever a client sends.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from leyline_agent.report import Fallback

NOTE_KEY = "leyline_note"


class HelperNote(BaseModel):
    """Facts about helper prefills: on the helper itself that it is one, on the turn what its helpers did and cost.

    `rotated[i]` are the tokens copied for directive i: helpers splice what lies in front of their replacement.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    is_helper: bool = False
    prefilled_exact: int = 0
    prefilled_amortized: int = 0
    rotated: dict[int, int] = Field(default_factory=dict)
    splice_s: float = 0.0
    helper_s: float = 0.0
    fallbacks: list[Fallback] = Field(default_factory=list)


def read_note(custom_params: dict[str, Any]) -> HelperNote:
    """The note in a request's `custom_params`, an empty one if there is none."""
    text = custom_params.get(NOTE_KEY)
    return HelperNote.model_validate_json(text) if text else HelperNote()
