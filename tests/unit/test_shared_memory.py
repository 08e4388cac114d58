"""Ranks read each other's buffers in place: values, waiting, room that is used again, liars."""

from __future__ import annotations

import fcntl
import functools
import gc
import itertools
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.errors import TransportError, TransportTimeoutError
from loft_hvd.pipeline.buckets import Bucket, ParameterSpec, lay_out
from loft_hvd.pipeline.engine import Engine
from loft_hvd.pipeline.ring import Owners
from loft_hvd.pipeline.selection import Scope
from loft_hvd.transport import lanes, shared_memory
from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import (
    Abilities,
    Channel,
    Lane,
    Transport,
    Work,
    wait_for,
)
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.local import LocalTransport, run_ranks
from loft_hvd.transport.shared_memory import (
    SharedMemory,
    SharedMemoryLane,
    open_shared_memory,
    over_memory,
)

pytestmark = pytest.mark.skipif(extension() is None, reason="the extension is not built")


def sharing(end: Transport) -> SharedMemoryLane:
    channel = Channel(end, "memory", 20.0)
    memory = open_shared_memory(channel)
    assert memory is not None
    return over_memory(channel, memory)


class _Work:
    """A work that keeps what it sends for as long as it is not released."""

    watch = None

    def __init__(self, work: Work, sent: Tensor) -> None:
        self._work = work
        self._sent: Tensor | None = sent

    def done(self) -> bool:
        return self._work.done()

    def finish(self) -> None:
        self._work.finish()
        self._sent = None


class FromBuffers(Lane):
    """Sends all from shared buffers, one for each exchange, given back when that is done here."""

    def __init__(self, ends: SharedMemoryLane) -> None:
        super().__init__(ends)
        self.ends = ends

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        sent = self.ends.zeros(send.numel(), send.dtype).copy_(send)
        work = self.ends.alltoall(sent, recv, name=name, skips_own=skips_own)
        return _Work(work, sent)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        sent = self.ends.zeros(send.numel(), send.dtype).copy_(send)
        return _Work(self.ends.allgather(sent, recv, name=name), sent)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_memory_conform(world_size: int) -> None:
    def work(end: LocalTransport) -> None:
        ends = FromBuffers(sharing(end))
        for check in CHECKS.values():
            check(ends)

    run_ranks(world_size, work)


class OfOneHost(LocalTransport):
    """One rank's end of a world whose ranks may share memory."""

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end._world, end.rank)
        self.can = Abilities(world=(end._world, end.rank))


def results_of_steps(end: Transport, rule: loft.Rule, **options: Any) -> list[Tensor]:
    """Return the results of 12 steps of 3 buckets, whose values differ, on ranks out of step."""
    lag = random.Random(end.rank)
    shapes = [(5003,), (40_000,), (17,)]
    specs = [ParameterSpec(f"p{at}", shape, torch.float32) for at, shape in enumerate(shapes)]
    buckets = lay_out(specs, bucket_bytes=1)
    steps = iter(range(36))

    def pack(bucket: Bucket, values: Tensor) -> None:
        time.sleep(lag.choice((0.0, 0.0, 0.003)))  # ranks out of step are what it is about
        generator = torch.Generator().manual_seed(1000 * end.rank + next(steps))
        values.copy_(torch.randn(values.numel(), generator=generator))

    channel = Channel(end, f"steps.{type(end).__name__}", 30.0)
    engine = Engine(channel, buckets, [rule], pack=pack, **options)
    results = []
    for _ in range(12):
        for at in range(len(buckets)):
            engine.start(at)
        engine.finish()
        results += [engine.values(at).clone() for at in range(len(buckets))]
    engine.close()
    return results


