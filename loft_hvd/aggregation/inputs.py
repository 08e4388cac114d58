"""What a caller gives: gradients, ``out``, weights and presence, checked and in one form."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.pages import empty_row
from loft_hvd.errors import AggregationError, AllocationError, ArgumentError, ArgumentTypeError

__all__ = [
    "MAX_TOTAL_WEIGHT",
    "Gradients",
    "Presence",
    "Row",
    "Rows",
    "Weights",
    "address",
    "counting_rows",
    "read_count",
    "read_present",
    "read_weights",
    "spans",
]

MAX_TOTAL_WEIGHT = 2**30 - 1  # after division by the common divisor; csrc/rules.h likewise

Row: TypeAlias = "Tensor | npt.NDArray[Any]"
Gradients: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[Tensor] | Sequence[npt.NDArray[Any]]"
Weights: TypeAlias = "Sequence[int] | npt.NDArray[Any] | Tensor"
Presence: TypeAlias = "Sequence[bool] | Sequence[Sequence[bool]] | npt.NDArray[Any] | Tensor"

_TORCH_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUMPY_DTYPES = tuple(np.dtype(name) for name in ("float64", "float32", "float16"))
_GIVE = "gradients must be a 2-D tensor or NumPy array, or a sequence of 1-D ones, one a worker"
_TAKES = "float64, float32, float16 or (torch) bfloat16"


@dataclass(frozen=True)
class Rows:
    """Gradients as equal 1-D rows with unit stride, of one dtype on one device."""

    rows: tuple[Row, ...]  # torch tensors or NumPy arrays, never mixed, each [numel]
    numel: int  # coordinates of each row

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
            _check_dense("gradients", gradients)
            if gradients.ndim != 2:
                world_size = gradients.shape[0] if gradients.ndim > 2 else 1
                raise ArgumentError(
                    f"gradients of shape {tuple(gradients.shape)} must be [world_size, numel]; "
                    f"give their reshape({world_size}, -1)"
                )
            _check_memory("gradients", gradients)
            rows = _cut(gradients)
            if rows and isinstance(gradients, Tensor) and _has_plain_rows(gradients):
                return cls(rows, int(gradients.shape[1]))  # all alike
        elif isinstance(gradients, Iterable):
            rows = tuple(gradients)
        else:
            raise ArgumentTypeError(f"{_GIVE}; these are of type {type(gradients).__name__}")
        if not rows:
            raise AggregationError("gradients have no rows; give one row a worker")
        first = rows[0]
        _check_first(first)
        for number, row in enumerate(rows):
            _check_row(number, row, first)
            if not isinstance(gradients, Tensor):  # whose rows lie where it lies
                _check_memory(f"row {number}", row)
        unit = tuple(_with_unit_stride(row) for row in rows)
        return cls(unit, int(first.shape[0]))

    def empty(self) -> Row:
        """Return an unset row of the same kind, [numel]."""
        first = self.rows[0]
        with _allocating(first):
            if isinstance(first, Tensor):
                if first.device.type == "cpu" and not torch.compiler.is_compiling():
                    return empty_row(self.numel, first.dtype)
                return torch.empty(self.numel, dtype=first.dtype, device=first.device)
            return np.empty(self.numel, first.dtype)

    def check_out(self, out: Row) -> None:
        """Raise unless ``out`` can take the result: like a row, and no part of one."""
        _check_row("out", out, self.rows[0])
        _check_memory("out", out)
        if self.numel > 1 and _unit(out) != 1:
            raise ArgumentError("out must be contiguous; aggregate into a new tensor and copy")
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ArgumentError("out is read-only; give a writable array")
        if isinstance(out, Tensor) and out.requires_grad:
            raise ArgumentError(
                "out requires grad, but aggregation is not differentiated, so backward() through "
                "it would go wrong; pass out.detach(), or a tensor that does not require grad"
            )
        if torch.compiler.is_compiling():
            return  # tensors have no addresses yet; the operator checks them when it runs
        if isinstance(out, Tensor) and out.is_neg():
            raise ArgumentError(
                "out is a view that negates, such as x.conj().imag; give a tensor of its own"
            )
        # Kernels read a tile of all rows and then write its result, so a shared byte may be read
        # after it was written. Two ranges overlap when each begins before the other one ends.
        begin, size = address(out), self.numel * out.itemsize
        for number, row in enumerate(self.rows):
            if size and begin < address(row) + size and address(row) < begin + size:
                raise ArgumentError(f"out overlaps row {number} of gradients; give separate memory")


def _cut(matrix: Tensor | npt.NDArray[Any]) -> tuple[Row, ...]:
    if isinstance(matrix, Tensor):
        return matrix.detach().unbind(0)
    return tuple(matrix)


def _has_plain_rows(matrix: Tensor) -> bool:
    """Say whether the rows of a tensor are of a dtype that we take, and need no copy."""
    if torch.compiler.is_compiling():
        return False  # a graph follows the checks of single rows
    return matrix.dtype in _TORCH_DTYPES and matrix.stride(1) == 1 and not matrix.is_neg()


def _unit(row: Row) -> int:
    """Return the distance between neighbours in values."""
    # NumPy's strides are bytes, and need not be whole values (a field of a record): 0 is no unit.
    if isinstance(row, Tensor):
        return row.stride(0)
    return row.strides[0] // row.itemsize if row.strides[0] % row.itemsize == 0 else 0


def _with_unit_stride(row: Row) -> Row:
    with _allocating(row):
        if isinstance(row, Tensor):
            row = row.detach().resolve_neg()  # where a view negates, memory holds the other sign
            return row if row.shape[0] <= 1 or _unit(row) == 1 else row.contiguous()
        # One that is not aligned may begin in the middle of a value, where C++ must not read it.
        is_plain = (row.shape[0] <= 1 or _unit(row) == 1) and row.flags.aligned
        return row if is_plain else row.copy()


@contextmanager
def _allocating(row: Row) -> Iterator[None]:
    """Say in our words, and as a MemoryError, that there is no memory for a row like this."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:  # torch has no class for the CPU's
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise AllocationError(
            f"no memory for a row of {row.shape[0]} values, {row.shape[0] * row.itemsize} bytes; "
            "give rows whose values are next to each other, or out="
        ) from error


