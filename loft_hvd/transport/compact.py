"""Floats in fewer bytes while they travel, bit for bit the same at the other end.

Exponents of a gradient's values lie close together: ``csrc/cpu/compact.cpp`` writes each in 3 or 4
bits instead of 8. That takes a seventh off float32, three tenths off bfloat16 and a tenth off
float16 where values are like normal ones, at several GB/s a core each way: worth it on links that
are slower than that. Values of which it would take more travel as they are, 4 bytes a block longer.

``message_of`` makes a message, ``room_for`` has space for any of so many values, and ``read`` takes
the values out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loft_hvd._native import extension, require_extension
from loft_hvd.config import config
from loft_hvd.errors import TransportError

__all__ = ["can_write", "is_available", "message_of", "read", "room_for"]

_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # DType in csrc/rules.h


def is_available() -> bool:
    """Say whether this process can: the extension is built."""
    return extension() is not None


def can_write(values: Tensor) -> bool:
    """Say whether values are of a dtype that has messages."""
    return values.dtype in _CODES


def room_for(values: Tensor) -> Tensor:
    """Return a buffer, uint8, for any message of as many values."""
    # A fresh one each time: rooms that were kept and used again made no exchange faster.
    num_bytes = require_extension().compact_room(values.numel(), _CODES[values.dtype])
    return torch.empty(num_bytes, dtype=torch.uint8)


def message_of(values: Tensor) -> Tensor:
    """Return a message, uint8, of values that lie one after the other in memory."""
    room, code = room_for(values), _CODES[values.dtype]
    num_bytes = require_extension().compact_cpu(
        values.data_ptr(), values.numel(), code, room.data_ptr(), config().isa or ""
    )
    return room[:num_bytes]


def read(room: Tensor, values: Tensor) -> None:
    """Take the values out of the message at the beginning of ``room``.

    Raises:
        TransportError: it is no message of so many values, whatever it is.
    """
    code = _CODES[values.dtype]
    try:
        require_extension().expand_cpu(
            room.data_ptr(),
            room.numel(),
            values.data_ptr(),
            values.numel(),
            code,
            config().isa or "",
        )
    except ValueError as error:
        raise TransportError(str(error)) from error
