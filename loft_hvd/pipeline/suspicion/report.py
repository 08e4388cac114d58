"""What ``optimizer.report()`` returns: each worker, and how far it was off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loft_hvd.errors import ArgumentError

__all__ = [
    "FEWEST_WATCHED",
    "NotFinite",
    "SameData",
    "SuspicionReport",
    "WorkerReport",
    "ZeroedParameter",
    "tell_limits",
    "tell_ranks",
]

FEWEST_WATCHED = 3  # of two workers nobody can say which one is off
_HEAD = (
    f"{'ranks':>12} {'suspicion':>9} {'outside':>8} {'distance':>9} {'left out':>8} {'clipped':>8} "
    f"{'copied':>7} {'non-finite':>10} {'steps':>7}"
)


@dataclass(frozen=True)
class WorkerReport:
    """What is known of one worker: a rank, or a group of ranks with ``over=``."""

    ranks: tuple[int, ...]  # the rank, or the group's ranks
    suspicion: float  # 0 (as the others) to 1, smoothed over about 20 steps
    # Share of its values outside the rule's window, 0 to 1. An honest worker's is above 0 too (see
    # ``Diagnostics.share_outside``), so compare workers with each other.
    share_outside: float
    distance: float  # its squared distance to the result, over the median worker's
    num_non_finite: int  # NaN or infinite values among those looked at, in all steps
    num_steps: int  # steps in which something could be said of it
    is_named: bool  # whether it has stood out for so long that it is warned of
    in_quarantine_until: int | None = None  # the step that ends its quarantine
    # With rules that see rows, shares of its values, 0 to 1: how many of the others' neighbourhoods
    # lacked it; where it was clipped; where it equals another worker's bit for bit.
    share_left_out: float = 0.0
    share_clipped: float = 0.0
    share_copied: float = 0.0

    def __str__(self) -> str:
        """Return one line of the report."""
        ranks = " ".join(map(str, self.ranks))
        text = (
            f"{ranks:>12} {self.suspicion:>9.2f} {self.share_outside:>8.1%} {self.distance:>9.3g} "
            f"{self.share_left_out:>8.1%} {self.share_clipped:>8.1%} {self.share_copied:>7.1%} "
            f"{self.num_non_finite:>10} {self.num_steps:>7}"
        )
        if self.in_quarantine_until is not None:
            return f"{text}  in quarantine until step {self.in_quarantine_until}"
        return f"{text}  STANDS OUT" if self.is_named else text


@dataclass(frozen=True)
class ZeroedParameter:
    """What a robust rule takes from a parameter for which few ranks have a gradient."""

    name: str
    num_touched: int  # coordinates for which any rank had a gradient that is not zero
    num_zeroed: int  # those of them that are zero after the rule

    @property
    def share(self) -> float:
        """Share of what was touched that is zero after the rule, 0 to 1."""
        return self.num_zeroed / self.num_touched if self.num_touched else 0.0

    def __str__(self) -> str:
        """Return one line of the report."""
        return f"{self.share:>8.1%} of {self.num_touched:>10} values  {self.name}"


@dataclass(frozen=True)
class SameData:
    """Ranks that read the same data, by the gradients of their first steps."""

    ranks: tuple[int, ...]  # ascending, two or more
    world_size: int
    num_steps: int  # that were compared
    num_equal: int  # steps in which their gradients were equal; 0 where they are only alike
    # Where they are only alike: their squared difference over that of other ranks.
    ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_ranks(self.ranks, least=2)

    def __str__(self) -> str:
        """Return the question that it raises, what speaks for it, and the way out."""
        who = f"ranks {tell_ranks(self.ranks)}"
        if len(self.ranks) == self.world_size:
            who = "both ranks" if self.world_size == 2 else f"all {self.world_size} ranks"
        sign = f"differed by {self.ratio:.2f} times what others' did (squared)"
        if self.num_equal:
            sign = f"were equal in {self.num_equal}"
        return (
            f"do {who} read the same data? In the first {self.num_steps} steps their gradients "
            f"{sign}. A sampler may be forgotten, or two ranks may have one number: give each rank "
            "samples of its own, by loft.DataLoader, or by a "
            "DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())"
        )


@dataclass(frozen=True)
class NotFinite:
    """A step in which ranks sent values into a mean that are not finite."""

    step: int  # from 1
    ranks: tuple[int, ...]  # ascending, one or more
    world_size: int
    parameter: str  # of the first of these ranks the first one, counted back from the loss
    is_nan: bool  # whether it had NaN; else infinities alone

    def __post_init__(self) -> None:
        _check_ranks(self.ranks, least=1)

    def __str__(self) -> str:
        """Return who it was, what of it is the mean's, and the way out."""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {tell_ranks(self.ranks)}"
        if len(self.ranks) == self.world_size:
            who = "both ranks" if self.world_size == 2 else f"all {self.world_size} ranks"
        whose = "" if len(self.ranks) == 1 else f" rank {self.ranks[0]}'s"
        return (
            f"step {self.step}: gradients of {who} are not finite, counted back from the loss first"
            f"{whose} {'NaN' if self.is_nan else 'infinity'} in parameter {self.parameter!r}. The "
            "mean takes it to every rank, and optimizer.step() into every model. Look at the batch "
            "and the loss of this step there; a script can skip the step, as all ranks see it "
            "after optimizer.synchronize(); a robust rule leaves such a rank out"
        )


