"""Table 2: where a splice beats re-prefill, by where the edit is, how much lies behind it, and how long R is.

A prompt of random words is served, then one message in it is replaced and the turn asked again, as re-prefill and as
AMORTIZE. What `Mode.AUTO` chooses stands beside it; its FORGET costs what re-prefill does. Two numbers of its cost
model, prefill speed and splice overhead, are fitted to the very turns it is judged on.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from leyline_agent.attribution import ModeQuestion
from leyline_agent.bench.arms import Arm
from leyline_agent.bench.conversation import Settings, converse
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.script import Script, Step
from leyline_agent.bench.stats import percentile
from leyline_agent.bench.target import Target
from leyline_agent.bench.workload import words
from leyline_agent.costs import CostModel
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, apply_edits

ARMS = (Arm.REPREFILL, Arm.AMORTIZE)
_ARM_OF = {Mode.FORGET.value: Arm.REPREFILL.value, Mode.AMORTIZE.value: Arm.AMORTIZE.value}
_NEW_TOKENS = 64
_MIN_SIDE = 8  # tokens before and behind the edit: the splice needs some of both
_REMOVED_TOKENS = 512
_MIN_MEASURED = 512  # prefilled tokens of a turn from which the server's speed is taken


@dataclass(frozen=True, slots=True)
class Case:
    """One edit: `prefix_tokens` stay before it, `downstream_tokens` behind it, R has `replacement_tokens`."""

    prefix_tokens: int
    downstream_tokens: int
    replacement_tokens: int
    removed_tokens: int = _REMOVED_TOKENS

    @property
    def position(self) -> float:
        """Where the edit is in what is not removed, 0 (begin) to 1."""
        return self.prefix_tokens / (self.prefix_tokens + self.downstream_tokens)


def cases(lengths: Sequence[int], positions: Sequence[float], replacements: Sequence[int]) -> Iterator[Case]:
    """A case for each prompt length, edit position (0 to 1 of what is not removed) and length of R."""
    for length, position, replacement in itertools.product(lengths, positions, replacements):
        kept = max(2 * _MIN_SIDE, length - _REMOVED_TOKENS)
        prefix = min(max(_MIN_SIDE, round(position * kept)), kept - _MIN_SIDE)
        yield Case(prefix, kept - prefix, replacement)


def script_of(case: Case, words_per_token: float, seed: int) -> Script:
    """Two turns: the prompt as it is, and the prompt with one message replaced and a question added."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets

    def text(tokens: int) -> str:
        return words(rng, max(1, round(tokens * words_per_token)))

    history: list[Message] = [
        {"role": "system", "content": f"Case {seed}. {text(case.prefix_tokens)}"},
        {"role": "user", "content": text(case.removed_tokens)},
        {"role": "assistant", "content": text(case.downstream_tokens)},
        {"role": "user", "content": "Go on."},
    ]
    later = (*history, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": text(_NEW_TOKENS)})
    edit = MessageEdit(1, text(case.replacement_tokens), reason="break-even")
    first = Step(0, tuple(history), tuple(history), (), edited=False)
    second = Step(1, later, apply_edits(later, [edit]).messages, (edit,), edited=True)
    return Script(f"case-{seed}", (first, second))


@dataclass(frozen=True, slots=True)
class Measured:
    """The edited turn of one case in one arm, over the repetitions; a turn that failed keeps its place."""

    case: Case
    arm: Arm
    turns: tuple[MeasuredTurn, ...]

    @property
    def good(self) -> list[MeasuredTurn]:
        """Those without an error."""
        return [turn for turn in self.turns if not turn.error]

    def median(self, name: str) -> float:
        """The median of a number over the good turns; NaN without any."""
        return percentile([getattr(turn, name) for turn in self.good], 0.5)


def measure(
    target: Target,
    wanted: Sequence[Case],
    settings: Settings,
    *,
    repetitions: int = 3,
    budget_s: float | None = None,
    on_case: Callable[[Case], None] = lambda _: None,
) -> list[Measured]:
    """Every case in every arm, repetition by repetition with another text; cases past the budget are left out."""
    sample = 2000
    words_per_token = sample / target.count_tokens(words(random.Random(0), sample))  # noqa: S311
    began = time.perf_counter()
    out = []
    for number, case in enumerate(wanted):
        if budget_s is not None and time.perf_counter() - began > budget_s:
            break
        on_case(case)
        turns: dict[Arm, list[MeasuredTurn]] = {arm: [] for arm in ARMS}
        for repetition in range(repetitions + 1):
            target.flush()
            script = script_of(case, words_per_token, 1000 * number + repetition)
            for arm in ARMS[:: -1 if repetition % 2 else 1]:
                salt = f"case-{time.monotonic_ns():x}-{arm}"
                edited = list(converse(arm, script, settings, salt))[-1]
                if repetition:  # the first one warms up
                    turns[arm].append(edited)
        out += [Measured(case, arm, tuple(some)) for arm, some in turns.items()]
    return out


def rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row a case: times of the arms, who was faster, and what the cost model says."""
    model = fitted(measured)
    by_case: dict[Case, dict[Arm, Measured]] = {}
    for one in measured:
        by_case.setdefault(one.case, {})[one.arm] = one
    return [_row(case, arms, model) for case, arms in by_case.items()]


def fitted(measured: Sequence[Measured]) -> CostModel:
    """The cost model with this server's numbers: prefill speed from re-prefill, the rest from the splices' reports."""
    plain = [t for one in measured if one.arm is Arm.REPREFILL for t in one.good if t.prefilled_tokens >= _MIN_MEASURED]
    spliced = [t for one in measured if one.arm is Arm.AMORTIZE for t in one.good if t.rotated_tokens]
    model = CostModel()
    if not plain or not spliced:
        return model
    speed = statistics.median(1000 * turn.prefilled_tokens / turn.ttft_ms for turn in plain)
    overhead = statistics.median(turn.plan_ms + turn.helper_ms + turn.splice_ms for turn in spliced) / 1000
    return CostModel(prefill_tokens_per_s=speed, splice_overhead_s=overhead)


def outcome(measured: Sequence[Measured]) -> dict[str, Any]:
    """What a result holds: the rows, the fitted cost model, and how AUTO did with it."""
    table = rows(measured)
    return {"cost_model": asdict(fitted(measured)), "auto": verdict(table), "rows": table}


def turn_lines(measured: Sequence[Measured]) -> list[tuple[dict[str, Any], MeasuredTurn]]:
    """Every measured turn with its case and arm, for `write_turns`."""
    return [({"case": asdict(one.case), "arm": one.arm}, turn) for one in measured for turn in one.turns]


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How AUTO did: how often it took the faster way, and the time of all its choices over that of the best ones."""
    judged = [row for row in rows if row["faster"]]
    chosen = sum(row["ttft_ms"][_ARM_OF[row["auto"]]] for row in judged)
    best = sum(min(row["ttft_ms"].values()) for row in judged)
    return {
        "cases": len(judged),
        "auto_is_faster_way": sum(row["auto"] == row["faster"] for row in judged),
        "auto_time_over_best": round(chosen / best, 4) if best else None,
    }


def _row(case: Case, arms: Mapping[Arm, Measured], model: CostModel) -> dict[str, Any]:
    plain, spliced = arms[Arm.REPREFILL], arms[Arm.AMORTIZE]
    question = ModeQuestion((), case.prefix_tokens, case.replacement_tokens, case.downstream_tokens)
    both = [(a, b) for a, b in zip(plain.turns, spliced.turns, strict=True) if not a.error and not b.error]
    ratios = [a.ttft_ms / b.ttft_ms for a, b in both]
    faster = (Mode.AMORTIZE if spliced.median("ttft_ms") < plain.median("ttft_ms") else Mode.FORGET) if both else None
    return {
        "prefix_tokens": case.prefix_tokens,
        "position": round(case.position, 3),
        "downstream_tokens": case.downstream_tokens,
        "replacement_tokens": case.replacement_tokens,
        "removed_tokens": case.removed_tokens,
        "repetitions": len(both),
        "prompt_tokens": both[0][0].prompt_tokens if both else None,
        "ttft_ms": {arm.value: _number(one.median("ttft_ms")) for arm, one in arms.items()},
        "ttft_ms_spread": {arm.value: _ends([turn.ttft_ms for turn in one.good]) for arm, one in arms.items()},
        "prefilled_tokens": {arm.value: _number(one.median("prefilled_tokens")) for arm, one in arms.items()},
        **{name: _number(spliced.median(name)) for name in ("splice_ms", "helper_ms", "plan_ms")},
        "times_lower": _number(percentile(ratios, 0.5)),
        "times_lower_spread": _ends(ratios),
        "faster": faster.value if faster else None,
        "auto": model.choose_mode(question).value,
        "fallbacks": sorted({name for turn in spliced.good for name in turn.fallbacks}),
        "errors": [turn.error for one in arms.values() for turn in one.turns if turn.error],
    }


def _ends(values: Sequence[float]) -> list[float] | None:
    """The lowest and the highest."""
    return [round(percentile(values, share), 3) for share in (0, 1)] if values else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
