"""Memory that the ranks of one host share, so that values move between them in one copy.

An engine such as Horovod copies values into pipes or sockets and out of them again, on a thread of
its own that takes turns with all others. Here a rank's buffers lie in memory that the others can
read and not write. It tells them which exchange's values lie ready, and where, and who has heard
that of all ranks copies the values to where they belong (docs/benchmarks.md, "On one host").

``open_shared_memory`` connects ranks; ``SharedMemoryLane`` has such buffers. Whether an exchange
goes by them is decided when it is made, never by where values happen to lie: ranks could differ.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import logging
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loft_hvd._native import extension, require_extension
from loft_hvd.errors import TransportError
from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import (
    Brought,
    Channel,
    Lane,
    LossLimits,
    Transport,
    Watch,
    Work,
    closed_error,
    shards_of,
)

__all__ = [
    "SharedMemory",
    "SharedMemoryLane",
    "open_shared_memory",
    "over_memory",
]

_logger = logging.getLogger(__name__)
_NAME = "loft_hvd"  # of the memory, in /proc
# 126 random bits, at the beginning of each memory. The last word of that line of 64 bytes is the
# mailboxes' (csrc/wire/mailboxes.h).
_TOKEN_WORDS = 2
# Messages that a rank may be ahead of another, which is two steps at most, as all wait for all: a
# choice, for two exchanges of 1,000 parts of buckets.
_CAPACITY = 4096
# Addresses of a rank's memory: a choice, as room that was given back is not at once free. Those of
# all ranks take at most a quarter of the 2**47 that x86-64 and arm64 have.
_MOST_TIMES_RAM, _MOST_ADDRESSES = 2, 2**45


class SharedMemory:
    """This rank's memory, which the others read, and theirs.

    ``memories`` are mapped, by rank, this rank's own to write to; ``descriptor`` is the own one's.
    """

    def __init__(self, memories: Sequence[mmap.mmap], *, rank: int, descriptor: int) -> None:
        self.rank = rank
        self.world_size = len(memories)
        self._memories = tuple(memories)
        self._is_closed = False
        self._num_bytes = len(memories[rank])
        words = [np.frombuffer(each, np.uint64, _TOKEN_WORDS) for each in memories]
        self._bases = [int(each.ctypes.data) for each in words]
        boxes = require_extension().Mailboxes
        self._boxes = boxes(self._bases, rank, self._num_bytes, _CAPACITY)
        head = _head_bytes(self.world_size)
        # Reentrant, as all locks that the script's thread takes: a signal handler may come.
        self._lock = threading.RLock()
        self._free = [(head, self._num_bytes - head)]  # places and their bytes, ascending
        self._returned: deque[tuple[int, int]] = deque()  # a deque: any thread adds to it
        self._num_series = 0
        # What others have shown, read only: a process that writes there ends by SIGSEGV.
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self._own = _Own(self._bases[rank], descriptor, num_used=head)
        _own_memories()[memories[rank]] = self._own
        weakref.finalize(memories[rank], os.close, descriptor)
        # At the process's end, too: who waits for this rank has no connection that would break.
        # Registered now, so that Horovod's own end and what else was there before, come after it.
        self._leave = weakref.finalize(self, _leave, self._boxes, os.getpid())
        self._leave.atexit = False
        atexit.register(self._leave)

    def close(self) -> None:
        """Exchange nothing any more; memory goes with the last buffer and user of it.

        Other ranks' waits for this one fail, also where its process ends without this.
        """
        self._is_closed = True
        self._leave()
        atexit.unregister(self._leave)

    def next_series(self, channel: Channel) -> int:
        """Return a number, equal on all ranks, that none of them has had; all call it."""
        # Ranks may have had different numbers of series: one that failed alone has made one more.
        row = torch.tensor([self._num_series])
        self._num_series = 1 + int(channel.allgather_rows(row).max())
        return self._num_series

    def end(self, series: int) -> None:
        """Forget what was sent in a series of exchanges, and what may come yet; on any thread."""
        self._boxes.end(series)

    @property
    def num_posted(self) -> int:
        """How many messages each other rank was sent."""
        return int(self._boxes.num_posted)

    # Buffers.

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer that the other ranks can read, [numel], zeros."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype, device="cpu")
        num_bytes = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._check_open()
        with self._lock:
            place = self._room_for(num_bytes)
        own = self._memories[self.rank]
        values = np.frombuffer(own, np.uint8, numel * dtype.itemsize, place)
        # The tensor's storage keeps the array, which goes with the last tensor that shares it.
        weakref.finalize(values, self._returned.append, (place, num_bytes)).atexit = False
        return torch.from_numpy(values).view(dtype).zero_()  # no page is faulted in later

    def _room_for(self, num_bytes: int) -> int:
        self._take_back()
        for at, (place, room) in enumerate(self._free):
            if room >= num_bytes:
                self._free[at] = (place + num_bytes, room - num_bytes)
                self._own.num_used = max(self._own.num_used, place + num_bytes)
                return place
        raise TransportError(
            f"no {num_bytes} bytes in a row are left of the {self._num_bytes} that this rank shares"
            " with the others of its host; LOFT_HVD_LANE=engine shares none"
        )

    def _take_back(self) -> None:
        """Have room that was given back serve again, once nobody reads it any more."""
        # Ranks that are behind may, until they have read all that was ever posted. What comes while
        # that is asked was perhaps posted after it.
        num_returned = len(self._returned)
        if not num_returned or not self._boxes.all_is_read():
            return
        for _ in range(num_returned):
            place, room = self._returned.popleft()
            with suppress(OSError):  # a kernel that keeps the pages
                self._memories[self.rank].madvise(mmap.MADV_REMOVE, place, room)
            self._free.append((place, room))
        joined: list[tuple[int, int]] = []
        for place, room in sorted(self._free):
            if joined and sum(joined[-1]) == place:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((place, room))
        self._free = joined

    # Exchanges.

    def post(self, series: int, tag: int, sends: Sequence[Tensor]) -> int:
        """Tell the other ranks that values for them lie ready, ``sends[j]`` for rank j.

        Returns the exchange's number, among those of that tag, which only this series has.
        """
        own = self._bases[self.rank]
        places = [each.data_ptr() - own for each in sends]
        others = [place for peer, place in enumerate(places) if peer != self.rank]
        num_bytes = max(each.nbytes for each in sends)  # this rank's own may be empty
        if not all(0 < place <= self._num_bytes - num_bytes for place in others):
            raise TransportError(
                "what other ranks are to read lies in other memory than it was made in, as after "
                "share_memory() or a queue of torch.multiprocessing; clone what you hand on, or "
                "set LOFT_HVD_LANE=engine"
            )
        places[self.rank] = 0
        self._check_open()
        with self._lock:
            self._take_back()  # here, too: where a rank was behind when buffers were made anew
        try:
            return int(self._boxes.post(series, tag, places, num_bytes))
        except RuntimeError as error:
            raise TransportError(str(error)) from None

    def has_all(self, tag: int, number: int) -> bool:
        """Say whether every other rank's values for an exchange lie ready."""
        self._check_open()
        try:
            return bool(self._boxes.has_all(tag, number))
        except RuntimeError as error:
            raise TransportError(str(error)) from None

    def read(self, peer: int, tag: int, number: int, values: Tensor) -> None:
        """Copy what a rank has ready for an exchange, of which ``has_all`` was true."""
        self._check_open()
        place = values.data_ptr(), values.nbytes
        try:
            self._boxes.read(peer, tag, number, self._bases[peer], *place)
        except RuntimeError as error:
            raise TransportError(str(error)) from None

    def take(self, peer: int, tag: int, number: int, like: Tensor) -> Tensor:
        """Return a rank's values for an exchange where they lie, until ``has_read``.

        ``has_all`` was true; ``like`` has their number and dtype.
        """
        self._check_open()
        try:
            place = int(self._boxes.take_place(peer, tag, number, like.nbytes))
        except RuntimeError as error:
            raise TransportError(str(error)) from None
        key = peer, place, like.numel(), like.dtype
        if key not in self._views:  # they lie there in each step
            address = ctypes.c_uint8 * like.nbytes
            shown = address.from_address(self._bases[peer] + place)
            self._views[key] = torch.frombuffer(shown, dtype=like.dtype)
        return self._views[key]

    def has_read(self, peer: int) -> None:
        """Say that what one ``take`` of a rank has shown is not read any more."""
        self._boxes.has_read(peer)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error("memories that ranks share")


