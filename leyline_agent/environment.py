"""The environment variables of the command line and the server; those of the client are the fields of `config.Config`.

| variable | meaning |
|---|---|
| `LEYLINE_CACHE` | folder for converted models and logs; default `~/.cache/leyline` |
| `LEYLINE_DEBUG` | `1`: the command line shows whole tracebacks |
| `LEYLINE_ALLOW_SGLANG_VERSION` | `1`: start an SGLang version that the plugin was not checked with |
| `LEYLINE_SERVER_<FIELD>` | a field of the server's settings, `integrations/sglang/settings.py` |
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for what is made once and kept; it may not exist yet."""
    return Path(os.environ.get("LEYLINE_CACHE") or "~/.cache/leyline").expanduser()


def debug() -> bool:
    """Tell whether errors are to be shown with their traceback."""
    return os.environ.get("LEYLINE_DEBUG", "") not in {"", "0"}


def client_settings(fields: Iterable[str]) -> dict[str, str]:
    """Return the text of `LEYLINE_<FIELD>` for each of `fields` that is set and not empty."""
    return _settings("LEYLINE_", fields)


def server_settings(fields: Iterable[str]) -> dict[str, str]:
    """Return the text of `LEYLINE_SERVER_<FIELD>` for each of `fields` that is set and not empty."""
    return _settings("LEYLINE_SERVER_", fields)


def _settings(prefix: str, fields: Iterable[str]) -> dict[str, str]:
    found = {field: os.environ.get(f"{prefix}{field.upper()}", "") for field in fields}
    return {field: text for field, text in found.items() if text}
