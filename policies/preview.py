"""What a policy would do on this turn, what that would cost and save, and why some of it would not happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from leyline_agent.compose import tokens_saved
from leyline_agent.costs import CostModel
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.planner import plan_edits
from leyline_agent.policies.wrappers.cost_aware import CostAware
from leyline_agent.policy import Policy


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """One all-or-nothing set of edits. `mode` is None if it would not happen; `why` says why, or what speaks for it.

    `saved_tokens` is by how much the prompt gets shorter; the seconds are those of the cost model.
    """

    messages: tuple[int, ...]
    reason: str
    mode: Mode | None
    in_force: bool
    saved_tokens: int
    why: str
    amortize_s: float | None = None
    forget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """The rows of a turn. Displays itself in a notebook."""

    rows: tuple[PreviewRow, ...]

    @property
    def saved_tokens(self) -> int:
        """By how much the prompt gets shorter through the edits that would be new."""
        return sum(row.saved_tokens for row in self.rows if row.mode is not None and not row.in_force)

    def __str__(self) -> str:
        lines = [f"{len(self.rows)} sets of edits; new ones save {self.saved_tokens} tokens a turn"]
        for row in self.rows:
            verb = "in force" if row.in_force else str(row.mode or "not now")
            lines.append(f"{verb}: {row.reason} of {_places(row.messages)}, {row.saved_tokens} tokens: {row.why}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return "<br>".join(escape(line) for line in str(self).splitlines())


def preview(policy: Policy, turn: Turn, costs: CostModel | None = None) -> Preview:
    """What `policy` would do on `turn` on a server like `costs`. Nothing is sent or remembered."""
    rows = []
    for unit, choice in CostAware(policy, costs or CostModel()).explain(turn):
        refusal = next(iter(plan_edits(turn.messages, unit).refused), None)
        rows.append(
            PreviewRow(
                messages=tuple(sorted({edit.index for edit in unit})),
                reason=unit[0].reason or "edit",
                mode=None if refusal else unit[0].mode if choice is None else choice.mode,
                in_force=choice is None,
                saved_tokens=_saved(turn, unit),
                why=refusal.reason if refusal else "made on an earlier turn" if choice is None else choice.why,
                amortize_s=choice.amortize_s if choice else None,
                forget_s=choice.forget_s if choice else None,
            )
        )
    return Preview(tuple(sorted(rows, key=lambda row: row.messages)))


def _saved(turn: Turn, unit: Sequence[MessageEdit]) -> int:
    return tokens_saved(turn.messages, unit, turn.count_tokens)


def _places(messages: Sequence[int]) -> str:
    if len(messages) == 1:
        return f"message {messages[0]}"
    return f"messages {messages[0]} to {messages[-1]}"
