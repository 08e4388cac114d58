"""The shelf: samples that a rank keeps, in memory and on disk, shared with its loader processes.

Both halves are one row of units of 64 bytes: first memory, then disk. A record begins at a unit::

    magic, length (4 bytes each), sample, checksum (8 each)   the bytes of the sample   padding

and ``index[sample]`` is its first unit plus 1, or 0. Records are only ever added; none is evicted.
A process writes under a lock and sets the index last: readers need no lock, and a writer that is
killed leaves no half record.

Where the data set has changed all records are thrown away, and a new *generation* of them begins in
the same place. Who reads notes the generation first and looks at it again once the bytes are
copied: where it has changed, what was copied is nothing.

Memory is a file without a name (``memfd_create``): forked and spawned processes map the same pages,
and it is gone with the last of them. The file on disk stays, and the next run reads it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.errors import DataError, MissingDependencyError

try:
    import xxhash
except ImportError as error:  # the store is an extra
    raise MissingDependencyError(
        "loft_hvd.SampleStore needs xxhash: pip install 'loft_hvd[store]'"
    ) from error

__all__ = ["Shelf", "checksum"]

_logger = logging.getLogger(__name__)
_UNIT = 64  # bytes; bound from the index: 2**32 units are 256 GiB, and a cache line has 64
_RECORD = struct.Struct("<IIQQ")  # magic, length, sample, checksum
_MAGIC = 0x54464F4C
# At the start of the file on disk: format, samples, identity, the user's version.
_FILE = struct.Struct("<8sQQQ")
_FORMAT = b"loftkep2"
_LOCK_S = 10.0  # a choice: loader processes of a job that was killed notice within 5 s
# Of all processes of the rank: samples and bytes by where they came from, and what went wrong.
_COUNTERS = (
    "own", "peer", "source", "own_bytes", "peer_bytes", "corrupt", "peer_us", "source_us", "checked"
)  # fmt: skip
# How far the shelf is full, how many copies of what other ranks keep it may still take, which
# generation of records it has, which one all ranks know of, and whether it is checked no more.
_TAILS = (
    "memory_units", "disk_units", "is_full", "is_disk_closed", "copies_left", "has_homes",
    "generation", "settled", "is_unchecked",
)  # fmt: skip
_ANY_NUMBER = 1 << 62
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name
_CLEARED_BYTES = 1 << 18  # in one call, a choice: 0.1 ms where memory is at hand, 1 ms where not
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 0.01  # choices: a record is written in 20 to 400 us
_Bytes = npt.NDArray[np.uint8]


def checksum(data: Any) -> int:
    """Return 64 bits of ``data``; XXH3, which is faster than memory is read."""
    return int(xxhash.xxh3_64_intdigest(data))


def _share_bytes(name: str, num_bytes: int) -> int:
    """Return a file without a name, of zeros that take no memory until they are written."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(num_bytes, 1))
    return descriptor


