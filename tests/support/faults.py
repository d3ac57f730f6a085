"""Faults inside a running server: switched on and off by files, which its plugin `leyline_faults` looks for.

faults = Faults(folder)
server = start_server("llama", env=faults.environment)
with faults.on("kernel"):     # every copy raises; tests/support/fault_plugin lists the names
    ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PLUGIN = Path(__file__).with_name("fault_plugin")
_TIMEOUT_S = 60.0


class Faults:
    """The faults of the servers that were started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(_PLUGIN), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, "LEYLINE_FAULTS": str(self._folder)}

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """While this lasts, the fault is on. Raises AssertionError if it never hit: then nothing was tested."""
        flag, hit = self._folder / name, self._hit(name)
        hit.unlink(missing_ok=True)
        flag.touch()
        try:
            yield
        finally:
            flag.unlink()
        assert hit.exists(), f"the fault {name} hit nothing"

    def wait_for_hit(self, name: str) -> None:
        """Wait until the fault, which is on, has hit."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._hit(name).exists():
            assert time.monotonic() < deadline, f"the fault {name} did not hit within {_TIMEOUT_S:.0f} s"
            time.sleep(0.005)

    def _hit(self, name: str) -> Path:
        return self._folder / f"{name}.hit"
