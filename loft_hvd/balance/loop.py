"""The loop from measured steps to plans: what ranks exchange and when, step by step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from loft_hvd.balance.archive import Archive
from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.controller import Decision
from loft_hvd.balance.exchange import Exchange
from loft_hvd.balance.explain import describe, fit_record
from loft_hvd.balance.interval import Head, Interval, RankTimes, Report
from loft_hvd.balance.options import SETTLE_STEPS, BalancerOptions
from loft_hvd.balance.plan import Plan
from loft_hvd.balance.resume import can_go_on, compare_starts, plans_of
from loft_hvd.balance.schedule import Schedule
from loft_hvd.balance.timing import StepTimer
from loft_hvd.balance.world import World
from loft_hvd.errors import MismatchError
from loft_hvd.runlog import RunLog
from loft_hvd.topology import LoadMeter, allowed_cpus, run_queue_s
from loft_hvd.transport.agreement import odd_ones
from loft_hvd.transport.base import Transport

__all__ = ["PlanLoop", "check_same_run"]

_LOGGER = logging.getLogger(__name__)


class PlanLoop:
    """Times in, plans out, at the same step on every rank.

    Args:
        options: what the user asked for.
        world: the ranks' devices and limits.
        transport: the ranks.
        batches: what is drawn and trained on.
        clock: seconds that never go back.
        log: where what happens is written.

    Attributes:
        history: every plan of the run, the newest last.
        times: average times of every rank over the last interval, [world_size]; empty at first.
        timer: this rank's stopwatch.
        num_passes: backward passes of an optimizer step.
    """

    def __init__(
        self,
        options: BalancerOptions,
        world: World,
        transport: Transport,
        batches: BatchQueue,
        clock: Callable[[], float],
        log: RunLog,
    ) -> None:
        self._options = options
        self._log = log
        self._world = world
        self._transport = transport
        self._batches = batches
        self._controller = world.make_controller(options)
        self._exchange = Exchange(transport, name=options.name)
        self._load = LoadMeter()
        self._num_steps = 0
        self._schedule = Schedule(options.interval)
        self._is_compared = False  # with the other ranks' state, at the first step
        is_crowded = transport.local_size > allowed_cpus()
        self.timer = StepTimer(clock, run_queue_s if is_crowded else None)
        self.history = world.first_plans(options, self._controller)
        self._archive = Archive()
        self.times: tuple[RankTimes, ...] = ()
        self.num_passes = 1
        self.write_head()

    def write_head(self) -> None:
        """Begin the log with what is trained, and how."""
        self._log.step = self._num_steps
        self._log.write("run", **self._world.head(self._options))
        self._write_plans()

    def _write_plans(self) -> None:
        for plan in self.history:
            self._log.write("plan", **asdict(plan))

    def hold(self, ranks: Sequence[int]) -> None:
        """Give ranks that are in quarantine no samples from the next plan on."""
        if self._controller is not None and self._options.is_adaptive:
            self._controller.quarantine.hold(ranks)

    def go_on_from(self, older: PlanLoop) -> None:
        """Take over what outlives a world: what devices took, and what was plugged in."""
        self.num_passes, self.timer.device_clock = older.num_passes, older.timer.device_clock
        self._archive = older._archive
        self._recall()

    def _recall(self) -> None:
        if self._controller is not None:
            self._controller.recall(self._archive.recall(self._world.keys))

    @property
    def plan(self) -> Plan:
        """The newest plan; of those repeated from an earlier run, the one in force."""
        newest = self._batches.next_step if self._options.policy.given_plans else math.inf
        return next(plan for plan in reversed(self.history) if plan.first_step <= newest)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return self._num_steps

    @property
    def interval(self) -> int:
        """Steps from the last exchange of times to the next."""
        return self._schedule.interval

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
        local = sizes.sizes[self._transport.rank]
        self.timer.batch_arrived(local=local, remote=0, fetch_s=fetch_s, stall_s=fetch_s)

    def step_ended(self, *, waited_s: float) -> None:
        """Close an optimizer step; exchange times and plans when it is time for them."""
        self.timer.step_ended(waited_s=waited_s, counts=self._counts())
        self._batches.step_ended()
        self._num_steps += 1
        self._log.step = self._num_steps
        if not self._is_compared:
            self._compare()
        self._take_plan()
        if self._num_steps >= self._schedule.at - 1 and not self._exchange.is_sending:
            self._send_times()
        if self._num_steps >= self._schedule.at:
            report, interval = self._read_report()
            plan = self._next_plan(report, interval)
            if self._options.is_adaptive:
                self._exchange.send_plan(plan)
            wanted = self._schedule.interval if report is None else report.next_interval
            self._schedule.follow(self._num_steps, wanted)

    def _compare(self) -> None:
        """Compare what ranks went on from: plans, steps taken, and the batch just trained."""
        self._is_compared = True
        if self._transport.world_size == 1:
            return
        fields = {
            "number of steps taken": str(self._num_steps),
            "plans": str(self.history),
            "batch of the first step": str(self._batches.trained),
        }
        compare_starts(self._transport, fields, name=self._options.name)

    def epoch_ended(self) -> None:
        """Close an epoch; a run shorter than an interval still exchanges times once."""
        self.timer.pause()
        if not self.times:
            self._read_report()
            self._send_times()
            self._read_report()

    def _counts(self) -> bool:
        """Say whether the step that ends now shows what the newest plan's steps take."""
        trained = self._batches.trained
        if trained is None or trained.sizes != self.plan.sizes:
            return False
        return trained.step >= self.plan.first_step + SETTLE_STEPS * self.num_passes

    def _send_times(self) -> None:
        sums = self.timer.take()
        interval = self._schedule.propose(sums, num_passes=self.num_passes)
        drawn_ahead = self._batches.drawn_ahead
        self._exchange.send_times(
            sums,
            head=Head(
                self._num_steps,
                self.plan.plan_id,
                self._batches.trail,
                drawn_ahead,
                interval,
            ),
            uses=(self._load.cpu_use(), self._load.memory_use()),
        )

    def _read_report(self) -> tuple[Report | None, Interval | None]:
        """Return what ranks sent, and what may be believed of it; screened once for all."""
        report = self._exchange.receive_times()
        if report is None:
            return None, None
        check_same_run(report)
        if any(entry.steps for entry in report.times):
            self.times = report.times
            self._log.write("times", ranks=[asdict(entry) for entry in report.times])
        interval = report.screened(step=self._batches.next_step - 1, sizes=self.plan.sizes)
        if interval is not None:
            self._archive.add(self._world.keys, interval)
        return report, interval

    def _next_plan(self, report: Report | None, interval: Interval | None) -> Plan:
        """Return rank 0's new plan, or the one in force; other ranks' return does not count."""
        is_deciding = self._controller is not None and self._transport.rank == 0
        if not is_deciding or report is None or interval is None:
            return self.plan
        assert self._controller is not None
        self._controller.observe(interval)
        plan = self._controller.decide(report.first_free_step(self.num_passes)) or self.plan
        if self._log.path is not None:
            fit = self._controller.policy.fit
            if fit is not None:
                self._log.write("fit", ranks=fit_record(fit))
            self._log.write("explain", text=self._controller.explain())
        return plan

    def _take_plan(self) -> None:
        total = self._options.global_batch_size
        plan = self._exchange.receive_plan(global_batch_size=total)
        if plan is None or plan.plan_id == self.plan.plan_id:
            return
        self._world.check_plan(plan, after=self.plan, rank=self._transport.rank)
        self._batches.check_start(plan, rank=self._transport.rank)
        self.timer.discard()  # times at the old sizes
        self.history.append(plan)
        if self._transport.rank == 0:
            _LOGGER.info(
                "plan %d from step %d: sizes %s", plan.plan_id, plan.first_step, list(plan.sizes)
            )
        self._log.write("plan", **asdict(plan))

    def explain(self) -> str:
        """Say what is planned, why (on rank 0), what steps consist of, and which rank is slow."""
        total = self._options.global_batch_size
        head = (
            f"plan {self.plan.plan_id}: sizes {list(self.plan.sizes)} of global_batch_size={total}"
        )
        if not self.times:
            return f"{head}\nno times yet: ranks exchange them at step {self._schedule.at}"
        if self._controller is not None:
            own = "models and reasons are rank 0's: call explain() there, or read the run log"
            head = self._controller.explain() if self._transport.rank == 0 else f"{head}\n{own}"
        return f"{head}\n{describe(self.times)}"

    def decisions(self) -> list[Decision]:
        """Return every plan and why it was made, which rank 0 alone knows."""
        if self._controller is not None:
            made = self._controller.history
            return [each for each in made if each.plan_id <= self.plan.plan_id]
        return [Decision(**asdict(plan), reason="given") for plan in self.history]

    def state_dict(self) -> dict[str, Any]:
        """Return plans, steps, times by device and, on rank 0, what was learnt; JSON-able."""
        return {
            "num_steps": self._num_steps,
            "next_step": self._batches.next_step,
            "plans": [[plan.plan_id, plan.first_step, *plan.sizes] for plan in self.history],
            "controller": None if self._controller is None else self._controller.state_dict(),
            "policy": self._options.policy_text,
            "devices": list(self._world.keys),
            "measured": self._archive.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on every rank.

        With other devices, or the same in another order, another policy or global batch, or caps
        found since, plans start afresh, from what is known of each device.
        """
        self._exchange.forget()
        self._archive.load_state_dict(state.get("measured", {}))
        if can_go_on(state, self._world, self._options, warns=self._transport.rank == 0):
            self.history = plans_of(state)
            if self._controller is not None and state["controller"] is not None:
                self._controller.load_state_dict(state["controller"])
                self._controller.forget_after(self.plan.plan_id)
        else:
            self._controller = self._world.make_controller(self._options)
            self.history = self._world.first_plans(self._options, self._controller)
            self._recall()
        self._num_steps = self._log.step = int(state["num_steps"])
        self._write_plans()
        self._schedule.restart(self._num_steps)
        self._is_compared = False


def check_same_run(report: Report) -> None:
    """Raise when ranks are at different steps or plans, or have trained on other batches.

    Raises:
        MismatchError: names the rank and its step and plan.
    """
    steps, plans = report.column("num_steps").tolist(), report.column("plan_id").tolist()
    for rank, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        if (step, plan) != (steps[0], plans[0]):
            raise MismatchError(
                f"rank {rank} is at step {step:.0f} with plan {plan:.0f}, but rank 0 at step "
                f"{steps[0]:.0f} with plan {plans[0]:.0f}; every rank must take the same steps"
            )
    trails = report.column("trail").tolist()
    if any(trail != trails[0] for trail in trails):
        raise MismatchError(
            f"ranks {odd_ones(trails)} have trained on other batches than the rest since the "
            f"last exchange (now at step {steps[0]:.0f}): the samples, sizes or steps of their "
            "global batches differ. Give every rank the same data set, seed, epoch and "
            "loaded state, and let none skip a batch"
        )
