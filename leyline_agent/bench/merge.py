"""Several runs of one table as one result: its rows are computed anew from the turns of all runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_agent.bench import breakeven, replay
from leyline_agent.bench.arms import Arm
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.run import ArmRun
from leyline_agent.errors import ConfigError

_OF_A_RUN = {"arms", "concurrencies", "repetitions", "lengths", "positions", "replacements"}
"""Settings in which the runs may differ."""

_CIRCUMSTANCES = ("time", "commit", "machine", "versions", "server", "rotation_kernel", "config")

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One run: its result, and the lines of its turns file."""

    result: Mapping[str, Any]
    turns: Sequence[Line]


def merge(parts: Sequence[Part]) -> dict[str, Any]:
    """One result of the same kind. Raises ConfigError for runs that did not measure the same thing."""
    first = parts[0].result
    for part in parts[1:]:
        _check_same(first, part.result)
    makers = {"replay": _replay_rows, "breakeven": _breakeven_rows}
    if first["kind"] not in makers:
        raise ConfigError(f"{first['kind']!r} results cannot be merged; {' and '.join(makers)} can")
    circumstances = {name: first.get(name) for name in _CIRCUMSTANCES if name != "config"}
    config = {name: value for name, value in first["config"].items() if name not in _OF_A_RUN}
    runs = [{name: part.result.get(name) for name in _CIRCUMSTANCES} for part in parts]
    return {"kind": first["kind"], **circumstances, "config": config, "runs": runs, **makers[first["kind"]](parts)}


def _check_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for name in sorted((set(one["config"]) | set(other["config"])) - _OF_A_RUN):
        ours, theirs = one["config"].get(name), other["config"].get(name)
        if ours != theirs:
            raise ConfigError(f"{name} is {ours} in one run and {theirs} in another; they have no common table")
    if _identity(one) != _identity(other):
        raise ConfigError(f"one run is {_identity(one)}, another {_identity(other)}; they have no common table")


def _identity(result: Mapping[str, Any]) -> tuple[Any, ...]:
    server, machine = result.get("server") or {}, result.get("machine") or {}
    gpu = (machine.get("gpu") or "").partition(",")[0] or machine.get("cpu")
    return result["kind"], server.get("model"), server.get("attention_backend"), gpu


def _replay_rows(parts: Sequence[Part]) -> dict[str, Any]:
    runs: list[ArmRun] = []
    for part in parts:
        ours = list(_arm_runs(part))
        # Runs of the same cell are further repetitions; runs of other cells are paired with those that are there.
        again = {(run.arm, run.concurrency) for run in runs} & {(run.arm, run.concurrency) for run in ours}
        shift = 1 + max(run.repetition for run in runs) if again else 0
        for run in ours:
            run.repetition += shift
        runs += ours
    arms = tuple(arm for arm in Arm if any(run.arm is arm for run in runs))
    sweep = replay.Sweep(arms, tuple(sorted({run.concurrency for run in runs})))
    return {"rows": replay.rows(replay.SweepResult(runs), sweep)}


def _arm_runs(part: Part) -> Iterator[ArmRun]:
    """The runs of one part; how long each took stands in its rows, repetition by repetition."""
    cells: dict[tuple[str, int], dict[int, list[MeasuredTurn]]] = defaultdict(lambda: defaultdict(list))
    for line in part.turns:
        cells[line["arm"], line["concurrency"]][line["repetition"]].append(MeasuredTurn.from_json(line))
    rows = {(row["arm"], row["concurrency"]): row for row in part.result["rows"]}
    if set(rows) != set(cells) or any(len(rows[cell]["wall_s"]) != len(cells[cell]) for cell in cells):
        raise ConfigError("a result and the turns beside it are of different runs; give each result with its own turns")
    for (arm, concurrency), repetitions in cells.items():
        row = rows[arm, concurrency]
        for (repetition, turns), wall_s in zip(sorted(repetitions.items()), row["wall_s"], strict=True):
            yield ArmRun(turns, Arm(arm), concurrency, repetition, wall_s, row["pool_peak"])


def _breakeven_rows(parts: Sequence[Part]) -> dict[str, Any]:
    cells: dict[tuple[breakeven.Case, Arm], list[MeasuredTurn]] = defaultdict(list)
    for line in (line for part in parts for line in part.turns):
        cells[breakeven.Case(**line["case"]), Arm(line["arm"])].append(MeasuredTurn.from_json(line))
    measured = [breakeven.Measured(case, arm, tuple(turns)) for (case, arm), turns in cells.items()]
    return breakeven.outcome(measured)
