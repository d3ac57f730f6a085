"""What is known of one turn after it was served, and of one arm after all its turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """One served turn. Tokens are the server's counts: `prompt = cached + amortized + prefilled`.

    `cached` tokens were reused as a fresh prefill would have made them, `amortized` ones through a splice, `prefilled`
    ones were computed for this turn, replacements ahead of it included. `prepared` tokens were prefilled before the
    turn, while the tools ran, and stand on top of the prompt's own. `replacement_tokens` is the length of all R,
    `new_tokens` what the prompt has behind the edited prompt before it; both are 0 where nobody sent directives.
    `plan_ms` is the client's share of the time to first token, `splice_ms` the copying and rotating on the server.
    """

    trace: str
    turn: int
    edited: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    amortized_tokens: int = 0
    prefilled_tokens: int = 0
    rotated_tokens: int = 0
    prepared_tokens: int = 0
    replacement_tokens: int = 0
    new_tokens: int = 0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    plan_ms: float = 0.0
    splice_ms: float = 0.0
    helper_ms: float = 0.0
    output_ids: tuple[int, ...] = ()
    output_text: str = ""
    fallbacks: tuple[str, ...] = ()
    error: str = ""

    @property
    def all_prefilled(self) -> int:
        """Tokens computed for this turn, before it or in it."""
        return self.prefilled_tokens + self.prepared_tokens

    def to_json(self) -> dict[str, Any]:
        """All of it by name; times in milliseconds with three decimals, without the text of the answer."""
        facts = {name: value for name, value in asdict(self).items() if name != "output_text"}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in facts.items()}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """What `to_json` gave; other keys are left alone."""
        known: dict[str, Any] = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known)


@dataclass(slots=True)
class ArmTotals:
    """The turns of one arm, added up."""

    turns: list[MeasuredTurn] = field(default_factory=list)

    def total(self, name: str) -> int:
        """The sum of one count over the turns."""
        return sum(getattr(turn, name) for turn in self.turns)

    def median(self, name: str, wanted: Callable[[MeasuredTurn], bool] = lambda _: True) -> float | None:
        """The median of a time over the turns that are wanted and had no error; None if there are none."""
        values = [getattr(turn, name) for turn in self.turns if wanted(turn) and not turn.error]
        return statistics.median(values) if values else None

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that nobody computed, be it in the turn or, by `prepare`, ahead of it."""
        prompt = self.total("prompt_tokens")
        return 1 - self.total("all_prefilled") / prompt if prompt else 0.0

    def to_json(self) -> dict[str, Any]:
        """Totals, medians and every turn."""
        names = ("prompt_tokens", "cached_tokens", "amortized_tokens", "rotated_tokens")
        edited = self.median("ttft_ms", lambda turn: turn.edited)
        return {
            **{name: self.total(name) for name in names},
            "prefilled_tokens": self.total("all_prefilled"),
            "hit_rate": round(self.hit_rate, 4),
            "ttft_ms_p50": _rounded(self.median("ttft_ms")),
            "ttft_ms_p50_edited": _rounded(edited),
            "e2e_ms_p50": _rounded(self.median("e2e_ms")),
            "errors": sum(bool(turn.error) for turn in self.turns),
            "turns": [turn.to_json() for turn in self.turns],
        }


def edited_turns(turns: Iterable[MeasuredTurn]) -> Sequence[MeasuredTurn]:
    """Those on which something already served changed."""
    return [turn for turn in turns if turn.edited]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
