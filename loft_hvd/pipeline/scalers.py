"""A ``torch.amp.GradScaler`` among ranks: one scale on all, taken off gradients that are reduced.

Before the reduction it would take it off what is on its way to other ranks, or not, by chance, and
look for infinities in one rank's gradients alone. Nobody is given the scaler: it comes to the
optimizer, and whoever reduces the gradients is told before it looks at them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch

from loft_hvd.config import config
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel

__all__ = ["ScaleCheck", "Unscaling", "is_loss_scaled", "tell_of_unscaling", "watch_scalers"]

_EVERY = 100  # calls of a scaler, one or two a step, between two comparisons; a choice
_ADVICE = (
    "Make the scaler with the same arguments on every rank, and where one is loaded give it to "
    "all: scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=0))"
)


class Unscaling(Protocol):
    """What reduces gradients, and is told of scalers; it must not keep them alive."""

    def before_unscaling(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Hear that a scaler is about to look at the gradients of an optimizer, perhaps another."""


class ScaleCheck:
    """Compares the scales that ranks take off their gradients; every rank asks it alike."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel.sub("scale")
        self._is_silent = channel.world_size == 1 or config().copies == "ignore"
        self._num_calls = 0
        self._scaler: Callable[[], torch.amp.GradScaler | None] = lambda: None

    def use(self, scaler: torch.amp.GradScaler) -> None:
        """Take note of a scaler that is used, and compare its scale, now and then."""
        self._scaler = ref(scaler)
        self._num_calls += 1
        if self._num_calls % _EVERY == 1:
            self.compare()

    def compare(self) -> None:
        """Compare the scale of the scaler that was used last.

        Raises:
            MismatchError: scales differ; names the ranks, and this rank's scale.
        """
        if self._is_silent:
            return
        scaler = self._scaler()
        scale = "none"
        if scaler is not None and scaler.is_enabled():
            scale = str(scaler.get_scale())  # waits for a GPU
        fields = {"the loss scale of torch.amp.GradScaler": scale}
        check_agreement(self._channel, fields, what="unscaling gradients", advice=_ADVICE)


@dataclass
class _Told:
    """Who is told of scalers; in the order in which they came, which is the same on all ranks."""

    used: ref[torch.amp.GradScaler] | None = None  # the one that has scaled a loss last
    listeners: tuple[ref[Unscaling], ...] = ()
    changing: threading.Lock = field(default_factory=threading.Lock)


@functools.cache
def _told() -> _Told:
    return _Told()


def watch_scalers() -> None:
    """See every use of a scaler from now on."""
    told = _told()
    with told.changing:
        for name, wrap in (("scale", _noting), ("unscale_", _telling), ("step", _telling)):
            call = getattr(torch.amp.GradScaler, name)
            if not getattr(call, "tells", False):
                wrapped = functools.wraps(call)(wrap(call))
                wrapped.tells = True  # type: ignore[attr-defined]  # asked for above
                setattr(torch.amp.GradScaler, name, wrapped)


def is_loss_scaled() -> bool:
    """Say whether the scaler that has scaled a loss last is enabled and still in use."""
    used = _told().used
    scaler = None if used is None else used()
    return scaler is not None and scaler.is_enabled()


def tell_of_unscaling(listener: Unscaling) -> None:
    """Tell a listener of every unscaling from now on, for as long as it lives."""
    watch_scalers()
    told = _told()
    with told.changing:
        alive = (each for each in told.listeners if each() is not None)
        told.listeners = (*alive, ref(listener))


def _noting(call: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: torch.amp.GradScaler, *args: Any, **options: Any) -> Any:
        _told().used = ref(self)
        return call(self, *args, **options)

    return note


def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    def tell(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **options: Any
    ) -> Any:
        for each in _told().listeners:
            if (listener := each()) is not None:
                listener.before_unscaling(self, optimizer)
        return call(self, optimizer, *args, **options)

    return tell
