"""Sizes while ranks are in quarantine: none for them, theirs shared out among the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loft_hvd.balance.bounds import Bounds
from loft_hvd.balance.plan import proportional_sizes

__all__ = ["Holding"]


class Holding:
    """Who gets no samples, and what sizes go back to in the end.

    Rank 0 keeps its samples, since its clock is what plans are judged by: its gradients are left
    out of the aggregation all the same.
    """

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._before: tuple[int, ...] | None = None

    @property
    def is_active(self) -> bool:
        """Whether a policy has to wait: ranks are held, or have not got their samples back."""
        return bool(self._ranks) or self._before is not None

    def hold(self, ranks: Sequence[int]) -> None:
        """Say which ranks get no samples from the next plan on, in place of those before."""
        self._ranks = tuple(rank for rank in ranks if rank != 0)

    def next_sizes(self, sizes: Sequence[int], bounds: Bounds) -> tuple[int, ...] | None:
        """Return the sizes that should come into force next.

        Args:
            sizes: of the newest plan, [world_size].
            bounds: of each rank's batch.

        Returns:
            The sizes; None where there is nothing to change, or the others' caps do not hold what
            they would have to take.
        """
        if not self._ranks:
            before, self._before = self._before, None
            return None if before == tuple(sizes) else before
        before = tuple(sizes) if self._before is None else self._before
        others = [rank for rank in range(len(before)) if rank not in self._ranks]
        grains, rest = divmod(sum(before), bounds.grain)
        speeds = [before[rank] for rank in others]
        if sum(speeds) == 0 or grains < len(others):
            return None
        wanted = [0] * len(before)
        for rank, share in zip(others, proportional_sizes(speeds, grains), strict=True):
            wanted[rank] = share * bounds.grain
        wanted[others[0]] += rest
        if wanted == list(sizes) or any(wanted[rank] > bounds.cap[rank] for rank in others):
            return None
        self._before = before
        return tuple(wanted)

    def state_dict(self) -> dict[str, Any]:
        """Return what sizes go back to; who is held is not kept: a run that goes on looks anew."""
        return {"before": None if self._before is None else list(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        before = state.get("before")
        self._ranks, self._before = (), None if before is None else tuple(before)
