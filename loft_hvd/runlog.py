"""The run log: one JSON object a line, written by rank 0, with what happened to a run.

Every line has ``kind``, ``time_s`` (seconds since 1970) and ``step`` (optimizer steps taken):

* ``run``: ``world_size``, ``host`` (rank 0's), ``script``, its ``commit`` where it lies in a git
  repository, ``version`` of this package; with a balancer ``global_batch_size``, ``policy``,
  ``devices``, ``caps`` and ``nodes``, each rank's node by number, [world_size], ``times_at``, the
  step of the first times, ``num_passes``, the batches of an optimizer step from here on, and
  ``next_batch``, which begins the next one;
* ``schedule``: ``times_at``, ``num_passes`` and ``next_batch``, where they have changed since;
* ``rules``: ``rules`` of an optimizer as text, ``over``, the ranks of a worker; ``watched_from``,
  the step of the first ``suspicion``, or null, where ``note`` says why nobody is watched;
* ``cap``: ``rank``, ``device`` (host/number), ``cap``: its samples at most from now on; ``size``
  that did not fit, ``source``; a run that writes to the same folder honours the newest;
* ``plan``: ``plan_id``, ``first_step``, counted in batches, ``sizes`` [world_size];
* ``times``: ``since``, the step at whose end the interval began; ``ranks``, averages a batch of
  each rank as in ``RankTimes``; ``num_ranks``: of more than ``MOST_ROWS`` so many, evenly spaced
  from the fastest to the slowest;
* ``fit``: ``ranks``, what the policy's models say of the same ranks, as in ``fit_record``;
  ``plan_id`` and ``predicted_s``, what a step of the newest plan should take from now on;
  ``exposed_s``, what steps lately took beyond the usual longest rank's own work;
* ``exchange``: of rank 0's ``num_steps`` steps after ``since``, the usual ``whole_s`` from the
  first bucket's start to the last one's end, and ``waited_s`` that the script waited, for ranks
  that come later too; ``num_bytes`` of the gradients, ``lane``, and ``bytes_per_s`` that the
  slowest rank can send on it, or null;
* ``decision``: why a plan was made, as in ``Decision``;
* ``saved``: ``plan_id`` and ``share``, what it saved of a step in its first interval, against the
  sizes before it at the ranks' speeds of then;
* ``explain``: ``text``, the policy's own words on its fit and its doubts;
* ``noise``: how much gradients differ from sample to sample, as in ``GradientNoise``;
* ``spread``: ``ratios`` [world_size] and ``usual``, how far ranks' gradients lie apart for good, as
  in ``Spread``;
* ``same_data``: ``groups`` of ranks that read the same data, as in ``SameData``;
* ``not_finite``: ``found``, who sent NaN into a mean, as in ``NotFinite``;
* ``scope``: ``scope``, by which values rules judge rows from the next step on;
* ``links``: ``since`` and ``seconds``, as of ``times``; ``rank``, 0, and ``links`` between it and
  each other rank, what they have lost in that time as in ``LinkLosses``; ``num_links``: of more
  than ``MOST_ROWS`` those that lost most;
* ``suspicion``: ``num_steps`` and ``workers``, what is known of each as in ``WorkerReport``, of
  more than ``MOST_ROWS`` the most suspicious;
* ``scalars``: ``values`` by name that a script has given, such as its loss;
* ``store``: ``epoch`` and ``ranks``, what each has read of a sample store in it; of more than
  ``MOST_ROWS`` those that had the least at hand;
* ``fault``: ``error`` and ``text``, written before the error is raised;
* ``thinned``: ``num_lines`` of passing kinds that were left out so far, by thinning or because
  the disk was full.

A number that is not finite is null.

``times``, ``fit``, ``exchange``, ``explain``, ``links``, ``noise``, ``suspicion`` and ``scalars``
are passing:
the newest say most. When the file has reached its limit, half of the lines of each passing kind are
taken out, the older the more, so that the whole run stays in sight. Lines of the other kinds are
never taken out. While the disk is full they wait in memory, and passing ones are left out.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import reprlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from loft_hvd.codec import MAX_LINE_BYTES, parse_json
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError

__all__ = [
    "MOST_ROWS",
    "RunLog",
    "commit_near",
    "find_entries",
    "newest_log",
    "open_run_log",
    "read_json_lines",
    "read_run_log",
]

_logger = logging.getLogger(__name__)

MOST_ROWS = 32  # ranks or workers in a line: a line of 1,000 has 400 kB, one of these 13
# Bounds a file, but for what must stay: a run of weeks must not fill a disk. Thinning as much takes
# 0.08 s of one core, once in some 16 hours of 8 ranks.
_MAX_BYTES = 16 * 1024 * 1024
_MOST_READ = 8 * _MAX_BYTES  # of a file from anywhere: what must stay is not in the bound
_PASSING = ("times", "fit", "exchange", "explain", "links", "noise", "suspicion", "scalars")
_PASSING_HEAD = re.compile(
    rb'{"kind": "(' + "|".join(_PASSING).encode() + rb')", "time_s": [^,]+, "step": (\d+)'
)
_MOST_TEXT = 20_000  # letters of a fault: an engine's own may hold a whole compiler's output


class RunLog:
    """Appends to a file in ``folder``, made if need be; without one it is off."""

    def __init__(
        self,
        folder: str | Path | None,
        *,
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        # Lines come from the training thread and from the heartbeat's, which knows of failures. A
        # signal handler of the script's may write in the midst of a line of the same thread.
        self._lock = threading.RLock()
        self._max_bytes, self._thin_at = max_bytes, max_bytes
        self._num_bytes = 0  # of whole lines in the file
        self._waiting: list[bytes] = []  # lasting lines that the disk has not taken
        self._num_left_out = 0  # passing lines that are in no file, so far
        self._num_told = 0  # of them, those that a line tells of
        self._is_failing = False
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
        """Append a line; kinds and their fields are at the head of this file.

        Where the file cannot be written, one warning says so, and the next line tries again.
        """
        if self.path is None:
            return
        line = self._line(kind, fields)
        with self._lock:
            try:
                if self._num_bytes + len(line) > self._thin_at:
                    self._thin(self.path)
                self._append(self.path, self._told(), *self._waiting, line)
            except OSError as error:  # a full disk must not end the training
                self._keep(line, error, is_passing=kind in _PASSING)
            else:
                self._waiting.clear()
                self._num_told, self._is_failing = self._num_left_out, False

    def write_run(self, **fields: Any) -> None:
        """Append a ``run`` line: these fields, and where and from what sources it runs."""
        if self.path is None:
            return
        script = Path(sys.argv[0] if sys.argv else "")
        self.write(
            "run",
            **fields,
            host=platform.node(),
            script=script.name,  # alone: arguments and folders may hold what is nobody's business
            commit=commit_near(script.parent),
            version=_version(),
        )

    def write_scalars(self, values: Mapping[str, Any]) -> None:
        """Append what a script says of its training, such as its loss; numbers by name.

        Raises:
            ArgumentTypeError: a value is no number, on every rank alike, whoever has the file.
        """
        for name, each in values.items():
            if not _is_number(each):
                raise ArgumentTypeError(
                    f"log_scalars: {name}={reprlib.repr(each)} is not a number; give an int, a "
                    "float or a tensor of one real value, such as loss.mean()"
                )
        if self.path is not None:
            known = {
                name: float(each.item() if isinstance(each, Tensor | np.ndarray) else each)
                for name, each in values.items()
            }
            self.write("scalars", values=known)

    def _told(self) -> bytes:
        """Return a line that tells how much was left out, where no line has told it yet."""
        if self._num_left_out == self._num_told:
            return b""
        return self._line("thinned", {"num_lines": self._num_left_out})

    def _line(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        # ``kind`` comes first in every line: ``find_entries`` looks no further.
        entry = {"kind": kind, "time_s": self._clock(), "step": self.step, **_plain(fields)}
        return (json.dumps(entry, allow_nan=False) + "\n").encode()

    def _append(self, path: Path, *lines: bytes) -> None:
        data = b"".join(lines)
        # Opened for each line: what was written is there when the process is killed. What a full
        # disk has taken in part is written over by the next line.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            at = min(self._num_bytes, os.fstat(file.fileno()).st_size)
            file.truncate(at)
            file.seek(at)
            file.write(data)
        self._num_bytes = at + len(data)

    def _keep(self, line: bytes, error: OSError, *, is_passing: bool) -> None:
        """Keep a line that the disk did not take, if it is a lasting one."""
        if is_passing:
            self._num_left_out += 1
        else:
            self._waiting.append(line)
        if not self._is_failing:
            self._is_failing = True
            _logger.warning(
                "the run log %s cannot be written: %s; plans, caps and faults wait in memory "
                "until it can, times are left out",
                self.path,
                error,
            )

    def _thin(self, path: Path) -> None:
        """Write the file anew with half of it free, as far as passing lines can give way."""
        content = path.read_bytes() if path.exists() else b""  # somebody may have tidied up
        lines = content[: self._num_bytes].splitlines(keepends=True)
        others = [line for line in lines if not line.startswith(_mark("thinned"))]
        kept = _thinned(others, most_bytes=self._max_bytes // 2)
        part = path.with_suffix(".part")  # put in place whole: a crash loses nothing
        try:
            part.write_bytes(b"".join(kept))
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._num_bytes = sum(map(len, kept))
        self._num_left_out += len(others) - len(kept)
        self._num_told = 0
        # Where lasting lines alone fill the file, it grows on, and is thinned less and less often.
        self._thin_at = max(self._max_bytes, 2 * self._num_bytes)

    def faults(self) -> _FaultWriter:
        """Write an error that comes out of the block before it goes on; each one once."""
        return _FaultWriter(self)

    def write_fault(self, error: BaseException) -> None:
        """Write an error, unless it was the last one written too."""
        if error is not self._last_fault:
            self._last_fault = error
            # An engine's own errors say little; notes on them name the rank.
            notes = [str(note) for note in getattr(error, "__notes__", ())]
            text = "\n".join([str(error), *notes])[:_MOST_TEXT]
            self.write("fault", error=type(error).__name__, text=text)


class _FaultWriter:
    """Writes what comes out of a block; quicker than a generator, once a step."""

    __slots__ = ("_log",)

    def __init__(self, log: RunLog) -> None:
        self._log = log

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self._log.write_fault(error)


def _mark(kind: str) -> bytes:
    """Return what the lines of a kind begin with."""
    return json.dumps({"kind": kind})[:-1].encode() + b","


def _thinned(lines: Sequence[bytes], *, most_bytes: int) -> list[bytes]:
    """Return lines with half of each passing kind gone, so often until they are small enough.

    The newest of each kind stays, and so do all lines of the other kinds.
    """
    # A line's number, step and length, by kind; no line is parsed: there may be 100,000.
    passing: dict[bytes, list[tuple[int, int, int]]] = {}
    kept, num_bytes = [], 0  # numbers and bytes of the other lines
    for number, line in enumerate(lines):
        if found := _PASSING_HEAD.match(line):
            entry = number, int(found[2]), len(line)
            passing.setdefault(found[1], []).append(entry)
        else:
            kept.append(number)
            num_bytes += len(line)
    while num_bytes + sum(each[2] for entries in passing.values() for each in entries) > most_bytes:
        if all(len(entries) == 1 for entries in passing.values()):
            break
        for kind, entries in passing.items():
            chosen = _spaced([step for _, step, _ in entries], most=len(entries) // 2)
            passing[kind] = [entries[at] for at in chosen]
    kept += [number for entries in passing.values() for number, _, _ in entries]
    return [lines[number] for number in sorted(kept)]


def _spaced(steps: Sequence[int], *, most: int) -> list[int]:
    """Return which of some lines, the newest last, stay: ``most`` or one, spaced by their age.

    The distance of a line from the next one is at least a share of its age, so that all of a run
    stays in sight: nearly every line of the last day, one an hour of the week before.
    """
    share, chosen = 1.0 / len(steps), list(range(len(steps)))
    while len(chosen) > max(most, 1):
        chosen, least = [], -1.0  # age of the next one that stays
        for at in range(len(steps) - 1, -1, -1):
            age = steps[-1] - steps[at]
            if age > least:
                chosen.append(at)
                least = age * (1.0 + share)
        chosen.reverse()
        share *= 1.5
    return chosen


def _is_number(value: object) -> bool:
    """Say whether float(value) is one, without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    # float() of a greater int fails.
    return isinstance(value, Real) and (not isinstance(value, int) or abs(value) < 2**1000)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def commit_near(folder: Path) -> str | None:
    """Return the commit of the git repository that a folder lies in; None where there is none.

    It reads git's files: a rank under MPI must not start another process.
    """
    try:
        folder = folder.absolute()
    except OSError:  # the working directory is gone
        return None
    for place in (folder, *folder.parents):
        git = place / ".git"
        try:
            if git.is_file():  # of a worktree: the file says where
                git = place / git.read_text(encoding="utf-8").partition(":")[2].strip()
            if not git.is_dir():
                continue
            head = (git / "HEAD").read_text(encoding="utf-8").strip()
            if not head.startswith("ref: "):
                return _hash(head)
            common = git / "commondir"
            home = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
            return _find_ref(home, head[len("ref: ") :])
        except (OSError, ValueError):
            return None
    return None


