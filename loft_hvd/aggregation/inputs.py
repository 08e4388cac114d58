"""What a caller may pass as gradients and ``out``, brought to one form and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

__all__ = ["Gradients", "Row", "Rows", "address"]

Row: TypeAlias = "Tensor | npt.NDArray[Any]"
Gradients: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[Tensor] | Sequence[npt.NDArray[Any]]"

_TORCH_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUMPY_DTYPES = tuple(np.dtype(name) for name in ("float64", "float32", "float16"))
_GIVE = "gradients must be a 2-D tensor or NumPy array, or a sequence of 1-D ones, one a worker"
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
                world_size = gradients.shape[0] if gradients.ndim > 2 else 1
                raise ArgumentError(
                    f"gradients of shape {tuple(gradients.shape)} must be [world_size, numel]; "
                    f"give their reshape({world_size}, -1)"
                )
            _check_dense("gradients", gradients)
            rows = _cut(gradients)
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
        _check_row("out", out, self.rows[0])
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
        row = row.detach().resolve_neg()  # where a view negates, memory holds the other sign
        return row if row.shape[0] <= 1 or _unit(row) == 1 else row.contiguous()
    is_plain = (row.shape[0] <= 1 or _unit(row) == 1) and row.flags.aligned
    return row if is_plain else row.copy()


def address(row: Row) -> int:
    """Return where the row's first value lies."""
    return row.data_ptr() if isinstance(row, Tensor) else row.ctypes.data


def _check_dense(label: str, values: Row) -> None:
    if isinstance(values, Tensor) and values.layout != torch.strided:
        raise ArgumentTypeError(
            f"{label} has layout {str(values.layout).removeprefix('torch.')}, but must be dense; "
            "give its to_dense()"
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
