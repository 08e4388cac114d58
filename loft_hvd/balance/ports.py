"""What loaders and optimizers ask of a balancer, and what they tell it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.device_clock import make_device_clock
from loft_hvd.balance.loop import PlanLoop
from loft_hvd.balance.memory import MemoryWatch, logged_caps
from loft_hvd.balance.options import BalancerOptions
from loft_hvd.balance.plan import Plan, StepSizes
from loft_hvd.balance.probe import agree_on_probes, try_batches
from loft_hvd.balance.world import assume, meet
from loft_hvd.config import config
from loft_hvd.errors import PlanError, UsageError
from loft_hvd.runlog import RunLog
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.local import LocalWorld

__all__ = ["BalancerPorts"]

_logger = logging.getLogger(__name__)
_UNTIMED = 2  # intervals without times that are worth a warning


class BalancerPorts:
    """The side of a balancer that a loader and an optimizer are plugged into.

    Args:
        options: what the user asked for.
        transport: the ranks.
        clock: seconds that never go back.
        log: where what happens is written.

    Attributes:
        log: the same; off unless it was asked for, and on ranks other than 0.
    """

    def __init__(
        self,
        options: BalancerOptions,
        transport: Transport,
        clock: Callable[[], float],
        log: RunLog,
    ) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self.global_batch_size = options.global_batch_size
        self.min_batch = options.min_batch
        self._min_ranks = 1
        self._own_cap: int | None = None  # as probed
        self._is_plugged = False
        self._base = options.global_batch_size, options.world_size  # what a resize starts from
        self._batches = BatchQueue()
        self.log = log
        caps = {} if log.path is None else logged_caps(log.path.parent)
        if config().is_elastic:  # ranks start at different times: they meet in begin_world
            self._world = assume(options)
        else:
            self._agree()
            self._world = meet(transport, options, found=caps)
        self._memory = MemoryWatch(  # last: a balancer that is refused observes nothing
            lambda: transport.rank, lambda: self._world, self._batches, lambda: self.log
        )
        self._memory.caps = caps
        self._loop = PlanLoop(options, self._world, transport, self._batches, clock, log)

    def _agree(self) -> None:
        """Compare what ranks were given."""
        with self.log.faults():
            check_agreement(
                Channel(self._transport, "loft.balancer"),
                self._options.fields() | {"global_batch_size": str(self._base[0])},
                what="Balancer",
                refusal=self.log.refusal,
            )

    def _start_anew(self) -> None:
        """Go on with another world or other limits, on every rank, between two steps."""
        self._batches.restart()
        self._agree()
        self._resize()
        known, fresh = self._memory.caps, self._own_cap
        self._world = meet(self._transport, self._options, found=known, own_cap=fresh)
        self._memory.caps, self._own_cap = dict(self._world.found), None
        older = self._loop
        self._loop = PlanLoop(
            self._options, self._world, self._transport, self._batches, self._clock, self.log
        )
        self._loop.go_on_from(older)

    def _resize(self) -> None:
        """Work out the global batch of the ranks there are now, by rank 0's first world."""
        world_size = self._transport.world_size
        total, first_size = self._base
        if self._options.on_resize == "keep_per_rank":
            base = torch.tensor([first_size])
            channel = Channel(self._transport, "loft.balancer.base")
            channel.broadcast(base, what="size of the first world")
            first_size = int(base)
            self._base = total, first_size
            total = max(1, round(total * world_size / first_size))
        self._options = replace(self._options, world_size=world_size, global_batch_size=total)
        self.global_batch_size = total

    def _probe(
        self, step_fn: Callable[[int], object], *, limit: int | None, headroom: float
    ) -> tuple[int, ...]:
        if self._is_plugged or self._loop.num_steps or self._batches.next_step:
            raise UsageError(
                "probe: it must come before DistributedOptimizer (or attach) and before training: "
                "their hooks would wait for other ranks, which try other sizes"
            )
        grain = self._world.grain
        if limit is None:
            limit = self.global_batch_size - (self.world_size - 1) * self.min_batch
        own = try_batches(step_fn, limit=max(limit, 1), grain=grain, headroom=headroom)
        self._own_cap = own.cap
        if config().is_elastic:  # the others learn it in begin_world
            return agree_on_probes(LocalWorld(1).transport(0), own, grain=grain)
        caps = agree_on_probes(self._transport, own, grain=grain)
        for rank, cap in enumerate(caps):
            self._memory.found(rank, cap, size=None, source="probe")
        self._start_anew()
        return caps

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
    def history(self) -> list[Plan]:
        """Every plan of the run, the newest last."""
        return self._loop.history

    @property
    def local_batch_size(self) -> int:
        """Samples of this rank in the next batch to train on: those ``step`` expects."""
        return self._batches.upcoming(self.history).sizes[self.rank]

    @property
    def next_step(self) -> int:
        """Number of the next step to train on, counted over epochs."""
        return self._batches.next_step

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
        self._is_plugged = True
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
        self,
        step_sizes: StepSizes,
        *,
        fetch_s: float,
        stall_s: float,
        local: int,
        remote: int,
        cached: int = 0,
    ) -> None:
        """Note the batch that the script gets now, in place of any before it; start its clock.

        Args:
            step_sizes: samples of every rank in this batch's step.
            fetch_s: seconds that reading and preparing it took, where that happened.
            stall_s: seconds of it that the script waited for.
            local: samples of it that were on this rank's own node or in its cache.
            remote: samples of it that came from elsewhere.
            cached: of ``local``, those that only the cache had.
        """
        self._batches.begin(step_sizes)
        if self._batches.seems_forgotten and self.rank == 0 and self.world_size > 1:
            warnings.warn(
                "batches go out, but no backward pass takes their sizes, so nothing is timed and "
                "gradients of unequal batches are not weighted: give the optimizer balancer=, or "
                "call loft.attach(optimizer, balancer); to evaluate, use a loader with train=False",
                stacklevel=3,
            )
        self._loop.timer.batch_arrived(
            local=local, remote=remote, cached=cached, fetch_s=fetch_s, stall_s=stall_s
        )

    def clear_pending(self) -> None:
        """Forget queued sizes and the current batch: they will not be trained on."""
        self._batches.clear()

    def end_epoch(self) -> None:
        """Close an epoch; every rank calls it at the same step."""
        with self.log.faults():
            self._loop.epoch_ended()
        self._batches.clear()

    def begin_own_batch(self) -> None:
        """Note that training on a batch begins, if no loader of ours has said so."""
        self._loop.begin_own_batch()

    def leave_step_out(self) -> None:
        """Leave the step that goes on, if one does, out of all times: it evaluates as well."""
        if self._loop.timer.since_step_s() is not None:
            self._loop.timer.leave_out()

    # What an optimizer asks for and reports.

    def log_to(self, log_dir: str | Path) -> None:
        """Write the run log there, unless it is being written already."""
        if self.rank == 0 and self.log.path is None:
            self.log.try_open(log_dir)
            self._loop.write_head()

    def compute_on(self, device: torch.device) -> None:
        """Take computing times by the clock of the parameters' device, where it has one."""
        self._loop.timer.device_clock = make_device_clock(device)

    def take_step(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to.

        Raises:
            UsageError: no batch was handed out for it.
        """
        return self._batches.take()

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Note a gradient; the last one of a batch ends its computing (``StepTimer``)."""
        self._loop.timer.gradient_arrived(blocked_s=blocked_s)

    def hold(self, ranks: Sequence[int]) -> None:
        """Give ranks that are in quarantine no samples from the next adaptive plan on."""
        self._loop.hold(ranks)

    def computing_ended(self) -> None:
        """Note that all gradients of a step are there, before waiting for other ranks."""
        self._loop.timer.computing_ended()

    def step_ended(self, *, waited_s: float) -> None:
        """Close an optimizer step; exchange times and plans when it is time for them."""
        with self.log.faults():
            self._loop.step_ended(waited_s=waited_s)
        loop = self._loop
        is_late = loop.num_steps == _UNTIMED * loop.interval and not loop.times
        if is_late and self._options.is_adaptive and self.rank == 0:
            _logger.warning(
                "no step has been timed in the first %d, so sizes stay as they are; behind a "
                "loader of your own, wrap each step in `with balancer.step(num_samples)`",
                loop.num_steps,
            )
