"""The ranks' copies of a model and its optimizer's state, compared bit by bit.

Ranks share gradients, not parameters: copies that start apart (a forgotten
``hvd.broadcast_parameters``, a seed for each rank, a checkpoint that one rank has loaded) stay
apart, and no exchange of gradients shows it. So all is compared in the first step, and then some
parameters at a time, so seldom that it takes at most a thousandth of the time. What sets copies
apart comes before them: loss scales, batches, options such as the learning rate.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from loft_hvd.config import config
from loft_hvd.pipeline.scalers import ScaleCheck
from loft_hvd.transport.agreement import check_agreement, digest
from loft_hvd.transport.base import Channel

__all__ = ["ReplicaCheck", "compare_batches"]

_logger = logging.getLogger(__name__)
_LOOK_BYTES = 32 * 2**20  # of parameters in a later look; a choice: about 40 ms on one core
_COST = 1e-3  # most of the time that later looks may take; a choice
_FEWEST_STEPS = 100  # between two looks; a choice
_MOST_STEPS = 100_000  # bound: also a model that takes a minute to read is looked at in a day
_ADVICE = (
    "Give every rank one start, before the first step: "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0), and after it, as it may take a step of "
    "Horovod's own on ranks without a state, hvd.broadcast_parameters(model.state_dict(), "
    "root_rank=0); later on let no rank change its copy alone. Where copies differ on purpose, "
    "start with LOFT_HVD_COPIES=ignore"
)


# Where last bits differ, so may options that an optimizer computes itself, as D-Adaptation does.
_SET_BY_SCRIPTS = ("lr", "momentum", "betas", "weight_decay")
_OPTIONS_ADVICE = (
    "Ranks take one step together: give every rank the same options, and a scheduler that goes by "
    "a loss (ReduceLROnPlateau) one that is the same everywhere, loft.average(loss, count). Where "
    "copies differ on purpose, start with LOFT_HVD_COPIES=ignore"
)
_BATCH_ADVICE = (
    "Ranks share each batch by the samples' numbers, which must mean the same samples everywhere: "
    "sort lists of files, split at random with a generator of one seed, and give loaders the same "
    "seed=, epoch and loaded state on every rank"
)


def compare_batches(channel: Channel, newest_batch: str, *, what: str) -> None:
    """Compare which batch ranks have trained on last, as a balancer says it.

    Raises:
        MismatchError: batches differ; names the ranks.
    """
    fields = {"the batch trained on (data set, seed, epoch, loaded state)": newest_batch}
    check_agreement(channel.sub("batch"), fields, what=what, advice=_BATCH_ADVICE)


def bits_of(values: Tensor) -> int:
    """Return 32 bits that depend on every bit of a dense tensor of any shape, dtype and device."""
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def describe(value: object) -> str:
    """Return a text that is equal for equal tensors, numbers, texts, and lists and dicts of them.

    Of anything else it has the type alone.
    """
    if isinstance(value, Tensor):
        what = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            return what
        first = f", first value {value.reshape(-1)[0].item()}" if value.numel() else ""
        return f"{what}{first}, bits {bits_of(value):08x}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {describe(value[key])}" for key in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return ", ".join(map(describe, value))
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def _hardware_of(parameter: Tensor) -> str:
    """Name what decides the last bits of an optimizer's arithmetic."""
    device = parameter.device
    # By so many threads torch splits the sum or the mean of a large tensor.
    name = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{device.type} {name} {torch.__version__}"


class ReplicaCheck:
    """Compares the copies of an optimizer's parameters; every rank makes and asks it alike.

    ``batch`` says which batch was trained on last, as ranks compare it, where that is known.
    """

    def __init__(
        self,
        channel: Channel,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, Tensor]],
        *,
        batch: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel.sub("replicas")
        self._optimizer = optimizer
        self._named = tuple(named)
        self._batch = batch
        self._clock = clock
        self.scales = ScaleCheck(self._channel)
        self.num_steps = 0
        # The number of a step; infinity for none.
        self._next_look = math.inf if config().copies == "ignore" else 1.0
        self._has_equal_copies = True  # to the last bit
        self._next_parameter = 0
        self._looked_at, self._looked_after = clock(), 0  # the look before: time, steps by then

    def gradients_reduced(self) -> None:
        """Look, if it is time to; called between the reduction and the step, on every rank.

        Raises:
            MismatchError: copies differ; names the ranks, the parameter, and this rank's values.
        """
        self.num_steps += 1
        if self._channel.world_size == 1 or self.num_steps < self._next_look:
            return
        is_first = self.num_steps == 1
        began = self._clock()
        step_s = (began - self._looked_at) / (self.num_steps - self._looked_after)
        if is_first:
            self._compare(range(len(self._named)))
        else:
            self._compare(self._some() if self._has_equal_copies else ())
        self._plan_next(self._clock() - began, step_s, is_first=is_first)
        self._looked_at, self._looked_after = self._clock(), self.num_steps

    def _some(self) -> list[int]:
        """Return the indices of the parameters whose turn it is."""
        count, room = len(self._named), _LOOK_BYTES
        taken: list[int] = []
        # At least one, and from the front again after the last.
        while len(taken) < count and (room > 0 or not taken):
            index = (self._next_parameter + len(taken)) % count
            _, parameter = self._named[index]
            room -= parameter.numel() * parameter.element_size()
            taken.append(index)
        self._next_parameter = (taken[-1] + 1) % count
        return taken

    def _compare(self, indices: Sequence[int]) -> None:
        # First what copies that differ may come from.
        what = f"DistributedOptimizer, step {self.num_steps}"
        self.scales.compare()
        if self._batch is not None:
            compare_batches(self._channel, self._batch(), what=what)
        options = {
            f"option {key} of parameter group {number}": describe(value)
            for number, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if key != "params" and (self._has_equal_copies or key in _SET_BY_SCRIPTS)
        }
        check_agreement(self._channel.sub("options"), options, what=what, advice=_OPTIONS_ADVICE)
        fields: dict[str, str] = {}
        for index in indices:
            name, parameter = self._named[index]
            state: Any = self._optimizer.state.get(parameter, {})
            fields[f"parameter {name}"] = describe(parameter)
            fields[f"optimizer state of parameter {name}"] = describe(state)
        if fields:
            check_agreement(self._channel, fields, what=what, advice=_ADVICE)

    def _plan_next(self, spent_s: float, step_s: float, *, is_first: bool) -> None:
        """Agree on the step of the next look: by the rank that pays most for it."""
        hardware = _hardware_of(self._named[0][1])
        row = torch.tensor([spent_s, step_s, float(digest(hardware) % 2**50)], dtype=torch.float64)
        rows = self._channel.sub("next").allgather_rows(row)
        if is_first:
            # Of all parameters, and begun by ranks at different times: no measure of the next.
            self._next_look = 1 + _FEWEST_STEPS
            if bool((rows[:, 2] != rows[0, 2]).any()):
                # Gradients have equal bits; what optimizers make of them may differ in the last.
                _logger.info(
                    "ranks compute on different hardware, or by other numbers of torch's threads "
                    "(OMP_NUM_THREADS): copies are compared only once"
                )
                self._has_equal_copies = False
            return
        most_s, fastest_s = float(rows[:, 0].max()), float(rows[:, 1].min())
        num_steps = most_s / (_COST * fastest_s) if fastest_s > 0 else _MOST_STEPS
        self._next_look += min(max(math.ceil(num_steps), _FEWEST_STEPS), _MOST_STEPS)
