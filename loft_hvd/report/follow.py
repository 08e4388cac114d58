"""A run log that is still being written: what it has got since somebody last looked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from loft_hvd.errors import DataError
from loft_hvd.report.entries import Line, read_line
from loft_hvd.runlog import newest_log

__all__ = ["LogFollower"]


class LogFollower:
    """Reads a log, or the newest of a folder, as far as it is written.

    Only what is new is read, so looking every second costs little. A log that was thinned is read
    anew, and so is a later run's log once it is the newest. Of two jobs that write to one folder
    that is the one which began last: there is no way back to an earlier one.

    Args:
        path: a run log, or a folder.
        stays: keep to the first log that is found.
    """

    def __init__(self, path: str | Path, *, stays: bool = False) -> None:
        self._given, self._stays = path, stays
        self.path: Path | None = None  # the log; None before one could be read
        self.lines: list[Line] = []  # all that is known
        self.new: Sequence[Line] = ()  # of them, those at the end that the last look has brought
        self.is_anew = False  # the last look began at the head of a file
        self._file = (0, 0)  # device and number: a log that was thinned is another file
        self._num_read = self._num_lines = 0  # bytes of whole lines, and these

    def look(self, *, is_needed: bool = False) -> bool:
        """Read what is new; say whether there was anything.

        Args:
            is_needed: a log that is not there, or has no line, is an error and not one to come.

        Raises:
            DataError: a line is none of a run log's; or as ``is_needed`` says.
        """
        self.new, self.is_anew = (), False
        try:
            path = self._find()
        except DataError:  # a folder without one
            if is_needed:
                raise
            return False
        try:
            has_new = self._read(path)
        except OSError as error:  # gone, or not there yet
            if is_needed:
                raise DataError(
                    f"{path}: it cannot be read ({error}); name a loft-*.jsonl, or the folder of "
                    "some that was given as log_dir= or LOFT_HVD_LOG_DIR"
                ) from error
            return False
        if is_needed and not self.lines:
            raise DataError(f"{path}: it has no line yet; look again once the run has begun")
        return has_new

    def _find(self) -> Path:
        if self.path is not None and self._stays:
            return self.path
        newest = newest_log(self._given)
        # By the last change alone two live jobs would take turns.
        return newest if self.path is None else max(self.path, newest, key=_began)

    def _read(self, path: Path) -> bool:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            place = found.st_dev, found.st_ino
            if place == self._file and self._num_read <= found.st_size:
                # What a full disk took in part is written over: then lines have moved.
                with suppress(DataError):
                    return self._take(path, file)
            self.path, self._file, self.lines = path, place, []
            self._num_read = self._num_lines = 0
            self.is_anew = True
            return self._take(path, file)

    def _take(self, path: Path, file: BinaryIO) -> bool:
        file.seek(self._num_read)
        data = file.read()
        *whole, part = data.split(b"\n")  # the last line may be half written
        self.new = [
            read_line(number, _parse(path, number, line))
            for number, line in enumerate(whole, start=self._num_lines + 1)
            if line.strip()
        ]
        self.lines += self.new
        self._num_read += len(data) - len(part)
        self._num_lines += len(whole)
        return bool(self.new)


def _began(path: Path) -> list[tuple[str, int]]:
    """Return what orders logs by the start in their names, loft-20261123-094500-0.jsonl."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", path.name)]


def _parse(path: Path, number: int, line: bytes) -> dict[str, object]:
    what = f"{path}: line {number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON ({error}); name a loft-*.jsonl") from error
    if not isinstance(entry, dict) or not {"kind", "step"} <= entry.keys():
        raise DataError(f"{what} has no kind and step; name a loft-*.jsonl of log_dir")
    return entry
