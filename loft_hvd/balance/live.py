"""The live plan: times out, plans in, at the same step on every rank.

Nothing waits for the exchange. With an interval of ``k`` steps, times are summed at the end of step
``k - 2``, leave at the end of step ``k - 1`` and are read at the end of step ``k``. Rank 0 decides
on a thread of its own, while ranks train ``d`` more steps; its plan, one int64 tensor, leaves at
the end of step ``k + d`` and is read one step later. It comes into force at a step that no rank has
drawn yet. The times bring along after how many steps the next exchange comes, and how long a step
takes, from which every rank works out ``d``: agreeing costs nothing more.

A script may end while one of these is under way. Horovod's shutdown on the first rank to end takes
the engine away from all, so a rank that ends waits for what it has started: by then every other
rank has come to it too.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.balance.balancer_options import BalancerOptions
from loft_hvd.balance.batches import BatchQueue, plan_in_force
from loft_hvd.balance.controller import Controller, Decision
from loft_hvd.balance.explain import describe, fit_record, ranks_to_log
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.balance.interval import SUM, Head, Place, RankTimes, Report
from loft_hvd.balance.limits import RankLimits
from loft_hvd.balance.plan import Plan, Sizes
from loft_hvd.balance.resume import (
    SETTLE_STEPS,
    Archive,
    SavedRun,
    can_go_on,
    first_plans,
    make_controller,
)
from loft_hvd.balance.room import Room
from loft_hvd.balance.stopwatch import StepTimer
from loft_hvd.balance.turns import look_beside
from loft_hvd.codec import encode
from loft_hvd.config import config
from loft_hvd.errors import MismatchError, PlanError
from loft_hvd.runlog import MOST_ROWS, RunLog
from loft_hvd.topology import LoadMeter, QueueMeter, allowed_cpus, first_cpu, run_queue_s
from loft_hvd.transport.agreement import check_agreement, odd_ones
from loft_hvd.transport.base import Channel, Work, wait_for
from loft_hvd.transport.lanes import datagram_ports

__all__ = ["LivePlan", "Schedule", "TimesExchange", "check_same_run"]

Floats = npt.NDArray[np.float64]

_logger = logging.getLogger(__name__)
# An interval has at least 20 steps, which make good averages, and 30 seconds, which make the cost
# of planning small (0.02 to 0.07 % of the time, docs/balance.md).
_LEAST_STEPS = 20
_LEAST_S = 30.0
_GROWTH = 4  # and at most this many times the steps of the one before
_DRAIN_S = 10.0  # longest wait at the end of a process
_UNTIMED = 2  # intervals without times that are worth a warning
_TIMES, _PLAN, _ROOM = "exchange of times", "broadcast of the plan", "exchange of room"


class Schedule:
    """The step of the next exchange: counted in steps, so that all ranks come to it together.

    Without a given interval it is 20 at first, then as rank 0's clock says.
    """

    def __init__(self, interval: int | None) -> None:
        self._given = interval
        self.interval = interval or _LEAST_STEPS  # steps from the last exchange to the next
        self.at = self.interval  # the next exchange's step, counted from the start of the run
        self.plan_at: int | None = None  # that at whose end rank 0's plan leaves; None: none is due

    def follow(self, num_steps: int, interval: int, *, deciding: int | None = None) -> None:
        """Count from a step, on every rank, by what was agreed at an exchange.

        Rank 0's plan leaves after ``deciding`` steps, or none does.
        """
        self.interval = interval
        self.at = num_steps + interval
        self.plan_at = None if deciding is None else num_steps + deciding

    def propose(self, sums: Floats, *, num_passes: int) -> int:
        """Return how many steps the next interval should have, from this rank's sums, [26]."""
        if self._given is not None:
            return self._given
        steps, wall_s = float(sums[SUM["steps"]]), float(sums[SUM["wall_s"]])
        step_s = wall_s / steps * num_passes if steps > 0 else 0.0
        if not step_s > 0:
            return self.interval
        wanted = max(_LEAST_STEPS, math.ceil(_LEAST_S / step_s))
        return min(wanted, _GROWTH * self.interval)  # a few fast steps must not put off the next


