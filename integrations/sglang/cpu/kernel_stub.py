"""A stand-in for `sgl_kernel`, whose wheels are built for CUDA only.

SGLang imports names from it at start-up even where none of them is called. Here every name can be imported, and calling
one raises, so that nothing is silently wrong: on the CPU path of this project none is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_PACKAGE = "sgl_kernel"
# Those that SGLang imports unguarded. Others (`scalar_type`, say) have to be missing: SGLang then uses its own code.
_SUBMODULES = (
    *("elementwise", "flash_attn", "gemm", "kvcacheio", "mamba", "memory"),
    *("moe", "quantization", "sampling", "speculative"),
)
_STUBS = frozenset({_PACKAGE, *(f"{_PACKAGE}.{name}" for name in _SUBMODULES)})


class KernelStubFinder(MetaPathFinder, Loader):
    """Finds `sgl_kernel` and the submodules that SGLang cannot do without, as stubs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the stubs, for nothing else."""
        return ModuleSpec(fullname, self, is_package=fullname == _PACKAGE) if fullname in _STUBS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stub module."""
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the names appear when they are asked for."""


class _StubModule(ModuleType):
    __version__ = "0.0.0+cpu.stub"

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        qualified = f"{self.__name__}.{name}"

        def missing_kernel(*_args: object, **_kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{qualified} was called, but there is no CPU build of it")

        missing_kernel.__name__ = name
        return missing_kernel
