"""Alarms at a wall-clock time in a time zone, daylight saving included."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from zoneinfo import ZoneInfo


@dataclass(frozen=True)
class Alarm:
    """Rings every day at `at` on the clocks of `zone`."""

    at: time
    zone: str

    def on(self, day: date) -> datetime:
        """The moment it rings on a day of its own zone."""
        return datetime.combine(day, self.at, tzinfo=ZoneInfo(self.zone))

    def next_after(self, now: datetime) -> datetime:
        """The first moment after `now`, which may be in any zone."""
        today = self.on(now.date())
        if today > now:
            return today
        return today + timedelta(hours=24)

    def rings_between(self, start: datetime, end: datetime) -> int:
        """How often it rings in [start, end)."""
        count = 0
        moment = self.on(start.date())
        while moment < end:
            if moment >= start:
                count += 1
            moment = self.on(moment.date() + timedelta(days=1))
        return count


def wait(alarm: Alarm, now: datetime) -> timedelta:
    """How long it is from `now` until the alarm rings."""
    return alarm.next_after(now) - now
