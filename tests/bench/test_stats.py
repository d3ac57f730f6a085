"""Numbers that can be checked by hand or in a textbook."""

from __future__ import annotations

import math

import pytest

from leyline_agent.bench.stats import bootstrap, mcnemar, percentile, wilson


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_percentile(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(value)


def test_percentile_of_nothing() -> None:
    assert math.isnan(percentile([], 0.5))


def test_bootstrap_of_equal_units_has_no_width() -> None:
    interval = bootstrap([2.0] * 10, lambda units: sum(units) / len(units))
    assert (interval.value, interval.low, interval.high) == (2.0, 2.0, 2.0)


def test_bootstrap_covers_the_mean_of_a_spread() -> None:
    interval = bootstrap([float(number) for number in range(100)], lambda units: sum(units) / len(units))
    assert interval.value == 49.5
    # The standard error of this mean is 2.9.
    assert 42 < interval.low < 45
    assert 54 < interval.high < 57


def test_bootstrap_is_repeatable() -> None:
    units = [1.0, 5.0, 2.0, 8.0]
    assert bootstrap(units, max) == bootstrap(units, max)


@pytest.mark.parametrize(("wins", "losses", "p"), [(9, 5, 0.424), (0, 0, 1.0), (5, 5, 1.0), (6, 0, 0.03125)])
def test_mcnemar(wins: int, losses: int, p: float) -> None:
    # 9 wins against 5 losses are the paper's task pairs.
    assert mcnemar(wins, losses) == pytest.approx(p, abs=1e-3)
    assert mcnemar(losses, wins) == mcnemar(wins, losses)


def test_wilson() -> None:
    interval = wilson(10, 32)
    assert interval.value == pytest.approx(0.3125)
    assert (interval.low, interval.high) == (pytest.approx(0.180, abs=1e-3), pytest.approx(0.486, abs=1e-3))
    assert wilson(0, 0).high == 1.0
