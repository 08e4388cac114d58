"""Ranks as threads of one process: the transport for tests and for a single process.

``LocalWorld(world_size)`` is the wire; ``world.transport(rank)`` is one rank's end of it;
``run_ranks(world_size, function)`` runs a function on every rank and returns what each returned.
A world takes ``Faults``: delays, failures, reordering, ranks that stop and blocks of rows that are
lost, the same every time.

::

    def train(transport):
        optimizer = loft.DistributedOptimizer(..., transport=transport)
        ...

    run_ranks(4, train, faults=Faults(max_delay_s=0.002, reorder=True, slow={3: 0.01}))
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from loft_hvd.errors import (
    ArgumentError,
    MismatchError,
    PeerError,
    TransportError,
    TransportTimeoutError,
)
from loft_hvd.transport.base import (
    Abilities,
    Brought,
    Channel,
    Lane,
    LossLimits,
    Transport,
    Work,
    subset,
)
from loft_hvd.transport.datagram import BLOCK_BYTES, CallNumbers, LossTolerant, critical_blocks

__all__ = ["Faults", "LocalLane", "LocalTransport", "LocalWatch", "LocalWorld", "run_ranks"]

_T = TypeVar("_T")
_MOST_POLLS = 20  # a choice: enough to change the order in which operations in flight end


@dataclass(frozen=True)
class Faults:
    """Delays, failures, reordering and losses of a local world's operations.

    A rank's operations count from 0 in the order in which it starts them.

    What is lost are blocks of 1,280 bytes of the rows that travel to shard owners, where
    ``gather=loft.LossTolerant()`` was asked for. Whether one is lost is drawn by the seed, the
    exchange, how often it was called before and the block, whichever thread is first: the same in
    every world in which a script does the same. What the owner's rule cannot do without, and what
    is critical, arrives however much is lost, as it is sent again until it does in a real job.
    Nothing else is ever lost: not without ``gather=``, not under ``LossTolerant(reliable=True)``,
    and no result.

    Attributes:
        seed: of every draw.
        max_delay_s: each rank sees each operation end up to so many seconds late, drawn anew.
        slow: seconds by which everything that a rank sends arrives late, by rank.
        loss: share of blocks that are lost, >= 0 and <= 1; of every rank's, or by the rank that
            sends them.
        reorder: whether operations in flight end in another order than they were started in.
        fail: the operation that raises, by the rank it raises on.
        stop: the operation from which on a rank sends nothing and answers nothing, by rank; the
            thread that starts it stays in that call until the others have ended.
    """

    seed: int = 0
    max_delay_s: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    loss: float | Mapping[int, float] = 0.0
    reorder: bool = False
    fail: Mapping[int, int] = field(default_factory=dict)
    stop: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = [self.max_delay_s, *self.slow.values()]
        numbers = [*self.fail.values(), *self.stop.values()]
        if not all(0 <= value < float("inf") for value in seconds) or min(numbers, default=0) < 0:
            raise ArgumentError(
                f"Faults: max_delay_s={self.max_delay_s}, slow={dict(self.slow)}, "
                f"fail={dict(self.fail)} and stop={dict(self.stop)} hold seconds and operation "
                "numbers, all >= 0"
            )
        losses = self.loss.values() if isinstance(self.loss, Mapping) else [self.loss]
        if not all(0 <= share <= 1 for share in losses):
            raise ArgumentError(
                f"Faults: loss={self.loss} must be a share of blocks, >= 0 and <= 1, or one by rank"
            )

    def check(self, world_size: int) -> None:
        """Raise unless every rank that is named is one of the world."""
        losing = self.loss if isinstance(self.loss, Mapping) else ()
        named = {*self.slow, *losing, *self.fail, *self.stop}
        if wrong := sorted(rank for rank in named if not 0 <= rank < world_size):
            raise ArgumentError(f"Faults: ranks {wrong} are not >= 0 and < {world_size}")

    def delay_s(self, rank: int, number: int) -> float:
        """Return how late a rank sees the end of one of its operations, in seconds."""
        return self.max_delay_s * self._draw("delay", rank, number)

    def num_polls(self, rank: int, number: int) -> int:
        """Return how often a rank asks in vain whether an operation that has ended has ended."""
        return int((_MOST_POLLS + 1) * self._draw("polls", rank, number)) if self.reorder else 0

    def loss_of(self, rank: int) -> float:
        """Return the share of blocks that are lost of what a rank sends."""
        return self.loss.get(rank, 0.0) if isinstance(self.loss, Mapping) else self.loss

    def lost_blocks(
        self,
        exchange: str,
        limits: LossLimits,
        *,
        ranks: Sequence[int],
        own: int,
        shard: int,
        block_numel: int,
    ) -> Tensor:
        """Draw which blocks of rows do not come to a shard's owner.

        Args:
            exchange: what tells this exchange from others.
            limits: what may be missing.
            ranks: whose rows they are.
            own: the row of the owner itself, which does not travel.
            shard: values of a row.
            block_numel: values of a block.

        Returns:
            bool, [len(ranks), num_blocks].
        """
        # A seed of its own for each exchange and owner: they begin in any order.
        seed = random.Random(f"{self.seed} loss {exchange} {own}").getrandbits(63)
        shape = len(ranks), -(-shard // block_numel)
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        losses = torch.tensor([self.loss_of(rank) for rank in ranks]).unsqueeze(1)
        # Above 0 where it is lost, and there uniform whatever a rank's share: nobody's comes first.
        lateness = (1 - drawn / losses).clamp_(min=0).nan_to_num_(0.0)
        lateness[own] = 0
        critical = critical_blocks(
            limits.critical, num_shards=len(ranks), shard=shard, block_numel=block_numel
        )
        lateness[:, critical[own].bool()] = 0
        # Of the rows that count only so many may lack a block: the latest. Of 0.2 0 0.7 0.4 the
        # places in order are 2 3 0 1: rows 2 and 3 lack it, and that of row 0 is sent again.
        counting = torch.tensor(limits.present).unsqueeze(1)
        order = (lateness * counting).argsort(dim=0, descending=True).argsort(dim=0)
        return (lateness > 0) & ((order < limits.most_missing) | ~counting)

    def _draw(self, what: str, rank: int, number: int) -> float:
        # Drawn by what it is for, not one after another: ranks are threads that draw at once.
        return random.Random(f"{self.seed} {what} {rank} {number}").random()


@dataclass
class _Operation:
    """One collective: what each rank brought."""

    kind: str
    members: tuple[int, ...]  # the ranks that take part, ascending
    sends: dict[int, Tensor] = field(default_factory=dict)
    recvs: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    is_done: bool = False
    arrives_at: float = 0.0  # when what the slowest rank sent is there

    def complete(self) -> None:
        """Move the bytes; called once, by the last rank to arrive, so no thread is needed."""
        first = self.sends[self.members[0]]
        for rank, send in self.sends.items():
            if send.dtype != first.dtype or send.numel() != first.numel():
                self.error = MismatchError(
                    f"{self.kind}: rank {rank} brought {send.numel()} values of {send.dtype}, "
                    f"rank {self.members[0]} {first.numel()} of {first.dtype}; all must be equal"
                )
                return
        for at, rank in enumerate(self.members):
            self.recvs[rank].copy_(self._received(at))

    def _received(self, at: int) -> Tensor:
        """Return what the rank at a place among the members receives."""
        rows = [self.sends[peer] for peer in self.members]
        if self.kind == "allgather":
            return torch.cat(rows)
        if self.kind == "allreduce":
            return torch.stack(rows).sum(dim=0)
        if self.kind == "broadcast":
            return rows[0]
        if self.kind == "alltoall":
            return torch.cat([row.tensor_split(len(rows))[at] for row in rows])
        # Without the own shard. Of three ranks, which leave out their own of shards 0 1 2:
        #   rank 0 sends  1 2    the shard of the rank at place ``at`` is one place earlier
        #   rank 1 sends  0 2    where the sender comes before it,
        #   rank 2 sends  0 1    and in its own place where the sender comes after it.
        num_shards = len(rows) - 1
        others = [(place, row) for place, row in enumerate(rows) if place != at]
        parts = [row.tensor_split(num_shards)[at - (at > place)] for place, row in others]
        return torch.cat([rows[0][:0], *parts])


class LocalWorld:
    """The wire between ranks that are threads of this process.

    Args:
        world_size: number of ranks.
        faults: what goes wrong; nothing by default.
        ranks_per_node: ranks 0 to ranks_per_node - 1 are on one node, as many as follow on the
            next, and so on; None for all on one.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        world_size: int,
        faults: Faults | None = None,
        *,
        ranks_per_node: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if world_size < 1:
            raise ArgumentError(f"LocalWorld: world_size={world_size} must be >= 1")
        self.world_size = world_size
        self.ranks_per_node = world_size if ranks_per_node is None else ranks_per_node
        if self.ranks_per_node < 1:
            raise ArgumentError(f"LocalWorld: ranks_per_node={ranks_per_node} must be >= 1")
        self.faults = Faults() if faults is None else faults
        self.faults.check(world_size)
        self.failed_rank: int | None = None
        self.clock = clock
        self._failure = ""
        self._changed = threading.Condition()
        # By members too: groups of ranks use the same names at the same time.
        self._open: dict[tuple[tuple[int, ...], str], _Operation] = {}
        self._num_posted = [0] * world_size
        self.num_lanes = [0] * world_size  # that may lose something, by rank
        self._is_over = threading.Event()

    def transport(self, rank: int) -> LocalTransport:
        """Return one rank's end of the wire."""
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"LocalWorld: rank={rank} must be >= 0 and < {self.world_size}")
        return LocalTransport(self, rank)

    def fail(self, rank: int, error: BaseException | None = None) -> None:
        """Record that a rank has failed, so that the others' waits end with an error."""
        with self._changed:
            if self.failed_rank is None:
                self._failure = "" if error is None else f": {type(error).__name__}: {error}"
                self.failed_rank = rank

    def end(self) -> None:
        """Let ranks go that were told to stop: the others have ended."""
        self._is_over.set()

    def peer_error(self) -> PeerError:
        """Return what ranks raise that wait for one that has failed."""
        return PeerError(
            f"rank {self.failed_rank} has failed{self._failure}; this rank stops with it"
        )

    def late(self, rank: int) -> list[int]:
        """Return the ranks that a rank's oldest operation in flight still lacks."""
        with self._changed:
            for operation in self._open.values():  # a dict keeps the order in which they began
                if rank in operation.sends:
                    return [r for r in operation.members if r not in operation.sends]
        return []

    def start(
        self, kind: str, name: str, send: Tensor, recv: Tensor, *, end: LocalTransport
    ) -> _LocalWork:
        """Start a collective at one end of the wire."""
        rank, members = end.world_rank, end.members
        number = self._num_posted[rank]
        self._num_posted[rank] += 1
        if number >= self.faults.stop.get(rank, number + 1):
            self._is_over.wait()  # until ``end``: the world's owner has a limit
            raise PeerError(f"rank {rank} was told to stop at its operation {number}, {name!r}")
        with self._changed:
            key = (members, name)
            operation = self._open.setdefault(key, _Operation(kind, members))
            if operation.kind != kind or rank in operation.sends:
                raise MismatchError(
                    f"rank {rank}: {kind} {name!r} cannot start, since {operation.kind} of that "
                    f"name is in flight on ranks {sorted(operation.sends)}"
                )
            operation.sends[rank] = send
            operation.recvs[rank] = recv
            if rank in self.faults.slow:  # a collective has ended when its slowest part is there
                arrives_at = self.clock() + self.faults.slow[rank]
                operation.arrives_at = max(operation.arrives_at, arrives_at)
            if len(operation.sends) == len(members):
                del self._open[key]
                if kind == "allreduce":  # in place: what one rank receives, another still adds
                    operation.sends = {r: t.clone() for r, t in operation.sends.items()}
                operation.complete()
                operation.is_done = True
        return _LocalWork(self, operation, rank, number, name)


