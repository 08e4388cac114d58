"""Marks that are more than a word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["long_first"]


def long_first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return parameters for a long test of which `make test-all` runs the first so many."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if at < count else pytest.mark.whole,
        )
        for at, value in enumerate(values)
    ]
