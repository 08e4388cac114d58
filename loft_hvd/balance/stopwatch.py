"""Where a rank's steps go: a small stopwatch that the loader and the optimizer feed.

``StepTimer`` takes a step apart, ``DeviceClock`` times the computing of a device that runs beside
its host, and ``StepSums`` adds steps up without those in which the script did something else.
"""

from __future__ import annotations

import math
import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loft_hvd.balance.interval import PARTS, RECENT, SUM, SUMS, TYPICAL, skewness, typical
from loft_hvd.transport.waits import seconds, totals, watch

__all__ = ["DeviceClock", "StepTimer", "make_device_clock"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_FEWEST = 5  # steps that say what is usual: of fewer, a pause can be the median
# Steps that stand for an interval: 0.7 MB of rows, whose sums take 0.6 to 1 ms. So many at random
# show a share of long steps to 0.6 points: of 0.18 in a longer interval, more than the fifth that
# is trimmed is among them once in 2,000 intervals.
_MOST = 4096
_UNKNOWN = (math.nan,) * len(PARTS)
_USUAL = 3.0  # times the median of "other",
_OF_STEP = 0.5  # and of the median step, that make a pause


class Span:
    """The device's time between two events on its stream: a batch's arrival and last gradient."""

    def __init__(
        self, start: Any, end: Any, waits: Sequence[tuple[Any, Any]] = (), *, middle: Any = None
    ) -> None:
        self._start, self._middle, self._end = start, middle, end
        self._waits = tuple(waits)

    @property
    def is_over(self) -> bool:
        """Whether the device has come to the last gradient, and to the ends of all waits."""
        return all(event.query() for event in (self._end, *(end for _, end in self._waits)))

    @property
    def waited_s(self) -> float:
        """Seconds that the device waited for other ranks in it; only once it is over."""
        return sum(float(began.elapsed_time(ended)) for began, ended in self._waits) * 1e-3

    @property
    def seconds(self) -> float:
        """Seconds on the device, waits among them; only once it is over."""
        return float(self._start.elapsed_time(self._end)) * 1e-3

    @property
    def forward_s(self) -> float:
        """Of these, those before the backward pass; 0 where it was not marked."""
        if self._middle is None:
            return 0.0
        return max(0.0, float(self._start.elapsed_time(self._middle)) * 1e-3)


class DeviceClock:
    """Marks batches and gradients on the stream that computes them; never waits for the device.

    Events have ``record``, ``query`` and ``elapsed_time`` (milliseconds), as
    ``torch.cuda.Event(enable_timing=True)``; a stream of None is the current one.
    """

    def __init__(
        self, make_event: Callable[[], Any], stream: Callable[[], Any] = lambda: None
    ) -> None:
        self._make_event = make_event
        self._stream = stream
        self._start: Any = None
        self._middle: Any = None  # where the backward pass begins
        self._end: Any = None
        self._threads: set[int] = set()  # that compute the batch: others' waits do not hold it up
        self._waits: list[tuple[Any, Any]] = []
        self._num_inside = 0  # of these, those before the last gradient
        self._wait_began: Any = None
        self._own: Any = None  # the stream of the batch
        watch(self)

    def _mark(self) -> Any:
        event = self._make_event()
        event.record(self._stream())
        return event

    def arrived(self) -> None:
        """Mark the arrival of a batch."""
        self._threads = {threading.get_ident()}
        self._waits, self._num_inside, self._wait_began = [], 0, None
        self._own = self._stream()
        self._start, self._middle, self._end = self._mark(), None, None

    def backward_began(self) -> None:
        """Mark the beginning of the backward pass."""
        if self._start is not None:
            self._threads.add(threading.get_ident())
            self._middle = self._mark()

    def gradient(self) -> None:
        """Mark a gradient; the last one counts."""
        if self._start is not None:
            self._threads.add(threading.get_ident())
            self._num_inside = len(self._waits)
            if self._end is None:
                self._end = self._make_event()
            self._end.record(self._stream())

    def wait_began(self) -> None:
        """Mark where the batch begins to wait for other ranks."""
        if self._start is None or threading.get_ident() not in self._threads:
            return
        if self._stream() == self._own:  # on another stream a wait holds up what is there alone
            self._wait_began = self._mark()

    def wait_ended(self) -> None:
        """Mark where it goes on."""
        if self._wait_began is not None and threading.get_ident() in self._threads:
            self._waits.append((self._wait_began, self._mark()))
            self._wait_began = None

    def take(self) -> Span | None:
        """Return the span of the batch that arrived last, or None when it had no gradient."""
        start, end, waits = self._start, self._end, self._waits[: self._num_inside]
        middle = self._middle
        self._start = self._middle = self._end = None
        return None if start is None or end is None else Span(start, end, waits, middle=middle)


def make_device_clock(device: torch.device) -> DeviceClock | None:
    """Return a clock for a device that runs beside its host; None for a CPU, which does not."""
    if device.type != "cuda":
        return None
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.current_stream(device)
    )


