"""Plans for tests: a balancer reduced to them, and a policy that keeps changing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loft_hvd.balance.balancer_options import BalancerOptions
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.latency import Held
from loft_hvd.balance.plan import Plan, Sizes, StepSizes, count_micro
from loft_hvd.balance.policies import make_policy
from loft_hvd.balance.policy import Policy, Proposal


class Fetch(NamedTuple):
    """What a loader said of one batch that it yielded."""

    step: int
    fetch_s: float
    local: int
    remote: int


@dataclass
class FakePlans:
    """Plans set by the test, and a record of every call of a loader.

    Attributes:
        sizes: of the plan in force from step 0.
        later: first step -> sizes of the plans that follow.
        pending: the FIFO that backward passes would pop.
        fetches: what was said of each batch yielded.
        asked: steps whose plan was asked for, in order.
        next_step: the next step to train on; counts where the test does.
        depth: steps beyond the newest one trained on that a loader said it may draw.
    """

    sizes: Sequence[int]
    rank: int = 0
    min_batch: int = 2
    min_ranks: int = 1
    later: Mapping[int, Sequence[int]] = field(default_factory=dict)
    pending: list[StepSizes] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    next_step: int = 0
    depth: int = 0
    num_epochs_ended: int = 0
    num_left_out: int = 0
    source: tuple[int, ...] = ()
    held: Held | None = None
    reads: dict[int, list[Mapping[str, int]]] = field(default_factory=dict)  # by epoch
    num_waiting: int = 0
    counts_samples: bool = False
    caps: Sequence[int | None] = ()  # of a backward pass, where shares are split
    num_micro: int = 1  # that any rank may have, where samples go by cost and shares are split

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def global_batch_size(self) -> int:
        return sum(self.sizes)

    @property
    def splits(self) -> bool:
        return bool(self.caps)

    def count_micro(self, sizes: Sizes) -> Sizes:
        return count_micro(sizes, self.caps) if self.caps else ()

    def dummy_size(self, step: int) -> int:
        return self.min_batch

    @property
    def pass_caps(self) -> Sequence[int | None]:
        return self.caps or (None,) * self.world_size

    def most_micro(self, sizes: Sizes) -> Sizes:
        if not self.caps:
            return (1,) * len(sizes)
        return tuple(max(num, self.num_micro) for num in count_micro(sizes, self.caps))

    @property
    def plan(self) -> Plan:
        newest = max(self.later, default=None)
        return Plan(0, 0, tuple(self.sizes if newest is None else self.later[newest]))

    def plan_at(self, step: int) -> Plan:
        self.asked.append(step)
        plans = [Plan(0, 0, tuple(self.sizes))]
        for plan_id, first_step in enumerate(sorted(self.later), start=1):
            plans.append(Plan(plan_id, first_step, tuple(self.later[first_step])))
        return [plan for plan in plans if plan.first_step <= step][-1]

    def expect_depth(self, num_steps: int) -> None:
        self.depth = max(self.depth, num_steps)

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
        assert stall_s >= 0
        assert 0 <= cached <= local
        self.pending.append(step_sizes)
        self.fetches.append(Fetch(step_sizes.step, fetch_s, local, remote))

    def push_sizes(self, step_sizes: StepSizes) -> None:
        self.pending.append(step_sizes)

    def clear_pending(self) -> None:
        self.pending.clear()

    def begin_iteration(self) -> None:
        self.pending.clear()

    def all_drawn(self) -> None: ...

    def end_epoch(self) -> None:
        self.num_epochs_ended += 1

    def share_sources(self, source: Sequence[int]) -> None:
        self.source = tuple(source)

    def note_reads(self, reads: Sequence[Mapping[str, int]], *, epoch: int) -> None:
        self.reads = {**self.reads, epoch: list(reads)}

    def share_held(self, held: Held) -> None:
        self.held = held

    def leave_step_out(self) -> None:
        self.num_left_out += 1


class Wandering(Policy):
    """A policy that moves three samples from one rank to the next at every chance.

    Args:
        global_batch_size: samples of all ranks together.
    """

    name = "wandering"

    def __init__(self, global_batch_size: int) -> None:
        self.global_batch_size = global_batch_size
        self.num_moves = 0

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Take from the next rank in turn."""
        world_size = len(interval.sizes)
        if world_size == 1:
            return None
        self.num_moves += 1
        giver = self.num_moves % world_size
        sizes = [self.global_batch_size // world_size] * world_size
        sizes[0] += self.global_batch_size - sum(sizes)
        sizes[giver] -= 3
        sizes[(giver + 1) % world_size] += 3
        return Proposal(tuple(sizes), f"move {self.num_moves}")


def make_options(total: int = 256, world_size: int = 3, **given: Any) -> BalancerOptions:
    """Return what a balancer is asked for; ``given`` are arguments by name, as of ``Balancer``."""
    defaults: dict[str, Any] = {
        "policy": "loft",
        "min_batch": 2,
        "max_batch": None,
        "grain": None,
        "max_sizes": None,
        "interval": 5,
        "dead_band": 0.03,
        "on_resize": "keep_global",
    }
    arguments = defaults | given
    policy = make_policy(arguments.pop("policy"))
    return BalancerOptions(total, world_size, policy, **arguments)
