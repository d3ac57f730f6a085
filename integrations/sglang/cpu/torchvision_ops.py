"""Let torchvision's CUDA build be imported beside a CPU build of torch.

Its compiled part cannot load there, so the operators it would register are missing, and `import torchvision` dies with
"operator torchvision::nms does not exist" while it attaches shape rules to them. SGLang's configs import torchvision,
though nothing of it runs for text. Declaring the two operators (no implementation) is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")


class TorchvisionOpsFinder(MetaPathFinder):
    """Finds nothing itself: it notices torchvision's import at the moment when its operators must exist."""

    def __init__(self) -> None:
        self._library: Any = None  # torch forgets the declarations when this object dies

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Declare the operators just before their shape rules are imported, if the compiled part has not done so."""
        if fullname == "torchvision._meta_registrations" and self._library is None:
            self._library = _declare_missing_operators()
        return None


def _declare_missing_operators() -> Any:
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _SCHEMA)
    return library
