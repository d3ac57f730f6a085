"""Several runs as one result: the same rows as one long run gives, from the files that runs leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyline_agent.bench import breakeven, replay
from leyline_agent.bench.arms import Arm
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.merge import Part, merge
from leyline_agent.bench.results import document, read_json, read_turns, write_json, write_turns
from leyline_agent.bench.run import ArmRun
from leyline_agent.cli import main
from leyline_agent.errors import ConfigError

TTFT_MS = {Arm.REPREFILL: 800.0, Arm.AMORTIZE: 200.0}


def arm_run(arm: Arm, repetition: int, *, concurrency: int = 2, sessions: int = 3) -> ArmRun:
    turns = [
        MeasuredTurn(
            f"session-{session}", turn, bool(turn), prompt_tokens=1000 * (turn + 1), ttft_ms=TTFT_MS[arm] + session,
            prefilled_tokens=900 if arm is Arm.REPREFILL else 100 + repetition, fallbacks=("drift",) * turn,
        )
        for session in range(sessions)
        for turn in range(2)
    ]  # fmt: skip
    return ArmRun(turns, arm, concurrency, repetition, wall_s=10.0 + repetition, pool_peak=500)


def replayed(tmp_path: Path, name: str, runs: list[ArmRun], **config: Any) -> Part:
    """What `leyline bench replay` writes for these runs, read back."""
    arms = tuple(dict.fromkeys(run.arm for run in runs))
    sweep = replay.Sweep(arms, tuple(dict.fromkeys(run.concurrency for run in runs)))
    rows = replay.rows(replay.SweepResult(runs), sweep)
    settings = {"policy": "drop_superseded", "output_tokens": 16, "arms": list(arms), **config}
    write_json(tmp_path / f"{name}.json", document("replay", settings, rows))
    facts = [{"arm": run.arm, "concurrency": run.concurrency, "repetition": run.repetition} for run in runs]
    lines = [(fact, turn) for fact, run in zip(facts, runs, strict=True) for turn in run.turns]
    write_turns(tmp_path / f"{name}.jsonl", lines)
    return Part(read_json(tmp_path / f"{name}.json"), read_turns(tmp_path / f"{name}.jsonl"))


def test_repetitions_of_two_runs_are_as_those_of_one(tmp_path: Path) -> None:
    long = [arm_run(arm, repetition) for repetition in range(3) for arm in TTFT_MS]
    first, second = [run for run in long if run.repetition < 2], [arm_run(arm, 0) for arm in TTFT_MS]
    for run, whole in zip(second, long[4:], strict=True):
        run.turns, run.wall_s = whole.turns, whole.wall_s
    joined = merge([replayed(tmp_path, "a", first), replayed(tmp_path, "b", second)])
    assert joined["rows"] == replayed(tmp_path, "whole", long).result["rows"]
    assert {row["repetitions"] for row in joined["rows"]} == {3}
    assert [run["config"]["arms"] for run in joined["runs"]] == [["reprefill", "amortize"]] * 2


def test_arms_of_two_servers_are_paired(tmp_path: Path) -> None:
    stock = [arm_run(Arm.REPREFILL, repetition) for repetition in range(2)]
    ours = [arm_run(Arm.AMORTIZE, repetition) for repetition in range(2)]
    joined = merge([replayed(tmp_path, "stock", stock), replayed(tmp_path, "ours", ours)])
    (row,) = [row for row in joined["rows"] if row["arm"] == "amortize"]
    assert row["against_reprefill"]["sessions"] == 6
    assert row["against_reprefill"]["ttft_edited_times_lower"][0] == pytest.approx(801 / 201, abs=1e-5)


def test_a_concurrency_that_one_run_lacks_comes_from_another(tmp_path: Path) -> None:
    first = [arm_run(Arm.REPREFILL, 0, concurrency=c) for c in (2, 4)] + [arm_run(Arm.AMORTIZE, 0)]
    second = [arm_run(Arm.AMORTIZE, 0, concurrency=4)]
    joined = merge([replayed(tmp_path, "first", first), replayed(tmp_path, "second", second)])
    paired = {row["concurrency"]: row["against_reprefill"] for row in joined["rows"] if row["arm"] == "amortize"}
    assert {concurrency: row["sessions"] for concurrency, row in paired.items()} == {2: 3, 4: 3}


def test_cases_of_breakeven_runs_come_together(tmp_path: Path) -> None:
    def part(name: str, case: breakeven.Case, ttft_ms: float) -> Part:
        measured = [
            breakeven.Measured(
                case,
                arm,
                (MeasuredTurn("c", 1, True, prompt_tokens=9, prefilled_tokens=600, rotated_tokens=9, ttft_ms=ms),),
            )
            for arm, ms in ((Arm.REPREFILL, ttft_ms), (Arm.AMORTIZE, 100.0))
        ]
        outcome = breakeven.outcome(measured)
        write_json(tmp_path / f"{name}.json", document("breakeven", {"lengths": name}, outcome.pop("rows"), **outcome))
        write_turns(tmp_path / f"{name}.jsonl", breakeven.turn_lines(measured))
        return Part(read_json(tmp_path / f"{name}.json"), read_turns(tmp_path / f"{name}.jsonl"))

    near, far = breakeven.Case(100, 400, 16), breakeven.Case(100, 4000, 16)
    joined = merge([part("a", near, 50.0), part("b", far, 400.0), part("c", far, 600.0)])
    assert [(row["downstream_tokens"], row["repetitions"]) for row in joined["rows"]] == [(400, 1), (4000, 2)]
    assert [row["times_lower"] for row in joined["rows"]] == [0.5, 5.0]
    assert joined["rows"][1]["times_lower_spread"] == [4.0, 6.0]
    assert joined["auto"]["cases"] == 2


def test_runs_that_measured_different_things_are_refused(tmp_path: Path) -> None:
    one = replayed(tmp_path, "a", [arm_run(Arm.REPREFILL, 0)])
    with pytest.raises(ConfigError, match="output_tokens is 16 in one run and 4"):
        merge([one, replayed(tmp_path, "b", [arm_run(Arm.REPREFILL, 0)], output_tokens=4)])
    other = Part({**one.result, "server": {"model": "another"}}, one.turns)
    with pytest.raises(ConfigError, match="another"):
        merge([one, other])
    with pytest.raises(ConfigError, match="its own turns"):
        merge([Part(one.result, replayed(tmp_path, "c", [arm_run(Arm.AMORTIZE, 0)]).turns)])


def test_the_command_wants_turns_beside_every_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replayed(tmp_path, "a", [arm_run(Arm.REPREFILL, 0)])
    result, turns, out = (str(tmp_path / name) for name in ("a.json", "a.jsonl", "out.json"))
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "merge", result, "--json", out])
    assert "TURNS.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "merge", result, turns, "--json", out])
    assert read_json(Path(out))["rows"][0]["arm"] == "reprefill"
