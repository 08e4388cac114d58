"""What ``hvd.DistributedOptimizer`` returns, taken over: its options kept, its own reduction ended.

Horovod makes a class of its own below the user's, and hangs its hooks on the nodes that add up
gradients, which it keeps alive in a list. Back in the user's class, and with that list empty, the
very same object is a plain optimizer again: its state, its groups, and who refers to it stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError

__all__ = [
    "HOROVODS_MODULE",
    "HorovodsOptions",
    "end_horovods",
    "is_horovods",
    "read_horovods",
    "users_class",
]

# The module of the classes of Horovod's optimizers, by which Horovod tells them from others.
HOROVODS_MODULE = "horovod.torch.optimizer"
# Of an optimizer of Horovod 0.28.1 and its main: what is read, and what its hooks look at.
_READ = ("_parameter_names", "_compression", "_groups", "process_set", "op")
_LOOKED_AT = ("_grad_accs", "_handles", "_allreduce_delay")


@dataclass(frozen=True)
class HorovodsOptions:
    """The arguments of ``hvd.DistributedOptimizer``, as its optimizer keeps them."""

    named_parameters: Sequence[tuple[str, torch.nn.Parameter]] | None
    compression: Any
    backward_passes_per_step: int
    op: Any
    gradient_predivide_factor: float
    groups: int | Sequence[Sequence[Tensor]] | None
    sparse_as_dense: bool
    process_set: Any


def is_horovods(optimizer: object) -> bool:
    """Say whether Horovod, or ``loft.DistributedOptimizer``, has made an optimizer's class."""
    return type(optimizer).__module__ == HOROVODS_MODULE


def read_horovods(optimizer: torch.optim.Optimizer) -> HorovodsOptions:
    """Return what an optimizer of Horovod's was made with.

    Raises:
        ArgumentError: it combines by Adasum.
        ArgumentTypeError: it is of a Horovod that keeps its options elsewhere.
        UsageError: it is in use already: a step is under way, or others have changed its methods.
    """
    values = vars(optimizer)
    if "_starting_models" in values:
        raise ArgumentError(
            "DistributedOptimizer: op=hvd.Adasum of the hvd.DistributedOptimizer is not offered: "
            "it combines ranks' updates after each has taken a step of its own; make that one with "
            "hvd.Average, or keep it alone"
        )
    missing = [name for name in (*_READ, *_LOOKED_AT) if name not in values]
    if missing:
        raise ArgumentTypeError(
            f"DistributedOptimizer: this Horovod's optimizer has no {', '.join(missing)}, by which "
            "that of Horovod 0.28.1 is taken over; give the torch optimizer itself, and the other "
            "arguments here"
        )
    if changed := [name for name in ("step", "synchronize") if name in values]:
        raise UsageError(
            f"DistributedOptimizer: {changed[0]}() of the hvd.DistributedOptimizer was replaced "
            "since it was made, as a learning-rate scheduler and loft.attach do; wrap it right "
            "after it is made, and give the scheduler what loft.DistributedOptimizer returns"
        )
    if values["_handles"]:
        raise UsageError(
            "DistributedOptimizer: gradients of the hvd.DistributedOptimizer are on their way; "
            "wrap it right after it is made, before the first backward pass"
        )
    names = [(name, parameter) for parameter, name in values["_parameter_names"].items()]
    process_set = values["process_set"]
    is_of_all = getattr(process_set, "process_set_id", None) == 0
    return HorovodsOptions(
        named_parameters=names,
        compression=values["_compression"],
        backward_passes_per_step=values["backward_passes_per_step"],
        op=values["op"],
        gradient_predivide_factor=values["gradient_predivide_factor"],
        groups=values["_groups"],
        sparse_as_dense=values["sparse_as_dense"],
        process_set=None if is_of_all else process_set,
    )


def users_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return an optimizer's class; where Horovod made one below the user's, the user's."""
    kind = type(optimizer)
    return kind.__bases__[0] if is_horovods(optimizer) else kind


def end_horovods(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that ``read_horovods`` has read the plain one of the user's class."""
    values = vars(optimizer)
    values["_grad_accs"].clear()
    # A graph of before may still hold a node: its hook then counts down from here, and never
    # comes to the last pass of a step, in which it would send.
    values["_allreduce_delay"] = dict.fromkeys(values["_allreduce_delay"], float("inf"))
    optimizer.__class__ = users_class(optimizer)