def address(row: Row) -> int:
    """Return where the row's first value lies."""
    return row.data_ptr() if isinstance(row, Tensor) else row.ctypes.data


def _check_dense(label: str, values: Row) -> None:
    if isinstance(values, Tensor) and values.is_nested:
        raise ArgumentTypeError(f"{label} is a nested tensor; give a list of its parts")
    if isinstance(values, Tensor) and values.layout != torch.strided:
        raise ArgumentTypeError(
            f"{label} has layout {str(values.layout).removeprefix('torch.')}, but must be dense; "
            "give its to_dense()"
        )


def _check_memory(label: str, values: Row) -> None:
    """Raise unless the values lie in memory: kernels are given addresses and nothing else."""
    # While torch traces, no tensor has any; the operators check them when they run.
    if not isinstance(values, Tensor) or torch.compiler.is_compiling() or not values.numel():
        return
    try:
        last = sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))
        needed = (values.storage_offset() + last + 1) * values.itemsize
        storage = values.untyped_storage()  # a fake tensor's is a meta one, on any device
        is_there = storage.device.type != "meta" and storage.nbytes() >= needed
        is_there = is_there and values.data_ptr() != 0
    except RuntimeError:  # wrapped by torch.vmap or torch.func, or functional
        is_there = False
    if not is_there:
        raise ArgumentTypeError(
            f"{label} ({type(values).__name__} on {values.device}) has no values in memory: it is "
            "a fake or meta tensor, inside torch.vmap or torch.func, or its storage was freed; "
            "give a tensor that has some"
        )


def _check_first(first: Row) -> None:
    if not isinstance(first, Tensor | np.ndarray):
        raise ArgumentTypeError(f"{_GIVE}; the first of these is of type {type(first).__name__}")
    is_known = first.dtype in (_TORCH_DTYPES if isinstance(first, Tensor) else _NUMPY_DTYPES)
    if not is_known:
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
            f"{label} is of type {type(row).__name__}, row 0 of type {type(first).__name__}; "
            "use one kind"
        )
    _check_dense(label, row)
    if isinstance(row, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{label} is a masked array, whose mask no rule reads; give row.filled(...), and leave "
            "rows out by present="
        )
    if row.ndim != 1:
        raise ArgumentError(
            f"{label} has shape {tuple(row.shape)}, but must be 1-D; give its reshape(-1)"
        )
    if row.shape != first.shape:
        raise ArgumentError(
            f"{label} has shape {tuple(row.shape)}, row 0 {tuple(first.shape)}; give all as many "
            "coordinates"
        )
    if row.dtype != first.dtype:
        raise ArgumentTypeError(
            f"{label} has dtype {row.dtype}, row 0 {first.dtype}; convert to one dtype"
        )
    if isinstance(row, Tensor) and isinstance(first, Tensor) and row.device != first.device:
        raise ArgumentError(
            f"{label} is on {row.device}, row 0 on {first.device}; move all to one device"
        )


def read_count(label: str, value: Any, meaning: str) -> int:
    """Return a whole number, of Python or NumPy, as an int; ``label`` names it in errors."""
    # bool is a subclass of int: f=True would pass for 1.
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"{label}={value!r} must be an int, {meaning}")
    return int(value)


def read_weights(weights: Weights, world_size: int | None = None) -> list[int]:
    """Check weights, one whole number >= 0 a row: [world_size], or any number of them for None.

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
    # Only ratios count: 256 256 128 is 2 2 1. The kernels add weights up in int32, twice the total.
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
    # Counts that went through float64, as NumPy and JSON do it, are still counts.
    if isinstance(weight, float | np.floating) and float(weight).is_integer():
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
        Plain lists, which torch.compile can follow, [num_blocks][world_size]; None where every row
        is there everywhere.
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
        return None  # as if no mask had been given: one span, one call
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


def counting_rows(
    world_size: int, weights: Sequence[int] | None, present: Sequence[bool] | None
) -> list[int]:
    """Return the numbers of the rows that count: present, with a weight above 0."""
    for label, values in (("weights", weights), ("present", present)):
        if values is not None and len(values) != world_size:
            raise ArgumentError(
                f"{label} has {len(values)} values, but there are {world_size} rows; give one a row"
            )
    return [
        row
        for row in range(world_size)
        if (present is None or present[row]) and (weights is None or weights[row] > 0)
    ]


def spans(
    mask: list[list[bool]] | None, numel: int
) -> Iterator[tuple[slice, list[bool] | None, int | None]]:
    """Yield neighbouring blocks with equal presence as one span.

    Yields:
        The coordinates, their column of ``mask``, and the number of the first block, which is None
        where there is but one. Blocks beyond the last coordinate are left out.
    """
    if mask is None or len(mask) == 1:
        yield slice(0, numel), None if mask is None else mask[0], None
        return
    # 10 coordinates in 4 blocks: ceil(10 / 4) = 3 each, so 0-2, 3-5, 6-8 and 9 alone. If blocks 1
    # and 2 have the same rows, the spans are 0-2, 3-8 and 9: one kernel call less.
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
