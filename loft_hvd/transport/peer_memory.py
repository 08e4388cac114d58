"""GPUs of one host read each other's memory: the rule's kernel takes rows where they lie.

A rank's buffers lie in memory that the others map. In an exchange each rank packs, records an event
behind that, and tells the others by a message in the host's shared memory where its values lie and
which event they come after. Who has all messages has its stream wait for the events, on the device,
and reads: the rule its rows, and results are copied from their owners. Nothing is received first.

A wait for an event of another process counts only for what was recorded before, so the host has to
hear of the record: hence messages, which the engine's thread takes as in shared memory. Flags that
streams write and wait for would need none; but a stream that waits for a dead rank's flag waits for
ever, and nobody could say for whom.

**Order.** An event may be recorded anew before a slow rank has waited for it. That rank then waits
for the later record, longer than it need: never too short, as all records of a lane follow each
other, and never for ever, as a record only comes after what was queued before it in time.

**What is overwritten.** As in shared memory: shard j of what is sent only by rank j's result, whose
event rank j records behind its rule; a result once all have sent rows again. Before a buffer or a
rank ends, the others have counted, in the order of their streams, all that they were to copy.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loft_hvd.errors import TransportError
from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import (
    LONGEST_SLEEP_S,
    Brought,
    Channel,
    Lane,
    LossLimits,
    Watch,
    Work,
    shards_of,
)
from loft_hvd.transport.cuda_peers import DESCRIPTION_BYTES, EVENT_BYTES, CudaPeers
from loft_hvd.transport.shared_memory import (
    SharedMemory,
    open_shared_memory,
    over_memory,
)

__all__ = ["PeerMemory", "PeerMemoryLane", "connect_peers", "open_peer_memory", "over_peers"]

_logger = logging.getLogger(__name__)
# A choice: more than a rank has exchanges under way, so that few are recorded anew too early.
_NUM_EVENTS = 32
_MOST_GONE = 8  # ended buffers that one message names; others wait for the next one
_LEAVE_S = 5.0  # a choice: longest that this rank's end waits for those that copy its values


class PeerDevice(Protocol):
    """A rank's device, as ranks in other processes reach it; see ``CudaPeers``."""

    @property
    def identity(self) -> int: ...
    def unreachable(self, identity: int) -> str: ...
    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor: ...
    def share(self, values: Tensor) -> bytes: ...
    def map(self, description: bytes) -> Tensor: ...
    def make_event(self) -> tuple[Any, bytes]: ...
    def open_event(self, handle: bytes) -> Any: ...
    def record(self, event: Any) -> None: ...
    def wait(self, event: Any) -> None: ...
    def count_into(self, words: Tensor) -> None: ...
    def count(self, words: Tensor) -> None: ...
    def end_count(self, words: Tensor) -> None: ...


# Messages.


class _Notice(NamedTuple):
    """Where values lie, and what they come after; the words of a message before the description."""

    place: int  # bytes from the buffer's begin, for the rank that is told
    buffer: int  # its number, from 1 on
    buffer_bytes: int
    num_bytes: int
    kind: int  # of the values' dtype
    event: int  # one of the sender's


_HEAD = len(_Notice._fields)
_DESCRIBED = _HEAD + _MOST_GONE  # where the description begins
_WORDS = _DESCRIBED + DESCRIPTION_BYTES // 8


def _words_of(raw: bytes) -> Tensor:
    """Return bytes, a multiple of 8, as int64."""
    return torch.from_numpy(np.frombuffer(bytearray(raw), np.int64))


def _bytes_of(words: Tensor) -> bytes:
    return words.contiguous().numpy().tobytes()


class _Buffer:
    """A buffer of this rank's, as messages name it."""

    def __init__(self, number: int, values: Tensor, descriptions: Sequence[Tensor]) -> None:
        self.number = number
        self.num_bytes = values.nbytes
        self.storage = StorageWeakRef(values.untyped_storage())
        self.descriptions = descriptions  # by rank; this rank's own is empty
        self.tables: dict[str, deque[Tensor]] = {}  # by exchange: two messages to each rank


