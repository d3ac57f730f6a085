"""A small configuration format: `[section]` headers, `key = value` lines, `#` comments, quotes, and lists."""

from __future__ import annotations

from typing import Any

Settings = dict[str, dict[str, Any]]


class SettingsError(ValueError):
    pass


def parse(text: str) -> Settings:
    """Sections with their values; keys before the first header are in section ""."""
    settings: Settings = {"": {}}
    section = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        if line.startswith("["):
            if not line.endswith("]"):
                raise SettingsError(f"line {number}: a header ends with ]")
            section = line[1:-1].strip()
            settings.setdefault(section, {})
            continue
        parts = line.split("=")
        if len(parts) != 2:
            raise SettingsError(f"line {number}: no key = value")
        settings[section][parts[0].strip()] = value_of(parts[1].strip())
    return settings


def value_of(text: str) -> Any:
    """Text as a value: quoted text, a list in brackets, yes or no, a number, or plain text."""
    if text.startswith("[") and text.endswith("]"):
        return [value_of(part.strip()) for part in text[1:-1].split(",")]
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text in ("yes", "no"):
        return text == "yes"
    if text.isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
