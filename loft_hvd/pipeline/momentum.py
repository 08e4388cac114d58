"""Worker momentum: a rank sends the average of its gradients over time (arXiv 2012.10333).

An average is quieter than one gradient, so less can hide in its noise. With momentum b, rank i has
x_i samples and the mean gradient g_i in a step, and keeps an average m_i for each parameter:

    w_i <- b w_i + x_i
    m_i <- (b w_i m_i + x_i g_i) / (b w_i + x_i)

Every rank knows all w_i, as they follow from the plan, and a row weighs w_i. So a first gradient
counts whole, a larger batch counts more, and the average of a rank without samples stands while its
weight fades. In the first step of a world each rank tells what its averages weigh. None is taken
for more than an average can weigh there: a whole step's samples over 1 - b, where one rank has them
all. What is taken fades as any weight does, whatever was told.

What an average itself holds is another number, which stays on its device: a gradient that is not
finite counts as no samples, a parameter that is added late begins at 0, and a frozen one's average
waits. Without these both numbers are equal, and under ``Mean`` the result is torch's momentum
buffer of the exactly weighted mean, times (1 - b) / (1 - b**t) after t steps of equal global
batches.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from loft_hvd._native import extension
from loft_hvd.aggregation.compute import num_threads, tell_autograd
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError
from loft_hvd.pipeline.weights import PassWeights, capped_weights
from loft_hvd.transport.base import Channel

__all__ = [
    "STATE_KEY",
    "Average",
    "AverageWeights",
    "Blend",
    "LossScaler",
    "WorkerMomentum",
    "absorb",
    "check_state",
    "read_momentum",
]

_logger = logging.getLogger(__name__)

STATE_KEY = "worker_momentum"
# Whole-number weight of a row of mean weight. Bound from the kernels, whose weights add up to less
# than 2**30: those of 1,024 rows, capped, do.
_WHOLE = 512
# An average weighs no more than all samples that its rank has had. float64 counts them one by one
# up to here, and no job has as many.
_MOST_SAMPLES = 2**53
_FAINT = 4  # a rank without samples is absent below the mean weight over this; a choice
# What a rank brings into a world: no averages, some that it has loaded, or its own.
_NOTHING, _LOADED, _STEPPED = 0.0, 1.0, 2.0


class LossScaler(Protocol):
    """What is asked of a ``torch.amp.GradScaler``."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return a tensor times the loss scale."""


class Average(NamedTuple):
    """A parameter's average, and what it weighs."""

    values: Tensor  # float32 (float64 for a float64 parameter), of the parameter's shape
    weight: Tensor  # float64, of no dimension: the samples it holds, faded; on the values' device

    @property
    def nbytes(self) -> int:
        """The bytes of both."""
        return self.values.nbytes + self.weight.nbytes


class Blend(NamedTuple):
    """How a rank's row of a step comes about: ``scale`` times an average, with its gradient in.

    The average becomes ``(beta * weight * average + gain * gradient) / (beta * weight + samples)``.
    """

    beta: float
    samples: float  # of the gradient, which is never read where there are none
    gain: float
    scale: float = 1.0  # of what is sent, not of the average that stays


@dataclass(frozen=True)
class AverageWeights:
    """What all ranks' averages weigh after a step, in samples, [world_size]."""

    beta: float
    counts: tuple[float, ...]  # samples of the step
    weights: tuple[float, ...]

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return math.fsum(self.weights)

    def blend(self, rank: int, *, gain: float, scale: float) -> Blend:
        """Return how a rank's row comes about, whose gradient times ``gain`` is ``x_i g_i``."""
        return Blend(self.beta, self.counts[rank], gain, scale)

    def exact(self) -> tuple[int, ...] | None:
        """Return whole numbers in proportion to the weights, for a mean; None where all are 0."""
        if self.total == 0:
            return None
        # Kernels take weights that add up to less than 2**30.
        return tuple(round(weight / self.total * 2**29) for weight in self.weights)

    def weigh(self, weights: PassWeights) -> PassWeights:
        """Return the weights of a step in which a robust rule sees averages.

        A rank without samples is absent while its average has faded.
        """
        mean = self.total / len(self.weights)
        if mean == 0:
            return weights
        present = tuple(
            count > 0 or weight * _FAINT >= mean
            for count, weight in zip(self.counts, self.weights, strict=True)
        )
        counts = tuple(
            max(1, round(weight / mean * _WHOLE)) if is_there else 0
            for weight, is_there in zip(self.weights, present, strict=True)
        )
        return replace(weights, weights=capped_weights(counts), present=present, counts=counts)


