"""How long threads have waited for other ranks, whoever called what waits.

All that waits for ranks does so inside ``waiting()``: our own waits and, once ``meter_torch`` has
been called, those in torch's collectives (Horovod's: ``horovod_private.py``), whether they are
synchronous or waited for later. So a step's own work can be told from what it waited for.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
import torch.distributed as dist

__all__ = [
    "WaitWatcher",
    "add",
    "meter",
    "meter_torch",
    "seconds",
    "totals",
    "waiting",
    "watch",
    "watch_backward",
]

_T = TypeVar("_T")
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
    """What marks waits on a device's stream, say; it must not raise."""

    def wait_began(self) -> None:
        """Hear that the calling thread begins to wait."""

    def wait_ended(self) -> None:
        """Hear that it has waited."""


@dataclass
class _Meter:
    """What this process has waited; threads only touch entries of their own."""

    totals: dict[int, float] = field(default_factory=dict)  # seconds; an ident may come again
    inside: set[int] = field(default_factory=set)  # threads that wait now
    # Replaced as a whole, as other threads go through it meanwhile.
    watchers: tuple[ref[WaitWatcher], ...] = ()
    in_backward: tuple[Callable[[FrameType], None], ...] = ()
    changing: threading.RLock = field(default_factory=threading.RLock)


@functools.cache
def _meter() -> _Meter:
    return _Meter()


class waiting:  # noqa: N801 - used as a function, and quicker than a generator
    """Count the time inside as a wait of this thread for other ranks; within another one, once."""

    __slots__ = ("_began", "_is_outer")

    def __enter__(self) -> None:
        meter, me = _meter(), threading.get_ident()
        self._is_outer = me not in meter.inside
        if self._is_outer:
            meter.inside.add(me)
            for each in meter.watchers:
                if (watcher := each()) is not None:
                    watcher.wait_began()
            self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._is_outer:
            meter = _meter()
            meter.inside.discard(threading.get_ident())
            add(time.monotonic() - self._began)
            for each in meter.watchers:
                if (watcher := each()) is not None:
                    watcher.wait_ended()


def watch(watcher: WaitWatcher) -> None:
    """Let something hear of waits, in whichever thread, for as long as it lives."""
    meter = _meter()
    with meter.changing:
        alive = (each for each in meter.watchers if each() is not None)
        meter.watchers = (*alive, ref(watcher))


def watch_backward(met: Callable[[FrameType], None]) -> None:
    """Call something with the frame of each metered call that is made within a backward pass."""
    meter = _meter()
    with meter.changing:
        if met not in meter.in_backward:
            meter.in_backward = (*meter.in_backward, met)


def _tell_of_backward() -> None:
    called = _meter().in_backward
    if called and torch._C._current_graph_task_id() != -1:
        for met in called:
            met(sys._getframe(2))


def add(waited_s: float) -> None:
    """Count seconds as a wait of this thread."""
    totals, me = _meter().totals, threading.get_ident()
    totals[me] = totals.get(me, 0.0) + waited_s


def totals() -> Mapping[int, float]:
    """Return the seconds that each thread has waited so far, by its ident."""
    return _meter().totals.copy()


def seconds(threads: Iterable[int], since: Mapping[int, float]) -> float:
    """Return how long some threads have waited since ``totals`` were taken."""
    totals, waited_s = _meter().totals, 0.0
    for each in threads:
        waited_s += totals.get(each, 0.0) - since.get(each, 0.0)
    return waited_s


def meter(owner: Any, *names: str) -> None:
    """Have calls of some functions of a module, or methods of a class, count as waits from now on.

    Of a function that is traced by ``torch.compile`` nothing is counted.
    """
    for name in names:
        call = getattr(owner, name, None)
        if call is not None and not getattr(call, "is_metered", False):
            made = _method(call, name) if isinstance(owner, type) else _function(call)
            made.is_metered = True  # type: ignore[attr-defined]  # asked for above
            setattr(owner, name, made)


def _function(call: Callable[..., _T]) -> Callable[..., _T]:
    @functools.wraps(call)
    def wait(*arguments: Any, **options: Any) -> _T:
        if torch.compiler.is_compiling():  # what is traced has no clock
            return call(*arguments, **options)
        _tell_of_backward()
        with waiting():
            return call(*arguments, **options)

    return wait


def _method(call: Callable[..., _T], name: str) -> Callable[..., _T]:
    def wait(self: Any, *arguments: Any, **options: Any) -> _T:
        _tell_of_backward()
        with waiting():
            return call(self, *arguments, **options)

    # pybind11 looks for a method that a subclass in Python overrides, and knows by the caller's
    # name and ``self`` that it is called from that very method: else it would call this for ever.
    wait.__code__ = wait.__code__.replace(co_name=name)
    return functools.wraps(call)(wait)


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
