"""A loss-tolerant gather: rows travel to shard owners by datagrams, of which some may be lost.

After LTP (arXiv 2305.04279). A rule that takes one row of every rank has more rows than it needs at
any one value, so an owner need not wait until what was lost on the way has been sent again: it
closes a row once nearly all of it is there, and what is missing is filled from the other rows
(``aggregation/filling.py``). Results travel back on the same wire, and all of them arrive, so that
every rank has the same bits. ``csrc/datagram/`` is the wire: UDP packets that are authenticated and
encrypted, sent at the rate at which they arrive, whatever is lost.

``LossTolerant`` is what a user asks for; ``open_datagrams`` opens a port on every rank, and
``DatagramLane`` is the lane of exchanges on it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loft_hvd._native import datagram_extension
from loft_hvd.codec import Count
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, TransportError
from loft_hvd.transport import compact
from loft_hvd.transport.agreement import digest, on_all, share_keys
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
    subset,
)
from loft_hvd.transport.groups import address_for_others

__all__ = [
    "BLOCK_BYTES",
    "CallNumbers",
    "DatagramLane",
    "DatagramPort",
    "LinkLosses",
    "LossTolerant",
    "critical_blocks",
    "open_datagrams",
]

_logger = logging.getLogger(__name__)
_KEY_BYTES = 16  # bound from AES-128
BLOCK_BYTES = 1280  # of a packet; kBlockBytes in csrc/datagram/packet.h
_TRY_S = 10.0  # a choice: what has not come by then is held back by a firewall
# Bytes to each other rank, time after time, to see how fast links are. Choices: the first warm up.
_TRIED_BYTES = (2**16, 2**19, 2**20)
_SILENCE_S = 12.0  # a choice: above the heartbeat's own limit, which names ranks that are gone
_LOOK_S = 0.5  # a choice: between two looks for silent links
_LOOK_FOR_WAITS_S = 5.0  # a choice: between two looks for links without a deadline
_MUCH = 0.1  # of a link's packets, or of its rows: from here on it is told; a choice
_FEWEST = 100  # packets, or blocks, of which a share says something; a choice
_COUNTS = 2**16  # of an operation's calls, after which numbers begin again
_MOST_NAMES = 2**17  # that are counted; a choice, above what finished ones the wire remembers


@dataclass(frozen=True)
class LossTolerant:
    """Rows travel to shard owners by datagrams, and a few lost ones are done without.

    For ``gather=`` of ``DistributedOptimizer``, ``ddp_hook`` and ``allreduce``, on links that are
    long and lose packets (docs/links.md). Results have the same bits on all ranks, and differ from
    run to run.

    Attributes:
        share: of a row that must be there before an owner does without the rest, 0 < share <= 1.
        slack_s: seconds that owners wait for it beyond the longest usual time of a link; None for
            0.03 on links of less than 5 ms, else 0.1.
        critical: patterns of names of parameters whose gradients always arrive; None for those of
            one dimension or none, such as biases and norms.
        max_bytes_per_s: what a rank sends at most; None for what its links carry.
        reliable: everything arrives, by the same packets: for rules that need every row.
    """

    share: float = 0.8
    slack_s: float | None = None
    critical: tuple[str, ...] | None = None
    max_bytes_per_s: float | None = None
    reliable: bool = False

    def __post_init__(self) -> None:
        def is_number(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool)

        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ArgumentError(
                f"LossTolerant: share={self.share!r} must be > 0 and <= 1, of a row; 0.8 is usual, "
                "and reliable=True waits for all of it"
            )
        for name in ("slack_s", "max_bytes_per_s"):
            value = getattr(self, name)
            least = 0 if name == "slack_s" else 1
            if value is not None and not (is_number(value) and least <= value < float("inf")):
                raise ArgumentError(
                    f"LossTolerant: {name}={value!r} must be a number >= {least}, or None"
                )
        if self.critical is not None:
            names = self.critical
            if isinstance(names, str) or not all(isinstance(each, str) for each in names):
                raise ArgumentTypeError(
                    f"LossTolerant: critical={names!r} must be patterns of parameters' names, such "
                    'as ("*.bias", "head.*")'
                )
            object.__setattr__(self, "critical", tuple(names))
        if not isinstance(self.reliable, bool):
            raise ArgumentTypeError(
                f"LossTolerant: reliable={self.reliable!r} must be True or False"
            )

    def is_critical(self, name: str, num_dimensions: int) -> bool:
        """Say whether all of a parameter's gradient must arrive."""
        if self.critical is None:
            return num_dimensions <= 1
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.critical)


