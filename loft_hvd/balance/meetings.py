"""What meets other ranks in the backward pass: exact with unequal batches, or told.

A rank's loss is the mean over its own ``x_i`` of ``X`` samples, and gradients are weighed where
they reach parameters: too late for sums over ranks inside the backward pass, in which a small
rank's samples have by then counted as much as a large one's batch. So each synchronised batch norm
takes the gradient of its output times ``n x_i / X``, with which all samples of ``n`` ranks count
alike, and gives on the gradients of its inputs divided by it. A dummy batch has no part in it.

Where the loss itself was weighed (``Balancer.weigh``) that has been done for all of a model. Other
collectives that are called in a backward pass whose loss was not are told of, once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from loft_hvd.balance.plan import StepSizes
from loft_hvd.errors import UsageError
from loft_hvd.transport.waits import watch_backward

__all__ = ["ForwardSource", "follow", "take_as_exact", "unweighed_meeting", "weigh_meetings"]

_OURS = str(Path(__file__).parents[1])
_CHECK = str(Path(__file__).parents[1] / "check")  # it stands between a script and torch
_LIBRARIES = str(Path(torch.__file__).parents[1])  # torch's and Horovod's


class ForwardSource(Protocol):
    """What is asked of a balancer in a forward pass."""

    @property
    def rank(self) -> int:
        """This rank."""

    def forward_sizes(self) -> StepSizes:
        """Return the sizes of the batch that a forward pass is for."""

    def is_weighed(self, batch: StepSizes) -> bool:
        """Say whether a batch's loss was weighed before its backward pass."""

    @property
    def leaves_out(self) -> bool:
        """Whether a rank without samples makes no forward pass."""


class _Weighed:
    """Stands for the autograd function of a synchronised batch norm, in the module that applies it.

    ``takes_none``: of an empty batch it makes no statistics, and yet meets the other ranks.
    """

    def __init__(self, function: Any, *, takes_none: bool) -> None:
        self.function = function
        self._takes_none = takes_none

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def apply(self, *given: Any) -> Tensor:
        """Return what the function returns, with gradients weighed inside it.

        ``given``: the input [samples, ...], weight and bias, and what else the function takes.
        """
        apply: Callable[..., Tensor] = self.function.apply
        source = _followed()
        batch = None if source is None else source.forward_sizes()
        if source is None or batch is None or len(set(batch.sizes)) == 1:
            return apply(*given)
        self._check(batch, leaves_out=source.leaves_out)
        size = batch.sizes[source.rank]
        if size == 0:
            # What it adds is 0 and has a gradient, so that the others are met in both passes.
            dummy: Tensor = given[0]
            return dummy + apply(dummy[:0], *given[1:]).sum()
        share, asked = size * len(batch.sizes) / batch.total, ref(source)
        output = apply(*(_times(value, 1 / share, asked, batch) for value in given[:3]), *given[3:])
        weighed: Tensor = _times(output, share, asked, batch)
        return weighed

    def _check(self, batch: StepSizes, *, leaves_out: bool) -> None:
        """Raise a UsageError, on all ranks alike, for sizes with which ranks would not meet."""
        if leaves_out and 0 in batch.sizes:
            raise UsageError(
                "a synchronised batch norm meets all ranks in each forward pass, and "
                f"Balancer(min_batch=0) leaves ranks out of step {batch.step}, of sizes "
                f"{list(batch.sizes)}: give min_batch=1 or more, or leave the norms unsynchronised"
            )
        if batch.num_micro:
            raise UsageError(
                "a synchronised batch norm meets all ranks in each forward pass, and with "
                f"Balancer(micro_batches=True) ranks make {list(batch.num_micro)} of them in step "
                f"{batch.step}: leave micro_batches away, or the norms unsynchronised"
            )
        if 0 in batch.sizes and not self._takes_none:
            raise UsageError(
                "Horovod's SyncBatchNorm takes no rank without samples, and the sizes of step "
                f"{batch.step} are {list(batch.sizes)}: give each rank one at least (of an epoch's "
                "last batch by drop_last=True), or take torch.nn.SyncBatchNorm"
            )


def _times(value: Any, factor: float, asked: ref[ForwardSource], batch: StepSizes) -> Any:
    """Return a value whose gradient is multiplied, unless the batch's loss was weighed."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value

    def scaled(grad: Tensor) -> Tensor | None:
        source = asked()
        return None if source is None or source.is_weighed(batch) else grad * factor

    value = value.view_as(value)  # it may have other consumers
    value.register_hook(scaled)
    return value


@dataclass
class _Following:
    """Of this process: whose batches forward passes are of, and what was told."""

    source: ref[ForwardSource] | None = None
    has_told: bool = False
    exact: set[CodeType] = field(default_factory=set)  # backward passes of functions that are so


@functools.cache
def _following() -> _Following:
    return _Following()


def _followed() -> ForwardSource | None:
    source = _following().source
    return None if source is None else source()


def follow(source: ForwardSource) -> None:
    """Let forward passes from here on be those of this balancer's batches."""
    _following().source = ref(source)


def take_as_exact(*functions: Callable[..., Any]) -> None:
    """Tell of no collectives that these call: what they move across ranks is weighed elsewhere."""
    _following().exact.update(inspect.unwrap(each).__code__ for each in functions)


def weigh_meetings() -> None:
    """Weigh inside the synchronised batch norms of torch and, where it is loaded, of Horovod.

    Of other collectives in a backward pass tell.
    """
    _stand_in(importlib.import_module("torch.nn.modules.batchnorm"), "sync_batch_norm", True)
    if (horovods := sys.modules.get("horovod.torch.sync_batch_norm")) is not None:
        _stand_in(horovods, "_SyncBatchNorm", False)
    watch_backward(_met)


def _met(frame: FrameType) -> None:
    source = _followed()
    if _following().has_told or source is None:
        return
    batch = source.forward_sizes()
    if len(set(batch.sizes)) > 1 and (place := unweighed_meeting(frame)) is not None:
        _following().has_told = True
        warnings.warn(
            f"rank {source.rank}: ranks meet in the backward pass, at {place}, and the sizes of "
            f"step {batch.step} are {list(batch.sizes)}: gradients that cross ranks there count "
            "the samples of small batches for more. Weigh the loss before: "
            "balancer.weigh(loss).backward()",
            stacklevel=2,
        )


def unweighed_meeting(frame: FrameType) -> str | None:
    """Return the line of the script in whose backward pass a collective is called, by its frame.

    None where it is a part of ours, of what is exact by itself, or of a loss that was weighed.
    """
    source = _followed()
    if source is None or source.is_weighed(source.forward_sizes()):
        return None
    callers = list(_callers(frame))
    if any(each.f_code in _following().exact for each in callers):
        return None
    for each in callers:
        file = each.f_code.co_filename
        if file.startswith(_OURS) and not file.startswith(_CHECK):
            return None
        if not file.startswith((_LIBRARIES, _CHECK)):
            return f"{file}:{each.f_lineno}"
    return "a thread of torch's"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stand_in(module: Any, name: str, takes_none: bool) -> None:
    function = getattr(module, name)
    if not isinstance(function, _Weighed):
        take_as_exact(function.backward)
        setattr(module, name, _Weighed(function, takes_none=takes_none))