class TimesExchange:
    """The collectives behind a live plan: every rank's times to all, rank 0's plan to all."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # By what it is: the work, and its tensors, which the engine uses until it is done.
        self._under_way: dict[str, tuple[Work | None, Tensor, Tensor]] = {}
        self._is_drained_at_exit = False

    @property
    def is_sending(self) -> bool:
        """Whether times are under way that nobody has received."""
        return _TIMES in self._under_way

    @property
    def is_planning(self) -> bool:
        """Whether a plan is under way that nobody has received."""
        return _PLAN in self._under_way

    def send_times(
        self,
        sums: Floats,
        *,
        head: Head,
        uses: tuple[float, float],
        beside: Sequence[float] | Floats = (),
    ) -> None:
        """Start telling every rank what this one measured: sums, in the order of ``SUMS``, [26].

        ``beside`` is what ``Report`` takes beside the rest, on all ranks or none.
        """
        channel = self._channel.sub("times")
        row = torch.from_numpy(
            np.array([*head, *sums, *uses, *beside], dtype=np.float64)
        )  # [33 or more]
        rows = torch.empty(channel.world_size, len(row), dtype=row.dtype)  # [world_size, as many]
        work = None
        if channel.world_size == 1:
            rows.copy_(row)
        else:
            self._drain_at_exit()
            work = channel.transport.allgather(row, rows.view(-1), name=channel.name)
        self._under_way[_TIMES] = work, row, rows

    def send_room(self, num_samples: int | None) -> None:
        """Start telling every rank for how many samples this one's memory has room."""
        channel = self._channel.sub("room")
        row = torch.tensor([-1 if num_samples is None else num_samples])
        rows = row.repeat(channel.world_size)  # [world_size]
        work = None
        if channel.world_size > 1:
            work = channel.transport.allgather(row, rows, name=channel.name)
        self._under_way[_ROOM] = work, row, rows

    def receive_rooms(self) -> tuple[int | None, ...] | None:
        """Return what all ranks sent, None each for what is unknown; None: nothing is under way."""
        rows = self._receive(_ROOM)
        if rows is None:
            return None
        return tuple(each if each > 0 else None for each in rows.tolist())

    def receive_times(self) -> Report | None:
        """Return what all ranks sent, or None when nothing is under way."""
        rows = self._receive(_TIMES)
        return None if rows is None else Report(rows.numpy())

    def send_plan(self, plan: Plan) -> None:
        """Start telling every rank rank 0's plan; the others' argument only gives the shape."""
        channel = self._channel.sub("plan")
        wire = torch.from_numpy(plan.to_wire())  # [2 + world_size]
        work = None
        if channel.world_size > 1:
            work = channel.transport.broadcast(wire, name=channel.name)
        self._under_way[_PLAN] = work, wire, wire

    def receive_plan(self, *, global_batch_size: int, most: int | None = None) -> Plan | None:
        """Return rank 0's plan, validated as ``from_wire`` does; None when none is under way."""
        wire, world_size = self._receive(_PLAN), self._channel.world_size
        if wire is None:
            return None
        return Plan.from_wire(
            wire.numpy(), world_size=world_size, global_batch_size=global_batch_size, most=most
        )

    def _receive(self, what: str) -> Tensor | None:
        work, _, received = self._under_way.pop(what, (None, None, None))
        if work is not None:
            self._channel.wait(work, what=what)
        return received

    def _drain_at_exit(self) -> None:
        """Wait at the end of the process, before the engine ends: later hooks run first."""
        # A script whose last step closed an interval failed in 1 of 13 runs: rank 0 broadcast its
        # plan to ranks that had ended (tests/multiprocess/jobs/last_step.py fails without this).
        if not self._is_drained_at_exit:
            self._is_drained_at_exit = True
            atexit.register(_drain, weakref.ref(self))

    def forget(self) -> None:
        """Leave what is under way to itself: the run goes on from elsewhere."""
        if config().is_elastic:  # the engine has failed, and all of it with it
            self._under_way.clear()
        self.drain()

    def drain(self) -> None:
        """Wait for what is under way, ten seconds at most; nobody wants its news any more."""
        works = [work for work, *_ in self._under_way.values() if work is not None]
        self._under_way.clear()
        for work in works:
            try:
                wait_for(work, what="last exchange", timeout_s=_DRAIN_S)
            except Exception as error:
                _logger.debug("the last exchange of times was not completed: %s", error)


