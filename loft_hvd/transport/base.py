"""The protocol between the pipeline and whatever moves its bytes.

A transport offers four collectives on preallocated tensors. Each is started by every rank under
the same name and returns a ``Work``. Names tell operations apart; at most one operation of a name
is in flight. Outputs are never reallocated, inputs are never written, and both must stay alive
and untouched until the work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from loft_hvd.config import config
from loft_hvd.errors import (
    MismatchError,
    TransportError,
    TransportTimeoutError,
    UsageError,
)
from loft_hvd.transport.waits import waiting

__all__ = [
    "Abilities",
    "Brought",
    "Channel",
    "Lane",
    "LossLimits",
    "Transport",
    "Watch",
    "Work",
    "closed_error",
    "locate",
    "shards_of",
    "subset",
    "wait_for",
    "watch_of",
]

# Between polls. Horovod's own wait spins, which slows a main thread beside it to 0.7 of its speed
# (measured with 2 ranks, MPI and Gloo); sleeping costs a collective 0.1 ms of about 1.
SHORTEST_SLEEP_S = 50e-6  # bound from Linux: its timer slack, below which no sleep ends
LONGEST_SLEEP_S = 200e-6  # bound from Horovod: a fifth of its cycle of 1 ms


class Watch(Protocol):
    """What knows why ranks do not come."""

    def waiting(self) -> AbstractContextManager[None]:
        """Note that the calling thread waits for other ranks inside."""

    def late(self) -> list[int]:
        """Return the ranks that have not come to what this rank waits for, as far as known."""

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails."""


class Watched(Protocol):
    """What may have a watch: a transport, or a collective."""

    @property
    def watch(self) -> Watch | None:
        """What knows why ranks do not come to this; None where nothing does."""


class Work(Watched, Protocol):
    """A collective in flight."""

    def done(self) -> bool:
        """Say whether the operation has ended, well or badly; never blocks, on any thread."""

    def finish(self) -> None:
        """Release a done operation; raise the engine's own error if it failed."""


def _ignore(*_: object) -> None:
    """Do nothing, for a transport that need not."""


def _as_it_is(work: Work, _: str) -> Work:
    return work


@dataclass(frozen=True)
class Abilities:
    """What a transport's ranks can, beside its collectives; equal on every rank.

    The default suits a transport that can no more. ``lanes.py`` opens what is found here.

    Attributes:
        overlaps: several collectives are on the wire at once.
        mixes_devices: ranks may bring one tensor on a CPU here and on a GPU there.
        world: names these ranks, which stay for the length of the job, in this process; lanes may
            be opened beside them, and are kept by it. None where none may, as in an elastic job.
        at_end: has something called as the engine ends, such as what closes lanes.
        open_mesh: connects all ranks, or returns None on all; None where that never pays.
        open_lossy: makes the lane of a loss-tolerant gather, given what was asked for; None where
            datagrams are.
        open_group: makes a ``DeviceGroup`` of the same ranks, for tensors of a device, or returns
            None on all of them.
        follow: puts a work of a name under the eyes of the transport's watch.
        open_heartbeat: opens the heartbeat of these ranks, unless it is open.
        explain: lets an error of the engine's own say which rank is behind it.
    """

    overlaps: bool = False
    mixes_devices: bool = False
    world: Hashable = None
    at_end: Callable[[Callable[[], None]], None] = _ignore
    open_mesh: Callable[[Channel], Any] | None = None
    open_lossy: Callable[[Channel, Any], Any] | None = None
    open_group: Callable[[Channel, torch.device], Any] | None = None
    follow: Callable[[Work, str], Work] = _as_it_is
    open_heartbeat: Callable[[], object] = _ignore
    explain: Callable[[Exception], None] = _ignore


class Transport(Watched, Protocol):
    """What the pipeline needs from an engine such as Horovod."""

    @property
    def can(self) -> Abilities:
        """What these ranks can, beside the collectives below."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def node(self) -> str:
        """Name of this rank's node: equal for ranks that share a host."""

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        """Send shard j of ``send`` to rank j and receive rank i's shard as shard i of ``recv``.

        Both are contiguous, [world_size * shard], of one dtype. With ``skips_own`` they hold the
        other ranks' shards only, in rank order, and thus [(world_size - 1) * shard].
        """

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        """Receive every rank's ``send``, [numel], in rank order in ``recv``, [world_size * numel].

        Both are contiguous and of one dtype.
        """

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        """Replace ``buffer``, contiguous float32, float64 or int64, by its sum over ranks."""

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        """Replace ``buffer``, any contiguous tensor, by rank 0's."""


