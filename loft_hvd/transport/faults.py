"""What goes wrong on a ``LocalWorld``, scripted: the same seed, the same faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from loft_hvd.errors import ArgumentError

__all__ = ["Faults"]

_MOST_POLLS = 20


@dataclass(frozen=True)
class Faults:
    """Delays, failures and reordering of a local world's operations.

    A rank's operations count from 0 in the order in which it starts them.

    Attributes:
        seed: of every draw.
        max_delay_s: each rank sees each operation end up to so many seconds late, drawn anew.
        slow: seconds by which everything that a rank sends arrives late, by rank.
        reorder: whether operations in flight end in another order than they were started in.
        fail: the operation that raises, by the rank it raises on.
        stop: the operation from which on a rank sends nothing and answers nothing, by rank; the
            thread that starts it stays in that call until the others have ended.
    """

    seed: int = 0
    max_delay_s: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    reorder: bool = False
    fail: Mapping[int, int] = field(default_factory=dict)
    stop: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = [self.max_delay_s, *self.slow.values()]
        numbers = [*self.fail.values(), *self.stop.values()]
        if not all(0 <= value < float("inf") for value in seconds) or min(numbers, default=0) < 0:
            raise ArgumentError(
                f"Faults: max_delay_s={self.max_delay_s}, slow={dict(self.slow)}, "
                f"fail={dict(self.fail)} and stop={dict(self.stop)} hold seconds and operation "
                "numbers, all >= 0"
            )

    def check(self, world_size: int) -> None:
        """Raise unless every rank that is named is one of the world.

        Raises:
            ArgumentError: a rank outside the world.
        """
        named = {*self.slow, *self.fail, *self.stop}
        if wrong := sorted(rank for rank in named if not 0 <= rank < world_size):
            raise ArgumentError(f"Faults: ranks {wrong} are not >= 0 and < {world_size}")

    def delay_s(self, rank: int, number: int) -> float:
        """Return how late a rank sees the end of one of its operations, in seconds."""
        return self.max_delay_s * self._draw("delay", rank, number)

    def num_polls(self, rank: int, number: int) -> int:
        """Return how often a rank asks in vain whether an operation that has ended has ended."""
        return int((_MOST_POLLS + 1) * self._draw("polls", rank, number)) if self.reorder else 0

    def _draw(self, what: str, rank: int, number: int) -> float:
        return random.Random(f"{self.seed} {what} {rank} {number}").random()
