"""What one rank notes of a script while it runs: who called what, from which line of the script."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["STEP", "BalancerNote", "Call", "ErrorNote", "LoaderNote", "Notes", "OptimizerNote"]
__all__ += ["Round"]

STEP = "optimizer.step"  # a call in which gradients are reduced


@dataclass
class Call:
    """Something that every rank must call alike: a collective, or a step that holds one."""

    what: str  # such as "hvd.allreduce", or STEP
    stack: list[str]  # file:line of the script that calls, then of what called that, and so on
    is_mean_of_one: bool = False  # an average over ranks of a single number
    is_ordered: bool = True  # ranks must call it in the same order as all others
    round: int = 0  # iterations over loaders that had begun
    is_done: bool = False

    @property
    def place(self) -> str:
        """The line that calls it."""
        return self.stack[0] if self.stack else "?"


@dataclass
class Round:
    """One iteration over a loader."""

    epoch: int | None = None  # that its sampler was at; None where it has none
    num_batches: int = 0
    is_trained: bool = False  # whether backward passes came in between


@dataclass
class LoaderNote:
    """A loader that the script made."""

    kind: str  # "torch", or "loft" for those that a balancer gives sizes to
    made: str  # file:line
    batch_size: int | None = None
    shuffles: bool = False  # by a sampler that has set_epoch
    rounds: list[Round] = field(default_factory=list)


@dataclass
class BalancerNote:
    """A balancer that the script made."""

    made: str
    policy: str
    is_adaptive: bool
    sizes: list[int] = field(default_factory=list)  # of the newest plan
    has_steps: bool = False  # the script says itself when a step is, by ``balancer.step``


@dataclass
class OptimizerNote:
    """An optimizer that reduces over ranks, when it took its first step."""

    made: str
    digest: int  # of all parameters
    options: dict[str, str]  # of all parameter groups


@dataclass
class ErrorNote:
    """What ended the script."""

    kind: str
    text: str
    place: str
    is_ours: bool  # a LoftError, whose text names the way out


@dataclass
class Notes:
    """All that a rank has noted."""

    rank: int
    ended: str = "stopped"  # "done", "stopped" at the limit, or "error"
    error: ErrorNote | None = None
    calls: list[Call] = field(default_factory=list)
    loaders: list[LoaderNote] = field(default_factory=list)
    balancers: list[BalancerNote] = field(default_factory=list)
    optimizers: list[OptimizerNote] = field(default_factory=list)
    says_set_epoch: bool = False  # it was called, or some line of the script names it
    num_steps: int = 0
