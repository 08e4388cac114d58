"""Traces of ranks and Horovod's timeline in one file, on one clock.

Both are Chrome traces. Ours has a process for each rank, and a lane for each bucket; its times are
of the machine's monotonic clock. Horovod's has a process for each tensor, which would stand between
the ranks, and times since it began. Each file says when its clock began, so all can be told in
microseconds since the first event; Horovod's tensors become lanes of one process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loft_hvd.errors import DataError
from loft_hvd.pipeline.trace import BEGAN

__all__ = ["merge_traces"]

_HOROVOD_BEGAN = "start_time_since_epoch_in_micros"
_HOROVOD_PID = 1_000_000  # of its process here: below it are ranks
_MOST_BYTES = 1 << 27  # of a file: it is read whole, and as values takes some ten times as much

Event = dict[str, Any]


def merge_traces(files: Sequence[str]) -> str:
    """Return one Chrome trace of several files: ranks' traces, and Horovod's timelines.

    A timeline whose job was killed lacks its end; what it has is taken.

    Raises:
        DataError: a file cannot be read, or is neither.
    """
    read = [_read(file, number) for number, file in enumerate(files)]
    first = min((event["ts"] for events in read for event in events if "ts" in event), default=0.0)
    merged = [
        event | {"ts": round(event["ts"] - first, 1)} if "ts" in event else event
        for events in read
        for event in events
    ]
    try:
        return json.dumps({"traceEvents": merged}, allow_nan=False) + "\n"
    except (ValueError, RecursionError) as error:
        raise DataError(f"trace: a value of {', '.join(files)} fits no trace ({error})") from error


def _read(file: str, number: int) -> list[Event]:
    """Return a file's events with times since 1970, in microseconds."""
    path = Path(file)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"trace {file}: it has more than {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"trace {file}: it cannot be read ({error})") from error
    if text.lstrip().startswith("["):
        return list(_of_horovod(file, number, [*_events(text)]))
    return _of_rank(file, text)


def _of_rank(file: str, text: str) -> list[Event]:
    try:
        whole = json.loads(text)
        began = _finite(whole["otherData"][BEGAN])
        events = [dict(event) for event in whole["traceEvents"]]
        return [
            event | {"ts": _finite(_finite(event["ts"]) + began)} if "ts" in event else event
            for event in events
        ]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise DataError(
            f"trace {file}: not a trace of this version ({type(error).__name__}: {error}); name "
            "files of LOFT_HVD_TRACE or HOROVOD_TIMELINE"
        ) from error


def _of_horovod(file: str, number: int, events: Sequence[Event]) -> Iterator[Event]:
    began = next((_began(event) for event in events if _began(event) is not None), None)
    if began is None:
        raise DataError(
            f"trace {file}: no {_HOROVOD_BEGAN}: not a timeline of Horovod 0.21 or newer; name "
            "files of LOFT_HVD_TRACE or HOROVOD_TIMELINE"
        )
    process = _HOROVOD_PID + number
    yield _named("process_name", process, 0, f"Horovod ({Path(file).name})")
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for event in events:
        tensor = event.get("pid", 0)
        arguments = event.get("args")
        of_process = event.get("ph") == "M" and isinstance(arguments, dict) and arguments
        name = of_process.get("name") if of_process else None
        if name is not None and event.get("name") == "process_name":
            yield _named("thread_name", process, tensor, str(name))
        elif event.get("ph") != "M":
            at = _finite_or_none(event.get("ts"))
            if at is not None and math.isfinite(at + began):
                yield event | {"pid": process, "tid": tensor, "ts": at + began}


def _began(event: Mapping[str, Any]) -> float | None:
    arguments = event.get("args")
    began = arguments.get(_HOROVOD_BEGAN) if isinstance(arguments, dict) else None
    return _finite_or_none(began)


def _finite_or_none(value: Any) -> float | None:
    try:
        return _finite(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _finite(value: Any) -> float:
    """Return a number; a ValueError, TypeError or OverflowError where it is none, or not finite."""
    if not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)


def _named(kind: str, process: int, lane: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}


def _events(text: str) -> Iterator[Event]:
    """Yield the objects of a JSON list that may end anywhere."""
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # the list's end, or the file's
            return
        if isinstance(event, dict):
            yield event
