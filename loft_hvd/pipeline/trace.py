"""Where a step's time goes, as a Chrome trace: one row for each bucket, or part of one.

Open the file in https://ui.perfetto.dev or chrome://tracing. Times are microseconds of the
machine's monotonic clock, so that files of ranks on one machine can be laid over each other; when
that clock began is in the file, so that Horovod's timeline can (``loft-hvd trace``).
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loft_hvd.config import config
from loft_hvd.errors import DataError
from loft_hvd.files import write_whole

__all__ = ["BEGAN", "Trace", "TraceRow", "trace_of", "trace_to"]

_logger = logging.getLogger(__name__)
BEGAN = "clock_began_since_epoch_in_micros"  # the name that a file has it under
_MOST_SPANS = 200_000  # some 30 MB of JSON


class Trace:
    """The spans of one rank; any thread may add to it. Those after ``most_spans`` are left out."""

    def __init__(
        self,
        path: Path,
        rank: int,
        *,
        most_spans: int = _MOST_SPANS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.clock = clock
        self.num_left_out = 0
        self._rank = rank
        self._most_spans = most_spans
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler of the script's may reduce, too
        self._rows: dict[str, int] = {}
        self._spans: list[tuple[str, int, float, float]] = []

    def add(self, row: str, name: str, began_s: float, ended_s: float) -> None:
        """Add a span to a row."""
        with self._lock:
            at = self._rows.setdefault(row, len(self._rows))
            if len(self._spans) < self._most_spans:
                self._spans.append((name, at, began_s, ended_s))
            else:
                self.num_left_out += 1

    def write(self) -> None:
        """Write the file anew, with all spans so far.

        Raises:
            DataError: it cannot be written, as on a full disk; what was there stays.
        """
        if self._process != os.getpid():
            return  # a forked copy: the file is its parent's, and so is who holds its lock
        with self._lock:  # a copy: writing takes a second, in which hooks must not wait
            spans, rows = list(self._spans), dict(self._rows)
        events: list[dict[str, object]] = [
            _named("process_name", self._rank, 0, f"rank {self._rank}")
        ]
        events += [_named("thread_name", self._rank, at, row) for row, at in rows.items()]
        events += [
            {
                "name": name,
                "ph": "X",
                "pid": self._rank,
                "tid": at,
                "ts": round(1e6 * began_s, 1),  # microseconds, as the format wants them
                "dur": round(1e6 * (ended_s - began_s), 1),
            }
            for name, at, began_s, ended_s in spans
        ]
        began_us = round(1e6 * (time.time() - self.clock()))
        whole = {"traceEvents": events, "otherData": {BEGAN: began_us}}
        write_whole(self.path, json.dumps(whole) + "\n", what="the trace", makes_folder=True)
        if self.num_left_out:
            _logger.warning(
                "%s holds the first %d spans; %d later ones are left out",
                self.path,
                len(spans),
                self.num_left_out,
            )

    def seconds(self) -> dict[str, float]:
        """Return how long the spans of each name have taken together."""
        totals: dict[str, float] = {}
        with self._lock:
            for name, _, began_s, ended_s in self._spans:
                totals[name] = totals.get(name, 0.0) + ended_s - began_s
        return totals


def _named(kind: str, rank: int, row: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}


class TraceRow:
    """One row of the picture: spans that follow each other, written as each ends.

    Without a trace they go nowhere.
    """

    def __init__(self, trace: Trace | None, name: str) -> None:
        self.name = name
        self._trace = trace
        self._span = ""
        self._began_s = 0.0

    def enter(self, span: str) -> None:
        """End the open span, if any, and begin another; "" begins none."""
        if self._trace is not None:  # else two comparisons are all that a row costs
            now = self._trace.clock()
            if self._span:
                self._trace.add(self.name, self._span, self._began_s, now)
            self._span, self._began_s = span, now

    def leave(self) -> None:
        """End the open span."""
        self.enter("")

    def row(self, name: str) -> TraceRow:
        """Return another row of the same trace."""
        return TraceRow(self._trace, name)


@dataclass
class _Chosen:
    """What this process traces to: the environment's file, unless a script has named another."""

    file: str | Path | None
    traces: dict[int, Trace] = field(default_factory=dict)


@functools.cache
def _chosen() -> _Chosen:
    return _Chosen(config().trace_file)


def trace_to(file: str | Path | None) -> None:
    """Let engines that are made from now on trace to a file; None for no trace."""
    _chosen().file = file
    _chosen().traces.clear()


def trace_of(rank: int) -> Trace | None:
    """Return this process's trace, written when it ends; None where there is none.

    Each rank writes a file of its own: ``LOFT_HVD_TRACE=runs/trace.json`` makes
    ``runs/trace.0.json``, ``runs/trace.1.json`` and so on.
    """
    chosen = _chosen()
    if chosen.file is None:
        return None
    if rank not in chosen.traces:
        path = Path(chosen.file)
        place = path.with_name(f"{path.stem}.{rank}{path.suffix or '.json'}")
        chosen.traces[rank] = Trace(place, rank)
        atexit.register(_write_at_exit, chosen.traces[rank])
    return chosen.traces[rank]


def _write_at_exit(trace: Trace) -> None:
    try:
        trace.write()
    except DataError as error:  # a full disk must not make a training that is done look failed
        _logger.warning("%s", error)
