"""Data sets in tar and Parquet files: map-style, and read in blocks of neighbours.

What is known of a file is where its samples begin, found once by a look at its headers; samples are
read when they are asked for, neighbours in one go. Nothing that a file holds is unpickled.
"""

from __future__ import annotations

import io
import logging
import os
import re
import struct
import tarfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from loft_hvd.data.sampler import check_indices
from loft_hvd.errors import ArgumentTypeError, DataError

if TYPE_CHECKING:
    from loft_hvd.data.arrow import ParquetReader

__all__ = ["ParquetShards", "ShardFiles", "TarShards"]

_logger = logging.getLogger(__name__)
_INDEX = struct.Struct("<8sqqqI")  # of a kept index: version, file's bytes, its time, count, CRC
_INDEX_THREADS = 8  # a choice: headers are read one by one, and a network drive answers slowly
_MOST_OPEN = 32  # files of a process; a choice far below the 1,024 that systems allow
_MOST_KEPT = 4  # row groups of a process; a choice: neighbours of a batch are in the next one
_READ_BYTES = 8 << 20  # of one read; a choice: longer runs gain nothing
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)  # up to the first dot, and behind
_META = re.compile(r"__[^/]*__(?:/|$)")  # names that webdataset leaves out, too
_MOST_TAIL = 1 << 20  # bytes of zeros at the end; a choice: tar fills up 10 KiB if not told else
_MOST_HEADER = 1 << 20  # bytes of a long name or of attributes; a choice: paths have 4 KiB
# What a tar file that is damaged may raise: a bad number is a ValueError, and headers that announce
# one another without an end are a RecursionError.
_TAR_ERRORS = (
    tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip
# How a file begins that some tool has compressed.
_COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
}  # fmt: skip

Sample = dict[str, Any]
T = TypeVar("T")
_Ints = npt.NDArray[np.int64]


class _Opened:
    """What one process has open; a forked one opens its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.files: dict[str, Any] = {}  # the one used last stands last
        self.groups: dict[tuple[str, int], Any] = {}  # row groups, likewise


def _latest(kept: dict[Any, T], key: Any, make: Callable[[], T], *, most: int) -> T:
    """Return what is kept under a key, made where it is not; drop what was used longest ago."""
    value = kept.pop(key) if key in kept else make()
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
    return value


class ShardFiles(Dataset[Any]):
    """A map-style data set over files: base of ``TarShards`` and ``ParquetShards``.

    Files are taken in the order of their names, whatever the order that they are given in, so that
    sample 7 is the same one on every rank.
    """

    _kind: bytes  # two bytes: of which kind and version a kept index is

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        decode: Callable[[Sample], Any] | None,
        folder: str | os.PathLike[str] | None,
    ) -> None:
        self.paths = _checked_paths(type(self).__name__, paths)
        self.decode = decode
        self._opened: _Opened | None = None
        find = partial(self._index_of, folder=None if folder is None else Path(folder))
        with ThreadPoolExecutor(_INDEX_THREADS, "loft_hvd-index") as threads:
            self._indexes = list(threads.map(find, self.paths))
        sizes = [self._sizes_in(index) for index in self._indexes]
        counts = [len(each) for each in sizes]
        self.shard_sizes: _Ints = np.concatenate(sizes)
        """Samples of each shard, in the order of their indices, [num_shards]."""
        self._ends = np.cumsum(self.shard_sizes)
        self._files = np.repeat(np.arange(len(counts)), counts)  # of each shard
        self._parts = np.concatenate([np.arange(count) for count in counts])  # its number in it
        _logger.info("%d samples in %d files", len(self), len(self.paths))

    # What a kind of file has of its own.

    def _scan(self, path: str) -> _Ints:
        """Return the index of a file: what ``_sizes_in`` and ``_read`` need of it."""
        raise NotImplementedError

    def _sizes_in(self, index: _Ints) -> _Ints:
        """Return the samples of each shard in a file, from its index."""
        raise NotImplementedError

    def _read(self, file: int, part: int, first: int, last: int) -> list[Sample]:
        """Return the samples from ``first`` to before ``last`` of a shard."""
        raise NotImplementedError

    # What both have.

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch: samples that are neighbours in a shard in one go, each sample once."""
        numbers = check_indices(indices, len(self))
        wanted = np.unique(np.array(numbers, np.int64))  # in order
        shards = np.searchsorted(self._ends, wanted, side="right")
        found: dict[int, Sample] = {}
        # Samples 4 5 6 9, of which 6 is in the next shard, are the runs 4 5, 6 and 9.
        breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(shards) != 0)) + 1
        for run in np.split(np.arange(len(wanted)), breaks) if len(wanted) else ():
            shard, first, last = shards[run[0]], wanted[run[0]], wanted[run[-1]] + 1
            begin = self._ends[shard] - self.shard_sizes[shard]
            place = int(self._files[shard]), int(self._parts[shard])
            samples = self._read(*place, int(first - begin), int(last - begin))
            found |= zip(range(int(first), int(last)), samples, strict=True)
        # A sample that is asked for twice is decoded twice: the draw may be random.
        return [self._decoded(number, dict(found[number])) for number in numbers]

    def _decoded(self, number: int, sample: Sample) -> Any:
        if self.decode is None:
            return sample
        try:
            return self.decode(sample)
        except Exception as error:
            name = sample.get("__key__")
            raise DataError(
                f"{self.path_of(number)}: decode failed for sample {number}"
                f"{'' if name is None else f' ({name!r})'}: {error!r}"
            ) from error

    def path_of(self, index: int) -> str:
        """Return the file that a sample is in, such as for a ``Placement``."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        shard = np.searchsorted(self._ends, index, side="right")
        return self.paths[int(self._files[shard])]

    def __getstate__(self) -> dict[str, Any]:
        """Describe the data set for a process that was not forked: it opens its own files."""
        return self.__dict__ | {"_opened": None}

    def _own(self) -> _Opened:
        """Return what this process has open."""
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened = _Opened()
        return self._opened

    def _index_of(self, path: str, *, folder: Path | None) -> _Ints:
        """Return the index of a file, from the folder where it is there and still true."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if folder is None:
            return self._scan(path)
        number = zlib.crc32(os.path.abspath(path).encode(errors="surrogateescape"))
        kept = folder / f"{os.path.basename(path)}.{number:08x}.index"
        version = b"loftix" + self._kind
        index = _read_index(kept, version, status)
        if index is None:
            index = self._scan(path)
            _write_index(kept, version, status, index)
        return index