class HasRank(Protocol):
    """One of some ranks."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""


def shards_of(transport: HasRank, values: Tensor, *, skips_own: bool = False) -> list[Tensor]:
    """Return the shards of values by rank, this rank's own empty where they skip it."""
    shards = list(values.chunk(transport.world_size - skips_own))
    if skips_own:  # in its place, so that shard j is rank j's again
        shards.insert(transport.rank, values[:0])
    return shards


@dataclass(frozen=True)
class LossLimits:
    """What an all-to-all may miss of rows; equal on every rank.

    Attributes:
        most_missing: rows that may lack a block, of those that are ``present``.
        present: by rank, whether its row counts.
        critical: parts of what a rank sends that must arrive, as (begin, end) in values.
    """

    most_missing: int
    present: tuple[bool, ...]
    critical: tuple[tuple[int, int], ...] = ()


class Brought:
    """What an exchange has brought to this rank, once its work is finished.

    Attributes:
        rows: one of each rank, [shard]; not to be written to, but for what is missing.
        missing: uint8, [world_size, num_blocks]: 1 where a block of a row did not come; None where
            all is there.
        block_numel: values of a block; the last one of a row may have less.
    """

    missing: Tensor | None = None
    block_numel = 0

    def __init__(self, rows: Sequence[Tensor] | Tensor) -> None:
        self.rows = rows

    def release(self) -> None:
        """Say that nobody reads the rows any more."""


