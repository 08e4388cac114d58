"""How a rule that sees rows judges them: in every shard by itself, or over the whole model.

Scope "shard": the owner of a shard decides by its rows alone. Nothing more travels, and an owner's
word counts for its own shard.

Scope "model": rows are judged by all values that the rule aggregates, as if they lay in one place.

    DISTANCES   an owner measures how far the rows of its shard are apart, bucket by bucket as they
                come, within the backward pass
    SELECT      after the last one each owner's table, the sum over its buckets, travels to every
                rank: one all-gather of 4 n (n + 1) bytes a rank. Every rank adds the tables up in
                rank order, so that all have the same bits, and decides: which rows count how much
    AGGREGATE   every bucket's rows are mixed as decided, and its result travels

Results travel only after the last bucket's rows have come: that is the overlap which it costs.

Scope "auto" begins with the model, and goes over to shards in a step that all ranks know alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.compute import decide, measure_rows
from loft_hvd.aggregation.distances import precision_of
from loft_hvd.aggregation.inputs import counting_rows
from loft_hvd.aggregation.mixing import Floats, MixedRule
from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import ArgumentError, MismatchError
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Lane, Watch, Work

__all__ = [
    "NUM_SLICES",
    "Scope",
    "Selection",
    "SelectionPart",
    "check_scope",
    "decide_by",
    "measure",
    "num_pairs",
    "slice_of",
    "total",
]

Scope = Literal["shard", "model", "auto"]
NUM_SLICES = 16  # of a shard: what an audit does again is one of them


def check_scope(scope: str, rules: Sequence[Rule], *, what: str) -> None:
    """Raise unless ``scope`` is one, and suits every rule; ``what`` was asked for it.

    Raises:
        ArgumentError: it is none, or "model", and a rule has no table of distances.
    """
    if scope not in ("shard", "model", "auto"):
        raise ArgumentError(f'{what}: scope={scope!r} must be "shard", "model" or "auto"')
    if scope != "model":
        return
    # A mean beside them judges nobody.
    for rule in [rule for rule in rules if not isinstance(rule, Mean)] or rules:
        if not isinstance(rule, RowRule):
            reason = (
                "what its function looks at is not known"
                if rule.sees_rows
                else "it looks at coordinates one by one, and has the same result in shards"
            )
            raise ArgumentError(
                f'{what}: scope="model" is for rules that judge rows by their distances, such as '
                f"loft.Robust(f=1), not for {rule}: {reason}; leave scope= away, or use another "
                "rule"
            )


def num_pairs(num_rows: int) -> int:
    """Return the values of a table: distances of rows from each other, and from the zero vector."""
    return num_rows * (num_rows + 1) // 2


def slice_of(numel: int, at: int, num_slices: int = NUM_SLICES) -> slice:
    """Return the coordinates of one of a shard's slices."""
    return slice(numel * at // num_slices, numel * (at + 1) // num_slices)


def measure(rule: Rule, rows: Sequence[Tensor] | Tensor, weights: PassWeights | None) -> Floats:
    """Return how far rows [n, numel] are apart, [num_pairs(n)]; zeros for those that do not count.

    Infinity stands for all that is no number. The bits are the same on every machine.

    Raises:
        AggregationError: the rule needs more rows than count.
    """
    chosen = _counting(rule, len(rows), weights)
    table = np.zeros((len(rows) + 1, len(rows) + 1))
    table[_among(chosen, len(rows))] = measure_rows([rows[row] for row in chosen])
    table[~np.isfinite(table)] = np.inf
    return table[_upper(len(rows))]


def decide_by(
    rule: RowRule,
    sums: Floats,
    weights: PassWeights | None,
    *,
    precision: torch.dtype,
) -> MixedRule:
    """Return what a rule makes of rows that are so far apart, [num_pairs(n)].

    ``precision`` is float64 where all rows are, else float32.
    """
    num_rows = math.isqrt(2 * len(sums))
    table = np.zeros((num_rows + 1, num_rows + 1))
    table[_upper(num_rows)] = sums
    chosen = _counting(rule, num_rows, weights)
    counts = None if weights is None else weights.weights
    by = None if counts is None else [counts[row] for row in chosen]
    return decide(rule, table[_among(chosen, num_rows)], by, precision=precision)


def total(tables: Iterable[Floats]) -> Floats:
    """Add up in order: every rank must have the same bits."""
    return functools.reduce(np.add, tables)


class Selection:
    """What one rule decides about the rows of some buckets, step after step.

    Attributes:
        rule: what decides.
        is_model: whether all buckets decide together; changed only between two steps, on every
            rank alike.
        parts: the buckets, in an order equal on every rank.
        is_whole: whether that is all of them; ``complete`` makes it so.
        told: the tables of all owners, of the last step over the whole model, [world_size, pairs].
    """

    def __init__(
        self,
        lane: Lane,
        name: str,
        rule: RowRule,
        *,
        scope: Scope = "shard",
        num_slices: int = 1,
    ) -> None:
        self.rule = rule
        self.is_model = scope != "shard"  # "auto" begins so
        self.num_slices = num_slices
        self.parts: list[SelectionPart] = []
        self.is_whole = True
        self.told: Floats | None = None
        # Others may read the table in place: the next one is written once all have sent rows again.
        self._lane = lane
        self._row: Tensor | None = None
        self._name = name
        # Of one step, and of the thread that moves its buckets on.
        self._num_measured = 0
        self._gather: tuple[Work, Tensor, Tensor] | None = None  # what is sent, what arrives
        self._decided: MixedRule | None = None

    def part(self) -> SelectionPart:
        """Return the place of one more bucket."""
        self.parts.append(SelectionPart(self))
        return self.parts[-1]

    def forget(self, parts: Iterable[SelectionPart]) -> None:
        """Take parts out; others may come in their place, until ``complete``."""
        gone = {id(part) for part in parts}
        self.parts = [part for part in self.parts if id(part) not in gone]
        self.is_whole = False
        # What is counted may still be of the step before: with fewer parts it would seem enough.
        if self._decided is not None:
            self._clear()

    def complete(self) -> None:
        """Hear that no more parts come than there are by now; in the thread that moves them on."""
        self.is_whole = True
        if self.is_model and self.parts:
            self._send()

    def _clear(self) -> None:
        self._num_measured = 0
        self._gather = self._decided = None

    def measured(self) -> None:
        """Hear that one more part was measured; after the last one the tables travel."""
        if self._decided is not None:  # by the step before
            self._clear()
        self._num_measured += 1
        self._send()

    def _send(self) -> None:
        if not self.is_whole or self._num_measured < len(self.parts):
            return
        # In the order of parts, not in that in which their rows came.
        told = total(total(part.sums) for part in self.parts)
        if self._row is None:
            self._row = self._lane.zeros(len(told), torch.float64)
        row = self._row.copy_(torch.from_numpy(told))
        rows = torch.zeros(self._lane.world_size, len(row), dtype=row.dtype)
        work = self._lane.allgather(row, rows.view(-1), name=f"{self._name}.tables")
        self._gather = work, row, rows

    @property
    def gather(self) -> Work | None:
        """The tables' all-gather; None before this rank has measured all of its shards."""
        return None if self._gather is None else self._gather[0]

    @property
    def is_decided(self) -> bool:
        """Whether the tables of all ranks are here, and were read."""
        return self._decided is not None

    def decided(self, weights: PassWeights | None) -> MixedRule:
        """Return what the whole model decides; the tables of all ranks are there."""
        if self._decided is None:
            assert self._gather is not None
            work, _, rows = self._gather
            work.finish()
            self.told = rows.numpy()
            self._check(self.told)
            is_exact = all(part.precision == torch.float64 for part in self.parts)
            precision = torch.float64 if is_exact else torch.float32
            told = total(self.told)
            decided = decide_by(self.rule.over_model, told, weights, precision=precision)
            self._decided = replace(decided, rule=self.rule)
        return self._decided

    def _check(self, tables: Floats) -> None:
        if wrong := np.flatnonzero(~(tables >= 0).all(axis=1)).tolist():
            raise MismatchError(
                f"ranks {wrong} tell squared distances below 0, or NaN, of the rows that they own "
                f"for {self.rule}: no rows have those; look at these machines"
            )


class SelectionPart:
    """One bucket's place in a ``Selection``.

    Attributes:
        selection: what it is a part of.
        sums: how far the rows of this rank's shard are apart in this step, [num_slices, pairs].
        precision: float64 where rows are, else float32; on every rank alike.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.sums: Floats = np.zeros((0, 0))
        self.precision = torch.float32

    @property
    def is_model(self) -> bool:
        """Whether all buckets decide together."""
        return self.selection.is_model

    @property
    def measures(self) -> bool:
        """Whether rows are measured by ``measure``, not by the rule where it aggregates them."""
        return self.is_model or self.selection.num_slices > 1

    def measure(self, rows: Sequence[Tensor] | Tensor, weights: PassWeights | None) -> None:
        """Measure the rows of this rank's shard, [n, shard]."""
        self.precision = precision_of(rows[0].dtype)
        rule, num_slices = self.selection.rule, self.selection.num_slices
        spans = [slice_of(len(rows[0]), at, num_slices) for at in range(num_slices)]
        self.sums = np.stack(
            [measure(rule, [row[span] for row in rows], weights) for span in spans]
        )

    def wait(self) -> Iterator[Work]:
        """Yield what is waited for until ``rule_by`` can tell, after ``measure``."""
        if self.is_model:
            self.selection.measured()
            yield _Tables(self.selection)

    def rule_by(self, sums: Floats, weights: PassWeights | None) -> MixedRule:
        """Return what rows are aggregated by whose shard they are so far apart in, [pairs]."""
        if self.is_model:
            return self.selection.decided(weights)
        return decide_by(self.selection.rule, sums, weights, precision=self.precision)


class _Tables:
    """The tables of all ranks: perhaps on their way, perhaps to be sent yet."""

    watch: Watch | None = None

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    def done(self) -> bool:
        # The first part to go on has released the work: it may not be asked again.
        work = self._selection.gather
        return self._selection.is_decided or (work is not None and work.done())

    def finish(self) -> None:
        """Leave it to ``decided``, which every part calls: the work is released once."""


def _counting(rule: Rule, num_rows: int, weights: PassWeights | None) -> list[int]:
    """Return the numbers of the rows that count; raise unless they suit the rule."""
    counts = None if weights is None else weights.weights
    present = None if weights is None else weights.present
    rule.check(num_rows, weights=counts, present=present)
    return counting_rows(num_rows, counts, present)


def _among(chosen: list[int], num_rows: int) -> tuple[npt.NDArray[np.intp], ...]:
    """Return the places of some rows' distances in a table of all, the zero vector's with them."""
    return np.ix_([*chosen, num_rows], [*chosen, num_rows])


@functools.lru_cache(maxsize=16)
def _upper(num_rows: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the places above the diagonal of a table [n + 1, n + 1], [num_pairs] each."""
    return np.triu_indices(num_rows + 1, 1)
