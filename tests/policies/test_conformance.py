"""Every policy keeps the promises of `check_policy`, bare and in each wrapper, on made-up and recorded histories."""

from __future__ import annotations

import inspect

import pytest

from leyline_agent import policies
from leyline_agent.directives import Mode
from leyline_agent.policies.factory import available, policy_class, wrappers
from leyline_agent.replay import replay
from leyline_agent.testing import check_policy, sample_histories
from policy_table import DEFAULT_MODES, POLICIES, WRAPPERS, recorded_histories


@pytest.mark.parametrize("name", POLICIES)
def test_bare_on_samples(name: str) -> None:
    stability = check_policy(POLICIES[name], sample_histories(20))
    assert (stability.edits > 0) == (name != "keep_all"), "the samples must give every policy something to do"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_on_samples(wrapper: str, name: str) -> None:
    check_policy(WRAPPERS[wrapper](POLICIES[name]), sample_histories(5, seed=1), may_undo=wrapper == "restore")


@pytest.mark.parametrize("name", POLICIES)
def test_bare_on_recorded_histories(name: str) -> None:
    check_policy(POLICIES[name], recorded_histories())


def test_every_policy_has_a_row() -> None:
    in_table = {type(policy) for policy in POLICIES.values()}
    assert in_table == {policy_class(name) for name in available()}


def test_every_wrapper_has_a_column() -> None:
    in_table = {type(wrap(POLICIES["truncate"])) for wrap in WRAPPERS.values()}
    offered = {getattr(policies, name) for name in policies.__all__}
    holds_policies = {c for c in offered if inspect.isclass(c) and _holds_a_policy(c)}
    assert in_table == holds_policies
    assert {policy_class(name) for name in wrappers()} <= in_table


def _holds_a_policy(cls: type[object]) -> bool:
    return bool({"policy", "policies"} & set(inspect.signature(cls).parameters))


@pytest.mark.parametrize("name", POLICIES)
def test_default_modes_are_safe(name: str) -> None:
    policy = POLICIES[name]
    modes = {edit.mode for history in sample_histories(20) for turn in replay(policy, history) for edit in turn.edits}
    assert modes <= {DEFAULT_MODES.get(type(policy), Mode.AMORTIZE)}


@pytest.mark.parametrize("name", [*available()[1:], *wrappers()])
def test_docstrings_state_the_cost_to_the_cache(name: str) -> None:
    assert "Cache:" in (inspect.getdoc(policy_class(name)) or "")