@dataclass(frozen=True)
class LocalWatch:
    """The ``Watch`` of a local world: what a rank knows of the others, and tells them."""

    world: LocalWorld
    rank: int

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def late(self) -> list[int]:
        return self.world.late(self.rank)

    def report(self, error: BaseException) -> None:
        # Those errors came from another rank's failure: the first one is the one to tell.
        if not isinstance(error, PeerError | TransportTimeoutError):
            self.world.fail(self.rank, error)


class _LocalWork:
    """One rank's view of an operation, which it may see end late, or fail."""

    def __init__(
        self, world: LocalWorld, operation: _Operation, rank: int, number: int, name: str
    ) -> None:
        self.watch = LocalWatch(world, rank)
        self._world = world
        self._operation = operation
        self._place = rank, number, name
        self._fails = world.faults.fail.get(rank) == number
        self._num_polls = world.faults.num_polls(rank, number)
        self._delay_s = world.faults.delay_s(rank, number)
        self._shown_at: float | None = None

    def done(self) -> bool:
        if not self._operation.is_done:
            return self._fails or self._world.failed_rank is not None
        if self._num_polls > 0:  # reordered: asked in vain some times, whatever the clock says
            self._num_polls -= 1
            return False
        if self._delay_s == 0 and self._operation.arrives_at == 0:
            return True
        now = self._world.clock()
        if self._shown_at is None:  # the delay counts from when this rank could first see it
            self._shown_at = max(now, self._operation.arrives_at) + self._delay_s
        return now >= self._shown_at

    def finish(self) -> None:
        if self._fails:
            rank, number, name = self._place
            raise TransportError(f"rank {rank}: its operation {number}, {name!r}, fails as told")
        if self._operation.error is not None:
            raise self._operation.error
        if not self._operation.is_done:
            raise self._world.peer_error()


