from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from alarm_code import Alarm, wait

BERLIN = ZoneInfo("Europe/Berlin")
AUCKLAND = ZoneInfo("Pacific/Auckland")
MORNING = Alarm(time(7, 0), "Europe/Berlin")


def test_on():
    assert MORNING.on(date(2026, 1, 10)) == datetime(2026, 1, 10, 6, 0, tzinfo=UTC)
    assert MORNING.on(date(2026, 7, 10)) == datetime(2026, 7, 10, 5, 0, tzinfo=UTC)


def test_next_today_and_tomorrow():
    assert MORNING.next_after(datetime(2026, 1, 10, 5, 0, tzinfo=BERLIN)) == datetime(2026, 1, 10, 7, 0, tzinfo=BERLIN)
    assert MORNING.next_after(datetime(2026, 1, 10, 7, 0, tzinfo=BERLIN)) == datetime(2026, 1, 11, 7, 0, tzinfo=BERLIN)


def test_now_in_another_zone():
    # In Auckland it is the 11th already; in Berlin the alarm of the 10th has not rung.
    now = datetime(2026, 1, 11, 1, 0, tzinfo=AUCKLAND)
    alarm = Alarm(time(14, 0), "Europe/Berlin")
    assert alarm.next_after(now) == datetime(2026, 1, 10, 14, 0, tzinfo=BERLIN)


def test_wait_over_the_change_to_summer_time():
    # The night of 29 March 2026 has one hour less.
    now = datetime(2026, 3, 28, 7, 0, tzinfo=BERLIN)
    assert wait(MORNING, now) == timedelta(hours=23)


def test_wait_over_the_change_to_winter_time():
    now = datetime(2026, 10, 24, 8, 0, tzinfo=BERLIN)
    assert wait(MORNING, now) == timedelta(hours=24)


def test_rings_between():
    start = datetime(2026, 3, 27, 6, 0, tzinfo=UTC)
    assert MORNING.rings_between(start, start + timedelta(days=3)) == 4
    late = datetime(2026, 1, 11, 1, 0, tzinfo=AUCKLAND)
    assert Alarm(time(14, 0), "Europe/Berlin").rings_between(late, late + timedelta(hours=6)) == 1
