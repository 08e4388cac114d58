"""What is known of a rank's failure beyond the error's own words, and who hears of it.

A balancer knows which batch an error has hit. It observes failures here, where the heartbeat tells
the other ranks of them; neither knows the other.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

__all__ = [
    "FailureObserver",
    "Note",
    "describe_failure",
    "note_failure",
    "observe_failures",
    "tell_failure",
]

_logger = logging.getLogger(__name__)
_MOST_SAMPLES = 2**53  # what comes from another rank is checked


@dataclass(frozen=True)
class Note:
    """What an observer adds to an error.

    Attributes:
        text: a sentence for the message.
        num_samples: samples of the batch that did not fit into memory, or 0.
    """

    text: str
    num_samples: int = 0


class FailureObserver(Protocol):
    """Who knows more of failures, or wants to know of them."""

    def describe_failure(self, error: BaseException) -> Note | None:
        """Add to an error that ends this rank; called again for the same error now and then."""

    def rank_failed(self, rank: int, num_samples: int) -> None:
        """Hear that a rank's memory did not hold a batch; on rank 0, from any thread."""


@functools.cache
def _observers() -> weakref.WeakSet[FailureObserver]:
    """Return who observes in this process."""
    return weakref.WeakSet()


def observe_failures(observer: FailureObserver) -> None:
    """Ask an observer about errors that nothing catches, for as long as it lives."""
    _observers().add(observer)
    _install_hook()


def note_failure(error: BaseException) -> Note | None:
    """Return what an observer knows of an error that ends this rank."""
    notes = (observer.describe_failure(error) for observer in list(_observers()))
    return next((note for note in notes if note is not None), None)


def describe_failure(who: str, error: BaseException) -> Note:
    """Return what the other ranks are told of an error that ends this one."""
    note = note_failure(error)
    text = f"{who} has failed: {type(error).__name__}: {error}"
    return Note(text) if note is None else Note(f"{text}; {note.text}", note.num_samples)


def tell_failure(rank: int, num_samples: float) -> None:
    """Tell observers what another rank has said of its failure."""
    if 0 < num_samples < _MOST_SAMPLES:
        for observer in list(_observers()):
            observer.rank_failed(rank, int(num_samples))


@functools.cache
def _install_hook() -> None:
    """Say what is known of an error that ends the script, once a process."""
    previous = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note = note_failure(error)
        previous(kind, error, trace)
        if note is not None:
            _logger.error("%s", note.text)

    sys.excepthook = say
