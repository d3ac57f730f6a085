"""A small replay on a real server, judged by token counts alone: what `leyline bench replay` measures, in CI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.conversation import Settings
from leyline_agent.bench.replay import Sweep, SweepResult, rows, run_sweep
from leyline_agent.bench.script import write_script
from leyline_agent.bench.target import Target
from leyline_agent.bench.workload import FIRST, Shape, generate
from leyline_agent.policies import DropSuperseded
from servers import CpuServer

pytestmark = pytest.mark.server

SHAPE = Shape(sessions=3, turns=4, system_tokens=200, turn_tokens=480)
CONCURRENCIES = (1, 3)


@pytest.fixture(scope="module")
def played(cpu_server: Callable[..., CpuServer]) -> tuple[Sweep, SweepResult]:
    """All arms at two concurrencies on a tiny model, a token a byte."""
    server = cpu_server("llama", "--max-total-tokens", "65536")
    target = Target.of(server.url)
    scripts = [write_script(DropSuperseded(), t, first=FIRST) for t in generate(SHAPE, target.count_tokens)]
    sweep = Sweep(concurrencies=CONCURRENCIES, sessions_at={1: 1})
    return sweep, run_sweep(target, sweep, scripts, Settings(target.base_url, target.model, output_tokens=2))


@pytest.fixture
def table(played: tuple[Sweep, SweepResult]) -> dict[tuple[int, Arm], dict[str, Any]]:
    """The rows by concurrency and arm."""
    sweep, result = played
    return {(row["concurrency"], Arm(row["arm"])): row for row in rows(result, sweep)}


def test_every_turn_of_every_arm_was_served(table: dict[tuple[int, Arm], dict[str, Any]]) -> None:
    assert set(table) == {(c, arm) for c in CONCURRENCIES for arm in Arm}
    for (concurrency, _), row in table.items():
        assert row["errors"] == 0
        assert row["fallbacks"] == {}
        assert row["turns"] == (4 if concurrency == 1 else 12)
        assert row["edited_turns"] == (3 if concurrency == 1 else 9)


def test_counts_do_not_depend_on_concurrency(played: tuple[Sweep, SweepResult]) -> None:
    _, result = played
    for arm in Arm:
        alone, together = result.of(arm, 1)[0].turns, result.of(arm, 3)[0].turns[:4]
        assert [turn.prompt_tokens for turn in alone] == [turn.prompt_tokens for turn in together]
        assert [turn.all_prefilled for turn in alone] == [turn.all_prefilled for turn in together]


def test_prefilled_tokens_of_every_arm(played: tuple[Sweep, SweepResult]) -> None:
    _, result = played
    turns = {arm: result.of(arm, 3)[0].turns for arm in Arm}
    for plain, amortize, prepare, forget in zip(
        *(turns[arm] for arm in (Arm.REPREFILL, Arm.AMORTIZE, Arm.PREPARE, Arm.FORGET)), strict=True
    ):
        assert plain.prompt_tokens == amortize.prompt_tokens == prepare.prompt_tokens == forget.prompt_tokens
        assert forget.prefilled_tokens == plain.prefilled_tokens
        # What was sampled and what was recorded may begin with the same byte; the last token of a base is prefilled.
        assert abs(amortize.replacement_tokens + amortize.new_tokens - amortize.prefilled_tokens) <= 1
        if amortize.edited:
            assert amortize.prefilled_tokens < plain.prefilled_tokens
            assert amortize.rotated_tokens > 0
            # The splice was done ahead: the turn itself prefills only what is new to it.
            assert prepare.prefilled_tokens < amortize.prefilled_tokens
            assert prepare.prepared_tokens > 0
            assert prepare.all_prefilled <= amortize.prefilled_tokens + 16


def test_hit_rates(table: dict[tuple[int, Arm], dict[str, Any]]) -> None:
    for concurrency in CONCURRENCIES:
        for arm in (Arm.AMORTIZE, Arm.PREPARE):
            paired = table[concurrency, arm]["against_reprefill"]
            assert paired["hit_rate_points"][0] > 25
        assert table[concurrency, Arm.FORGET]["against_reprefill"]["hit_rate_points"] == [0.0, 0.0, 0.0]


def test_a_budget_leaves_out_blocks_and_says_so(played: tuple[Sweep, SweepResult]) -> None:
    sweep, _ = played
    hurried = Sweep(sweep.arms, sweep.concurrencies, budget_s=-1.0)
    result = run_sweep(Target("http://127.0.0.1:9", "none"), hurried, [], Settings("http://127.0.0.1:9/v1"))
    assert not result.runs
    assert len(result.left_out) == len(list(Arm)) * 2