@dataclass(frozen=True, kw_only=True)
class LinkLosses:
    """What became of packets and rows between this rank and a peer, in some time.

    ``packets_*`` and ``blocks_sent_again`` are of what this rank has sent to the peer, the others
    of the peer's rows that have come to this rank, as their owner. A block is up to 1,280 bytes.
    """

    peer: Count
    address: str = ""
    round_trip_s: float = 0.0  # the least of the last seconds
    bytes_per_s: float = 0.0  # that have reached the peer, at best
    packets_sent: Count = 0
    packets_lost: Count = 0
    blocks_sent_again: Count = 0
    rows_closed_early: Count = 0  # that have blocks which were done without
    blocks: Count = 0  # of all rows
    blocks_filled: Count = 0  # of them, those that were filled in from other rows
    share_in_time: float = 1.0  # of a row, that is there when all of it has been sent once
    waits: bool = False  # for whole rows, as too little of them comes in time

    @property
    def lost_share(self) -> float:
        """Of the packets that this rank has sent."""
        return self.packets_lost / max(1, self.packets_sent)

    @property
    def filled_share(self) -> float:
        """Of the values that came from the peer."""
        return self.blocks_filled / max(1, self.blocks)

    def since(self, before: LinkLosses) -> LinkLosses:
        """Return what has come to it since then; what is no count stays as it is now."""
        return replace(
            self, **{name: getattr(self, name) - getattr(before, name) for name in _SUMS}
        )

    def plus(self, other: LinkLosses) -> LinkLosses:
        """Return both times together; what is no count stays as it is here."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _SUMS})

    def news(self, rank: int) -> list[str]:
        """Say what is worth telling of it, as ``rank`` has seen it; nothing of a good link."""
        found = []
        if self.waits:
            found.append(
                f"rank {rank} waits for the whole rows of rank {self.peer}, as without datagrams: "
                f"{self.share_in_time:.0%} of one is there once all has been sent"
            )
        if self.packets_sent >= _FEWEST and self.lost_share > _MUCH:
            found.append(
                f"the link from rank {rank} to rank {self.peer} loses {self.lost_share:.0%} of its "
                "packets"
            )
        if self.blocks >= _FEWEST and self.filled_share > _MUCH:
            found.append(
                f"{self.filled_share:.0%} of what rank {self.peer} sends to rank {rank} is filled "
                "in from other rows"
            )
        return found


_SUMS = (
    "packets_sent",
    "packets_lost",
    "blocks_sent_again",
    "rows_closed_early",
    "blocks",
    "blocks_filled",
)


class CallNumbers:
    """Numbers of exchanges, by their names and how often each was called; equal on every rank."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # of calls by name

    def take(self, name: str) -> int:
        """Return the number of the next exchange of a name."""
        count = self._counts.pop(name, 0)
        self._counts[name] = (count + 1) % _COUNTS  # last: those at the front are the oldest
        if len(self._counts) > _MOST_NAMES:
            del self._counts[next(iter(self._counts))]
        return digest(name) % 2**47 * _COUNTS + count


