"""How long threads have waited for other ranks, whoever called what waits.

All that waits for ranks does so inside ``waiting()``: our own waits and, once ``meter_torch`` has
been called, those in torch's collectives (Horovod's: ``horovod_private.py``), whether they are
synchronous or waited for later. So a step's own work can be told from what it waited for.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

__all__ = ["WaitWatcher", "add", "meter", "meter_torch", "seconds", "totals", "waiting", "watchers"]

_T = TypeVar("_T")
_totals: dict[int, float] = {}  # seconds by thread; an ident that is used again goes on
_inside: set[int] = set()  # threads that wait now


_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class WaitWatcher(Protocol):
    """What marks waits on a device's stream."""

    def wait_began(self) -> None:
        """Hear that the calling thread begins to wait."""

    def wait_ended(self) -> None:
        """Hear that it has waited."""


watchers: WeakSet[WaitWatcher] = WeakSet()


class waiting:  # noqa: N801 - used as a function, and quicker than a generator
    """Count the time inside as a wait of this thread for other ranks; within another one, once."""

    __slots__ = ("_began", "_is_outer")

    def __enter__(self) -> None:
        me = threading.get_ident()
        self._is_outer = me not in _inside
        if self._is_outer:
            _inside.add(me)
            for each in list(watchers):
                each.wait_began()
            self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._is_outer:
            add(time.monotonic() - self._began)
            for each in list(watchers):
                each.wait_ended()
            _inside.discard(threading.get_ident())


def add(waited_s: float) -> None:
    """Count seconds as a wait of this thread."""
    me = threading.get_ident()
    _totals[me] = _totals.get(me, 0.0) + waited_s


def totals() -> Mapping[int, float]:
    """Return the seconds that each thread has waited so far, by its ident."""
    return _totals.copy()


def seconds(threads: Iterable[int], since: Mapping[int, float]) -> float:
    """Return how long some threads have waited since ``totals`` were taken."""
    return sum(_totals.get(each, 0.0) - since.get(each, 0.0) for each in threads)


def meter(owner: Any, *names: str) -> None:
    """Have calls of some functions of a module or class count as waits, from now on."""
    for name in names:
        call = getattr(owner, name, None)
        if call is not None and not getattr(call, "is_metered", False):
            setattr(owner, name, _metered(call))


def _metered(call: Callable[..., _T]) -> Callable[..., _T]:
    @functools.wraps(call)
    def wait(*arguments: Any, **options: Any) -> _T:
        if torch.compiler.is_compiling():  # what is traced has no clock
            return call(*arguments, **options)
        with waiting():
            return call(*arguments, **options)

    wait.is_metered = True  # type: ignore[attr-defined]  # asked for above
    return wait


def meter_torch() -> None:
    """Have what waits in collectives of torch.distributed count as waits, from now on.

    Whichever way a script takes to them, it ends in one of these: a collective that is synchronous
    (NCCL's is queued on the current stream, and waits there), or what waits for one.
    """
    if not dist.is_available():
        return
    c10d = torch._C._distributed_c10d
    meter(c10d.ProcessGroup, *_COLLECTIVES)
    meter(c10d.Work, "wait", "synchronize")
    meter(torch._C.Future, "wait")  # as of work.get_future()
    meter(dist, "_broadcast_coalesced")  # DDP's, of a model's buffers in each forward pass
    meter(importlib.import_module("torch.distributed._functional_collectives"), "wait_tensor")
