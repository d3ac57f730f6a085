"""Break-even cases, their rows, and how AUTO is judged."""

from __future__ import annotations

import pytest

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.breakeven import Case, Measured, cases, fitted, outcome, script_of
from leyline_agent.bench.measured import MeasuredTurn

NEAR, FAR = Case(4000, 8, 16), Case(8, 4000, 16)


def turn(ttft_ms: float, **facts: object) -> MeasuredTurn:
    return MeasuredTurn("case", 1, True, prompt_tokens=4600, ttft_ms=ttft_ms, **facts)  # type: ignore[arg-type]


def measured(case: Case, plain_ms: list[float], spliced_ms: list[float]) -> list[Measured]:
    """Ten thousand tokens a second, and 20 ms a splice."""
    plain = tuple(turn(ms, prefilled_tokens=round(10 * ms)) for ms in plain_ms)
    spliced = tuple(turn(ms, prefilled_tokens=80, rotated_tokens=4000, helper_ms=20.0) for ms in spliced_ms)
    return [Measured(case, Arm.REPREFILL, plain), Measured(case, Arm.AMORTIZE, spliced)]


def test_cases_cover_the_grid_and_keep_tokens_on_both_sides() -> None:
    some = list(cases([1024, 65536], [0, 0.5, 1], [16, 256]))
    assert len(some) == 12
    assert {case.prefix_tokens + case.removed_tokens + case.downstream_tokens for case in some} == {1024, 65536}
    assert min(min(case.prefix_tokens, case.downstream_tokens) for case in some) == 8
    assert [round(case.position, 2) for case in some[6::2]] == [0, 0.5, 1]


def test_a_case_is_one_edit_of_a_served_prompt() -> None:
    first, second = script_of(Case(100, 200, 16), words_per_token=1.0, seed=0).steps
    assert not first.edited
    assert [len(message["content"].split()) for message in first.view[:3]] == [102, 512, 200]
    assert len(second.view[1]["content"].split()) == 16
    assert second.view[0] == first.view[0]
    assert second.view[2] == first.view[2]


def test_rows_tell_ratios_with_their_ends_and_the_faster_way() -> None:
    found = outcome(measured(FAR, [400, 500, 420], [100, 100, 140]) + measured(NEAR, [60, 60, 60], [80, 80, 80]))
    far, near = found["rows"]
    assert (far["times_lower"], far["times_lower_spread"]) == (4.0, [3.0, 5.0])
    assert (far["faster"], near["faster"]) == ("amortize", "forget")
    assert far["ttft_ms_spread"]["reprefill"] == [400, 500]
    assert (far["repetitions"], far["removed_tokens"]) == (3, 512)


def test_auto_is_fed_from_the_server_and_judged_against_what_was_measured() -> None:
    some = measured(FAR, [400, 400], [100, 100]) + measured(NEAR, [60, 60], [50, 50])
    assert fitted(some).prefill_tokens_per_s == pytest.approx(10_000)
    assert fitted(some).splice_overhead_s == pytest.approx(0.02)
    # AUTO amortizes with much behind the edit, and not with next to nothing, where it was 10 ms faster this time.
    assert outcome(some)["auto"] == {"cases": 2, "auto_is_faster_way": 1, "auto_time_over_best": round(160 / 150, 4)}


def test_a_turn_that_failed_is_no_fast_turn() -> None:
    plain, spliced = measured(FAR, [400, 400], [100, 100])
    broken = Measured(FAR, Arm.AMORTIZE, (spliced.turns[0], turn(0.0, error="timeout")))
    (row,) = outcome([plain, broken])["rows"]
    assert (row["times_lower"], row["repetitions"], row["errors"]) == (4.0, 1, ["timeout"])
    none = Measured(FAR, Arm.AMORTIZE, (turn(0.0, error="timeout"),) * 2)
    (row,) = outcome([plain, none])["rows"]
    assert (row["times_lower"], row["faster"], row["ttft_ms"]["amortize"]) == (None, None, None)
