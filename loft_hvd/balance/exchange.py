"""One small exchange an interval: every rank's times to all, rank 0's plan to all.

Nothing waits for it. With an interval of ``k`` steps, times leave at the end of step ``k - 1`` and
are read at the end of step ``k``; rank 0 decides, and its plan, one int64 tensor, leaves there and
is read at the end of step ``k + 1``. It comes into force at a step that no rank has drawn yet. The
times bring along after how many steps the next exchange comes, so that agreeing costs nothing more.

A script may end while one of these is under way. Horovod's shutdown on the first rank to end takes
the engine away from all, so a rank that ends waits for what it has started: by then every other
rank has come to it too.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.balance.explain import TIME_FIELDS, means
from loft_hvd.balance.plan import Plan
from loft_hvd.config import config
from loft_hvd.errors import MismatchError
from loft_hvd.transport.agreement import odd_ones
from loft_hvd.transport.base import Transport, Work, wait_for

__all__ = ["FEWEST_STEPS", "Exchange", "Report"]

FEWEST_STEPS = 3  # steps of an interval that the three ends above need
_HEADER = ("num_steps", "plan_id", "trail", "drawn_ahead", "next_interval")
_SHARES = ("cpu_use", "memory_use")
# What policies see of a rank's times, in the order of ``observations.COLUMNS``.
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
_DRAIN_S = 10.0  # longest wait at the end of a process
_logger = logging.getLogger(__name__)
_FARTHEST_STEPS = 1_000_000  # that a rank can have drawn beyond rank 0; it would be epochs ahead
_SLACK_STEPS = 3  # between a rank's word on what it has drawn and the plan's arrival, and one more


class Report:
    """What all ranks said about an interval.

    Args:
        rows: float64, [world_size, 22].
    """

    def __init__(self, rows: npt.NDArray[np.float64]) -> None:
        self._rows = rows

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """Sums in the order of ``explain.TIME_FIELDS``, [world_size, 15]."""
        return self._rows[:, len(_HEADER) : len(_HEADER) + len(TIME_FIELDS)]

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """CPU and memory use by others, [world_size, 2]."""
        return self._rows[:, -len(_SHARES) :]

    @property
    def observed(self) -> npt.NDArray[np.float64]:
        """Averages a step in the order of ``observations.COLUMNS``, [world_size, 10].

        As they were sent, so that ``screen`` sees what no clock can have measured. Where the head
        of a report cannot be, the number that cannot be stands for all of it.
        """
        columns = [TIME_FIELDS.index(name) for name in _OBSERVED]
        sent = np.concatenate([means(self.times)[:, columns], self.shares], axis=1)
        head = self._rows[:, : len(_HEADER)]
        wrong = np.where(np.isfinite(head).all(axis=1), self._drawn_ahead, np.nan)[:, None]
        observed: npt.NDArray[np.float64] = np.where(self._has_head[:, None], sent, wrong)
        return observed

    @property
    def _drawn_ahead(self) -> npt.NDArray[np.float64]:
        """Deepest step that each rank says it has drawn, [world_size]."""
        return self._rows[:, _HEADER.index("drawn_ahead")]

    @property
    def _has_head(self) -> npt.NDArray[np.bool_]:
        """Which reports begin with numbers that can be, [world_size]; rank 0's always does."""
        drawn = self._drawn_ahead
        fits: npt.NDArray[np.bool_] = (drawn >= -1) & (drawn <= drawn[0] + _FARTHEST_STEPS)
        fits &= np.isfinite(self._rows[:, : len(_HEADER)]).all(axis=1)
        fits[0] = True
        return fits

    def first_free_step(self, num_passes: int) -> int:
        """Return a step that no rank will have drawn when a plan made from this report arrives.

        What a rank cannot have drawn does not count: nobody can put a plan off for ever.

        Args:
            num_passes: backward passes of an optimizer step; a plan starts at its first.
        """
        drawn = int(self._drawn_ahead[self._has_head].max())
        trained = int(self._rows[0, _HEADER.index("num_steps")]) * num_passes
        first = drawn + 1 + _SLACK_STEPS * num_passes
        return trained + -(-(first - trained) // num_passes) * num_passes

    @property
    def next_interval(self) -> int:
        """Steps from this exchange to the next, as rank 0 says: its clock decides for all."""
        return max(1, int(self._rows[0, _HEADER.index("next_interval")]))

    def check(self, *, world_size: int) -> None:
        """Raise when ranks are at different steps or plans, or have trained on other batches.

        Raises:
            MismatchError: names the rank and its step and plan.
        """
        steps, plan = self._rows[0, :2].tolist()
        for rank in range(world_size):
            rank_steps, rank_plan = self._rows[rank, :2].tolist()
            if (rank_steps, rank_plan) != (steps, plan):
                raise MismatchError(
                    f"rank {rank} is at step {rank_steps:.0f} with plan {rank_plan:.0f}, but rank "
                    f"0 at step {steps:.0f} with plan {plan:.0f}; every rank must take the same "
                    "steps"
                )
        trails = self._rows[:, _HEADER.index("trail")].tolist()
        if any(trail != trails[0] for trail in trails):
            raise MismatchError(
                f"ranks {odd_ones(trails)} have trained on other batches than the rest since the "
                f"last exchange (now at step {steps:.0f}): the samples, sizes or steps of their "
                "global batches differ. Give every rank the same data set, seed, epoch and "
                "loaded state, and let none skip a batch"
            )


class Exchange:
    """The collectives behind a balancer.

    Args:
        transport: the ranks.
        name: stem of the operations' names, equal on every rank; tells balancers apart.
    """

    def __init__(self, transport: Transport, *, name: str) -> None:
        self._transport = transport
        self._name = name
        self._times: tuple[Work | None, Tensor, Tensor] | None = None
        self._plan: tuple[Work | None, Tensor] | None = None
        self._is_drained_at_exit = False

    @property
    def is_sending(self) -> bool:
        """Whether times are under way that nobody has received."""
        return self._times is not None

    def send_times(
        self,
        times: npt.NDArray[np.float64],
        *,
        header: tuple[int, int, int, int, int],
        shares: tuple[float, float],
    ) -> None:
        """Start telling every rank what this one measured.

        Args:
            times: sums in the order of ``explain.TIME_FIELDS``, [15].
            header: steps taken, plan in force, trail of the batches trained, deepest step drawn,
                steps to the next exchange.
            shares: CPU and memory use by others.
        """
        row = torch.from_numpy(np.array([*header, *times, *shares], dtype=np.float64))
        rows = torch.zeros(self._transport.world_size, row.numel(), dtype=torch.float64)
        work = None
        if self._transport.world_size == 1:
            rows.copy_(row.view(1, -1))
        else:
            self._drain_at_exit()
            work = self._transport.allgather(row, rows.view(-1), name=f"{self._name}.times")
        self._times = (work, row, rows)

    def receive_times(self) -> Report | None:
        """Return what all ranks sent, or None when nothing is under way."""
        if self._times is None:
            return None
        (work, _, rows), self._times = self._times, None
        if work is not None:
            wait_for(work, what="exchange of times", timeout_s=config().timeout_s)
        return Report(rows.numpy())

    def send_plan(self, plan: Plan) -> None:
        """Start telling every rank rank 0's plan; the others' argument only gives the shape."""
        wire = torch.from_numpy(plan.to_wire())
        work = None
        if self._transport.world_size > 1:
            work = self._transport.broadcast(wire, name=f"{self._name}.plan")
        self._plan = (work, wire)

    def receive_plan(self, *, global_batch_size: int) -> Plan | None:
        """Return rank 0's plan, validated, or None when none is under way.

        Raises:
            PlanError: what arrived is not a plan for this world and global batch.
        """
        if self._plan is None:
            return None
        (work, wire), self._plan = self._plan, None
        if work is not None:
            wait_for(work, what="broadcast of the plan", timeout_s=config().timeout_s)
        return Plan.from_wire(
            wire.numpy(),
            world_size=self._transport.world_size,
            global_batch_size=global_batch_size,
        )

    def _drain_at_exit(self) -> None:
        """Wait at the end of the process, before the engine ends: later hooks run first."""
        if not self._is_drained_at_exit:
            self._is_drained_at_exit = True
            atexit.register(_drain, weakref.ref(self))

    def forget(self) -> None:
        """Leave what is under way to itself: the run goes on from elsewhere."""
        if config().is_elastic:  # the engine has failed, and all of it with it
            self._times = self._plan = None
        self.drain()

    def drain(self) -> None:
        """Wait for what is under way, ten seconds at most; nobody wants its news any more."""
        works = [entry[0] for entry in (self._times, self._plan) if entry is not None]
        self._times = self._plan = None
        for work in works:
            try:
                if work is not None:
                    wait_for(work, what="last exchange", timeout_s=_DRAIN_S)
            except Exception as error:
                _logger.debug("the last exchange of times was not completed: %s", error)


def _drain(reference: weakref.ref[Exchange]) -> None:
    exchange = reference()
    if exchange is not None and getattr(sys, "last_value", None) is None:  # no error ends us
        exchange.drain()
