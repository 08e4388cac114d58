"""A ``torch.amp.GradScaler`` among ranks: one scale on all, taken off gradients that are reduced.

Before the reduction it would take it off what is on its way to other ranks, or not, by chance, and
look for infinities in one rank's gradients alone. Nobody is given the scaler: it comes to the
optimizer, and whoever reduces the gradients is told before it looks at them. That there is one is
known by its use.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch

from loft_hvd.config import config
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel

__all__ = ["ScaleCheck", "Unscaling", "is_loss_scaled", "tell_of_unscaling"]

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
    """Which scalers are in use, and who is told of them.

    Listeners are in the order in which they came, which is the same on all ranks.
    """

    used: WeakSet[torch.amp.GradScaler] = field(default_factory=WeakSet)
    listeners: tuple[ref[Unscaling], ...] = ()
    changing: threading.Lock = field(default_factory=threading.Lock)


@functools.cache
def _told() -> _Told:
    return _Told()


def is_loss_scaled() -> bool:
    """Say whether a scaler that is enabled, and still there, has scaled a loss."""
    told = _told()
    with told.changing:  # a set that grows meanwhile is an error
        return any(scaler.is_enabled() for scaler in told.used)


def tell_of_unscaling(listener: Unscaling) -> None:
    """Tell a listener of every use of a scaler from now on, for as long as it lives."""
    told = _told()
    with told.changing:
        kinds: list[type] = [torch.amp.GradScaler, *torch.amp.GradScaler.__subclasses__()]
        for kind in kinds:
            _watch(kind, "scale", _noting)
        for name in ("unscale_", "step"):
            _watch(torch.amp.GradScaler, name, _telling)
        alive = (each for each in told.listeners if each() is not None)
        told.listeners = (*alive, ref(listener))


def _watch(kind: type, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Wrap a method once, if it is the type's own."""
    call = vars(kind).get(name)
    if call is not None and not getattr(call, "is_watched", False):
        wrapped: Any = functools.wraps(call)(wrap(call))
        wrapped.is_watched = True
        setattr(kind, name, wrapped)


def _note(scaler: torch.amp.GradScaler) -> None:
    told = _told()
    with told.changing:
        told.used.add(scaler)


def _noting(call: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: torch.amp.GradScaler, *args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():  # what is traced leaves no notes; step() does
            _note(self)
        return call(self, *args, **options)

    return note


def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    def tell(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **options: Any
    ) -> Any:
        _note(self)
        for each in _told().listeners:
            if (listener := each()) is not None:
                listener.before_unscaling(self, optimizer)
        return call(self, optimizer, *args, **options)

    return tell