def _leave(boxes: Any, pid: int) -> None:
    """Tell the other ranks that this one sends nothing any more; not from a forked child."""
    if os.getpid() == pid:
        boxes.leave()


@dataclass
class _Own:
    """Where this process has its own memory, and how many bytes of it were ever in use."""

    base: int
    descriptor: int
    num_used: int


@functools.cache
def _own_memories() -> weakref.WeakKeyDictionary[mmap.mmap, _Own]:
    """Return what this process has of its own; a forked child's writes stay in the child."""
    memories: weakref.WeakKeyDictionary[mmap.mmap, _Own] = weakref.WeakKeyDictionary()

    def leave_to_parent() -> None:
        for own in memories.values():
            if not require_extension().make_private(own.base, own.num_used, own.descriptor):
                _logger.warning(
                    "the gradients of this forked process are those of its parent: do not write to "
                    "them; start processes by spawn, or set LOFT_HVD_LANE=engine"
                )
        memories.clear()  # a child of the child copies what it writes to, as always

    os.register_at_fork(after_in_child=leave_to_parent)
    return memories


class _Awaited:
    """An exchange for which other ranks have values ready, or will have."""

    watch: Watch | None = None

    def __init__(self, memory: SharedMemory, tag: int, number: int) -> None:
        self._memory = memory
        self._exchange = tag, number
        self._error: TransportError | None = None

    def done(self) -> bool:
        try:
            return self._memory.has_all(*self._exchange)
        except TransportError as error:
            self._error = error
            return True

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        self._take()

    def _take(self) -> None:
        raise NotImplementedError


