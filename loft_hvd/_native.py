"""The C++ extensions: the only file that imports them, and what to do where it is not built."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from loft_hvd.errors import MissingDependencyError

__all__ = ["datagram_extension", "explain_missing", "extension", "require_extension"]


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """Import the extension once; return it, or None and the reason."""
    # At the first use: ``import loft_hvd`` must work, and be quick, where it is not built.
    try:
        return importlib.import_module("loft_hvd._loft"), ""
    except ImportError as error:
        return None, str(error)


@functools.cache
def datagram_extension() -> tuple[ModuleType | None, str]:
    """Return the extension that needs libcrypto, or None and why it is not there."""
    try:
        return importlib.import_module("loft_hvd._loft_datagram"), ""
    except ImportError as error:
        return None, (
            f"the extension loft_hvd._loft_datagram does not load ({error}); it is built where "
            "OpenSSL's headers are: apt-get install libssl-dev, and build loft_hvd again (in a "
            "checkout: make setup, as make demo leaves it out)"
        )


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
