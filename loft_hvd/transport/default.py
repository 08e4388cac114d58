"""Which transport a call uses when the user names none."""

from __future__ import annotations

from typing import Any

from loft_hvd.errors import LoftError
from loft_hvd.transport.base import Transport
from loft_hvd.transport.horovod import HorovodTransport, horovod_if_initialized
from loft_hvd.transport.local import LocalWorld

__all__ = ["default_transport"]


def default_transport(process_set: Any | None = None) -> Transport:
    """Return Horovod's ranks where ``hvd.init()`` has run, else a world of this process alone.

    Args:
        process_set: a ``hvd.ProcessSet``, for some of Horovod's ranks only.

    Raises:
        LoftError: a process set was given but Horovod is not initialised.
    """
    if horovod_if_initialized() is not None:
        return HorovodTransport(process_set)
    if process_set is not None:
        raise LoftError("process_set needs Horovod: call hvd.init() first")
    return LocalWorld(1).transport(0)