class _SharedWork(_Awaited):
    """Values that are copied to where this rank wants them."""

    def __init__(
        self, memory: SharedMemory, tag: int, number: int, recvs: Sequence[Tensor]
    ) -> None:
        super().__init__(memory, tag, number)
        self._recvs = recvs

    def _take(self) -> None:
        # Of 4 ranks rank 1 reads from 0, 3, 2 in turn: at no time do all read from the same rank.
        memory = self._memory
        for shift in range(1, memory.world_size):
            peer = (memory.rank - shift) % memory.world_size
            memory.read(peer, *self._exchange, self._recvs[peer])


class _Lent(_Awaited, Brought):
    """Rows that lie where their ranks have them, and the work that waits for them."""

    def __init__(self, memory: SharedMemory, tag: int, number: int, own: Tensor) -> None:
        _Awaited.__init__(self, memory, tag, number)
        Brought.__init__(self, ())
        self._own = own

    def _take(self) -> None:
        memory = self._memory
        self.rows = [
            self._own if peer == memory.rank else memory.take(peer, *self._exchange, self._own)
            for peer in range(memory.world_size)
        ]

    def release(self) -> None:
        self.rows = ()
        for peer in range(self._memory.world_size):
            if peer != self._memory.rank:
                self._memory.has_read(peer)


class SharedMemoryLane(Lane):
    """All-to-alls and all-gathers of what lies in buffers that ``zeros`` has made, read there.

    Its exchanges are one series, which ends with it: what another has left is nothing to them. All
    else is as in the transport below it, groups of some of the ranks too.
    """

    name = "shared memory"
    lends = True
    adds_up = False  # owners read each value once, where an engine's sum copies it twice

    def __init__(self, below: Transport, memory: SharedMemory, *, series: int) -> None:
        super().__init__(below)
        self.overlaps = False
        self.memory = memory
        self._series = series
        weakref.finalize(self, memory.end, series).atexit = False

    def zeros(self, numel: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        return self.memory.zeros(numel, dtype)

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        sends, recvs = (shards_of(self, each, skips_own=skips_own) for each in (send, recv))
        return self._exchange(sends, recvs, name)

    def bring(
        self, send: Tensor, room: Tensor | None, *, name: str, limits: LossLimits | None = None
    ) -> tuple[Work, Brought]:
        if room is not None:
            return super().bring(send, room, name=name)
        sends = shards_of(self, send)
        tag = self._tag(name, sends[0])
        number = self.memory.post(self._series, tag, sends)
        lent = _Lent(self.memory, tag, number, sends[self.rank])
        return self.can.follow(lent, name), lent

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        return self._exchange([send] * self.world_size, shards_of(self, recv), name)

    def _exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], name: str) -> Work:
        tag = self._tag(name, max(recvs, key=lambda each: each.nbytes))
        number = self.memory.post(self._series, tag, sends)
        recvs[self.rank].copy_(sends[self.rank])
        return self.can.follow(_SharedWork(self.memory, tag, number, recvs), name)

    def _tag(self, name: str, like: Tensor) -> int:
        # With size and dtype, as in a mesh: ranks that disagree wait instead, until their limit.
        return digest(f"{self._series} {name} {like.nbytes} {like.dtype}")