def _check_ranks(ranks: Sequence[int], *, least: int) -> None:
    if len(ranks) < least:  # as read from a log that is damaged
        raise ArgumentError(f"ranks needs {least} or more of them, but got {list(ranks)}")


def tell_limits(named: Sequence[int], num_steps: int) -> str:
    """Say what cannot be said of workers where ranks draw from different data.

    ``named`` are the ranks that stood out before that was found, after ``num_steps``.
    """
    stood_out = ""
    if named:
        who = f"rank{'s' if len(named) > 1 else ''} {tell_ranks(named)}"
        stood_out = f"; until step {num_steps} {who} stood out, by that or by data far from all"
    return (
        "ranks draw from different data: a worker that sends its gradients flipped, scaled or with "
        "noise cannot be told from an honest one, and is not named; NaN and copies are named"
        f"{stood_out}"
    )


def tell_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words: "0 and 3", "0, 1 and 3"."""
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last


@dataclass(frozen=True)
class SuspicionReport:
    """What is known of every worker; ``print`` it for a table."""

    num_steps: int  # optimizer steps so far
    workers: tuple[WorkerReport, ...]  # one a rank, or a group; empty where nobody is watched
    note: str = ""  # why nobody is watched, or empty
    # Parameters that the rule zeroes where few ranks have a gradient, the largest share first; of
    # the steps 1, 10, 50 and 200.
    zeroed: tuple[ZeroedParameter, ...] = ()
    # Ranks that read the same data, under any rule; empty before they are compared.
    same_data: tuple[SameData, ...] = ()
    # The first steps in which ranks sent values into a mean that were not finite.
    not_finite: tuple[NotFinite, ...] = ()
    limits: str = ""  # what can be said of nobody in this job, and why

    @property
    def named(self) -> tuple[WorkerReport, ...]:
        """The workers that stand out."""
        return tuple(worker for worker in self.workers if worker.is_named)

    def __str__(self) -> str:
        """Return a table, one line a worker; above it what ranks must answer for."""
        lines = [*map(str, self.same_data), *map(str, self.not_finite)]
        if self.note:
            lines.append(self.note)
        else:
            lines += [f"after {self.num_steps} steps:", _HEAD, *map(str, self.workers)]
        if self.limits:
            lines.append(self.limits)
        if self.zeroed:
            lines.append("zero after the rule, of what any rank had a gradient for:")
            lines += map(str, self.zeroed)
        return "\n".join(lines)