class DatagramPort:
    """The UDP port of this rank, to and from those of the others.

    ``bytes_per_s`` is what the slowest rank can send, the same on all.
    """

    def __init__(
        self, port: Any, places: Sequence[str], *, rank: int, gather: LossTolerant
    ) -> None:
        self.gather = gather
        self.port: Any = port  # None once it is closed
        self.rank = rank
        self.world_size = len(places)
        self.places = tuple(places)  # by rank, as users see them
        self.bytes_per_s: float | None = None
        self._numbers = CallNumbers()
        self._expected: dict[str, int] = {}
        self._held: dict[int, tuple[Tensor, ...]] = {}  # what is sent from and received into
        self._lock = threading.Lock()
        self._tunnelled: set[int] = set()
        self._looked_at = self._looked_for_waits_at = 0.0
        # By rank: rows with holes, blocks, and blocks that were missing.
        self._rows = [[0, 0, 0] for _ in places]
        self._told_waits: set[int] = set()  # ranks

    @property
    def wire(self) -> Any:
        if self.port is None:
            raise closed_error("datagrams between ranks")
        return self.port

    def expect(self, name: str, places: Sequence[int], num_bytes: int, recv: Tensor) -> None:
        """Let rows of the next exchange of that name be written to memory before it begins."""
        with self._lock:
            assert name not in self._expected, name
            number = self._expected[name] = self._numbers.take(name)
            self._held[number] = (recv,)
            self.wire.expect(number, places, num_bytes, compact.code_of(recv.dtype))

    def begin(self, name: str, *held: Tensor) -> int:
        """Return the number of an exchange that begins; its memory is kept until it is released."""
        with self._lock:
            for number in self.wire.take_released():
                del self._held[number]
            found = self._expected.pop(name, None)
            number = self._numbers.take(name) if found is None else found
            self._held[number] = held
            return number

    def silent(self) -> list[int]:
        """Return the ranks that have acknowledged nothing for long; asks now and then.

        Says once of a rank that its packets go another way.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return []
        self._looked_at = now
        for peer in self.wire.tunnelled():
            if peer not in self._tunnelled:
                self._tunnelled.add(peer)
                _logger.warning(
                    "rank %d: no UDP packet passes any more between %s and rank %d (%s); what "
                    "these two ranks send each other goes by TCP from now on, which is slow where "
                    "packets are lost: look at the firewalls on the way",
                    self.rank,
                    self.places[self.rank],
                    peer,
                    self.places[peer],
                )
        found: list[int] = self.wire.silent(_SILENCE_S)
        return found

    def took(self, rank: int, num_blocks: int, num_missing: int) -> None:
        """Note that a row of a rank has come, and how much of it was missing."""
        with self._lock:
            counts = self._rows[rank]
            counts[0] += num_missing > 0
            counts[1] += num_blocks
            counts[2] += num_missing

    def links(self) -> list[LinkLosses]:
        """Return what became of all that has travelled so far, by peer."""
        found = []
        for peer, place in enumerate(self.places):
            if peer == self.rank:
                continue
            state = self.wire.state(peer)
            with self._lock:
                rows_closed_early, blocks, blocks_filled = self._rows[peer]
            found.append(
                LinkLosses(
                    peer=peer,
                    address=place,
                    round_trip_s=state["round_trip_s"],
                    bytes_per_s=state["bytes_per_s"],
                    packets_sent=state["packets_sent"],
                    packets_lost=state["packets_lost"],
                    blocks_sent_again=state["blocks_sent_again"],
                    rows_closed_early=rows_closed_early,
                    blocks=blocks,
                    blocks_filled=blocks_filled,
                    share_in_time=state["mean_share"],
                    waits=state["waits"],
                )
            )
        return found

    def look_for_waits(self) -> None:
        """Warn once of each link that has no deadline any more; asks now and then."""
        now = time.monotonic()
        if now - self._looked_for_waits_at < _LOOK_FOR_WAITS_S:
            return
        self._looked_for_waits_at = now
        for link in self.links():
            if not link.waits or link.peer in self._told_waits:
                continue
            self._told_waits.add(link.peer)
            _logger.warning(
                "rank %d (%s): the link from rank %d (%s) has no deadline any more: %.0f %% of its "
                "rows is there once all has been sent, and share=%g asks for more, so this rank "
                "waits for all of them. Where rank %d overruns a queue on the way give "
                "max_bytes_per_s= below what its link carries; where the link loses so much, mend "
                "it, or give LossTolerant a smaller share= (docs/links.md)",
                self.rank,
                self.places[self.rank],
                link.peer,
                link.address,
                100 * link.share_in_time,
                self.gather.share,
                link.peer,
            )

    def close(self) -> None:
        """End the thread and close the port; what is under way is given up."""
        port, self.port = self.port, None
        if port is not None:
            port.close()
        self._held.clear()


class _Exchanged:
    """An exchange under way; its rows are there once it is done."""

    watch: Watch | None = None

    def __init__(self, ends: DatagramPort, number: int, name: str) -> None:
        self._ends = ends
        self._number = number
        self._name = name
        self._error = ""

    def done(self) -> bool:
        try:
            wire = self._ends.wire
        except TransportError as error:
            self._error = str(error)
            return True
        if wire.is_done(self._number):
            return True
        if silent := self._ends.silent():
            ranks = ", ".join(f"rank {rank} ({self._ends.places[rank]})" for rank in silent)
            self._error = (
                f"{ranks} has acknowledged no packet of rank {self._ends.rank} "
                f"({self._ends.places[self._ends.rank]}) for {_SILENCE_S:g} s, though it is not "
                "known to have failed: let UDP pass between these ports, or leave gather= away"
            )
        return bool(self._error)

    def finish(self) -> None:
        if self._error:
            raise TransportError(f"datagrams of {self._name!r}: {self._error}")
        missing, error = self._ends.wire.take(self._number)
        if error:
            raise TransportError(f"datagrams of {self._name!r}: {error}; all must be equal")
        self.took(missing)

    def took(self, missing: bytes) -> None:
        """Take what is missing of rows, [world_size, num_blocks]; here nothing is."""


class _Gathered(_Exchanged, Brought):
    """Rows under way to their owner, some of which may come with holes."""

    def __init__(
        self,
        ends: DatagramPort,
        number: int,
        name: str,
        room: Tensor,
        members: Sequence[int],
        present: Sequence[bool],
    ) -> None:
        _Exchanged.__init__(self, ends, number, name)
        Brought.__init__(self, room)
        self._members = list(members)
        self._present = present
        self.block_numel = _block_numel(room)

    def took(self, missing: bytes) -> None:
        num_missing = [0] * len(self._members)
        if missing:
            of_all = torch.frombuffer(bytearray(missing), dtype=torch.uint8)
            self.missing = of_all.view(self._ends.world_size, -1)[self._members]
            num_missing = self.missing.sum(dim=1).tolist()
        num_blocks = -(-self.rows[0].numel() // self.block_numel)
        for rank, count, is_present in zip(self._members, num_missing, self._present, strict=True):
            if is_present and rank != self._ends.rank:
                self._ends.took(rank, num_blocks, count)
        self._ends.look_for_waits()


def critical_blocks(
    spans: Sequence[tuple[int, int]], *, num_shards: int, shard: int, block_numel: int
) -> Tensor:
    """Return 1 for blocks that hold a critical value, uint8, [num_shards, num_blocks].

    ``spans`` are those of ``LossLimits``; a shard has ``shard`` values, a block ``block_numel``.
    """
    found = torch.zeros(num_shards, -(-shard // block_numel), dtype=torch.uint8)
    for begin, end in spans:
        for at in range(begin // shard, -(-end // shard)):
            first = max(begin - at * shard, 0) // block_numel
            last = -(-min(end - at * shard, shard) // block_numel)
            found[at, first:last] = 1
    return found


def _block_numel(values: Tensor) -> int:
    return BLOCK_BYTES // values.itemsize


class DatagramLane(Lane):
    """Exchanges of CPU tensors by datagrams; its other collectives are those of the transport.

    ``members`` are the ranks of the port that take part, in rank order.
    """

    name = "datagram"
    adds_up = False

    def __init__(
        self,
        below: Transport,
        ends: DatagramPort,
        members: Sequence[int] | None = None,
    ) -> None:
        super().__init__(below)
        self.overlaps = True
        self.bytes_per_s = ends.bytes_per_s
        self.loses = not ends.gather.reliable
        self._ends = ends
        self._members = tuple(range(ends.world_size)) if members is None else tuple(members)
        # Parts exchange under the same names at the same time.
        self._stem = "" if members is None else f"{self._members} "

    def subset(self, parts: Sequence[tuple[int, ...]]) -> DatagramLane:
        own = next(part for part in parts if self.rank in part)
        members = [self._members[rank] for rank in own]
        return DatagramLane(subset(self.below, parts), self._ends, members)

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        sends = shards_of(self, send, skips_own=skips_own)
        return self._begin(name, send, recv, sends, skips_own=skips_own, copies=False)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        # Copied: the slowest rank has it half a round trip after this one has all others'.
        return self._begin(name, send, recv, [send] * self.world_size, copies=True)

    def expect(self, recv: Tensor, *, name: str, skips_own: bool = False) -> None:
        rooms = shards_of(self, recv, skips_own=skips_own)
        places, num_bytes = self._places(rooms)
        self._ends.expect(self._stem + name, places, num_bytes, recv)

    def bring(
        self, send: Tensor, room: Tensor | None, *, name: str, limits: LossLimits | None = None
    ) -> tuple[Work, Brought]:
        assert room is not None, self.name
        if limits is None or not self.loses:
            return super().bring(send, room, name=name)
        sends, rooms = shards_of(self, send), shards_of(self, room.view(-1))
        rooms[self.rank].copy_(sends[self.rank])
        places, num_bytes = self._places(rooms)
        number = self._ends.begin(self._stem + name, send, room)
        gathered = _Gathered(self._ends, number, name, room, self._members, limits.present)
        gather, present = self._ends.gather, bytearray(self._ends.world_size)
        for rank, is_present in zip(self._members, limits.present, strict=True):
            present[rank] = is_present
        self._ends.wire.gather(
            number,
            self._places(sends)[0],
            places,
            num_bytes,
            compact.code_of(room.dtype),
            limits.most_missing,
            bytes(present),
            self._critical(limits.critical, room),
            gather.share,
            -1.0 if gather.slack_s is None else gather.slack_s,
        )
        return self.can.follow(gathered, name), gathered

    def _critical(self, spans: Sequence[tuple[int, int]], room: Tensor) -> bytes:
        """Return which blocks of which ranks' shards must arrive, [ranks of the port, blocks]."""
        if not spans:
            return b""
        own = critical_blocks(
            spans, num_shards=len(room), shard=room[0].numel(), block_numel=_block_numel(room)
        )
        found = torch.zeros(self._ends.world_size, own.shape[1], dtype=torch.uint8)
        found[list(self._members)] = own
        return found.numpy().tobytes()

    def _places(self, shards: Sequence[Tensor]) -> tuple[list[int], int]:
        """Return where shards lie, by rank of the port, and how many bytes each has."""
        places = [0] * self._ends.world_size
        num_bytes = 0
        for at, (rank, shard) in enumerate(zip(self._members, shards, strict=True)):
            places[rank] = shard.data_ptr()
            num_bytes = shard.nbytes if at != self.rank else num_bytes
        return places, num_bytes

    def _begin(
        self,
        name: str,
        send: Tensor,
        recv: Tensor,
        sends: Sequence[Tensor],
        *,
        copies: bool,
        skips_own: bool = False,
    ) -> Work:
        rooms = shards_of(self, recv, skips_own=skips_own)
        if rooms[self.rank].data_ptr() != sends[self.rank].data_ptr():
            rooms[self.rank].copy_(sends[self.rank].view_as(rooms[self.rank]))
        places, num_bytes = self._places(rooms)
        number = self._ends.begin(self._stem + name, send, recv)
        dtype = compact.code_of(send.dtype)
        self._ends.wire.begin(number, self._places(sends)[0], places, num_bytes, dtype, copies)
        return self.can.follow(_Exchanged(self._ends, number, name), name)


