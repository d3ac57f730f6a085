"""The cost model behind Mode.AUTO."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leyline_agent.attribution import ModeQuestion
from leyline_agent.costs import CostFacts, CostModel, FidelityReport, choose, explain
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit
from leyline_agent.errors import ConfigError

AUTO = MessageEdit(3, "[cleared]", mode=Mode.AUTO)
FACTS = CostFacts(tokens_after=20_000, tokens_removed=4_000, tokens_inserted=20)


def test_a_long_tail_is_amortized() -> None:
    assert choose(AUTO, FACTS) is Mode.AMORTIZE


def test_a_short_tail_is_prefilled_because_exact_is_better_than_cheap_by_a_hair() -> None:
    assert choose(AUTO, replace(FACTS, tokens_after=50)) is Mode.FORGET


def test_an_edit_that_does_not_pay_is_left() -> None:
    assert choose(AUTO, replace(FACTS, turns_left=0)) is None
    assert choose(AUTO, replace(FACTS, tokens_removed=10)) is None
    assert choose(AUTO, replace(FACTS, amortize_available=False)) is None


def test_without_amortize_many_turns_left_make_forgetting_pay() -> None:
    assert choose(AUTO, replace(FACTS, amortize_available=False, turns_left=200)) is Mode.FORGET


def test_a_cold_cache_makes_an_exact_edit_free() -> None:
    assert choose(AUTO, replace(FACTS, suffix_is_cold=True, turns_left=0.01)) is Mode.FORGET


@pytest.mark.parametrize(("agreement", "mode"), [(1.0, Mode.AMORTIZE), (0.9, Mode.AMORTIZE), (0.56, None)])
def test_a_model_that_does_not_keep_to_itself_is_not_amortized(agreement: float, mode: Mode | None) -> None:
    assert choose(AUTO, replace(FACTS, fidelity=FidelityReport(agreement, 16))) is mode


@pytest.mark.parametrize("mode", [Mode.AMORTIZE, Mode.FORGET])
def test_a_mode_that_was_set_stays(mode: Mode) -> None:
    assert choose(replace(AUTO, mode=mode), replace(FACTS, turns_left=0)) is mode


def test_the_break_even_lies_where_the_numbers_say() -> None:
    """FORGET costs 1,020 tokens at 1,000 a second; that is what 1,020 cached reads a turn save in ten turns."""
    facts = CostFacts(1_000, 0, 20, prefill_tokens_per_s=1_000, turns_left=10, amortize_available=False)
    net = 1_020
    assert choose(AUTO, replace(facts, tokens_removed=20 + net + 1)) is Mode.FORGET
    assert choose(AUTO, replace(facts, tokens_removed=20 + net - 1)) is None
    assert explain(AUTO, replace(facts, tokens_removed=20 + net)).forget_s == pytest.approx(1.02)


def test_choices_explain_themselves() -> None:
    assert "saves" in explain(AUTO, FACTS).why
    assert "not shorten" in explain(AUTO, replace(FACTS, tokens_removed=0)).why
    assert "does not amortize" in explain(AUTO, replace(FACTS, amortize_available=False)).why


def test_measured_speed_moves_the_choice() -> None:
    model = CostModel(turns_left=1, amortize_available=False)
    assert choose(AUTO, model.facts(2_000, 4_000)) is None
    for _ in range(20):
        model = model.measured(prefilled_tokens=10_000, seconds=0.1)
    assert model.prefill_tokens_per_s == pytest.approx(100_000, rel=0.01)
    assert model.measured(10, 1.0) is model, "a turn with few tokens is mostly overhead"


def test_the_managers_question_is_answered_by_the_cheaper_mode() -> None:
    model = CostModel()
    assert model.choose_mode(ModeQuestion((AUTO,), start=100, replaced=20, downstream=20_000)) is Mode.AMORTIZE
    assert model.choose_mode(ModeQuestion((AUTO,), start=100, replaced=20, downstream=30)) is Mode.FORGET
    off = CostModel(fidelity=FidelityReport(0.1, 10))
    assert off.choose_mode(ModeQuestion((AUTO,), start=100, replaced=20, downstream=20_000)) is Mode.FORGET


@pytest.mark.parametrize("bad", [{"turns_left": -1}, {"prefill_tokens_per_s": 0}, {"cached_read_cost": -0.1}])
def test_bad_values_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        CostModel(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="agreement"):
        FidelityReport(1.2, 3)
