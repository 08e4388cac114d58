"""What a user asks of a balancer, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loft_hvd.balance.exchange import FEWEST_STEPS
from loft_hvd.balance.plan import check_sizes
from loft_hvd.balance.policy import Policy
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError
from loft_hvd.transport.agreement import digest

__all__ = ["ON_RESIZE", "SETTLE_STEPS", "BalancerOptions", "Caps", "MaxBatch"]

SETTLE_STEPS = 3  # the first steps of a run, and of a plan, are slower than the rest


ON_RESIZE = ("keep_global", "keep_per_rank")

Caps = tuple[int | None, ...]  # most samples of each rank; None for no limit
MaxBatch = int | Sequence[int | None] | Mapping[str, int | None] | None


@dataclass(frozen=True)
class BalancerOptions:
    """The arguments of ``Balancer``, which explains them; equal on every rank.

    Raises:
        ArgumentTypeError: a count is not a whole number.
        ArgumentError: a value is outside its limits.
        PlanError: given sizes are of the wrong number or sum.
    """

    global_batch_size: int
    world_size: int
    policy: Policy
    min_batch: int
    max_batch: MaxBatch
    grain: int | None
    interval: int | None
    dead_band: float
    max_sizes: int | None = None
    on_resize: str = "keep_global"

    def __post_init__(self) -> None:
        for what in ("global_batch_size", "min_batch"):
            _check_count(what, getattr(self, what))
        for what in ("grain", "interval", "max_sizes"):
            if getattr(self, what) is not None:
                _check_count(what, getattr(self, what))
        limit = self.max_batch
        limits = limit.values() if isinstance(limit, Mapping) else limit
        for value in [limits] if isinstance(limits, int | None) else limits:
            if value is not None:
                _check_count("max_batch", value)
        if self.on_resize not in ON_RESIZE:
            raise ArgumentError(
                f"Balancer: on_resize={self.on_resize!r} is not known; it takes "
                f"{' or '.join(map(repr, ON_RESIZE))}"
            )
        if self.is_adaptive and self.interval is not None and self.interval < FEWEST_STEPS:
            raise ArgumentError(
                f"Balancer: interval={self.interval} is too short for policy="
                f"{self.policy_text!r}; a plan takes {FEWEST_STEPS} steps to reach every rank, "
                "and about 20 make good averages"
            )
        for plan in self.policy.given_plans:
            check_sizes(
                plan.sizes,
                world_size=self.world_size,
                global_batch_size=self.global_batch_size,
            )
        if not self.policy.given_plans and self.global_batch_size < self.world_size:
            raise PlanError(
                f"global_batch_size={self.global_batch_size} is smaller than "
                f"world_size={self.world_size}; every rank needs a sample, so raise it or start "
                "fewer ranks"
            )

    @property
    def is_adaptive(self) -> bool:
        """Whether the policy makes new plans while training runs."""
        return self.policy.is_adaptive

    @property
    def policy_text(self) -> str:
        """The policy's name, or its sizes."""
        return self.policy.text

    @property
    def name(self) -> str:
        """Stem of the operations' names: equal where all options are."""
        return f"loft.balancer.{digest(str(self.fields())) & 0xFFFFFF:06x}"

    def fields(self) -> dict[str, str]:
        """Return what must be equal on every rank, by name."""
        names = ["global_batch_size", "min_batch", "grain", "interval", "dead_band"]
        names += ["max_sizes", "on_resize"]
        limit = self.max_batch
        shown = sorted(limit.items()) if isinstance(limit, Mapping) else limit
        fields = {name: str(getattr(self, name)) for name in names}
        fields |= {"max_batch": str(shown), "policy": self.policy_text}
        return fields | {"plans to repeat": str(self.policy.given_plans)}


def _check_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"Balancer: {what}={value!r} must be a whole number")
    if value < 1:
        raise ArgumentError(f"Balancer: {what}={value} must be >= 1")
