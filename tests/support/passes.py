"""Balancers that have sizes for each backward pass, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from loft_hvd.balance.plan import Counted, StepSizes
from loft_hvd.optimizer.options import EqualBatches
from loft_hvd.runlog import RunLog

__all__ = ["HeldSizes", "Sizes"]


class Sizes(EqualBatches):
    """Gives out the sizes of one backward pass after another, and what it is over.

    Their global batch is that of the largest unless it is given.
    """

    has_none = False  # each pass is computed

    def __init__(
        self,
        passes: Sequence[tuple[int, ...]],
        *,
        global_batch_size: int | None = None,
        counts: Sequence[Counted | None] = (),
    ) -> None:
        super().__init__(RunLog(None))
        self.passes = list(passes)
        self.counts = list(counts)
        self.global_batch_size = global_batch_size or max(map(sum, self.passes))
        self.most_samples = self.global_batch_size

    max_count: int | None = None
    min_ranks: int = 1

    def take_step(self) -> StepSizes:
        return StepSizes(0, 0, self.passes.pop(0))

    def take_count(self) -> Counted | None:
        return self.counts.pop(0) if self.counts else None

    def count_cut(self, rank: int, what: str) -> None:
        raise AssertionError((rank, what))

    def gradient_arrived(self, *, blocked_s: float) -> None:
        assert blocked_s >= 0

    def pass_over(self) -> None:
        raise AssertionError("each pass is computed")


class HeldSizes(Sizes):
    """Gives out the sizes of one pass while gradients come from two devices' threads at once."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__([sizes])
        self.num_taken = 0
        self._is_taken, self._may_go = threading.Event(), threading.Event()

    def take_step(self) -> StepSizes:
        self.num_taken += 1
        self._is_taken.set()
        assert self._may_go.wait(30.0)
        return StepSizes(0, 0, self.passes[0])

    def arrive(self, first: Callable[[], object], second: Callable[[], object]) -> list[object]:
        """Call both, the second while the first one takes its batch; returns what they give."""
        given: list[object] = []

        def run(call: Callable[[], object]) -> None:
            try:
                given.append(call())
            except Exception as error:
                given.append(error)

        threads = [threading.Thread(target=run, args=(each,)) for each in (first, second)]
        threads[0].start()
        assert self._is_taken.wait(30.0)
        threads[1].start()
        threads[1].join(0.2)  # it goes on by itself, or waits for the first one
        self._may_go.set()
        for thread in threads:
            thread.join(30.0)
        return given
