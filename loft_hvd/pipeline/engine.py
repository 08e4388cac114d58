"""Drives the buckets of one optimizer: which one starts when, and until all are done.

Buckets start in the order of their index on every rank, as soon as they and all before them are
full. Whatever can go on without waiting goes on at every call, so communication overlaps with
the rest of the backward pass; ``finish`` waits for what is left, never without a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import LoftError, TransportTimeoutError
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.stages import Compressor, Reduction, ShardReduction, SumReduction
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Transport, locate, watch_of

__all__ = ["Engine", "is_engine_sum"]

_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 200e-6


def is_engine_sum(rule: Rule) -> bool:
    """Say whether a rule is the engine's own all-reduce instead of a rule on shard owners."""
    return isinstance(rule, Mean) and not rule.reproducible


class Engine:
    """All buckets of one optimizer.

    Args:
        transport: the ranks.
        buckets: the layout, equal on every rank.
        rules: the rules that buckets refer to by index.
        timeout_s: longest wait for other ranks in seconds.
        name: stem of the operations' names, equal on every rank.
        compression: wire format, or None.
        clock: seconds that never go back.
        sleep: how to let other threads run.
    """

    def __init__(
        self,
        transport: Transport,
        buckets: Sequence[Bucket],
        rules: Sequence[Rule],
        *,
        timeout_s: float,
        name: str = "loft",
        compression: Compressor | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.buckets = tuple(buckets)
        self._transport = transport
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._reductions = [
            self._make(bucket, rules[bucket.rule], f"{name}.b{bucket.index:02d}", compression)
            for bucket in self.buckets
        ]
        self._num_started = 0
        self._open: list[int] = []
        self._failure: BaseException | None = None

    def _make(
        self, bucket: Bucket, rule: Rule, name: str, compression: Compressor | None
    ) -> Reduction:
        if is_engine_sum(rule):
            return SumReduction(
                self._transport,
                numel=bucket.numel,
                dtype=bucket.dtype,
                device=bucket.device,
                name=name,
                compression=compression,
            )
        return ShardReduction(
            self._transport,
            numel=bucket.numel,
            dtype=bucket.dtype,
            device=bucket.device,
            rule=rule,
            name=name,
            compression=compression,
        )

    def values(self, index: int) -> Tensor:
        """Return a bucket's flat values, [numel]: to fill before ``start``, to read when done."""
        return self._reductions[index].bucket

    @property
    def next_bucket(self) -> int:
        """Index of the next bucket to start; the number of buckets when all are on their way."""
        return self._num_started

    def start(self, index: int, weights: PassWeights | None) -> None:
        """Put the next bucket, filled by now, on its way.

        Args:
            index: must be ``next_bucket``, so that every rank starts buckets in one order.
            weights: of this step, or None when all ranks weigh the same.
        """
        assert index == self._num_started, (index, self._num_started)
        self._check_usable()
        self._num_started += 1
        self._guard(lambda: self._reductions[index].start(weights))
        self._open.append(index)
        self.advance()

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether no started bucket is open."""
        self._guard(self._advance)
        return not self._open

    def _advance(self) -> None:
        self._open = [index for index in self._open if not self._advance_bucket(index)]

    def _advance_bucket(self, index: int) -> bool:
        try:
            return self._reductions[index].advance()
        except BaseException as error:
            raise locate(error, self._place(index)) from error.__cause__

    def _place(self, index: int) -> str:
        return f"{self.buckets[index]} in {self._reductions[index].stage.value}"

    def finish(self) -> None:
        """Wait until every bucket is done, then be ready for the next step.

        Raises:
            TransportTimeoutError: the limit was reached; names the bucket and its stage.
            Exception: the engine's own error if a collective failed.
        """
        self._check_usable()
        start = self._clock()
        pause = _SHORTEST_SLEEP_S
        num_open = len(self._open)
        with watch_of(self._transport).waiting():
            while not self.advance():
                if len(self._open) < num_open:
                    num_open, pause = len(self._open), _SHORTEST_SLEEP_S
                if self._clock() - start > self._timeout_s:
                    self._fail(self._timeout())
                self._sleep(pause)
                pause = min(pause * 1.5, _LONGEST_SLEEP_S)
        self._num_started = 0

    def memory_bytes(self) -> int:
        """Return the bytes of all buffers that the engine holds."""
        return sum(reduction.memory_bytes() for reduction in self._reductions)

    def _timeout(self) -> TransportTimeoutError:
        waiting = ", ".join(self._place(index) for index in self._open[:3])
        late = watch_of(self._transport).late()
        who = f"ranks {late} have not come to it" if late else "a rank has not come to it"
        return TransportTimeoutError(
            f"rank {self._transport.rank} of {self._transport.world_size} waited "
            f"{self._timeout_s:g} s for {waiting}: {who}; it has stopped, is very slow, or takes "
            "other steps (look for an error above, or raise LOFT_HVD_TIMEOUT_S)"
        )

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise LoftError(
                "this optimizer's exchange has failed before and ranks are no longer in step: "
                f"{self._failure}; restart from a checkpoint"
            )

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        watch_of(self._transport).report(error)
        raise error