@dataclass(frozen=True)
class _LaneLosses:
    """What a lane loses; the same in every world in which ranks do the same."""

    faults: Faults
    place: int  # of the lane among those of its rank
    stem: str  # of exchanges' names: it has numbers that a process counts up from world to world


class LocalLane(Lane):
    """Stands for datagrams in a local world: rows lose the blocks that ``Faults`` say.

    ``members`` are the ranks that take part, as the world counts them.
    """

    name = "local"
    adds_up = False

    def __init__(
        self, below: Transport, members: Sequence[int], losses: _LaneLosses, *, loses: bool
    ) -> None:
        super().__init__(below)
        self.loses = loses
        self._members = tuple(members)
        self._losses = losses
        self._numbers = CallNumbers()

    def subset(self, parts: Sequence[tuple[int, ...]]) -> LocalLane:
        own = next(part for part in parts if self.rank in part)
        members = [self._members[rank] for rank in own]
        return LocalLane(subset(self.below, parts), members, self._losses, loses=self.loses)

    def bring(
        self, send: Tensor, room: Tensor | None, *, name: str, limits: LossLimits | None = None
    ) -> tuple[Work, Brought]:
        assert room is not None, self.name
        work, brought = super().bring(send, room, name=name)
        if limits is None or not self.loses:
            return work, brought
        block_numel = BLOCK_BYTES // room.itemsize
        number = self._numbers.take(name.removeprefix(self._losses.stem))
        lost = self._losses.faults.lost_blocks(
            f"{self._losses.place} {self._members} {number}",
            limits,
            ranks=self._members,
            own=self.rank,
            shard=room.shape[1],
            block_numel=block_numel,
        )
        lossy = _LossyRows(work, room, lost, block_numel)
        return lossy, lossy


