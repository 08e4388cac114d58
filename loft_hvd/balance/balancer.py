"""The object a user holds: which rank computes how many samples, and what each rank's time says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from loft_hvd.balance.controller import write_decisions
from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.loft import DEAD_BAND
from loft_hvd.balance.options import BalancerOptions, MaxBatch
from loft_hvd.balance.plan import proportional_sizes
from loft_hvd.balance.policies import make_policy
from loft_hvd.balance.policy import Policy
from loft_hvd.balance.ports import BalancerPorts
from loft_hvd.errors import PlanError, UsageError
from loft_hvd.runlog import open_run_log
from loft_hvd.transport.base import Transport
from loft_hvd.transport.default import default_transport

__all__ = ["Balancer"]


class Balancer(BalancerPorts):
    """Gives each rank its share of the global batch, and says where each rank's time goes.

    Make it on every rank, after ``hvd.init()``. The loader draws batches of ``local_batch_size``
    from it, the optimizer weighs gradients by it. Once an ``interval`` ranks exchange a few
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
        dead_band: predicted gain below which "loft" leaves the sizes as they are.
        log_dir: folder in which rank 0 writes the run log (``loft-hvd report`` reads it); None
            takes ``LOFT_HVD_LOG_DIR``, and without it there is none.
        on_resize: what an elastic world of another size keeps: "keep_global", the global batch,
            or "keep_per_rank", its share a rank, so that the global batch grows with the world.
        transport: the ranks; Horovod's by default.
        clock: seconds that never go back.

    Raises:
        PlanError: sizes are of the wrong number or sum, or the limits leave none.
        MismatchError: ranks were given different values.
    """

    def __init__(  # noqa: PLR0913 - a script sets few of them, by name
        self,
        global_batch_size: int,
        policy: str | Sequence[int] | Policy = "loft",
        *,
        min_batch: int = 2,
        max_batch: MaxBatch = None,
        grain: int | None = None,
        max_sizes: int | None = None,
        interval: int | None = None,
        dead_band: float = DEAD_BAND,
        log_dir: str | Path | None = None,
        on_resize: str = "keep_global",
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        transport = default_transport() if transport is None else transport
        options = BalancerOptions(
            global_batch_size,
            transport.world_size,
            make_policy(policy, dead_band=dead_band),
            min_batch=min_batch,
            max_batch=max_batch,
            grain=grain,
            interval=interval,
            dead_band=dead_band,
            max_sizes=max_sizes,
            on_resize=on_resize,
        )
        self._log_dir = log_dir
        log = open_run_log(log_dir, rank=transport.rank)
        super().__init__(options, transport, clock, log)
        self.policy = policy
        self.interval = interval
        self._num_worlds = 0

    @property
    def num_worlds(self) -> int:
        """Worlds begun; what optimizers asked for in the one before is forgotten with it."""
        return self._num_worlds

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
            self.log = open_run_log(self._log_dir, rank=self.rank)
        self._num_worlds += 1
        self._min_ranks = 1  # optimizers say what they need of the new world
        self._start_anew()

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
        return self._probe(step_fn, limit=limit, headroom=headroom)

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
        sizes = self._batches.begin_next(self.history)
        planned = sizes.sizes[self.rank]
        if num_samples != (planned or min(self.min_batch, sizes.total)):  # none: a dummy batch
            raise PlanError(
                f"rank {self.rank}: a batch of {num_samples} samples, but the sizes of step "
                f"{sizes.step} are {list(sizes.sizes)}; load as many as planned, or use "
                "loft.DataLoader, which also plans the last batch of an epoch"
            )
        self._loop.timer.batch_arrived(local=planned, remote=0, fetch_s=fetch_s, stall_s=fetch_s)
        yield

    def exclude(self) -> AbstractContextManager[None]:
        """Leave what runs inside (evaluation, checkpoints, own collectives) out of all times."""
        return self._loop.timer.exclude()

    # What a user reads.

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """Average times of every rank over the last interval, [world_size]; empty at first."""
        return self._loop.times

    def explain(self) -> str:
        """Say in plain words what each rank's steps consist of, and which rank is slow and why.

        On rank 0 also what the policy makes of it: its models, its plan and the reason.
        """
        return self._loop.explain()

    def write_plans(self, path: str | Path) -> None:
        """Write every plan so far and why it was made, one JSON object a line, on rank 0 alone.

        ``Replay(path)`` as the policy of a later run repeats them, each from the step it had.
        """
        if self.rank == 0:
            write_decisions(path, self._loop.decisions())

    def suggest_sizes(self) -> tuple[int, ...]:
        """Return the sizes that would take every rank the same time, by its measured speed.

        Raises:
            UsageError: nothing was measured yet.
        """
        speeds = [entry.samples_per_s for entry in self.times]
        if not speeds or sum(speeds) <= 0:
            raise UsageError(
                f"suggest_sizes: no times yet; train for {self._loop.interval} steps first"
            )
        return proportional_sizes(speeds, self.global_batch_size, min_batch=self.min_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return plans, steps, times by device and, on rank 0, what was learnt; JSON-able.

        Save rank 0's: it knows the most. The loader has a state of its own.
        """
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; call it with the same state on every rank.

        In a world of other devices, or of another number of them, sizes start equal, and the
        policy knows from the start what each returning device (host and number on it) takes.
        """
        self._loop.load_state_dict(state)
        self._batches.restart(next_step=int(state.get("next_step", state["num_steps"])))