@pytest.mark.every(5)
@pytest.mark.parametrize("wire", [loft.Compression.none, loft.Compression.fp16])
@pytest.mark.parametrize("has_records", [False, True])
@pytest.mark.parametrize(
    ("rule", "scope"),
    [(loft.TrimmedMean(1), "shard"), (loft.Robust(1), "shard"), (loft.Robust(1), "model")],
    ids=str,
)
def test_steps_have_the_bits_of_the_transport_below(
    rule: loft.Rule, scope: Scope, has_records: bool, wire: loft.Compression
) -> None:
    """Also where ranks overtake each other, and read what is soon written again."""

    def work(end: LocalTransport) -> None:
        below, shared = (
            results_of_steps(
                each,
                rule,
                wire=wire,
                owners=Owners(scope=scope, records=[] if has_records else None),
            )
            for each in (end, OfOneHost(end))
        )
        # [3 buckets of 12 steps, rows of all ranks]
        assert all(torch.equal(*each) for each in zip(below, shared, strict=True))
        # Both exchanges of 3 buckets in 12 steps, and a table in each step over the whole model.
        num_posted = 2 * 3 * 12 + (12 if scope == "model" else 0)
        memory = lanes._worlds()[end._world, end.rank].by_kind["shared-memory", "cpu"]
        assert memory.num_posted == num_posted

    run_ranks(4, work)


def place(memory: SharedMemory, values: Tensor) -> int:
    return values.data_ptr() - memory._bases[memory.rank]


def held_bytes(memory: SharedMemory) -> int:
    """Return the bytes of a rank's memory that have been written to, and not gone back."""
    return 512 * os.fstat(memory._own.descriptor).st_blocks


def test_only_what_lies_in_shared_buffers_is_read_in_place() -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        received = torch.zeros(2 * 8)
        with pytest.raises(TransportError, match=r"share_memory\(\).*LOFT_HVD_LANE=engine"):
            ends.allgather(torch.zeros(8), received, name="elsewhere")
        assert ends.memory.num_posted == 0

    run_ranks(2, work)


def test_what_was_given_up_is_not_taken_for_what_is_sent_later() -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        sent, received = ends.zeros(4, torch.float32), torch.zeros(8)
        for _ in range(3):  # begun by all ranks, and waited for by none
            ends.allgather(sent.fill_(7.0), received, name="x")
        given = ends.zeros(4, torch.float32).fill_(1.0 + end.rank)
        wait(ends.allgather(given, received, name="x"))
        assert received.tolist() == [1.0] * 4 + [2.0] * 4
        Channel(end, "read", 20.0).allgather_rows(torch.zeros(1))
        assert ends.memory._boxes.all_is_read()

    run_ranks(2, work)


def test_the_nth_exchange_of_a_name_is_the_nth_of_every_rank() -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        gate = Channel(end, "gate", 20.0)
        received = torch.zeros(2)

        def begin(value: float) -> Work:
            sent = ends.zeros(1, torch.float32).fill_(value)
            kept.append(sent)
            return ends.allgather(sent, received, name="x")

        kept: list[Tensor] = []
        if end.rank == 0:
            begin(7.0)  # and gives it up
            second = begin(8.0)
            with pytest.raises(TransportTimeoutError):
                wait_for(second, what="a test", timeout_s=0.1)
            gate.allgather_rows(torch.zeros(1))
        else:
            wait(begin(1.0))
            assert received.tolist() == [7.0, 1.0]
            gate.allgather_rows(torch.zeros(1))
            second = begin(2.0)
        wait(second)
        assert received.tolist() == [8.0, 2.0]

    run_ranks(2, work)