class _Series:
    """The exchanges of one lane: this rank's buffers, those that it has mapped, and events."""

    def __init__(self, channel: Channel, memory: SharedMemory, peers: PeerDevice) -> None:
        self.is_over = False
        self._lane = over_memory(channel, memory)
        self._peers = peers
        self.rank, self._size = channel.rank, channel.world_size
        made = [peers.make_event() for _ in range(_NUM_EVENTS)]
        self._own_events = [event for event, _ in made]
        rows = channel.sub("events").allgather_rows(_words_of(b"".join(raw for _, raw in made)))
        self._events = [
            [] if peer == self.rank else list(map(peers.open_event, _cut(row, EVENT_BYTES)))
            for peer, row in enumerate(rows)
        ]
        self._next_event = 0
        self._buffers: dict[int, _Buffer] = {}  # by address
        self._num_buffers = 0
        self._gone: deque[int] = deque()  # numbers of buffers that are, as others do not know yet
        self._mapped: dict[tuple[int, int], Tensor] = {}  # by rank and number
        # How many exchanges each rank has copied, on its device; one word for every reader.
        self._copied = self._lane.zeros(self._size, torch.int64)
        peers.count_into(self._copied)
        work, brought = self._lane.bring(self._copied, None, name="copied")
        channel.wait(work, what="the counts of the other ranks")
        self._counts = list(brought.rows)  # they are read for as long as the memory is mapped
        brought.release()
        self._num_sent = self._num_copied = 0

    # Buffers.

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        values = self._peers.zeros(numel, dtype)
        if numel:
            for address in [at for at, each in self._buffers.items() if each.storage.expired()]:
                self._gone.append(self._buffers.pop(address).number)
            self._num_buffers += 1
            described = [
                _words_of(b"" if peer == self.rank else self._peers.share(values))
                for peer in range(self._size)
            ]
            self._buffers[values.data_ptr()] = _Buffer(self._num_buffers, values, described)
        return values

    def _buffer_of(self, values: Tensor) -> _Buffer:
        found = self._buffers.get(values.untyped_storage().data_ptr())
        if found is None or found.storage.expired():
            raise TransportError(
                "what other ranks are to read lies in other memory than it was made in; "
                "LOFT_HVD_LANE=device or engine has values anywhere"
            )
        return found

    # Exchanges.

    def post(self, sends: Sequence[Tensor], name: str, *, is_copied: bool) -> tuple[Work, Tensor]:
        """Tell each other rank where what is queued by now leaves ``sends[j]`` for it."""
        shown = sends[self.rank - 1]  # not this rank's own, which may be empty
        buffer = self._buffer_of(shown)
        if name not in buffer.tables:
            buffer.tables[name] = deque(self._new_table(buffer) for _ in range(2))
        # Two by turns: who has all messages of the exchange after one has seen all read that one's.
        buffer.tables[name].rotate()
        table = buffer.tables[name][0]
        event = self._next_event
        self._next_event = (event + 1) % _NUM_EVENTS
        self._peers.record(self._own_events[event])
        kind = digest(str(shown.dtype))
        message = _Notice(0, buffer.number, buffer.num_bytes, shown.nbytes, kind, event)
        rows = table.view(self._size, _WORDS)
        rows[:, :_DESCRIBED] = torch.tensor([*message, *self._told_now()])
        base = shown.untyped_storage().data_ptr()
        rows[:, 0] = torch.tensor([max(sent.data_ptr() - base, 0) for sent in sends])
        received = torch.zeros_like(table)
        self._num_sent += is_copied
        return self._lane.alltoall(table, received, name=name), received.view(self._size, _WORDS)

    def _new_table(self, buffer: _Buffer) -> Tensor:
        table = self._lane.zeros(self._size * _WORDS, torch.int64)
        for row, described in zip(table.view(self._size, _WORDS), buffer.descriptions, strict=True):
            row[_DESCRIBED : _DESCRIBED + len(described)] = described
        return table

    def _told_now(self) -> list[int]:
        """Return the numbers of buffers that others need no more, 0 where there are fewer."""
        # Not before all is copied: a rank that lets go of one and then comes to an earlier exchange
        # of it would map memory that serves something else.
        gone: list[int] = []
        if self._gone and self.is_copied(self._num_sent):
            gone = [self._gone.popleft() for _ in range(min(len(self._gone), _MOST_GONE))]
        return gone + [0] * (_MOST_GONE - len(gone))

    def show(self, peer: int, words: Tensor, like: Tensor) -> Tensor:
        """Return a rank's values where they lie, as this rank's stream may read from here on."""
        head = words[:_DESCRIBED].tolist()
        message = _Notice(*head[:_HEAD])
        for number in head[_HEAD:]:
            self._mapped.pop((peer, number), None)
        wanted = like.nbytes, digest(str(like.dtype))
        is_inside = 0 <= message.place <= message.buffer_bytes - message.num_bytes
        if (message.num_bytes, message.kind) != wanted or not is_inside:
            raise TransportError(
                f"rank {peer} shows {message.num_bytes} bytes at {message.place} of "
                f"{message.buffer_bytes}, where rank {self.rank} takes {like.nbytes} bytes of "
                f"{like.dtype}: ranks take different steps"
            )
        key = peer, message.buffer
        if key not in self._mapped:
            mapped = self._peers.map(_bytes_of(words[_DESCRIBED:]))
            if mapped.numel() < message.buffer_bytes:
                raise TransportError(f"rank {peer} shows {message.buffer_bytes} bytes of fewer")
            self._mapped[key] = mapped
        self._peers.wait(self._events[peer][message.event % _NUM_EVENTS])
        span = slice(message.place, message.place + message.num_bytes)
        return self._mapped[key][span].view(like.dtype)

    def count(self) -> None:
        """Count one exchange more as copied, once all that is queued by now is done."""
        self._num_copied += 1
        self._peers.count(self._copied)

    # The end.

    def is_copied(self, number: int) -> bool:
        """Say whether all other ranks have copied so many exchanges."""
        return all(
            int(count[0]) >= number for peer, count in enumerate(self._counts) if peer != self.rank
        )

    @property
    def is_done(self) -> bool:
        """Whether nobody is to copy anything of this rank's any more."""
        return self.is_copied(self._num_copied)

    def close(self) -> None:
        """Let go of what other ranks have."""
        self._mapped.clear()
        self._events.clear()
        self._peers.end_count(self._copied)


