"""Counts that a caller gives beside gradients: weights, presence, a number of rows; checked."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from loft_hvd.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "MAX_TOTAL_WEIGHT",
    "Presence",
    "Weights",
    "read_count",
    "read_present",
    "read_weights",
    "spans",
]

MAX_TOTAL_WEIGHT = 2**30 - 1  # after division by the common divisor; csrc/rules.h likewise

Weights: TypeAlias = "Sequence[int] | npt.NDArray[Any] | Tensor"
Presence: TypeAlias = "Sequence[bool] | Sequence[Sequence[bool]] | npt.NDArray[Any] | Tensor"


def read_count(label: str, value: Any, meaning: str) -> int:
    """Return a whole number, of Python or NumPy, as an int.

    Args:
        label: what the caller set, for the error, such as ``"trimmed_mean: f"``.
        value: what it was set to.
        meaning: what the number counts, for the error.

    Raises:
        ArgumentTypeError: it is no whole number.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"{label}={value!r} must be an int, {meaning}")
    return int(value)


def read_weights(weights: Weights, world_size: int | None = None) -> list[int]:
    """Check weights, one whole number >= 0 a row.

    Args:
        weights: as the caller gave them.
        world_size: how many there must be; None for any number.

    Returns:
        One int a row, [world_size].

    Raises:
        ArgumentTypeError: no sequence, or a weight is no whole number.
        ArgumentError: a wrong number of weights, a negative one, or too large a sum.
    """
    values = _as_list("weights", weights, "one whole number a row, [world_size]")
    counts = [_read_weight(row, weight) for row, weight in enumerate(values)]
    if world_size is not None and len(counts) != world_size:
        raise ArgumentError(
            f"weights has {len(counts)} values, but there are {world_size} rows; give one a row"
        )
    divisor = functools.reduce(math.gcd, counts, 0) or 1
    if sum(counts) // divisor > MAX_TOTAL_WEIGHT:
        raise ArgumentError(
            f"weights add up to {sum(counts) // divisor} after division by {divisor}, but at most "
            f"{MAX_TOTAL_WEIGHT} is exact; scale them down"
        )
    return counts


def _as_list(label: str, values: Any, wanted: str) -> list[Any]:
    """Return the values of a sequence, array or tensor; a number, text or a set is none."""
    if isinstance(values, Tensor | np.ndarray) and values.ndim:
        listed: list[Any] = values.tolist()
        return listed
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return list(values)
    raise ArgumentTypeError(
        f"{label}={values!r} is of type {type(values).__name__}, but must be a list, {wanted}"
    )


def _read_weight(row: int, weight: Any) -> int:
    if isinstance(weight, float) and weight.is_integer():
        weight = int(weight)
    try:
        count = operator.index(weight)
    except TypeError:
        if isinstance(weight, list | tuple):
            way_out = "give one number a row, [world_size]"
        elif isinstance(weight, float) and math.isfinite(weight):
            way_out = "scale shares up"
        else:
            way_out = "give a whole number >= 0"
        raise ArgumentTypeError(
            f"weight {weight!r} of row {row} is no whole number; weights are sample "
            f"counts: {way_out}"
        ) from None
    if count < 0:
        raise ArgumentError(f"weight {count} of row {row} must be >= 0")
    return count


def read_present(present: Presence | None, world_size: int) -> list[list[bool]] | None:
    """Check presence: one bool a row, [world_size], or one a row and block.

    Returns:
        One list a block of one bool a row, [num_blocks][world_size]; None where every row is there
        everywhere. Plain lists, which torch.compile can follow.

    Raises:
        ArgumentTypeError: no sequence, or values that are neither bool nor 0 and 1.
        ArgumentError: a wrong shape.
    """
    if present is None:
        return None
    values = _as_list("present", present, "one bool a row, or one a row and block")
    rows = [_read_row(row) for row in values]
    num_blocks = len(rows[0]) if rows else 0
    for number, row in enumerate(rows):
        if len(row) != num_blocks:
            raise ArgumentError(
                f"row {number} of present has {len(row)} blocks, row 0 {num_blocks}; give all as "
                "many"
            )
    if len(rows) != world_size or not num_blocks:
        is_flat = all(not isinstance(row, list | tuple | Tensor | np.ndarray) for row in values)
        shape = (len(rows),) if is_flat else (len(rows), num_blocks)
        raise ArgumentError(
            f"present has shape {shape}, but must be [{world_size}] (one a row) or "
            f"[{world_size}, num_blocks]"
        )
    if all(map(all, rows)):
        return None
    return [[row[block] for row in rows] for block in range(num_blocks)]


def _read_row(row: Any) -> list[bool]:
    """Read the presence of one row, a value or one a block."""
    if isinstance(row, Tensor | np.ndarray):
        row = row.tolist()
    blocks = row if isinstance(row, list | tuple) else [row]
    for value in blocks:
        if not isinstance(value, bool | int | np.bool_ | np.integer) or value not in (0, 1):
            raise ArgumentTypeError(
                f"present holds {type(value).__name__} values such as {value!r}; give one bool a "
                "row, or one a row and block"
            )
    return [bool(value) for value in blocks]


def spans(
    mask: list[list[bool]] | None, numel: int
) -> Iterator[tuple[slice, list[bool] | None, int | None]]:
    """Yield neighbouring blocks with equal presence as one span.

    Args:
        mask: what ``read_present`` returns.
        numel: coordinates of each row; blocks beyond the last one hold none and are left out.

    Yields:
        The coordinates, their column of ``mask``, and the number of the first block, which is None
        where there is but one.
    """
    if mask is None or len(mask) == 1:
        yield slice(0, numel), None if mask is None else mask[0], None
        return
    block = max(1, -(-numel // len(mask)))
    begin = first = 0
    for column, rows in enumerate(mask):
        end = min(numel, (column + 1) * block)
        is_last = column + 1 == len(mask) or end == numel
        if is_last or rows != mask[column + 1]:
            if begin < end:
                yield slice(begin, end), rows, first
            begin, first = end, column + 1
        if is_last:
            return
