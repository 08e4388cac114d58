"""A way over the wire, as an explicit state machine that never blocks.

An ``Exchange`` goes through a fixed list of steps. Each belongs to a stage, and may leave one
collective in flight; the next step begins when that is done. ``stages.py`` has the ways there are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from loft_hvd.pipeline.trace import Lane
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Work

__all__ = ["Exchange", "Stage", "Step"]


class Stage(enum.Enum):
    """Where values are."""

    IDLE = "idle"
    PACK = "pack"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    AGGREGATE = "aggregate"
    ALL_GATHER = "all-gather"
    UNPACK = "unpack"
    DONE = "done"


@dataclass(frozen=True)
class Step:
    """One step of an exchange.

    Attributes:
        stage: what the step is called while it, or the collective it starts, goes on.
        run: does it, given the weights of this time; returns the collective it has started.
    """

    stage: Stage
    run: Callable[[PassWeights | None], Work | None]


class Exchange:
    """Goes through its steps, again and again.

    Args:
        steps: what to do, one after another.
        held: the buffers that the steps own, for ``memory_bytes``.
        lane: where the stages show in a trace.
    """

    def __init__(self, steps: Sequence[Step], *, held: Sequence[Tensor], lane: Lane) -> None:
        self.stage = Stage.IDLE
        self._steps = tuple(steps)
        self._held = tuple(held)
        self._lane = lane
        self._at = len(self._steps)
        self._weights: PassWeights | None = None
        self._work: Work | None = None

    def start(self, weights: PassWeights | None) -> None:
        """Begin, and go on until the first collective is in flight."""
        self._weights = weights
        self._at = -1
        self._next()
        while self._work is None and self._at < len(self._steps):
            self._next()

    def advance(self) -> bool:
        """Go as far as is possible without waiting, and say whether all steps are done."""
        while self._at < len(self._steps):
            if self._work is not None:
                if not self._work.done():
                    return False
                work, self._work = self._work, None
                work.finish()
            self._next()
        return True

    def _next(self) -> None:
        self._at += 1
        if self._at == len(self._steps):
            self.stage = Stage.DONE
            self._lane.leave()
            return
        step = self._steps[self._at]
        self.stage = step.stage
        self._lane.enter(step.stage.value)
        self._work = step.run(self._weights)

    def memory_bytes(self) -> int:
        """Return the bytes of its own buffers; the values it works on are not among them."""
        return sum(tensor.nbytes for tensor in self._held)
