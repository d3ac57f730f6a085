import pytest
from thermostat_code import DEFAULT_C, Thermostat


@pytest.fixture
def thermostat():
    thermostat = Thermostat()
    thermostat.set_schedule(6, 21.0)
    thermostat.set_schedule(22, 16.0)
    return thermostat


def test_schedule(thermostat):
    assert [thermostat.target(hour) for hour in (5, 6, 21, 22)] == [16.0, 21.0, 21.0, 16.0]


def test_default_without_schedule():
    assert Thermostat().target(12) == DEFAULT_C


def test_a_changed_schedule_counts_at_once(thermostat):
    assert thermostat.target(8) == 21.0
    thermostat.set_schedule(7, 19.0)
    assert thermostat.target(8) == 19.0


def test_override_counts_at_once_and_ends(thermostat):
    assert thermostat.target(9) == 21.0
    thermostat.override(24.0, until_hour=11)
    assert thermostat.target(9) == 24.0
    assert thermostat.target(11) == 21.0


def test_an_override_that_ended_does_not_come_back_the_next_day(thermostat):
    thermostat.override(24.0, until_hour=11)
    assert thermostat.target(10) == 24.0
    assert thermostat.target(12) == 21.0
    assert thermostat.target(10) == 21.0


def test_boiler(thermostat):
    assert thermostat.update(8, 20.0)
    assert thermostat.update(8, 21.2)
    assert not thermostat.update(8, 21.6)
    assert not thermostat.update(8, 20.6)
