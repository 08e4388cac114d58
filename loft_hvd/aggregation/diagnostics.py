"""Which row was off: what each row did; on the CPU found out in the pass that aggregates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from loft_hvd.aggregation import fallback
from loft_hvd.aggregation.aggregate import aggregate, call_custom, read_call
from loft_hvd.aggregation.compute import aggregate_rows, as_tensor
from loft_hvd.aggregation.fallback import BLOCK, Found, Judged
from loft_hvd.aggregation.filling import Holes
from loft_hvd.aggregation.inputs import (
    Gradients,
    Presence,
    Row,
    Weights,
    counting_rows,
    read_count,
)
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.errors import ArgumentError

__all__ = ["Diagnostics", "diagnose", "diagnose_filled"]


@dataclass(frozen=True)
class Diagnostics:
    """What each row did in the coordinates that were looked at; one value a row, [world_size].

    Adding two of them joins what was found in two buckets, blocks or steps of the same rows. A row
    that was absent, or of weight 0, was not looked at: its ``num_seen`` is 0.

    Attributes:
        num_seen: coordinates of the row that were looked at.
        num_outside: of these, coordinates strictly outside the window of values that were kept;
            NaN lies above +inf. The window is the middle one or two values of a median, ranks f to
            n - 1 - f of a trimmed mean, all values of a mean, the n - f nearest values of the rules
            around a centre. A rule that sees rows, ``Custom`` too, has none: always 0.
        num_non_finite: of these, coordinates that are NaN or infinite.
        squared_distance: squared Euclidean distance of these coordinates to the result, float64;
            coordinates where the difference is not finite are left out.
        left_out: ``num_seen`` times the share of the other rows' neighbourhoods that lack the row;
            a rule that chooses rows has one neighbourhood. This and the next two are 0 for rules
            that look at coordinates one by one, and for ``Custom``.
        clipped: ``num_seen`` where the row was longer than what it was clipped to, else 0.
        copied: ``num_seen`` where the row equals another one bit for bit and is not all zeros,
            else 0.
    """

    num_seen: tuple[int, ...]
    num_outside: tuple[int, ...]
    num_non_finite: tuple[int, ...]
    squared_distance: tuple[float, ...]
    left_out: tuple[float, ...]
    clipped: tuple[float, ...]
    copied: tuple[float, ...]

    @property
    def share_outside(self) -> tuple[float, ...]:
        """``num_outside`` over ``num_seen``, [world_size]; 0 for a row that was not looked at.

        Compare rows with each other, never with 0: honest rows are outside, too.
        """
        # Of n rows alike, each is outside in a share of 2 f / n of a trimmed mean, f / n of a mean
        # around a centre, and 1 - 1 / n (odd n) or 1 - 2 / n of a median.
        pairs = zip(self.num_outside, self.num_seen, strict=True)
        return tuple(outside / seen if seen else 0.0 for outside, seen in pairs)

    @classmethod
    def empty(cls, world_size: int) -> Diagnostics:
        """Return what nothing looked at says: zeros, one a row."""
        none = (0,) * world_size
        zeros = (0.0,) * world_size
        return cls(none, none, none, zeros, zeros, zeros, zeros)

    def __radd__(self, other: object) -> Diagnostics:
        """Let ``sum`` begin with its 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __add__(self, other: Diagnostics) -> Diagnostics:
        """Join what was found in different coordinates, or steps, of the same rows."""
        if not isinstance(other, Diagnostics):
            return NotImplemented
        if len(self.num_seen) != len(other.num_seen):
            raise ArgumentError(
                f"diagnostics of {len(self.num_seen)} and of {len(other.num_seen)} rows do not "
                "add up; both must be of the same rows"
            )
        return Diagnostics(
            tuple(map(int.__add__, self.num_seen, other.num_seen)),
            tuple(map(int.__add__, self.num_outside, other.num_outside)),
            tuple(map(int.__add__, self.num_non_finite, other.num_non_finite)),
            tuple(map(float.__add__, self.squared_distance, other.squared_distance)),
            tuple(map(float.__add__, self.left_out, other.left_out)),
            tuple(map(float.__add__, self.clipped, other.clipped)),
            tuple(map(float.__add__, self.copied, other.copied)),
        )