class Lane:
    """One way by which values move between ranks; here by the transport's own collectives.

    It is a transport itself. Others say what they do better:

    Attributes:
        name: as users and the log know it.
        overlaps: several exchanges are on the wire at once.
        adds_up: its all-reduce is the best way to a sum. Else shard owners are, as for any rule.
        lends: other ranks read what is sent where it lies, so it must lie in what ``zeros`` made.
        is_queued: an exchange is done for the host as soon as it is begun; what comes after it
            waits on the device. All ranks then begin exchanges in one order.
        has_stream: what is queued on a GPU waits there for other ranks, so it has a stream beside
            the script's.
        has_parts: it pays to exchange large values in parts.
        loses: rows that are brought may lack blocks, where that is tolerated.
        bytes_per_s: what the slowest rank can send; None where nobody has tried.
    """

    name = "the engine's own"
    adds_up = True
    lends = False
    is_queued = False
    has_stream = False
    has_parts = True
    loses = False
    bytes_per_s: float | None = None

    def __init__(self, below: Transport) -> None:
        self.below = below
        self.can = below.can
        self.overlaps = below.can.overlaps
        self.rank = below.rank
        self.world_size = below.world_size
        self.node = below.node
        self.local_size = below.local_size

    @property
    def watch(self) -> Watch | None:
        return self.below.watch

    def zeros(self, numel: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """Return a buffer to send from, [numel], zeros: no page of it is faulted in later.

        Do not change what was sent before you have received something that every other rank sends
        only after it has that.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def expect(self, recv: Tensor, *, name: str, skips_own: bool = False) -> None:
        """Take in what the next all-to-all or all-gather of that name brings, as soon as it comes.

        That one has the same ``recv``. Each shard of it must be free once its rank sends it. Lanes
        that cannot be told wait for that exchange.
        """

    def subset(self, parts: Sequence[tuple[int, ...]]) -> Lane:
        """Return the ranks of this rank's part; every rank calls it alike."""
        return Lane(subset(self.below, parts))

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        return self.below.alltoall(send, recv, name=name, skips_own=skips_own)

    def bring(
        self, send: Tensor, room: Tensor | None, *, name: str, limits: LossLimits | None = None
    ) -> tuple[Work, Brought]:
        """Start an all-to-all of ``send`` whose rows are read once, and released.

        ``room`` is where they shall lie, [world_size, shard]; None where the lane ``lends``: rows
        are then read where their ranks have them. With ``limits`` rows may lack what they
        allow, on a lane that loses anything; and ``send`` is to be left alone as with ``zeros``.
        """
        assert room is not None, self.name
        return self.alltoall(send, room.view(-1), name=name), Brought(room)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        return self.below.allgather(send, recv, name=name)

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        return self.below.allreduce(buffer, name=name)

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        return self.below.broadcast(buffer, name=name)


@runtime_checkable
class _Divisible(Protocol):
    """A transport that can be cut into transports among some of its ranks."""

    # Apart from Transport: one of a user's own need not have it, where nobody asks for over=.
    def subset(self, parts: Sequence[tuple[int, ...]]) -> Transport: ...


def subset(transport: Transport, parts: Sequence[tuple[int, ...]]) -> Transport:
    """Return the transport among the ranks of this rank's part; every rank calls it alike.

    Every rank is in exactly one of the parts, ranks ascending.
    """
    if not isinstance(transport, _Divisible):
        raise UsageError(
            f"over=: a {type(transport).__name__} cannot exchange among some of its ranks; leave "
            "over= away, or give the transport a method subset(parts)"
        )
    return transport.subset(parts)


def closed_error(what: str) -> TransportError:
    """Return the error of who still uses what was closed with the engine; ``what`` is plural."""
    return TransportError(
        f"the {what} were closed with the engine, by hvd.shutdown(); after another "
        "hvd.init() make the optimizer anew"
    )


class _NoWatch:
    """For transports without a watch."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def late(self) -> list[int]:
        return []

    def report(self, error: BaseException) -> None:
        pass


def watch_of(carrier: Watched) -> Watch:
    """Return the watch of a transport or work; one that does nothing where it has none."""
    watch = carrier.watch
    return _NoWatch() if watch is None else watch


def locate(error: BaseException, place: str) -> BaseException:
    """Say where an error met this rank, such as "bucket 0 (weight) in all-to-all".

    Returns of our own transport errors a new one whose message names the place; of any other, such
    as Horovod's, the very same object with a note (from Python 3.11 on).
    """
    # A new one: threads that are ranks may hold the same error, each at a place of its own.
    if isinstance(error, TransportError | MismatchError):
        located = type(error)(f"{place}: {error}")
        located.__cause__ = error.__cause__
        if hasattr(located, "add_note"):
            for note in getattr(error, "__notes__", ()):  # such as who is behind it
                located.add_note(note)
        return located
    if hasattr(error, "add_note"):
        error.add_note(f"loft_hvd: raised while waiting for {place}")
    return error


def wait_for(
    work: Work,
    *,
    what: str,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for a collective without spinning, then release it; ``what`` describes it in errors."""
    start = clock()
    pause = SHORTEST_SLEEP_S
    watch = watch_of(work)
    with watch.waiting(), waiting():
        while not work.done():
            if clock() - start > timeout_s:
                late = watch.late()
                who = f"ranks {late} have not come to it;" if late else "no answer from all ranks;"
                raise TransportTimeoutError(
                    f"{what}: waited {timeout_s:g} s; {who} a rank has stopped, is very slow, or "
                    "takes other steps than this one (look for an error above, or raise "
                    "LOFT_HVD_TIMEOUT_S)"
                )
            sleep(pause)  # at first short: often it is nearly done
            pause = min(pause * 1.5, LONGEST_SLEEP_S)
    try:
        work.finish()
    except TransportError as error:
        raise locate(error, what) from error.__cause__


@dataclass(frozen=True)
class Channel:
    """The ranks, a stem of names and a time limit: what every small exchange of ranks needs."""

    transport: Transport
    name: str  # stem of the operations' names, equal on every rank
    # Longest wait for other ranks in seconds; ``LOFT_HVD_TIMEOUT_S`` unless given.
    timeout_s: float = field(default_factory=lambda: config().timeout_s)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    def sub(self, part: str) -> Channel:
        """Return the channel of a part: "loft" and "order" make "loft.order"."""
        return replace(self, name=f"{self.name}.{part}")

    def wait(self, work: Work, *, what: str) -> None:
        """Wait for a collective, then release it; raises what ``wait_for`` does."""
        wait_for(work, what=what, timeout_s=self.timeout_s)

    def broadcast(self, buffer: Tensor, *, what: str) -> None:
        """Replace ``buffer``, any contiguous tensor, by rank 0's."""
        if self.world_size > 1:
            self.wait(self.transport.broadcast(buffer, name=self.name), what=what)

    def allgather_rows(self, row: Tensor) -> Tensor:
        """Return every rank's ``row``, shape [numel], as rows of a matrix [world_size, numel]."""
        rows = torch.empty(self.world_size, row.numel(), dtype=row.dtype)
        if self.world_size == 1:  # nobody else: no engine is asked
            return rows.copy_(row.view(1, -1))
        work = self.transport.allgather(row.contiguous(), rows.view(-1), name=self.name)
        self.wait(work, what=f"exchange {self.name!r}")
        return rows
