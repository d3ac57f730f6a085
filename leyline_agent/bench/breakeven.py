"""Table 2: where a splice beats re-prefill, by where the edit is, how much lies behind it, and how long R is.

A prompt of random words is served, then one message in it is replaced and the turn asked again, as re-prefill and as
AMORTIZE. What `Mode.AUTO` chooses, with a cost model fed from the same server, stands beside it; its FORGET costs what
re-prefill does.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
        """Where the edit is in the cached prompt, 0 (begin) to 1."""
        total = self.prefix_tokens + self.removed_tokens + self.downstream_tokens
        return self.prefix_tokens / total


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
    """The edited turn of one case in one arm, over the repetitions."""

    case: Case
    arm: Arm
    turns: tuple[MeasuredTurn, ...]

    @property
    def ttft_ms(self) -> float:
        """Median time to first token."""
        return statistics.median(turn.ttft_ms for turn in self.turns)


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
        target.flush()
        turns: dict[Arm, list[MeasuredTurn]] = {arm: [] for arm in ARMS}
        for repetition in range(repetitions + 1):
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
    plain = [
        t for one in measured if one.arm is Arm.REPREFILL for t in one.turns if t.prefilled_tokens >= _MIN_MEASURED
    ]
    spliced = [t for one in measured if one.arm is Arm.AMORTIZE for t in one.turns if t.rotated_tokens]
    model = CostModel()
    if not plain or not spliced:
        return model
    speed = statistics.median(1000 * turn.prefilled_tokens / turn.ttft_ms for turn in plain)
    overhead = statistics.median(turn.plan_ms + turn.helper_ms + turn.splice_ms for turn in spliced) / 1000
    return CostModel(prefill_tokens_per_s=speed, splice_overhead_s=overhead)


def _row(case: Case, arms: dict[Arm, Measured], model: CostModel) -> dict[str, Any]:
    plain, spliced = arms[Arm.REPREFILL], arms[Arm.AMORTIZE]
    question = ModeQuestion((), case.prefix_tokens, case.replacement_tokens, case.downstream_tokens)
    ratios = [a.ttft_ms / b.ttft_ms for a, b in zip(plain.turns, spliced.turns, strict=True) if b.ttft_ms and a.ttft_ms]
    faster = Mode.AMORTIZE if spliced.ttft_ms < plain.ttft_ms else Mode.FORGET
    return {
        "prefix_tokens": case.prefix_tokens,
        "position": round(case.position, 3),
        "downstream_tokens": case.downstream_tokens,
        "replacement_tokens": case.replacement_tokens,
        "prompt_tokens": plain.turns[0].prompt_tokens,
        "ttft_ms": {arm.value: round(arms[arm].ttft_ms, 2) for arm in ARMS},
        "ttft_ms_spread": {
            arm.value: [round(percentile([t.ttft_ms for t in arms[arm].turns], share), 2) for share in (0, 1)]
            for arm in ARMS
        },
        "prefilled_tokens": {arm.value: arms[arm].turns[0].prefilled_tokens for arm in ARMS},
        "splice_ms": round(statistics.median(turn.splice_ms for turn in spliced.turns), 3),
        "helper_ms": round(statistics.median(turn.helper_ms for turn in spliced.turns), 2),
        "plan_ms": round(statistics.median(turn.plan_ms for turn in spliced.turns), 2),
        "times_lower": round(statistics.median(ratios), 3) if ratios else None,
        "faster": faster.value,
        "auto": model.choose_mode(question).value,
        "fallbacks": sorted({name for turn in spliced.turns for name in turn.fallbacks}),
        "errors": [turn.error for one in arms.values() for turn in one.turns if turn.error],
    }
