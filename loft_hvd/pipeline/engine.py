"""Drives the buckets of one optimizer: which one starts when, and until all are done.

Hooks only queue buckets; ``flights.py`` packs them, puts them on the wire in the order of their
index, which is the same on every rank, and moves every bucket in flight on. In ``finish`` the
user's thread does the same for what is left. An error in another thread is raised in the user's at
its next call. The engine chooses the lane of its buckets, once (``transport/lanes.py``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import LoftError, TransportTimeoutError
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.flights import Flights
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import ExchangeSpec, MakeExchange, Owners, flat_exchange
from loft_hvd.pipeline.selection import NUM_SLICES, Selection
from loft_hvd.pipeline.streams import current_stream
from loft_hvd.pipeline.tolerance import Spans
from loft_hvd.pipeline.trace import TraceRow, trace_of
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression, Wire, own_wire
from loft_hvd.transport.base import Channel, Lane, Watch, watch_of
from loft_hvd.transport.lanes import Needs, choose_lane

__all__ = ["Engine"]


class _Failure:
    """The first error of an engine's buckets, in whichever thread it came."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._taking = threading.Lock()
        self._is_raised = False
        self.error: BaseException | None = None

    def take(self, error: BaseException, *, is_raised: bool = False) -> None:
        """Keep an error if it is the first one, and tell the other ranks."""
        self._is_raised |= is_raised
        with self._taking:
            if self.error is not None:
                return
            self.error = error
        self._watch.report(error)

    def tell(self) -> None:
        """Raise what has failed: first the error itself, then that nothing works any more."""
        if self.error is None:
            return
        if not self._is_raised:
            self._is_raised = True
            raise self.error
        raise LoftError(
            "this optimizer's exchange has failed before and ranks are no longer in step: "
            f"{self.error}; restart from a checkpoint"
        ) from self.error


class _BucketFlight:
    """A bucket, which goes its way once a step."""

    def __init__(
        self,
        bucket: Bucket,
        reduction: BucketReduction,
        failure: _Failure,
        stop: Callable[[], None],
    ) -> None:
        self.bucket = bucket
        self.reduction = reduction
        self.device = bucket.device
        self.given: Tensor | None = None  # the caller's values
        self.has_arrived = False
        # The streams on which it is filled: autograd changes them from hook to hook.
        self.streams: set[Any] = set()
        self._failure = failure
        self._stop = stop

    @property
    def place(self) -> str:
        return f"{self.bucket} in {self.reduction.stage.value}"

    @property
    def has_news(self) -> bool:
        return self.reduction.has_news

    def begin(self) -> None:
        given, self.given = self.given, None
        self.reduction.start(given, given)

    def advance(self) -> bool:
        self.has_arrived = self.reduction.advance()
        return self.has_arrived

    def failed(self, error: BaseException) -> None:
        self._failure.take(error)
        self._stop()  # ranks are no longer in step


