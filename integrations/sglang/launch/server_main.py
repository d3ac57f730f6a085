"""The server process: `python -P -m leyline_agent.integrations.sglang.launch.server_main [SGLang's arguments]`.

It is `python -m sglang.launch_server` with two things done first. On a machine without a GPU it puts the CPU support in
place; that runs at import, because `multiprocessing` imports this module again in every process that SGLang spawns, and
they need it too. And it asks the kernel to end the server when the process that started it dies, however it dies.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

from leyline_agent.integrations.sglang.cpu import enable, is_enabled

if is_enabled():
    enable()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    _end_with_parent()
    runpy.run_module("sglang.launch_server", run_name="__main__")
