"""Results as tables and pictures, with cells that were not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leyline_agent.bench import replay
from leyline_agent.bench.arms import Arm
from leyline_agent.bench.breakeven import Case, Measured, outcome
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.results import read_json
from leyline_agent.bench.run import ArmRun
from leyline_agent.bench.tables import markdown, result_table
from leyline_agent.errors import ConfigError

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SHOWN = ("replay-*.json", "breakeven-*.json", "tasks-*.json", "peers-*.json", "traces.json")


def turns(ttft_ms: float, *, edited: bool = True) -> list[MeasuredTurn]:
    return [
        MeasuredTurn(f"s{n}", 1, edited, prompt_tokens=1000, prefilled_tokens=600, ttft_ms=ttft_ms, e2e_ms=900)
        for n in range(3)
    ]


def replay_result(cells: dict[tuple[Arm, int], list[MeasuredTurn]]) -> dict[str, Any]:
    runs = [ArmRun(some, arm, concurrency, 0, wall_s=1.0) for (arm, concurrency), some in cells.items()]
    sweep = replay.Sweep(concurrencies=(1, 8))
    return {"kind": "replay", "config": {}, "rows": replay.rows(replay.SweepResult(runs), sweep)}


def breakeven_result() -> dict[str, Any]:
    """Two lengths of R, of which one was measured at one place only, and one case that failed."""
    out = []
    for case, plain_ms, spliced_ms in (
        (Case(8, 1000, 16), 300.0, 100.0), (Case(1000, 8, 16), 50.0, 100.0), (Case(8, 1000, 256), 300.0, 150.0),
    ):  # fmt: skip
        for arm, ms in ((Arm.REPREFILL, plain_ms), (Arm.AMORTIZE, spliced_ms)):
            turn = MeasuredTurn("c", 1, True, prompt_tokens=1500, prefilled_tokens=600, rotated_tokens=9, ttft_ms=ms)
            out.append(Measured(case, arm, (turn, turn)))
    failed = MeasuredTurn("c", 1, True, error="timeout")
    out += [Measured(Case(500, 508, 16), arm, (failed,)) for arm in (Arm.REPREFILL, Arm.AMORTIZE)]
    return {"kind": "breakeven", "config": {}, **outcome(out)}


REPLAYS = {
    "arms missing at one concurrency": replay_result(
        {(Arm.NONE, 1): turns(50, edited=False), (Arm.REPREFILL, 1): turns(800), (Arm.AMORTIZE, 8): turns(300)}
    ),
    "one arm": replay_result({(Arm.AMORTIZE, 1): turns(300)}),
    "every turn failed": replay_result({(Arm.REPREFILL, 1): [MeasuredTurn("s", 0, True, error="timeout")]}),
}


@pytest.mark.parametrize("result", [*REPLAYS.values(), breakeven_result()], ids=[*REPLAYS, "breakeven"])
def test_a_picture_is_drawn_of_what_is_there(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from leyline_agent.bench.result_plots import plot_result

    file = plot_result(result, tmp_path / "pictures" / "result.png")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 10_000


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from leyline_agent.bench.result_plots import plot_result

    with pytest.raises(ConfigError, match="no picture of a 'tasks'"):
        plot_result({"kind": "tasks", "rows": [{}]}, tmp_path / "x.png")
    with pytest.raises(ConfigError, match="no rows"):
        plot_result({"kind": "replay", "rows": []}, tmp_path / "x.png")


def test_the_table_of_a_case_that_failed_says_so() -> None:
    lines = markdown(result_table(breakeven_result())).splitlines()
    assert len(lines) == 2 + 4
    assert [line for line in lines if "error" in line] == [lines[-1]]
    assert "3 of 3" in str(result_table(breakeven_result()).caption)


@pytest.mark.parametrize(
    "file", sorted(path for form in SHOWN for path in RESULTS.glob(form)), ids=lambda file: file.stem
)
def test_committed_results_have_a_table_and_their_circumstances(file: Path) -> None:
    result = read_json(file)
    assert {"time", "machine", "versions", "commit", "config"} <= set(result)
    console = Console(width=100, record=True, quiet=True)
    console.print(result_table(result))
    assert len(markdown(result_table(result)).splitlines()) == 2 + len(result["rows"])
