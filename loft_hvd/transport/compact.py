"""Floats in fewer bytes while they travel, bit for bit the same at the other end.

Exponents of a gradient's values lie close together: ``csrc/wire/compact.cpp`` writes each in 3 or 4
bits instead of 8 (of float16 5). That takes a seventh off float32, three tenths off bfloat16 and a
tenth off float16 where values are like normal ones, at several GB/s a core each way: worth it on
links that are slower than that. Values that would not get shorter travel as they are, 4 bytes more
for each 512.

``message_of`` makes a message, ``room_for`` has space for any of so many values, and ``read`` takes
the values out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loft_hvd._native import extension, require_extension
from loft_hvd.config import config
from loft_hvd.errors import TransportError

__all__ = [
    "SLOW_BYTES_PER_S",
    "code_of",
    "has_messages",
    "is_available",
    "message_of",
    "packet_codec",
    "read",
    "room_for",
]

# Links up to which it pays. Measured (docs/benchmarks.md): a gain of 13 % at 1 Gb/s and a loss of 3
# at 2.5, on hosts with half a core; what lies between is a choice.
SLOW_BYTES_PER_S = 150e6
_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # DType in csrc/rules.h


def is_available() -> bool:
    """Say whether this process can: the extension is built, with these kernels."""
    return hasattr(extension(), "compact_cpu")


def has_messages(dtype: torch.dtype) -> bool:
    """Say whether values of a dtype can be sent so."""
    return dtype in _CODES


def code_of(dtype: torch.dtype) -> int:
    """Return the number of a dtype in csrc/rules.h; -1 for one that cannot be sent so."""
    return _CODES.get(dtype, -1)


def packet_codec() -> object:
    """Return what makes packets of values shorter, for the extension of datagrams."""
    return require_extension().packet_codec(_level())


def room_for(values: Tensor) -> Tensor:
    """Return a buffer, uint8, for any message of as many values."""
    # A fresh one each time: rooms that were kept and used again made no exchange faster.
    _, *kind = _place(values)
    num_bytes = require_extension().compact_room(*kind)
    return torch.empty(num_bytes, dtype=torch.uint8)


def message_of(values: Tensor) -> Tensor:
    """Return a message, uint8, of contiguous values on the CPU."""
    room = room_for(values)
    num_bytes = require_extension().compact_cpu(*_place(values), room.data_ptr(), _level())
    return room[:num_bytes]


def read(room: Tensor, values: Tensor) -> None:
    """Take the values out of the message at the beginning of ``room``.

    Raises:
        TransportError: it is no message of so many values, whatever it is.
    """
    place = _place(values)
    if not require_extension().expand_cpu(room.data_ptr(), room.numel(), *place, _level()):
        raise TransportError(f"what came is no message of {values.numel()} {values.dtype} values")


def _place(values: Tensor) -> tuple[int, int, int]:
    """Return values as kernels take them: address, how many, dtype."""
    if not (values.is_contiguous() and values.device.type == "cpu"):
        raise TransportError(
            f"values of shape {list(values.shape)}, strides {values.stride()} on {values.device} "
            "do not lie one after the other in the CPU's memory; send values.contiguous().cpu()"
        )
    return values.data_ptr(), values.numel(), _CODES[values.dtype]


def _level() -> str:
    return config().isa or ""
