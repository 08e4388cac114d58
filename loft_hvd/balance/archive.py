"""What was measured of each device, kept by device: worlds change, machines come back.

Every rank keeps it, from the exchange that all of them read, so that it outlives any rank. In a new
world, or when a state is loaded into one, policies are shown what was measured of the devices that
are here, as if they had been here all the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from loft_hvd.balance.interval import COLUMNS, SIZE, Floats, Interval

__all__ = ["Archive"]

_KEPT = 16  # intervals of a device
_DEVICES = 4  # times the present number, that are remembered


class Archive:
    """Rows of the last intervals by device."""

    def __init__(self) -> None:
        self._rows: dict[str, deque[list[float]]] = {}  # the longest unheard device first

    def add(self, keys: Sequence[str], interval: Interval) -> None:
        """Take in an interval of the devices that are here, by rank."""
        for key, row, is_valid in zip(keys, interval.rows.tolist(), interval.valid, strict=True):
            if is_valid:
                rows = self._rows.pop(key, deque(maxlen=_KEPT))
                rows.append(row)
                self._rows[key] = rows
        while len(self._rows) > _DEVICES * len(keys):
            del self._rows[next(iter(self._rows))]

    def num_rows(self, key: str) -> int:
        """Return how many intervals of a device are kept."""
        return len(self._rows.get(key, ()))

    def recall(self, keys: Sequence[str]) -> list[Interval]:
        """Return what is known of these devices, oldest first; each one's newest come last.

        Args:
            keys: the devices by rank, [world_size]; one that is not known has no valid rows.
        """
        known = [list(self._rows.get(key, ())) for key in keys]
        intervals = []
        for back in range(max(map(len, known), default=0), 0, -1):
            rows: Floats = np.zeros((len(keys), len(COLUMNS)))
            valid = np.array([len(of_rank) >= back for of_rank in known])
            for rank in np.flatnonzero(valid):
                rows[rank] = known[rank][-back]
            sizes = rows[:, SIZE].round().astype(np.int64)
            intervals.append(Interval(-back, sizes, rows, valid, float("nan")))
        return intervals

    def state_dict(self) -> dict[str, Any]:
        """Return all rows, JSON-able."""
        return {key: list(rows) for key, rows in self._rows.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take rows that ``state_dict`` returned, anywhere; those of other devices stay."""
        for key, rows in state.items():
            self._rows.pop(key, None)
            self._rows[key] = deque((list(map(float, row)) for row in rows), maxlen=_KEPT)
