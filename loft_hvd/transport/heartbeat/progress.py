"""How far ranks have come with their collectives, and whether all wait for each other in vain."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Progress", "blocked_by", "find_stall", "key_of"]

_IN_PART = "*"  # begins the names of operations over some of the ranks only


def key_of(name: str) -> str:
    """Return the short key under which a name's operations are counted."""
    return f"{zlib.crc32(name.encode()):x}"


@dataclass(frozen=True)
class Progress:
    """How far a rank has come.

    Attributes:
        waited_s: seconds that it has been waiting for other ranks; 0 where it does not wait.
        in_flight: its operations in flight, as (name, number): the number-th of that name, from 1.
            Names that begin with a star are of some ranks only.
        counts: how many operations of each name it has started, by ``key_of(name)``; None where
            that is not known.
    """

    waited_s: float = 0.0
    in_flight: frozenset[tuple[str, int]] = frozenset()
    counts: Mapping[str, int] | None = field(default=None, hash=False)

    def encode(self, max_chars: int) -> str:
        """Return in_flight and counts as text; "" when it would be too long."""
        flying = "|".join(f"{name}#{number}" for name, number in sorted(self.in_flight))
        counted = "|".join(f"{key}={count}" for key, count in sorted((self.counts or {}).items()))
        text = f"{flying};{counted}"
        return text if len(text) <= max_chars else ""

    @classmethod
    def decode(cls, waited_s: float, text: str) -> Progress:
        """Return the progress that a text tells; nothing in flight where it does not parse."""
        flying, separator, counted = text.rpartition(";")
        if not separator:
            return cls(waited_s)
        pairs = [item.rpartition("#") for item in flying.split("|") if item]
        totals = [item.partition("=") for item in counted.split("|") if item]
        try:
            in_flight = frozenset((name, int(number)) for name, _, number in pairs)
            return cls(waited_s, in_flight, {key: int(count) for key, _, count in totals})
        except ValueError:
            return cls(waited_s)


def blocked_by(operation: tuple[str, int], others: Mapping[int, Progress]) -> list[int]:
    """Return the ranks that have not started an operation yet, as far as is known."""
    name, number = operation
    if name.startswith(_IN_PART):
        return []
    key = key_of(name)
    return [
        rank
        for rank, progress in sorted(others.items())
        if progress.counts is not None and progress.counts.get(key, 0) < number
    ]


def find_stall(ranks: Mapping[int, Progress], *, waited_s: float) -> dict[int, str] | None:
    """Find out whether no rank can go on: all wait, each for operations that others lack.

    An operation that all have started may still be on a slow link, so a rank with one of those
    can go on.

    Args:
        ranks: the progress of every rank.
        waited_s: how long every rank must have been waiting.

    Returns:
        The operation that each rank waits for, by rank; None where some rank can go on.
    """
    waits: dict[int, str] = {}
    for rank, progress in sorted(ranks.items()):
        others = {other: each for other, each in ranks.items() if other != rank}
        if progress.waited_s < waited_s or not progress.in_flight:
            return None
        if not all(blocked_by(operation, others) for operation in progress.in_flight):
            return None
        waits[rank] = min(progress.in_flight)[0]
    return waits
