"""What ends a rank's script: whose fault an error is, and what is known of it beyond its words.

A balancer knows which batch an error has hit, the heartbeat tells the other ranks; neither knows
the other.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys
import traceback
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

__all__ = [
    "FailureAnnotator",
    "FailureNote",
    "annotate_failures",
    "describe_failure",
    "interruption",
    "is_of_engine",
    "tell_failure",
]

_logger = logging.getLogger(__name__)
_ENGINE_ERRORS = ("HorovodInternalError", "HostsUpdatedInterrupt")
_MOST_SAMPLES = 2**53  # bound from float64, in which counts travel: whole numbers are exact to here


def is_of_engine(error: BaseException) -> bool:
    """Say whether an error is Horovod's own, so that the cause may be another rank."""
    return type(error).__name__ in _ENGINE_ERRORS and interruption(error) is None


def interruption(error: BaseException) -> BaseException | None:
    """Return what a signal handler has raised inside Horovod's call, which made it its error.

    So torch says that a loader process was killed: its handler raises wherever the script is, and
    Horovod takes every RuntimeError inside its calls for one of its own.
    """
    inner = error.__context__ if type(error).__name__ in _ENGINE_ERRORS else None
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {code for each in handlers if (code := getattr(each, "__code__", None)) is not None}
    # From the call on: a handler that itself calls the engine is no frame of the inner error.
    frames = traceback.walk_tb(None if inner is None else inner.__traceback__)
    return inner if any(frame.f_code in codes for frame, _ in frames) else None


@dataclass(frozen=True)
class FailureNote:
    """What an annotator adds to an error."""

    text: str  # a sentence for the message
    num_samples: int = 0  # samples of the batch that did not fit into memory, or 0


class FailureAnnotator(Protocol):
    """Who knows more of failures, or wants to know of them."""

    def describe_failure(self, error: BaseException) -> FailureNote | None:
        """Add to an error that ends this rank; called again for the same error now and then."""

    def rank_failed(self, rank: int, num_samples: int) -> None:
        """Hear that a rank's memory did not hold a batch; on rank 0, from any thread."""


@functools.cache
def _annotators() -> weakref.WeakSet[FailureAnnotator]:
    """Return who annotates failures in this process."""
    return weakref.WeakSet()


def annotate_failures(annotator: FailureAnnotator) -> None:
    """Ask an annotator about errors that nothing catches, for as long as it lives."""
    _annotators().add(annotator)
    _print_notes_of_uncaught_errors()


def _note_of(error: BaseException) -> FailureNote | None:
    """Return what an annotator knows of an error that ends this rank."""
    notes = (annotator.describe_failure(error) for annotator in list(_annotators()))
    return next((note for note in notes if note is not None), None)


def describe_failure(who: str, error: BaseException) -> FailureNote:
    """Return what the other ranks are told of an error that ends this one."""
    note = _note_of(error)
    text = f"{who} has failed: {type(error).__name__}: {error}"
    if note is None:
        return FailureNote(text)
    return FailureNote(f"{text}; {note.text}", note.num_samples)


def tell_failure(rank: int, num_samples: float) -> None:
    """Tell annotators what another rank has said of its failure."""
    if 0 < num_samples < _MOST_SAMPLES:  # what comes from another rank is checked
        for annotator in list(_annotators()):
            annotator.rank_failed(rank, int(num_samples))


@functools.cache
def _print_notes_of_uncaught_errors() -> None:
    """Say what is known of an error that ends the script; hooked in once a process."""
    previous = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note = _note_of(error)
        previous(kind, error, trace)
        if note is not None:
            _logger.error("%s", note.text)

    sys.excepthook = say
