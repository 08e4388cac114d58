"""The object a user holds: which rank computes how many samples, and what each rank's time says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.explain import RankTimes
from loft_hvd.balance.loop import PlanLoop
from loft_hvd.balance.options import BalancerOptions
from loft_hvd.balance.plan import Plan, StepSizes, proportional_sizes
from loft_hvd.balance.policies import Policy
from loft_hvd.config import config
from loft_hvd.errors import PlanError, UsageError
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Transport
from loft_hvd.transport.default import default_transport

__all__ = ["Balancer"]

_CUDA_GRAIN = 8


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
        self._batches = BatchQueue()
        self._clock = clock
        self._loop = PlanLoop(self._options, self._transport, self._batches, clock)
        if not config().is_elastic:  # elastic ranks start at different times: see begin_world
            self._agree()

    def _agree(self) -> None:
        check_agreement(
            self._transport,
            self._options.fields(),
            what="Balancer",
            name="loft.balancer",
            timeout_s=config().timeout_s,
        )

    def begin_world(self) -> None:
        """Plan afresh for the ranks there are now; ``loft.elastic.State`` calls it on each.

        Raises:
            PlanError: sizes that were given as a list do not fit the new number of ranks.
        """
        num_passes = self._loop.num_passes
        self._options = replace(self._options, world_size=self._transport.world_size)
        self._batches.restart()
        self._loop = PlanLoop(self._options, self._transport, self._batches, self._clock)
        self._loop.num_passes = num_passes
        self._agree()

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
        return self._loop.plan

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
        self._loop.num_passes = num_passes

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
        self._loop.timer.batch_arrived(local=local, remote=remote, fetch_s=fetch_s, stall_s=stall_s)

    def clear_pending(self) -> None:
        """Forget queued sizes and the current batch: they will not be trained on."""
        self._batches.clear()

    def end_epoch(self) -> None:
        """Close an epoch; every rank calls it at the same step."""
        self._loop.epoch_ended()
        self._batches.clear()

    @contextmanager
    def step(self, num_samples: int, *, fetch_s: float = 0.0) -> Iterator[None]:
        """Wrap one batch of a loader of the script's own, and measure what follows.

        With a ``BatchSampler`` behind the loader the batch's sizes are known already; without one
        they are the plan's.

        Args:
            num_samples: samples of this rank's batch.
            fetch_s: seconds that fetching the batch took.

        Raises:
            PlanError: the batch is not of the planned size, so its weight would be wrong.
        """
        sizes = self._batches.queued
        if sizes is None:
            plan = self.plan_at(self._batches.next_step)
            sizes = StepSizes(plan.plan_id, self._batches.next_step, plan.sizes)
            self._batches.begin(sizes)
        planned = sizes.sizes[self.rank]
        if num_samples != (planned or self.min_batch):  # a dummy batch where none is planned
            raise PlanError(
                f"rank {self.rank}: a batch of {num_samples} samples, but the sizes of step "
                f"{sizes.step} are {list(sizes.sizes)}; load as many as planned, or use "
                "loft.DataLoader, which also plans the last batch of an epoch"
            )
        self._loop.timer.batch_arrived(local=planned, remote=0, fetch_s=fetch_s, stall_s=fetch_s)
        yield

    def begin_own_batch(self) -> None:
        """Note that training on a batch begins, if no loader of ours has said so."""
        self._loop.begin_own_batch()

    def leave_step_out(self) -> None:
        """Leave the step that goes on out of all times: something else ran in front of it."""
        self._loop.timer.leave_out()

    def exclude(self) -> AbstractContextManager[None]:
        """Leave what runs inside (evaluation, checkpoints, own collectives) out of all times."""
        return self._loop.timer.exclude()

    # What an optimizer asks for and reports.

    def take_step(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to.

        Raises:
            UsageError: no batch was handed out for it.
        """
        return self._batches.take()

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Note a gradient; the last one of a batch ends its computing (``StepTimer``)."""
        self._loop.timer.gradient_arrived(blocked_s=blocked_s)

    def computing_ended(self) -> None:
        """Note that all gradients of a step are there, before waiting for other ranks."""
        self._loop.timer.computing_ended()

    def step_ended(self, *, waited_s: float) -> None:
        """Close an optimizer step; exchange times and plans when it is time for them."""
        self._loop.step_ended(waited_s=waited_s)

    # What a user reads.

    @property
    def history(self) -> list[Plan]:
        """Every plan of the run, the newest last."""
        return self._loop.history

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """Average times of every rank over the last interval, [world_size]; empty at first."""
        return self._loop.times

    def explain(self) -> str:
        """Say in plain words what each rank's steps consist of, and which rank is slow and why.

        On rank 0 also what the policy makes of it: its models, its plan and the reason.
        """
        return self._loop.explain()

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
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on every rank; afresh if the world has changed."""
        self._loop.load_state_dict(state)
        self._batches.restart()
