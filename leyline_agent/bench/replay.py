"""Table 1: every arm at every concurrency, repeated; rows with confidence intervals, paired against re-prefill."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.conversation import Settings
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.run import ArmRun, OnArmTurn, ignore, run_arm
from leyline_agent.bench.script import Script
from leyline_agent.bench.stats import Interval, bootstrap, percentile
from leyline_agent.bench.target import Target

PERCENTILES = (0.5, 0.9, 0.99)
_COUNTS = (
    "prompt_tokens", "cached_tokens", "amortized_tokens", "rotated_tokens", "prefilled_tokens", "prepared_tokens",
)  # fmt: skip

Session = tuple[MeasuredTurn, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One run of one arm: what is done or left out as a whole."""

    arm: Arm
    concurrency: int
    repetition: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run. With a `budget_s`, blocks that would not end in time are left out, and the result says so.

    `sessions_at` limits the sessions at a concurrency (a C of 1 needs few); the same ones are used by every arm.
    """

    arms: tuple[Arm, ...] = tuple(Arm)
    concurrencies: tuple[int, ...] = (1,)
    repetitions: int = 1
    budget_s: float | None = None
    sessions_at: dict[int, int] = field(default_factory=dict)
    watch_pool: bool = True

    def blocks(self) -> Iterator[Block]:
        """In order: every repetition has all arms of a concurrency side by side, each time beginning with another."""
        for repetition in range(self.repetitions):
            for concurrency in self.concurrencies:
                shift = repetition % len(self.arms)
                for arm in (*self.arms[shift:], *self.arms[:shift]):
                    yield Block(arm, concurrency, repetition)

    def scripts(self, scripts: Sequence[Script], concurrency: int) -> Sequence[Script]:
        """The sessions to play at a concurrency."""
        return scripts[: self.sessions_at.get(concurrency, len(scripts))]


@dataclass(slots=True)
class SweepResult:
    """All runs that were made, and the blocks that were not."""

    runs: list[ArmRun] = field(default_factory=list)
    left_out: list[Block] = field(default_factory=list)

    def of(self, arm: Arm, concurrency: int) -> list[ArmRun]:
        """The repetitions of one cell of the table."""
        return [run for run in self.runs if run.arm is arm and run.concurrency == concurrency]


def warm_up_all(target: Target, sweep: Sweep, scripts: Sequence[Script], settings: Settings) -> None:
    """Serve every shape once: each arm's turns alone, and the largest batch. Kernels compile on their first use."""
    for arm in sweep.arms:
        run_arm(target, arm, scripts[:1], settings)
    most = max(sweep.concurrencies)
    if most > 1:
        opening = [Script(script.id, script.steps[:2], script.tools) for script in scripts[:most]]
        run_arm(target, sweep.arms[-1], opening, settings, concurrency=most)


def run_sweep(
    target: Target,
    sweep: Sweep,
    scripts: Sequence[Script],
    settings: Settings,
    *,
    on_block: Callable[[Block], None] = lambda _: None,
    on_turn: OnArmTurn = ignore,
) -> SweepResult:
    """Run all blocks, or those for which the budget has time, judged by how long the same block took before."""
    result = SweepResult()
    began = time.perf_counter()
    took: dict[tuple[Arm, int], float] = {}
    for block in sweep.blocks():
        passed_s = time.perf_counter() - began
        expected_s = took.get((block.arm, block.concurrency), 0.0)
        if sweep.budget_s is not None and passed_s + expected_s > sweep.budget_s:
            result.left_out.append(block)
            continue
        on_block(block)
        run = run_arm(
            target,
            block.arm,
            sweep.scripts(scripts, block.concurrency),
            settings,
            concurrency=block.concurrency,
            repetition=block.repetition,
            on_turn=on_turn,
            watch_pool=sweep.watch_pool,
        )
        took[block.arm, block.concurrency] = run.wall_s
        result.runs.append(run)
    return result


# ---- rows of the table -----------------------------------------------------------------------------------------------


def rows(result: SweepResult, sweep: Sweep) -> list[dict[str, Any]]:
    """One row for each arm and concurrency that was run."""
    out = []
    for concurrency in sweep.concurrencies:
        baseline, unedited = (result.of(arm, concurrency) for arm in (Arm.REPREFILL, Arm.NONE))
        for arm in sweep.arms:
            runs = result.of(arm, concurrency)
            if runs:
                others = (baseline if arm is not Arm.REPREFILL else [], unedited if arm is not Arm.NONE else [])
                out.append(_row(arm, concurrency, runs, *others))
    return out


