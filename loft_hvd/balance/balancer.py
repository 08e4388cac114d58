"""The object a user holds: which rank computes how many samples, and what each rank's time says."""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from loft_hvd.balance.balancer_options import BalancerOptions, MaxBatch
from loft_hvd.balance.batches import OTHER_THREAD, BatchQueue, plan_in_force
from loft_hvd.balance.controller import write_decisions
from loft_hvd.balance.first_sizes import FirstSizes
from loft_hvd.balance.goodput import LR_RULES, GradientNoise, LrRule
from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.latency import Held
from loft_hvd.balance.learning_rate import read_lr_scale, scale_lr
from loft_hvd.balance.limits import assume_limits, meet
from loft_hvd.balance.live import LivePlan
from loft_hvd.balance.loft import DEAD_BAND
from loft_hvd.balance.meetings import follow, weigh_meetings
from loft_hvd.balance.memory import MemoryWatch, agree_on_probes, logged_caps, try_batches
from loft_hvd.balance.plan import MIN_BATCH, Counted, Plan, StepSizes, proportional_sizes
from loft_hvd.balance.policies import make_auto, make_policy
from loft_hvd.balance.policy import Policy
from loft_hvd.balance.resume import SavedRun
from loft_hvd.balance.stopwatch import make_device_clock
from loft_hvd.codec import decode
from loft_hvd.config import config
from loft_hvd.copies import NeverCopied
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError, UsageError
from loft_hvd.runlog import MOST_ROWS, open_run_log
from loft_hvd.transport.agreement import check_agreement, new_number
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.local import LocalWorld
from loft_hvd.transport.waits import meter_torch

__all__ = ["Balancer"]

_logger = logging.getLogger(__name__)
_MOST_COUNTED = 2**53  # which float64 holds one by one


