"""How much ranks' gradients differ in the long run: what a robust rule would take for faults.

Where each rank reads samples of its own kind (shards sorted by class, say), its gradients differ
from the others' in the same way step after step. A mean over ranks does not mind; a robust rule
drops such gradients and loses real signal. In the first steps of a run each rank notes how a few
coordinates of its gradient differ from the aggregate, and one small exchange compares the averages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.pipeline.suspicion.report import FEWEST_WATCHED
from loft_hvd.transport.base import Transport, wait_for

__all__ = ["WARN_ABOVE", "BucketSpread", "Spread", "SpreadWatch", "lasting_differences"]

WARN_ABOVE = 0.8  # class-sorted shards give 1 to 1.5, shuffled ones below 0.2 (docs/rules.md)
_NUM_STEPS = 50
_NUM_VALUES = 512
_MEDIAN_EFFICIENCY = np.pi / 2  # a median's variance over a mean's, for normal values
_logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """What the first steps showed.

    Attributes:
        ratios: for each rank, its gradients' lasting difference from the other ranks' over their
            own noise from step to step, [world_size]; 0 for ranks alike, NaN where unknown.
        usual: the median rank's, which one faulty rank cannot move.
    """

    ratios: tuple[float, ...]
    usual: float


def lasting_differences(counts: Floats, sums: Floats, squares: Floats) -> Spread:
    """Compare what ranks noted, coordinate by coordinate.

    Args:
        counts: steps that each rank noted, [world_size].
        sums: of the differences from the aggregate, [world_size, num_values].
        squares: sums of their squares, [world_size, num_values].
    """
    with np.errstate(all="ignore"):
        steps = counts[:, None]
        means = sums / steps
        noise = ((squares / steps - means**2) * steps / (steps - 1)).sum(axis=1)  # of one step
        usable = np.isfinite(noise) & (noise > 0) & (counts > 1)
        if usable.sum() < 2:
            return Spread((float("nan"),) * len(counts), float("nan"))
        # From the median rank: the aggregate itself may lean towards a faulty one.
        apart = ((means - np.median(means[usable], axis=0)) ** 2).sum(axis=1)
        error = noise / counts
        by_chance = error + _MEDIAN_EFFICIENCY * error[usable].mean() / usable.sum()
        ratios = np.sqrt(np.maximum(apart - by_chance, 0.0) / noise)
    ratios = np.where(usable, ratios, np.nan)
    return Spread(tuple(ratios.tolist()), float(np.median(ratios[usable])))


class _Notes:
    """What this rank notes of some coordinates for 50 steps, and the comparison in the end."""

    def __init__(
        self, num_values: int, transport: Transport, *, name: str, timeout_s: float
    ) -> None:
        self._transport = transport
        self._name = f"{name}.spread"
        self._timeout_s = timeout_s
        self._sums, self._squares = np.zeros((2, num_values))
        self._num_steps = self._num_noted = 0

    def add(self, own: Sequence[Tensor | None], reduced: Sequence[Tensor | None]) -> Spread | None:
        """Note a step's values before and after; after the last step, compare ranks.

        A step that lacks some is counted, but not noted: a parameter took no part, or its gradient
        is sparse.
        """
        pairs = [(a, b) for a, b in zip(own, reduced, strict=True) if a is not None]
        if len(pairs) == len(own) and all(b is not None for _, b in pairs):
            self._note(torch.cat([(a - b).cpu() for a, b in pairs if b is not None]).numpy())
        self._num_steps += 1
        return None if self._num_steps < _NUM_STEPS else self._compare()

    def _note(self, apart: Floats) -> None:
        if np.isfinite(apart).all():
            self._sums += apart
            self._squares += apart**2
            self._num_noted += 1

    def _compare(self) -> Spread:
        row = torch.from_numpy(np.array([self._num_noted, *self._sums, *self._squares]))
        rows = torch.zeros(self._transport.world_size * row.numel(), dtype=torch.float64)
        work = self._transport.allgather(row, rows, name=self._name)
        wait_for(work, what="exchange of gradients' spread", timeout_s=self._timeout_s)
        table = rows.numpy().reshape(self._transport.world_size, row.numel())
        half = (row.numel() - 1) // 2
        found = lasting_differences(table[:, 0], table[:, 1 : 1 + half], table[:, 1 + half :])
        if found.usual > WARN_ABOVE and self._transport.rank == 0:
            _logger.warning(
                "in the first %d steps ranks' gradients differ lastingly, by %.2f times their "
                "noise from step to step (0 for ranks that draw from the same data; by rank %s): "
                "a robust rule takes that for faults and loses real signal. Give the placement "
                "strata (Placement.with_strata(labels)) or a lower cap, shuffle the shards, or "
                "use Mean()",
                _NUM_STEPS,
                found.usual,
                ", ".join(f"{ratio:.2f}" for ratio in found.ratios),
            )
        return found


class SpreadWatch:
    """Notes some coordinates of this rank's gradients for 50 steps, then compares ranks once.

    Make it before what else changes gradients in its hooks, on every rank alike.

    Args:
        parameters: those that a robust rule aggregates, in an order equal on every rank.
        transport: the ranks.
        name: stem of the operation's name, equal on every rank.
        timeout_s: longest wait for other ranks in seconds.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        transport: Transport,
        *,
        name: str,
        timeout_s: float,
    ) -> None:
        self._parameters = list(parameters)
        self._own: list[Tensor | None] = [None] * len(self._parameters)
        total = max(1, sum(p.numel() for p in self._parameters))
        self._places = [_places(p.numel(), total) for p in self._parameters]
        num_values = sum(len(places) for places in self._places)
        self._notes = _Notes(num_values, transport, name=name, timeout_s=timeout_s)
        self._handles: list[RemovableHandle] = []
        if transport.world_size >= FEWEST_WATCHED and num_values:
            self._handles = [self._watch(at) for at in range(len(self._parameters))]

    def _watch(self, at: int) -> RemovableHandle:
        def note(parameter: Tensor) -> None:
            self._own[at] = self._values(at, parameter.grad)

        handle: RemovableHandle = self._parameters[at].register_post_accumulate_grad_hook(note)
        return handle

    def _values(self, at: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or gradient.layout != torch.strided:
            return None
        return _look(self._places, at, gradient.detach().reshape(-1))

    def step(self) -> Spread | None:
        """Note a step whose gradients are reduced by now; after the last one, compare ranks."""
        if not self._handles:
            return None
        own, self._own = self._own, [None] * len(self._parameters)
        reduced = [self._values(at, p.grad) for at, p in enumerate(self._parameters)]
        found = self._notes.add(own, reduced)
        if found is not None:
            self.stop()
        return found

    def stop(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class BucketSpread:
    """The same for gradients that come in flat buckets, whose layout may change at first, as DDP's.

    A pass calls ``sent`` for each of its buckets, in order, and ``step`` in the end; a pass with
    another layout than the one before is not noted, and the count begins anew. Equal on every rank.

    Args:
        transport: the ranks.
        name: stem of the operation's name, equal on every rank.
        timeout_s: longest wait for other ranks in seconds.
    """

    def __init__(self, transport: Transport, *, name: str, timeout_s: float) -> None:
        self._transport = transport
        self._name = name
        self._timeout_s = timeout_s
        self._layout: list[int] = []  # numel of each bucket, in the last pass
        self._places: list[Tensor] = []
        self._own: list[Tensor | None] = []
        self._notes: _Notes | None = None
        self._has_ended = transport.world_size < FEWEST_WATCHED

    def sent(self, at: int, values: Tensor) -> None:
        """Note what this rank sends of a pass's bucket ``at``, [numel]; 0 begins a pass."""
        if self._has_ended:
            return
        del self._own[at:]  # of a pass that failed
        is_known = at < len(self._layout) and self._layout[at] == values.numel()
        self._own.append(_look(self._places, at, values) if is_known else None)

    def step(self, reduced: Sequence[Tensor]) -> Spread | None:
        """Note a pass whose buckets are reduced by now; after the last one, compare ranks.

        Args:
            reduced: the aggregate of every bucket, each [numel].
        """
        if self._has_ended:
            return None
        own, self._own = self._own, []
        layout = [values.numel() for values in reduced]
        if layout != self._layout:
            self._layout = layout
            self._places = [_places(numel, max(1, sum(layout))) for numel in layout]
            num_values = sum(len(places) for places in self._places)
            self._notes = _Notes(
                num_values, self._transport, name=self._name, timeout_s=self._timeout_s
            )
            return None
        assert self._notes is not None
        looked = [_look(self._places, at, values) for at, values in enumerate(reduced)]
        found = self._notes.add(own, looked)
        self._has_ended = found is not None
        return found


def _look(places: list[Tensor], at: int, values: Tensor) -> Tensor:
    """Return the coordinates that are looked at of flat values, float64, on their device."""
    if places[at].device != values.device:  # once: parameters stay where they are
        places[at] = places[at].to(values.device)
    return values[places[at]].to(torch.float64)


def _places(numel: int, total: int) -> Tensor:
    """Return the coordinates of a parameter that are looked at, spread evenly over it."""
    count = min(numel, -(-_NUM_VALUES * numel // total))
    return torch.linspace(0, max(numel - 1, 0), count).round().to(torch.int64)
