"""What users write in TOML files, read with a bound; ``codec.decode`` checks what is in them."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from loft_hvd.errors import ArgumentError, MissingDependencyError

__all__ = ["read_toml"]

_MOST_BYTES = 1_000_000  # of a file; a list of numbers for 10,000 ranks takes a tenth


def read_toml(path: str | os.PathLike[str], *, what: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: the file.
        what: what it is, for errors.

    Raises:
        ArgumentError: it is not TOML, or has more than 1 MB.
        OSError: it cannot be read.
    """
    toml = _toml_reader(what)
    with open(path, "rb") as file:
        text = file.read(_MOST_BYTES + 1)
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        content: dict[str, Any] = toml.loads(text.decode().replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ArgumentError(f"{what} {os.fspath(path)}: not TOML: {error}") from error
    return content


def _toml_reader(what: str) -> Any:
    if sys.version_info >= (3, 11):
        return importlib.import_module("tomllib")
    try:
        return importlib.import_module("tomli")
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a {what} needs Python 3.11, or the tomli package: pip install tomli"
        ) from error
