"""Which transport a call uses when the user names none."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from loft_hvd.config import config
from loft_hvd.errors import UsageError
from loft_hvd.transport.base import Transport
from loft_hvd.transport.horovod import HorovodTransport, horovod_if_initialized
from loft_hvd.transport.local import LocalWorld
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

__all__ = ["default_transport"]


def default_transport(process_set: Any | None = None) -> Transport:
    """Return the ranks of Horovod, else of ``torch.distributed``, else this process alone.

    An engine counts once it is initialised. A process that a launcher started as one of several
    is never taken for one that is alone: it would train without the others.

    Args:
        process_set: a ``hvd.ProcessSet``, for some of Horovod's ranks only.

    Raises:
        UsageError: Horovod is not initialised, but a process set was given or a launcher has
            started several ranks.
    """
    # Horovod first: a script may use torch.distributed beside it, as for its data.
    if horovod_if_initialized() is not None:
        return HorovodTransport(process_set)
    if process_set is not None:
        raise UsageError("process_set needs Horovod: call hvd.init() first")
    if dist.is_available() and dist.is_initialized():
        return _torch_ranks(dist.group.WORLD)
    if config().ranks > 1 or config().is_elastic:
        started = f"one of {config().ranks} ranks" if config().ranks > 1 else "an elastic rank"
        raise UsageError(
            f"a launcher has started this process as {started}, but neither hvd.init() nor "
            "torch.distributed.init_process_group() has been called; call one of them before "
            "anything of loft_hvd (for this process alone: transport=LocalWorld(1).transport(0))"
        )
    return LocalWorld(1).transport(0)  # alone: a world of one, where nothing travels


@functools.cache
def _torch_ranks(group: Any) -> Transport:
    """Return one transport for each default group: it may have made a Gloo group of its own."""
    # Making a group is a collective: a second call might come on one rank alone.
    return TorchDistributedTransport(group)
