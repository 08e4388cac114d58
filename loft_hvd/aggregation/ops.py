"""The rules as ``torch.library`` operators, so that ``torch.compile`` can trace them.

``torch.ops.loft_hvd.aggregate(rows, rule, weights)`` returns a new tensor;
``torch.ops.loft_hvd.aggregate_out(rows, rule, weights, out)`` fills ``out`` and returns nothing. A
rule travels as its text, ``str(rule)``; ``weights`` is None or one int > 0 a row. Users need
neither: ``aggregate`` and its kin call them while a model is being compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loft_hvd.aggregation.compute import aggregate_rows
from loft_hvd.aggregation.inputs import Rows, read_weights
from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.errors import AggregationError, ArgumentError

__all__ = ["aggregate", "aggregate_out"]


@torch.library.custom_op("loft_hvd::aggregate", mutates_args=())
def aggregate(rows: Sequence[Tensor], rule: str, weights: Sequence[int] | None = None) -> Tensor:
    """Aggregate rows [numel] with the rule of this text into a new tensor."""
    out = _new(rows)
    _fill(rows, rule, weights, out)
    return out


# A fake kernel tells shape and dtype while torch traces, when tensors have no memory.
@aggregate.register_fake
def _(rows: Sequence[Tensor], rule: str, weights: Sequence[int] | None = None) -> Tensor:
    return _new(rows)


# An operator may not return what it fills: hence two of them.
@torch.library.custom_op("loft_hvd::aggregate_out", mutates_args=("out",))
def aggregate_out(
    rows: Sequence[Tensor], rule: str, weights: Sequence[int] | None, out: Tensor
) -> None:
    """Aggregate rows [numel] with the rule of this text into ``out``."""
    _fill(rows, rule, weights, out)


@aggregate_out.register_fake
def _(rows: Sequence[Tensor], rule: str, weights: Sequence[int] | None, out: Tensor) -> None:
    return None


def _new(rows: Sequence[Tensor]) -> Tensor:
    if not rows:
        raise AggregationError("gradients have no rows; give one row a worker")
    return rows[0].new_empty(rows[0].shape)


def _fill(rows: Sequence[Tensor], rule: str, weights: Sequence[int] | None, out: Tensor) -> None:
    # A graph may run long after it was traced, on other rows: everything is checked anew.
    read = Rows.read(list(rows))
    read.check_out(out)
    parsed = parse_rule(rule)
    if weights is not None:
        _check_weights(weights)
        weights = read_weights(weights, len(rows))
    parsed.check(len(rows), weights=weights)
    aggregate_rows(read.rows, parsed, weights=weights, out=out)


def _check_weights(weights: Sequence[int]) -> None:
    """Raise unless every weight counts: an operator leaves no row out."""
    for row, weight in enumerate(weights):
        if weight < 1:
            raise ArgumentError(
                f"weight {weight} of row {row} must be >= 1, for an operator leaves no row out; "
                "give it the rows that count, or call loft_hvd.aggregate, which takes weight 0"
            )
