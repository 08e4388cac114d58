"""What a caller may pass as gradients, weights and presence, brought to one form and checked."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.rules import MAX_TOTAL_WEIGHT
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

__all__ = [
    "Gradients",
    "Presence",
    "Row",
    "Rows",
    "Weights",
    "address",
    "read_present",
    "read_weights",
    "spans",
]

Row: TypeAlias = "Tensor | npt.NDArray[Any]"
Gradients: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[Tensor] | Sequence[npt.NDArray[Any]]"
Weights: TypeAlias = "Sequence[int] | npt.NDArray[Any] | Tensor"
Presence: TypeAlias = "Sequence[bool] | Sequence[Sequence[bool]] | npt.NDArray[Any] | Tensor"

_TORCH_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUMPY_DTYPES = tuple(np.dtype(name) for name in ("float64", "float32", "float16"))
_TAKES = "float64, float32, float16 or (torch) bfloat16"


@dataclass(frozen=True)
class Rows:
    """Gradients as equal 1-D rows with unit stride, of one dtype on one device.

    Attributes:
        rows: torch tensors or NumPy arrays, never mixed, each [numel].
        numel: coordinates of each row.
        is_numpy: whether the rows are NumPy arrays.
    """

    rows: tuple[Row, ...]
    numel: int
    is_numpy: bool

    @classmethod
    def read(cls, gradients: Gradients) -> Rows:
        """Check ``gradients`` and cut them into rows.

        Rows may lie anywhere, at any distance. Where the values *within* a row are not next to
        each other (a transposed or strided matrix), that row is copied, which costs its bytes.

        Raises:
            ArgumentTypeError: not tensors or arrays, mixed, or not of a floating dtype we take.
            ArgumentError: wrong number of dimensions, or rows of different lengths or devices.
        """
        if isinstance(gradients, Tensor | np.ndarray):
            if gradients.ndim != 2:
                raise ArgumentError(
                    f"gradients of shape {tuple(gradients.shape)} must be [world_size, numel]; for "
                    "other shapes pass a sequence of 1-D tensors"
                )
            rows = _cut(gradients)
        else:
            rows = tuple(gradients)
        if not rows:
            raise AggregationError("gradients have no rows; give one row a worker")
        first = rows[0]
        _check_first(first)
        for number, row in enumerate(rows):
            _check_row(number, row, first)
        unit = tuple(_with_unit_stride(row) for row in rows)
        return cls(unit, int(first.shape[0]), isinstance(first, np.ndarray))

    def empty(self) -> Row:
        """Return an unset row of the same kind, [numel]."""
        first = self.rows[0]
        if isinstance(first, Tensor):
            return torch.empty(self.numel, dtype=first.dtype, device=first.device)
        return np.empty(self.numel, first.dtype)

    def check_out(self, out: Row) -> None:
        """Raise unless ``out`` can take the result: like a row, and no part of one."""
        first = self.rows[0]
        if type(out) is not type(first) and not (
            isinstance(out, Tensor) and isinstance(first, Tensor)
        ):
            raise ArgumentTypeError(
                f"out is a {type(out).__name__}, the rows are {type(first).__name__}; use the same"
            )
        _check_row("out", out, first)
        if self.numel > 1 and _unit(out) != 1:
            raise ArgumentError("out must be contiguous; aggregate into a new tensor and copy")
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ArgumentError("out is read-only; give a writable array")
        if torch.compiler.is_compiling():
            return  # tensors have no addresses yet; the operator checks them when it runs
        begin, size = address(out), self.numel * out.itemsize
        for number, row in enumerate(self.rows):
            if size and begin < address(row) + size and address(row) < begin + size:
                raise ArgumentError(f"out overlaps row {number} of gradients; give separate memory")


def _cut(matrix: Tensor | npt.NDArray[Any]) -> tuple[Row, ...]:
    if isinstance(matrix, Tensor):
        return matrix.detach().unbind(0)
    return tuple(matrix)


def _unit(row: Row) -> int:
    """Return the distance between neighbours in values."""
    if isinstance(row, Tensor):
        return row.stride(0)
    return row.strides[0] // row.itemsize if row.strides[0] % row.itemsize == 0 else 0


def _with_unit_stride(row: Row) -> Row:
    if isinstance(row, Tensor):
        return row.detach() if row.shape[0] <= 1 or _unit(row) == 1 else row.detach().contiguous()
    is_plain = (row.shape[0] <= 1 or _unit(row) == 1) and row.flags.aligned
    return row if is_plain else row.copy()


def address(row: Row) -> int:
    """Return where the row's first value lies."""
    return row.data_ptr() if isinstance(row, Tensor) else row.ctypes.data


