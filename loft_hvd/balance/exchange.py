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

from loft_hvd.balance.interval import Head, Report
from loft_hvd.balance.plan import Plan
from loft_hvd.config import config
from loft_hvd.transport.base import Transport, Work, wait_for

__all__ = ["FEWEST_STEPS", "Exchange"]

FEWEST_STEPS = 3  # steps of an interval that the three ends above need
_DRAIN_S = 10.0  # longest wait at the end of a process
_logger = logging.getLogger(__name__)


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
        head: Head,
        uses: tuple[float, float],
    ) -> None:
        """Start telling every rank what this one measured.

        Args:
            times: sums in the order of ``SUMS``, [15].
            head: where this rank is.
            uses: of CPU and memory by others.
        """
        row = torch.from_numpy(np.array([*head, *times, *uses], dtype=np.float64))
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
