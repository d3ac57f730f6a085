import pytest
from scheduler_code import CycleError, Job, Scheduler


def scheduler(*jobs):
    made = Scheduler()
    for job in jobs:
        made.add(job)
    return made


def test_a_larger_priority_comes_earlier():
    assert scheduler(Job("low", 1), Job("high", 9), Job("mid", 5)).order() == ["high", "mid", "low"]


def test_equal_priorities_stay_in_the_order_they_came():
    assert scheduler(Job("zeta"), Job("alpha"), Job("mu")).order() == ["zeta", "alpha", "mu"]


def test_dependencies_come_first():
    assert scheduler(Job("deploy", 9, ("test",)), Job("test", 1, ("build",)), Job("build")).order() == [
        "build",
        "test",
        "deploy",
    ]


def test_all_dependencies_are_waited_for():
    made = scheduler(Job("ship", 9, ("pack", "bill")), Job("pack", 5), Job("bill", 1))
    assert made.order() == ["pack", "bill", "ship"]


def test_a_job_that_became_ready_later_still_came_first():
    made = scheduler(Job("b", 0, ("root",)), Job("root", 5), Job("c"))
    assert made.order() == ["root", "b", "c"]


def test_unknown_dependency():
    with pytest.raises(KeyError, match="ghost"):
        scheduler(Job("a", 0, ("ghost",))).order()


def test_circle():
    with pytest.raises(CycleError):
        scheduler(Job("a", 0, ("b",)), Job("b", 0, ("a",))).order()