class Balancer(NeverCopied):
    """Gives each rank its share of the global batch, and says where each rank's time goes.

    Make it on every rank, after ``hvd.init()``. The loader draws batches of ``local_batch_size``
    from it, the optimizer weighs gradients by it. Once an ``interval`` ranks exchange a few
    numbers each, in the background; rank 0 fits them and, with an adaptive policy, plans new sizes
    that come into force at the same step everywhere.

    Args:
        global_batch_size: samples of all ranks together in one backward pass, > 0; "auto" lets it
            follow the gradients' noise, from ``min_global`` on.
        policy: "loft" (sizes that even out fetch and compute times, after LOFT), "lbbsp-cpu" and
            "lbbsp-gpu" (compute times only, after LB-BSP), "uniform" (equal sizes), "report"
            (equal sizes; made for its ``explain``), a policy object such as ``Replay``, or the
            list of every rank's samples, [world_size], adding up to ``global_batch_size``.
        min_global: with "auto" the fewest samples of a global batch, those that the learning rate
            is for.
        max_global: with "auto" the most samples of one.
        lr_scale: with "auto" how the learning rate grows with the global batch: "adascale" (SGD),
            "sqrt" (Adam), "linear", or a function of the global batch, ``min_global`` and the noise
            scale that returns a factor; None takes "sqrt" for optimizers with betas, else
            "adascale". ``lambda *_: 1.0`` leaves it alone.
        min_batch: fewest samples an adaptive policy gives a rank, and the samples of the dummy
            batch of a rank that has none. With 0 "loft" may leave ranks out without which a step is
            shorter, all but rank 0: to those a ``loft.DataLoader`` yields None, or an empty list of
            micro-batches, and ``optimizer.step()`` takes part without a backward pass.
        max_batch: most samples of a rank (its memory), unless sizes are given as a list: one
            number, one for each rank, or a dict by device name, such as ``{"A100": 256, "T4": 64}``
            ("CPU" names any CPU); None for no limit. Ranks without one keep at most their first
            size until two intervals have been measured, and grow by at most 2x at a time.
        grain: adaptive sizes are multiples of this, but for one rank when the global batch is
            not; None takes 8 where any rank has a CUDA device, else 1.
        max_sizes: distinct sizes that a rank may have in a run, beside those of an epoch's last
            batch, since each may cost a recompilation; None takes 8 where any rank has a CUDA
            device, else any number.
        interval: optimizer steps between two exchanges, >= 1, and >= 3 with an adaptive policy;
            None takes 20 at first, then at least 20 and as many as take 30 seconds.
        dead_band: what a change costs, as a share of one interval: "loft" changes sizes once
            waiting should have lost as much. A gain of 1 % is taken at once, one of 0.5 % after two
            intervals.
        log_dir: folder in which rank 0 writes the run log (``loft-hvd report`` reads it); None
            takes ``LOFT_HVD_LOG_DIR``, and without it there is none.
        on_resize: what an elastic world of another size keeps: "keep_global", the global batch,
            or "keep_per_rank", its share a rank, so that the global batch grows with the world.
        micro_batches: let ``max_batch`` limit a backward pass, not a rank's share of a step: a
            share beyond it, up to 16 times, is computed in micro-batches and one optimizer step.
            A ``loft.DataLoader`` then yields the list of each step's micro-batches. A number, 1 to
            16, is as True; where the loader has ``cost=``, each rank may then have so many even
            where its memory holds less, and its batches have less padding.
        first_sizes: sizes that an adaptive policy starts from: every rank's, [world_size], or the
            file that ``loft-hvd plan --sizes`` wrote, which has them by host; None takes the file
            ``LOFT_HVD_FIRST_SIZES``, and without it sizes start equal, or in proportion to free
            memory where that of CUDA devices is unequal: make the balancer once the model is on its
            device. Rank 0's count. Where they are of other hosts or another global batch sizes
            start equal, with a warning.
        max_count: most that ``count`` may say of one sample, >= 1: the tokens of the longest text,
            the pixels of an image. Claims of more are cut, and told. None for no limit.
        transport: the ranks; by default Horovod's, else those of torch.distributed, else this one
            alone.
        clock: seconds that never go back.

    Raises:
        PlanError: sizes are of the wrong number or sum, or the limits leave none.
        MismatchError: ranks were given different values.
    """

    _in_place_of_a_copy = (
        "its state_dict() can be, or make another Balancer with the same arguments, on every rank"
    )

    def __init__(  # noqa: PLR0913 - a script sets few of them, by name
        self,
        global_batch_size: int | Literal["auto"],
        policy: str | Sequence[int] | Policy = "loft",
        *,
        min_global: int | None = None,
        max_global: int | None = None,
        lr_scale: str | LrRule | None = None,
        min_batch: int = MIN_BATCH,
        max_batch: MaxBatch = None,
        grain: int | None = None,
        max_sizes: int | None = None,
        interval: int | None = None,
        dead_band: float = DEAD_BAND,
        log_dir: str | Path | None = None,
        on_resize: str = "keep_global",
        micro_batches: bool | int = False,
        first_sizes: FirstSizes = None,
        max_count: int | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = default_transport() if transport is None else transport
        meter_torch()  # a script may wait in collectives of torch's beside any engine
        weigh_meetings()
        self.is_auto = global_batch_size == "auto"
        made, given = self._read_batch(
            global_batch_size, policy, least=min_global, most=max_global, dead_band=dead_band
        )
        self._lr_rule = read_lr_scale(lr_scale, is_auto=self.is_auto)
        self._options = BalancerOptions(
            given,
            self._transport.world_size,
            made,
            min_batch=min_batch,
            max_batch=max_batch,
            grain=grain,
            interval=interval,
            dead_band=dead_band,
            max_sizes=max_sizes,
            on_resize=on_resize,
            micro_batches=micro_batches,
            first_sizes=first_sizes,
            max_count=max_count,
        )
        self._base = given, self._transport.world_size  # what a resize starts from
        self._clock, self._log_dir = clock, log_dir
        self._own_cap: int | None = None  # as probed
        self._is_plugged = False  # into an optimizer
        self._number = 0  # among the balancers of its ranks; agreed on
        self._has_warned_ahead = False
        self.counts_samples = False  # the script says what batches really hold
        self._count: Counted | None = None  # of the next backward pass
        self._cut: set[int] = set()  # ranks that were told of
        self._is_from_main = True  # the newest batch was taken in Python's main thread
        self._batches = BatchQueue()
        self._batches.count_micro = self.count_micro
        self.policy, self.interval, self.min_batch = policy, interval, min_batch  # as given
        self.min_ranks = 1  # that must have samples in every step: 2f+1 of the optimizer's rule
        self.num_worlds = 0  # begun; what optimizers asked for is forgotten with each
        self.log = open_run_log(log_dir, rank=self._transport.rank)  # off on ranks other than 0
        caps = {} if self.log.path is None else logged_caps(self.log.path.parent)
        if config().is_elastic:  # ranks start at different times: they meet in begin_world
            self.limits = assume_limits(self._options)
        else:
            self._agree()
            self.limits = meet(self._transport, self._options, found=caps)
        # Behind all that refuses: a balancer that was never made observes no failures.
        self._memory = MemoryWatch(
            self._transport,
            self.limits,
            self._batches,
            self.log,
            is_planned=self._options.policy.plans_batches,
        )
        self._memory.caps = caps
        self._live = self._make_live()

    @staticmethod
    def _read_batch(
        global_batch_size: int | Literal["auto"],
        policy: str | Sequence[int] | Policy,
        *,
        least: int | None,
        most: int | None,
        dead_band: float,
    ) -> tuple[Policy, int]:
        """Return the policy, and the global batch that a run begins with."""
        if global_batch_size == "auto":
            auto = make_auto(policy, least=least, most=most, dead_band=dead_band)
            return auto, auto.least
        if (least, most) != (None, None):
            raise ArgumentError(
                f"Balancer: min_global={least} and max_global={most} are limits of "
                f"global_batch_size='auto', and it is {global_batch_size!r}; leave them away"
            )
        return make_policy(policy, dead_band=dead_band), global_batch_size

    def _make_live(self) -> LivePlan:
        return LivePlan(
            self._options,
            self.limits,
            Channel(self._transport, f"{self._options.name}.{self._number}"),
            self._batches,
            self._clock,
            self.log,
        )

    def _agree(self) -> None:
        """Compare what ranks were given, and learn which balancer of theirs this is."""
        # Before anything is exchanged whose shape or name depends on the options.
        with self.log.faults():
            check_agreement(
                Channel(self._transport, "loft.balancer"),
                self._options.fields() | {"global_batch_size": str(self._base[0])},
                what="Balancer",
                refusal=self.log.refusal,
            )
            # Another of the same options has its own times and plans on the way.
            self._number = new_number(Channel(self._transport, "loft.balancer.number"))

    # Worlds: the ranks there are, and what they can take.

    @property
    def transport(self) -> Transport:
        """The ranks that it plans for."""
        return self._transport

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    def check_world(self, world_size: int) -> None:
        """Raise unless the plan is for so many ranks, those of an optimizer.

        Raises:
            UsageError: it is not.
        """
        if len(self.plan.sizes) != world_size:
            raise UsageError(
                f"the balancer plans for {len(self.plan.sizes)} ranks, and this optimizer reduces "
                f"over {world_size}: both take the same ranks (transport=, no process_set= of "
                "some); with hvd.elastic.run, give both to the loft.elastic.State"
            )

    def begin_world(self) -> None:
        """Plan afresh for the ranks there are now; ``loft.elastic.State`` calls it on each.

        Raises:
            PlanError: sizes that were given as a list do not fit the new number of ranks.
        """
        if self.log.path is None or self.rank != 0:  # ranks are numbered anew
            self.log = self._memory.log = open_run_log(self._log_dir, rank=self.rank)
        self.num_worlds += 1
        self.min_ranks = 1  # optimizers say what they need of the new world
        self._start_anew()

    def _start_anew(self) -> None:
        """Go on with another world or other limits, on every rank, between two steps."""
        # Ranks that join take the same way from their ``begin_world``: in this order they exchange
        # options, the size of the first world, devices and caps.
        self._batches.restart()
        self._agree()
        self._resize()
        noise = self._agree_on_noise() if self.is_auto else None
        known, fresh = self._memory.caps, self._own_cap
        self.limits = meet(self._transport, self._options, found=known, own_cap=fresh)
        self._memory.limits, self._memory.caps = self.limits, dict(self.limits.found)
        self._own_cap = None
        # A new one: nothing of the old world's exchanges, steps or plans may reach into this one.
        older = self._live
        older.close()  # the new one starts the same policy afresh
        self._live = self._make_live()
        self._live.go_on_from(older)
        self._live.noise = noise

    def _agree_on_noise(self) -> GradientNoise | None:
        """Go on with rank 0's global batch, and with its noise: a rank that joins knows neither."""
        noise, total = self._live.noise, self._live.plan.global_batch_size
        known = astuple(GradientNoise(0, 0, 0, 0, 0, 0) if noise is None else noise)
        row = torch.tensor([total, *known], dtype=torch.float64)
        Channel(self._transport, "loft.balancer.batch").broadcast(row, what="global batch")
        first, signal, signal_error, variance, variance_error, scale_error, num_steps = row.tolist()
        self._options = self._options.going_on_with(round(first))
        if not num_steps:
            return None
        return GradientNoise(
            signal, signal_error, variance, variance_error, scale_error, round(num_steps)
        )

    def _resize(self) -> None:
        """Work out the global batch of the ranks there are now, by rank 0's first world."""
        world_size = self._transport.world_size
        total, first_size = self._base
        if self._options.on_resize == "keep_per_rank":
            # A rank that joins takes its own world for the first one; rank 0 has seen them all.
            base = torch.tensor([first_size])
            channel = Channel(self._transport, "loft.balancer.base")
            channel.broadcast(base, what="size of the first world")
            first_size = int(base)
            self._base = total, first_size
            total = max(1, round(total * world_size / first_size))
        self._options = replace(self._options, world_size=world_size, global_batch_size=total)

    def probe(
        self,
        step_fn: Callable[[int], object],
        *,
        limit: int | None = None,
        headroom: float = 0.1,
    ) -> tuple[int, ...]:
        """Find how many samples each rank's memory holds; call it on every rank before training.

        Each rank calls ``step_fn`` on its own with ever larger batches until memory is full, then
        in between; all other ranks wait for ``LOFT_HVD_TIMEOUT_S`` at most. What was found limits
        this run and goes to the run log. It must come before ``DistributedOptimizer`` is made,
        whose hooks would wait for other ranks.

        Args:
            step_fn: computes a batch of so many samples as training does, with its backward pass
                and without an optimizer's step; called at most ``2 * log2(limit / grain) + 2``
                times.
            limit: most samples to try; None takes what a rank can be given at most.
            headroom: share of what fits that is left free, for an optimizer's state and for
                fragments.

        Returns:
            Every rank's cap, [world_size]; ``limit`` where all of it fits. In elastic mode, where
            ranks start at different times, this rank's alone; the others learn it with the world.

        Raises:
            UsageError: training has begun, or an optimizer is plugged in.
            PlanError: a rank's memory does not hold the smallest batch, or all caps together do
                not hold the global batch.
            PeerError: ``step_fn`` has failed on another rank.
        """
        if self._is_plugged or self._live.num_steps or self._batches.next_step:
            raise UsageError(
                "probe: it must come before DistributedOptimizer (or attach) and before training: "
                "their hooks would wait for other ranks, which try other sizes"
            )
        grain = self.limits.grain
        if limit is None:
            limit = self.global_batch_size - (self.world_size - 1) * self.min_batch
        own = try_batches(step_fn, limit=max(limit, 1), grain=grain, headroom=headroom)
        self._own_cap = own.cap
        # In an elastic job others may not be there yet: a world of one agrees with itself, and the
        # others learn of the cap in begin_world.
        if config().is_elastic:
            return agree_on_probes(LocalWorld(1).transport(0), own, grain=grain)
        caps = agree_on_probes(self._transport, own, grain=grain)
        for rank, cap in enumerate(caps):
            self._memory.found(rank, cap, size=None, source="probe")
        self._start_anew()
        return caps

    # What a script reads and does.

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        return self._live.plan

    @property
    def global_batch_size(self) -> int:
        """Samples of a step by the newest plan, of the ranks that there are now."""
        return self.plan.global_batch_size if self.is_auto else self._options.global_batch_size

    @property
    def most_samples(self) -> int:
        """Samples of a step by any plan, at most."""
        return self._options.policy.most or self._options.global_batch_size

    @property
    def history(self) -> list[Plan]:
        """Every plan of the run, the newest last."""
        return self._live.history

    @property
    def local_batch_size(self) -> int:
        """Samples of this rank in the next batch to train on.

        0 where it has none: then give ``step`` a dummy batch of ``min_batch``. For a batch that is
        fetched ahead ask ``plan_at``.
        """
        return self._batches.upcoming(self.history).sizes[self.rank]

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each backward pass of this rank in its next batch; one without a split.

        For a loader of the script's own, with ``micro_batches=True``: ``x.split(sizes)``, in this
        order. A rank without samples has one dummy batch.
        """
        sizes = self._batches.current(self.history)
        micro = sizes.micro_sizes(self.rank)
        return micro if sum(micro) else (min(self.min_batch, sizes.total),)

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """Average times of every rank over the last interval, [world_size]; empty at first."""
        return self._live.times

    @property
    def noise(self) -> GradientNoise | None:
        """How much gradients differ from sample to sample, as an optimizer has measured it.

        The same on every rank; None in the first 25 steps, or where nobody measures it.
        """
        return self._live.noise

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
        follow(self)
        sizes = self._batches.begin_next(self.history)
        planned = sizes.sizes[self.rank]  # 0 for a rank that computes a dummy batch
        if num_samples != (planned or min(self.min_batch, sizes.total)):
            raise PlanError(
                f"rank {self.rank}: a batch of {num_samples} samples, but the sizes of step "
                f"{sizes.step} are {list(sizes.sizes)}; load as many as planned, or use "
                "loft.DataLoader, which also plans the last batch of an epoch. A loop that fetches "
                "a batch ahead of its step asks for the sizes of that step: between the forward "
                "and the backward pass balancer.plan_at(balancer.next_step + 1).sizes[rank]"
            )
        share = sizes.by_plan[self.rank]
        self._live.timer.batch_arrived(local=share, remote=0, fetch_s=fetch_s, stall_s=fetch_s)
        yield

    def weigh(self, loss: Tensor, num_samples: int | None = None) -> Tensor:
        """Weigh a batch's loss by its samples before the backward pass, in which ranks meet.

        For a model or a loss that exchanges values with other ranks and sends gradients back, such
        as a contrastive loss over gathered features::

            balancer.weigh(loss).backward()

        Gradients then count every sample the same wherever they cross ranks, and
        ``DistributedOptimizer``, ``attach`` and ``ddp_hook`` do not weigh them again. Plain
        ``DistributedDataParallel``, FSDP2 or an all-reduce that averages over ranks need nothing
        else; there call it once a batch, as nothing else says that it is trained. Weigh all losses
        of a training, or none. ``SyncBatchNorm`` is exact without it, under the first three.

        Args:
            loss: the mean over this rank's samples of the batch, or of the next micro-batch; not
                what other ranks' losses were averaged into.
            num_samples: samples that the loss is over, where a collate function or the script drops
                some, 0 to those planned. Ranks exchange them, so give it on every rank in every
                step. None: those planned. Of a dummy batch none counts, whatever is given.

        Returns:
            It, times ``world_size * size / total`` of the samples that count; 0 for a dummy batch.

        Raises:
            ArgumentTypeError: it is no tensor, or ``num_samples`` no whole number.
            PlanError: ``num_samples`` is more than planned, or less than 0.
            UsageError: ``num_samples`` of a batch in micro-batches.
        """
        if not isinstance(loss, Tensor):
            raise ArgumentTypeError(f"weigh: loss is a {type(loss).__name__}, and must be a tensor")
        # Nobody else may ask for this batch, as under plain DDP.
        batch = self.forward_sizes() if self._is_plugged else self._batches.pass_on(self.history)
        if num_samples is not None:
            batch = self._counted(batch, num_samples)
        factor = self._batches.weigh(batch, rank=self.rank)
        return loss if factor == 1.0 else loss * factor

    def count(self, number: int | Tensor, *, is_sum: bool = False) -> None:
        """Say what the loss of the next backward pass is over, where that is not samples.

        Such as the tokens whose labels are not ignored, or the valid pixels::

            balancer.count((labels != -100).sum())
            loss.backward()

        The step's gradient is then that of the mean over all that ranks have counted in it, however
        much that was on each. Ranks exchange their counts with the first bucket. So call it before
        each backward pass of a training, on every rank, or for none; with 0 where nothing counts.
        ``DistributedOptimizer``, ``attach``, ``ddp_hook`` and ``fsdp_hook`` ask for it; where none
        of them reduces gradients, ``weigh`` the loss.

        What a rank counts is its own claim. It is cut at ``max_count`` a sample, where that was
        given. Under a mean it is taken as it is else; robust rules take no rank's for more than
        twice as much a sample as the median rank's. Rank 0 warns of who is cut.

        Args:
            number: what was counted in this rank's batch, or micro-batch, >= 0; a whole number, or
                a tensor of one.
            is_sum: the loss is the sum over what was counted, not the mean. Several passes of a
                step add up, so divide means, and only these, by the number of passes, as always.

        Raises:
            ArgumentTypeError: it is no whole number.
            ArgumentError: it is negative, or beyond 2**53.
            UsageError: later, in the backward pass: some passes are counted and others are not.
        """
        if isinstance(number, Tensor):
            is_whole = number.numel() == 1 and not number.dtype.is_floating_point
            number = int(number) if is_whole else number
        if not isinstance(number, int) or isinstance(number, bool):
            raise ArgumentTypeError(f"count: number={number!r} must be a whole number")
        if not 0 <= number <= _MOST_COUNTED:
            raise ArgumentError(f"count: number={number} must be >= 0 and <= {_MOST_COUNTED}")
        self._count = Counted(number, 1.0 if is_sum else float(number), is_mean=not is_sum)

    def _counted(self, batch: StepSizes, num_samples: int) -> StepSizes:
        """Let a batch's sizes be what ranks' losses are over, and return them."""
        if not isinstance(num_samples, int) or isinstance(num_samples, bool):
            raise ArgumentTypeError(f"weigh: num_samples={num_samples!r} must be a whole number")
        if self.splits:
            raise UsageError(
                "weigh: num_samples= is of a whole batch, and with Balancer(micro_batches=True) "
                "ranks compute theirs in parts; drop samples before they are in the data set"
            )
        if self.min_batch == 0:
            raise UsageError(
                "weigh: num_samples= is told to all ranks, and with Balancer(min_batch=0) one may "
                "have no loss to weigh; give min_batch=1 or more"
            )
        self.counts_samples = True
        planned = batch.planned or batch.sizes
        most = planned[self.rank]
        if num_samples < 0 or (num_samples > most > 0):
            raise PlanError(
                f"rank {self.rank}: weigh: num_samples={num_samples}, and the sizes of step "
                f"{batch.step} are {list(planned)}: give the samples of this rank's batch that its "
                "loss is the mean of, those planned at most"
            )
        channel = Channel(self._transport, f"{self._options.name}.{self._number}.counts")
        counts = channel.allgather_rows(torch.tensor([num_samples]))[:, 0].tolist()
        # The plan caps what a rank says of itself.
        real = tuple(max(0, min(count, cap)) for count, cap in zip(counts, planned, strict=True))
        if not any(real):  # whatever they weigh is of no sample
            return batch
        counted = replace(batch, sizes=real, planned=planned)
        if not self._batches.recount(batch, counted) and self._is_plugged and real != batch.sizes:
            raise UsageError(
                f"weigh: the losses of step {batch.step} are over {list(batch.sizes)} samples in "
                f"one backward pass and over {list(real)} in another: gradients of a batch have "
                "one weight; add losses up, or drop samples before they are in the data set"
            )
        return counted

    def exclude(self) -> AbstractContextManager[None]:
        """Leave what runs inside (evaluation, checkpoints) out of all times."""
        return self._live.timer.exclude()

    def explain(self, *, verbose: bool = False) -> str:
        """Say what waiting costs, which rank is slow and why, and what steps consist of.

        On rank 0 also what the policy makes of it: its plan, the reason, and with ``verbose`` the
        models of all ranks.
        """
        return self._live.explain(verbose=verbose)

    def expect_depth(self, num_steps: int) -> None:
        """Let plans start behind what a loader may draw that has not begun; call it on every rank.

        ``loft.DataLoader`` does when it is made. Of any other loader the depth is learnt as it
        draws, so call it, before training, for one that follows on a loader that draws less deep.

        Args:
            num_steps: most steps that it draws beyond the newest one trained on, >= 0: of torch's
                own loader ``num_workers * prefetch_factor + 1``.

        Raises:
            ArgumentError: it is no such number.
        """
        if not isinstance(num_steps, int) or isinstance(num_steps, bool):
            raise ArgumentTypeError(f"expect_depth: num_steps={num_steps!r} must be a whole number")
        if num_steps < 0:
            raise ArgumentError(f"expect_depth: num_steps={num_steps} must be >= 0")
        self._batches.expect_depth(num_steps)

    def expect_ahead(self, num_batches: int) -> None:
        """Take it from who knows how many batches a loop fetches ahead of the one that it trains.

        0 for a loop that trains each batch, or skips it, before the next. Else it is learnt.
        """
        self._batches.expect_ahead(num_batches)

    def log_scalars(self, **values: float | Tensor) -> None:
        """Write numbers of the script's own, such as ``loss=0.3``, to rank 0's run log, if any.

        They are rank 0's values: for those of all ranks give what ``loft.average`` returned. A
        tensor on a GPU is waited for.

        Raises:
            ArgumentTypeError: a value is no number; on every rank, not on rank 0 alone.
        """
        self.log.write_scalars(values)

    def write_plans(self, path: str | Path) -> None:
        """Write every plan so far and why it was made, one JSON object a line, on rank 0 alone.

        ``Replay(path)`` as the policy of a later run repeats them, each from the step it had.

        Raises:
            DataError: the file cannot be written; what was there stays.
        """
        if self.rank == 0:
            write_decisions(path, self._live.decisions())

    def suggest_sizes(self) -> tuple[int, ...]:
        """Return the sizes that would take every rank the same time, by its measured speed.

        Raises:
            UsageError: nothing was measured yet.
        """
        speeds = [entry.samples_per_s for entry in self.times]
        if not speeds or sum(speeds) <= 0:
            steps = self._live.schedule.interval
            raise UsageError(f"suggest_sizes: no times yet; train for {steps} steps first")
        return proportional_sizes(speeds, self.global_batch_size, min_batch=self.min_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return plans, steps, times by device and, on rank 0, what was learnt; JSON-able.

        Save rank 0's: it knows the most. The loader has a state of its own.
        """
        return self._live.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; call it with the same state on every rank.

        In a world of other devices, or of another number of them, sizes start equal, and the
        policy knows from the start what each returning device (host and number on it) takes.

        Raises:
            ArgumentError: it is no state of a balancer.
        """
        self._live.go_on(decode(SavedRun, state, what="Balancer"))

    # What a loader asks for and reports (``data.sampler.PlanSource``).

    @property
    def next_step(self) -> int:
        """Number of the next step to train on, counted over epochs."""
        return self._batches.next_step

    @property
    def newest_batch(self) -> str:
        """Which batch was trained on last, in words that are equal on ranks that share it."""
        newest = self._batches.trained
        if newest is None:
            return "none"
        return f"step {newest.step}, sizes {list(newest.sizes)}, samples {newest.digest:08x}"

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at a step, counted over epochs; asked when it is drawn.

        No later plan changes a step that was asked for. A loop with a loader of its own, which
        fetches the next batch between forward and backward, asks for ``next_step + 1``.
        """
        self._batches.drawn(step)
        return plan_in_force(self.history, step)

    @property
    def splits(self) -> bool:
        """Whether a share beyond a rank's cap comes in micro-batches."""
        return self._options.splits

    def count_micro(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many micro-batches each rank's share takes; empty where none is split."""
        return self._live.limits.count_micro(sizes)

    def dummy_size(self, step: int) -> int:
        """Return the samples of the dummy batch of a rank that has none in a step.

        Where ranks are left out it is mostly 0, and once an interval a few, to see what they take.
        """
        if self.min_batch:
            return self.min_batch
        # Steps have one batch each. In the first one of a run front ends learn of the model.
        is_tried = step == self._batches.first_step or step % self._live.schedule.interval == 0
        return MIN_BATCH if is_tried else 0

    @property
    def pass_caps(self) -> tuple[int | None, ...]:
        """Most samples of a backward pass of each rank, [world_size]; None for no limit."""
        return self.limits.caps

    def most_micro(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many micro-batches each rank's share may take where samples go by cost."""
        return self.limits.most_micro(sizes)

    def push_sizes(self, step_sizes: StepSizes) -> None:
        """Queue the sizes of a batch that this rank will train on next, in order."""
        follow(self)
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
        """Note the batch that the script gets now; its clock starts, unless it waits for others."""
        follow(self)
        arrival: dict[str, Any] = {
            "local": local,
            "remote": remote,
            "cached": cached,
            "fetch_s": fetch_s,
        }
        self._is_from_main = _is_main_thread()
        if self._batches.begin(step_sizes):
            self._batches.arrivals[step_sizes.step] = arrival
            self._live.timer.fetched_ahead(stall_s=stall_s)
        else:
            self._live.timer.batch_arrived(**arrival, stall_s=stall_s)
        if self._batches.seems_forgotten and self.rank == 0 and self.world_size > 1:
            also = " and gradients of unequal batches are not weighted"
            warnings.warn(
                "batches go out, but no backward pass takes their sizes, so nothing is timed"
                f"{'' if self._batches.weighed else also}: give the optimizer balancer=, or "
                "call loft.attach(optimizer, balancer); to evaluate, use a loader with train=False",
                stacklevel=3,
            )

    @property
    def num_waiting(self) -> int:
        """Batches that the script has fetched ahead, and that will be trained."""
        return self._batches.num_waiting

    def clear_pending(self) -> None:
        """Forget batches that were fetched or queued: they will not be trained on."""
        self._batches.drop()

    def begin_iteration(self) -> None:
        """Forget batches that will not be trained on: an iteration begins, or will."""
        self._batches.begin_iteration()

    def all_drawn(self) -> None:
        """Note that a ``BatchSampler`` has queued the last batch of its iteration."""
        self._batches.all_drawn()

    def end_epoch(self) -> None:
        """Close an epoch; every rank calls it at the same step."""
        with self.log.faults():
            self._live.epoch_ended()
        self._batches.end_iteration()

    def share_sources(self, source: Sequence[int]) -> None:
        """Take the number of the source that each rank shares, -1 for none, [world_size]."""
        self._live.settle()  # a decision under way goes by what was known when it began
        self._options.policy.share_sources(source)

    def share_held(self, held: Held) -> None:
        """Take what ranks keep of the data set, as an iteration begins."""
        self._live.settle()
        self._options.policy.share_held(held)

    def note_reads(self, reads: Sequence[Mapping[str, int]], *, epoch: int) -> None:
        """Log what each rank read of a sample store in an epoch, [world_size], where it did."""
        ranks = [{"rank": rank, **counts} for rank, counts in enumerate(reads)]
        if ranks:
            # Of many ranks those that had the least at hand.
            most = sorted(ranks, key=lambda each: each["own"] - each["peer"] - each["source"])
            shown = sorted(most[:MOST_ROWS], key=lambda each: each["rank"])
            self.log.write("store", epoch=epoch, ranks=shown)

    def leave_step_out(self) -> None:
        """Leave the step that goes on, if one does, out of all times: it evaluates as well."""
        if self._live.timer.since_step_s() is not None:
            self._live.timer.leave_out()

    # What an optimizer asks for and reports.

    def require(self, *, min_ranks: int, num_passes: int) -> None:
        """Take what an optimizer needs of every plan.

        Args:
            min_ranks: ranks that must have samples in every step.
            num_passes: backward passes of a step; plans change at its first.

        Raises:
            PlanError: the plan itself has fewer.
            ArgumentError: several passes, and ranks may be left out.
        """
        self._is_plugged = True
        num_present = sum(size > 0 for size in self.plan.sizes)
        if num_present < min_ranks:
            raise PlanError(
                f"the rule needs {min_ranks} ranks with samples in every step, but sizes "
                f"{list(self.plan.sizes)} give samples to {num_present}; lower f or give more "
                "ranks samples"
            )
        if self.min_batch == 0 and num_passes > 1:
            raise ArgumentError(
                f"Balancer(min_batch=0) leaves ranks out of whole steps, and this one has "
                f"{num_passes} backward passes of a batch each; use micro_batches=True in place of "
                "backward_passes_per_step"
            )
        self.min_ranks = max(self.min_ranks, min_ranks)
        self._live.need_ranks(self.min_ranks)
        self._live.take_passes(num_passes)
        self._batches.num_passes = num_passes

    def log_to(self, log_dir: str | Path) -> None:
        """Write the run log there, unless it is being written already."""
        if self.rank == 0 and self.log.path is None:
            self.log.try_open(log_dir)
            self._live.write_head()

    def compute_on(self, device: torch.device) -> None:
        """Take computing times by the clock of the parameters' device, where it has one."""
        self._live.timer.device_clock = make_device_clock(device)

    @property
    def has_none(self) -> bool:
        """Whether the batch whose turn it is leaves this rank without samples."""
        return self._batches.has_none(self.rank, self.history)

    @property
    def leaves_out(self) -> bool:
        """Whether a rank without samples in a step makes no forward pass."""
        return self.min_batch == 0

    def pass_over(self) -> None:
        """Note that this rank takes part in a step without computing anything."""
        self._live.timer.leave_out()

    def begin_own_batch(self) -> None:
        """Note that training on a batch begins, if no loader of ours has said so."""
        follow(self)
        self._live.begin_own_batch()

    def begin_watched_pass(self, *, samples: int, stall_s: float | None, is_first: bool) -> None:
        """Note that a pass of a script that is only watched begins.

        ``stall_s``: what its loader took; None, where it has none that is known, is all since the
        last step. ``is_first``: the first pass of an optimizer step stands for the step's batch.
        """
        self._live.timer.own_batch_arrived(samples=samples, stall_s=stall_s, is_first=is_first)

    def fetched_ahead(self, *, stall_s: float) -> None:
        """Note that the script waited for a later batch while it computes one."""
        self._live.timer.fetched_ahead(stall_s=stall_s)

    def backward_began(self) -> None:
        """Note that the forward pass of the newest batch is over."""
        self._live.timer.backward_began()

    def take_step(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to.

        Raises:
            UsageError: no batch was handed out for it.
        """
        taken = self._batches.take()
        guess, self._batches.guess = self._batches.guess, ""
        self._warn_of_order(guess)
        if (arrival := self._batches.arrivals.pop(taken.step, None)) is not None:
            self._live.timer.batch_joined(**arrival)
            if not self._batches.is_ahead:  # its clock is that of one that was skipped
                self._live.timer.leave_out()
        return taken

    def forward_sizes(self) -> StepSizes:
        """Return the sizes of the batch that a forward pass is for."""
        return self._batches.forward(self.history)

    def is_weighed(self, batch: StepSizes) -> bool:
        """Say whether a batch's loss was weighed before its backward pass."""
        newest = self._batches.weighed
        return newest is not None and newest.step == batch.step

    @property
    def max_count(self) -> int | None:
        """Most that is counted of one sample; None where nobody knows."""
        return self._options.max_count

    def count_scaled(self, number: int, *, to_sum: float) -> None:
        """Say what the next loss is over, where that times ``to_sum`` is the sum over it."""
        self._count = Counted(number, to_sum, is_mean=False)

    def take_count(self) -> Counted | None:
        """Return what the next backward pass is over, once; None where nobody counts."""
        taken, self._count = self._count, None
        return taken

    def count_cut(self, rank: int, what: str) -> None:
        """Hear of a rank whose claim is not taken as it is; rank 0 tells of each rank once."""
        if self.rank == 0 and rank not in self._cut:
            self._cut.add(rank)
            _logger.warning("rank %d %s", rank, what)

    def _warn_of_order(self, text: str) -> None:
        """Say on rank 0, once, what is taken of the order of batches and backward passes."""
        if text and self.rank == 0 and not self._has_warned_ahead:
            self._has_warned_ahead = True
            warnings.warn(text, stacklevel=3)

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Note a gradient; the last one of a batch ends its computing (``StepTimer``)."""
        self._live.timer.gradient_arrived(blocked_s=blocked_s)

    def computing_ended(self) -> None:
        """Note that all gradients of a step are there, before waiting for other ranks."""
        self._live.timer.computing_ended()

    def hold(self, ranks: Sequence[int]) -> None:
        """Give ranks that are in quarantine no samples from the next adaptive plan on."""
        self._live.hold(ranks)

    def lr_factor(self, *, is_adaptive: bool) -> float:
        """Return the factor on the learning rate in the step that ends now; 1 without "auto".

        The same on every rank. ``is_adaptive``: the optimizer divides by its gradients' size.
        """
        if not self.is_auto:
            return 1.0
        trained, base = self._batches.trained, self._options.least
        at = self.plan if trained is None else plan_in_force(self.history, trained.step)
        total = at.global_batch_size
        if trained is not None and self._batches.num_passes == 1:
            total = sum(trained.sizes)  # the last one of an epoch has fewer
        scale = math.inf if self.noise is None else self.noise.scale / self._batches.num_passes
        rule = self._lr_rule or LR_RULES["sqrt" if is_adaptive else "adascale"]
        return rule(total, base, scale)

    def scale_lr(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Let an optimizer's learning rates grow with a global batch that is chosen by "auto".

        ``DistributedOptimizer(balancer=)`` calls it by itself; under DDP call it once. Rates are
        multiplied for the time of each step alone, so that schedulers and checkpoints have those
        that the script has set.

        Returns:
            What ends it, when it is called.
        """
        return scale_lr(optimizer, self.lr_factor)

    def note_noise(self, noise: GradientNoise | None) -> None:
        """Take what is known of the gradients' noise, the same on every rank."""
        if noise is not None:  # what a run goes on from stays until more is known
            self._live.noise = noise

    def step_ended(self) -> None:
        """Close an optimizer step; exchange times and plans when it is time for them."""
        with self.log.faults():
            self._live.step_ended()
        if not self._is_from_main and _is_main_thread():  # autograd has threads of its own
            self._warn_of_order(OTHER_THREAD)
        waits = self._batches.in_work  # fetched by now: its turn begins
        arrival = None if waits is None else self._batches.arrivals.pop(waits.step, None)
        if arrival is not None:
            self._live.timer.batch_arrived(**arrival, stall_s=0.0)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
