"""Numbers from repeated measurements: percentiles, bootstrap intervals, paired tests. Standard library only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

RESAMPLES = 2000
_LEVEL = 0.95

Unit = TypeVar("Unit")


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> list[float]:
        """`[value, low, high]`."""
        return [round(number, 5) for number in (self.value, self.low, self.high)]

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, linear between neighbours. NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def bootstrap(
    units: Sequence[Unit], estimate: Callable[[Sequence[Unit]], float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """`estimate(units)` with a percentile-bootstrap interval. Units are drawn whole: make one of what hangs together.

    With one unit there is nothing to draw from, and the interval is the value.
    """
    value = estimate(units)
    if len(units) < 2:
        return Interval(value, value, value)
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    drawn = (estimate(rng.choices(units, k=len(units))) for _ in range(resamples))
    ordered = sorted(number for number in drawn if not math.isnan(number))
    if not ordered:
        return Interval(value, math.nan, math.nan)
    tail = (1 - _LEVEL) / 2
    return Interval(value, percentile(ordered, tail), percentile(ordered, 1 - tail))


def pair(one: Mapping[Hashable, Unit], other: Mapping[Hashable, Unit]) -> list[tuple[Unit, Unit]]:
    """What both have, key by key."""
    return [(one[key], other[key]) for key in one if key in other]


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p-value that `wins` against `losses` in paired trials came from a fair coin; 1 without either."""
    trials = wins + losses
    if not trials:
        return 1.0
    tail = sum(math.comb(trials, k) for k in range(min(wins, losses) + 1)) / 2**trials
    return min(1.0, 2.0 * float(tail))


def wilson(successes: int, trials: int) -> Interval:
    """A share with its 95 % Wilson interval."""
    if not trials:
        return Interval(math.nan, 0.0, 1.0)
    z, share = 1.959964, successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
