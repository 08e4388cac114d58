"""What is inside of a wrapped optimizer: the one place that knows where."""

from __future__ import annotations

from typing import Any

from loft_hvd.pipeline.engine import Engine

__all__ = ["engine_of"]


def engine_of(optimizer: Any) -> Engine:
    """Return the engine of a ``DistributedOptimizer``."""
    engine: Engine = optimizer._world._reducer.engine
    return engine
