"""What a policy is: it is shown intervals and proposes sizes; the controller numbers its plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.fit import Fit
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.latency import Held
from loft_hvd.balance.plan import Bounds, Floats, Plan, Sizes
from loft_hvd.balance.search import equal_within, round_to_lattice
from loft_hvd.codec import decode, encode

__all__ = ["Allowed", "Policy", "Proposal", "Task"]


@dataclass(frozen=True)
class Task:
    """What must be divided."""

    global_batch_size: int  # samples of all ranks in one backward pass
    bounds: Bounds  # each rank's limits
    pass_caps: Sequence[int | None] | None = None  # of a micro-batch; None where none is split

    @property
    def pass_size(self) -> Floats:
        """Most samples of one backward pass of each rank, [world_size]; may be infinite."""
        caps = self.pass_caps or [None] * self.world_size
        return np.array([np.inf if cap is None else cap for cap in caps], dtype=np.float64)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.bounds.floor)

    def equal(self) -> Sizes:
        """Return sizes as equal as the bounds allow."""
        return equal_within(self.global_batch_size, self.bounds)

    def rounded(self, wanted: npt.NDArray[np.float64]) -> Sizes:
        """Return legal sizes near ``wanted`` [world_size]."""
        return round_to_lattice(wanted, self.global_batch_size, self.bounds)


@dataclass(frozen=True)
class Proposal:
    """Sizes that a policy wants from the next plan on."""

    sizes: Sizes
    reason: str  # in plain words
    predicted_s: float = float("nan")  # of a step with them; NaN when not predicted
    instead_of_s: float = float("nan")  # of a step without the change; NaN likewise


@dataclass(frozen=True)
class Allowed:
    """The sizes nearest to others that are wanted which may come into force now."""

    sizes: Sizes
    bars: tuple[str, ...] = ()  # to those wanted, in plain words; none where they are the same


@dataclass
class _Nothing:
    """The state of a policy that learns nothing."""


class Policy(ABC):
    """Decides sizes for one task at a time.

    A subclass gives a name and ``propose``, and overrides what else is not so for it.
    """

    name: str  # what explanations, run logs and saved states call it
    most: int | None = None  # samples of a global batch that it chooses itself; None: it is given
    uses_times: bool = True  # one that does not needs no controller to train by
    is_adaptive: bool = True  # makes new plans while training runs
    plans_batches: bool = True  # its sizes are what ranks train on
    state: Any = _Nothing()  # what it has learnt, a dataclass that loft_hvd.codec can write
    task: Task | None = None  # from ``start`` on; a state is of as many ranks

    @property
    def realised(self) -> float | None:
        """What the plan in force has saved of a step, if the newest interval was its first."""
        return None

    @property
    def text(self) -> str:
        """How a user would ask for it."""
        return self.name

    @property
    def given_plans(self) -> tuple[Plan, ...]:
        """The plans that are known before training: a user's sizes, or an earlier run's plans."""
        return ()

    @property
    def fit(self) -> Fit | None:
        """The newest models of the ranks' times; None without any."""
        return None

    def start(self, task: Task) -> Sizes:
        """Begin a run; returns its first sizes, as equal as the bounds allow."""
        self.task = task
        return task.equal()

    @abstractmethod
    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Take in an interval and return new sizes, or None to keep those in force.

        Args:
            interval: what the ranks reported, under the sizes in force.
            first_step: the step from which new sizes would hold.
        """

    def share_sources(self, source: Sequence[int]) -> None:
        """Take the number of the source that each rank shares, -1 for none, [world_size]."""
        del source

    def share_held(self, held: Held) -> None:
        """Take what ranks keep of the data set, as an iteration begins."""
        del held

    def share_noise(self, noise: GradientNoise | None) -> None:
        """Take what is known of the gradients' noise, before an interval is proposed on."""
        del noise

    def share_bars(self, allowed: Callable[[Sizes], Allowed]) -> None:
        """Take what tells the sizes that may come into force in place of others.

        A proposal of any other sizes is replaced by these. A policy that weighs what sizes would
        bring asks first, and weighs what it would get.
        """
        del allowed

    def recall(self, intervals: Sequence[Interval]) -> bool:
        """Learn from what these ranks' devices did in other worlds; returns whether it can."""
        del intervals
        return False

    def explain(self) -> list[str]:
        """Say what the policy knows, a sentence a line."""
        return [f"policy {self.name}: sizes stay as they are"]

    def details(self) -> list[str]:
        """Say what else the policy knows, a line a rank; for ``explain(verbose=True)``."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, JSON-able."""
        return encode(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, among as many ranks; an ArgumentError else."""
        sizes = {} if self.task is None else {"world_size": self.task.world_size}
        self.state = decode(type(self.state), state, what=f"policy {self.name}", sizes=sizes)
