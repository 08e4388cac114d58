"""The C++ extension: the only file that imports it, and what to do where it is not built."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from loft_hvd.errors import MissingDependencyError

__all__ = ["explain_missing", "extension", "require_extension"]


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """Import the extension once; return it, or None and the reason."""
    # At the first use: ``import loft_hvd`` must work, and be quick, where it is not built.
    try:
        return importlib.import_module("loft_hvd._loft"), ""
    except ImportError as error:
        return None, str(error)


def extension() -> ModuleType | None:
    """Return the extension module, or None where it is not built or does not load."""
    return _load()[0]


def explain_missing() -> str:
    """Say why the extension is missing and how to build it; empty where it is there."""
    module, reason = _load()
    if module is not None:
        return ""
    return (
        f"the C++ extension loft_hvd._loft does not load ({reason}); build it with "
        "'pip install .' (needs g++), or in a checkout 'pip install --no-build-isolation -e .'"
    )


def require_extension() -> ModuleType:
    """Return the extension module.

    Raises:
        MissingDependencyError: it is not built; says how to build it.
    """
    module = extension()
    if module is None:
        raise MissingDependencyError(explain_missing())
    return module
