"""Which transport a call uses when the user names none."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from loft_hvd.errors import LoftError
from loft_hvd.transport.base import Transport
from loft_hvd.transport.horovod import HorovodTransport, horovod_if_initialized
from loft_hvd.transport.local import LocalWorld
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

__all__ = ["default_transport"]


def default_transport(process_set: Any | None = None) -> Transport:
    """Return the ranks of Horovod, else of ``torch.distributed``, else this process alone.

    An engine counts once it is initialised.

    Args:
        process_set: a ``hvd.ProcessSet``, for some of Horovod's ranks only.

    Raises:
        LoftError: a process set was given but Horovod is not initialised.
    """
    if horovod_if_initialized() is not None:
        return HorovodTransport(process_set)
    if process_set is not None:
        raise LoftError("process_set needs Horovod: call hvd.init() first")
    if dist.is_available() and dist.is_initialized():
        return _torch_ranks(dist.group.WORLD)
    return LocalWorld(1).transport(0)


@functools.cache
def _torch_ranks(group: Any) -> Transport:
    """Return one transport for each default group: it may have made a Gloo group of its own."""
    return TorchDistributedTransport(group)