def _cut(words: Tensor, num_bytes: int) -> list[bytes]:
    """Cut words into pieces of so many bytes."""
    raw = _bytes_of(words)
    return [raw[at : at + num_bytes] for at in range(0, len(raw), num_bytes)]


class PeerMemory:
    """What ranks of one host have open, so that their devices read each other's memory."""

    def __init__(self, memory: SharedMemory, peers: PeerDevice) -> None:
        self.peers = peers
        self._memory = memory
        self._series: list[_Series] = []
        self._process = os.getpid()
        # Before the memories' own end, which was registered earlier: who copies is waited for.
        atexit.register(self.close)

    def new_series(self, channel: Channel) -> _Series:
        """Begin the exchanges of a lane; every rank calls it alike."""
        for each in [each for each in self._series if each.is_over and each.is_done]:
            self._series.remove(each)
            each.close()
        self._series.append(_Series(channel, self._memory, self.peers))
        return self._series[-1]

    def close(self) -> None:
        """Exchange nothing any more, once the others have copied what they have been sent."""
        if self._process != os.getpid():
            return
        atexit.unregister(self.close)
        end = time.monotonic() + _LEAVE_S
        while not all(each.is_done for each in self._series) and time.monotonic() < end:
            time.sleep(LONGEST_SLEEP_S)
        for each in self._series:
            each.close()
        self._series.clear()
        self._memory.close()


# The lane.


class _PeerWork(Brought):
    """Values that other ranks have ready, or will have: shown, or copied to ``recvs``."""

    def __init__(
        self,
        series: _Series,
        posted: tuple[Work, Tensor],
        own: Tensor,
        like: Tensor,
        recvs: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(())
        self._series = series
        self._work, self._messages = posted
        self._own = own
        self._like = like
        self._recvs = recvs

    @property
    def watch(self) -> Watch | None:
        return self._work.watch

    def done(self) -> bool:
        return self._work.done()

    def finish(self) -> None:
        self._work.finish()
        size, rank = len(self._messages), self._series.rank
        rows = [self._own] * size
        # Of 4 ranks rank 1 reads from 0, 3, 2 in turn: at no time do all read from the same rank.
        for shift in range(1, size):
            peer = (rank - shift) % size
            rows[peer] = self._series.show(peer, self._messages[peer], self._like)
            if self._recvs is not None:
                self._recvs[peer].copy_(rows[peer])
        if self._recvs is None:
            self.rows = rows
        else:
            self._recvs[rank].copy_(self._own)
            self._series.count()

    def release(self) -> None:
        self.rows = ()


class PeerMemoryLane(Lane):
    """All-to-alls and all-gathers of what lies in buffers that ``zeros`` has made, read there.

    Exchanges are begun and finished on one stream, or on streams that follow each other. All else
    is as in the transport below it, groups of some of the ranks too.
    """

    name = "peer memory"
    lends = True
    adds_up = False  # owners read each value once
    has_stream = True  # it waits there for other ranks
    has_parts = False  # nothing travels beside the rule, and each part is 30 calls more

    def __init__(self, channel: Channel, series: _Series) -> None:
        super().__init__(channel.transport)
        self.overlaps = False
        self._series = series
        weakref.finalize(self, _end, series).atexit = False

    def zeros(self, numel: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        return self._series.zeros(numel, dtype)

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        sends, recvs = (shards_of(self, each, skips_own=skips_own) for each in (send, recv))
        return self._exchange(sends, recvs, name)

    def bring(
        self, send: Tensor, room: Tensor | None, *, name: str, limits: LossLimits | None = None
    ) -> tuple[Work, Brought]:
        if room is not None:
            return super().bring(send, room, name=name)
        sends = shards_of(self, send)
        posted = self._series.post(sends, name, is_copied=False)
        brought = _PeerWork(self._series, posted, sends[self.rank], sends[self.rank])
        return brought, brought

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        return self._exchange([send] * self.world_size, shards_of(self, recv), name)

    def _exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], name: str) -> Work:
        posted = self._series.post(sends, name, is_copied=True)
        like = recvs[self.rank - 1]
        return _PeerWork(self._series, posted, sends[self.rank], like, recvs)


