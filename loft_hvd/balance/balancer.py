"""The object a user holds: which rank computes how many samples, and what each rank's time says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.exchange import Exchange, Report
from loft_hvd.balance.explain import RankTimes, describe, read_times
from loft_hvd.balance.options import SETTLE_STEPS, BalancerOptions
from loft_hvd.balance.plan import Plan, StepSizes, proportional_sizes
from loft_hvd.balance.policies import Policy
from loft_hvd.balance.timing import StepTimer
from loft_hvd.config import config
from loft_hvd.errors import PlanError, UsageError
from loft_hvd.topology import LoadMeter, allowed_cpus, run_queue_s
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Transport
from loft_hvd.transport.default import default_transport

__all__ = ["Balancer"]

_CUDA_GRAIN = 8
# What the controller sees of a rank's times, in the order of ``observations.COLUMNS``.
_OBSERVED = (
    "samples",
    "local",
    "remote",
    "fetch_s",
    "stall_s",
    "compute_s",
    "wait_s",
    "other_s",
)


class Balancer:
    """Gives each rank its share of the global batch, and says where each rank's time goes.

    Make it on every rank, after ``hvd.init()``. The loader draws batches of ``local_batch_size``
    from it, the optimizer weighs gradients by it. Every ``interval`` steps ranks exchange a few
    numbers each, in the background; rank 0 fits them and, with an adaptive policy, plans new sizes
    that come into force at the same step everywhere.

    Args:
        global_batch_size: samples of all ranks together in one backward pass, > 0.
        policy: "loft" (sizes that even out fetch and compute times, after LOFT), "lbbsp-cpu" and
            "lbbsp-gpu" (compute times only, after LB-BSP), "uniform" (equal sizes), "report"
            (equal sizes; made for its ``explain``), a policy object such as ``Replay``, or the
            list of every rank's samples, [world_size], adding up to ``global_batch_size``.
        min_batch: fewest samples an adaptive policy gives a rank, and the samples of the dummy
            batch of a rank that has none, >= 1.
        max_batch: most samples of a rank under an adaptive policy (its memory): one number, one
            for each rank (None for no limit), or None.
        grain: adaptive sizes are multiples of this, but for one rank when the global batch is
            not; None takes 8 where torch sees a CUDA device, else 1.
        interval: optimizer steps between two exchanges, >= 1, and >= 3 with an adaptive policy.
        dead_band: predicted gain below which "loft" leaves the sizes as they are.
        transport: the ranks; Horovod's by default.
        clock: seconds that never go back.

    Raises:
        PlanError: sizes are of the wrong number or sum, or the limits leave none.
        MismatchError: ranks were given different values.
    """

    def __init__(
        self,
        global_batch_size: int,
        policy: str | Sequence[int] | Policy = "loft",
        *,
        min_batch: int = 2,
        max_batch: int | Sequence[int | None] | None = None,
        grain: int | None = None,
        interval: int = 20,
        dead_band: float = 0.03,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = default_transport() if transport is None else transport
        if grain is None:
            grain = _CUDA_GRAIN if torch.cuda.is_available() else 1
        self._options = BalancerOptions(
            global_batch_size,
            self._transport.world_size,
            policy,
            min_batch=min_batch,
            max_batch=max_batch,
            grain=grain,
            interval=interval,
            dead_band=dead_band,
        )
        self.global_batch_size = global_batch_size
        self.policy = policy
        self.min_batch = min_batch
        self.interval = interval
        self._min_ranks = 1
        self._num_passes = 1
        self._controller = self._options.make_controller()
        self.history: list[Plan] = [Plan(0, 0, self._options.first_sizes(self._controller))]
        self._batches = BatchQueue()
        is_crowded = self._transport.local_size > allowed_cpus()
        self._timer = StepTimer(clock, run_queue_s if is_crowded else None)
        self._load = LoadMeter()
        self._num_steps = 0
        self._exchange = Exchange(self._transport)
        self._times: tuple[RankTimes, ...] = ()
        check_agreement(
            self._transport,
            self._options.fields(),
            what="Balancer",
            name="loft.balancer",
            timeout_s=config().timeout_s,
        )

    # What a loader asks for and reports.

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        return self.history[-1]

    @property
    def local_batch_size(self) -> int:
        """Samples of this rank in a step of the newest plan."""
        return self.plan.sizes[self.rank]

    @property
    def min_ranks(self) -> int:
        """Ranks that must have samples in every step: 2f+1 of the optimizer's rule, or 1."""
        return self._min_ranks

    def require(self, *, min_ranks: int, num_passes: int) -> None:
        """Take what an optimizer needs of every plan.

        Args:
            min_ranks: ranks that must have samples in every step.
            num_passes: backward passes of a step; plans change at its first.

        Raises:
            PlanError: the plan itself has fewer.
        """
        num_present = sum(size > 0 for size in self.plan.sizes)
        if num_present < min_ranks:
            raise PlanError(
                f"the rule needs {min_ranks} ranks with samples in every step, but sizes "
                f"{list(self.plan.sizes)} give samples to {num_present}; lower f or give more "
                "ranks samples"
            )
        self._min_ranks = max(self._min_ranks, min_ranks)
        self._num_passes = num_passes

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at a step, counted over epochs; asked when it is drawn."""
        self._batches.drawn(step)
        return next(plan for plan in reversed(self.history) if plan.first_step <= step)

    def push_sizes(self, step_sizes: StepSizes) -> None:
        """Queue the sizes of a batch that this rank will train on next, in order."""
        self._batches.push(step_sizes)

    def begin_batch(
        self, step_sizes: StepSizes, *, fetch_s: float, stall_s: float, local: int, remote: int
    ) -> None:
        """Note the batch that the script gets now, in place of any before it; start its clock.

        Args:
            step_sizes: samples of every rank in this batch's step.
            fetch_s: seconds that reading and preparing it took, where that happened.
            stall_s: seconds of it that the script waited for.
            local: samples of it that were on this rank's own node.
            remote: samples of it that came from elsewhere.
        """
        self._batches.begin(step_sizes)
        self._timer.batch_arrived(local=local, remote=remote, fetch_s=fetch_s, stall_s=stall_s)

    def clear_pending(self) -> None:
        """Forget queued sizes and the current batch: they will not be trained on."""
        self._batches.clear()

    def end_epoch(self) -> None:
        """Close an epoch; every rank calls it at the same step."""
        self._timer.pause()
        self._batches.clear()
        if not self._times:  # a run shorter than an interval still has something to say
            self._read_report(self._exchange.receive_times())
            self._send_times()
            self._read_report(self._exchange.receive_times())

    @contextmanager
    def step(self, num_samples: int, *, fetch_s: float = 0.0) -> Iterator[None]:
        """Wrap one batch of a loader that knows nothing of the balancer.

        Args:
            num_samples: samples of this rank's batch; must be what the plan says.
            fetch_s: seconds that fetching the batch took.

        Raises:
            PlanError: the batch is not of the planned size, so its weight would be wrong.
        """
        at = self._batches.next_step
        plan = self.plan_at(at)
        if num_samples != plan.sizes[self.rank]:
            raise PlanError(
                f"rank {self.rank}: a batch of {num_samples} samples, but the plan's sizes are "
                f"{list(plan.sizes)}; load local_batch_size samples, or use loft.DataLoader, "
                "which also plans the last batch of an epoch"
            )
        sizes = StepSizes(plan.plan_id, at, plan.sizes)
        self.begin_batch(sizes, fetch_s=fetch_s, stall_s=fetch_s, local=num_samples, remote=0)
        yield

    def exclude(self) -> AbstractContextManager[None]:
        """Leave what runs inside (evaluation, checkpoints, own collectives) out of all times."""
        return self._timer.exclude()

    # What an optimizer asks for and reports.

    def take_step(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to.

        Raises:
            UsageError: no batch was handed out for it.
        """
        return self._batches.take()

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Note a gradient; the last one of a batch ends its computing (``StepTimer``)."""
        self._timer.gradient_arrived(blocked_s=blocked_s)

    def computing_ended(self) -> None:
        """Note that all gradients of a step are there, before waiting for other ranks."""
        self._timer.computing_ended()

    def step_ended(self, *, waited_s: float) -> None:
        """Close an optimizer step; exchange times and plans when it is time for them."""
        self._timer.step_ended(waited_s=waited_s, counts=self._counts())
        self._num_steps += 1
        phase = self._num_steps % self.interval
        if phase == (self.interval - 1) % self.interval:
            self._send_times()
        if phase == 0:
            plan = self._next_plan(self._read_report(self._exchange.receive_times()))
            if self._options.is_adaptive:
                self._exchange.send_plan(plan)
        elif phase == 1:
            self._take_plan(self._exchange.receive_plan(global_batch_size=self.global_batch_size))

    def _counts(self) -> bool:
        """Say whether the step that ends now shows what the newest plan's steps take."""
        plan, trained = self.plan, self._batches.trained
        if trained is None or trained.sizes != plan.sizes:
            return False
        return trained.step >= plan.first_step + SETTLE_STEPS * self._num_passes

    # What a user reads.

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """Average times of every rank over the last interval, [world_size]; empty at first."""
        return self._times

    def explain(self) -> str:
        """Say in plain words what each rank's steps consist of, and which rank is slow and why."""
        head = (
            f"plan {self.plan.plan_id}: sizes {list(self.plan.sizes)} of "
            f"global_batch_size={self.global_batch_size}"
        )
        lines = [head]
        if self.rank == 0 and self._controller is not None and self._times:
            lines = [self._controller.explain()]
        if not self.times:
            return f"{head}\nno times yet: ranks exchange them every {self.interval} steps"
        return "\n".join([*lines, describe(self.times)])

    def suggest_sizes(self) -> tuple[int, ...]:
        """Return the sizes that would take every rank the same time, by its measured speed.

        Raises:
            UsageError: nothing was measured yet.
        """
        speeds = [entry.samples_per_s for entry in self.times]
        if not speeds or sum(speeds) <= 0:
            raise UsageError(f"suggest_sizes: no times yet; train for {self.interval} steps first")
        return proportional_sizes(speeds, self.global_batch_size, min_batch=self.min_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return plans, steps taken and, on rank 0, what its controller has learnt; JSON-able."""
        return {
            "num_steps": self._num_steps,
            "plans": [[plan.plan_id, plan.first_step, *plan.sizes] for plan in self.history],
            "controller": None if self._controller is None else self._controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on every rank; afresh if the world has changed."""
        plans = [Plan(row[0], row[1], tuple(row[2:])) for row in state["plans"]]
        if plans[-1].world_size == self.world_size:
            self.history = plans
            if self._controller is not None and state["controller"] is not None:
                self._controller.load_state_dict(state["controller"])
        self._num_steps = int(state["num_steps"])
        self._batches.restart()

    def _send_times(self) -> None:
        self._exchange.send_times(
            self._timer.take(),
            num_steps=self._num_steps,
            plan_id=self.plan.plan_id,
            drawn_ahead=self._batches.drawn_ahead,
            shares=(self._load.cpu_use(), self._load.memory_use()),
        )

    def _read_report(self, report: Report | None) -> Report | None:
        if report is not None:
            report.check(world_size=self.world_size)
            times = read_times(report.times)
            if any(entry.steps for entry in times):
                self._times = times
        return report

    def _next_plan(self, report: Report | None) -> Plan:
        """Return rank 0's new plan, or the one in force; other ranks' return does not count."""
        if self._controller is None or report is None or self.rank != 0:
            return self.plan
        times = read_times(report.times)
        if times[0].steps == 0:
            return self.plan
        rows = [
            [getattr(entry, field) for field in _OBSERVED] + shares
            for entry, shares in zip(times, report.shares.tolist(), strict=True)
        ]
        step_s = times[0].wall_s
        self._controller.observe(np.array(rows), step=self._batches.next_step - 1, step_s=step_s)
        first_step = report.first_free_step(self._num_passes)
        return self._controller.decide(first_step) or self.plan

    def _take_plan(self, plan: Plan | None) -> None:
        if plan is None or plan.plan_id == self.plan.plan_id:
            return
        if plan.first_step <= self._batches.drawn_ahead:
            raise PlanError(
                f"rank {self.rank}: plan {plan.plan_id} starts at step {plan.first_step}, but "
                f"steps up to {self._batches.drawn_ahead} may be drawn already"
            )
        self._timer.take()  # times at the old sizes
        self.history.append(plan)