@pytest.mark.parametrize("failing", [{0, 1, 2}, {1}], ids=str)
def test_an_optimizer_made_after_an_error_has_its_own_values(failing: set[int]) -> None:
    """Also where one rank alone has failed, and the others have sent what it did not wait for."""

    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        memory = ends.memory

        def reduce(value: float, *, fails: bool) -> Tensor:
            given = over_memory(Channel(end, "series", 20.0), memory)
            sent = given.zeros(6, torch.float32).fill_(value)
            rows, received = torch.zeros(6), torch.zeros(6)
            wait(given.alltoall(sent, rows, name="a2a"))
            if fails:
                return rows
            result = given.zeros(2, torch.float32).copy_(rows.view(3, 2).mean(dim=0))
            gather = given.allgather(result, received, name="ag")
            if failing and value == 7.0:
                return received  # as one who hears that another has failed
            wait(gather)
            return received

        reduce(7.0, fails=end.rank in failing)
        gc.collect()
        for value in (11.0, 12.0):
            assert reduce(value, fails=False).eq(value).all()
        gc.collect()
        gate = Channel(end, "gate", 20.0)
        gate.allgather_rows(torch.zeros(1))
        memory.has_all(1, 1)  # takes what has come
        gate.allgather_rows(torch.zeros(1))
        assert memory._boxes.all_is_read()  # so that room serves again

    run_ranks(3, work)


def test_two_optimizers_of_one_name_do_not_mix() -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        others = over_memory(Channel(end, "others", 20.0), ends.memory)
        begun = []
        for given in (ends, others) if end.rank == 0 else (others, ends):
            value = 1.0 if given is ends else 2.0
            sent, received = given.zeros(4, torch.float32).fill_(value), torch.zeros(8)
            begun.append((given.allgather(sent, received, name="x"), received, value))
        for work, received, value in reversed(begun):
            wait(work)
            assert received.eq(value).all()

    run_ranks(2, work)


def wait(work: Work) -> None:
    wait_for(work, what="a test", timeout_s=20.0)


def test_exchanges_of_one_name_come_in_order_in_a_ring_that_goes_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_CAPACITY", 8)  # of 4 and 4: one rank may be ahead

    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        for first in range(0, 40, 4):
            flights: list[tuple[Work, Tensor, Tensor]] = []
            for number in range(first, first + 4):
                sent = ends.zeros(3, torch.float32).fill_(float(number))
                received = torch.zeros(6)
                work = ends.allgather(sent, received, name=f"{number // 2}")
                flights.append((work, received, sent))
            for number, (work, received, _) in enumerate(flights, first):
                wait(work)
                assert received.eq(float(number)).all()

    run_ranks(2, work)


def test_a_rank_that_is_too_far_ahead_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_CAPACITY", 4)

    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        sent, received = ends.zeros(1, torch.float32), torch.zeros(3)
        gate = Channel(end, "gate", 20.0)
        if end.rank != 1:
            for _ in range(4):
                ends.allgather(sent, received, name="x")
            says = r"4 exchanges .* rank \d .*LOFT_HVD_BUCKET_BYTES.*LOFT_HVD_LANE=engine"
            with pytest.raises(TransportError, match=says):
                ends.allgather(sent, received, name="x")
        gate.allgather_rows(torch.zeros(1))
        ends.memory.has_all(1, 1)  # hears of them
        gate.allgather_rows(torch.zeros(1))
        if end.rank != 1:
            ends.allgather(sent, received, name="x")

    run_ranks(3, work)


def test_room_serves_again_once_all_ranks_have_read_what_was_there() -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        memory, numel = ends.memory, 1 << 20
        gate = Channel(end, "gate", 20.0)
        sent = ends.zeros(numel, torch.float32).fill_(7.0)
        first, received = place(memory, sent), torch.zeros(2 * numel)
        work = ends.allgather(sent, received, name="x")
        del sent
        other = ends.zeros(numel, torch.float32).fill_(8.0)
        assert place(memory, other) != first  # nobody reads before the gate
        gate.allgather_rows(torch.zeros(1))
        wait(work)
        assert received.eq(7.0).all()
        gate.allgather_rows(torch.zeros(1))
        before = held_bytes(memory)
        wait(ends.allgather(other, received, name="x"))  # the next exchange gives it back
        assert held_bytes(memory) <= before - 4 * numel
        again = ends.zeros(numel, torch.float32)
        assert place(memory, again) == first
        assert not again.any()
        assert other.eq(8.0).all()

    run_ranks(2, work)