def _map_bytes(descriptor: int, num_bytes: int) -> _Bytes:
    """Return the bytes of a shared file, which all processes see."""
    if num_bytes == 0:
        return np.zeros(0, np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


def _close_all(descriptors: list[int]) -> None:
    """Close what ``_share_bytes`` and ``_open_file`` have opened."""
    for descriptor in descriptors:
        os.close(descriptor)


class Shelf:
    """Samples kept within a budget of memory and one of disk.

    Args:
        num_samples: samples of the data set.
        memory_bytes: most bytes of records in memory.
        disk_bytes: most bytes of records on disk.
        path: the file on disk; needed where ``disk_bytes`` is above 0.
        identity: 63 bits that say which data set this is; a file of another one is begun anew.
        version: 63 bits that say which version of it.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        memory_bytes: int,
        disk_bytes: int = 0,
        path: Path | None = None,
        identity: int = 0,
        version: int = 0,
    ) -> None:
        self.num_samples = num_samples
        self.path = path
        sizes = [memory_bytes // _UNIT, disk_bytes // _UNIT if path else 0]
        # [index, numbers, memory]: what other processes get, beside the file on disk.
        numbers = 8 * (len(_COUNTERS) + len(_TAILS))
        descriptors = [
            _share_bytes("loft_hvd index", 10 * num_samples),
            _share_bytes("loft_hvd numbers", numbers),
            _share_bytes("loft_hvd samples", sizes[0] * _UNIT),
        ]
        self._limits = sizes  # units that may be taken
        if path is not None:
            descriptors.append(_open_file(path, num_samples, identity, version))
        self._map(descriptors)
        self.keepers[:] = -1
        self._tails[4] = _ANY_NUMBER
        if path is not None:
            self._find_records()

    def __getstate__(self) -> dict[str, Any]:
        """Describe the shelf for a process of this rank that was not forked."""
        names = [f"/proc/{os.getpid()}/fd/{each}" for each in self.descriptors]
        return self.description | {"path": self.path, "names": names}

    @property
    def description(self) -> dict[str, Any]:
        """What ``attached`` needs, beside the open files, in a process that only reads."""
        return {"num_samples": self.num_samples, "path": None, "limits": self._limits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attach(state, [os.open(name, os.O_RDWR) for name in state["names"]])

    @classmethod
    def attached(cls, state: dict[str, Any], descriptors: list[int]) -> Shelf:
        """Return a shelf that another process made, from its state and its open files."""
        shelf = cls.__new__(cls)
        shelf._attach(state, descriptors)
        return shelf

    def _attach(self, state: dict[str, Any], descriptors: list[int]) -> None:
        self.num_samples, self.path = state["num_samples"], state["path"]
        self._limits = state["limits"]
        self._map(descriptors)

    def _map(self, descriptors: list[int]) -> None:
        self.descriptors = descriptors
        table = _map_bytes(descriptors[0], 10 * self.num_samples)
        self._index = table[: 4 * self.num_samples].view(np.uint32)
        # Rank that keeps each sample, as all ranks know it, and rank that has a copy, plus 1: for
        # the owner of the shelf to fill in.
        ranks = table[4 * self.num_samples : 8 * self.num_samples].view(np.int16)
        self.keepers, self.copies = ranks[: self.num_samples], ranks[self.num_samples :]
        flags = table[8 * self.num_samples :].view(np.bool_)
        self._is_home = flags[: self.num_samples]
        # What an earlier run has kept, here or at another rank, and nobody has read here since.
        self.is_of_earlier_run = flags[self.num_samples :]
        numbers = 8 * (len(_COUNTERS) + len(_TAILS))
        table = _map_bytes(descriptors[1], numbers).view(np.int64)
        self._counters, self._tails = table[: len(_COUNTERS)], table[len(_COUNTERS) :]
        self._memory_units = self._limits[0]
        self._halves = [_map_bytes(descriptors[2], self._memory_units * _UNIT)]
        if len(descriptors) == 4:
            # A file may be larger than what this run may fill: what is in it is read anyway.
            units = max(_units(os.fstat(descriptors[3]).st_size), self._limits[1])
            os.ftruncate(descriptors[3], units * _UNIT)
            self._halves.append(_map_bytes(descriptors[3], units * _UNIT))
        self._views = [half.data for half in self._halves]
        self._lock = threading.Lock()
        self._lock_pid = os.getpid()
        self._is_left_out = False  # whether the last change of a counter was
        self._added = [0, 0]  # records that this process put into memory, and their units
        weakref.finalize(self, _close_all, descriptors)

    @contextlib.contextmanager
    def _locked(self, *, is_patient: bool = True) -> Iterator[None]:
        """Exclude other threads, and other processes, even such as a fork has made."""
        if self._lock_pid != os.getpid():  # forked: a thread of the parent may have held it
            self._lock, self._lock_pid = threading.Lock(), os.getpid()
        with self._lock:
            # The kernel lets go of it when a process ends, however it ends.
            lock = functools.partial(fcntl.lockf, self.descriptors[1])
            _wait_for_lock(lock, "its memory", limit_s=_LOCK_S if is_patient else 0.0)
            try:
                yield
            finally:
                fcntl.lockf(self.descriptors[1], fcntl.LOCK_UN)

    def close(self) -> None:
        """Let another shelf use the file: no more is added to it, what is kept stays readable."""
        self._tails[3] = 1
        if len(self.descriptors) == 4:
            fcntl.flock(self.descriptors[3], fcntl.LOCK_UN)

    # Reading.

    def held(self) -> npt.NDArray[np.bool_]:
        """Return which samples are kept, [num_samples]."""
        held: npt.NDArray[np.bool_] = self._index != 0
        return held

    def find(self, sample: int) -> tuple[memoryview, int] | None:
        """Return the bytes of a sample and their checksum, which are not compared yet.

        None when it is not kept, or when its head is broken: then it is dropped, as by ``read``.
        """
        unit = int(self._index[sample])
        if unit == 0:
            return None
        found = self._record(*self._place(unit - 1))
        if found is None or found[0] != sample:
            self._drop(sample, unit)
            return None
        return found[1:]

    def read(self, sample: int) -> tuple[memoryview, int] | None:
        """Return the bytes of a sample and their checksum; None when it is not kept, or broken."""
        unit = int(self._index[sample])
        found = self.find(sample)
        if found is not None and checksum(found[0]) != found[1]:
            self._drop(sample, unit)
            return None
        return found

    def _drop(self, sample: int, unit: int) -> None:
        """Keep a damaged sample no more, unless somebody else has dropped it or kept another.

        Between the look and the change another process may do either: that costs one read of the
        source.
        """
        if int(self._index[sample]) != unit:
            return
        half, _ = self._place(unit - 1)
        self._index[sample] = 0
        self.count(corrupt=1)
        _logger.warning(
            "sample %d is damaged %s: it is read from the source again",
            sample, f"in {self.path or 'the file on disk'}" if half else "in memory",
        )  # fmt: skip

    def _place(self, unit: int) -> tuple[int, int]:
        """Return the half and the first byte in it: unit 5 of 4 + 8 is byte 64 of half 1."""
        half = int(unit >= self._memory_units)
        return half, (unit - half * self._memory_units) * _UNIT

    def _record(self, half: int, begin: int) -> tuple[int, memoryview, int] | None:
        """Return sample, bytes and checksum of the record at ``begin``; None where none is."""
        view = self._views[half]
        if begin + _RECORD.size > len(view):
            return None
        magic, length, sample, digest = _RECORD.unpack_from(view, begin)
        begin += _RECORD.size
        if magic != _MAGIC or begin + length > len(view) or sample >= self.num_samples:
            return None
        return sample, view[begin : begin + length], digest

    # Writing.

    def add(
        self,
        sample: int,
        data: bytes | memoryview,
        digest: int | None = None,
        *,
        is_copy: bool = False,
        generation: int | None = None,
    ) -> bool:
        """Keep a sample where there is room; says whether it is kept now.

        ``is_copy`` is one that another rank keeps: of those only ``copies_left`` are taken, and
        none that has a copy already. ``generation`` is that of the shelf when reading the sample
        began: in another one it is not kept, for it may be an old one.
        """
        if self._index[sample]:
            return True
        if self.is_full or (is_copy and not self._takes_copy(sample)):
            return False
        units = _units(_RECORD.size + len(data))
        digest = checksum(data) if digest is None else digest
        with self._locked():
            if generation not in (None, self.generation):
                return False
            if self._index[sample]:
                return True
            if is_copy and not self._takes_copy(sample):
                return False
            # Disk first: it outlives the run, and what is read of it often is in memory anyway.
            for half in reversed(range(len(self._halves))):
                tail = int(self._tails[half])
                is_open = tail + units <= self._limits[half] and not self._tails[2 + half]
                if is_open and self._write(half, tail, sample, data, digest):
                    self._tails[half] = tail + units
                    if half == 0:
                        self._added = [self._added[0] + 1, self._added[1] + units]
                    self._index[sample] = half * self._memory_units + tail + 1
                    self._tails[4] -= int(is_copy)
                    return True
            self._tails[2] = 1
        return False

    def empty(self, generation: int) -> bool:
        """Throw away all that was kept before a generation; False where somebody has done so."""
        with self._locked():
            if generation <= self.generation:
                return False
            # Before anything is written over: see the head of this file.
            self._tails[6] = generation
            self._index[:] = 0
            self.is_of_earlier_run[:] = False
            self._tails[:3] = 0
            if len(self._halves) == 2:
                self._tails[1] = _units(_FILE.size)
                self._empty_file()
        return True

    def _empty_file(self) -> None:
        try:
            self._end_records(_units(_FILE.size) * _UNIT)
        except OSError as error:
            self._tails[3] = 1
            _logger.warning("%s cannot be emptied (%s): it is removed", self.path, error)
            if self.path is not None:  # the file's owner knows it, its server does not
                self.path.unlink(missing_ok=True)

    def _end_records(self, begin: int) -> None:
        """Write what a later run takes for the end of the records on disk."""
        if begin + _RECORD.size <= len(self._views[1]):
            self._put(1, begin, bytes(_RECORD.size))

    @property
    def generation(self) -> int:
        """How often all that was kept was thrown away, by ranks together."""
        return int(self._tails[6])

    @property
    def is_settled(self) -> bool:
        """Whether all ranks know of this generation: until then none is asked for samples."""
        return int(self._tails[6]) == int(self._tails[7])

    def settle(self, generation: int) -> None:
        """Note that all ranks know of a generation."""
        self._tails[7] = generation

    @property
    def is_unchecked(self) -> bool:
        """Whether what is kept is compared with the data set no more."""
        return bool(self._tails[8])

    def end_checks(self) -> bool:
        """Have it compared no more; False where somebody has said so before."""
        with self._locked():
            was_unchecked, self._tails[8] = self.is_unchecked, 1
        return not was_unchecked

    @contextlib.contextmanager
    def clearing(self, num_samples: int) -> Iterator[None]:
        """Have memory for so many more samples cleared on a thread, while the caller reads them.

        New memory is most of what keeping a sample costs: 0.4 ms for 110 kB where a virtual machine
        gets it from its host page by page, 0.05 ms where it was cleared before. A source that is
        waited for leaves the time. Samples are taken to be as long as those that this process has
        put into memory so far. Of processes that read side by side each clears from the same place.
        """
        begin, (num_added, units) = int(self._tails[0]), self._added
        end = min(begin + num_samples * units // max(num_added, 1), self._memory_units)
        is_over = threading.Event()
        args = is_over, self._halves[0][begin * _UNIT : end * _UNIT]
        thread = threading.Thread(target=_clear, args=args, name="loft_hvd-clear", daemon=True)
        is_started = begin < end
        if is_started:
            try:
                thread.start()
            except RuntimeError:  # too many threads: it saves time, nothing else
                is_started = False
        try:
            yield
        finally:
            is_over.set()
            if is_started:
                thread.join()  # for one call of ``_CLEARED_BYTES``

    def set_homes(self, is_home: npt.NDArray[np.bool_]) -> None:
        """Say which samples this rank has anyway, outside the shelf, [num_samples]."""
        if is_home.any() or self._tails[5]:
            self._is_home[:] = is_home
            self._tails[5] = 1

    def is_home(self, sample: int) -> bool:
        """Whether this rank has a sample anyway."""
        return bool(self._tails[5]) and bool(self._is_home[sample])

    def _takes_copy(self, sample: int) -> bool:
        # Until copies are limited nobody counts on any, and the table of them is not looked at.
        left = int(self._tails[4])
        return left > _ANY_NUMBER // 2 or (left > 0 and self.copies[sample] == 0)

    @property
    def copies_left(self) -> int:
        """How many more samples that another rank keeps are kept here, too; any at first."""
        return int(self._tails[4])

    @copies_left.setter
    def copies_left(self, value: int) -> None:
        self._tails[4] = value

    def allow_copies(self) -> None:
        """Keep any copy that has room: nobody counts on what is kept."""
        self._tails[4] = _ANY_NUMBER

    @property
    def room(self) -> int:
        """Samples that there is room for, if they are as long as those kept; 0 without any."""
        num_kept, taken = self.num_kept, sum(self._tails[:2].tolist())
        if self.is_full or num_kept == 0:
            return 0
        limits = [self._limits[0], 0 if self._tails[3] else self._limits[1]]
        free = [
            max(each - tail, 0) for each, tail in zip(limits, self._tails[:2].tolist(), strict=True)
        ]
        return int(sum(free) * num_kept // max(taken, 1))

    @property
    def is_full(self) -> bool:
        """Whether a sample had no room; smaller ones are not tried any more."""
        return bool(self._tails[2])

    def _write(self, half: int, unit: int, sample: int, data: Any, digest: int) -> bool:
        """Write a record; says whether there was room.

        By calls, not through the map: new pages take half the time, and where the disk is full the
        call fails, while a fault would end the process.
        """
        begin = unit * _UNIT
        head = _RECORD.pack(_MAGIC, len(data), sample, digest)
        try:
            # The head last: a later run takes what stands behind a head for a record.
            self._put(half, begin + _RECORD.size, data)
            if half and self.generation:  # behind it are records of the generation before
                self._end_records((unit + _units(_RECORD.size + len(data))) * _UNIT)
            self._put(half, begin, head)
        except OSError as error:
            self._tails[2 + half] = 1
            place = f"the disk of {self.path}" if half else "the memory of this rank's samples"
            why = "is full" if error.errno == errno.ENOSPC else f"failed ({error})"
            _logger.warning("%s %s: samples are no longer kept there; those kept stay", place, why)
            return False
        return True

    def _put(self, half: int, begin: int, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self.descriptors[2 + half], rest, begin)
            rest, begin = rest[written:], begin + written

    def _find_records(self) -> None:
        """Fill the index from the file on disk, up to its first broken record."""
        unit = _units(_FILE.size)
        while (found := self._record(1, unit * _UNIT)) is not None:
            sample, data, _ = found
            # Of two records the later: it is there because the earlier could not be read.
            self._index[sample] = self._memory_units + unit + 1
            unit += _units(_RECORD.size + len(data))
        self._tails[1] = unit

    # What happened, over all processes.

    def count(self, **changes: int) -> None:
        """Add to counters, by name; left out while another process does not let go of the lock."""
        # Such as a loader process that was stopped. No training ends for want of a number, nor
        # waits for it again and again.
        try:
            with self._locked(is_patient=not self._is_left_out):
                for name, change in changes.items():
                    self._counters[_COUNTERS.index(name)] += change
            self._is_left_out = False
        except BlockingIOError as error:
            if not self._is_left_out:
                _logger.warning("%s: until it lets go nothing is counted", error)
            self._is_left_out = True

    @property
    def counters(self) -> dict[str, int]:
        """What was read since the start, by all processes of the rank."""
        return dict(zip(_COUNTERS, self._counters.tolist(), strict=True))

    @property
    def num_kept(self) -> int:
        """Samples kept."""
        return int(np.count_nonzero(self._index))

    @property
    def bytes_kept(self) -> tuple[int, int]:
        """Bytes of memory and of disk that are taken."""
        memory, disk = self._tails[:2].tolist()
        return memory * _UNIT, disk * _UNIT


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _advise(begin: int, num_bytes: int, advice: int) -> int:
    """Call ``madvise``; unlike mmap's own method it lets other threads run meanwhile."""
    return int(_libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice))


