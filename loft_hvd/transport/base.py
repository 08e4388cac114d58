"""The protocol between the pipeline and whatever moves its bytes.

A transport offers four collectives on preallocated tensors. Each is started by every rank under
the same name and returns a ``Work``. Names tell operations apart; at most one operation of a name
is in flight. Outputs are never reallocated, inputs are never written, and both must stay alive
and untouched until the work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from loft_hvd.config import config
from loft_hvd.errors import MismatchError, TransportError, TransportTimeoutError

__all__ = [
    "Channel",
    "OverTransport",
    "Sharing",
    "Transport",
    "Watch",
    "Work",
    "closed_error",
    "in_place",
    "locate",
    "mixes_devices",
    "overlaps",
    "shards_of",
    "shared_zeros",
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


class Transport(Watched, Protocol):
    """What the pipeline needs from an engine such as Horovod."""

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


def overlaps(transport: Transport) -> bool:
    """Say whether several collectives of a transport are on the wire at once."""
    # A transport of a user's own that does not say is taken for an engine that has one at a time.
    return bool(getattr(transport, "overlaps", False))


def mixes_devices(transport: Transport) -> bool:
    """Say whether ranks may bring one tensor on a CPU here and on a GPU there."""
    # An engine has another way for each, and a rank on one would wait for those on the other.
    return bool(getattr(transport, "mixes_devices", False))


class Expecting(Protocol):
    """A transport to which one can say in advance where what it brings shall lie."""

    def expect(self, recv: Tensor, *, name: str, skips_own: bool = False) -> None:
        """Take in what the next all-to-all or all-gather of that name brings, as soon as it comes.

        That one has the same ``recv``. Each shard of it must be free once its rank sends it.
        """


def expect(transport: Transport, recv: Tensor, *, name: str, skips_own: bool = False) -> None:
    """See ``Expecting``; nothing to a transport that cannot be told."""
    # Not isinstance: of a protocol that takes 50 microseconds, twice for each part of a bucket.
    if hasattr(transport, "expect"):
        cast(Expecting, transport).expect(recv, name=name, skips_own=skips_own)


class HasRank(Protocol):
    """One of some ranks."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""


class Sharing(Protocol):
    """A transport whose ranks can read each other's memory."""

    @property
    def in_place(self) -> Transport:
        """The same ranks; what they send out of buffers of ``shared_zeros`` is read in place.

        It sends nothing else. Do not change what was sent before you have received something that
        every other rank sends only after it has read that.
        """

    def shared_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer on the CPU, [numel], zeros, that all ranks can read."""


def shared_zeros(transport: Transport, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a buffer on the CPU, [numel], zeros, to send ``in_place`` from."""
    if hasattr(transport, "shared_zeros"):
        return cast(Sharing, transport).shared_zeros(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device="cpu")


def in_place(transport: Transport) -> Transport:
    """Return the transport that sends out of such buffers; see ``Sharing``.

    That is the transport itself where its ranks share no memory.
    """
    return cast(Sharing, transport).in_place if hasattr(transport, "in_place") else transport


def shards_of(transport: HasRank, values: Tensor, *, skips_own: bool = False) -> list[Tensor]:
    """Return the shards of values by rank, this rank's own empty where they skip it."""
    shards = list(values.chunk(transport.world_size - skips_own))
    if skips_own:  # in its place, so that shard j is rank j's again
        shards.insert(transport.rank, values[:0])
    return shards


class OverTransport:
    """A transport over another, whose collectives are its own until it has better ones."""

    overlaps = False

    def __init__(self, below: Transport) -> None:
        self._below = below
        self.rank = below.rank
        self.world_size = below.world_size
        self.node = below.node
        self.local_size = below.local_size

    @property
    def watch(self) -> Watch | None:
        return self._below.watch

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        return self._below.alltoall(send, recv, name=name, skips_own=skips_own)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        return self._below.allgather(send, recv, name=name)

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        return self._below.allreduce(buffer, name=name)

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        return self._below.broadcast(buffer, name=name)


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
    with watch.waiting():
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