class _LossyRows(Brought):
    """Rows that come with holes, which hold NaN: nothing that came stands there."""

    def __init__(self, work: Work, room: Tensor, lost: Tensor, block_numel: int) -> None:
        super().__init__(room)
        self.watch = work.watch
        self.block_numel = block_numel
        self.done = work.done
        self._work = work
        self._room = room
        self._lost = lost

    def finish(self) -> None:
        self._work.finish()
        if not self._lost.any():
            return
        is_lost = self._lost.repeat_interleave(self.block_numel, dim=1)[:, : self._room.shape[1]]
        self._room.masked_fill_(is_lost, float("nan"))
        self.missing = self._lost.to(torch.uint8)


def _open_lossy(
    world: LocalWorld, rank: int, members: Sequence[int], channel: Channel, gather: LossTolerant
) -> LocalLane:
    place = world.num_lanes[rank]
    world.num_lanes[rank] += 1
    losses = _LaneLosses(world.faults, place, channel.name)
    return LocalLane(channel.transport, members, losses, loses=not gather.reliable)


class LocalTransport:
    """One rank's end of a ``LocalWorld``, among all of its ranks or some; see ``Transport``."""

    def __init__(
        self, world: LocalWorld, rank: int, *, members: tuple[int, ...] | None = None
    ) -> None:
        self.watch = LocalWatch(world, rank)
        self._world = world
        self.world_rank = rank  # in the whole world, where ``rank`` counts within the members
        self.members = tuple(range(world.world_size)) if members is None else members
        self.rank = self.members.index(rank)
        self.world_size = len(self.members)
        node = rank // world.ranks_per_node
        self.node = f"node{node}"
        first = node * world.ranks_per_node
        self.local_size = min(world.ranks_per_node, world.world_size - first)  # the last has less

    @functools.cached_property
    def can(self) -> Abilities:
        """What these ranks can; see ``Transport``."""
        opens = functools.partial(_open_lossy, self._world, self.world_rank, self.members)
        return Abilities(open_lossy=opens)

    def subset(self, parts: Sequence[tuple[int, ...]]) -> LocalTransport:
        """Return the ranks of this rank's part."""
        own = next(part for part in parts if self.rank in part)
        members = tuple(self.members[rank] for rank in own)
        return LocalTransport(self._world, self.world_rank, members=members)

    def alltoall(
        self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False
    ) -> _LocalWork:
        return self._post("alltoall of others" if skips_own else "alltoall", name, send, recv)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> _LocalWork:
        return self._post("allgather", name, send, recv)

    def allreduce(self, buffer: Tensor, *, name: str) -> _LocalWork:
        return self._post("allreduce", name, buffer, buffer)

    def broadcast(self, buffer: Tensor, *, name: str) -> _LocalWork:
        return self._post("broadcast", name, buffer, buffer)

    def _post(self, kind: str, name: str, send: Tensor, recv: Tensor) -> _LocalWork:
        return self._world.start(kind, name, send, recv, end=self)


