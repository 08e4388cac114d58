"""A balancer that has sizes for each backward pass, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from loft_hvd.balance.plan import StepSizes
from loft_hvd.optimizer.options import EqualBatches
from loft_hvd.runlog import RunLog

__all__ = ["Sizes"]


class Sizes(EqualBatches):
    """Gives out the sizes of one backward pass after another."""

    global_batch_size = 1

    def __init__(self, passes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(RunLog(None))
        self.passes = list(passes)

    def take_step(self) -> StepSizes:
        return StepSizes(0, 0, self.passes.pop(0))

    def gradient_arrived(self, *, blocked_s: float) -> None:
        assert blocked_s >= 0