def _drain(reference: weakref.ref[TimesExchange]) -> None:
    exchange = reference()
    if exchange is not None and getattr(sys, "last_value", None) is None:  # no error ends us
        exchange.drain()


def check_same_run(report: Report) -> None:
    """Raise when ranks are at different steps or plans, or have trained on other batches."""
    steps, plans = report.column("num_steps"), report.column("plan_id")
    is_odd = (steps != steps[0]) | (plans != plans[0])  # so is what is no number
    if is_odd.any():
        rank = int(np.argmax(is_odd))
        raise MismatchError(
            f"rank {rank} is at step {steps[rank]:.0f} with plan {plans[rank]:.0f}, but rank 0 at "
            f"step {steps[0]:.0f} with plan {plans[0]:.0f}; every rank must take the same steps"
        )
    trails = report.column("trail")
    if (trails != trails[0]).any():
        raise MismatchError(
            f"ranks {odd_ones(trails.tolist())} have trained on other batches than the rest since "
            f"the last exchange (now at step {steps[0]:.0f}): the samples, sizes or steps of their "
            "global batches differ. Give every rank the same data set, seed, epoch and "
            "loaded state, and let none skip a batch"
        )


_Decided = tuple[Plan | None, Callable[[], None]]  # a new plan, and what is noted once it is out


class _IntervalTask:
    """What is done with an interval: first a plan, then what the run log says about it."""

    def __init__(self, decide: Callable[[], _Decided]) -> None:
        self._decide = decide
        self.is_decided, self.is_ended = threading.Event(), threading.Event()
        self.plan: Plan | None = None
        self.error: BaseException | None = None  # read once ``is_ended``

    def run(self, log: RunLog) -> None:
        try:
            self.plan, note = self._decide()
            self.is_decided.set()  # ranks wait for no line of a log
            note()
        except BaseException as error:  # a policy's; whoever waits for the plan raises it
            self.error = error
            log.write_fault(error)
        finally:
            self.is_ended.set()  # first: who reads ``plan`` looks for an error too
            self.is_decided.set()


