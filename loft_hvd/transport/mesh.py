"""A mesh: connections between all ranks, on which any number of exchanges is under way at once.

An engine such as Horovod runs one collective after the other, and within one every step waits for
the slowest rank; between two, links are idle. Here each exchange is sends and receives of its own,
which torch's Gloo matches by a tag: the digest of the operation's name. So the next part of a
tensor fills the link while this one is aggregated. On 4 hosts with links of 200 Mb/s a rule's
exchange of 25 MB took 2.2 s on Horovod's collectives, 1.7 s so. Where links are slow, floats travel
in fewer bytes (``compact.py``); long and lossy ones take BBR (``congestion.py``).

``open_mesh`` connects ranks, which prove themselves to each other, and ``try_mesh`` takes the
connections of a process group that there is; ``MeshLane`` is the lane of all-to-alls and
all-gathers on them.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import hmac
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loft_hvd.config import config
from loft_hvd.errors import TransportError
from loft_hvd.transport import compact
from loft_hvd.transport.agreement import KEY_BYTES, digest, on_all, share_keys
from loft_hvd.transport.base import (
    Channel,
    Lane,
    Transport,
    Watch,
    Work,
    closed_error,
    shards_of,
    subset,
)
from loft_hvd.transport.congestion import CongestionControl, links_between
from loft_hvd.transport.groups import nodes_of

__all__ = [
    "Mesh",
    "MeshLane",
    "MeshWork",
    "Move",
    "open_mesh",
    "try_mesh",
]

_logger = logging.getLogger(__name__)
_TAGS = 2**30  # bound from torch, whose tags are C's int; each operation takes two
# Bytes that a rank sends to all others, time after time, to see how fast links are. Choices: the
# first time warms connections up; ranks begin milliseconds apart, which only many bytes outweigh.
_TRIED_BYTES = (2**20, 2**20, 2**23, 2**23)
# The least bytes of a message whose floats travel compact, and of what a rank sends in an exchange.
# Measured (docs/benchmarks.md): at 1 Gb/s exchanges of 3 MB gain 4 %, and those of 0.75 lose 12;
# what lies between is a choice. 16 KiB travel 19 us sooner so at 1 Gb/s and 97 at 200 Mb/s, and
# cost 40 us of CPU time at both ends together.
_COMPACT_BYTES, _COMPACT_EXCHANGE_BYTES = 16 * 1024, 10**6
_LONG_TRY_S = 0.05  # more bytes would say no more
_CONNECT_S = 20.0  # a choice: ranks that are not connected by then are behind a firewall
# Connections between two ranks where BBR is wanted and refused: each loses, and comes back, by
# itself. Measured with cubic, 50 ms and 1 % loss: with 4, 8 and 16 of them 6 MB take 0.40, 0.24 and
# 0.17 of the time with one. Messages are cut into no shorter parts than this, a choice.
_SEVERAL = 8
_PART_BYTES = 16 * 1024
# Whoever polls has a limit of its own. This one ends what was given up, and the mesh with it: Gloo
# closes connections on which a wait ends in vain. A choice.
_LONGEST_S = 7 * 24 * 3600.0
_INTERRUPT = timedelta(milliseconds=1)  # bound from Gloo: 0 would be no limit
_END_S = 5.0  # a choice: longest that ending what was given up may hold the script's end up
# What a rank tells of its connections took 158 bytes and 8 for each rank; twice that is a choice.
_ADDRESS_BYTES, _BYTES_A_RANK = 1024, 16

Move = Callable[[], None]
"""Waits for sends and receives that are under way."""

_Made = dict[tuple[int, int], Tensor]
"""An exchange's compact messages by where their values lie and how many: one for all peers where
all get the same, as in an all-gather."""


class MeshWork:
    """An operation of a mesh, whose sends and receives a thread waits for; the work joins it.

    One that is given up is ended with its mesh, or with the script.
    """

    # A thread each, as Gloo's receives say that they are done only to who waits for them.

    watch: Watch | None = None

    def __init__(self, name: str, move: Move, mesh: Mesh) -> None:
        self.mesh = mesh
        self._move = move
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"loft-{name}", daemon=True)
        _under_way().add(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._move()
        except BaseException as error:
            self._error = error
        finally:
            _under_way().discard(self)

    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, not for long."""
        self._thread.join(timeout_s)

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise TransportError(f"between ranks: {self._error}") from self._error


