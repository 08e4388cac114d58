"""Wire formats: what a value is while it travels."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import torch
from torch import Tensor

from loft_hvd.errors import ArgumentTypeError

__all__ = ["Compression", "Compressor", "Wire", "own_wire", "read_compression", "wire_name"]


class Compressor(Protocol):
    """A user's own wire format, with the methods of Horovod's ``Compression`` classes."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, of the same numel, and what ``decompress`` needs."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Undo ``compress`` on any number of values."""
        ...


class Compression(enum.Enum):
    """A wire format for ``DistributedOptimizer(compression=...)``.

    Rules read 16-bit rows, compute in float32 and round their result once, to 16 bits. Each value
    is rounded to the nearest one that the format has, and never saturated: float16 makes infinity
    of what lies beyond 65504 (with a warning, once for each parameter), which a robust rule then
    takes for an outlier. bfloat16 has float32's range and 8 bits of precision.

    Attributes:
        none: values travel in the bucket's own dtype.
        fp16: values travel as float16, in half of float32's bytes.
        bf16: values travel as bfloat16, in half of float32's bytes.
    """

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype on the wire; None for the bucket's own."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.value)


# Horovod's classes by name: Horovod may not be installed, and is imported in one place only.
_HOROVODS = {"NoneCompressor": Compression.none, "FP16Compressor": Compression.fp16}

Wire = Compression | Compressor


def read_compression(compression: Any) -> Wire:
    """Return a wire format: ours for ``None`` and Horovod's own, else the user's object.

    Raises:
        ArgumentTypeError: the object cannot compress and decompress.
    """
    if compression is None:
        return Compression.none
    if isinstance(compression, Compression):
        return compression
    # Horovod's fp16 does what ours does, but would be called like an object of the user's, which
    # makes its tensors anew each time and sums in 16 bits.
    is_horovods = str(getattr(compression, "__module__", "")).startswith("horovod.")
    if is_horovods and getattr(compression, "__name__", "") in _HOROVODS:
        return _HOROVODS[compression.__name__]
    if all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        taken: Compressor = compression
        return taken
    raise ArgumentTypeError(
        f"compression={compression!r} has no compress and decompress; pass loft.Compression.none, "
        ".fp16 or .bf16, one of hvd.Compression, or an object with both"
    )


def own_wire(dtype: torch.dtype) -> Compression:
    """Return the format in which values travel as they are: 16-bit ones in 16 bits."""
    wires = {torch.float16: Compression.fp16, torch.bfloat16: Compression.bf16}
    return wires.get(dtype, Compression.none)


def wire_name(wire: Wire) -> str:
    """Return a name for a wire format that is equal on every rank."""
    if isinstance(wire, Compression):
        return wire.value
    return str(getattr(wire, "__qualname__", type(wire).__qualname__))