class IntervalWorker:
    """The work on intervals, on a thread of its own while ranks train.

    Its result does not depend on how far the thread has come: whoever needs it waits for it, and
    ranks ask for rank 0's plan after as many steps as that should take. Nobody waits for what is
    noted once a plan is made, but for ``wait``, ``settle`` and the next plan.

    An error is in the run log when it happens. It is raised by ``settle``, and once by ``take`` or
    ``begin``, whichever is first; ``drop`` and ``close`` forget it, with a warning.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._queue: SimpleQueue[_IntervalTask | None] = SimpleQueue()  # None ends the thread
        self._end_thread: Callable[[], None] | None = None  # waits for the thread's end
        self._decision: _IntervalTask | None = None  # whose plan nobody has taken
        self._tasks: list[_IntervalTask] = []  # under way, or with an error that nobody has taken

    def begin(self, decide: Callable[[], _Decided]) -> None:
        """Start on an interval."""
        self.take()
        if self._end_thread is None:
            self._start()
        self._decision = _IntervalTask(decide)
        self._tasks.append(self._decision)
        self._queue.put(self._decision)

    def _start(self) -> None:
        queue = self._queue
        # A daemon: the process must end although a policy does not.
        thread = threading.Thread(
            target=_work_off, args=(queue, self._log), name="loft-plan", daemon=True
        )
        thread.start()
        # At the end of the process, and by ``close``, the thread is waited for. Where this is just
        # dropped it is told to end: that may be in any thread, also the heartbeat's or its own,
        # and in the midst of anything.
        self._end_thread = partial(_end, queue, thread)
        atexit.register(self._end_thread)
        weakref.finalize(self, queue.put, None).atexit = False

    def take(self) -> Plan | None:
        """Return the newest plan, once."""
        task = self._decision
        if task is not None:
            self._wait(task.is_decided)
        self._decision = None
        ended = [each for each in self._tasks if each.is_ended.is_set()]
        self._tasks = [each for each in self._tasks if each not in ended]
        _raise_first(ended)
        return None if task is None else task.plan

    def wait(self) -> None:
        """Wait until nothing is under way, whatever came of it."""
        if self._tasks:
            self._wait(self._tasks[-1].is_ended)

    def settle(self) -> None:
        """Wait until nothing is under way; raises what failed and was not taken so far."""
        self.wait()
        _raise_first(self._tasks)

    def drop(self) -> None:
        """Wait until nothing is under way, and forget it: the run goes on from elsewhere."""
        self.wait()
        failed = [task.error for task in self._tasks if task.error is not None]
        self._decision, self._tasks = None, []
        for error in failed:
            _logger.warning("forgotten, as a state is loaded or ranks meet anew: %r", error)

    def close(self) -> None:
        """Drop what is under way, and end the thread; another ``begin`` starts one."""
        self.drop()
        if self._end_thread is not None:
            atexit.unregister(self._end_thread)
            self._end_thread()
            self._end_thread = None

    def _wait(self, event: threading.Event) -> None:
        timeout_s = config().timeout_s
        if not event.wait(timeout_s):
            raise PlanError(
                f"this rank has worked on an interval for more than {timeout_s:g} s; its machine "
                "is very slow, or the policy does not end (raise LOFT_HVD_TIMEOUT_S to wait longer)"
            )


def _raise_first(tasks: Sequence[_IntervalTask]) -> None:
    for task in tasks:
        if task.error is not None:
            raise task.error


def _work_off(queue: SimpleQueue[_IntervalTask | None], log: RunLog) -> None:
    while (task := queue.get()) is not None:
        task.run(log)
        del task  # its balancer may be dropped while this thread sleeps


def _end(queue: SimpleQueue[_IntervalTask | None], thread: threading.Thread) -> None:
    """End a thread that works off a queue, as soon as what is under way has ended."""
    queue.put(None)
    thread.join(_DRAIN_S)
    if thread.is_alive():
        _logger.warning("%s has not ended within %g s: it is left behind", thread.name, _DRAIN_S)


class LivePlan:
    """The plan in force in one world of ranks, and the loop from measured steps to the next."""

    def __init__(
        self,
        options: BalancerOptions,
        limits: RankLimits,
        channel: Channel,
        batches: BatchQueue,
        clock: Callable[[], float],
        log: RunLog,
    ) -> None:
        self._options, self._limits, self._log = options, limits, log
        transport = channel.transport
        self._channel, self._transport, self._batches = channel, transport, batches
        self._world = transport.can.world  # may be asked for once the engine has ended
        self._beside = IntervalWorker(log)
        self._own_controller = make_controller(options, limits)
        self._min_ranks = 1  # that plans leave samples to
        self._exchange = TimesExchange(channel)
        self._archive = Archive()
        self._load = LoadMeter()
        self._queues, self._queued_at = QueueMeter(), 0  # steps that had been taken
        self._is_compared = False  # with the other ranks' state, at the first step
        # Queueing is taken off computing, from which sizes follow, only where ranks must queue.
        queues = transport.local_size > allowed_cpus() or not options.policy.plans_batches
        self.timer = StepTimer(clock, run_queue_s if queues else None)
        self.schedule = Schedule(options.interval)
        self.history = first_plans(options, limits, self._controller)  # the newest last
        self._report: Report | None = None  # the newest one with times
        self._held: tuple[int, ...] = ()  # ranks in quarantine
        self.noise: GradientNoise | None = None  # of the gradients, as last measured
        self.room = Room()  # in this rank's memory
        self.limits = limits  # with what ranks' memory has room for, as far as known
        self.num_passes = 1  # backward passes of an optimizer step
        self.num_steps = 0  # optimizer steps taken
        self.write_head()

    def write_head(self) -> None:
        """Begin the log with what is trained, and how."""
        self._log.step = self.num_steps
        is_planned = self._options.policy.plans_batches
        self._log.write_run(
            times_at=self.schedule.at,
            num_passes=self.num_passes,
            next_batch=self._batches.next_step,
            world_size=len(self._limits),
            global_batch_size=self._options.global_batch_size if is_planned else None,
            policy=self._options.policy.text,
            devices=[f"{device.key} {device.name}" for device in self._limits.devices],
            caps=list(self._limits.caps),
            nodes=list(self._limits.nodes) or None,
        )
        self._write_plans()

    def _write_plans(self) -> None:
        for plan in self.history if self._options.policy.plans_batches else ():
            self._log.write("plan", **plan.fields())

    def _write_schedule(self) -> None:
        self._log.write(
            "schedule",
            times_at=self.schedule.at,
            num_passes=self.num_passes,
            next_batch=self._batches.next_step,
        )

    def take_passes(self, num_passes: int) -> None:
        """Count so many backward passes, each of a batch, to an optimizer step."""
        if num_passes != self.num_passes:
            self.num_passes = num_passes
            self._write_schedule()

    def need_ranks(self, min_ranks: int) -> None:
        """Let plans leave samples to so many ranks at least."""
        self._min_ranks = min_ranks
        if self._controller is not None and self._controller.leaving is not None:
            self._controller.leaving.min_ranks = min_ranks

    def settle(self) -> None:
        """Wait until nothing works on the policy, the controller or the archive.

        Raises what went wrong there, if training has not met it so far.
        """
        self._beside.settle()

    def close(self) -> None:
        """End what is under way on the thread of the plan, for another world to begin."""
        self._beside.close()

    def go_on_from(self, older: LivePlan) -> None:
        """Take over what outlives a world: what devices took, and what was plugged in."""
        self.take_passes(older.num_passes)
        self.timer.device_clock = older.timer.device_clock
        self._archive = older._archive
        self._recall()

    def _recall(self) -> None:
        if self._controller is not None:
            self._controller.recall(self._archive.recall(self._limits.keys))

    @property
    def _controller(self) -> Controller | None:
        """The controller, with nothing under way: a decision works on it."""
        self._beside.wait()
        return self._own_controller

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """Average times of every rank over the last interval, [world_size]; empty at first."""
        return () if self._report is None else self._report.times

    @property
    def plan(self) -> Plan:
        """The newest plan; of those repeated from an earlier run, the one in force."""
        newest = self._batches.next_step if self._options.policy.given_plans else math.inf
        return plan_in_force(self.history, newest)

    def hold(self, ranks: Sequence[int]) -> None:
        """Give ranks that are in quarantine no samples from the next plan on."""
        self._held = tuple(ranks)  # the controller hears of it with the next interval's times

    # Step by step.

    def begin_own_batch(self) -> None:
        """Begin a batch of the planned size, unless a loader of ours has begun one.

        All since the last step's end was its fetch. A step of which that is not known, the first
        one or one after a pause, is left out of all times.
        """
        if self._batches.has_fresh:
            return
        sizes = self._batches.begin_next(self.history)
        fetch_s = self.timer.since_step_s()
        if fetch_s is None:
            self.timer.leave_out()
        fetch_s = fetch_s or 0.0
        local = sizes.by_plan[self._transport.rank]
        self.timer.batch_arrived(local=local, remote=0, fetch_s=fetch_s, stall_s=fetch_s)

    def step_ended(self) -> None:
        """Close an optimizer step; exchange times and plans when it is time for them."""
        self.timer.step_ended(counts=self._counts())
        if not self._options.policy.plans_batches:
            self._batches.pass_by()
        self._batches.step_ended()
        self.num_steps += 1
        self._log.step = self.num_steps
        if not self._is_compared:
            self._compare()
        if self._exchange.is_planning:
            self._take_plan()
        # From here on everything depends on numbers that are equal on all ranks.
        if self.num_steps == self.schedule.at - 2:
            self.timer.sum_up()  # a step ahead: no step bears all that an interval's end takes
        if self.num_steps >= self.schedule.at - 1 and not self._exchange.is_sending:
            self._send_times()
        if self.num_steps >= self.schedule.at:
            self._close_interval()
        if self.num_steps == self.schedule.plan_at:
            # Rank 0 always sends one; what others send only has its shape.
            self._exchange.send_plan(self._beside.take() or self.plan)
        self._warn_untimed()

    def epoch_ended(self) -> None:
        """Close an epoch; a run shorter than an interval still exchanges times once."""
        self.timer.pause()
        if self._report is None:
            self._read_times(decides=False)  # those of an interval that the epoch ends in
        if self._report is None:
            self._send_times()
            self._read_times(decides=False)

    def _counts(self) -> bool:
        """Say whether the step that ends now shows what the newest plan's steps take."""
        if not self._options.policy.plans_batches:
            return self.num_steps >= SETTLE_STEPS
        trained = self._batches.trained
        # Others are such as an epoch's last batch.
        if trained is None or trained.by_plan != self.plan.sizes:
            return False
        return trained.step >= self.plan.first_step + SETTLE_STEPS * self.num_passes

    def _compare(self) -> None:
        """Compare what ranks went on from: plans, steps taken, and the batch just trained."""
        self._is_compared = True
        if self._transport.world_size > 1:
            fields = {
                "number of steps taken": str(self.num_steps),
                "plans": str(self.history),
                "batch of the first step": str(self._batches.trained),
            }
            # Not when a state is loaded: ranks may load it at different times, or one not at all.
            channel = self._channel.sub("state")
            what = "Balancer: the state after the first step"
            check_agreement(channel, fields, what=what)

    def _warn_untimed(self) -> None:
        is_late = self.num_steps == _UNTIMED * self.schedule.interval and self._report is None
        if is_late and self._options.policy.is_adaptive and self._transport.rank == 0:
            _logger.warning(
                "no step has been timed in the first %d, so sizes stay as they are; behind a "
                "loader of your own, wrap each step in `with balancer.step(num_samples)`",
                self.num_steps,
            )

    # Interval by interval.

    def _send_times(self) -> None:
        beside: Floats = np.empty(0)
        carriers_queued_s = 0.0
        if not self._options.policy.is_adaptive:  # what no sizes could mend is told
            place, carriers_queued_s = self._place()
            beside = np.concatenate([place, self.timer.recent().ravel()])
        sums = self.timer.take(carriers_queued_s=carriers_queued_s)
        head = Head(
            num_steps=self.num_steps,
            plan_id=self.plan.plan_id,
            trail=self._batches.trail,
            drawn_ahead=self._batches.may_be_drawn,
            next_interval=self.schedule.propose(sums, num_passes=self.num_passes),
        )
        uses = self._load.cpu_use(), self._load.memory_use()
        self._exchange.send_times(sums, head=head, uses=uses, beside=beside)
        if self._limits.tell_memory:
            self.room.computed(self._batches.largest_done(self._transport.rank))
            self._exchange.send_room(self.room.most(grain=self._limits.grain))

    def _place(self) -> tuple[Place, float]:
        """Return where this rank runs, and how long what carries its exchange queued, a batch."""
        computing_s, carrying_s = self._queues.longest_s()
        steps = max(self.num_steps - self._queued_at, 1)
        self._queued_at = self.num_steps
        here = self._transport.local_size, allowed_cpus(), first_cpu()
        return Place(*here, computing_s / steps), carrying_s / (steps * self.num_passes)

    def _close_interval(self) -> None:
        """Read what ranks measured, and let rank 0 decide on it."""
        report = self._read_times(decides=True)
        if report is None:
            self.schedule.follow(self.num_steps, self.schedule.interval)
            return
        is_adaptive = self._options.policy.is_adaptive
        deciding = report.steps_to_decide(self.num_passes) if is_adaptive else None
        self.schedule.follow(self.num_steps, report.next_interval, deciding=deciding)

    def _read_times(self, *, decides: bool) -> Report | None:
        """Return what ranks sent, and begin what is done with it beside training."""
        report = self._exchange.receive_times()
        if report is None:
            return None
        check_same_run(report)
        rooms = self._exchange.receive_rooms()
        if rooms is not None:
            self.limits = self._limits.within(rooms)
        if report.is_measured:
            self._report = report
        first_step = None
        if decides and self._transport.rank == 0:
            deciding = report.steps_to_decide(self.num_passes)
            first_step = report.first_free_step(
                self.num_passes, next_batch=self._batches.next_step, deciding=deciding
            )
        work = partial(
            self._work,
            report,
            since=self.schedule.at - self.schedule.interval,
            step=self._batches.next_step - 1,
            sizes=self.plan.sizes,  # what was measured: counted steps are those of the newest plan
            num_steps=self.num_steps,
            first_step=first_step,
            held=self._held,
            noise=None if self.noise is None else self.noise.of_passes(self.num_passes),
            limits=self.limits,
        )
        self._beside.begin(work)
        return report

    def _work(
        self,
        report: Report,
        *,
        since: int,
        step: int,
        sizes: Sizes,
        num_steps: int,
        first_step: int | None,
        held: Sequence[int],
        noise: GradientNoise | None,
        limits: RankLimits,
    ) -> _Decided:
        """Take in an interval, beside training; on rank 0 also log its times, and decide on it.

        It began after ``since`` optimizer steps, ended with ``step``, after ``num_steps`` of them,
        and had these sizes. A plan comes into force at ``first_step``; None is for no decision. It
        leaves nothing to the ranks in ``held``, and keeps within ``limits``.
        """
        interval = report.screened(step=step, sizes=sizes)  # once for all that look at it
        if interval is not None:
            self._archive.add(self._limits.keys, interval)
        self._log_times(report, num_steps, since=since)
        controller = self._own_controller
        if controller is None or interval is None or first_step is None:
            return None, lambda: None
        if limits.tell_memory:
            pass_caps = limits.caps if limits.splits else None
            controller.take_caps(limits.share_caps, pass_caps=pass_caps)
        controller.observe(interval)
        controller.policy.share_noise(noise)
        if self._options.policy.is_adaptive:
            controller.quarantine.hold(held)
        plan = controller.decide(first_step)
        made = None if plan is None else controller.history[-1]
        return plan, partial(self._note, controller, report, num_steps, made)

    def _note(
        self, controller: Controller, report: Report, step: int, made: Decision | None
    ) -> None:
        """Log what rank 0's controller makes of an interval, once it has decided."""
        if self._log.path is None:
            return
        judged = controller.judged
        if judged is not None:
            self._log.write("saved", step=step, plan_id=judged.plan_id, share=judged.realised_gain)
        if made is not None:
            self._log.write("decision", step=step, **asdict(made))
        fit, plan = controller.policy.fit, controller.plan
        if fit is not None:
            shown = ranks_to_log(report.times, most=MOST_ROWS)
            is_known = not fit.is_poor.any()
            self._log.write(
                "fit",
                step=step,
                plan_id=plan.plan_id,
                predicted_s=fit.gain(plan.sizes, plan.sizes).now_s if is_known else None,
                exposed_s=fit.model.aggregate_s,
                ranks=fit_record(fit, shown, sizes=plan.sizes),
            )
        self._log.write("explain", step=step, text=controller.explain())

    def _log_times(self, report: Report, num_steps: int, *, since: int) -> None:
        if report.is_measured and self._log.path is not None:
            ranks = ranks_to_log(report.times, most=MOST_ROWS)
            shown = [asdict(report.times[rank]) for rank in ranks]
            crowd, turns = look_beside(report)
            self._log.write(
                "times",
                step=num_steps,
                since=since,
                num_ranks=len(report.times),
                ranks=shown,
                crowd=None if crowd is None else asdict(crowd),
                turns=None if turns is None else asdict(turns),
            )

    def _take_plan(self) -> None:
        """Take what rank 0 has planned, if it is under way; refuse what must not be followed."""
        rank, options = self._transport.rank, self._options
        plan = self._exchange.receive_plan(
            global_batch_size=options.least, most=options.policy.most
        )
        if plan is None or plan.plan_id == self.plan.plan_id:  # rank 0 always sends one
            return
        if plan.plan_id != self.plan.plan_id + 1:
            raise PlanError(
                f"plan {plan.plan_id} from rank 0 does not follow plan {self.plan.plan_id} of rank "
                f"{rank}; load the same state on every rank"
            )
        self._limits.check_sizes(plan.sizes, what=f"plan {plan.plan_id}")
        self._batches.check_start(plan, rank=rank)
        self.timer.discard()  # times at the old sizes
        self.history.append(plan)
        if rank == 0:
            _logger.info(
                "plan %d from step %d: sizes %s", plan.plan_id, plan.first_step, list(plan.sizes)
            )
        self._log.write("plan", **plan.fields())

    # What it says, and what goes on.

    def explain(self, *, verbose: bool = False) -> str:
        """Say what waits cost and who causes them, what is planned, and why (on rank 0)."""
        plan = self.plan
        total = plan.global_batch_size
        head = f"plan {plan.plan_id}: sizes {list(plan.sizes)} of global_batch_size={total}"
        if not self._options.policy.plans_batches:
            head = "batches are the script's own: it is only watched"
        if not self.times and self._batches.num_untold > 1:
            return (
                f"{head}\nno times: {self._batches.num_untold} batches have gone out, and no "
                "gradient has come to this balancer. Give balancer= to loft.DistributedOptimizer, "
                "or to a loft.ddp_hook that the model registers, or call "
                "loft.attach(optimizer, balancer)"
            )
        if not self.times:
            return f"{head}\nno times yet: ranks exchange them at step {self._say_due()}"
        if self._controller is not None:
            own = "models and reasons are rank 0's: call explain() there, or read the run log"
            head = f"{head}\n{own}"
            if self._transport.rank == 0:
                head = self._controller.explain(verbose=verbose)
        due = f"ranks exchange times next at step {self._say_due()}"
        of_step = total * self.num_passes
        noise = [] if self.noise is None else [self.noise.describe(of_step)]
        assert self._report is not None  # there are times
        said = describe(self.times, *look_beside(self._report))
        return "\n".join([said, head, *noise, *self._say_links(), due])

    def _say_links(self) -> list[str]:
        """Say which of this rank's links lose much, where rows travel by datagrams."""
        return [
            news
            for port in datagram_ports(self._world)
            for link in port.links()
            for news in link.news(port.rank)
        ]

    def _say_due(self) -> str:
        """Say at which step times are exchanged next, counted in batches as plans count."""
        left = self.schedule.at - self.num_steps
        due = str(self._batches.step_began + left * self.num_passes)
        if self.num_passes == 1:
            return due
        return f"{due} (steps are batches here, {self.num_passes} of them an optimizer step)"

    def decisions(self) -> list[Decision]:
        """Return every plan and why it was made, which rank 0 alone knows."""
        if self._controller is not None:
            # It has numbered plans that are still on their way to the ranks.
            made = self._controller.history
            return [each for each in made if each.plan_id <= self.plan.plan_id]
        return [Decision(**plan.fields(), reason="given") for plan in self.history]

    def state_dict(self) -> dict[str, Any]:
        """Return plans, steps, times by device and, on rank 0, what was learnt; JSON-able."""
        self.settle()
        controller = self._controller if self._transport.rank == 0 else None  # others' saw nothing
        return encode(
            SavedRun(
                num_steps=self.num_steps,
                next_step=self._batches.next_step,
                plans=[[plan.plan_id, plan.first_step, *plan.sizes] for plan in self.history],
                controller=None if controller is None else controller.state(),
                policy=self._options.policy.text,
                devices=list(self._limits.keys),
                measured=self._archive.rows(),
                # A state has finite numbers.
                noise=self.noise if self.noise and math.isfinite(self.noise.scale_error) else None,
            )
        )

    def go_on(self, saved: SavedRun) -> None:
        """Go on where a state was saved, on every rank.

        With other devices, or the same in another order, another policy or global batch, or caps
        found since, plans start afresh, from what is known of each device. From the state of a rank
        other than 0 plans go on, and the policy learns from what is known of each device.
        """
        self._beside.drop()
        is_same = can_go_on(saved, self._limits, self._options, warns=self._transport.rank == 0)
        self._options = self._options.going_on_with(saved.history[-1].global_batch_size)
        learnt = saved.controller if is_same else None
        if learnt is not None and self._controller is not None:
            self._controller.go_on(learnt)  # first: it may refuse
            self._controller.send_again_after(saved.history[-1].plan_id)
        self._exchange.forget()
        self._archive.take(saved.measured)
        self.noise = saved.noise
        if learnt is None:
            self._own_controller = make_controller(self._options, self._limits)
            self.need_ranks(self._min_ranks)
            self._recall()
        self.history = (
            saved.history if is_same else first_plans(self._options, self._limits, self._controller)
        )
        if self._controller is not None:
            self._controller.know(self.history)
        next_batch = saved.num_steps if saved.next_step is None else saved.next_step
        self._batches.restart(next_step=next_batch)
        self.timer.discard()  # steps of the run before
        self.num_steps = self._log.step = saved.num_steps
        self._queues, self._queued_at = QueueMeter(), saved.num_steps
        self._write_plans()
        self.schedule.follow(self.num_steps, self.schedule.interval)
        self._write_schedule()
        self._is_compared = False
