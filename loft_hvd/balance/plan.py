"""Plans: how many samples of each global batch every rank computes, and from which step on.

``Plan`` and ``StepSizes`` are what ranks train by. The rest makes and checks sizes that can be a
plan.
"""

from __future__ import annotations

import functools
import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from loft_hvd.codec import Count, Index, Shape, Within
from loft_hvd.errors import ArgumentTypeError, PlanError

__all__ = [
    "MIN_BATCH",
    "MOST_MICRO",
    "Bounds",
    "Counted",
    "Plan",
    "QuarantineSizes",
    "StepSizes",
    "check_history",
    "check_sizes",
    "choose_used",
    "count_micro",
]
__all__ += ["equal_sizes", "proportional_sizes", "scale_sizes", "whole_sizes"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# One value a rank, [world_size]: what a saved state must hold too.
RankFloats = Annotated[Floats, Shape("world_size")]
RankInts = Annotated[Ints, Shape("world_size"), Within(0)]
RankBools = Annotated[Bools, Shape("world_size")]
RankNumbers = Annotated[list[float], Shape("world_size")]
Sizes = Annotated[tuple[Count, ...], Shape("world_size")]  # samples
Rank = Annotated[int, Index("world_size")]

MIN_BATCH = 2  # least samples of a rank where nothing is asked: batch norm cannot train on one
# Most micro-batches of a rank's share: with more, what each costs beside its samples is most of it.
MOST_MICRO = 16
_HEADER = 2  # plan_id, first_step
_HALVINGS = 40  # of a factor: near the last bit that matters
_FEW = 16  # ranks whose sizes mostly make up any sum that is missing


@dataclass(frozen=True)
class StepSizes:
    """The sample counts of one step, equal on every rank: what one backward pass is weighted by."""

    plan_id: int  # of the plan that was in force
    step: int  # since the start of the run, over epochs
    sizes: Sizes  # 0 marks a rank that computes a dummy batch, whose gradient must not count
    # Of the samples that form the global batch, 32 bits; 0 where they are not known.
    digest: int = field(default=0, compare=False)
    # Micro-batches of each rank, as ``count_micro`` says; empty where nobody has more than one.
    num_micro: Sizes = ()
    # Sizes of the plan, where batches are only up to those (a stream's); empty for ``sizes``.
    planned: Sizes = field(default=(), compare=False)
    # Sizes of the plan, where they are shares of cost and ``sizes`` what these came to; else empty.
    shares: Sizes = field(default=(), compare=False)
    # Samples of each rank's micro-batches, where these are no equal parts; else empty.
    micro: tuple[Sizes, ...] = ()

    @property
    def by_plan(self) -> Sizes:
        """Sizes in the unit of the plan, which times are fitted over, [world_size]."""
        return self.shares or self.planned or self.sizes

    @property
    def total(self) -> int:
        """Samples of all ranks in this step."""
        return sum(self.sizes)

    @property
    def largest_micro(self) -> Sizes:
        """Samples of the largest backward pass of each rank, [world_size]; 0 for a dummy one."""
        if self.micro:
            return tuple(map(max, self.micro))
        if not self.num_micro:
            return self.sizes
        return tuple(-(-size // num) for size, num in zip(self.sizes, self.num_micro, strict=True))

    def micro_sizes(self, rank: int) -> Sizes:
        """Return the samples of each backward pass of a rank, one or more; (0,) for a dummy one."""
        if self.micro:
            return self.micro[rank]
        num_micro = self.num_micro[rank] if self.num_micro else 1
        return equal_sizes(self.sizes[rank], num_micro)


@dataclass(frozen=True)
class Counted:
    """What a rank's loss of one backward pass is over, as its script says."""

    number: int  # supervised tokens, valid pixels, ...; >= 0
    to_sum: float  # the loss times this is the sum over what was counted
    is_mean: bool  # losses of several passes are each divided by their number


@dataclass(frozen=True)
class Plan:
    """Local batch sizes for every rank, in force from ``first_step`` on."""

    plan_id: int  # 0 for the first plan of a run, then counting up
    first_step: int  # over epochs
    sizes: Sizes  # ``local_batch_size`` of each rank, samples

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0 or sum(self.sizes) == 0:
            raise PlanError(
                f"plan {self.plan_id}: sizes {list(self.sizes)} must be one count >= 0 a rank, "
                "with at least one sample in all"
            )
        if self.plan_id < 0 or self.first_step < 0:
            raise PlanError(f"plan_id={self.plan_id} and first_step={self.first_step} must be >= 0")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in one step."""
        return sum(self.sizes)

    def fields(self) -> dict[str, Any]:
        """Return the fields by name; ``asdict`` copies each size, 1.5 ms for 1,000 ranks."""
        return dict(vars(self))

    def to_wire(self) -> Ints:
        """Return the plan as one int64 array, shape [2 + world_size]."""
        return np.array([self.plan_id, self.first_step, *self.sizes], dtype=np.int64)

    @classmethod
    def from_wire(
        cls, wire: Ints, *, world_size: int, global_batch_size: int, most: int | None = None
    ) -> Plan:
        """Read what ``to_wire`` wrote on another rank, or raise where it is no plan for here.

        With ``most`` its sizes may add up to more than ``global_batch_size``, as far as that.
        """
        values = wire.tolist()
        if len(values) != _HEADER + world_size:
            raise PlanError(
                f"a plan for world_size={world_size} has {_HEADER + world_size} numbers, "
                f"but {len(values)} arrived: {values}"
            )
        plan = cls(values[0], values[1], tuple(values[_HEADER:]))
        if not global_batch_size <= plan.global_batch_size <= (most or global_batch_size):
            text = str(global_batch_size) if most is None else f"{global_batch_size} to {most}"
            raise PlanError(
                f"plan {plan.plan_id}: sizes {list(plan.sizes)} add up to "
                f"{plan.global_batch_size}, but global_batch_size={text}"
            )
        return plan


def whole_sizes(sizes: Sequence[object], *, what: str = "policy") -> Sizes:
    """Return the sizes that a user gave, or raise where they are not counts of samples."""
    whole = tuple(int(size) for size in sizes if isinstance(size, Integral))
    if len(whole) < len(sizes):
        wrong = next(size for size in sizes if not isinstance(size, Integral))
        raise ArgumentTypeError(
            f"{what}={list(sizes)}: {wrong!r} is of type {type(wrong).__name__}; sizes are whole "
            "numbers of samples"
        )
    if min(whole, default=0) < 0:
        raise PlanError(f"{what}={list(whole)}: {min(whole)} is negative; sizes are counts >= 0")
    if not any(whole):
        raise PlanError(f"{what}={list(whole)} has no samples; give sizes such as [8, 8]")
    return whole


def check_sizes(
    sizes: Sizes, *, world_size: int, global_batch_size: int, what: str = "policy"
) -> None:
    """Raise unless there is one size a rank and they add up to the global batch."""
    if len(sizes) == world_size and sum(sizes) == global_batch_size:
        return
    is_count = len(sizes) != world_size
    wrong = f"has {len(sizes)} sizes" if is_count else f"adds up to {sum(sizes)}"
    limit = f"world_size={world_size}" if is_count else f"global_batch_size={global_batch_size}"
    raise PlanError(
        f"{what}={list(sizes)} {wrong}, but {limit}; give one size a rank, adding up to "
        f"global_batch_size={global_batch_size}"
    )


def check_history(plans: Sequence[Plan]) -> None:
    """Raise unless these can be the plans of a run: the first from step 0 on, in order, alike."""
    for number, plan in enumerate(plans):
        before = plans[max(number - 1, 0)]
        is_next = plan.plan_id == number and (plan.first_step > before.first_step or not number)
        if not is_next or plan.world_size != before.world_size:
            raise PlanError(
                f"plan {plan.plan_id} from step {plan.first_step} for {plan.world_size} ranks "
                f"cannot be number {number}, after step {before.first_step} for "
                f"{before.world_size} ranks"
            )
    if not plans or plans[0].first_step != 0:
        raise PlanError("a run has a plan from step 0 on, and here is none")


@dataclass(frozen=True)
class Bounds:
    """Limits of each rank's batch."""

    floor: Ints  # least samples, [world_size]
    cap: Ints  # most samples (device memory), [world_size]
    grain: int = 1  # sizes are multiples of this many samples

    @classmethod
    def of(
        cls, world_size: int, *, floor: npt.ArrayLike = 1, cap: npt.ArrayLike, grain: int = 1
    ) -> Bounds:
        """Make bounds from numbers or one number a rank."""
        low, high = (
            np.broadcast_to(np.asarray(limit, np.int64), world_size).copy()
            for limit in (floor, cap)
        )
        return cls(low, high, grain)

    def only(self, ranks: Bools) -> Bounds:
        """Return the bounds where no rank but these, [world_size], has samples."""
        return Bounds(np.where(ranks, self.floor, 0), np.where(ranks, self.cap, 0), self.grain)

    def allow(self, sizes: npt.ArrayLike) -> Bools:
        """Return which sizes are from floor to cap, both [..., world_size]."""
        given = np.asarray(sizes)
        within: Bools = (self.floor <= given) & (given <= self.cap)
        return within

    def lattice(self, global_batch_size: int) -> tuple[Ints, Ints, int]:
        """Return floor and cap in grains and the samples that one rank carries beside them.

        A PlanError where no sizes within the bounds add up to ``global_batch_size``.
        """
        if self.grain < 1 or len(self.floor) != len(self.cap) or (self.floor > self.cap).any():
            raise PlanError(
                f"bounds need grain >= 1 and floor <= cap on every rank, but grain={self.grain}, "
                f"floor={self.floor.tolist()}, cap={self.cap.tolist()}"
            )
        low = -(-self.floor // self.grain)  # rounded up, as the cap is rounded down
        high = self.cap // self.grain
        if (low > high).any():
            rank = int(np.argmax(low > high))
            raise PlanError(
                f"rank {rank} may have {self.floor[rank]} to {self.cap[rank]} samples, but none of "
                f"these is a multiple of grain={self.grain}; lower grain or min_batch, or raise "
                "max_batch"
            )
        grains, rest = divmod(global_batch_size, self.grain)
        # One rank carries the rest: a rank with a grain to spare, since a rest is less than a
        # grain, or one whose cap has room above its last whole grain.
        has_spare = int(high.sum()) > grains or (high * self.grain + rest <= self.cap).any()
        rest_fits = rest == 0 or bool(has_spare)
        if int(self.cap.sum()) < global_batch_size or high.sum() < grains or not rest_fits:
            raise PlanError(self.describe_shortage(global_batch_size))
        if low.sum() > grains:
            raise PlanError(
                f"global_batch_size={global_batch_size} is less than the {int(low.sum())} grains "
                f"of {self.grain} that floors {self.floor.tolist()} ask for; lower min_batch or "
                "grain, or raise global_batch_size"
            )
        return low, high, rest

    def describe_shortage(self, global_batch_size: int) -> str:
        """Say how many samples fit, and how many backward passes would do."""
        room = int((self.cap // self.grain * self.grain).sum())
        if room < 1:
            return f"caps {self.cap.tolist()} leave no room for a grain of {self.grain}"
        passes = -(-global_batch_size // room)
        return (
            f"global_batch_size={global_batch_size} does not fit: caps {self.cap.tolist()} with "
            f"grain={self.grain} hold {room} samples; raise max_batch, let it limit micro-batches "
            "(Balancer(micro_batches=True)), or use "
            f"backward_passes_per_step={passes} with "
            f"global_batch_size={math.ceil(global_batch_size / passes)}"
        )


def equal_sizes(global_batch_size: int, world_size: int) -> Sizes:
    """Split a global batch as evenly as whole samples allow, the first ranks taking the rest."""
    share, rest = divmod(global_batch_size, world_size)
    return tuple(share + (rank < rest) for rank in range(world_size))


def count_micro(sizes: Sequence[int], caps: Sequence[int | None]) -> Sizes:
    """Return how many micro-batches, within its cap, each rank's share takes; all [world_size].

    With caps 96, 48 and None, shares 64, 100 and 900 take 1, 3 and 1. A dummy batch takes one.
    """
    pairs = zip(sizes, caps, strict=True)
    return tuple(1 if cap is None else max(1, -(-size // cap)) for size, cap in pairs)


def proportional_sizes(
    speeds: Sequence[float], global_batch_size: int, *, min_batch: int = 1
) -> Sizes:
    """Split a global batch in proportion to speeds, by largest remainders, ties to lower ranks.

    Speeds, [world_size], are samples a second, >= 0, finite and not all 0; no rank gets fewer than
    ``min_batch`` samples.
    """
    floor = min_batch * len(speeds)
    total = sum(speeds)
    if not 0 < total < float("inf") or min(speeds) < 0 or floor > global_batch_size:
        raise PlanError(
            f"cannot split global_batch_size={global_batch_size} by speeds {list(speeds)} with "
            f"min_batch={min_batch}: speeds must be >= 0 with a positive sum, and the batch at "
            f"least {floor}"
        )
    # A rank below the floor is raised to it, which leaves less for the others and may bring more
    # of them below: each round fixes at least one, so there are at most world_size rounds.
    fixed: dict[int, int] = {}
    while True:
        rest = global_batch_size - sum(fixed.values())
        open_ranks = [rank for rank in range(len(speeds)) if rank not in fixed]
        total = sum(speeds[rank] for rank in open_ranks)
        exact = {rank: rest * speeds[rank] / total for rank in open_ranks}
        below = [rank for rank in open_ranks if exact[rank] < min_batch]
        if not below:
            break
        fixed.update(dict.fromkeys(below, min_batch))
    given = {rank: int(share) for rank, share in exact.items()} | fixed
    by_remainder = sorted(open_ranks, key=lambda rank: (given[rank] - exact[rank], rank))
    for rank in by_remainder[: global_batch_size - sum(given.values())]:
        given[rank] += 1
    return tuple(given[rank] for rank in range(len(speeds)))


def scale_sizes(sizes: Sequence[int], num_samples: int, *, min_ranks: int = 1) -> Sizes | None:
    """Give ``num_samples``, a last batch smaller than the plan's, out in the plan's proportions.

    Largest remainders decide, ties go to the lower rank. When the proportions leave fewer than
    ``min_ranks`` ranks (2f+1 for a rule with f) with a sample, the smallest are topped up from the
    largest. None where there are fewer samples than ``min_ranks``: the batch must be skipped.
    """
    total = sum(sizes)
    if not 0 <= num_samples <= total or min_ranks > len(sizes):
        raise PlanError(
            f"cannot give {num_samples} samples out over sizes {list(sizes)} (sum {total}) with "
            f"min_ranks={min_ranks}: need 0 <= samples <= sum and min_ranks <= {len(sizes)}"
        )
    if num_samples < min_ranks:
        return None
    if num_samples == total and sum(size > 0 for size in sizes) >= min_ranks:
        return tuple(sizes)
    shares = [divmod(size * num_samples, total) for size in sizes]  # (whole, remainder)
    given = [whole for whole, _ in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (-shares[rank][1], rank))
    for rank in by_remainder[: num_samples - sum(given)]:
        given[rank] += 1
    while sum(count > 0 for count in given) < min_ranks:  # the largest gives to the largest idle
        donor = max(range(len(given)), key=lambda rank: (given[rank], -rank))
        idle = [rank for rank, count in enumerate(given) if count == 0]
        taker = min(idle, key=lambda rank: (-sizes[rank], rank))
        given[donor] -= 1
        given[taker] += 1
    return tuple(given)


@dataclass
class QuarantineSizes:
    """Sizes while ranks are in quarantine: none for them, theirs shared out among the others.

    Rank 0 keeps its samples, since its clock is what plans are judged by: its gradients are left
    out of the aggregation all the same.
    """

    before: Sizes | None = None  # what sizes go back to in the end; None while nobody is held
    # Who gets no samples. It is no part of a state: a run that goes on looks anew.
    ranks: Sizes = field(init=False, default=())

    @property
    def is_active(self) -> bool:
        """Whether a policy has to wait: ranks are held, or have not got their samples back."""
        return bool(self.ranks) or self.before is not None

    def hold(self, ranks: Sequence[int]) -> None:
        """Say which ranks get no samples from the next plan on, in place of those before."""
        self.ranks = tuple(rank for rank in ranks if rank != 0)

    def next_sizes(self, sizes: Sequence[int], bounds: Bounds) -> Sizes | None:
        """Return the sizes that should come into force after ``sizes``, both [world_size].

        None where there is nothing to change, or the others' caps do not hold what they would have
        to take.
        """
        if not self.ranks:
            before, self.before = self.before, None
            return None if before == tuple(sizes) else before
        # Held ranks' samples go to the others in proportion to what these had before anybody was
        # held, in whole grains; the first of them carries what is left of a grain.
        before = tuple(sizes) if self.before is None else self.before
        others = [rank for rank, size in enumerate(before) if size and rank not in self.ranks]
        grains, rest = divmod(sum(before), bounds.grain)
        speeds = [before[rank] for rank in others]
        if sum(speeds) == 0 or grains < len(others):
            return None
        wanted = [0] * len(before)
        for rank, share in zip(others, proportional_sizes(speeds, grains), strict=True):
            wanted[rank] = share * bounds.grain
        wanted[others[0]] += rest
        if wanted == list(sizes) or any(wanted[rank] > bounds.cap[rank] for rank in others):
            return None
        self.before = before
        return tuple(wanted)


def choose_used(wanted: Sizes, used: Sequence[Sizes], *, max_sizes: int, bounds: Bounds) -> Sizes:
    """Return the sizes nearest to ``wanted`` that give no rank more than ``max_sizes`` in a run.

    On some devices every new batch size costs a recompilation or a round of autotuning. So each
    rank takes a size that it had in one of the plans ``used``, or the one wanted if it has had
    fewer than ``max_sizes``. With the wanted sizes all ranks take about the same time, so the rank
    with the largest share above what is wanted for it would set the step: nearest are the sizes
    where that share is least.

    No rank gets what is not within ``bounds``: no samples, as while it was in quarantine, or more
    than a cap that was found since. Where the rest does not add up, sizes are the wanted ones: a
    limit goes before what a new size costs.
    """
    want = np.array(wanted, np.int64)
    options = _options(want, np.array(used, np.int64), max_sizes)
    options = np.where(bounds.allow(options), options, -1)  # -1 marks what a rank may not have
    if (options == want).any(axis=0).all():
        return wanted
    total = int(want.sum())
    shares = options / np.maximum(want, 1)  # [num_options, world_size]
    limits = np.unique(shares)

    def add_up(limit: float) -> Ints | None:
        return _add_up(np.where(shares <= limit, options, -1), want)

    # Below this limit even the largest sizes within it add up to too little. Where there are many
    # ranks the sums are dense, and it will do; otherwise bisect for the least that does.
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        most = np.where(shares <= limits[middle], options, -1).max(axis=0)
        low, high = (low, middle) if most.min() >= 0 and most.sum() >= total else (middle + 1, high)
    found = add_up(limits[low])
    if found is None:
        low = bisect_left(limits, True, lo=low + 1, key=lambda limit: add_up(limit) is not None)
        found = add_up(limits[low]) if low < len(limits) else None
    return wanted if found is None else tuple(found.tolist())


def _options(wanted: Ints, used: Ints, max_sizes: int) -> Ints:
    """Return what each rank has had, or may add to it, [num_options, world_size]; some twice."""
    had = np.sort(used, axis=0)  # [num_plans, world_size]
    is_first = np.ones(had.shape, bool)
    is_first[1:] = had[1:] != had[:-1]
    may_add = is_first.sum(axis=0) < max_sizes
    rows = max(int(is_first.sum(axis=0).max()), 1)
    # The distinct sizes of each rank move to the top; below them the largest is repeated.
    top = np.take_along_axis(had, np.argsort(~is_first, axis=0, kind="stable")[:rows], axis=0)
    top = np.where(np.arange(rows)[:, None] < is_first.sum(axis=0), top, had[-1])
    return np.vstack([top, np.where(may_add, wanted, had[-1])])


def _add_up(options: Ints, wanted: Ints) -> Ints | None:
    """Pick one of each rank's ``options`` so that they add up to the sum of ``wanted``.

    Options are [num_options, world_size]; -1 marks those that a rank may not have. None where no
    choice adds up. A common factor on what is wanted brings the sum within one rank's step; the
    rest is found exactly among a few ranks, then among ever more.
    """
    total = int(wanted.sum())
    if (options.max(axis=0) < 0).any() or int(options.max(axis=0).sum()) < total:
        return None
    allowed = np.where(options >= 0, options, np.inf)
    if allowed.min(axis=0).sum() > total:
        return None

    def nearest(factor: float) -> Ints:
        at = np.abs(allowed - factor * np.maximum(wanted, 0.5)).argmin(axis=0)
        picked: Ints = np.take_along_axis(options, at[None], axis=0)[0]
        return picked

    under, over = 0.0, 4.0 * float(np.max(options / np.maximum(wanted, 0.5)))
    for _ in range(_HALVINGS):
        middle = 0.5 * (under + over)
        under, over = (middle, over) if nearest(middle).sum() <= total else (under, middle)
    picked, larger = nearest(under), nearest(over)
    room = total - int(picked.sum())
    if room < 0:  # even the smallest options
        return None
    for rank in np.flatnonzero(larger > picked):  # ranks that all change at the same factor
        if larger[rank] - picked[rank] <= room:
            room -= int(larger[rank] - picked[rank])
            picked[rank] = larger[rank]
    if room == 0:
        return picked
    # Ranks with many options first: few of them make all sums.
    order = np.argsort(-(options >= 0).sum(axis=0), kind="stable")
    count = min(_FEW, len(order))
    while True:
        some = order[:count]
        left = room + int(picked[some].sum())
        choices = [
            sorted({size for size in had if size >= 0}) for had in options[:, some].T.tolist()
        ]
        found = _pick(choices, wanted[some].tolist(), left)
        if found is not None:
            picked[some] = found
            return picked
        if count == len(order):
            return None
        count = min(4 * count, len(order))


def _sums(options: list[list[int]], total: int) -> list[int]:
    """Return the sums that the first k ranks can have, for each k, as the bits of a number.

    With sizes {2, 3} for rank 0 and {1} for rank 1, and a total of 4::

        no rank:   0b00001   only 0
        rank 0:    0b01100   2 and 3: the bits before, shifted by 2 and by 3
        and 1:     0b11000   3 and 4: shifted by 1
    """
    mask = (1 << (total + 1)) - 1
    reached = [1]
    for sizes in options:
        shifted = (reached[-1] << size for size in sizes)
        reached.append(functools.reduce(operator.or_, shifted, 0) & mask)
    return reached


def _pick(options: list[list[int]], wanted: list[int], total: int) -> list[int] | None:
    """Walk back from the sum, each rank taking the option nearest to what is wanted for it."""
    reached, left = _sums(options, total), total
    if not reached[-1] >> total & 1:
        return None
    picked = []
    for rank in reversed(range(len(wanted))):
        # A size fits where the ranks before this one can reach what it leaves.
        fitting = [
            size for size in options[rank] if size <= left and reached[rank] >> (left - size) & 1
        ]
        picked.append(min(fitting, key=lambda size: (abs(size - wanted[rank]), size)))
        left -= picked[-1]
    return picked[::-1]
