"""The public functions: aggregate one gradient row per worker into one row.

Every function takes a [world_size, numel] tensor or NumPy array, or a sequence of 1-D ones of
equal length, and returns [numel] of the same dtype on the same device. Nothing is differentiated.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation import ops
from loft_hvd.aggregation.compute import aggregate_rows
from loft_hvd.aggregation.inputs import (
    Gradients,
    Presence,
    Row,
    Rows,
    Weights,
    counting_rows,
    read_present,
    read_weights,
    spans,
)
from loft_hvd.aggregation.row_rules import check_is_ours
from loft_hvd.aggregation.rules import (
    Custom,
    Mean,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
)
from loft_hvd.errors import AggregationError, ArgumentTypeError

__all__ = [
    "Part",
    "aggregate",
    "call_custom",
    "mean",
    "mean_around_median",
    "median",
    "phocas",
    "read_call",
    "trimmed_mean",
]


class Part(NamedTuple):
    """Neighbouring coordinates in which the same rows count."""

    numbers: list[int]  # which of all rows these are, [rows]
    rows: list[Row]  # their values, each [coordinates]
    weights: list[int] | None  # their weights, [rows], or None
    out: Row  # where the result goes, [coordinates]


def read_call(
    gradients: Gradients,
    rule: Rule,
    *,
    weights: Weights | None,
    present: Presence | None,
    out: Row | None,
) -> tuple[Row, int, list[Part]]:
    """Check the arguments of ``aggregate`` or ``diagnose``: result, number of rows, what to do."""
    if not isinstance(rule, Rule):
        raise ArgumentTypeError(
            f"rule={rule!r} must be a rule such as Median() or TrimmedMean(f=1); text is read by "
            "parse_rule"
        )
    rows = Rows.read(gradients)
    world_size = len(rows.rows)
    counts = None if weights is None else read_weights(weights, world_size)
    mask = read_present(present, world_size)
    if out is None:
        out = rows.empty()
    else:
        rows.check_out(out)
    # Every span is checked before the first one is computed: an error leaves `out` as it was.
    parts = []
    for span, column, block in spans(mask, rows.numel):
        rule.check(world_size, weights=counts, present=column, block=block)
        chosen = counting_rows(world_size, counts, column)
        part = [rows.rows[row][span] for row in chosen]
        chosen_weights = None if counts is None else [counts[row] for row in chosen]
        parts.append(Part(chosen, part, chosen_weights, out[span]))
    return out, world_size, parts


def aggregate(
    gradients: Gradients,
    rule: Rule,
    *,
    weights: Weights | None = None,
    present: Presence | None = None,
    out: Row | None = None,
) -> Any:
    """Aggregate gradients with any rule.

    Args:
        gradients: one row per worker, shape [world_size, numel], or a sequence of 1-D rows;
            float64, float32, float16 or bfloat16. Rows may lie at any distance; a row whose own
            values are not neighbours in memory is copied first.
        rule: what to do with each coordinate.
        weights: sample count of each row, [world_size], whole numbers on the CPU; a row of weight
            0 does not count. Trimming rules drop by count and average by weight.
        present: which rows are there, bool on the CPU, [world_size], or [world_size, num_blocks]
            for blocks of ceil(numel / num_blocks) coordinates each; the last ones may hold fewer,
            or none, and then need no rows. An absent row is never read.
        out: where to put the result, [numel], contiguous, overlapping no row, and not requiring
            grad. A backward pass that saved ``out`` raises, as after any write in place.

    Returns:
        ``out``, or a new tensor or array of shape [numel], dtype and device of ``gradients``.

    Raises:
        AggregationError: the rule does not fit the rows that are present with weight > 0; of
            presence by block it names the block.
        ArgumentError: a shape, device or value is out of its limits.
        ArgumentTypeError: gradients of an integer or other dtype, or weights that are no counts.
    """
    out, _, parts = read_call(gradients, rule, weights=weights, present=present, out=out)
    for part in parts:
        if isinstance(rule, Custom):
            call_custom(part, rule)
        elif torch.compiler.is_compiling():
            # A graph cannot hold a call that takes addresses; it can hold an operator, which gets
            # the rule as text.
            check_is_ours(rule)
            rows = cast("list[Tensor]", part.rows)
            ops.aggregate_out(rows, str(rule), part.weights, cast("Tensor", part.out))
        else:
            aggregate_rows(part.rows, rule, weights=part.weights, out=part.out)
    return out


def call_custom(part: Part, rule: Custom) -> None:
    """Call the user's function on [rows, numel] and copy what it returns into ``part.out``."""
    rows, out = part.rows, part.out
    stacked: Any
    if isinstance(out, Tensor):
        stacked = torch.stack(cast("list[Tensor]", rows))
    else:
        stacked = np.stack(cast("list[npt.NDArray[Any]]", rows))
    counts = part.weights if part.weights is not None else [1] * len(rows)
    result = rule.fn(stacked, counts) if rule.takes_weights else rule.fn(stacked)
    if not isinstance(result, type(stacked)) or tuple(result.shape) != tuple(out.shape):
        shape = tuple(getattr(result, "shape", ()))
        raise AggregationError(
            f"{rule}: fn returned {type(result).__name__} of shape {shape} for {len(rows)} rows of "
            f"{out.shape[0]}; it must return {type(stacked).__name__} of shape {tuple(out.shape)}"
        )
    out[:] = result  # becomes the rows' dtype here


def mean(
    gradients: Gradients,
    *,
    weights: Weights | None = None,
    present: Presence | None = None,
    out: Row | None = None,
) -> Any:
    """Average each coordinate by weight, summing in rank order; see ``aggregate``."""
    return aggregate(gradients, Mean(), weights=weights, present=present, out=out)


def median(
    gradients: Gradients,
    *,
    weights: Weights | None = None,
    present: Presence | None = None,
    out: Row | None = None,
    kind: str = "midpoint",
) -> Any:
    """Take the middle value of each coordinate; see ``aggregate``.

    With weights, the smallest value with at least half of the weight at or below it. Of two middle
    values ``kind`` takes their "midpoint", the "lower" or the "upper" one.
    """
    return aggregate(gradients, Median(kind), weights=weights, present=present, out=out)


def trimmed_mean(
    gradients: Gradients,
    *,
    f: int,
    weights: Weights | None = None,
    present: Presence | None = None,
    out: Row | None = None,
) -> Any:
    """Average each coordinate after dropping its f smallest and f largest values.

    NaN orders above +inf, so up to f rows of any values cannot leave the range of the others.

    ``f`` Byzantine workers are tolerated, 0 <= 2 * f < rows that count; see ``aggregate``.
    """
    return aggregate(gradients, TrimmedMean(f), weights=weights, present=present, out=out)


def mean_around_median(
    gradients: Gradients,
    *,
    f: int,
    weights: Weights | None = None,
    present: Presence | None = None,
    out: Row | None = None,
) -> Any:
    """Average the rows - f values of each coordinate that are nearest to its median."""
    return aggregate(gradients, MeanAroundMedian(f), weights=weights, present=present, out=out)


def phocas(
    gradients: Gradients,
    *,
    f: int,
    weights: Weights | None = None,
    present: Presence | None = None,
    out: Row | None = None,
) -> Any:
    """Average the rows - f values of each coordinate that are nearest to its trimmed mean."""
    return aggregate(gradients, Phocas(f), weights=weights, present=present, out=out)
