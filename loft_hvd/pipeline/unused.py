"""Parameters that no rank has a gradient of: the optimizer passes them over, as one process would.

Zeros in their place would let weight decay and momentum move them. Ranks tell each other in the
first step which gradients they lack; from then on they ask, once a step, about those that a rank
lacked then, and about no others: most models have none, and pay nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from loft_hvd.transport.base import Channel

__all__ = ["Unused"]

_logger = logging.getLogger(__name__)


class Unused:
    """Finds a step's gradients that no rank has; every rank asks alike.

    ``names`` are the parameters', in an order equal on all ranks.
    """

    def __init__(self, channel: Channel, names: Sequence[str]) -> None:
        self._channel = channel.sub("used")
        self._names = names
        self._asked: list[int] | None = None  # what some rank lacked in the first step
        self._has_warned = False

    def agree(self, has: Sequence[bool], present: Sequence[bool]) -> frozenset[int]:
        """Return the indices of parameters that no present rank has a gradient of.

        Args:
            has: whether this rank has each parameter's gradient, [num_parameters].
            present: which ranks have samples in this step, [world_size]; the same everywhere.
        """
        if self._asked is None:
            rows = self._channel.sub("all").allgather_rows(torch.tensor(has, dtype=torch.uint8))
            rows = rows[torch.tensor(present)]  # [num_present, num_parameters]
            self._asked = (~rows.bool().all(dim=0)).nonzero().flatten().tolist()
            return frozenset((~rows.bool().any(dim=0)).nonzero().flatten().tolist())
        if present[self._channel.rank]:
            self._warn(has)
        if not self._asked:
            return frozenset()
        own = torch.tensor([has[index] for index in self._asked], dtype=torch.uint8)
        rows = self._channel.sub("some").allgather_rows(own)[torch.tensor(present)]
        is_used = rows.bool().any(dim=0).tolist()
        return frozenset(at for at, used in zip(self._asked, is_used, strict=True) if not used)

    def _warn(self, has: Sequence[bool]) -> None:
        """Say once of a gradient that was there in the first step, and is no more."""
        if self._has_warned or all(has):
            return
        lacking = {at for at, is_there in enumerate(has) if not is_there}.difference(
            self._asked or ()
        )
        if lacking:
            self._has_warned = True
            _logger.warning(
                "rank %d: parameter %r has no gradient in this step, but had one in the first: "
                "zeros take its place, and where no rank has one weight decay and momentum go on, "
                "as they would not in one process. Leave it out of the loss in the first step, "
                "too, and ranks ask each other about it in every step",
                self._channel.rank,
                self._names[min(lacking)],
            )