def over_memory(channel: Channel, memory: SharedMemory) -> SharedMemoryLane:
    """Return a lane of a channel's transport, with a series of its own; every rank calls it."""
    series = memory.next_series(channel.sub("series"))
    return SharedMemoryLane(channel.transport, memory, series=series)


# Opening.


def open_shared_memory(channel: Channel) -> SharedMemory | None:
    """Let ranks of one host read each other's memory; every rank calls it alike.

    Returns:
        None on every rank where some rank cannot: it has no extension, its kernel or its limits
        refuse, or it does not see the others' processes, as one in another container.
    """
    own, descriptor, reason = None, -1, "no C++ extension is built of this checkout"
    token = [secrets.randbits(63) for _ in range(_TOKEN_WORDS)]
    # Not in one of an older checkout.
    if hasattr(getattr(extension(), "Mailboxes", None), "take_place"):
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, _most_bytes(channel.world_size))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            own = _without_dump(mmap.mmap(descriptor, 0))
            np.frombuffer(own, np.uint64, _TOKEN_WORDS)[:] = token
        except (OSError, ValueError, AttributeError) as error:  # the last: not on Linux
            own, reason = None, str(error)
    try:
        row = torch.tensor([int(own is not None), os.getpid(), descriptor, *token])
        rows = channel.sub("memories").allgather_rows(row).tolist()
        memories: list[mmap.mmap] = []
        if own is not None:
            for rank, (has_memory, pid, number, *theirs) in enumerate(rows):
                memory = own if rank == channel.rank else None
                if memory is None and has_memory:
                    reason = f"the memory of rank {rank} is out of reach"
                    memory = _memory_of(pid, number, theirs, len(own))
                memories += [] if memory is None else [memory]
        is_here = torch.tensor([int(len(memories) == len(rows))])
        found = channel.sub("mapped").allgather_rows(is_here).flatten().tolist()
        if all(found):
            memory_of_all = SharedMemory(memories, rank=channel.rank, descriptor=descriptor)
            descriptor = -1
            return memory_of_all
        if own is None or (not found[channel.rank] and all(row[0] for row in rows)):
            _logger.info(
                "rank %d shares no memory with the others of its host (%s), so no rank does",
                channel.rank,
                reason,
            )
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _memory_of(pid: int, number: int, token: Sequence[int], num_bytes: int) -> mmap.mmap | None:
    """Map what a process has as a descriptor; None where it cannot be, or is another's."""
    # A process of that number may be another one's where ranks do not see the same processes.
    path = f"/proc/{pid}/fd/{number}"
    with suppress(OSError, ValueError):
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # Sealed: memory that shrinks would end who reads it by SIGBUS.
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
            if is_sealed and os.fstat(descriptor).st_size == num_bytes:
                memory = _without_dump(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
                if np.frombuffer(memory, np.uint64, len(token)).tolist() == list(token):
                    return memory
        finally:
            os.close(descriptor)
    return None


def _without_dump(memory: mmap.mmap) -> mmap.mmap:
    """Keep a memory out of core dumps, which would write all its addresses out."""
    memory.madvise(mmap.MADV_DONTDUMP)
    return memory


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _head_bytes(num_ranks: int) -> int:
    """Return the bytes before the first buffer, whole pages."""
    num_bytes = require_extension().Mailboxes.head_bytes(num_ranks, _CAPACITY)
    return int(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def _most_bytes(num_ranks: int) -> int:
    """Return how many addresses a rank's memory has; pages come where it is written to."""
    ram_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    most = min(_MOST_TIMES_RAM * ram_bytes, _MOST_ADDRESSES // num_ranks)
    return _head_bytes(num_ranks) + most // mmap.PAGESIZE * mmap.PAGESIZE
