"""Choose the mode of each edit by what it costs, or leave the edit for now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from leyline_agent.compose import is_in_force, message_tokens, same_effect, tokens_saved, units
from leyline_agent.costs import Choice, CostModel, explain
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn, apply_edits
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class CostAware(Policy):
    """Resolve the policy's `Mode.AUTO` edits: AMORTIZE, FORGET, or not now, whatever `costs` says is cheapest.

    New edits are weighed one by one, and once more as one batch that forgets together, since they share the prefill of
    what lies after the first. An edit that does not pay today is asked about again on the next turn. Edits of another
    mode, and those in force, stay as they are.

    Cache: never more is spent on an edit than it saves over the turns the session is expected to have left.
    """

    policy: Policy
    costs: CostModel = field(default_factory=CostModel)

    @property
    def name(self) -> str:
        return f"CostAware({self.policy.name})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        decided: list[MessageEdit] = []
        for unit, choice in self.explain(turn):
            if choice is None:
                decided.extend(unit)
            elif choice.mode is not None:
                opened = [replace(e, mode=choice.mode) if e.mode is Mode.AUTO else e for e in unit]
                decided.extend(opened)
        return decided

    def explain(self, turn: Turn) -> list[tuple[list[MessageEdit], Choice | None]]:
        """Every all-or-nothing set the policy wants, with what it costs and the mode; None for one that is in force."""
        wanted = units(self.policy.decide(turn))
        old = [unit for unit in wanted if all(is_in_force(edit, turn.edits) for edit in unit)]
        new = sorted((unit for unit in wanted if unit not in old), key=_begin)
        answers: list[tuple[list[MessageEdit], Choice | None]] = [(_as_in_force(unit, turn), None) for unit in old]
        first_forget = min((e.index for unit in new for e in unit if e.mode is Mode.FORGET), default=len(turn.messages))
        settled = [unit for unit in new if not _is_open(unit)]
        answers.extend((unit, self._choice(unit, unit[0], turn, first_forget)) for unit in settled)
        opened = [unit for unit in new if _is_open(unit)]
        return [*answers, *zip(opened, self._choices(opened, turn, first_forget), strict=True)]

    def _choices(self, opened: list[list[MessageEdit]], turn: Turn, first_forget: int) -> list[Choice]:
        """The choice for each open set: its own, or forgetting together if that leaves more of the savings."""
        single = [self._choice(unit, _open(unit[0]), turn, first_forget) for unit in opened]
        if len(opened) < 2:
            return single
        everything = [edit for unit in opened for edit in unit]
        batch = self._choice(everything, _open(everything[0]), turn, first_forget)
        worth = sum(choice.saved_s - _cost(choice) for choice in single if choice.mode is not None)
        splices = sum(choice.mode is Mode.AMORTIZE for choice in single)
        worth += max(0, splices - 1) * self.costs.splice_overhead_s  # one set of splices, one overhead
        if batch.saved_s - batch.forget_s > max(worth, 0.0):
            return [replace(batch, mode=Mode.FORGET, why="forgetting together costs least")] * len(opened)
        return single

    def _choice(self, unit: Sequence[MessageEdit], asked: MessageEdit, turn: Turn, first_forget: int) -> Choice:
        begin, last = _begin(unit), max(edit.index for edit in unit)
        served = turn.messages[: _served_len(turn)]
        edited = {edit.index for edit in unit}
        untouched = [*(i for i in range(begin, last) if i not in edited), *range(last + 1, len(served))]
        after = sum(message_tokens(turn.messages[i], turn.count_tokens) for i in untouched)
        inserted = _tokens_inserted(unit, turn)
        removed = tokens_saved(turn.messages, unit, turn.count_tokens) + inserted
        cold = turn.cache_is_cold or begin > first_forget
        return explain(asked, self.costs.facts(after, max(0, removed), inserted, suffix_is_cold=cold))


def _begin(unit: Sequence[MessageEdit]) -> int:
    return min(edit.index for edit in unit)


def _is_open(unit: Sequence[MessageEdit]) -> bool:
    return any(edit.mode is Mode.AUTO for edit in unit)


def _open(edit: MessageEdit) -> MessageEdit:
    return replace(edit, mode=Mode.AUTO)


def _as_in_force(unit: Sequence[MessageEdit], turn: Turn) -> list[MessageEdit]:
    """The unit, its AUTO edits with the mode they were once made in."""
    modes = {id(e): f.mode for e in unit if e.mode is Mode.AUTO for f in turn.edits if same_effect(e, f)}
    return [replace(edit, mode=modes.get(id(edit), edit.mode)) for edit in unit]


def _served_len(turn: Turn) -> int:
    """Messages that the server has seen: up to the newest answer."""
    return max((i + 1 for i, m in enumerate(turn.messages) if m.get("role") == "assistant"), default=0)


def _tokens_inserted(unit: Sequence[MessageEdit], turn: Turn) -> int:
    """Tokens to prefill for what a unit puts in; the parts of a message that it leaves are counted too."""
    if all(edit.part is Part.MESSAGE and edit.new is None for edit in unit):
        return 0
    view = apply_edits(turn.messages, unit)
    changed = zip(view.messages, view.edited, strict=True)
    return sum(message_tokens(message, turn.count_tokens) for message, edits in changed if edits)


def _cost(choice: Choice) -> float:
    if choice.mode is Mode.AMORTIZE and choice.amortize_s is not None:
        return choice.amortize_s
    return choice.forget_s
