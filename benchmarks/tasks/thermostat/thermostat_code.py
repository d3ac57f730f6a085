"""A thermostat with a schedule, an override by hand, and a cached target temperature."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_C = 18.0


@dataclass
class Thermostat:
    """Hours count from 0 to 23. The hysteresis keeps the boiler from switching on and off all the time."""

    schedule: dict[int, float] = field(default_factory=dict)
    hysteresis_c: float = 0.5
    heating: bool = False
    _override: tuple[float, int] | None = None
    _cache: dict[int, float] = field(default_factory=dict)

    def set_schedule(self, hour: int, target_c: float) -> None:
        """From this hour on, until the next entry, the target is `target_c`."""
        self.schedule[hour] = target_c

    def override(self, target_c: float, until_hour: int) -> None:
        """Use this target up to, but not including, `until_hour`."""
        self._override = (target_c, until_hour)

    def target(self, hour: int) -> float:
        if hour not in self._cache:
            self._cache[hour] = self._compute(hour)
        return self._cache[hour]

    def update(self, hour: int, measured_c: float) -> bool:
        """Whether the boiler should run now."""
        target = self.target(hour)
        if measured_c < target - self.hysteresis_c:
            self.heating = True
        elif measured_c > target + self.hysteresis_c:
            self.heating = False
        return self.heating

    def _compute(self, hour: int) -> float:
        if self._override is not None:
            target_c, until_hour = self._override
            if hour < until_hour:
                return target_c
        passed = [entry for entry in self.schedule if entry <= hour]
        if passed:
            return self.schedule[max(passed)]
        # Before the first entry of the day, the last one of the day before is in force.
        return self.schedule[max(self.schedule)] if self.schedule else DEFAULT_C
