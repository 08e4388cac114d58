"""Rows of one bucket after the other to shard owners, who keep their results: a reduce-scatter.

The way is ``ring.to_shard_owners``. With scope "shard" a bucket's result is there when ``start``
returns, for the host or on the device's stream, and its memory serves the next bucket. With scope
"model" all buckets of a step wait for ``finish``, where the tables of all of them decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import UsageError
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.ring import Exchange, ExchangeSpec, RunRule, to_shard_owners
from loft_hvd.pipeline.selection import Selection, SelectionPart
from loft_hvd.pipeline.trace import TraceRow, trace_of
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel, Watch, locate, watch_of
from loft_hvd.transport.lanes import Needs, choose_lane

__all__ = ["ScatterExchanges"]


class _Reduction:
    """A bucket's exchange, moved on by who waits for it."""

    def __init__(self, exchange: Exchange, bucket: Bucket, watch: Watch | None) -> None:
        self.watch = watch
        self.bucket = bucket
        self._exchange = exchange

    @property
    def place(self) -> str:
        """What it is and how far it has come, for errors."""
        return f"{self.bucket} in {self._exchange.stage.value}"

    def done(self) -> bool:
        try:
            return self._exchange.advance()
        except Exception as error:
            raise locate(error, self.place) from error.__cause__

    def finish(self) -> None:
        """Release nothing: each collective on its way is, as it ends."""


class _Gathering:
    """Buckets that wait for each other, as all of them decide."""

    def __init__(self, reductions: Sequence[_Reduction]) -> None:
        self.watch = reductions[0].watch
        self._reductions = reductions

    def done(self) -> bool:
        return all([each.done() for each in self._reductions])  # each is moved on

    def finish(self) -> None:
        """Release nothing."""


class ScatterExchanges:
    """The exchanges of some buckets, in an order that is equal on every rank.

    Args:
        channel: the ranks.
        rule: aggregates their rows.
        device: of the values, on this rank.
        run: applies the rule.
        is_model: whether rows are judged over all buckets of a step, which are then done together.

    Attributes:
        lane: how values move.
    """

    def __init__(
        self, channel: Channel, rule: Rule, *, device: str, run: RunRule, is_model: bool
    ) -> None:
        self._channel = channel
        self._rule = rule
        self._run = run
        self._trace = trace_of(channel.rank)
        self.lane = choose_lane(channel, Needs(device))
        self._selection: Selection | None = None
        if is_model and isinstance(rule, RowRule):
            is_here = torch.device(device).type == "cpu"  # where tables are
            lane = self.lane if is_here else choose_lane(channel.sub("tables"), Needs())
            self._selection = Selection(lane, channel.sub("rows").name, rule, scope="model")
            self._selection.is_whole = False
        self._parts: dict[str, SelectionPart] = {}  # by the exchange's name
        self._memory: dict[tuple[object, ...], Tensor] = {}
        self._num_sent: Counter[str] = Counter()  # by where memory is
        self._open: dict[str, _Reduction] = {}  # by name, those that wait for ``finish``

    def memory_to_send(self, bucket: Bucket) -> Tensor | None:
        """Return where this rank's values, [numel], are put for ``start``; None for anywhere."""
        if not self.lane.lends:
            return None
        # By turns: who begins the next exchange of that memory has read what was sent in this one.
        place = self._place(bucket)
        key = place, self._num_sent[place] % 2
        return self._kept(key, bucket, lambda: self.lane.zeros(bucket.numel, bucket.dtype))

    def start(
        self,
        bucket: Bucket,
        sent: Tensor,
        result: Tensor,
        weights: PassWeights,
        *,
        why_at_once: str = "",
    ) -> None:
        """Send this rank's values, [numel], and put what it owns of the result into ``result``.

        Args:
            bucket: what is reduced, [world_size * shard].
            sent: where ``memory_to_send`` has them; left alone until the result is there.
            result: [shard]; with scope "model" it is there after ``finish``.
            weights: of the rows.
            why_at_once: why the result is needed when this returns; "" where it is not.

        Raises:
            UsageError: it is, and rows are judged over all buckets.
            TransportTimeoutError: other ranks did not come in time.
        """
        name = self._name(bucket)
        if self._selection is not None and (why_at_once or name in self._open):
            why = why_at_once or "another backward pass has begun before this one has ended"
            raise UsageError(
                f'{bucket}: scope="model" has its result at the end of the backward pass, but it '
                f'is needed before: {why}; use scope="shard"'
            )
        self._num_sent[self._place(bucket)] += 1
        exchange = self._exchange(bucket, name)
        reduction = _Reduction(exchange, bucket, watch_of(self._channel.transport))
        exchange.start(sent, result, weights)
        if self._selection is None:
            self._channel.wait(reduction, what=reduction.place)
        else:
            self._open[name] = reduction
            reduction.done()

    def _exchange(self, bucket: Bucket, name: str) -> Exchange:
        num_ranks = self._channel.world_size
        room = None
        if not self.lane.lends:
            key = self._place(bucket), "rows"
            values = self._kept(
                key,
                bucket,
                lambda: torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device),
            )
            room = values.view(num_ranks, -1)
        if self._selection is not None and name not in self._parts:
            self._parts[name] = self._selection.part()
        spec = ExchangeSpec(
            self.lane,
            name=self._channel.sub(name).name,
            numel=bucket.numel,
            dtype=bucket.dtype,
            device=bucket.device,
            rule=self._rule,
            row=TraceRow(self._trace, str(bucket)),
            selection=self._parts.get(name),
        )
        return to_shard_owners(spec, room=room, run=self._run)

    def finish(self) -> None:
        """Wait until all results are there; no more buckets come in this step."""
        if self._selection is None:
            return
        gone = [self._parts.pop(name) for name in self._parts.keys() - self._open.keys()]
        self._selection.forget(gone)  # of parameters that had no gradient
        self._selection.complete()
        if self._open:
            open_ones = list(self._open.values())
            self._channel.wait(_Gathering(open_ones), what=open_ones[0].place)
        self._open.clear()
        self._selection.is_whole = False

    def give_up(self) -> None:
        """Leave what is on its way, after an error."""
        self._open.clear()

    def _name(self, bucket: Bucket) -> str:
        return f"g{bucket.index:02d}.{bucket.numel}"

    def _place(self, bucket: Bucket) -> str:
        """Name a bucket's memory: the same for all where one is done after the other."""
        return "" if self._selection is None else self._name(bucket)

    def _kept(self, key: tuple[object, ...], bucket: Bucket, make: Callable[[], Tensor]) -> Tensor:
        key = (*key, bucket.dtype)
        if key not in self._memory or self._memory[key].numel() < bucket.numel:
            self._memory[key] = make()
        return self._memory[key][: bucket.numel]
