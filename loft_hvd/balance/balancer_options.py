"""What a user asks of a balancer, checked once; defaults are at the face, in ``Balancer``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from loft_hvd.balance.auto import AutoBatch
from loft_hvd.balance.first_sizes import FirstSizes
from loft_hvd.balance.plan import MOST_MICRO, check_sizes, whole_sizes
from loft_hvd.balance.policy import Policy
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError
from loft_hvd.transport.agreement import digest

__all__ = ["BalancerOptions", "MaxBatch"]

ON_RESIZE = ("keep_global", "keep_per_rank")
_FEWEST_STEPS = 3  # of an adaptive interval: times leave, times are read, the plan is read

MaxBatch = int | Sequence[int | None] | Mapping[str, int | None] | None


@dataclass(frozen=True)
class BalancerOptions:
    """The arguments of ``Balancer``, which explains them, checked; equal on every rank."""

    global_batch_size: int
    world_size: int
    policy: Policy
    _: KW_ONLY
    min_batch: int
    max_batch: MaxBatch
    grain: int | None
    max_sizes: int | None
    interval: int | None
    dead_band: float  # the policy has it; kept to compare it between ranks
    on_resize: str
    # A cap limits a backward pass, not a rank's share of a step. A number: any rank may have that
    # many micro-batches where samples go by cost.
    micro_batches: bool | int = False
    first_sizes: FirstSizes = None  # rank 0's count, so that they need not be equal
    max_count: int | None = None

    def __post_init__(self) -> None:
        limit = self.max_batch
        limits = limit.values() if isinstance(limit, Mapping) else limit
        given: list[tuple[str, object]] = [
            ("grain", self.grain),
            ("interval", self.interval),
            ("max_sizes", self.max_sizes),
            ("max_count", self.max_count),
        ]
        given += [
            ("max_batch", each) for each in ([limits] if isinstance(limits, int | None) else limits)
        ]
        counts: list[tuple[str, object]] = [
            ("global_batch_size", self.global_batch_size),
            ("min_batch", self.min_batch),
            *(pair for pair in given if pair[1] is not None),
        ]
        for what, value in counts:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"Balancer: {what}={value!r} must be a whole number")
            if value < 1 and (what, value) != ("min_batch", 0):
                raise ArgumentError(f"Balancer: {what}={value} must be >= 1")
        if not isinstance(self.micro_batches, int):
            raise ArgumentTypeError(
                f"Balancer: micro_batches={self.micro_batches!r} must be True, False or a number"
            )
        if self.micro_batches is not False and not 1 <= self.micro_batches <= MOST_MICRO:
            raise ArgumentError(
                f"Balancer: micro_batches={self.micro_batches} must be from 1 to {MOST_MICRO}, "
                "True or False"
            )
        first = self.first_sizes
        if not isinstance(first, str | os.PathLike | None):
            whole_sizes(first, what="first_sizes")
        if self.on_resize not in ON_RESIZE:
            raise ArgumentError(
                f"Balancer: on_resize={self.on_resize!r} is not known; it takes "
                f"{' or '.join(map(repr, ON_RESIZE))}"
            )
        if self.policy.most is not None and self.on_resize == "keep_per_rank":
            raise ArgumentError(
                "Balancer: on_resize='keep_per_rank' is of a global batch that is given, and "
                "global_batch_size='auto' chooses it; leave on_resize away"
            )
        is_short = self.interval is not None and self.interval < _FEWEST_STEPS
        if self.policy.is_adaptive and is_short:
            raise ArgumentError(
                f"Balancer: interval={self.interval} is too short for policy={self.policy.text!r}; "
                f"a plan takes {_FEWEST_STEPS} steps to reach every rank, and about 20 make good "
                "averages"
            )
        plans = self.policy.given_plans
        for plan in plans:
            check_sizes(
                plan.sizes, world_size=self.world_size, global_batch_size=self.global_batch_size
            )
        if not plans and self.global_batch_size < self.world_size:
            raise PlanError(
                f"global_batch_size={self.global_batch_size} is smaller than "
                f"world_size={self.world_size}; every rank needs a sample, so raise it or start "
                "fewer ranks"
            )

    @property
    def splits(self) -> bool:
        """Whether a share beyond a rank's cap comes in micro-batches."""
        return bool(self.micro_batches)

    @property
    def least(self) -> int:
        """Fewest samples of a plan."""
        return self.policy.least if isinstance(self.policy, AutoBatch) else self.global_batch_size

    def going_on_with(self, total: int) -> BalancerOptions:
        """Return the options that begin with a global batch of an earlier run, if they may."""
        return replace(self, global_batch_size=self.nearest(total))

    def nearest(self, total: int) -> int:
        """Return the global batch nearest to another one that a plan may have."""
        return min(max(total, self.least), self.policy.most or self.least)

    @property
    def name(self) -> str:
        """Stem of the operations' names: equal where all options are."""
        return f"loft.balancer.{digest(str(self.fields())) & 0xFFFFFF:06x}"

    def fields(self) -> dict[str, str]:
        """Return what must be equal on every rank, by name."""
        limit = self.max_batch
        shown = sorted(limit.items()) if isinstance(limit, Mapping) else limit
        # A dict of caps may be written in any order.
        fields = {
            "global_batch_size": self.global_batch_size,
            "min_batch": self.min_batch,
            "grain": self.grain,
            "interval": self.interval,
            "dead_band": self.dead_band,
            "max_sizes": self.max_sizes,
            "on_resize": self.on_resize,
            "micro_batches": self.micro_batches,
            "max_count": self.max_count,
            "max_batch": shown,
            "policy": self.policy.text,
            "plans to repeat": self.policy.given_plans,
        }
        return {name: str(value) for name, value in fields.items()}
