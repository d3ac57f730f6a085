"""Switch the current process to SGLang's CPU engine; to be done before SGLang is imported."""

from __future__ import annotations

import os
import sys
from types import MappingProxyType

CPU_ENVIRONMENT = MappingProxyType(
    {
        # SGLang picks its CPU engine by this; without it the import asks for vLLM.
        "SGLANG_USE_CPU_ENGINE": "1",
        # Two threads on a shared machine were up to ten times slower than one.
        "OMP_NUM_THREADS": "1",
        # Compiling a mixture-of-experts layer costs 18 s on the first request and gains nothing on small models.
        "TORCHDYNAMO_DISABLE": "1",
        # A torch built for CUDA brings NCCL, which SGLang would take for tensor parallelism and then find no GPU.
        "SGLANG_NCCL_SO_PATH": "none-on-the-cpu",
    }
)
"""What a process of a CPU server needs in its environment. A value the user has set already is kept."""


def enable() -> None:
    """Make SGLang importable in this process without a GPU. Calling it again changes nothing.

    Processes that SGLang spawns need the same call. They get it because `multiprocessing` imports the main module
    again in each of them, and ours (`launch/server_main.py`) calls this at its top.
    """
    from leyline_agent.integrations.sglang.cpu.kernel_stub import KernelStubFinder
    from leyline_agent.integrations.sglang.cpu.torchvision_ops import TorchvisionOpsFinder

    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(isinstance(finder, KernelStubFinder) for finder in sys.meta_path):
        sys.meta_path.append(KernelStubFinder())  # last: a real build of sgl_kernel wins
    if not any(isinstance(finder, TorchvisionOpsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionOpsFinder())  # first: it only looks, and lets the others find


def is_enabled() -> bool:
    """Tell whether this process runs SGLang's CPU engine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "").lower() in {"1", "true", "yes"}