def _checked_paths(name: str, paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the files in the order of their names."""
    if isinstance(paths, str | os.PathLike):
        raise ArgumentTypeError(
            f"{name}: paths={paths!r} must be a list of files, such as glob.glob({paths!r})"
        )
    names = [os.fspath(path) for path in paths]
    if not all(isinstance(each, str) for each in names):
        raise ArgumentTypeError(f"{name}: paths must be text or pathlib.Path, not bytes")
    if not names or len(set(names)) < len(names):
        twice = sorted({each for each in names if names.count(each) > 1})[:3]
        raise DataError(
            f"{name}: {len(names)} paths, {twice or 'none'} of them twice; give each file once, "
            "and at least one"
        )
    return sorted(names)


def _read_index(kept: Path, version: bytes, status: os.stat_result) -> _Ints | None:
    """Return an index that was written for this very file; None where there is none."""
    try:
        data = kept.read_bytes()
    except OSError:
        return None
    if len(data) < _INDEX.size:
        return None
    *whose, count, digest = _INDEX.unpack_from(data)
    body = data[_INDEX.size :]
    is_true = whose == [version, status.st_size, status.st_mtime_ns] and len(body) == 8 * count
    if not is_true or zlib.crc32(body) != digest:
        return None
    return np.frombuffer(body, "<i8").astype(np.int64)


def _write_index(kept: Path, version: bytes, status: os.stat_result, index: _Ints) -> None:
    """Keep an index; other ranks may do so at the same time."""
    body = index.astype("<i8").tobytes()
    head = _INDEX.pack(version, status.st_size, status.st_mtime_ns, len(index), zlib.crc32(body))
    mine = kept.with_name(f"{kept.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        mine.write_bytes(head + body)
        mine.replace(kept)
    except OSError as error:
        with suppress(OSError):  # a part of it, on a full disk
            mine.unlink(missing_ok=True)
        _logger.warning("the index %s is not kept (%s): the next run makes it again", kept, error)


class TarShards(ShardFiles):
    """Samples in tar files, in the layout of webdataset: a map-style data set read in blocks.

    Members that stand together and have one name up to its first dot are one sample::

        000123.jpg  000123.cls        {"__key__": "000123", "jpg": b"...", "cls": b"7"}

    A file is a shard: its headers are read once, one after another, to find where its samples
    begin (8 bytes of memory a sample). Neighbours are then read together. ``loft.DataLoader`` and
    ``loft.BatchSampler`` shuffle such data in blocks (``loft.BlockShuffle``).

    Args:
        paths: the tar files, without compression; taken in the order of their names.
        decode: makes of the dict of a sample (names in lower case, values bytes) what is returned,
            in the process that reads; None returns the dict. It may augment at random, unless a
            ``SampleStore`` is around the data set, which keeps what is returned.
        folder: where indexes are kept for the next run, such as one that all nodes share; an index
            is made again when its file's length or time has changed. None keeps none.

    Raises:
        ArgumentTypeError: ``paths`` is no list of paths.
        DataError: no path, or one twice; a file that cannot be read, is compressed, damaged, cut
            off, or has a sample whose members are apart. Names the file. Reading a sample raises
            it, too, where a file has changed since, or ``decode`` fails.
    """

    _kind = b"t1"

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        decode: Callable[[Sample], Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(paths, decode=decode, folder=folder)

    def _scan(self, path: str) -> _Ints:
        """Return where each sample begins, and where the last ends, [num_samples + 1]."""
        tar: tarfile.TarFile | None = None
        try:
            with (
                _HeaderFile(path) as file,
                tarfile.open(fileobj=file, mode="r:") as tar,
            ):
                begins = _begins(tar)
            _check_end(path, begins[-1])
        except _MispackedError as error:
            raise DataError(f"{path}: {error}") from error
        except _TAR_ERRORS as error:
            raise DataError(_damage_of(path, tar, error)) from error
        return np.array(begins, np.int64)

    def _sizes_in(self, index: _Ints) -> _Ints:
        return np.array([len(index) - 1])

    def _read(self, file: int, part: int, first: int, last: int) -> list[Sample]:
        path, begins = self.paths[file], self._indexes[file]
        samples: list[Sample] = []
        try:
            descriptor = self._descriptor(path)
            for begin, end in _cut(begins, first, last):
                data = _read_bytes(descriptor.number, int(begins[begin]), int(begins[end]))
                samples += _samples_in(data, end - begin)
        except _TAR_ERRORS as error:
            raise DataError(
                f"{path}: samples {first} to {last - 1} of this file cannot be read: {error}; has "
                "it changed since its index was made?"
            ) from error
        return samples

    def _descriptor(self, path: str) -> _Descriptor:
        own = self._own()
        with own.lock:
            opened: _Descriptor = _latest(
                own.files, path, partial(_Descriptor, path), most=_MOST_OPEN
            )
            return opened


class _MispackedError(ValueError):
    """A whole tar file whose members are not what samples are made of; says which, and why."""


class _HeaderFile(io.BufferedReader):
    """A tar file of which headers are read, whatever lengths they claim.

    ``tarfile`` asks for the bytes of a long name at once, and goes to where a member should end, be
    it 2**63 bytes on.
    """

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self._length = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MOST_HEADER:
            raise ValueError(f"a header claims to have {size} bytes, of {_MOST_HEADER} at most")
        return super().read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if offset > self._length:
            raise ValueError(f"a member claims to reach to there, the file has {self._length} B")
        return super().seek(offset, whence)


def _begins(tar: tarfile.TarFile) -> list[int]:
    """Return where each sample begins, and where the last ends."""
    begins: list[int] = []
    seen: set[str] = set()
    last, extensions = None, set[str]()
    for key, extension, member in _members(tar):
        if key != last:
            if key in seen:
                raise _MispackedError(
                    f"the members of {key!r} are apart: pack the files in the order of their names "
                    "(tar --sort=name)"
                )
            seen.add(key)
            begins.append(member.offset)
            last, extensions = key, set()
        if extension in extensions:
            raise _MispackedError(
                f"{member.name!r} comes twice (names in lower case): give each member of a sample "
                "a name of its own"
            )
        extensions.add(extension)
    return [*begins, tar.offset]


def _damage_of(path: str, tar: tarfile.TarFile | None, error: BaseException) -> str:
    """Say why a file cannot be read; ``tar`` is None where not even its first header could."""
    if isinstance(error, OSError):
        return f"{path} cannot be read: {error}"
    with suppress(OSError), open(path, "rb") as file:
        head = file.read(8)
        for magic, tool in _COMPRESSED.items():
            if head.startswith(magic):
                return f"{path} is compressed ({tool}): unpack it first, samples are read in place"
    if tar is None:
        return (
            f"{path} is no tar file ({error}), or its first header is damaged; pack it anew, or "
            "leave it out"
        )
    return (
        f"{path} is damaged or cut off at byte {tar.offset} ({error}); pack it anew, or leave it "
        "out"
    )


def _check_end(path: str, end: int) -> None:
    """Raise a ValueError unless zeros alone, and not too many, are behind the last member.

    ``tarfile`` takes a header that was lost, and is zeros now, for the end of the file.
    """
    with open(path, "rb") as file:
        file.seek(end)
        tail = file.read(_MOST_TAIL + 1)
    is_whole = tarfile.BLOCKSIZE <= len(tail) <= _MOST_TAIL and len(tail) % tarfile.BLOCKSIZE == 0
    if not is_whole or tail.strip(b"\0"):
        raise ValueError(
            "behind the last member that is found there must be zeros alone, "
            f"{tarfile.BLOCKSIZE} to {_MOST_TAIL} B of them in whole blocks"
        )


class _Descriptor:
    """An open file that is closed with its last user."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield key, extension and place of each member that belongs to a sample."""
    for member in tar:
        if member.size < 0:
            raise ValueError(f"member {member.name!r} claims {member.size} bytes")
        if member.issparse():
            raise _MispackedError(
                f"member {member.name!r} is sparse, and its bytes are not in one place; pack "
                "without --sparse"
            )
        match = _NAME.fullmatch(member.name)
        if not match or _META.match(member.name):
            continue
        if member.islnk() or member.issym():
            raise _MispackedError(
                f"member {member.name!r} is a link to {member.linkname!r} and has no bytes of its "
                "own; pack files themselves (tar --hard-dereference -h)"
            )
        if member.isfile():
            yield match[1], match[2].lower(), member


def _cut(begins: _Ints, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cut a run of samples into reads of ``_READ_BYTES``, and of at least one sample."""
    while first < last:
        fits = int(np.searchsorted(begins, begins[first] + _READ_BYTES, side="right")) - 1
        end = min(max(fits, first + 1), last)
        yield first, end
        first = end


def _read_bytes(descriptor: int, begin: int, end: int) -> bytes:
    # At a place, without moving one: forked processes share the descriptor.
    data = os.pread(descriptor, end - begin, begin)
    while len(data) < end - begin:  # a network drive may give less at a time
        more = os.pread(descriptor, end - begin - len(data), begin + len(data))
        if not more:
            raise ValueError(f"it ends at byte {begin + len(data)}")
        data += more
    return data


def _samples_in(data: bytes, count: int) -> list[Sample]:
    """Return the samples of a piece of a tar file, which has ``count`` of them."""
    samples: list[Sample] = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for key, extension, member in _members(tar):
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            samples[-1][extension] = data[member.offset_data : member.offset_data + member.size]
        if len(samples) != count or tar.offset != len(data):
            raise ValueError(f"{len(samples)} samples where {count} were")
    return samples


class ParquetShards(ShardFiles):
    """Samples in the rows of Parquet files: a map-style data set read by row group.

    A shard is a row group, the least that Parquet can read: it is read and decoded whole, and the
    last four are kept in each process that reads. So give ``loft.BlockShuffle(block=...)`` the rows
    of a row group, or write small row groups. ``loft.DataLoader`` and ``loft.BatchSampler`` shuffle
    such data in blocks.

    Args:
        paths: the Parquet files; taken in the order of their names.
        columns: to read; None for all.
        decode: makes of the dict of a row (values as Python's own types, binary ones as bytes) what
            is returned, in the process that reads; None returns the dict.
        folder: where the lengths of row groups are kept for the next run; see ``TarShards``.

    Raises:
        ArgumentTypeError: ``paths`` is no list of paths.
        DataError: no path, or one twice; a file that cannot be read, is damaged, has no such
            columns, names that are not UTF-8, or a row group of more than 2**26 rows. Names the
            file. Reading a sample raises it, too, where a row group is damaged,
            or ``decode`` fails.
        MissingDependencyError: the extra ``loft_hvd[store]`` is not installed.
    """

    _kind = b"p1"

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        decode: Callable[[Sample], Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        # pyarrow is an extra; imported here, and not by threads that look at files.
        import loft_hvd.data.arrow  # noqa: F401 - for its error

        self._columns = columns
        super().__init__(paths, decode=decode, folder=folder)

    def _scan(self, path: str) -> _Ints:
        """Return the rows of each row group, [num_groups]."""
        reader = self._reader(path)
        sizes = np.array(reader.group_sizes, np.int64)
        reader.close()
        return sizes

    def _sizes_in(self, index: _Ints) -> _Ints:
        return index

    def _reader(self, path: str) -> ParquetReader:
        from loft_hvd.data.arrow import ParquetReader

        return ParquetReader(path, self._columns)

    def _read(self, file: int, part: int, first: int, last: int) -> list[Sample]:
        from loft_hvd.data.arrow import READ_ERRORS, table_rows

        path, own = self.paths[file], self._own()
        with own.lock:
            table = _latest(
                own.groups, (path, part), partial(self._group, own, path, part), most=_MOST_KEPT
            )
        try:
            rows = table_rows(table, first, last)
        except READ_ERRORS as error:
            raise DataError(
                f"{path}: rows {first} to {last - 1} of row group {part} cannot be read: {error}"
            ) from error
        if len(rows) != last - first:
            raise DataError(
                f"{path}: row group {part} has {table.num_rows} rows, of which {first} to "
                f"{last - 1} were asked for; has it changed since its index was made?"
            )
        return rows

    def _group(self, own: _Opened, path: str, part: int) -> Any:
        reader: ParquetReader = _latest(
            own.files, path, partial(self._reader, path), most=_MOST_OPEN
        )
        return reader.read_group(part)
