"""What every transport must do: run it on all ranks of a new one.

``for name, check in CHECKS.items(): check(transport)``, on every rank, in this order. A check
raises a ``TransportError`` that says what was expected; it ends on every rank, or at its limit.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loft_hvd.errors import TransportError
from loft_hvd.transport.base import Transport, Work, wait_for

__all__ = ["CHECKS"]

_LIMIT_S = 30.0  # a choice: a crowded machine takes a second
_LARGE_BYTES = 9 * 2**20  # more than those from which on ours take another way
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOVED = (*_FLOATS, torch.int64, torch.int32, torch.uint8)
_SUMMED = (torch.float64, torch.float32, torch.int64)
# What a conversion on the way would lose: NaN, infinities, the sign of zero, a subnormal of
# float32, and nearly its largest value.
_ODD_VALUES = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38)


def _expect(is_right: bool, transport: Transport, what: str) -> None:
    if not is_right:
        raise TransportError(
            f"conformance: rank {transport.rank} of {transport.world_size}: {what}"
        )


def _wait(work: Work, what: str) -> None:
    wait_for(work, what=f"conformance: {what}", timeout_s=_LIMIT_S)


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that tell ranks and places apart, exact in every dtype."""
    # Below 120 all are exact in bfloat16 and uint8; 7 and 31 share no factor with it. They begin
    # again after 120: to work millions out was nearly all that a large check took.
    period = ((torch.arange(120) * 7 + rank * 31) % 120).to(dtype)
    return period.repeat(-(-numel // 120))[:numel]


def _has_bits_of(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the CPU have the same bytes; NumPy compares them faster."""
    one_bytes, others_bytes = (each.contiguous().view(torch.uint8).numpy() for each in (one, other))
    return np.array_equal(one_bytes, others_bytes)


def check_world(transport: Transport) -> None:
    """Ranks are numbered from 0, each once; a node has some of them."""
    size = transport.world_size
    _expect(0 <= transport.rank < size, transport, "rank is not >= 0 and < world_size")
    _expect(1 <= transport.local_size <= size, transport, "local_size is not in 1..world_size")
    ranks = torch.full((size,), -1)
    _wait(transport.allgather(torch.tensor([transport.rank]), ranks, name="c.world"), "ranks")
    _expect(ranks.tolist() == list(range(size)), transport, f"ranks are {ranks.tolist()}")


def _check_moved(
    transport: Transport,
    start: Callable[[Tensor, Tensor], Work],
    send: Tensor,
    expected: list[Tensor],
    what: str,
) -> None:
    """Start an operation, and compare what is received; nothing else may be written or moved."""
    recv = torch.zeros(sum(part.numel() for part in expected), dtype=send.dtype)
    sent, place = send.clone(), recv.data_ptr()
    _wait(start(send, recv), what)
    _expect(torch.equal(recv, torch.cat(expected)), transport, f"{what}: wrong values")
    _expect(torch.equal(send, sent), transport, f"{what}: the input was written")
    _expect(recv.data_ptr() == place, transport, f"{what}: the output was reallocated")


_EVERY_DTYPE_AND_SIZE = [(dtype, numel) for dtype in _MOVED for numel in (1, 17, 1024)]


def check_alltoall(transport: Transport) -> None:
    """Shard i of what is received is rank i's shard for this rank, in every dtype."""
    size, rank = transport.world_size, transport.rank
    for dtype, shard in _EVERY_DTYPE_AND_SIZE:
        own = slice(rank * shard, (rank + 1) * shard)
        start = functools.partial(transport.alltoall, name=f"c.a2a.{dtype}.{shard}")
        rows = [_values(peer, size * shard, dtype) for peer in range(size)]  # what each rank sends
        what = f"all-to-all of {shard} x {dtype}"
        _check_moved(transport, start, rows[rank].clone(), [row[own] for row in rows], what)


def check_alltoall_of_others(transport: Transport) -> None:
    """Without the own shard, what is received are the other ranks' for this one, in rank order."""
    size, rank = transport.world_size, transport.rank
    if size == 1:
        return
    for dtype, shard in _EVERY_DTYPE_AND_SIZE:
        own = slice(rank * shard, (rank + 1) * shard)
        start = functools.partial(
            transport.alltoall, name=f"c.others.{dtype}.{shard}", skips_own=True
        )
        rows = [_values(peer, size * shard, dtype) for peer in range(size)]
        send = torch.cat([rows[rank][: own.start], rows[rank][own.stop :]])
        others = [row[own] for peer, row in enumerate(rows) if peer != rank]
        _check_moved(transport, start, send, others, f"all-to-all of others' {shard} x {dtype}")


def check_allgather(transport: Transport) -> None:
    """What is received is every rank's tensor in rank order, in every dtype."""
    for dtype, numel in _EVERY_DTYPE_AND_SIZE:
        start = functools.partial(transport.allgather, name=f"c.ag.{dtype}.{numel}")
        rows = [_values(peer, numel, dtype) for peer in range(transport.world_size)]
        send, what = rows[transport.rank].clone(), f"all-gather of {numel} x {dtype}"
        _check_moved(transport, start, send, rows, what)


def check_allreduce(transport: Transport) -> None:
    """Sums are right, in place, and have the same bits on every rank."""
    size, rank = transport.world_size, transport.rank
    for dtype in _SUMMED:
        buffer = _values(rank, 100, dtype)
        _wait(transport.allreduce(buffer, name=f"c.sum.{dtype}"), f"sum of {dtype}")
        total = torch.stack([_values(peer, 100, dtype) for peer in range(size)]).sum(dim=0)
        _expect(torch.equal(buffer, total), transport, f"sum of {dtype}: wrong values")
    # Fractions, whose sum depends on the order in which they are added.
    uneven = torch.rand(1000, generator=torch.Generator().manual_seed(rank))
    _wait(transport.allreduce(uneven, name="c.sum.bits"), "sum of fractions")
    rows = torch.zeros(size * 1000)
    _wait(transport.allgather(uneven, rows, name="c.sum.rows"), "rows of sums")
    for row in rows.view(size, 1000):
        _expect(_has_bits_of(row, uneven), transport, "a sum has other bits on another rank")
    large = torch.tensor([2**53 + 1 + rank])  # float64 would round it
    _wait(transport.allreduce(large, name="c.sum.large"), "sum of large whole numbers")
    exact = sum(2**53 + 1 + peer for peer in range(size))
    _expect(int(large) == exact, transport, f"sum of int64: {int(large)} instead of {exact}")


def check_broadcast(transport: Transport) -> None:
    """Everyone ends with rank 0's values, in every dtype and shape."""
    for dtype in _MOVED:
        buffer = _values(transport.rank, 24, dtype).view(2, 3, 4)
        _wait(transport.broadcast(buffer, name=f"c.bc.{dtype}"), f"broadcast of {dtype}")
        is_right = torch.equal(buffer, _values(0, 24, dtype).view(2, 3, 4))
        _expect(is_right, transport, f"broadcast of {dtype}: wrong values")


def check_bits(transport: Transport) -> None:
    """NaN, infinities, signed zero and subnormals travel unchanged."""
    size = transport.world_size
    for dtype in _FLOATS:
        odd = torch.tensor(_ODD_VALUES).to(dtype)
        recv = torch.zeros(size * len(odd), dtype=dtype)
        _wait(transport.allgather(odd, recv, name=f"c.bits.ag.{dtype}"), "odd values")
        _expect(_has_bits_of(recv, odd.repeat(size)), transport, f"all-gather changed {dtype}")
        recv.zero_()
        _wait(transport.alltoall(odd.repeat(size), recv, name=f"c.bits.a2a.{dtype}"), "odd values")
        _expect(_has_bits_of(recv, odd.repeat(size)), transport, f"all-to-all changed {dtype}")


def check_many_in_flight(transport: Transport) -> None:
    """Twenty operations at once, released last first, do not mix."""
    size, rank = transport.world_size, transport.rank
    flights: list[tuple[Work, Tensor, Tensor]] = []
    for number in range(20):
        send = torch.full((size * 3,), float(100 * number + rank))  # tells operation and rank
        recv = torch.zeros_like(send)
        flights.append((transport.alltoall(send, recv, name=f"c.many.{number}"), recv, send))
    # The third is what was sent: it has to live until its operation is done.
    for number, (work, recv, _) in reversed(list(enumerate(flights))):
        _wait(work, f"operation {number} of 20 in flight")
        expected = torch.arange(size).repeat_interleave(3) + 100.0 * number
        _expect(torch.equal(recv, expected), transport, f"operation {number} of 20: wrong values")


def check_large(transport: Transport) -> None:
    """Large results of every dtype, gathered at once, do not mix, and arrive with their bits."""
    size, rank = transport.world_size, transport.rank
    for dtype in _MOVED:
        shard = -(-_LARGE_BYTES // (size * dtype.itemsize))
        odd = torch.tensor(_ODD_VALUES if dtype.is_floating_point else ()).to(dtype)
        flights: list[tuple[Work, Tensor, Tensor]] = []
        for number in range(3):
            send = _values(rank + size * number, shard, dtype)
            send[: len(odd)] = odd
            recv = torch.zeros(size * shard, dtype=dtype)
            name = f"c.large.{dtype}.{number}"
            flights.append((transport.allgather(send, recv, name=name), recv, send))
        for number, (work, recv, _) in enumerate(flights):
            what = f"all-gather {number} of 3 large ones of {dtype}"
            _wait(work, what)
            for peer, row in enumerate(recv.view(size, shard)):
                expected = _values(peer + size * number, shard, dtype)
                expected[: len(odd)] = odd
                is_right = _has_bits_of(row, expected)
                _expect(is_right, transport, f"{what}: wrong values")


def check_names_again(transport: Transport) -> None:
    """A name and its buffers serve again and again."""
    size, rank = transport.world_size, transport.rank
    send, recv = torch.zeros(size * 2), torch.zeros(size * 2)
    for number in range(50):  # Horovod caches what it has agreed on for a name
        send.fill_(float(number * size + rank))
        _wait(transport.alltoall(send, recv, name="c.again"), f"round {number} of one name")
        expected = torch.arange(size).repeat_interleave(2) + float(number * size)
        _expect(torch.equal(recv, expected), transport, f"round {number} of one name: wrong values")


def check_polling(transport: Transport) -> None:
    """``done`` does not block while another rank is late."""
    last = transport.world_size - 1
    if transport.rank == last:
        time.sleep(0.5)  # the one late rank that the check is about
    buffer = torch.ones(8)
    work = transport.allreduce(buffer, name="c.poll")
    until = time.monotonic() + _LIMIT_S
    longest_s = 0.0
    while time.monotonic() < until:
        began = time.monotonic()
        is_done = work.done()
        longest_s = max(longest_s, time.monotonic() - began)
        if is_done:
            break
        time.sleep(0.001)
    _wait(work, "an operation that was polled")
    # All others wait for the late one; a blocking poll would take its 0.5 s.
    _expect(transport.rank == last or longest_s < 0.4, transport, f"done() took {longest_s:.2f} s")


def check_other_thread(transport: Transport) -> None:
    """An operation that one thread starts may be watched and released by another."""
    size = transport.world_size
    recv = torch.zeros(size * 4)
    send = torch.full((size * 4,), 5.0)
    # As the engine's thread does with what a hook has started.
    work = transport.alltoall(send, recv, name="c.thread")
    errors: list[BaseException] = []

    def release() -> None:
        try:
            _wait(work, "an operation that another thread releases")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=release, name="loft-conformance", daemon=True)
    thread.start()
    thread.join(2 * _LIMIT_S)
    if errors:
        raise errors[0]
    _expect(bool((recv == 5.0).all()), transport, "released by another thread: wrong values")


CHECKS: dict[str, Callable[[Transport], None]] = {
    "world": check_world,
    "alltoall": check_alltoall,
    "allgather": check_allgather,
    "alltoall_of_others": check_alltoall_of_others,
    "allreduce": check_allreduce,
    "broadcast": check_broadcast,
    "bits": check_bits,
    "large": check_large,
    "many in flight": check_many_in_flight,
    "names again": check_names_again,
    "polling": check_polling,
    "other thread": check_other_thread,
}