class StepSums:
    """Adds steps up; a checkpoint or an evaluation between two of them is a pause, not a step.

    A step has a pause in it when its time outside fetch, computing and waiting is more than three
    times the usual one and half a usual step on top. It is left out whole; only the length of the
    pause is kept. The other ranks wait for it in that step, which is then no typical one of theirs.

    What is usual is that of the whole interval: of pieces trimmed one by one, a piece could lie in
    a burst. Of an interval with more than 4,096 steps so many stand for all, drawn at random, so
    that neither a burst nor what comes in every k-th step is more frequent among them.
    """

    def __init__(self) -> None:
        self._steps = array("d")  # a row each: quicker to add to than numpy's
        self._others = array("d")  # ``other_s`` of the steps that are not kept
        self.num_steps = 0  # of the interval so far
        self._random = random.Random(0)

    def add(self, row: Sequence[float] | Floats) -> None:
        """Add a step, in the order of ``SUMS``."""
        at, self.num_steps = self.num_steps, self.num_steps + 1
        if at < _MOST:
            self._steps.extend(row)
            return
        at = self._random.randrange(self.num_steps)
        if at < _MOST:  # Vitter's algorithm R (1985): each step is as likely to be kept
            place = slice(at * len(SUMS), (at + 1) * len(SUMS))
            row, self._steps[place] = self._steps[place], array("d", row)
        self._others.append(row[SUM["other_s"]])

    def clear(self) -> None:
        """Forget the interval's steps."""
        self.num_steps = 0
        self._steps, self._others = array("d"), array("d")

    def take(self) -> Floats:
        """Return the sums, [len(SUMS)], and start afresh."""
        # [26, num_steps], at most all: they are added up one of ``SUMS`` after the other.
        steps = np.array(self._steps).reshape(-1, len(SUMS)).T.copy()
        others = np.array(self._others)
        self.clear()
        if steps.shape[1] < _FEWEST:
            return _add_up(steps)
        other = steps[SUM["other_s"]]
        # Medians, since a pause is in the very steps that should say what is usual.
        limit = _OF_STEP * _low_median(steps[SUM["wall_s"]])
        if max(other.max(), others.max(initial=0.0)) <= limit:
            return _add_up(steps)
        usual = _low_median(other)
        limit += _USUAL * usual
        is_paused = other > limit
        pauses = np.concatenate([other[is_paused], others[others > limit]])
        sums = _add_up(_without(steps, is_paused))
        sums[SUM["paused_s"]] += float((pauses - usual).sum())
        return sums


