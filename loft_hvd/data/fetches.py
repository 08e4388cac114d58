"""How long scripts wait for the batches of torch's own loaders, whoever made and iterates them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from torch.utils.data import dataloader

__all__ = ["FetchWatcher", "unwatch_fetches", "watch_fetches"]


class FetchWatcher(Protocol):
    """What hears of batches; it must not raise."""

    def fetched(self, seconds: float) -> None:
        """Hear that the calling thread was in a loader for so long."""


@functools.cache
def _watchers() -> WeakSet[Any]:
    """Return who hears of batches in this process, for as long as they live."""
    return WeakSet()


def watch_fetches(watcher: FetchWatcher) -> None:
    """Let something hear of every batch that a torch ``DataLoader`` gives from now on."""
    iterator: Any = dataloader._BaseDataLoaderIter  # those with and without processes are its own
    if not hasattr(iterator.__next__, "untimed"):
        iterator.__next__ = _timed(iterator.__next__)
    _watchers().add(watcher)


def unwatch_fetches(watcher: FetchWatcher) -> None:
    """Let it hear of no more; the last one leaves torch's loaders as they were."""
    _watchers().discard(watcher)
    _leave()


def _leave() -> None:
    iterator: Any = dataloader._BaseDataLoaderIter
    if not _watchers() and hasattr(iterator.__next__, "untimed"):
        iterator.__next__ = iterator.__next__.untimed


def _timed(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(call)
    def fetch(iterator: Any) -> Any:
        began = time.monotonic()
        try:
            return call(iterator)
        finally:
            seconds = time.monotonic() - began
            for watcher in tuple(_watchers()):
                watcher.fetched(seconds)
            _leave()  # where those that watched are gone

    fetch.untimed = call  # type: ignore[attr-defined]  # asked for above
    return fetch
