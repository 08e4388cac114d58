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

__all__ = ["default_transport", "torch_transport"]


def default_transport(process_set: Any | None = None) -> Transport:
    """Return the ranks of Horovod, else of ``torch.distributed``, else this process alone.

    An engine counts once it is initialised. A process that a launcher started as one of several
    is never taken for one that is alone, also where the engine is: each would train for itself.

    Args:
        process_set: a ``hvd.ProcessSet``, for some of Horovod's ranks only.

    Raises:
        UsageError: Horovod is not initialised, but a process set was given or a launcher has
            started several ranks; or the engine connects this one alone.
    """
    # Horovod first: a script may use torch.distributed beside it, as for its data.
    if (hvd := horovod_if_initialized()) is not None:
        if config().ranks > 1:
            _check_started("Horovod", hvd.size(), why=_why_horovod(hvd))
        return HorovodTransport(process_set)
    if process_set is not None:
        raise UsageError("process_set needs Horovod: call hvd.init() first")
    if dist.is_available() and dist.is_initialized():
        return torch_transport()
    if config().ranks > 1 or config().is_elastic:
        started = f"one of {config().ranks} ranks" if config().ranks > 1 else "an elastic rank"
        raise UsageError(
            f"a launcher has started this process as {started}, but neither hvd.init() nor "
            "torch.distributed.init_process_group() has been called; call one of them before "
            "anything of loft_hvd (for this process alone: transport=LocalWorld(1).transport(0))"
        )
    return LocalWorld(1).transport(0)  # alone: a world of one, where nothing travels


def torch_transport() -> Transport:
    """Return the ranks of ``torch.distributed``'s default group.

    Raises:
        UsageError: it is not initialised, or connects this rank alone of several.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first"
        )
    why = "init_process_group() was told so, or found no rank and world size of the launcher's"
    _check_started("torch.distributed", dist.get_world_size(), why=why)
    return _torch_ranks(dist.group.WORLD)


def _check_started(engine: str, size: int, *, why: str) -> None:
    """Raise where an engine connects one rank alone of several that a launcher has started."""
    settings = config()
    # Of one alone: a script may connect some of the ranks on purpose, or start more by itself. A
    # launcher's number is that of the start; ranks of an elastic job come and go.
    if settings.is_elastic or settings.ranks == 1 or size > 1:
        return
    raise UsageError(
        f"{settings.launcher} has started this process as one of {settings.ranks} ranks, but "
        f"{engine} connects {size}: {why}. Each such world would train a model of its own, without "
        "a word (if that is wanted: give transport=, such as LocalWorld(1).transport(0))"
    )


def _why_horovod(hvd: Any) -> str:
    """Say why Horovod has not found the ranks that a launcher has started, and the way out."""
    start = f"horovodrun -np {config().ranks} python ..."
    if config().is_torchrun:
        return f"it reads nothing of torchrun's; start `{start}`, or use torch.distributed"
    if not hvd.mpi_built():
        return (
            f"it was built with Gloo alone, without MPI; start `{start}`, or install Open MPI and "
            "build Horovod anew (`make setup`)"
        )
    if not hvd.mpi_enabled():
        return f"it runs on Gloo, by HOROVOD_CONTROLLER; start `{start}`, or unset that"
    return f"it was built with another MPI than the launcher's; start `{start}`"


@functools.cache
def _torch_ranks(group: Any) -> Transport:
    """Return one transport for each default group: it may have made a Gloo group of its own."""
    # Making a group is a collective: a second call might come on one rank alone.
    return TorchDistributedTransport(group)