def _find_ref(home: Path, name: str) -> str | None:
    if (home / name).is_file():
        return _hash((home / name).read_text(encoding="utf-8").strip())
    packed = (home / "packed-refs").read_text(encoding="utf-8").splitlines()
    hashes = [line.split(" ")[0] for line in packed if line.endswith(f" {name}")]
    return _hash(hashes[0]) if hashes else None


def _hash(text: str) -> str | None:
    return text[:12] if re.fullmatch(r"[0-9a-f]{40,64}", text) else None


def _version() -> str | None:
    try:
        return importlib.metadata.version("loft-hvd")
    except importlib.metadata.PackageNotFoundError:
        return None


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
    """Return the lines of a run log, one at least; else a DataError.

    A last line that a crash cut off is left out.
    """
    entries: list[dict[str, Any]] = []
    try:
        for number, entry in read_json_lines(path):
            if not isinstance(entry, dict) or not {"kind", "step"} <= entry.keys():
                raise DataError(f"line {number} has no kind and step: not a run log")
            entries.append(entry)
        if not entries:
            raise DataError("it has no line")
    except (OSError, DataError) as error:
        raise DataError(f"report {path}: {error}; name a loft-*.jsonl of log_dir") from error
    return entries


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yield each line's number and value, but for empty ones and a last one that is cut off.

    Raises:
        OSError: the file cannot be read.
        DataError: it is too long, or has a line before the last that is not JSON.
    """
    with open(path, "rb") as file:
        failed: DataError | None = None  # forgiven where no line follows
        number = num_bytes = 0
        # A line beyond the limit comes in pieces: a file without line ends costs no memory.
        while line := file.readline(MAX_LINE_BYTES + 1):
            number, num_bytes = number + 1, num_bytes + len(line)
            if failed is not None:
                raise failed
            if num_bytes > _MOST_READ:
                raise DataError(f"it has more than {_MOST_READ} bytes")
            try:
                text = line.decode()
                value = parse_json(text) if text.strip() else None
            except ValueError as error:  # UnicodeDecodeError is one
                failed = DataError(f"line {number} is not JSON ({error})")
                continue
            if text.strip():
                yield number, value
        if failed is not None and number == 1:  # not one whole line: no file of ours
            raise failed


def newest_log(path: str | Path) -> Path:
    """Return the run log of that name, or the newest in the folder of that name.

    Raises:
        DataError: the folder has none.
    """
    folder = Path(path)
    try:
        is_folder = folder.is_dir()
    except OSError:  # not allowed, or no name at all: opening it says which
        is_folder = False
    if not is_folder:
        return folder
    logs = _logs_in(folder)
    if not logs:
        raise DataError(
            f"{path}: no run log (loft-*.jsonl) in this folder; name the one given as "
            "log_dir= or LOFT_HVD_LOG_DIR"
        )
    return logs[-1]


def find_entries(folder: str | Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of one kind in all run logs of a folder, oldest first."""
    mark = _mark(kind)
    for path in _logs_in(Path(folder)):
        try:
            with path.open("rb") as file:
                # A line that is too long is cut, and then no JSON.
                lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
                found = [line for line in lines if line.startswith(mark)]
        except OSError as error:
            _logger.warning("the run log %s is not read: %s", path, error)
            continue
        for line in found:
            with suppress(ValueError):  # cut off by a crash
                yield parse_json(line.decode())


def _logs_in(folder: Path) -> list[Path]:
    """Return the run logs of a folder, oldest first."""
    return sorted(filter(_is_file, folder.glob("loft-*.jsonl")), key=_changed_ns)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # in a folder that may be listed and not entered
        return False


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # gone since it was listed
        return 0