class Engine:
    """All buckets of one optimizer, in a layout that is equal on every rank.

    ``pack`` fills in what is sent of a bucket, [numel], in whichever thread moves it on, and
    returns the weights of the step. The result of a ``Mean`` is multiplied by ``mean_factor`` at
    last. Rules that see rows judge them by the values of their own buckets, as ``owners`` says.
    With ``is_given`` values lie in the caller's tensors; see ``start``.
    """

    def __init__(
        self,
        channel: Channel,
        buckets: Sequence[Bucket],
        rules: Sequence[Rule],
        *,
        pack: Callable[[Bucket, Tensor], PassWeights | None],
        mean_factor: float = 1.0,
        wire: Wire = Compression.none,
        owners: Owners | None = None,
        make_exchange: MakeExchange = flat_exchange,
        is_given: bool = False,
    ) -> None:
        self.buckets: tuple[Bucket, ...] = ()
        self._channel = channel
        self._rules = tuple(rules)
        self._pack = pack
        self._mean_factor = mean_factor
        self._wire = wire
        self._owners = Owners() if owners is None else owners
        self._make_exchange = make_exchange
        self._is_given = is_given
        self._trace = trace_of(channel.rank)
        self._lanes: dict[str, Lane] = {}  # by device
        self._selections: dict[int, Selection] = {}  # what judges rows, by the rule's index
        self._failure = _Failure(watch_of(channel.transport))
        self._members: list[_BucketFlight] = []
        self._num_queued = 0
        self._is_whole = True  # no more buckets of this step are to come
        self._flights = Flights(name=channel.name)
        for bucket in buckets:
            self.add(bucket)

    def add(self, bucket: Bucket, *, is_last: bool = True) -> None:
        """Take one more bucket, behind those there are; every rank calls it alike.

        Without ``is_last`` another one is to come before the step's end.
        """
        assert bucket.index == len(self._members), (bucket.index, len(self._members))
        self._is_whole &= is_last
        rule = self._rules[bucket.rule]
        part = None
        if isinstance(rule, RowRule) and bucket.numel:
            selection = self._selection_of(bucket.rule, rule)
            selection.is_whole = self._is_whole
            part = selection.part()
        name, wire = f"b{bucket.index:02d}", self._wire
        if self._is_given:  # a size of its own, a name: the caller may cut buckets anew
            name, wire = f"{name}.{bucket.numel}", own_wire(bucket.dtype)
        spec = ExchangeSpec(
            self._lane_of(bucket.device),
            name=self._channel.sub(name).name,
            numel=bucket.numel,
            dtype=bucket.dtype,
            device=bucket.device,
            rule=rule,
            wire=wire,
            row=TraceRow(self._trace, str(bucket)),
            selection=part,
            records=self._owners.records,
            critical=self._critical(bucket),
        )
        reduction = BucketReduction(
            spec,
            pack=functools.partial(self._pack, bucket),
            is_given=self._is_given,
            is_in_place=True,
            factor=self._mean_factor if isinstance(rule, Mean) else 1.0,
            make_exchange=self._make_exchange,
        )
        self.buckets = (*self.buckets, bucket)
        self._members.append(_BucketFlight(bucket, reduction, self._failure, self._flights.stop))

    def _critical(self, bucket: Bucket) -> Spans:
        """Return which of a bucket's values must arrive, where its lane loses any."""
        gather = self._owners.gather
        if gather is None or gather.reliable:
            return ()
        return tuple(
            (slot.offset, slot.offset + slot.numel)
            for slot in bucket.slots
            if gather.is_critical(slot.name, len(slot.shape))
        )

    def cut(self, index: int) -> None:
        """Forget the buckets from a number on, of which none is on its way; every rank alike."""
        assert index >= self._num_queued, (index, self._num_queued)
        gone = [flight.reduction.selection for flight in self._members[index:]]
        self._is_whole = False  # others are to come in their place

        def forget() -> None:
            for selection in self._selections.values():
                selection.forget(part for part in gone if part is not None)

        self._failure.tell()
        self._in_turn(forget)
        self.buckets = self.buckets[:index]
        del self._members[index:]

    def _lane_of(self, device: str) -> Lane:
        if device not in self._lanes:
            # A user's own format has buffers of its own.
            has_buffers = isinstance(self._wire, Compression)
            needs = Needs(device, has_buffers=has_buffers, gather=self._owners.gather)
            lane = self._lanes[device] = choose_lane(self._channel, needs)
            self._flights.add(device, lane)
        return self._lanes[device]

    def _selection_of(self, at: int, rule: RowRule) -> Selection:
        """Return what decides about the rows of a rule that judges them."""
        if at not in self._selections:
            self._selections[at] = Selection(
                self._lane_of("cpu"),  # where tables are
                self._channel.sub(f"r{at:02d}").name,
                rule,
                scope=self._owners.scope,
                num_slices=1 if self._owners.records is None else NUM_SLICES,
            )
        return self._selections[at]

    # In the user's thread.

    def values(self, index: int) -> Tensor:
        """Return a bucket's flat values, [numel]; not to be touched while it is in flight."""
        return self._members[index].reduction.values

    def is_sum(self, index: int) -> bool:
        """Say whether a bucket's lane adds values up itself, so that each rank sends its part."""
        return self._members[index].reduction.is_sum

    @property
    def lane(self) -> Lane:
        """What the first bucket's values take; all others of its device do too."""
        return self._lane_of(self.buckets[0].device)

    @property
    def next_bucket(self) -> int:
        """Index of the next bucket to start; the number of buckets when all are on their way."""
        return self._num_queued

    def filled(self, index: int) -> None:
        """Note that this thread has put values into a bucket, or has made what ``pack`` puts there.

        From any thread that fills a part of it, before ``start``.
        """
        stream = current_stream(self.buckets[index].device)
        if stream is not None:
            self._members[index].streams.add(stream)

    def start(self, index: int, given: Tensor | None = None) -> None:
        """Put bucket ``next_bucket`` on its way, or raise what has failed since the last call.

        ``given`` are the caller's values, [numel]: ``pack`` may change them, and the aggregated
        ones go there.
        """
        # It only queues, so it returns at once. One order on every rank: hence the index.
        assert index == self._num_queued, (index, self._num_queued)
        self._failure.tell()
        self._num_queued += 1
        flight = self._members[index]
        flight.given, flight.has_arrived = given, False
        # Without, the engine's thread could send it before the backward pass has filled it.
        self.filled(index)
        marks = [stream.record_event() for stream in flight.streams]
        flight.streams.clear()
        self._flights.post(flight, marks)

    def finish(self, *, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until every bucket is done, then be ready for the next step.

        ``meanwhile`` is called once all buckets have begun, unless one has failed. None moves on
        before it returns, so it must be short.
        """
        self._failure.tell()
        row = TraceRow(self._trace, "step")
        row.enter("wait")
        started = self._members[: self._num_queued]
        try:
            with watch_of(self._channel.transport).waiting():
                if not self._is_whole:
                    self._in_turn(self._complete)
                self._flights.wait(
                    lambda: (
                        self._failure.error is not None
                        or all(flight.has_arrived for flight in started)
                    ),
                    timeout_s=self._channel.timeout_s,
                    too_late=self._too_late,
                    meanwhile=meanwhile,
                )
        except BaseException as error:  # also an interrupt: buckets are in flight
            self._failure.take(error, is_raised=True)
            self._flights.stop()
            raise
        row.leave()
        self._failure.tell()
        # What this thread queues from here on follows all buckets: it has had the last turn.
        self._num_queued = 0

    def _in_turn(self, call: Callable[[], None]) -> None:
        self._flights.in_turn(call, timeout_s=self._channel.timeout_s, too_late=self._too_late)

    def _complete(self) -> None:
        self._is_whole = True
        for selection in self._selections.values():
            selection.complete()

    def judge_by(self, *, is_model: bool) -> None:
        """Let rules that see rows judge them over the whole model, or in shards, from now on.

        Called between two steps, before the same one on every rank.
        """
        assert self._num_queued == 0, self._num_queued
        for selection in self._selections.values():
            selection.is_model = is_model

    def memory_bytes(self) -> int:
        """Return the bytes of all buffers that the engine holds, the buckets included."""
        return sum(flight.reduction.memory_bytes() for flight in self._members)

    def close(self) -> None:
        """End the engine's thread; what is in flight is given up."""
        self._flights.close()

    def _too_late(self) -> TransportTimeoutError:
        transport = self._channel.transport
        waiting = ", ".join(flight.place for flight in self._flights.under_way()[:3])
        late = watch_of(transport).late()
        who = f"ranks {late} have not come to it" if late else "a rank has not come to it"
        return TransportTimeoutError(
            f"rank {transport.rank} of {transport.world_size} waited "
            f"{self._channel.timeout_s:g} s for {waiting}: {who}; it has stopped, is very slow, or "
            "takes other steps (look for an error above, or raise LOFT_HVD_TIMEOUT_S)"
        )
