"""What a number has to be read with: machine, GPU, versions, commit, time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("leyline-agent", "sglang", "torch", "triton", "transformers", "openai")


def circumstances() -> dict[str, Any]:
    """The facts, as far as this machine tells them."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": platform.platform(terse=True),
            "gpu": _said(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]),
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout, with `+` if files differ from it. `LEYLINE_COMMIT` stands in where git is absent."""
    folder = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit = _said([*folder, "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return os.environ.get("LEYLINE_COMMIT")
    changed = _said([*folder, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+" if changed else commit


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _said(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
