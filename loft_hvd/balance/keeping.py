"""What each rank keeps beside what it computes anyway: adopted samples, and copies.

A rank keeps what it computes, first come, while its budget lasts. That leaves two things to decide.

*Adopting.* A fast rank computes more than its budget holds, and a slow one has room left. What
nobody keeps is read from the source in every epoch. A rank with room takes such samples, keeps
them, and from then on they come from a peer. Usually it takes them only in place of other samples
that it would have to fetch, which costs nothing. Where the source is dear it takes them even in
place of samples that it keeps. That costs one read from a peer for each, once, and saves the
difference between source and peer in every epoch after. So it is done where it pays within one.

*Copies.* Where the budgets hold more than all samples, a rank keeps a second copy of what it read
from a peer. Then a step that holds more samples of a rank than its batch takes loses nothing, and
when sizes move, samples follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Keeping", "ReadCosts", "choose_keeping"]

_MOST_COPYING = 64  # ranks; measured: above, an assignment among pairs of them takes milliseconds


@dataclass(frozen=True)
class ReadCosts:
    """Seconds to read a sample, as measured; 0 where nothing was read so far."""

    peer_s: float = 0.0
    source_s: float = 0.0

    @property
    def is_source_dear(self) -> bool:
        """Whether a sample that moves from source to peer saves more than one read of a peer."""
        return self.peer_s > 0 and self.source_s - self.peer_s > self.peer_s


@dataclass(frozen=True)
class Keeping:
    """The decision for one iteration, equal on all ranks."""

    num_unkept: int  # samples that nobody keeps
    adopts: tuple[int, ...]  # of these, how many each rank should take, [world_size]
    copies: tuple[int, ...]  # second copies that each rank may keep, [world_size]
    comes_first: bool  # adopting goes before the samples that a rank keeps
    costs: ReadCosts

    def of_a_step(self, num_steps: int) -> tuple[int, ...]:
        """Return how many samples each rank should adopt in one of ``num_steps`` steps."""
        return tuple(-(-each // max(num_steps, 1)) for each in self.adopts)

    def describe(self, num_samples: int) -> list[str]:
        """Say what was decided, a sentence a line; nothing where nothing was."""
        lines, costs = [], self.costs
        if self.num_unkept and sum(self.adopts):
            share = f"{self.num_unkept / max(num_samples, 1):.0%}"
            line = f"{share} of the samples are kept by no rank: {_ranks(self.adopts)} take them"
            if self.comes_first:
                line += " first and keep them"
            else:
                line += " where it costs nothing"
            if costs.peer_s > 0:
                line += (
                    f" (a sample takes {1e3 * costs.source_s:.3g} ms from the source, "
                    f"{1e3 * costs.peer_s:.3g} ms from a peer)"
                )
            lines.append(line)
        if sum(self.copies):
            lines.append(
                f"{_ranks(self.copies)} keep copies of what they read from peers: budgets have "
                f"room for {sum(self.copies):,} more samples than there are"
            )
        return lines


def _ranks(counts: Sequence[int]) -> str:
    """Name the ranks that have some, ranges in short."""
    found = [rank for rank, count in enumerate(counts) if count]
    parts: list[list[int]] = []
    for rank in found:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
    return f"rank {text}" if len(found) == 1 else f"ranks {text}"


def choose_keeping(num_unkept: int, room: Sequence[int], costs: ReadCosts) -> Keeping:
    """Share out what nobody keeps among ranks with ``room`` [world_size], in samples, then copies.

    Copies take only room that adopting leaves.
    """
    total = sum(room)
    wanted = min(num_unkept, total)
    # Rounded up: a sample more than there is finds no taker, one less would be read for ever.
    adopts = tuple(-(-wanted * each // max(total, 1)) for each in room)
    may_copy = total > num_unkept and len(room) <= _MOST_COPYING
    copies = tuple(
        max(each - adopted, 0) if may_copy else 0
        for each, adopted in zip(room, adopts, strict=True)
    )
    return Keeping(num_unkept, adopts, copies, wanted > 0 and costs.is_source_dear, costs)