def run_ranks(
    world_size: int,
    function: Callable[[LocalTransport], _T],
    *,
    timeout_s: float = 60.0,
    faults: Faults | None = None,
    ranks_per_node: int | None = None,
) -> list[_T]:
    """Run ``function(transport)`` on every rank of a new world, each in a thread of its own.

    Args:
        world_size: number of ranks.
        function: what every rank does with its end of the wire.
        timeout_s: longest wait in seconds for all ranks together.
        faults: what goes wrong; nothing by default.
        ranks_per_node: see ``LocalWorld``; all on one node by default.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: the error of the rank that failed first.
        TransportTimeoutError: a rank did not end in time.
    """
    world = LocalWorld(world_size, faults, ranks_per_node=ranks_per_node)
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(world.transport(rank))
        except BaseException as error:
            errors.append(error)
            world.fail(rank, error)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"loft-rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    stopped = [rank for rank in range(world_size) if rank in world.faults.stop]
    # Ranks that were told to stop come last: they stay in their call until all others have ended.
    for rank in sorted(range(world_size), key=lambda rank: rank in stopped):
        if rank in stopped:
            world.end()
        threads[rank].join(max(0.0, until - time.monotonic()))
    if errors:
        raise errors[0]
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        raise TransportTimeoutError(f"run_ranks: ranks {late} did not end within {timeout_s:g} s")
    return [results[rank] for rank in range(world_size)]