def _check_first(first: Row) -> None:
    if not isinstance(first, Tensor | np.ndarray):
        raise ArgumentTypeError(
            "gradients must be a 2-D tensor or NumPy array, or a sequence of 1-D ones, one a "
            f"worker; the first of these is of type {type(first).__name__}"
        )
    is_known = first.dtype in (_TORCH_DTYPES if isinstance(first, Tensor) else _NUMPY_DTYPES)
    if not is_known or (isinstance(first, Tensor) and first.layout != torch.strided):
        raise ArgumentTypeError(
            f"gradients of dtype {first.dtype} cannot be aggregated; convert them to {_TAKES}"
        )


def _check_row(number: int | str, row: Row, first: Row) -> None:
    """Raise unless ``row`` is a 1-D twin of ``first``."""
    label = f"row {number}" if isinstance(number, int) else number
    if isinstance(row, Tensor) != isinstance(first, Tensor) or not isinstance(
        row, Tensor | np.ndarray
    ):
        raise ArgumentTypeError(
            f"{label} is a {type(row).__name__}, row 0 a {type(first).__name__}; use one kind"
        )
    if row.ndim != 1 or row.shape != first.shape:
        raise ArgumentError(
            f"{label} has shape {tuple(row.shape)}, row 0 {tuple(first.shape)}; all must be equal "
            "and 1-D"
        )
    if row.dtype != first.dtype:
        raise ArgumentTypeError(
            f"{label} has dtype {row.dtype}, row 0 {first.dtype}; convert to one dtype"
        )
    if isinstance(row, Tensor) and isinstance(first, Tensor) and row.device != first.device:
        raise ArgumentError(
            f"{label} is on {row.device}, row 0 on {first.device}; move all to one device"
        )


def read_weights(weights: Weights | None, world_size: int) -> list[int] | None:
    """Check weights, one whole number >= 0 a row.

    Returns:
        One int a row, [world_size]; None where none were given.

    Raises:
        ArgumentTypeError: a weight is no whole number.
        ArgumentError: a wrong number of weights, a negative one, or too large a sum.
    """
    if weights is None:
        return None
    if isinstance(weights, Tensor | np.ndarray):
        weights = weights.tolist()
    counts = [_read_weight(row, weight) for row, weight in enumerate(weights)]
    if len(counts) != world_size:
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


def _read_weight(row: int, weight: Any) -> int:
    if isinstance(weight, float) and weight.is_integer():
        weight = int(weight)
    try:
        count = operator.index(weight)
    except TypeError:
        raise ArgumentTypeError(
            f"weight {weight!r} of row {row} is no whole number; weights are sample counts"
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
        ArgumentTypeError: values that are neither bool nor 0 and 1.
        ArgumentError: a wrong shape.
    """
    if present is None:
        return None
    values = present.tolist() if isinstance(present, Tensor | np.ndarray) else list(present)
    rows = [_read_row(row) for row in values]
    num_blocks = len(rows[0]) if rows else 0
    if len(rows) != world_size or not num_blocks or any(len(row) != num_blocks for row in rows):
        is_flat = all(not isinstance(row, list | tuple | Tensor | np.ndarray) for row in values)
        lengths = sorted({len(row) for row in rows})
        shape = (len(rows),) if is_flat else (len(rows), *lengths)
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


def spans(mask: list[list[bool]] | None, numel: int) -> Iterator[tuple[slice, list[bool] | None]]:
    """Yield neighbouring blocks with equal presence as one span, with its column of ``mask``."""
    if mask is None:
        yield slice(0, numel), None
        return
    block = max(1, -(-numel // len(mask)))
    begin = 0
    for column, rows in enumerate(mask):
        is_last = column + 1 == len(mask)
        if is_last or rows != mask[column + 1]:
            end = numel if is_last else min(numel, (column + 1) * block)
            yield slice(begin, end), rows
            begin = end
