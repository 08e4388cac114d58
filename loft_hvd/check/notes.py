"""What one rank notes of a script while it runs, by line of the script; and what is found in it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "CALLS",
    "DRAFT",
    "JOIN",
    "STANDSTILL_S",
    "STEP",
    "BalancerNote",
    "Call",
    "ErrorNote",
    "Finding",
]
__all__ += ["LoaderNote", "LossNote", "Notes", "OptimizerNote", "Round", "WaitNote"]

STEP = "optimizer.step"  # a call in which gradients are reduced
# Ends of files that a rank leaves whose process ends without a word: notes, and its calls by line.
DRAFT, CALLS = ".draft", ".calls"
JOIN = "hvd.join"  # a rank that has called it takes part in nothing, until all have
# So long must all ranks wait for each other, with no sign of work, to be told as a standstill. A
# choice: the largest transfer of a step is through sooner.
STANDSTILL_S = 10.0


@dataclass
class Call:
    """Something that every rank must call alike: a collective, or a step that holds one."""

    what: str  # such as "hvd.allreduce", or STEP
    stack: list[str]  # file:line of the script that calls, then of what called that, and so on
    name: str | None = None  # that the script has given it
    members: list[int] | None = None  # ranks of its process set; None: all
    num_values: int = 0  # of a tensor that is reduced; 0 where that is not known
    is_mean_of_one: bool = False  # an average over ranks of one number per rank, such as a loss
    is_ordered: bool = True  # ranks must call it in the same order as all others
    round: int = 0  # iterations over loaders that had begun
    is_done: bool = False  # it has returned

    @property
    def place(self) -> str:
        """The line that calls it."""
        return self.stack[0] if self.stack else "?"


@dataclass
class Round:
    """One iteration over a loader."""

    epoch: int | None = None  # that its sampler was at; None where it has none
    num_batches: int = 0
    is_trained: bool = False  # whether backward passes followed its batches
    begun: list[str] = field(default_factory=list)  # file:line as in ``Call.stack``


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
    members: list[int] | None = None  # ranks of its process set; None: all


@dataclass
class LossNote:
    """A line that takes the mean over labels: of a rank's batches the thinnest and the fullest."""

    place: str
    thinnest: tuple[int, int]  # labels that count, and samples of the batch
    fullest: tuple[int, int]


@dataclass
class WaitNote:
    """What a rank stood in at the end: it waited for other ranks."""

    stack: list[str]  # as in ``Call.stack``
    seconds: float  # since its last sign of work

    @property
    def place(self) -> str:
        """The line that waits."""
        return self.stack[0] if self.stack else "?"


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
    # "done", "stopped" at the limit, "error", or "crashed": it has left a draft, and no notes.
    ended: str = "stopped"
    error: ErrorNote | None = None
    calls: list[Call] = field(default_factory=list)
    loaders: list[LoaderNote] = field(default_factory=list)
    balancers: list[BalancerNote] = field(default_factory=list)
    optimizers: list[OptimizerNote] = field(default_factory=list)
    losses: list[LossNote] = field(default_factory=list)
    says_counts: bool = False  # it has said what its losses are over
    wait: WaitNote | None = None
    says_set_epoch: bool = False  # it was called, or some line of the script names it
    is_torchrun: bool = False  # torch.distributed connects the ranks, and no Horovod
    ignores_copies: bool = False  # LOFT_HVD_COPIES=ignore: ranks' parameters differ on purpose
    has_reducer: bool = False  # it has made an optimizer that reduces, or torch's process group
    num_backward: int = 0
    first_backward: str = "?"  # its line
    met_backward: str = ""  # line of a collective in a backward pass whose loss was not weighed
    num_steps: int = 0  # of optimizers that reduce
    num_plain_steps: int = 0  # of others, after a backward pass


@dataclass(frozen=True)
class Finding:
    """One thing that a conversion forgot."""

    place: str  # file:line
    what: str
    mend: str
