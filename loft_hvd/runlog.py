"""The run log: one JSON object a line, written by rank 0, with what happened to a run.

Every line has ``kind``, ``time_s`` (seconds since 1970) and ``step`` (optimizer steps taken):

* ``run``: ``world_size``, ``global_batch_size``, ``policy``;
* ``plan``: ``plan_id``, ``first_step``, ``sizes`` [world_size];
* ``times``: ``ranks``, averages a batch of each rank as in ``explain.RankTimes``;
* ``explain``: ``text``, the policy's own words on its fit and its doubts;
* ``full``: nothing more follows, the file has reached its limit.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loft_hvd.errors import DataError

__all__ = ["RunLog", "read_run_log"]

_log = logging.getLogger(__name__)

_MAX_BYTES = 64 * 1024 * 1024


class RunLog:
    """Appends to one file until it is full.

    Args:
        folder: where the file is made, and the folder itself if need be.
        max_bytes: most bytes of the file.
        clock: seconds since 1970.

    Attributes:
        path: the file.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        Path(folder).mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(clock()))
        stem, count = Path(folder) / f"loft-{stamp}", 0
        while True:  # a name that no other run has taken
            self.path = stem.with_name(f"{stem.name}-{count}.jsonl")
            try:
                self.path.touch(exist_ok=False)
                break
            except FileExistsError:
                count += 1
        self._num_bytes = 0
        self._is_full = False

    def write(self, kind: str, *, step: int, **fields: Any) -> None:
        """Append a line; after the one that would not fit, a last one says so.

        Where the file cannot be written, one warning says so and nothing more is tried.
        """
        if self._is_full:
            return
        line = json.dumps({"kind": kind, "time_s": self._clock(), "step": step, **fields}) + "\n"
        if self._num_bytes + len(line) > self._max_bytes:
            self._is_full = True
            line = json.dumps({"kind": "full", "time_s": self._clock(), "step": step}) + "\n"
        self._num_bytes += len(line)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:  # a full disk must not end the training
            self._is_full = True
            _log.warning("the run log %s ends here: %s", self.path, error)


def read_run_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run log; a last line cut off by a crash is left out.

    Raises:
        DataError: the file cannot be read, or is not a run log.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"report {path}: {error}; name a loft-*.jsonl of log_dir") from error
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"report {path}: line {number} is not JSON ({error})") from error
        if not isinstance(entry, dict) or not {"kind", "step"} <= entry.keys():
            raise DataError(f"report {path}: line {number} has no kind and step: not a run log")
        entries.append(entry)
    return entries
