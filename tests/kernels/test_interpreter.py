"""Runs the Triton kernel on the CPU, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_the_triton_form_in_its_interpreter() -> None:
    """TRITON_INTERPRET has to be set before anything imports Triton, which other tests do: hence a process apart."""
    pytest.importorskip("triton")
    tests = [sys.executable, "-m", "pytest", "-q", "-k", "triton-interpreter", str(HERE / "test_rotation.py")]
    done = subprocess.run(
        tests, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