def test_room_of_neighbours_is_joined_and_its_pages_go_back() -> None:
    (memory,) = run_ranks(1, lambda end: sharing(end).memory)
    buffers = [memory.zeros(1 << 20, torch.float32) for _ in range(3)]
    before, first = held_bytes(memory), place(memory, buffers[0])
    while buffers:
        del buffers[len(buffers) // 2]  # neither first to last nor last to first
    large = memory.zeros(3 << 18, torch.float32)
    assert place(memory, large) == first
    assert held_bytes(memory) == before - 9 * 2**20  # of 12 MiB, 3 are used again


def test_an_error_says_that_no_room_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_most_bytes", lambda num_ranks: 1 << 20)
    (memory,) = run_ranks(1, lambda end: sharing(end).memory)
    with pytest.raises(
        TransportError, match=r"no 2097152 bytes .* LOFT_HVD_LANE=engine shares none"
    ):
        memory.zeros(1 << 19, torch.float32)


def test_what_was_closed_says_so() -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        sent = ends.zeros(2, torch.float32)
        work = ends.allgather(sent, torch.zeros(4), name="x")
        ends.memory.close()
        ends.memory.close()
        sent.fill_(1.0)  # a buffer outlives it
        assert work.done()  # badly
        for use in (work.finish, lambda: ends.zeros(1, torch.float32)):
            with pytest.raises(TransportError, match=r"memories that ranks share were closed with"):
                use()

    run_ranks(2, work)


@pytest.mark.parametrize("how", ["closes", "forgets"])
def test_a_wait_ends_if_a_rank_has_left_before_it_posted(how: str) -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        gate = Channel(end, "gate", 20.0)
        sent, received = ends.zeros(2, torch.float32), torch.zeros(6)
        sent.fill_(end.rank)
        works = [ends.allgather(sent, received, name="sent")]
        if end.rank == 1:
            wait(works.pop())
            boxes = ends.memory._boxes
            if how == "closes":
                ends.memory.close()
            del ends  # what leaves at a process's end leaves here
            gc.collect()
            with pytest.raises(RuntimeError, match="this rank has left"):
                boxes.post(1, 1, [0, 0, 0], 8)
            gate.allgather_rows(torch.zeros(1))
            return
        shared_memory._leave(ends.memory._boxes, os.getpid() + 1)  # a forked child's leaves nothing
        gate.allgather_rows(torch.zeros(1))
        works.append(ends.allgather(sent, torch.zeros(6), name="missing"))
        wait(works[0])
        assert received.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        with pytest.raises(TransportError, match=r"ranks \[1\] have left, .* waits for.*; look"):
            wait(works[1])

    run_ranks(3, work)


def test_who_has_not_come_is_named_beside_who_has_left() -> None:
    """A rank may have left because it has waited for another in vain."""

    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        gate = Channel(end, "gate", 20.0)
        sent, received = ends.zeros(2, torch.float32), torch.zeros(6)
        if end.rank == 1:
            ends.memory.close()
        gate.allgather_rows(torch.zeros(1))
        if end.rank == 0:
            late = r"ranks \[1\] have left, .*, to which ranks \[2\] have not come yet either; look"
            with pytest.raises(TransportError, match=late):
                wait(ends.allgather(sent, received, name="sent"))
        gate.allgather_rows(torch.zeros(1))

    run_ranks(3, work)


# Who lies, or is another.


def test_a_rank_that_lies_is_named() -> None:
    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        memory, gate = ends.memory, Channel(end, "gate", 20.0)
        sent, received = ends.zeros(4, torch.float32), torch.zeros(8)
        for name, shown, num_bytes in (("few", place(memory, sent), 8), ("far", 1 << 63, 16)):
            if end.rank == 1:
                tag = digest(f"1 {name} 16 {received.dtype}")
                memory._boxes.post(1, tag, [shown, 0], num_bytes)
                continue
            work = ends.allgather(sent, received, name=name)
            with pytest.raises(TransportError, match=rf"rank 1 shows {num_bytes} bytes at {shown}"):
                wait(work)
        gate.allgather_rows(torch.zeros(1))
        if end.rank == 1:
            words = np.frombuffer(memory._memories[1], np.uint64, 16)
            words[8] = 1 << 40  # how many messages it has posted to rank 0
        gate.allgather_rows(torch.zeros(1))
        if end.rank == 0:
            with pytest.raises(TransportError, match="rank 1 says that it has posted 10995116"):
                memory.has_all(1, 1)

    run_ranks(2, work)


@contextmanager
def memory_file(*, size: int = 1 << 16, has_seals: bool = True) -> Iterator[int]:
    descriptor = os.memfd_create("loft_hvd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, (5).to_bytes(8, "little") + (6).to_bytes(8, "little"), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, shared_memory._seals() * has_seals)
        yield descriptor
    finally:
        os.close(descriptor)


def test_only_a_sealed_memory_with_its_token_is_mapped_and_only_to_read(tmp_path: Path) -> None:
    mapped = functools.partial(shared_memory._memory_of, num_bytes=1 << 16)
    me = os.getpid()
    with (
        memory_file() as good,
        memory_file(has_seals=False) as loose,
        memory_file(size=4096) as small,
    ):
        memory = mapped(me, good, [5, 6])
        assert memory is not None
        with pytest.raises(TypeError):
            memory[0] = 1
        with pytest.raises(PermissionError):  # sealed: it stays as it is mapped
            os.ftruncate(good, 10)
        assert mapped(me, good, [5, 7]) is None
        assert mapped(me, loose, [5, 6]) is None
        assert mapped(me, small, [5, 6]) is None
        gone = good
    assert mapped(me, gone, [5, 6]) is None
    with (tmp_path / "file").open("w+b") as other:
        assert mapped(me, other.fileno(), [0, 0]) is None
    assert mapped(2**22 + 1, 3, [5, 6]) is None  # no process has such a number


def refuse(*_: object) -> int:
    raise OSError("no more memory")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no extension", r"rank \d shares .* \(no C\+\+ extension is built of this checkout\)"),
        ("no memory", r"rank \d shares .* \(no more memory\)"),
        ("strangers", r"rank \d shares .* \(the memory of rank \d is out of reach\)"),
    ],
)
def test_no_rank_shares_memory_where_one_cannot(
    what: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def for_one(function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        calls = itertools.count()
        return lambda *given: (instead if next(calls) == 1 else function)(*given)

    caplog.set_level(logging.INFO)
    if what == "no extension":
        monkeypatch.setattr(shared_memory, "extension", for_one(extension, lambda: None))
    elif what == "no memory":
        monkeypatch.setattr(os, "memfd_create", for_one(os.memfd_create, refuse))
    else:
        instead = for_one(shared_memory._memory_of, lambda *_: None)
        monkeypatch.setattr(shared_memory, "_memory_of", instead)
    before = len(os.listdir("/proc/self/fd"))
    found = run_ranks(3, lambda end: open_shared_memory(Channel(end, "memory", 20.0)))
    assert found == [None, None, None]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(re.findall(says, caplog.text)) == caplog.text.count("shares no memory") == 1


def test_opening_leaves_no_descriptor_but_those_of_what_is_mapped() -> None:
    """The last buffer's end closes them: memory is not kept for ranks that are gone."""
    gc.collect()  # what other tests have left in cycles
    before = len(os.listdir("/proc/self/fd"))

    def work(end: LocalTransport) -> None:
        ends = sharing(end)
        assert ends.zeros(5, torch.float32).numel() == 5

    run_ranks(3, work)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_series_is_equal_on_all_ranks_and_new_on_each() -> None:
    def work(end: LocalTransport) -> list[int]:
        memory, channel = sharing(end).memory, Channel(end, "again", 20.0)
        memory._num_series += 3 * end.rank  # as of ranks that have failed alone so often
        before = memory._num_series
        found = [memory.next_series(channel) for _ in range(2)]
        assert found[0] > before
        return found

    first, *others = run_ranks(3, work)
    assert first[1] > first[0]
    assert all(each == first for each in others)