def _row(
    arm: Arm, concurrency: int, runs: Sequence[ArmRun], baseline: Sequence[ArmRun], unedited: Sequence[ArmRun]
) -> dict[str, Any]:
    turns = [turn for run in runs for turn in run.turns]
    good = [turn for turn in turns if not turn.error]
    edited = [turn for turn in good if turn.edited]
    others = [turn for turn in good if not turn.edited and turn.turn]
    wall_s = sum(run.wall_s for run in runs)
    peaks = [run.pool_peak for run in runs if run.pool_peak is not None]
    row = {
        "arm": arm.value,
        "concurrency": concurrency,
        "repetitions": len(runs),
        "sessions": len({turn.trace for turn in turns}),
        "turns": len(turns),
        "edited_turns": len(edited),
        "errors": len(turns) - len(good),
        "fallbacks": _tally(name for turn in good for name in turn.fallbacks),
        "hit_rate": bootstrap(_sessions(runs), hit_rate).to_json(),
        **{name: round(sum(getattr(turn, name) for turn in good) / len(runs)) for name in _COUNTS},
        "ttft_ms": _spread([turn.ttft_ms for turn in good]),
        "ttft_ms_edited": _spread([turn.ttft_ms for turn in edited]),
        "ttft_ms_not_edited": _spread([turn.ttft_ms for turn in others]),
        "e2e_ms": _spread([turn.e2e_ms for turn in good]),
        "plan_ms": _spread([turn.plan_ms for turn in edited]),
        "splice_ms": _spread([turn.splice_ms for turn in edited]),
        "helper_ms": _spread([turn.helper_ms for turn in edited]),
        "turns_per_s": round(len(good) / wall_s, 3),
        "prompt_tokens_per_s": round(sum(turn.prompt_tokens for turn in good) / wall_s),
        "wall_s": [round(run.wall_s, 2) for run in runs],
        "pool_peak": max(peaks) if peaks else None,
    }
    if baseline:
        row["against_reprefill"] = _paired(runs, baseline)
    if unedited and edited:
        row["ttft_edited_over_unedited"] = _over(runs, unedited)
    return row


def _over(runs: Sequence[ArmRun], unedited: Sequence[ArmRun]) -> list[float]:
    """Time to first token of edited turns, as a multiple of the same turns without a policy."""
    ours, theirs = (dict(zip(_keys(some), _sessions(some), strict=True)) for some in (runs, unedited))
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    ttft = _median("ttft_ms", edited=True)
    return bootstrap(pairs, lambda drawn: ttft([a for a, _ in drawn]) / ttft([b for _, b in drawn])).to_json()


def _paired(runs: Sequence[ArmRun], baseline: Sequence[ArmRun]) -> dict[str, Any]:
    """Differences and ratios to re-prefill over the same sessions; a session with its repetition is the unit drawn."""
    ours, theirs = (dict(zip(_keys(some), _sessions(some), strict=True)) for some in (runs, baseline))
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    if not pairs:
        return {}

    def difference(measure: Callable[[Sequence[Session]], float]) -> Interval:
        return bootstrap(pairs, lambda drawn: measure([a for a, _ in drawn]) - measure([b for _, b in drawn]))

    def times_lower(measure: Callable[[Sequence[Session]], float]) -> Interval:
        return bootstrap(pairs, lambda drawn: measure([b for _, b in drawn]) / measure([a for a, _ in drawn]))

    edited = any(turn.edited for session, _ in pairs for turn in session)
    return {
        "sessions": len(pairs),
        "hit_rate_points": (difference(lambda some: 100 * hit_rate(some))).to_json(),
        "ttft_edited_times_lower": times_lower(_median("ttft_ms", edited=True)).to_json() if edited else None,
        "e2e_ms_difference": difference(_median("e2e_ms", edited=False)).to_json(),
        "e2e_edited_ms_difference": difference(_median("e2e_ms", edited=True)).to_json() if edited else None,
    }


def hit_rate(sessions: Sequence[Session]) -> float:
    """Share of prompt tokens that nobody computed for this turn, be it in the turn or ahead of it."""
    turns = [turn for session in sessions for turn in session]
    prompt = sum(turn.prompt_tokens for turn in turns)
    return 1 - sum(turn.all_prefilled for turn in turns) / prompt if prompt else 0.0


def _median(name: str, *, edited: bool) -> Callable[[Sequence[Session]], float]:
    def measure(sessions: Sequence[Session]) -> float:
        values = [getattr(turn, name) for session in sessions for turn in session if turn.edited or not edited]
        return statistics.median(values) if values else float("nan")

    return measure


def _keys(runs: Sequence[ArmRun]) -> list[tuple[int, str]]:
    return [(run.repetition, trace) for run in runs for trace in _by_trace(run)]


def _sessions(runs: Sequence[ArmRun]) -> list[Session]:
    return [session for run in runs for session in _by_trace(run).values()]


def _by_trace(run: ArmRun) -> dict[str, Session]:
    found: dict[str, list[MeasuredTurn]] = defaultdict(list)
    for turn in run.turns:
        if not turn.error:
            found[turn.trace].append(turn)
    return {trace: tuple(turns) for trace, turns in found.items()}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{round(100 * share)}": round(percentile(values, share), 2) for share in PERCENTILES}


def _tally(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    return dict(counts)
