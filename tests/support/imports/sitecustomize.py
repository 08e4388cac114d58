"""What Python runs first in every process that a test starts (tests/conftest.py).

Importing torch, its compiler (at the first optimizer) and this package, and ending after it, takes
a process 3.5 s of CPU, a third of it in search of garbage among what modules hold, which live to
the end. These imports search for none, and what is there after them is never looked through; all
that comes later is, as in a user's process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_LARGE = {"torch", "torch._dynamo", "loft_hvd"}


class _WithoutCollections(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        was_on = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            gc.freeze()
            if was_on:
                gc.enable()


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _LARGE:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _WithoutCollections(fullname, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
