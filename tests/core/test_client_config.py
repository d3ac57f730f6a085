"""Settings: known, checked, and read from the environment in one place."""

from __future__ import annotations

import pytest

from leyline_agent.config import Config
from leyline_agent.directives import Mode
from leyline_agent.errors import ConfigError


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYLINE_ENABLED", "off")
    monkeypatch.setenv("LEYLINE_TEMPLATE_MODE", "forget")
    monkeypatch.setenv("LEYLINE_MAX_TURNS", "7")
    monkeypatch.setenv("LEYLINE_CACHE_TTL_S", "2.5")
    monkeypatch.setenv("LEYLINE_TOKENIZER", "")
    expected = Config(enabled=False, template_mode=Mode.FORGET, max_turns=7, cache_ttl_s=2.5)
    assert Config.from_env() == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"nonsense": 1},
        {"enabled": "perhaps"},
        {"max_turns": "many"},
        {"max_turns": 0},
        {"template_mode": "quickly"},
        {"probe_timeout_s": -1.0},
    ],
)
def test_a_bad_setting_is_an_error_that_names_it(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Config.from_mapping(settings)
