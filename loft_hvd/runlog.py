"""The run log: one JSON object a line, written by rank 0, with what happened to a run.

Every line has ``kind``, ``time_s`` (seconds since 1970) and ``step`` (optimizer steps taken):

* ``run``: ``world_size``, and with a balancer ``global_batch_size``, ``policy``, ``devices`` and
  ``caps`` [world_size];
* ``cap``: ``rank``, ``device`` (host/number), ``cap``: its samples at most from now on; ``size``
  that did not fit, ``source``; a run that writes to the same folder honours the newest;
* ``plan``: ``plan_id``, ``first_step``, ``sizes`` [world_size];
* ``times``: ``ranks``, averages a batch of each rank as in ``RankTimes``;
* ``fit``: ``ranks``, what the policy's models say of each rank, as in ``fit_record``;
* ``explain``: ``text``, the policy's own words on its fit and its doubts;
* ``spread``: ``ratios`` [world_size] and ``usual``, how far ranks' gradients lie apart for good, as
  in ``Spread``;
* ``suspicion``: ``num_steps`` and ``workers``, what is known of each as in ``WorkerReport``;
* ``fault``: ``error`` and ``text``, written before the error is raised;
* ``full``: nothing more follows, the file has reached its limit.

A number that is not finite is null.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, DataError

__all__ = ["RunLog", "find_entries", "open_run_log", "read_run_log"]

_logger = logging.getLogger(__name__)

# Bounds a file: a run of weeks must not fill a disk.
_MAX_BYTES = 64 * 1024 * 1024


class RunLog:
    """Appends to a file in ``folder``, made if need be, until it is full; without one it is off."""

    def __init__(
        self,
        folder: str | Path | None,
        *,
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._is_full = False
        self._last_fault: BaseException | None = None
        self.step = 0  # optimizer steps taken so far, set by whoever counts them
        # Why there is no file though one was asked for, or empty. Rank 0 must not end alone: ranks
        # tell each other why it cannot write, then all raise.
        self.refusal = ""
        self.path: Path | None = None  # the file
        if folder is not None:
            self.open(folder)

    def open(self, folder: str | Path) -> None:
        """Make a file in a folder, and write there from now on."""
        try:
            self.path = self._make(Path(folder))
        except OSError as error:
            raise ArgumentError(
                f"log_dir={str(folder)!r}: no run log can be made there ({error}); name a folder "
                "that rank 0 may write to"
            ) from error

    def try_open(self, folder: str | Path) -> None:
        """Do as ``open``, but keep its error as ``refusal``, for all ranks to raise together."""
        self.refusal = ""
        try:
            self.open(folder)
        except ArgumentError as error:
            self.refusal = str(error)

    def _make(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        stamp, count = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._clock())), 0
        # A name that no other run has taken: ``touch`` makes the file or fails, in one call.
        while True:
            path = folder / f"loft-{stamp}-{count}.jsonl"
            try:
                path.touch(exist_ok=False)
                return path
            except FileExistsError:
                count += 1

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line; after the one that would not fit, a last one says so.

        Where the file cannot be written, one warning says so and nothing more is tried. Kinds and
        their fields are at the head of this file.
        """
        if self.path is None or self._is_full:
            return
        # ``kind`` comes first in every line: ``find_entries`` looks no further.
        head = {"time_s": self._clock(), "step": self.step}
        line = json.dumps({"kind": kind, **head, **_plain(fields)}, allow_nan=False) + "\n"
        if self._num_bytes + len(line) > self._max_bytes:
            self._is_full = True
            line = json.dumps({"kind": "full", **head}) + "\n"
        self._num_bytes += len(line)
        try:
            # Opened for each line: what was written is there when the process is killed.
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:  # a full disk must not end the training
            self._is_full = True
            _logger.warning("the run log %s ends here: %s", self.path, error)

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Write an error that comes out of the block before it goes on; each one once."""
        try:
            yield
        except Exception as error:
            self.write_fault(error)
            raise

    def write_fault(self, error: BaseException) -> None:
        """Write an error, unless it was the last one written too."""
        if error is not self._last_fault:
            self._last_fault = error
            # An engine's own errors say little; notes on them name the rank.
            notes = [str(note) for note in getattr(error, "__notes__", ())]
            text = "\n".join([str(error), *notes])
            self.write("fault", error=type(error).__name__, text=text)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def open_run_log(log_dir: str | Path | None, *, rank: int) -> RunLog:
    """Return the log of this rank: a file on rank 0, if one was asked for; else one that is off.

    A ``log_dir`` of None takes ``LOFT_HVD_LOG_DIR``. Where the file cannot be made, ``refusal``
    says why: rank 0 must not end alone.
    """
    folder = config().log_dir if log_dir is None else log_dir
    log = RunLog(None)
    if folder is not None and rank == 0:
        log.try_open(folder)
    return log


def read_run_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run log, without a last one cut off by a crash; else a DataError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"report {path}: {error}; name a loft-*.jsonl of log_dir") from error
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # the process was killed while it wrote
                break
            raise DataError(f"report {path}: line {number} is not JSON ({error})") from error
        if not isinstance(entry, dict) or not {"kind", "step"} <= entry.keys():
            raise DataError(f"report {path}: line {number} has no kind and step: not a run log")
        entries.append(entry)
    return entries


def find_entries(folder: str | Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of one kind in all run logs of a folder, oldest first."""
    mark = json.dumps({"kind": kind})[:-1]
    for path in sorted(Path(folder).glob("loft-*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        try:
            with path.open(encoding="utf-8") as file:
                lines = [line for line in file if line.startswith(mark)]
        except (OSError, UnicodeDecodeError) as error:
            _logger.warning("the run log %s is not read: %s", path, error)
            continue
        for line in lines:
            with suppress(ValueError):  # cut off by a crash
                yield json.loads(line)
