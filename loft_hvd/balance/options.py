"""What a user asks of a balancer, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from loft_hvd.balance.controller import POLICIES
from loft_hvd.balance.exchange import FEWEST_STEPS
from loft_hvd.balance.plan import Plan
from loft_hvd.balance.policies import Policy
from loft_hvd.balance.replay import Replay
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
        PlanError: sizes are of the wrong number or sum.
    """

    global_batch_size: int
    world_size: int
    policy: str | Sequence[int] | Policy
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
        if not (isinstance(self.policy, str | Sequence) or hasattr(self.policy, "propose")):
            raise ArgumentTypeError(
                f"Balancer: policy={self.policy!r} is of type {type(self.policy).__name__}; it "
                f"takes {', '.join(map(repr, POLICIES))}, a policy object, or a list with every "
                "rank's samples, such as [96, 96, 48, 16]"
            )
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
        given = self._given_sizes()
        for sizes in given:
            self._check_sizes(sizes)
        if not given and self.global_batch_size < self.world_size:
            raise PlanError(
                f"global_batch_size={self.global_batch_size} is smaller than "
                f"world_size={self.world_size}; every rank needs a sample, so raise it or start "
                "fewer ranks"
            )

    def _given_sizes(self) -> list[Sequence[int]]:
        if isinstance(self.policy, Sequence) and not isinstance(self.policy, str):
            return [self.policy]
        return [plan.sizes for plan in self.replayed]

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        if wrong := [size for size in sizes if not isinstance(size, Integral)]:
            raise ArgumentTypeError(
                f"policy={list(sizes)}: {wrong[0]!r} is of type {type(wrong[0]).__name__}; "
                "sizes are whole numbers of samples"
            )
        if min(sizes, default=0) < 0:
            raise PlanError(
                f"policy={list(sizes)}: {min(sizes)} is negative; sizes must be >= 0 and add up to "
                f"global_batch_size={self.global_batch_size}"
            )
        if len(sizes) != self.world_size:
            raise PlanError(
                f"policy={list(sizes)} has {len(sizes)} sizes, but world_size={self.world_size}; "
                "give one size for every rank"
            )
        if sum(sizes) != self.global_batch_size:
            raise PlanError(
                f"policy={list(sizes)} adds up to {sum(sizes)}, but "
                f"global_batch_size={self.global_batch_size}; make them equal"
            )

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The sizes that the user gave, or None."""
        if isinstance(self.policy, Sequence) and not isinstance(self.policy, str):
            return tuple(int(size) for size in self.policy)
        return None

    @property
    def replayed(self) -> tuple[Plan, ...]:
        """The plans of an earlier run that are repeated, or none."""
        return self.policy.plans if isinstance(self.policy, Replay) else ()

    @property
    def is_adaptive(self) -> bool:
        """Whether the policy makes new plans while training runs."""
        is_given = self.sizes is not None or bool(self.replayed)
        return not is_given and self.policy not in ("uniform", "report")

    @property
    def policy_text(self) -> str:
        """The policy's name, or its sizes."""
        if isinstance(self.policy, str):
            return self.policy
        return str(list(self.policy)) if isinstance(self.policy, Sequence) else self.policy.name

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
        return fields | {"plans to repeat": str(self.replayed)} if self.replayed else fields


def _check_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"Balancer: {what}={value!r} must be a whole number")
    if value < 1:
        raise ArgumentError(f"Balancer: {what}={value} must be >= 1")
