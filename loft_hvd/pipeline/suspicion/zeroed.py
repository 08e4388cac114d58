"""Which parameters a robust rule zeroes, because few ranks have a gradient for them.

A row of a table that one rank alone has touched, or a branch of the model that most ranks left out,
is zero on all other ranks. A mean keeps the one real value; a rule that drops outliers drops it,
step after step, and the parameter does not train. That is looked at in four steps of a run: each
rank notes where its own gradient is not zero, and compares it with the result. Ranks add up how
often that was lost, and for the parameters that lose something, coordinate by coordinate, where any
rank had a gradient: in a step that is looked at, a float32 for each of their values.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from loft_hvd.pipeline.suspicion.report import FEWEST_WATCHED, ZeroedParameter
from loft_hvd.transport.base import Channel

__all__ = ["ZeroedWatch", "is_not_zero"]

_logger = logging.getLogger(__name__)
_LOOKS = (1, 10, 50, 200)  # numbers of steps; a choice: what is lost shows early, and stays
_TELL_ABOVE = 0.01  # share lost below which nothing is told: some activations are rare
_WARN_ABOVE = 0.25  # a choice
_CHUNK = 2**23  # values of which ranks add up at once who has a gradient: 32 MiB
_SHOWN = 5  # parameters in the warning


class ZeroedWatch:
    """Looks at parameters that robust rules aggregate; every rank makes and asks it alike.

    In a step that ``is_due``, who asks notes by ``is_not_zero`` where this rank's own gradients are
    not zero, before anything changes them.

    Args:
        parameters: in an order equal on every rank.
        names: of the parameters.
        channel: the ranks.
        advice: what to do about the worst parameter, whose name stands for "{name}".
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        channel: Channel,
        *,
        advice: str,
    ) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._channel = channel.sub("zeroed")
        self._advice = advice
        self._num_steps = 0
        self._totals = torch.zeros(len(self._parameters), 2, dtype=torch.int64)
        self._has_warned = False
        # Nothing more is looked at; of fewer ranks no rule can drop one.
        self.has_ended = channel.world_size < FEWEST_WATCHED or not self._parameters

    @property
    def is_due(self) -> bool:
        """Whether the step that goes on is looked at."""
        return not self.has_ended and self._num_steps + 1 in _LOOKS

    def step_reduced(self, own: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
        """Count a step whose gradients are reduced by now, and look at it if it is due.

        Args:
            own: of each parameter where this rank's own gradient was not zero, bool, [numel]; None
                where there was none.
            results: of each the gradient after the rule, of any shape.
        """
        if self.has_ended:
            return
        is_due = self.is_due
        self._num_steps += 1
        self.has_ended = self._num_steps >= _LOOKS[-1]
        if is_due:
            self._look(own, results)
            self._warn()

    def _look(self, own: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
        # [2 * num_parameters]: values of this rank's that are not zero, and those of them lost.
        row = torch.zeros(len(self._parameters), 2, dtype=torch.int64)
        kept = [None if result is None else is_not_zero(result) for result in results]
        for at, (mask, left) in enumerate(zip(own, kept, strict=True)):
            if mask is not None:
                lost = mask if left is None else mask & ~left
                row[at] = torch.stack([mask.sum(), lost.sum()]).cpu()
        table = self._channel.allgather_rows(row.view(-1))
        sums = table.sum(dim=0).view(-1, 2).tolist()
        for at, (num_values, num_lost) in enumerate(sums):
            # Most parameters lose nothing: nothing more is sent for them.
            if num_lost > _TELL_ABOVE * num_values:
                self._totals[at] += self._count(at, own[at], kept[at])

    def _count(self, at: int, own: Tensor | None, result: Tensor | None) -> Tensor:
        """Return of how many coordinates any rank had a gradient, and of how many it is lost."""
        parameter = self._parameters[at]
        counts = torch.zeros(2, dtype=torch.int64)
        for begin in range(0, parameter.numel(), _CHUNK):
            piece = slice(begin, min(begin + _CHUNK, parameter.numel()))
            values = torch.zeros(piece.stop - piece.start, device=parameter.device)
            if own is not None:
                values.copy_(own[piece])
            work = self._channel.transport.allreduce(
                values, name=f"{self._channel.name}.{at:03d}.{len(values)}"
            )
            self._channel.wait(work, what=f"who has a gradient for {self._names[at]!r}")
            has_any = values > 0
            lost = has_any if result is None else has_any & ~result[piece]
            counts += torch.stack([has_any.sum(), lost.sum()]).cpu()
        return counts

    @property
    def found(self) -> tuple[ZeroedParameter, ...]:
        """The parameters that lose something, the largest share first; the same on every rank."""
        pairs = zip(self._names, self._totals.tolist(), strict=True)
        lossy = [ZeroedParameter(name, *counts) for name, counts in pairs if counts[1]]
        return tuple(sorted(lossy, key=lambda each: (-each.share, each.name)))

    def _warn(self) -> None:
        most = [each for each in self.found if each.share > _WARN_ABOVE]
        if not most or self._has_warned:
            return
        self._has_warned = True
        if self._channel.rank != 0:
            return
        named = ", ".join(f"{each.name} ({each.share:.0%})" for each in most[:_SHOWN])
        _logger.warning(
            "the robust rule zeroes gradients that only few ranks have, of %d parameters: %s%s. %s",
            len(most),
            named,
            ", ..." if len(most) > _SHOWN else "",
            self._advice.format(name=most[0].name),
        )


def is_not_zero(gradient: Tensor) -> Tensor:
    """Return where a gradient is not zero, bool, [numel]."""
    dense = gradient.detach() if gradient.layout == torch.strided else gradient.to_dense()
    return dense.reshape(-1) != 0