# Opening.


def open_datagrams(channel: Channel, gather: LossTolerant) -> DatagramPort | None:
    """Open a UDP port on every rank, and try the way to every other; every rank calls it alike.

    Returns:
        The port, or None on every rank where some rank cannot have one or is not reached.
    """
    rank, num_ranks = channel.rank, channel.world_size
    module, reason = datagram_extension()
    if not on_all(channel.sub("built"), module is not None) or module is None:
        _tell(channel, reason or "another rank's installation has no datagrams")
        return None
    address = address_for_others(channel)
    keys = share_keys(channel.sub("keys"))
    token = channel.sub("world").allgather_rows(torch.tensor([digest(keys[rank].hex())]))
    world = int(token[0]) % 2**32  # rank 0's
    first, last = config().datagram_ports
    port: Any = None
    try:
        port = module.Port(
            rank,
            num_ranks,
            world,
            address,
            first,
            last,
            [_key(key, world, rank, peer) for peer, key in enumerate(keys)],
            [_key(key, world, peer, rank) for peer, key in enumerate(keys)],
            0.0 if gather.max_bytes_per_s is None else float(gather.max_bytes_per_s),
        )
    except (RuntimeError, ValueError) as error:  # as where no port is free
        reason = str(error)
    own = torch.tensor(
        [int.from_bytes(socket.inet_aton(address), "big"), 0 if port is None else port.number]
    )
    rows = channel.sub("ports").allgather_rows(own).tolist()
    if not all(number for _, number in rows):
        _tell(channel, reason or "another rank has no UDP port")
        return None
    peers = [(socket.inet_ntoa(where.to_bytes(4, "big")), number) for where, number in rows]
    places = [f"{where}:{number}/udp" for where, number in peers]
    port.connect(peers)
    ends = DatagramPort(port, places, rank=rank, gather=gather)
    lane = DatagramLane(channel.transport, ends)
    unheard = _try_ways(lane, channel)
    if unheard:
        if rank == 0:
            pairs = ", ".join(
                f"rank {there} does not hear rank {here} ({places[here]} to {places[there]})"
                for there, here in unheard[:4]
            )
            _tell(channel, f"{pairs}: a firewall on the way lets no UDP pass, or not 1,400 bytes")
        ends.close()
        return None
    is_compact = _have_floats_compact(ends, channel)
    if rank == 0:
        _logger.info(
            "datagrams between ranks: at least %.0f Mb/s out of each, %s to %s, floats travel %s",
            8e-6 * (ends.bytes_per_s or 0.0),
            places[0],
            places[-1],
            "compact" if is_compact else "plain",
        )
    return ends