def _low_median(values: Floats) -> float:
    """Return the median, the lower one of two: half of the steps may have a pause.

    ``np.partition`` takes 40 to 50 us of 4,096 values and 430 where all but one are equal, this
    100 and 24.
    """
    return float(np.sort(values)[(len(values) - 1) // 2])


def _without(steps: Floats, is_left_out: Bools) -> Floats:
    """Return the steps that are kept: the last ones take the places of those left out.

    A copy of all would take as long as adding them up.
    """
    num_kept = len(is_left_out) - np.count_nonzero(is_left_out)
    places = np.flatnonzero(is_left_out[:num_kept])
    steps[:, places] = steps[:, num_kept + np.flatnonzero(~is_left_out[num_kept:])]
    return steps[:, :num_kept]


def _add_up(steps: Floats) -> Floats:
    """Return the sums of steps [26, num_steps], and what a batch of them usually takes."""
    sums: Floats = steps.sum(axis=1)
    num_batches = sums[SUM["steps"]]
    if not num_batches > 0:
        return sums
    batches = np.maximum(steps[SUM["steps"]], 1.0)  # of each step, as many as it has passes
    means, variances = typical((steps[[SUM[name] for name in TYPICAL]] / batches).T)
    # That of a batch is as many times that of a step's average as a step has batches.
    variances *= num_batches / steps.shape[1]
    for name, mean, variance in zip(TYPICAL, means, variances, strict=True):
        sums[SUM[f"typical_{name}"]] += mean * num_batches
        sums[SUM[f"{name.removesuffix('_s')}_spread_s2"]] += variance * num_batches
    busy_s = (steps[SUM["stall_s"]] + steps[SUM["compute_s"]]) / batches
    sums[SUM["busy_skew"]] += float(skewness(busy_s)) * num_batches
    return sums


@dataclass
class _Step:
    """What is known of one step; amounts by the names of ``SUMS``, and in their order."""

    amounts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    spans: list[Span] = field(default_factory=list)  # of its batches, on a device
    host_s: float = 0.0  # from the batches' arrivals to the end of their backward passes
    host_waited_s: float = 0.0  # of that, waits for other ranks
    is_left_out: bool = False
    number: int = 0  # among all steps that have ended, on every rank alike

    @property
    def is_known(self) -> bool:
        """Whether the device has finished what the host queued."""
        return not self.spans or all(span.is_over for span in self.spans)

    def row(self) -> list[float]:
        """Return the amounts in the order of ``SUMS``, [26]."""
        amounts = self.amounts
        if self.spans:
            # The host queued 10 s of work in 1 s and then waited 12 s: 9 of them its own device
            # still computed (beyond = 10 - 1), so only 3 were waiting for other ranks. What the
            # device itself waited for within its 10 s is none of its work.
            device_s = sum(span.seconds for span in self.spans)
            device_waited_s = min(device_s, sum(span.waited_s for span in self.spans))
            beyond = max(0.0, device_s - self.host_s)
            after_s = max(0.0, amounts["wait_s"] - self.host_waited_s - beyond)
            amounts["wait_s"] = device_waited_s + after_s
            amounts["compute_s"] = device_s - device_waited_s
            forward_s = sum(span.forward_s for span in self.spans)
            amounts["forward_s"] = min(forward_s, amounts["compute_s"])
            amounts["queued_s"] = 0.0  # the host's queue for a CPU does not slow its device
        own_s = amounts["stall_s"] + amounts["compute_s"]
        spent = own_s + amounts["queued_s"] + amounts["wait_s"]
        amounts["other_s"] = max(0.0, amounts["wall_s"] - spent)
        # A step of several passes counts as that many batches, each of own_s / steps seconds.
        amounts["busy_s2"] = own_s**2 / amounts["steps"]
        return list(amounts.values())

    def parts(self) -> list[float]:
        """Return the seconds of each of ``PARTS``, once ``row`` has been worked out."""
        amounts = self.amounts
        backward_s = amounts["compute_s"] - amounts["forward_s"]
        known = (amounts["stall_s"], amounts["forward_s"], backward_s)
        return [*known, amounts["other_s"], amounts["queued_s"]]


class StepTimer:
    """Sums of this rank's times, batch by batch, since those that were taken last.

    A step runs from the end of the step before to its own end. Time inside ``exclude`` (evaluation,
    checkpoints) belongs to no step, and a step with a pause that was not announced is left out
    (``StepSums``). What a step's threads wait for other ranks (``transport/waits.py``) is waiting,
    wherever it lies. Where ranks share CPUs, the time that a rank was ready to compute but another
    held the CPU says nothing of its own speed: it is told apart from the computing. On a device
    that runs beside its host the computing is taken by the device's clock.

    Args:
        clock: seconds that never go back.
        queue_clock: seconds that this thread has waited for a CPU, or None to leave it unasked.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        queue_clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._queue_clock = queue_clock or (lambda: 0.0)
        self._sums = StepSums()
        self._summed: Floats | None = None  # [26], of steps that nobody has taken
        self._unknown: deque[_Step] = deque()  # steps that the device has not finished
        self._num_ended = 0  # steps, counted or not
        self._recent: list[Sequence[float]] = [_UNKNOWN] * RECENT  # step k at k % RECENT
        self._step_began: float | None = None
        self._excluded_s = 0.0
        self._num_excluding = 0  # blocks of ``exclude`` that are open
        self.device_clock: DeviceClock | None = None
        self._batch_thread = 0  # that the newest batch came to
        self._queue_at_wait: float | None = None
        self._queue_in_waits_s = 0.0  # that thread's
        self._queue_at_end = 0.0  # of the step before
        self._is_watched = False  # the script: then its queue counts in all of a step
        self._clear_step()
        if queue_clock is not None:
            watch(self)

    def _clear_step(self) -> None:
        self._step = _Step()
        self._batch_compute_s = 0.0
        self._arrived: float | None = None  # of a batch, on a clock without what is excluded
        self._queue_at_arrival = 0.0
        self._queue_at_computed: float | None = None  # of the newest batch
        self._batch_forward_s: float | None = None  # without waits and queue; None: goes on
        self._threads: set[int] = set()  # that work on this step
        self._waits_before = totals()
        self._excluded_waits_s = 0.0
        self._waited_at_arrival = 0.0
        self._batch_waited_s = self._batch_stalled_s = 0.0

    def _waited_s(self) -> float:
        """Return how long this step's threads have waited in it for other ranks by now."""
        self._threads.add(threading.get_ident())
        return seconds(self._threads, self._waits_before) - self._excluded_waits_s

    def batch_arrived(
        self, *, local: int, remote: int, fetch_s: float, stall_s: float, cached: int = 0
    ) -> None:
        """Note that a batch is here, and what fetching it took, in the words of ``RankTimes``."""
        self._arrive(stall_s, self._queued_s())
        self.batch_joined(local=local, remote=remote, cached=cached, fetch_s=fetch_s)

    def own_batch_arrived(self, *, samples: int, stall_s: float | None, is_first: bool) -> None:
        """Note a batch of a script that is only watched: a step is one batch, in several passes.

        Args:
            samples: of this pass.
            stall_s: seconds that the script was in its loader; None where it has none of torch's:
                then all since the step before, or the pass before, was spent on fetching it.
            is_first: whether it is the first pass of its step.
        """
        self._is_watched, queued = True, 0.0
        queue_s = self._queued_s()
        if is_first and (since := self.since_step_s()) is not None:
            queued = min(max(0.0, queue_s - self._queue_at_end), since)
            stall_s = since - queued if stall_s is None else min(stall_s, since - queued)
        elif is_first:
            self.leave_out()
        stall_s = stall_s or 0.0
        self._arrive(stall_s, queue_s)
        amounts = self._step.amounts
        amounts["queued_s"] += queued
        amounts["fetch_s"] += stall_s
        amounts["samples"] += samples
        amounts["local"] += samples
        amounts["steps"] += is_first

    def _arrive(self, stall_s: float, queue_s: float) -> None:
        self.computing_ended()
        now = self._clock()
        if self._step_began is None:
            self._step_began = now - stall_s
            self._waits_before, self._excluded_waits_s = totals(), 0.0
        self._step.amounts["stall_s"] += stall_s
        self._batch_stalled_s = 0.0
        self._arrived = now - self._excluded_s
        self._waited_at_arrival, self._batch_waited_s = self._waited_s(), 0.0
        self._batch_thread, self._queue_at_wait = threading.get_ident(), None
        self._queue_at_arrival = queue_s
        self._queue_at_computed = self._batch_forward_s = None
        if self.device_clock is not None:
            self.device_clock.arrived()

    def batch_joined(self, *, local: int, remote: int, fetch_s: float, cached: int = 0) -> None:
        """Note one more batch that is computed from here on, on the clock of the one before it."""
        amounts = self._step.amounts
        amounts["steps"] += 1
        amounts["samples"] += local + remote
        amounts["local"] += local
        amounts["remote"] += remote
        amounts["cached"] += cached
        amounts["fetch_s"] += fetch_s

    def fetched_ahead(self, *, stall_s: float) -> None:
        """Note that the script waited for a batch that is computed later, beside the newest one."""
        if self.device_clock is None:  # a device computes on meanwhile
            self._step.amounts["stall_s"] += stall_s
            self._batch_stalled_s += stall_s

    def _queued_s(self) -> float:
        """Return how long the batch's thread has queued for a CPU by now, but for its waits."""
        queue_s = self._queue_at_wait  # it stands still in a wait
        if queue_s is None or threading.get_ident() != self._batch_thread:
            queue_s = self._queue_clock()
        return queue_s - self._queue_in_waits_s

    def wait_began(self) -> None:
        """Note that a thread waits: what it queues for, as it asks on and on, is no computing."""
        if threading.get_ident() == self._batch_thread:
            self._queue_at_wait = self._queue_clock()

    def wait_ended(self) -> None:
        """Note that it goes on."""
        if self._queue_at_wait is not None and threading.get_ident() == self._batch_thread:
            self._queue_in_waits_s += self._queue_clock() - self._queue_at_wait
            self._queue_at_wait = None

    def backward_began(self) -> None:
        """Note that the newest batch's forward pass is over; the first such note counts."""
        if self._arrived is None or self._batch_forward_s is not None:
            return
        spent = self._clock() - self._excluded_s - self._arrived - self._batch_stalled_s
        spent -= self._waited_s() - self._waited_at_arrival
        queued = self._queued_s() - self._queue_at_arrival
        self._batch_forward_s = max(0.0, spent - queued)
        if self.device_clock is not None:
            self.device_clock.backward_began()

    def gradient_arrived(self, *, blocked_s: float = 0.0) -> None:
        """Note that a gradient of the newest batch is there; its last one ends the computing.

        Hooks spent ``blocked_s`` since the batch's arrival on communication, waits not counted.
        """
        if self._arrived is not None:
            spent = self._clock() - self._excluded_s - self._arrived
            self._batch_waited_s = self._waited_s() - self._waited_at_arrival
            spent -= self._batch_waited_s + self._batch_stalled_s
            self._batch_compute_s = max(0.0, spent - blocked_s)
            if self._is_watched:  # it tells of the last gradient alone
                self._queue_at_computed = self._queued_s()
            if self.device_clock is not None:
                self.device_clock.gradient()

    def computing_ended(self) -> None:
        """Note that no more gradients of the newest batch will come, before waiting for others."""
        if self._arrived is None:
            return
        # Without this, fitted sizes followed the scheduler: a rank that happened to have a core of
        # its own was given half of the batch.
        if not self._is_watched or self._queue_at_computed is None:
            self._queue_at_computed = self._queued_s()
        queued = min(self._queue_at_computed - self._queue_at_arrival, self._batch_compute_s)
        compute_s = self._batch_compute_s - queued
        forward_s = min(self._batch_forward_s or 0.0, compute_s)
        amounts = self._step.amounts
        amounts["compute_s"] += compute_s
        amounts["queued_s"] += queued
        amounts["forward_s"] += forward_s
        if self.device_clock is not None:
            self._step.host_s += max(0.0, self._clock() - self._excluded_s - self._arrived)
            self._step.host_waited_s += self._waited_s() - self._waited_at_arrival
            span = self.device_clock.take()
            if span is not None:
                self._step.spans.append(span)
        self._batch_compute_s = 0.0
        self._arrived = None

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Leave the time inside out of every step; a block within another changes nothing."""
        began, waited_s = self._clock(), self._waited_s()
        self._num_excluding += 1
        try:
            yield
        finally:
            self._num_excluding -= 1
            if not self._num_excluding:
                self._excluded_waits_s += self._waited_s() - waited_s
                if self._step_began is not None:  # else it is in no step
                    self._excluded_s += self._clock() - began

    def step_ended(self, *, counts: bool = True) -> None:
        """Close a step and add it to the sums.

        Args:
            counts: False leaves it out: other sizes than the plan's, or the first steps with it.
        """
        self.computing_ended()
        now = self._clock()
        queue_s = self._queue_at_end = self._queued_s()
        step = self._step
        step.number, self._num_ended = self._num_ended, self._num_ended + 1
        self._recent[step.number % RECENT] = _UNKNOWN
        if self._step_began is not None and counts and not step.is_left_out:
            amounts = step.amounts
            amounts["wait_s"] += self._waited_s()
            amounts["wall_s"] += now - self._step_began - self._excluded_s
            if self._is_watched and self._queue_at_computed is not None:  # in the optimizer
                amounts["queued_s"] += max(0.0, queue_s - self._queue_at_computed)
            if amounts["steps"]:
                self._unknown.append(step)
        self._step_began = now
        self._excluded_s = 0.0
        self._clear_step()
        self._add_known()

    def _add_known(self) -> None:
        # In order: behind a step that the device has not finished, none is finished either.
        while self._unknown and self._unknown[0].is_known:
            step = self._unknown.popleft()
            self._sums.add(step.row())
            if step.number >= self._num_ended - RECENT:
                self._recent[step.number % RECENT] = step.parts()

    def recent(self) -> Floats:
        """Return the newest steps, the oldest first, [RECENT, len(PARTS)]; NaN: left out."""
        return np.roll(np.array(self._recent), -(self._num_ended % RECENT), axis=0)

    def since_step_s(self) -> float | None:
        """Return this rank's seconds since the last step ended, waits left out; None if unknown."""
        if self._step_began is None:
            return None
        since = self._clock() - self._step_began - self._excluded_s
        return max(0.0, since - self._waited_s())

    def leave_out(self) -> None:
        """Leave the step that goes on out of the sums."""
        self._step.is_left_out = True

    def pause(self) -> None:
        """Forget when the last step ended: what follows is not part of a step."""
        self._step_began = None
        self._excluded_s = 0.0
        self._clear_step()

    def sum_up(self) -> None:
        """Add up what ``take`` will return, so that it has little to do; later steps are not in it.

        Without a step so far this does nothing.
        """
        self._add_known()
        if self._sums.num_steps:
            self._summed = self._sums.take()

    def take(self, *, carriers_queued_s: float = 0.0) -> Floats:
        """Return the sums in the order of ``SUMS``, [26]; no step is in two of them.

        Args:
            carriers_queued_s: seconds of a batch that threads which carry its exchange were ready
                to run while others held their CPU. Every rank may wait for them: on this one,
                too, that looks like waiting for others. At most what it waited counts, and only in
                a script that is watched: other exchanges have other threads.
        """
        self._add_known()
        summed, self._summed = self._summed, None
        sums = self._sums.take() if summed is None else summed
        queued_s = carriers_queued_s * sums[SUM["steps"]] if self._is_watched else 0.0
        own_s = min(queued_s, max(sums[SUM["wait_s"]], 0.0))
        sums[SUM["wait_s"]] -= own_s
        sums[[SUM["queued_s"], SUM["typical_queued_s"]]] += own_s
        return sums

    def discard(self) -> None:
        """Forget all sums: what they measured is over."""
        self._unknown.clear()
        self._sums.clear()
        self._summed = None
