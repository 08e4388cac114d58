"""Drives the buckets of one optimizer: which one starts when, and until all are done.

Hooks only queue buckets. A thread of the engine's own packs them, puts them on the wire in the
order of their index, which is the same on every rank, and moves every bucket in flight on; so
communication and rules overlap with the rest of the backward pass. In ``finish`` the user's thread
does the same for what is left, and never waits without a limit. An error in the engine's thread
is raised in the user's at its next call.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import LoftError, TransportTimeoutError
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import (
    ExchangeSpec,
    MakeExchange,
    Owners,
    flat_exchange,
    is_engine_sum,
)
from loft_hvd.pipeline.selection import NUM_SLICES, Selection
from loft_hvd.pipeline.streams import StreamOrder, current_stream
from loft_hvd.pipeline.trace import Lane, trace_of
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression, Wire
from loft_hvd.transport.base import (
    LONGEST_SLEEP_S,
    SHORTEST_SLEEP_S,
    Channel,
    locate,
    watch_of,
)
from loft_hvd.transport.mesh import meshed
from loft_hvd.transport.shared_memory import sharing

__all__ = ["Engine", "ProgressThread"]

_logger = logging.getLogger(__name__)
_UNAWAITED_SLEEP_S = 2e-3  # while the user's thread computes: polling takes time from it
_JOIN_S = 5.0  # longest that ending a thread may hold the user's up
_LAST_WORD_S = 0.5  # a choice: from a limit in one thread to what another, at its own, says


class ProgressThread:
    """Calls a method again and again while there is work; started by the first ``wake``.

    ``advance``, a bound method, does what can be done without waiting, never raises, and returns
    after how many seconds it wants to be called again; None when all is done. Its object lives on
    only while there is work, so whoever owns the thread calls ``close``.
    """

    def __init__(self, advance: Callable[[], float | None], *, name: str) -> None:
        self._advance = weakref.WeakMethod(advance)
        self._name = name
        self._changed = threading.Condition()
        self._has_news = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def wake(self) -> None:
        """Say that there is work; returns at once."""
        with self._changed:
            self._has_news = True
            self._changed.notify()
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a daemon thread must not meet the interpreter's end

    def close(self, *, should_join: bool = True) -> None:
        """End the thread, whatever is in flight; can be called again, and from any thread."""
        if self._process != os.getpid():
            return  # a forked copy: its thread, and who holds its lock, stayed behind
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        thread = self._thread
        if should_join and thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():
                _logger.warning("%s does not end: it hangs in a call of the engine", self._name)

    def _run(self) -> None:
        pause: float | None = None
        while self._wait(pause):
            advance = self._advance()
            if advance is None:
                return
            pause = advance()
            del advance  # its object may be dropped while this thread sleeps

    def _wait(self, pause: float | None) -> bool:
        """Sleep until there are news, or for ``pause`` seconds; False when closed."""
        with self._changed:
            if pause is None:
                while not self._has_news and not self._is_closed:
                    self._changed.wait()
            elif not self._has_news and not self._is_closed:
                self._changed.wait(pause)
            self._has_news = False
            return not self._is_closed


class Engine:
    """All buckets of one optimizer, in a layout that is equal on every rank.

    ``pack`` fills a bucket's values, [numel], in the engine's thread, and returns the weights of
    the step. The result of a ``Mean`` is multiplied by ``mean_factor`` at last. A bucket of at
    least twice ``part_bytes`` is exchanged in parts; None for what suits the transport. Rules that
    see rows judge them by the values of their own buckets, as ``owners`` says.
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
        part_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.buckets = tuple(buckets)
        # A user's own format has buffers of its own, and a sum is the engine's.
        if isinstance(wire, Compression) and any(
            bucket.device == "cpu" and not is_engine_sum(rules[bucket.rule], wire)
            for bucket in self.buckets
        ):
            channel = replace(channel, transport=sharing(channel.transport))
        self._transport = transport = channel.transport
        self._timeout_s = channel.timeout_s
        self._clock = clock
        self._trace = trace_of(transport.rank)
        owners = Owners() if owners is None else owners
        selections = self._make_selections(channel, rules, owners)
        self._selections = tuple(selections.values())
        self.reductions = tuple(
            BucketReduction(
                ExchangeSpec(
                    transport,
                    name=channel.sub(f"b{bucket.index:02d}").name,
                    numel=bucket.numel,
                    dtype=bucket.dtype,
                    device=bucket.device,
                    rule=rules[bucket.rule],
                    wire=wire,
                    lane=Lane(self._trace, str(bucket)),
                    selection=selections[bucket.rule].part()
                    if bucket.rule in selections and bucket.numel
                    else None,
                    records=owners.records,
                ),
                pack=functools.partial(pack, bucket),
                factor=mean_factor if isinstance(rules[bucket.rule], Mean) else 1.0,
                make_exchange=make_exchange,
                part_bytes=part_bytes,
            )
            for bucket in self.buckets
        )
        # An error may meet either thread. The first one counts, and is raised once in the user's.
        self._failing = threading.Lock()
        self._failure: BaseException | None = None
        self._is_raised = False
        self._is_awaited = False
        # Filled by the user's thread, emptied by the one that has the turn. A deque needs no lock:
        # hooks must not wait for the turn, which lasts as long as a rule.
        self._num_queued = 0
        self._queue: deque[tuple[int, list[Any]]] = deque()
        # By bucket, the streams on which it is filled: autograd changes them from hook to hook.
        self._streams_of: list[set[Any]] = [set() for _ in self.buckets]
        # Of the thread that has the turn: only it touches what follows, and only it starts
        # operations. That keeps them in one order on every rank.
        self._turn = threading.Lock()
        self._num_done = 0
        self._streams = StreamOrder(*{bucket.device for bucket in self.buckets})
        self._open: list[int] = []
        self._pause = SHORTEST_SLEEP_S
        self._thread = ProgressThread(self._take_turn, name=f"{channel.name}.progress")
        weakref.finalize(self, self._thread.close, should_join=False)

    def _make_selections(
        self, channel: Channel, rules: Sequence[Rule], owners: Owners
    ) -> dict[int, Selection]:
        """Return what decides about the rows of each rule that judges them, by the rule's index."""
        made = {}
        num_slices = 1 if owners.records is None else NUM_SLICES
        for at in sorted({bucket.rule for bucket in self.buckets}):
            rule = rules[at]
            if isinstance(rule, RowRule):
                # Tables are on the CPU, and take the way of such buckets where there are any.
                on_cpu = any(each.rule == at and each.device == "cpu" for each in self.buckets)
                transport = meshed(channel.transport) if on_cpu else channel.transport
                name = channel.sub(f"r{at:02d}").name
                made[at] = Selection(
                    transport, name, rule, scope=owners.scope, num_slices=num_slices
                )
        return made

    # In the user's thread.

    def values(self, index: int) -> Tensor:
        """Return a bucket's flat values, [numel]; not to be touched while it is in flight."""
        return self.reductions[index].values

    @property
    def next_bucket(self) -> int:
        """Index of the next bucket to start; the number of buckets when all are on their way."""
        return self._num_queued

    @property
    def has_failed(self) -> bool:
        """Whether an error waits to be raised, or has been."""
        return self._failure is not None

    def filled(self, index: int) -> None:
        """Note that this thread has put values into a bucket, or has made what ``pack`` puts there.

        From any thread that fills a part of it, before ``start``.
        """
        stream = current_stream(self.buckets[index].device)
        if stream is not None:
            self._streams_of[index].add(stream)

    def start(self, index: int) -> None:
        """Put bucket ``next_bucket`` on its way, or raise what has failed since the last call."""
        # It only queues, so it returns at once. One order on every rank: hence the index.
        assert index == self._num_queued, (index, self._num_queued)
        self._raise_failure()
        self._num_queued += 1
        # Without, the engine's thread could send it before the backward pass has filled it.
        self.filled(index)
        marks = [stream.record_event() for stream in self._streams_of[index]]
        self._streams_of[index].clear()
        self._queue.append((index, marks))
        self._thread.wake()

    def finish(self, *, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until every bucket is done, then be ready for the next step.

        ``meanwhile`` is called once all buckets have begun, unless one has failed. None moves on
        before it returns, so it must be short.
        """
        self._raise_failure()
        lane = Lane(self._trace, "step")
        lane.enter("wait")
        try:
            with watch_of(self._transport).waiting():
                self._drive(meanwhile)
        except BaseException as error:  # also an interrupt: buckets are in flight
            self._is_raised = True
            self._fail(error)
            raise
        finally:
            self._is_awaited = False
        lane.leave()
        self._raise_failure()
        # What this thread queues from here on follows all buckets: it has had the last turn.
        self._num_queued = self._num_done = 0

    def _drive(self, meanwhile: Callable[[], None] | None) -> None:
        """Move buckets on in the thread that waits for them."""
        until = self._clock() + self._timeout_s
        # From here the engine's thread leaves its turns to this one: two threads that poll would
        # fight for the interpreter's lock, and waking one takes as long as a small exchange.
        self._is_awaited = True
        pause: float | None = 0.0
        while pause is not None and self._failure is None:
            if (left_s := until - self._clock()) <= 0:
                raise self._timeout()
            # Who has the turn may be at its own limit, as in the start of an operation, and its
            # error says more.
            if self._turn.acquire(timeout=left_s + _LAST_WORD_S):
                try:
                    pause = self._advance()
                finally:
                    self._turn.release()
                if meanwhile is not None and self._failure is None:
                    meanwhile()
                    meanwhile = None
                else:
                    time.sleep(pause or 0.0)  # at least lets the other thread have the lock

    @property
    def sees_rows(self) -> bool:
        """Whether a rule judges rows by their distances."""
        return bool(self._selections)

    def judge_by(self, *, is_model: bool) -> None:
        """Let rules that see rows judge them over the whole model, or in shards, from now on.

        Called between two steps, before the same one on every rank.
        """
        assert self._num_queued == 0, self._num_queued
        for selection in self._selections:
            selection.is_model = is_model

    def memory_bytes(self) -> int:
        """Return the bytes of all buffers that the engine holds, the buckets included."""
        return sum(reduction.memory_bytes() for reduction in self.reductions)

    def close(self) -> None:
        """End the engine's thread; what is in flight is given up."""
        self._thread.close()

    def _raise_failure(self) -> None:
        """Raise what has failed: first the error itself, then that nothing works any more."""
        if self._failure is None:
            return
        if not self._is_raised:
            self._is_raised = True
            raise self._failure
        raise LoftError(
            "this optimizer's exchange has failed before and ranks are no longer in step: "
            f"{self._failure}; restart from a checkpoint"
        ) from self._failure

    def _timeout(self) -> TransportTimeoutError:
        begun = self._open or [index for index, _ in self._queue]
        waiting = ", ".join(self._place(index) for index in begun[:3])
        late = watch_of(self._transport).late()
        who = f"ranks {late} have not come to it" if late else "a rank has not come to it"
        return TransportTimeoutError(
            f"rank {self._transport.rank} of {self._transport.world_size} waited "
            f"{self._timeout_s:g} s for {waiting}: {who}; it has stopped, is very slow, or takes "
            "other steps (look for an error above, or raise LOFT_HVD_TIMEOUT_S)"
        )

    def _place(self, index: int) -> str:
        return f"{self.buckets[index]} in {self.reductions[index].stage.value}"

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and tell the other ranks; from either thread."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = error
        watch_of(self._transport).report(error)

    # In the thread that has the turn: the engine's, or the user's while that waits.

    def _take_turn(self) -> float | None:
        # Never waited for: who has it does all there is to do. If an interrupt has ended that
        # thread's wait between taking the turn and giving it back, nobody gives it back.
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return None if self._is_awaited else self._advance()
        finally:
            self._turn.release()

    def _advance(self) -> float | None:
        """Do what can be done without waiting; return when to come again, None when all is done."""
        # All that is queued is packed before anything is polled: what is not on the wire yet is
        # what others wait for.
        num_open, num_before = len(self._open), self._num_done
        try:
            # Also where nothing is left to do: what the thread before has queued comes first.
            self._streams.take()
            # Mostly nothing has come, and ranks that share cores take time from each other by
            # asking: more than that costs only where there is something to do.
            if self._queue or any(map(self._can_advance, self._open)):
                with torch.no_grad():
                    while self._queue and self._failure is None:
                        self._begin(*self._queue.popleft())
                    if self._failure is None:
                        self._open = [at for at in self._open if not self._advance_bucket(at)]
        except BaseException as error:
            self._fail(error)
        if self._failure is not None or not (self._open or self._queue):
            return None
        if not self._is_awaited:
            return _UNAWAITED_SLEEP_S
        # Short sleeps right after something has moved, as the next step is then often close.
        has_moved = num_open != len(self._open) or num_before != self._num_done
        self._pause = SHORTEST_SLEEP_S if has_moved else min(self._pause * 1.5, LONGEST_SLEEP_S)
        return self._pause

    def _can_advance(self, index: int) -> bool:
        try:  # not ``_located``, which would take longer than asking
            return self.reductions[index].has_news
        except BaseException as error:
            raise locate(error, self._place(index)) from error.__cause__

    def _begin(self, index: int, marks: list[Any]) -> None:
        self._open.append(index)
        with self._located(index):
            for mark in marks:
                current_stream(self.buckets[index].device).wait_event(mark)
            self.reductions[index].start()

    def _advance_bucket(self, index: int) -> bool:
        with self._located(index):
            if not self.reductions[index].advance():
                return False
        self._num_done += 1
        return True

    @contextmanager
    def _located(self, index: int) -> Iterator[None]:
        """Let errors say which bucket they met."""
        try:
            yield
        except BaseException as error:
            raise locate(error, self._place(index)) from error.__cause__
