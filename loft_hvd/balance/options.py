"""What a user asks of a balancer, checked, and the controller that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loft_hvd.balance.controller import POLICIES, Controller
from loft_hvd.balance.exchange import FEWEST_STEPS
from loft_hvd.balance.plan import equal_sizes
from loft_hvd.balance.policies import Policy
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError
from loft_hvd.transport.agreement import digest

__all__ = ["SETTLE_STEPS", "BalancerOptions"]

SETTLE_STEPS = 3  # the first steps of a run, and of a plan, are slower than the rest


@dataclass(frozen=True)
class BalancerOptions:
    """The arguments of ``Balancer``, which explains them; equal on every rank.

    Raises:
        ArgumentTypeError: a count is not a whole number.
        ArgumentError: a value is outside its limits.
        PlanError: sizes are of the wrong number or sum.
    """

    global_batch_size: int
    world_size: int
    policy: str | Sequence[int] | Policy
    min_batch: int
    max_batch: int | Sequence[int | None] | None
    grain: int
    interval: int | None
    dead_band: float

    def __post_init__(self) -> None:
        for what in ("global_batch_size", "min_batch", "grain", "interval"):
            value = getattr(self, what)
            if what == "interval" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"Balancer: {what}={value!r} must be a whole number")
            if value < 1:
                raise ArgumentError(f"Balancer: {what}={value} must be >= 1")
        if isinstance(self.policy, str) and self.policy not in POLICIES:
            raise ArgumentError(
                f"Balancer: policy={self.policy!r} is not known; it takes "
                f"{', '.join(map(repr, POLICIES))}, or a list with every rank's samples, such as "
                "[96, 96, 48, 16]"
            )
        if self.is_adaptive and self.interval is not None and self.interval < FEWEST_STEPS:
            raise ArgumentError(
                f"Balancer: interval={self.interval} is too short for policy="
                f"{self.policy_text!r}; a plan takes {FEWEST_STEPS} steps to reach every rank, "
                "and about 20 make good averages"
            )
        if self.sizes is not None:
            self._check_sizes(self.sizes)
        elif self.global_batch_size < self.world_size:
            raise PlanError(
                f"global_batch_size={self.global_batch_size} is smaller than "
                f"world_size={self.world_size}; every rank needs a sample, so raise it or start "
                "fewer ranks"
            )

    def _check_sizes(self, sizes: tuple[int, ...]) -> None:
        if len(sizes) != self.world_size:
            raise PlanError(
                f"policy={list(sizes)} has {len(sizes)} sizes, but world_size={self.world_size}; "
                "give one size for every rank"
            )
        if sum(sizes) != self.global_batch_size or min(sizes) < 0:
            raise PlanError(
                f"policy={list(sizes)} adds up to {sum(sizes)}, but "
                f"global_batch_size={self.global_batch_size}; sizes must be >= 0 and add up to it"
            )

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The sizes that the user gave, or None."""
        if isinstance(self.policy, Sequence) and not isinstance(self.policy, str):
            return tuple(int(size) for size in self.policy)
        return None

    @property
    def is_adaptive(self) -> bool:
        """Whether the policy makes new plans while training runs."""
        return self.sizes is None and self.policy not in ("uniform", "report")

    @property
    def policy_text(self) -> str:
        """The policy's name, or its sizes."""
        if isinstance(self.policy, str):
            return self.policy
        return str(list(self.policy)) if isinstance(self.policy, Sequence) else self.policy.name

    def make_controller(self) -> Controller | None:
        """Return the policy's controller, or None where sizes are given or nothing is fitted.

        Raises:
            PlanError: no sizes within the limits add up to the global batch.
        """
        is_too_small = self.global_batch_size < self.world_size * self.min_batch
        if self.sizes is not None or self.policy == "uniform":
            return None
        if self.policy == "report" and is_too_small:
            return None
        return Controller(
            self.global_batch_size,
            self.world_size,
            self.policy,
            min_batch=self.min_batch,
            max_batch=self.max_batch,
            grain=self.grain,
            dead_band=self.dead_band,
            settle_steps=SETTLE_STEPS,
        )

    def first_sizes(self, controller: Controller | None) -> tuple[int, ...]:
        """Return the sizes of the first plan, [world_size]."""
        if controller is not None:
            return controller.plan.sizes
        return self.sizes or equal_sizes(self.global_batch_size, self.world_size)

    @property
    def name(self) -> str:
        """Stem of the operations' names: equal where all options are."""
        return f"loft.balancer.{digest(str(self.fields())) & 0xFFFFFF:06x}"

    def fields(self) -> dict[str, str]:
        """Return what must be equal on every rank, by name."""
        names = ("global_batch_size", "min_batch", "max_batch", "grain", "interval", "dead_band")
        return {name: str(getattr(self, name)) for name in names} | {"policy": self.policy_text}