def _end(series: _Series) -> None:
    series.is_over = True


def over_peers(channel: Channel, opened: PeerMemory) -> PeerMemoryLane:
    """Return a lane of a channel's transport; every rank calls it."""
    return PeerMemoryLane(channel, opened.new_series(channel))


# Opening.


def open_peer_memory(channel: Channel, device: torch.device) -> PeerMemory | None:
    """Let the GPUs of one host read each other's memory; every rank calls it alike.

    Returns:
        None on every rank where some rank cannot: its process sees no GPU, GPUs do not reach each
        other, memory lies in expandable segments, or an exception came.
    """
    return connect_peers(channel, lambda: CudaPeers(device))


def connect_peers(channel: Channel, make: Callable[[], PeerDevice]) -> PeerMemory | None:
    """Try whether the ranks' devices read each other's memory; every rank calls it alike."""
    memory = open_shared_memory(channel)
    if memory is None:
        return None
    peers, reason = None, ""
    row = torch.zeros(_SHOWN + channel.world_size * DESCRIPTION_BYTES // 8, dtype=torch.int64)
    try:
        peers = make()
        token = torch.tensor([secrets.randbits(63) for _ in range(_TOKEN_WORDS)])
        values = peers.zeros(_TOKEN_WORDS, torch.int64).copy_(token)
        event, handle = peers.make_event()
        peers.record(event)
        words = memory.zeros(1, torch.int64)
        peers.count_into(words)
        peers.end_count(words)
        shared = b"".join(peers.share(values) for _ in range(channel.world_size - 1))
        shown = torch.cat([torch.tensor([1, peers.identity]), token, _words_of(handle + shared)])
        row[: len(shown)] = shown
    except Exception as error:  # what torch and CUDA raise has many kinds
        reason = str(error) or type(error).__name__
    rows = channel.sub("shown").allgather_rows(row)
    is_shown = bool(rows[:, 0].all())
    if peers is not None and is_shown:
        try:
            reason = _unread(peers, rows, channel.rank)
        except Exception as error:
            reason = str(error) or type(error).__name__
    # Until all have read, nobody lets go of ``values``.
    is_read = torch.tensor([is_shown and reason == ""])
    is_read_by_all = bool(channel.sub("read").allgather_rows(is_read).all())
    if peers is not None and is_read_by_all:
        return PeerMemory(memory, peers)
    memory.close()
    if reason:
        _logger.info(
            "rank %d reads no memory of the other GPUs of its host (%s), so no rank does",
            channel.rank,
            reason,
        )
    return None


_TOKEN_WORDS = 2
_SHOWN = 2 + _TOKEN_WORDS + EVENT_BYTES // 8  # words before the descriptions


def _unread(peers: PeerDevice, rows: Tensor, rank: int) -> str:
    """Read what each rank has shown; say what is out of reach, "" where nothing is."""
    for peer, row in enumerate(rows):
        if peer == rank:
            continue
        if reason := peers.unreachable(int(row[1])):
            return reason
        handle = _bytes_of(row[2 + _TOKEN_WORDS : _SHOWN])
        # Each rank has described its buffer for the others, in their order.
        mine = _cut(row[_SHOWN:], DESCRIPTION_BYTES)[rank - (rank > peer)]
        peers.wait(peers.open_event(handle))
        if peers.map(mine).view(torch.int64).tolist() != row[2 : 2 + _TOKEN_WORDS].tolist():
            return f"what it reads of rank {peer} is not what rank {peer} has written"
    return ""