def _have_floats_compact(ends: DatagramPort, channel: Channel) -> bool:
    """Have floats travel in fewer bytes where links are slow, as a mesh does."""
    is_slow = (ends.bytes_per_s or 0.0) <= compact.SLOW_BYTES_PER_S
    wanted = config().compact == "on" or (config().compact == "auto" and is_slow)
    is_compact = on_all(channel.sub("compact"), wanted and compact.is_available())
    if compact.is_available():
        ends.wire.set_codec(compact.packet_codec(), is_compact)
    return is_compact


def _key(shared: bytes, world: int, source: int, target: int) -> bytes:
    """Return the key of one direction between two ranks, of what they share."""
    info = f"loft_hvd datagrams from rank {source} to rank {target}".encode()
    return _derived(shared, salt=world.to_bytes(4, "big"), info=info, num_bytes=_KEY_BYTES)


def _derived(secret: bytes, *, salt: bytes, info: bytes, num_bytes: int) -> bytes:
    """Return a key by HKDF-SHA256 (RFC 5869), of up to 32 bytes."""
    drawn = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(drawn, info + b"\1", hashlib.sha256)[:num_bytes]


def _try_ways(lane: DatagramLane, channel: Channel) -> list[tuple[int, int]]:
    """Send between all ranks; return (who does not hear, whom), the same on every rank.

    Notes at the port what the slowest rank can send.
    """
    num_ranks, ends = channel.world_size, lane._ends
    best = 0.0
    for at, num_bytes in enumerate(_TRIED_BYTES):
        sent, received = torch.ones((2, num_ranks * num_bytes), dtype=torch.uint8)
        received.zero_()
        began = time.monotonic()
        work = lane.alltoall(sent, received, name=f"{channel.name} way {at}")
        limit_s = min(_TRY_S, channel.timeout_s / 2)
        while not work.done() and time.monotonic() - began < limit_s:
            time.sleep(1e-3)
        took_s = time.monotonic() - began
        heard = received.view(num_ranks, -1).all(dim=1)
        heard[ends.wire.tunnelled()] = False  # by TCP: other lanes have more of that
        is_done = work.done() and bool(heard.all())
        if is_done:
            work.finish()
        row = torch.tensor([took_s, float(is_done), *heard.tolist()], dtype=torch.float64)
        rows = channel.sub("tried").allgather_rows(row)
        if not bool(rows[:, 1].all()):
            there = (rows[:, 2:] == 0).nonzero().tolist()
            return [(a, b) for a, b in there] or [(0, num_ranks - 1)]
        best = max(best, (num_ranks - 1) * num_bytes / float(rows[:, 0].max()))
    ends.bytes_per_s = lane.bytes_per_s = best
    return []


def _tell(channel: Channel, reason: str) -> None:
    _logger.warning(
        "rank %d: gather=LossTolerant(): no datagrams between ranks (%s); rows take the way that "
        "they take without it, and all of them arrive",
        channel.rank,
        reason,
    )