def _clear(is_over: threading.Event, memory: _Bytes) -> None:
    """Have the kernel give pages to memory and clear them, until it has or ``is_over``.

    What is in pages that are there stays. Where the kernel does not know this call nothing happens.
    """
    end = memory.ctypes.data + memory.nbytes
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    while begin < end and not is_over.is_set():
        num_bytes = min(_CLEARED_BYTES, end - begin)
        if _advise(begin, num_bytes, _POPULATE_WRITE) != 0:
            return
        begin += num_bytes


def _units(num_bytes: int) -> int:
    return -(-num_bytes // _UNIT)


def _wait_for_lock(lock: Callable[[int], object], what: str, *, limit_s: float) -> None:
    """Take a lock of the kernel's; a BlockingIOError when another has it for too long."""
    until, pause = time.monotonic() + limit_s, _SHORTEST_SLEEP_S
    while True:
        try:
            lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # POSIX leaves the choice to systems
            if time.monotonic() > until:
                raise BlockingIOError(
                    f"the store's lock on {what} was held by another process for {limit_s:g} s; "
                    "it is stopped, or very slow"
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
        else:
            return


def _open_file(path: Path, num_samples: int, identity: int, version: int) -> int:
    """Open the file of an earlier run, or begin it anew where it is of other data."""
    head = _FILE.pack(_FORMAT, num_samples, identity, version)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(path)
        found = os.pread(descriptor, _FILE.size, 0)
        if found == head:
            return descriptor
        if found:
            is_same = found[:-8] == head[:-8]
            _logger.warning(
                "the samples in %s are thrown away: they were kept %s", path,
                "with another version= of the data set" if is_same
                else "of another data set (its type, its length or samples differ; one that draws "
                "at random when it is read differs each time), or by another version of loft_hvd",
            )  # fmt: skip
        try:
            return _begun_anew(path, head)
        finally:
            os.close(descriptor)
    except OSError as error:
        in_use = isinstance(error, BlockingIOError)
        why = "another process uses it" if in_use else str(error)
        raise DataError(
            f"the store's file {path} cannot be used: {why}; give each job a folder= of its own "
            "that can be written, or disk_bytes=0"
        ) from error


def _begun_anew(path: Path, head: bytes) -> int:
    """Put a new file in the place of another, and return it open."""
    # Never emptied in place: another store may still read what it has mapped.
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = _opened(fresh)
    try:
        os.posix_fallocate(descriptor, 0, _UNIT)
        os.pwrite(descriptor, head, 0)
        os.replace(fresh, path)
    except OSError:  # such as a full disk
        os.close(descriptor)
        fresh.unlink(missing_ok=True)
        raise
    return descriptor


def _opened(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for_lock(functools.partial(fcntl.flock, descriptor), str(path), limit_s=_LOCK_S)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
