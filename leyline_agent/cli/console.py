"""Where the command line writes: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_error(error: BaseException | str) -> None:
    """Print one line to stderr, whatever line breaks the message has."""
    message = " ".join(str(error).split())
    err.print("leyline:", message, style="red", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON for other programs: no colours, no wrapping."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