def diagnose(
    gradients: Gradients,
    rule: Rule,
    *,
    weights: Weights | None = None,
    present: Presence | None = None,
    out: Row | None = None,
    every: int = 16,
) -> tuple[Any, Diagnostics]:
    """Aggregate as ``aggregate`` does, and find out what each row did.

    On the CPU, with the extension, both are one pass, and sampled (``every=16``) it costs a few
    percent more than ``aggregate``: the rows of a block that is looked at are still in the cache.
    On CUDA the kernels leave the kept window of these blocks behind, and a second one reads the
    blocks once more; it then waits for the device, to read the numbers, which ``aggregate`` never
    does. Without the extension the blocks are ranked a second time in plain torch.
    ``gradients`` that are one shard of a bucket give this shard's view; add those of several
    buckets.

    Args:
        gradients: this and the next four as in ``aggregate``.
        rule: any rule.
        weights: sample count of each row, [world_size].
        present: [world_size] or [world_size, num_blocks].
        out: where to put the result, [numel].
        every: look at one block of 16,384 coordinates in so many, the first one included; 1 looks
            at all. With ``present`` by block, each run of blocks with the same rows counts afresh.

    Returns:
        The result, the same bits as ``aggregate`` gives, and what each of the ``world_size`` rows
        did; the numbers depend neither on threads nor on the instruction set.

    Raises:
        AggregationError: the rule does not fit the rows that are present with weight > 0.
        ArgumentError: a shape, device or value is out of its limits, or ``every`` is below 1.
        ArgumentTypeError: as ``aggregate``, or ``every`` is no whole number.
    """
    every = read_count("diagnose: every", every, "one block in how many to look at")
    if not 1 <= every < 2**31:
        raise ArgumentError(f"diagnose: every={every} must be from 1 (look at all) to 2**31 - 1")
    out, world_size, parts = read_call(gradients, rule, weights=weights, present=present, out=out)
    found = Diagnostics.empty(world_size)
    for part in parts:
        if isinstance(rule, Custom):
            call_custom(part, rule)
            # What fn kept is not known, so only distances and non-finite values are counted.
            raw: Found | Judged = fallback.diagnose_rows(
                [as_tensor(row) for row in part.rows],
                rule,
                weights=None,
                out=as_tensor(part.out),
                every=every,
            )
        else:
            raw = cast(
                "Found | Judged",
                aggregate_rows(
                    part.rows, rule, weights=part.weights, out=part.out, diagnose_every=every
                ),
            )
        found += _spread(raw, part.numbers, world_size)
    return out, found


def diagnose_filled(
    rows: Tensor | Sequence[Tensor],
    rule: Rule,
    holes: Holes,
    *,
    weights: Sequence[int] | None = None,
    present: Sequence[bool] | None = None,
    out: Tensor,
    every: int,
) -> Diagnostics:
    """Aggregate rows whose holes were filled, and find out what each did where no row had one.

    What was filled is nobody's doing: it lies nearer to the others than a row's own values, and two
    rows with a hole in the same block are equal there bit for bit. So of every block that is looked
    at those wire blocks are taken that all rows have sent; a rule that sees rows judges them there
    by these alone, unless it has decided before, over the whole model.

    Args:
        rows: on a CPU, [num_rows, numel], or one by one; filled.
        rule: any but ``Custom``.
        holes: what was filled.
        weights: this and the next as in ``fill_holes``.
        present: which rows count.
        out: where to put the result, [numel]: the bits of ``aggregate``.
        every: as in ``diagnose``.
    """
    aggregate(rows, rule, weights=weights, present=present, out=out)
    counting = counting_rows(len(rows), weights, present)
    is_whole = torch.count_nonzero(holes.missing[counting], dim=0) == 0  # [num_blocks]
    block_numel, kept = holes.block_numel, [torch.arange(0)]
    for begin in range(0, len(out), BLOCK * every):
        end = min(begin + BLOCK, len(out))
        first, last = begin // block_numel, -(-end // block_numel)  # wire blocks that it touches
        is_kept = is_whole[first:last].repeat_interleave(block_numel)[begin - first * block_numel :]
        kept.append(begin + is_kept[: end - begin].nonzero().flatten())
    places = torch.cat(kept)
    if len(places) == 0:
        return Diagnostics.empty(len(rows))
    values = [row.index_select(0, places) for row in rows]  # [kept] each
    return diagnose(values, rule, weights=weights, present=present, every=1)[1]


def _spread(found: Found | Judged, chosen: Sequence[int], world_size: int) -> Diagnostics:
    """Bring the numbers of the rows that counted to the places of all rows."""
    # Rows 0, 2 and 3 of four counted: `chosen` is [0, 2, 3], so number 1 of `found` is row 2's.
    seen, outside, non_finite, distance = found[:4]
    shares = found[4] if len(found) == 5 else ([0.0] * len(chosen),) * 3
    at = {
        row: (seen, outside[i], non_finite[i], distance[i], *(seen * share[i] for share in shares))
        for i, row in enumerate(chosen)
    }
    rows = [at.get(row, (0, 0, 0, 0.0, 0.0, 0.0, 0.0)) for row in range(world_size)]
    return Diagnostics(*zip(*rows, strict=True))