@functools.cache
def _under_way() -> set[MeshWork]:
    """Return the works whose threads have not ended; the script's end ends them."""
    works: set[MeshWork] = set()
    atexit.register(_end, works)
    return works


def _end(works: set[MeshWork]) -> None:
    """End what was given up: its threads must not meet the interpreter's end.

    Up to Python 3.13 a thread ends where it asks for the interpreter's lock after that, which in
    torch's C++ ends the process by SIGABRT: a rank that has finished would seem to have failed.
    """
    # Not in a fork, such as a loader process: its threads stayed behind, and are not alive.
    left = [work for work in works.copy() if not work.done()]
    for mesh in {work.mesh for work in left}:
        mesh.interrupt()
    until = time.monotonic() + _END_S
    for work in left:
        work.join(max(0.0, until - time.monotonic()))


class Mesh:
    """Sends and receives between ranks of a Gloo process group, all on the CPU.

    ``more`` are groups of the same ranks, on connections of their own: messages are cut evenly.
    ``ranks`` are the group's numbers of those that take part, in rank order. ``longest_s`` ends
    waits, and with them the group's connections. ``bytes_per_s`` is what the slowest rank can send,
    the same on all; None where nobody has tried. ``is_compact``, the same on all, has floats travel
    in fewer bytes, where a rank sends at least ``compact_bytes`` of them in an exchange; but not
    among some ranks of one of several ``nodes``, which are given by their ranks.
    """

    def __init__(
        self,
        group: Any,
        *,
        rank: int,
        ranks: Sequence[int],
        longest_s: float = _LONGEST_S,
        bytes_per_s: float | None = None,
        is_compact: bool = False,
        compact_bytes: float | None = None,
        nodes: Sequence[Sequence[int]] = (),
        congestion: CongestionControl | None = None,
        more: Sequence[Any] = (),
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.is_compact = is_compact
        self._compact_bytes = _COMPACT_EXCHANGE_BYTES if compact_bytes is None else compact_bytes
        self._nodes = tuple(nodes)
        self.rank = rank
        self.world_size = len(ranks)
        self._ranks = tuple(ranks)
        self._congestion = congestion  # of its connections, where they are between hosts
        self._groups = () if group is None else (group, *more)
        self._longest = timedelta(seconds=longest_s)
        self._expected: dict[str, list[Any]] = {}  # receives by name, until their exchange begins
        self._parts: weakref.WeakSet[Mesh] = weakref.WeakSet()  # on the same connections
        _under_way()  # so early: what the users of a mesh do at the script's end goes before

    def subset(self, members: Sequence[int]) -> Mesh:
        """Return the mesh among some ranks, this one too; others need not know of it."""
        ranks = [self._ranks[member] for member in members]
        at = list(members).index(self.rank)
        is_near = len(self._nodes) > 1 and any(set(ranks) <= set(node) for node in self._nodes)
        part = Mesh(
            self.group,
            rank=at,
            ranks=ranks,
            bytes_per_s=self.bytes_per_s,
            is_compact=self.is_compact and not is_near,
            # Such subsets exchange at once, and share the links that their ranks have in common.
            compact_bytes=self._compact_bytes * len(ranks) / self.world_size,
            nodes=self._nodes,
            congestion=self._congestion,
            more=self._groups[1:],
        )
        self._parts.add(part)
        return part

    @property
    def group(self) -> Any:
        """The first process group; None once it is closed."""
        return self._groups[0] if self._groups else None

    @property
    def num_connections(self) -> int:
        """Between two ranks."""
        return len(self._groups)

    def interrupt(self) -> None:
        """End the waits on these connections, and with them the connections, for subsets too."""
        # Gloo ends both where one wait ends in vain, so this waits for what nobody sends. For one
        # peer after the other: of one that has gone there is nothing to wait for.
        nothing = torch.empty(1, dtype=torch.uint8)
        for group in self._groups:
            for peer in self._sources():
                with suppress(RuntimeError):  # as it has ended
                    tag = _tag("interrupt", nothing, 0)
                    self._started("recv", nothing, peer, tag, group).wait(_INTERRUPT)

    def close(self) -> None:
        """End the connections, for subsets too; what was exchanged by then has arrived."""
        # What was given up holds Gloo's buffers, and these the connections: they would not go.
        if any(work.mesh.group is self.group for work in _under_way().copy()):
            self.interrupt()
        for part in self._parts:
            part.close()
        self._expected.clear()
        self._groups = ()  # nobody else has them: with them the connections go

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Move:
        """Start an all-to-all; see ``Transport``."""
        return self.exchange(
            shards_of(self, send, skips_own=skips_own),
            shards_of(self, recv, skips_own=skips_own),
            name=name,
        )

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Move:
        """Start an all-gather; see ``Transport``."""
        return self.exchange([send] * self.world_size, shards_of(self, recv), name=name)

    def expect(self, recv: Tensor, *, name: str, skips_own: bool = False) -> None:
        """Start to receive what the next exchange of that name brings; see ``Lane``."""
        # Gloo sends values once the other side has said that it is ready to receive them, and says
        # so behind all that is being sent on that connection.
        shards = shards_of(self, recv, skips_own=skips_own)
        self._expected[name] = self._recv_all(shards, name)

    def _sources(self) -> list[int]:
        return [(self.rank - shift) % self.world_size for shift in range(1, self.world_size)]

    def exchange(
        self, sends: Sequence[Tensor], recvs: Sequence[Tensor], *, name: str, phase: int = 0
    ) -> Move:
        """Start to send ``sends[j]`` to rank j and to fill ``recvs[i]`` from rank i, near first."""
        if self._congestion is not None:
            self._congestion.look()
        started = self._expected.pop(name, None) if phase == 0 else None
        if started is None:
            started = self._recv_all(recvs, name, phase)
        # Of 4 ranks rank 1 sends to 2, 3, 0 in turn: at no time do all send to the same rank.
        made: _Made = {}
        for shift in range(1, self.world_size):
            target = (self.rank + shift) % self.world_size
            started += self._send(sends[target], target, name, phase, made=made)
        # The own part is copied, unless it is the same memory, as in the second phase of a sum.
        if recvs[self.rank].data_ptr() != sends[self.rank].data_ptr():
            recvs[self.rank].copy_(sends[self.rank].view_as(recvs[self.rank]))
        return functools.partial(self._wait, started)

    def broadcast(self, values: Tensor, *, name: str) -> Move:
        """Start to send rank 0's values to all others."""
        others = range(1, self.world_size)
        made: _Made = {}
        started = (
            [each for peer in others for each in self._send(values, peer, name, made=made)]
            if self.rank == 0
            else self._recv(values, 0, name)
        )
        return functools.partial(self._wait, started)

    def _send(
        self, values: Tensor, peer: int, name: str, phase: int = 0, *, made: _Made
    ) -> list[Any]:
        tag, is_compact = _tag(name, values, phase), self._travels_compact(values)
        started = []
        for group, part in self._cut(values):
            message = part
            if is_compact:
                place = part.data_ptr(), part.numel()
                if place not in made:
                    made[place] = compact.message_of(part)
                message = made[place]
            started.append(self._started("send", message, peer, tag, group))
        return started

    def _recv(self, values: Tensor, peer: int, name: str, phase: int = 0) -> list[Any]:
        tag, is_compact = _tag(name, values, phase), self._travels_compact(values)
        started = []
        for group, part in self._cut(values):
            room = compact.room_for(part) if is_compact else part
            work = self._started("recv", room, peer, tag, group)
            started.append(
                _Unread(work, room, part, rank=self._ranks[peer]) if is_compact else work
            )
        return started

    def _recv_all(self, recvs: Sequence[Tensor], name: str, phase: int = 0) -> list[Any]:
        return [
            each for peer in self._sources() for each in self._recv(recvs[peer], peer, name, phase)
        ]

    def _cut(self, values: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield the parts of a message, alike at both of its ends, with the group of each."""
        if not self._groups:
            raise closed_error("connections between ranks")
        num_parts = max(1, min(len(self._groups), values.nbytes // _PART_BYTES))
        parts = [values] if num_parts == 1 else values.view(-1).tensor_split(num_parts)
        return zip(self._groups, parts, strict=False)

    def _travels_compact(self, values: Tensor) -> bool:
        # By nothing but what the tag has, so that both ends of a message think alike.
        return (
            self.is_compact
            and values.nbytes >= _COMPACT_BYTES
            and values.nbytes * (self.world_size - 1) >= self._compact_bytes
            and compact.has_messages(values.dtype)
        )

    def _started(self, call: str, values: Tensor, peer: int, tag: int, group: Any) -> Any:
        try:
            return getattr(group, call)([values], self._ranks[peer], tag)
        except RuntimeError as error:  # as when the peer has gone
            raise TransportError(f"to or from rank {self._ranks[peer]}: {error}") from error

    def _wait(self, started: list[Any]) -> None:
        fault: _FaultyMessageError | None = None
        for each in started:
            try:
                each.wait(self._longest)
            except _FaultyMessageError as error:  # the others are under way, and will come
                fault = fault or error
                _logger.error("%s", error)  # who waits may have a limit that ends sooner
            except Exception as error:
                if fault is None:
                    raise
                raise fault from error
        if fault is not None:
            raise fault


class _FaultyMessageError(TransportError):
    """What a rank has sent cannot be read."""


class _Unread:
    """A message that comes into a room of its own; its values are there when ``wait`` ends."""

    def __init__(self, work: Any, room: Tensor, values: Tensor, *, rank: int) -> None:
        self._work = work
        self._room = room
        self._values = values
        self._rank = rank

    def wait(self, longest: timedelta) -> None:
        self._work.wait(longest)
        try:
            compact.read(self._room, self._values)
        except TransportError as error:
            raise _FaultyMessageError(f"from rank {self._rank}: {error}") from error


def _tag(name: str, values: Tensor, phase: int) -> int:
    """Return the tag of an operation's messages of such values, the same on every rank."""
    # With size and dtype, by which they travel: Gloo ends the process that receives more than it
    # expects. Ranks that disagree wait instead, and what they gave up stays in the way of the
    # name's next operation: whoever is not sure that ranks agree compares first.
    return 2 * (digest(f"{name} {values.nbytes} {values.dtype}") % (_TAGS // 2)) + phase


class MeshLane(Lane):
    """Exchanges of CPU tensors on a mesh; its other collectives are those of the transport."""

    name = "mesh"
    adds_up = False  # owners keep links busier than one collective after the other

    def __init__(self, below: Transport, mesh: Mesh) -> None:
        super().__init__(below)
        self.overlaps = True
        self.mesh = mesh
        self.bytes_per_s = mesh.bytes_per_s

    def subset(self, parts: Sequence[tuple[int, ...]]) -> MeshLane:
        own = next(part for part in parts if self.rank in part)
        return MeshLane(subset(self.below, parts), self.mesh.subset(own))

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        return self._post(name, self.mesh.alltoall(send, recv, name=name, skips_own=skips_own))

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        return self._post(name, self.mesh.allgather(send, recv, name=name))

    def expect(self, recv: Tensor, *, name: str, skips_own: bool = False) -> None:
        self.mesh.expect(recv, name=name, skips_own=skips_own)

    def _post(self, name: str, move: Move) -> Work:
        return self.can.follow(MeshWork(name, move, self.mesh), name)


# Opening.


_STORE: Any = getattr(dist, "Store", object)  # a torch may be built without distributed


class _Meeting:
    """Where groups that connect at once tell the other ranks' their addresses, all together."""

    def __init__(self, channel: Channel, num_groups: int) -> None:
        self._channel = channel
        self._told: list[tuple[str, bytes]] = [("", b"")] * num_groups
        self.heard: list[dict[str, bytes]] = [{} for _ in range(num_groups)]  # by group
        self._all_there = threading.Barrier(num_groups, action=self._meet, timeout=_CONNECT_S)

    def meet(self, at: int, key: str, value: bytes) -> None:
        """Tell of group ``at``; waits until all groups have, and all ranks."""
        self._told[at] = key, value
        self._all_there.wait()

    def _meet(self) -> None:
        # Of each group [bytes of the message, the message, zeros], eight bytes a number.
        room = _ADDRESS_BYTES + _BYTES_A_RANK * self._channel.world_size
        rows = torch.zeros(len(self._told), 1 + room // 8, dtype=torch.int64)
        for row, (key, value) in zip(rows, self._told, strict=True):
            told = key.encode() + b"\0" + value
            row[0] = len(told)
            row[1:] = torch.frombuffer(bytearray(told.ljust(room, b"\0")), dtype=torch.int64)
        for of_rank in self._channel.sub("addresses").allgather_rows(rows.view(-1)):
            for heard, (num_bytes, *numbers) in zip(
                self.heard, of_rank.view_as(rows).tolist(), strict=True
            ):
                told = torch.tensor(numbers).numpy().tobytes()[:num_bytes]
                name, _, address = told.partition(b"\0")
                heard[name.decode()] = address


class _Addresses(_STORE):  # type: ignore[misc]  # a base that mypy cannot know
    """What Gloo's connecting ranks tell each other, by one all-gather instead of a server."""

    def __init__(self, meeting: _Meeting, at: int) -> None:
        super().__init__()
        self._meeting = meeting
        self._at = at
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep what this rank tells the others."""
        self._own[key] = value.encode() if isinstance(value, str) else bytes(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Do nothing: ``get`` waits."""

    def get(self, key: str) -> bytes:
        """Return what a rank has told; the first call for another's meets all ranks."""
        if key in self._own:
            return self._own[key]
        if not self._meeting.heard[self._at]:
            ((own, value),) = self._own.items()  # each rank tells one thing before it asks
            self._meeting.meet(self._at, own, value)
        return self._meeting.heard[self._at][key]


def open_mesh(channel: Channel, *, interface: str, compact_floats: str = "auto") -> Mesh | None:
    """Connect every rank to every other; every rank calls it alike.

    Args:
        channel: carries the addresses.
        interface: of the network that ranks reach each other by, such as "eth0"; empty for none.
        compact_floats: whether floats travel in fewer bytes: "on", "off", or "auto", where links
            are slow. They do where no rank has a reason against it.

    Returns:
        The mesh, or None on every rank where some rank has no interface, cannot be reached, or has
        not proven itself to another.
    """
    keys: list[bytes] = []  # made with the first groups, and used for all

    def connect(channel: Channel, num_groups: int) -> list[Any] | str:
        return _connect(channel, num_groups, interface=interface, keys=keys)

    made = connect(channel, 1)
    mesh: Mesh | str = (
        made
        if isinstance(made, str)
        else try_mesh(
            made[0], range(channel.world_size), channel, connect, compact_floats=compact_floats
        )
    )
    if isinstance(mesh, str):
        _tell(channel, mesh)
        return None
    return mesh


def _connect(
    channel: Channel, num_groups: int, *, interface: str, keys: list[bytes]
) -> list[Any] | str:
    """Return groups of all ranks that have proven themselves; or, on every rank, why not.

    ``keys`` are those of ``share_keys``, which puts them there where it is empty.
    """
    devices: list[Any] = []
    reason = "no interface is known"
    if interface:
        try:
            devices = [
                dist.ProcessGroupGloo.create_device(interface=interface) for _ in range(num_groups)
            ]
        except (RuntimeError, AttributeError) as error:
            reason = str(error)
    # Agreed on before ranks wait for each other's addresses, and after they have connected.
    if not on_all(channel.sub("device"), bool(devices)):
        return reason
    meeting = _Meeting(channel, num_groups)

    def connected(at: int) -> Any:
        options = vars(dist.ProcessGroupGloo)["_Options"]()
        options._devices = [devices[at]]
        options._timeout = timedelta(seconds=_CONNECT_S)
        store = _Addresses(meeting, at)
        return dist.ProcessGroupGloo(store, channel.rank, channel.world_size, options)

    groups: list[Any] = []
    try:
        with ThreadPoolExecutor(num_groups) as pool:  # connecting takes round trips: all at once
            groups = list(pool.map(connected, range(num_groups)))
    except Exception as error:  # what the engine raises differs from version to version
        reason = str(error)
    if not on_all(channel.sub("connected"), bool(groups)):
        return reason
    if not keys:
        keys += share_keys(channel.sub("keys"))
    found = [_prove(group, keys, rank=channel.rank) for group in groups]
    reason = next((each for each in found if each), "")
    if not on_all(channel.sub("proven"), not reason):
        return reason or "a rank has met a stranger"
    return groups


def try_mesh(
    group: Any,
    ranks: Sequence[int],
    channel: Channel,
    connect: Callable[[Channel, int], list[Any] | str],
    *,
    compact_floats: str = "auto",
) -> Mesh | str:
    """Try how fast connections are, and choose how floats travel; every rank calls it alike.

    Args:
        group: a Gloo process group that nobody else sends on by the mesh's tags.
        ranks: the group's numbers of the ranks, in rank order.
        channel: the ranks.
        connect: makes more such groups, on connections of their own, or says on every rank why not.
        compact_floats: as in ``open_mesh``.

    Returns:
        The mesh; or, on every rank, why some rank cannot use the connections.
    """
    links = links_between(channel.sub("connections"))
    congestion = CongestionControl(links, rank=channel.rank, wish=config().links)
    bytes_per_s, silent = _try_links(group, ranks, channel.sub("links"), when_warm=congestion.look)
    more: list[Any] = []
    num_connections = _num_connections(channel.sub("several"), congestion)
    if not silent and num_connections > 1:
        made = connect(channel.sub("more"), num_connections - 1)
        if isinstance(made, str):
            _logger.warning(
                "rank %d: one connection to each rank and not %d: %s",
                channel.rank,
                num_connections,
                made,
            )
        else:
            more = made
            bytes_per_s, silent = _try_links(group, ranks, channel.sub("all"), more=more)
    if silent:
        return f"ranks {silent} could not send or receive"
    is_slow = bytes_per_s <= compact.SLOW_BYTES_PER_S
    wanted = compact_floats == "on" or (compact_floats == "auto" and is_slow)
    is_compact = on_all(channel.sub("compact"), wanted and compact.is_available())
    if channel.rank == 0:
        _logger.info(
            "between ranks: at least %.0f Mb/s out of each, %s, floats travel %s",
            8e-6 * bytes_per_s,
            f"{1 + len(more)} connections between two" if more else "one connection between two",
            "compact" if is_compact else "plain",
        )
    return Mesh(
        group,
        rank=channel.rank,
        ranks=ranks,
        bytes_per_s=bytes_per_s,
        is_compact=is_compact,
        nodes=nodes_of(channel),
        congestion=congestion,
        more=more,
    )


def _num_connections(channel: Channel, congestion: CongestionControl) -> int:
    """Return how many connections two ranks shall have, the same on every rank."""
    wish = config().links
    wanted = int(wish) if wish.isdecimal() else _SEVERAL if congestion.is_refused else 1
    return int(channel.allgather_rows(torch.tensor([wanted])).max())


def _try_links(
    group: Any,
    ranks: Sequence[int],
    channel: Channel,
    *,
    more: Sequence[Any] = (),
    when_warm: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[float, list[int]]:
    """Return the bytes a second that the slowest rank sends, and the ranks that could not.

    Both are the same on every rank. ``when_warm`` is called after the first bytes.
    """
    num_ranks, limit_s = channel.world_size, min(_CONNECT_S, channel.timeout_s / 2)
    mesh = Mesh(group, rank=channel.rank, ranks=ranks, longest_s=limit_s, more=more)
    best = 0.0
    for at, num_bytes in enumerate(_TRIED_BYTES):
        shard = -(-num_bytes // max(1, num_ranks - 1))
        sent, received = torch.zeros((2, num_ranks * shard), dtype=torch.uint8)
        began, took_s = clock(), math.inf
        with suppress(RuntimeError, TransportError):  # all ranks hear of it below
            mesh.alltoall(sent, received, name=f"link {at}")()
            took_s = clock() - began
        by_rank = channel.allgather_rows(torch.tensor([took_s], dtype=torch.float64)).flatten()
        if silent := by_rank.isinf().nonzero().flatten().tolist():
            return best, silent
        slowest_s = float(by_rank.max())
        best = max(best, num_bytes / slowest_s)
        if at > 0 and slowest_s > _LONG_TRY_S:
            break
        if at == 0:
            when_warm()
    return best, []


def _prove(group: Any, keys: Sequence[bytes], *, rank: int) -> str:
    """Say on the connections themselves who is at each end; returns what is wrong, or "".

    Gloo believes whoever connects. So every two ranks send each other a random number, and then
    what only who has their key can compute from both. None of it is of use a second time.
    """
    mesh = Mesh(group, rank=rank, ranks=range(len(keys)), longest_s=_CONNECT_S)
    own = torch.tensor(list(secrets.token_bytes(len(keys) * KEY_BYTES)), dtype=torch.uint8)
    theirs, told = torch.zeros_like(own), torch.zeros_like(own)
    try:
        mesh.alltoall(own, theirs, name="numbers")()
        ours, others = (numbers.view(len(keys), -1).tolist() for numbers in (own, theirs))
        proofs, due = bytearray(), []
        for peer, key in enumerate(keys):
            proofs += _proof(key, rank, ours[peer], others[peer])
            due.append(_proof(key, peer, others[peer], ours[peer]))
        mesh.alltoall(torch.frombuffer(proofs, dtype=torch.uint8), told, name="proofs")()
    except (RuntimeError, TransportError) as error:  # as when the other end says nothing
        return f"not all ranks have proven themselves: {error}"
    wrong = [
        peer
        for peer, proof in enumerate(told.view(len(keys), -1).tolist())
        if peer != rank and not hmac.compare_digest(bytes(proof), due[peer])
    ]
    return f"who answers as ranks {wrong} has not their keys" if wrong else ""


def _proof(key: bytes, rank: int, own: Sequence[int], other: Sequence[int]) -> bytes:
    """Return what shows that ``rank`` has a key, for the random numbers of both sides."""
    said = f"loft_hvd mesh rank {rank} ".encode() + bytes(own) + bytes(other)
    return hmac.digest(key, said, hashlib.sha256)


def _tell(channel: Channel, reason: str) -> None:
    _logger.warning(
        "rank %d: no connections between all ranks (%s); rules take the engine's collectives. "
        "LOFT_HVD_LANE=engine does so without a trial",
        channel.rank,
        reason,
    )
