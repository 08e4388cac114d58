"""The object a user holds: which rank computes how many samples, and what each rank's time says."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from loft_hvd.balance.explain import TIME_FIELDS, RankTimes, describe, read_times
from loft_hvd.balance.plan import Plan, StepSizes, equal_sizes, proportional_sizes
from loft_hvd.balance.timing import StepTimer
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError, UsageError
from loft_hvd.topology import allowed_cpus, run_queue_s
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Transport, Work, wait_for
from loft_hvd.transport.default import default_transport

__all__ = ["Balancer"]

Policy = str | Sequence[int]


class Balancer:
    """Gives each rank its share of the global batch, and says where each rank's time goes.

    Make it on every rank, after ``hvd.init()``. The loader draws batches of ``local_batch_size``
    from it, the optimizer weighs gradients by it. Every ``interval`` steps ranks exchange a
    few numbers each, in the background, which ``explain`` puts into words.

    Args:
        global_batch_size: samples of all ranks together in one backward pass, > 0.
        policy: "uniform" (equal sizes), "report" (equal sizes; made for its ``explain``), or the
            list of every rank's samples, [world_size], adding up to ``global_batch_size``.
        min_batch: samples of the dummy batch of a rank that has none, >= 1.
        interval: steps between two exchanges, >= 1.
        transport: the ranks; Horovod's by default.
        clock: seconds that never go back.

    Raises:
        PlanError: sizes are of the wrong number or sum.
        MismatchError: ranks were given different values.
    """

    def __init__(
        self,
        global_batch_size: int,
        policy: Policy = "uniform",
        *,
        min_batch: int = 2,
        interval: int = 20,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for what, value in (
            ("global_batch_size", global_batch_size),
            ("min_batch", min_batch),
            ("interval", interval),
        ):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"Balancer: {what}={value!r} must be a whole number")
            if value < 1:
                raise ArgumentError(f"Balancer: {what}={value} must be >= 1")
        self._transport = default_transport() if transport is None else transport
        self.global_batch_size = global_batch_size
        self.policy = policy
        self.min_batch = min_batch
        self.interval = interval
        self._min_ranks = 1
        sizes = _sizes_of(policy, global_batch_size, self._transport.world_size)
        self.history: list[Plan] = [Plan(0, 0, sizes)]
        self._pending: deque[StepSizes] = deque()  # of a BatchSampler, which runs ahead
        self._current: StepSizes | None = None  # of a loader that says when it yields
        is_crowded = self._transport.local_size > allowed_cpus()
        self._timer = StepTimer(clock, run_queue_s if is_crowded else None)
        self._num_steps = 0
        self._exchange: tuple[Work, Tensor, Tensor] | None = None
        self._times: tuple[RankTimes, ...] = ()
        check_agreement(
            self._transport,
            {
                "global_batch_size": str(global_batch_size),
                "policy": str(policy if isinstance(policy, str) else list(policy)),
                "min_batch": str(min_batch),
                "interval": str(interval),
            },
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

    def require_ranks(self, min_ranks: int) -> None:
        """Make every step keep at least ``min_ranks`` ranks with samples.

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

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at a step, counted over epochs."""
        return next(plan for plan in reversed(self.history) if plan.first_step <= step)

    def push_sizes(self, step_sizes: StepSizes) -> None:
        """Queue the sizes of a batch that this rank will train on next, in order."""
        self._pending.append(step_sizes)

    def begin_batch(
        self, step_sizes: StepSizes, *, fetch_s: float, local: int = 0, remote: int = 0
    ) -> None:
        """Note the batch that the script gets now, in place of any before it; start its clock.

        Args:
            step_sizes: samples of every rank in this batch's step.
            fetch_s: seconds that reading and preparing it took.
            local: samples of it that were on this rank's own node.
            remote: samples of it that came from elsewhere.
        """
        self.clear_pending()
        self._current = step_sizes
        self._timer.batch_arrived(step_sizes.sizes[self.rank], fetch_s=fetch_s)

    def clear_pending(self) -> None:
        """Forget queued sizes and the current batch: they will not be trained on."""
        self._pending.clear()
        self._current = None

    def end_epoch(self) -> None:
        """Close an epoch; every rank calls it at the same step."""
        self._timer.pause()
        self.clear_pending()
        if not self._times:  # a run shorter than an interval still has something to say
            self._collect()
            self._start_exchange()
            self._collect()

    @contextmanager
    def step(self, num_samples: int, *, fetch_s: float = 0.0) -> Iterator[None]:
        """Wrap one batch of a loader that knows nothing of the balancer.

        Args:
            num_samples: samples of this rank's batch; must be what the plan says.
            fetch_s: seconds that fetching the batch took.

        Raises:
            PlanError: the batch is not of the planned size, so its weight would be wrong.
        """
        plan = self.plan_at(self._num_steps)
        if num_samples != plan.sizes[self.rank]:
            raise PlanError(
                f"rank {self.rank}: a batch of {num_samples} samples, but the plan's sizes are "
                f"{list(plan.sizes)}; load local_batch_size samples, or use loft.DataLoader, "
                "which also plans the last batch of an epoch"
            )
        self.begin_batch(StepSizes(plan.plan_id, self._num_steps, plan.sizes), fetch_s=fetch_s)
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
        if self._pending:
            return self._pending.popleft()
        if self._current is None:
            raise UsageError(
                "a backward pass without a batch: the optimizer has a balancer, so each backward "
                "pass needs a batch from loft.DataLoader, a loft.BatchSampler, or "
                "`with balancer.step(n)`"
            )
        return self._current

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Note a gradient; the last one of a batch ends its computing (``StepTimer``)."""
        self._timer.gradient_arrived(blocked_s=blocked_s)

    def computing_ended(self) -> None:
        """Note that all gradients of a step are there, before waiting for other ranks."""
        self._timer.computing_ended()

    def step_ended(self, *, waited_s: float) -> None:
        """Close an optimizer step, and exchange times when the interval is full."""
        self._timer.waited(waited_s)
        self._timer.step_ended()
        self._num_steps += 1
        # Started one step early, the exchange is over when it is read: nobody waits for it.
        if self._num_steps % self.interval == (self.interval - 1) % self.interval:
            self._start_exchange()
        if self._num_steps % self.interval == 0:
            self._collect()

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
        if not self.times:
            return f"{head}\nno times yet: ranks exchange them every {self.interval} steps"
        return f"{head}\n{describe(self.times)}"

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
        """Return what a restart needs: the plan in force and the steps taken, JSON-able."""
        return {
            "num_steps": self._num_steps,
            "plans": [[plan.plan_id, plan.first_step, *plan.sizes] for plan in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; equal sizes again if the world has changed."""
        plans = [Plan(row[0], row[1], tuple(row[2:])) for row in state["plans"]]
        if plans[-1].world_size == self.world_size:
            self.history = plans
        self._num_steps = int(state["num_steps"])
        self.clear_pending()

    def _start_exchange(self) -> None:
        row = torch.from_numpy(self._timer.take())
        rows = torch.zeros(self.world_size, len(TIME_FIELDS), dtype=torch.float64)
        if self.world_size == 1:
            self._times = read_times(row.view(1, -1).numpy())
            return
        work = self._transport.allgather(row, rows.view(-1), name="loft.times")
        self._exchange = (work, row, rows)

    def _collect(self) -> None:
        if self._exchange is None:
            return
        (work, _, rows), self._exchange = self._exchange, None
        wait_for(work, what="exchange of times", timeout_s=config().timeout_s)
        self._times = read_times(rows.numpy())


def _sizes_of(policy: Policy, global_batch_size: int, world_size: int) -> tuple[int, ...]:
    if isinstance(policy, str):
        if policy not in ("uniform", "report"):
            raise ArgumentError(
                f"Balancer: policy={policy!r} is not known; it takes 'uniform', 'report' or a "
                "list with every rank's samples, such as [96, 96, 48, 16]"
            )
        if global_batch_size < world_size:
            raise PlanError(
                f"global_batch_size={global_batch_size} is smaller than world_size={world_size}; "
                "every rank needs a sample, so raise it or start fewer ranks"
            )
        return equal_sizes(global_batch_size, world_size)
    sizes = tuple(int(size) for size in policy)
    if len(sizes) != world_size:
        raise PlanError(
            f"policy={list(sizes)} has {len(sizes)} sizes, but world_size={world_size}; give one "
            "size for every rank"
        )
    if sum(sizes) != global_batch_size or min(sizes) < 0:
        raise PlanError(
            f"policy={list(sizes)} adds up to {sum(sizes)}, but "
            f"global_batch_size={global_batch_size}; sizes must be >= 0 and add up to it"
        )
    return sizes