class WorkerMomentum:
    """One rank's averages, by parameter, and what every rank's weigh; it outlives worlds.

    Args:
        beta: the momentum b, 0 < b < 1.
        scaler: multiplies losses, and so gradients; averages are kept without its scale, and sent
            with it. None for losses as they are.
    """

    def __init__(self, beta: float, *, scaler: LossScaler | None = None) -> None:
        self.beta = beta
        self._scaler = scaler
        # By id, as tensors compare by value. The parameter is kept so that its id stays its own.
        self._averages: dict[int, tuple[Tensor, Average]] = {}
        self._own = 0.0  # the weight of this rank's averages
        self._weights: tuple[float, ...] | None = None  # of all ranks; None until they have met
        self._rank = self._world_size = -1
        self._process = secrets.token_hex(8)  # tells what it has saved from what others have
        self._has_stepped = False
        # What was loaded before the first step, until that has ended; whose it was, and whether
        # averages went on from it.
        self._loaded: Mapping[str, Any] | None = None
        self._loaded_process: object = None
        self._has_gone_on = False
        # What was loaded since the last step, if averages have been so before.
        self._committed: Mapping[str, Any] | None = None
        self._named: Mapping[str, Tensor] = {}  # the parameters of what was loaded
        self._joining = threading.Lock()

    def begin_world(self) -> None:
        """Let ranks meet anew before their next step.

        This rank's averages stay, but for an elastic job that has gone back to a commit: then they
        go back with it.
        """
        self._weights = None
        if not self._has_stepped:  # a first step may have failed
            self._averages.clear()
            self._own = 0.0
        elif self._committed is not None:
            self._take(self._committed)
            self._own, self._committed = self._committed["weight"], None

    def _take(self, state: Mapping[str, Any]) -> None:
        """Let a loaded state's averages be those of the parameters."""
        for name, parameter in self._named.items():
            self._averages.pop(id(parameter), None)
            if (values := state["averages"].get(name)) is not None:
                device, weight = parameter.device, state["average_weights"][name]
                average = Average(values.to(device, copy=True), weight.to(device, copy=True))
                self._averages[id(parameter)] = (parameter, average)

    def join(self, channel: Channel, *, most_samples: int) -> None:
        """Learn what every rank's averages weigh; every rank calls it alike in its first step.

        Args:
            channel: of the ranks whose rows meet.
            most_samples: that a step of this world has on all ranks together; from the plan and
                equal on every rank, in an epoch's short last step too.

        Raises:
            MismatchError: a rank tells what no average weighs; on every rank.
        """
        with self._joining:  # autograd has a thread for each device
            if self._weights is not None:
                return
            self._rank, self._world_size = channel.rank, channel.world_size
            mine = self._fitting(self._loaded)
            own = self._own if mine is None else mine["weight"]
            has = _LOADED if mine is not None else _STEPPED if self._has_stepped else _NOTHING
            row = torch.tensor([own, has], dtype=torch.float64)
            rows = channel.sub("momentum").allgather_rows(row)  # [world_size, 2]
            weights: list[float] = rows[:, 0].tolist()
            wrong = [
                rank for rank, weight in enumerate(weights) if not 0 <= weight <= _MOST_SAMPLES
            ]
            if wrong:
                raise MismatchError(
                    f"worker momentum: ranks {wrong} tell that their averages weigh "
                    f"{[weights[rank] for rank in wrong]} samples, which must be >= 0 and <= "
                    f"{_MOST_SAMPLES}; look at those machines"
                )
            if self._loaded is not None:
                self._loaded_process = self._loaded.get("process")
            # What was loaded goes on everywhere or nowhere: one rank's would outweigh the others'.
            loaded = rows[:, 1] == _LOADED
            if bool(loaded.any()) and bool((rows[:, 1] == _NOTHING).any()):
                if self._rank == 0:
                    _logger.info(
                        "worker momentum begins anew: not every rank has loaded a state of its own "
                        "(load on each rank what optimizer.state_dict() gave there, to go on)"
                    )
                weights = rows[:, 0].masked_fill(loaded, 0.0).tolist()
                mine = None
            elif mine is not None:
                self._take(mine)
            if self._loaded is not None:  # else: of a world before this one
                self._loaded, self._has_gone_on = mine, mine is not None
            # Each is a rank's own claim. Kept at most so large, it also fades as an honest one.
            # None is larger when a run is resumed with the same global batch: it goes on exactly.
            most = most_samples / (1 - self.beta)
            self._weights = tuple(min(weight, most) for weight in weights)
            self._own = self._weights[self._rank]

    def _fitting(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a loaded state if it is this rank's, of a world of this size."""
        place = (self._rank, self._world_size)
        fits = state is not None and (state["rank"], state["world_size"]) == place
        return state if fits else None

    def average_weights(self, counts: Sequence[float] | None) -> AverageWeights:
        """Return what averages weigh in a step with these samples, [world_size]; None for equal."""
        assert self._weights is not None  # ``join`` came before
        counts = (1,) * len(self._weights) if counts is None else tuple(counts)
        pairs = zip(self._weights, counts, strict=True)
        weights = tuple(self.beta * weight + count for weight, count in pairs)
        return AverageWeights(self.beta, counts, weights)

    def step_ended(self, ages: AverageWeights) -> None:
        """Let the weights after a step be those before the next one."""
        self._weights = ages.weights
        self._own = ages.weights[self._rank]
        self._has_stepped = True
        self._loaded = self._committed = None

    def send(self, parameter: Tensor, grad: Tensor | None, target: Tensor, blend: Blend) -> None:
        """Let a parameter's gradient into its average, and put what is sent into ``target``.

        Once a step and parameter. ``target`` is like the parameter, and may be the gradient itself.
        No gradient counts as zeros, as everywhere. A frozen parameter's average waits until it
        thaws, and its gradient is sent as it is.
        """
        if not parameter.requires_grad:
            # Its gradient need not be None: gradients live in buckets, and may be zeroed there.
            with torch.no_grad():
                target.zero_() if grad is None else target.copy_(grad).mul_(blend.scale)
            return
        known = self._averages.get(id(parameter))
        average = None if known is None else known[1]
        scale = None
        if self._scaler is not None:
            scale = self._scaler.scale(torch.ones((), device=target.device))
        average = absorb(average, grad, target, blend, scale=scale)
        if known is None and average is not None:
            self._averages[id(parameter)] = (parameter, average)

    def has_average(self, parameter: Tensor) -> bool:
        """Say whether a parameter's average is of more than zeros."""
        known = self._averages.get(id(parameter))
        return known is not None and bool(known[1].values.any())

    def memory_bytes(self) -> int:
        """Return the bytes of all averages."""
        return sum(average.nbytes for _, average in self._averages.values())

    # What is saved.

    def state_dict(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return this rank's averages by the parameters' names, and what they weigh.

        ``named`` are all parameters, as a frozen one's average waits.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        known = {name: self._averages.get(id(each)) for name, each in named.items()}
        averages = {name: pair[1] for name, pair in known.items() if pair is not None}
        return {
            "process": self._process,
            "rank": self._rank,
            "world_size": self._world_size,
            "weight": self._own,
            "averages": {name: average.values for name, average in averages.items()},
            "average_weights": {name: average.weight for name, average in averages.items()},
        }

    def load_state_dict(self, state: Any, named: Mapping[str, Tensor]) -> None:
        """Take a checked state of these parameters, frozen ones among them, for the first step.

        A process that has made steps keeps its averages. As the next world begins, unless a step
        ends before, it goes back to a state that its averages were in: one that it has saved, or
        what it loaded before its first step, which is none where that was left out.
        """
        self._committed, self._named = None, named
        if not self._has_stepped:
            self._loaded = state
        elif state is not None and (process := state.get("process")) is not None:
            if process == self._process or (process == self._loaded_process and self._has_gone_on):
                self._committed = state
            elif process == self._loaded_process:
                self._committed = {"weight": 0.0, "averages": {}}


def absorb(
    average: Average | None,
    grad: Tensor | None,
    target: Tensor,
    blend: Blend,
    *,
    scale: Tensor | None = None,
) -> Average | None:
    """Put ``blend`` of a gradient and its average into ``target``, and update the average.

    Args:
        average: of the shape of ``target``; None for none yet.
        grad: this step's, times ``scale``; None for zeros. Any floating dtype.
        target: gets what is sent, times ``scale``; may be ``grad``.
        blend: how much of either.
        scale: the loss scale, a tensor of one value on the device of ``target``; None for 1.

    Returns:
        The average, which is updated in place, or a new one. A gradient that is not finite reaches
        ``target`` alone: in an average it would stay for ever. The average fades as by a step
        without samples.
    """
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        # A narrow target would round what is kept.
        made = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
        if average is not None:
            average.weight.mul_(blend.beta)
        if blend.samples == 0:
            made.zero_() if average is None else made.copy_(average.values)
        else:
            if average is None:
                values = torch.zeros_like(made, memory_format=torch.contiguous_format)
                average = Average(values, values.new_zeros((), dtype=torch.float64))
            if scale is None and (module := _kernel_for(average.values, grad, made)) is not None:
                _absorb_by_kernel(module, average, grad, made, blend)
            else:
                _absorb_by_torch(average, grad, made, blend, scale)
        if blend.scale != 1.0:
            made.mul_(blend.scale)
        if scale is not None:
            made.mul_(scale)
        if made is not target:
            target.copy_(made)
    return average


def _kernel_for(values: Tensor, grad: Tensor | None, made: Tensor) -> ModuleType | None:
    """Return the extension where it can take these, else None: plain torch takes all."""
    module = extension()
    if not hasattr(module, "absorb_cpu") or made.numel() == 0:
        return None
    for each in (values, made) if grad is None else (values, made, grad):
        # It is given addresses of so many values in this order, and nothing else.
        is_like = each.dtype == made.dtype and each.shape == made.shape
        if not is_like or each.device.type != "cpu" or not each.is_contiguous():
            return None
        if each.is_neg() or each.data_ptr() == 0:  # memory with the other sign, or none
            return None
    return module


def _absorb_by_kernel(
    module: ModuleType, average: Average, grad: Tensor | None, made: Tensor, blend: Blend
) -> None:
    """Do what ``_absorb_by_torch`` does, but for a rounding, in two passes over memory."""
    # ResNet-18's 11.7 million float32, 56 parameters, one thread, by turns: 31.8 and 33.7 ms by
    # torch, 18.6 and 19.9 so. Copies and SGD's momentum, in its place, take 6.8 and 12.1 (2 cores
    # of an Intel Xeon, 2026-11-28).
    kept = average.weight.item()
    whole = kept + blend.samples
    is_finite = module.absorb_cpu(
        0 if grad is None else grad.data_ptr(),
        average.values.data_ptr(),
        made.data_ptr(),
        made.numel(),
        0 if made.dtype == torch.float64 else 1,  # DType in csrc/rules.h
        1 / whole * blend.gain,
        kept / whole,
        num_threads(),
        config().isa or "",
    )
    tell_autograd(made)
    if is_finite:
        tell_autograd(average.values)
        average.weight.fill_(whole)


def _absorb_by_torch(
    average: Average, grad: Tensor | None, made: Tensor, blend: Blend, scale: Tensor | None
) -> None:
    """Make the average of a gradient, and keep it if it is finite; never waits for a device."""
    whole = average.weight + blend.samples
    if grad is None:
        made.zero_()
    else:
        by = whole.reciprocal() * blend.gain
        if grad.dtype == made.dtype:
            torch.mul(grad, by, out=made)
        else:
            made.copy_(grad).mul_(by)
    if scale is not None:
        made.div_(scale)
    made.addcmul_(average.values, average.weight / whole)
    _keep_finite(average, made, blend.samples)


def _keep_finite(average: Average, made: Tensor, samples: float) -> None:
    """Let an average be ``made`` if that is finite in every value; never waits for a device."""
    if made.numel() == 0:
        return
    low, high = torch.aminmax(made)  # NaN where there is one
    is_finite = low.isfinite() & high.isfinite()
    if made.device.type == "cpu":
        if bool(is_finite):
            average.values.copy_(made)
            average.weight.add_(samples)
    else:
        torch.where(is_finite, made, average.values, out=average.values)
        average.weight.add_(is_finite, alpha=samples)


def read_momentum(value: object) -> float:
    """Return a worker momentum as a float; raise unless 0 <= it < 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"worker_momentum={value!r} must be a number, such as 0.9")
    if not 0 <= value < 1:
        raise ArgumentError(
            f"worker_momentum={value} must be >= 0 and < 1; 0.9 is usual, 0 is none"
        )
    return float(value)


def check_state(state: object, named: Mapping[str, Tensor]) -> None:
    """Raise ``ArgumentError`` unless a state is one that ``state_dict`` can have returned."""
    fault = _fault_of(state, named)
    if fault:
        raise ArgumentError(
            f"load_state_dict: {STATE_KEY!r} cannot be taken: {fault}; give what state_dict of an "
            f"optimizer with the same parameters returned, or leave {STATE_KEY!r} out to begin anew"
        )


def _fault_of(state: object, named: Mapping[str, Tensor]) -> str:
    if not isinstance(state, Mapping):
        return f"it is of type {type(state).__name__}, no dict"
    for key in ("rank", "world_size"):
        value = state.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{key}={value!r} must be a whole number"
    if not isinstance(process := state.get("process", ""), str):
        return f"process={process!r} must be a text"
    weight, averages = state.get("weight"), state.get("averages")
    if not isinstance(weight, float):
        return f"weight is of type {type(weight).__name__}, no float"
    if not 0 <= weight <= _MOST_SAMPLES:
        return f"weight={weight} must be >= 0 and <= {_MOST_SAMPLES}"
    if not isinstance(averages, Mapping):
        return f"averages are of type {type(averages).__name__}, no dict"
    average_weights = state.get("average_weights")
    if not isinstance(average_weights, Mapping):
        return f"average_weights are of type {type(average_weights).__name__}, no dict"
    for name, average in averages.items():
        like = named.get(name)
        if like is None:
            return f"there is no parameter {name!r}"
        fault = _fault_of_average(average, average_weights.get(name), like)
        if fault:
            return f"the average of {name!r} {fault}"
    return ""


def _fault_of_average(average: object, weight: object, like: Tensor) -> str:
    if not isinstance(average, Tensor):
        return f"is of type {type(average).__name__}, no tensor"
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if average.shape != like.shape or average.dtype != dtype:
        return (
            f"is {average.dtype} of shape {list(average.shape)}, not {dtype} of shape "
            f"{list(like.shape)}"
        )
    if not bool(average.isfinite().all()):
        return "has values that are not finite"
    if not isinstance(weight, Tensor) or weight.dtype != torch.float64 or weight.dim() != 0:
        return f"weighs {weight!r}, no torch.float64 tensor without dimensions"
    if not 0 <= float(weight) <= _MOST_SAMPLES:
        return f"weighs {float(weight)}, which must be >= 0 and <= {_MOST_SAMPLES}"
    return ""
