"""What loaders and samplers ask of a balancer, and tell it."""

from __future__ import annotations

from typing import Protocol

from loft_hvd.balance.plan import StepSizes
from loft_hvd.data.draws import PlanView
from loft_hvd.errors import ArgumentTypeError

__all__ = ["PlanSource", "check_balancer"]


class PlanSource(PlanView, Protocol):
    """What loaders need of a balancer: the sizes in force, and where to say what they hand out.

    ``next_step`` is the next step to train on, counted over epochs.

    ``loft.DataLoader`` calls ``begin_batch`` and ``end_epoch``, in the process that trains.
    ``loft.BatchSampler`` does not see batches arrive: it queues sizes with ``push_sizes``, and each
    backward pass takes the next. A loader for evaluation calls ``leave_step_out`` alone.
    """

    @property
    def next_step(self) -> int: ...

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
        """Take the batch that the script gets now; called right before it is yielded.

        Args:
            step_sizes: plan, step and sizes of the batch.
            fetch_s: seconds its fetch took, where it took place.
            stall_s: seconds of it that the script waited for.
            local: this rank's samples that it holds itself, or had in its cache.
            remote: this rank's samples that it had to get from elsewhere.
            cached: of ``local``, those that only the cache had.
        """

    def push_sizes(self, step_sizes: StepSizes) -> None:
        """Queue the sizes of a batch whose indices were drawn; torch yields in that order."""

    def clear_pending(self) -> None:
        """Forget batches that no backward pass took: an iteration begins, or an epoch is set."""

    def end_epoch(self) -> None:
        """Note that an iteration ran to its end, at the same step on every rank."""

    def leave_step_out(self) -> None:
        """Leave the step that goes on out of all times: this rank evaluates in between."""


def check_balancer(balancer: object) -> None:
    """Refuse what cannot say the sizes of a step.

    Raises:
        ArgumentTypeError: there is no ``plan_at``.
    """
    if not hasattr(balancer, "plan_at"):
        raise ArgumentTypeError(
            f"balancer={balancer!r} is of type {type(balancer).__name__}; give a loft_hvd.Balancer"
        )
