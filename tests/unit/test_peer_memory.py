"""The peer lane without a GPU: what travels between ranks, its order, its end, and who refuses."""

from __future__ import annotations

import functools
import gc
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.errors import TransportError
from loft_hvd.transport import lanes, peer_memory
from loft_hvd.transport.base import Abilities, Channel, Lane, Work, wait_for
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.cuda_peers import DESCRIPTION_BYTES, CudaPeers, decode, encode
from loft_hvd.transport.lanes import Needs, choose_lane
from loft_hvd.transport.local import LocalTransport, run_ranks
from loft_hvd.transport.peer_memory import (
    PeerMemory,
    PeerMemoryLane,
    connect_peers,
    open_peer_memory,
    over_peers,
)
from tests.support.thread_peers import Memories, ThreadPeers
from tests.support.worlds import environment
from tests.unit.test_device import RULES, by_hook, by_optimizer

needs_extension = pytest.mark.skipif(extension() is None, reason="the extension is not built")

HANDLE = b"\x02c" + bytes(range(64))
SHARED = (0, HANDLE, 4096, 512, b"/torch_123_456_0", 7, bytes(64), True)


# What travels.


@pytest.mark.parametrize("handle", [HANDLE, HANDLE[2:]], ids=["versioned", "plain"])
def test_a_description_says_what_maps_a_buffer(handle: bytes) -> None:
    described = encode((3, handle, *SHARED[2:]))
    assert len(described) == DESCRIPTION_BYTES
    assert decode(described) == (handle, 4096, 512, b"/torch_123_456_0", 7)


@pytest.mark.parametrize("handle", [b"\x02e" + bytes(64), b"\x02e" + bytes(200), b""])
def test_expandable_segments_are_refused(handle: bytes) -> None:
    with pytest.raises(TransportError, match=r"expandable segments .* PYTORCH_CUDA_ALLOC_CONF"):
        encode((0, handle, *SHARED[2:]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: bytes(len(raw)),
        lambda raw: raw.replace(b"/torch_", b"/../../"),
        lambda raw: (-1).to_bytes(8, "little", signed=True) + raw[8:],
        lambda raw: raw[:8] + (-1).to_bytes(8, "little", signed=True) + raw[16:],
        lambda raw: raw[:24] + b"\xff" + raw[25:],
    ],
    ids=["zeros", "name", "bytes", "place", "length"],
)
def test_a_description_by_another_law_is_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(TransportError, match="describes its memory in other words"):
        decode(damage(encode(SHARED)))


# Ranks that are threads.


def connected(end: LocalTransport, memories: Memories) -> PeerMemory:
    opened = connect_peers(Channel(end, "peers", 20.0), lambda: ThreadPeers(memories))
    assert opened is not None
    return opened


def lane_of(end: LocalTransport, opened: PeerMemory) -> PeerMemoryLane:
    return over_peers(Channel(end, "lane", 20.0), opened)


def wait(work: Work) -> None:
    wait_for(work, what="a test", timeout_s=20.0)


class OfOneHost(LocalTransport):
    """One rank's end of a world whose ranks may open lanes."""

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end._world, end.rank)
        self.can = Abilities(world=(end._world, end.rank))


@pytest.fixture
def by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have values on a CPU take the lane, over devices that are threads."""
    memories = Memories()
    kind = lanes._Kind(
        "peer-memory",
        "cpu",
        suits=lambda channel, needs: needs.has_buffers,
        opens=lambda channel, _: connect_peers(channel, lambda: ThreadPeers(memories)),
        lane=over_peers,
    )
    monkeypatch.setattr(lanes, "_KINDS", (kind,))


@pytest.mark.every(4)
@needs_extension
@pytest.mark.usefixtures("by_threads")
@pytest.mark.parametrize("front", [by_optimizer, by_hook], ids=["optimizer", "hook"])
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(3, torch.float64), (4, torch.float32), (5, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize(("rule", "scope"), [(loft.Mean(), "shard"), *RULES], ids=str)
def test_it_gives_the_bits_of_rules_on_shard_owners(
    rule: loft.Rule, scope: str, world_size: int, dtype: torch.dtype, front: Any
) -> None:
    options = {"scope": scope, "worker_momentum": 0.0}
    same = loft.Mean(reproducible=True) if rule == loft.Mean() else rule  # its owners add up, too
    plain = run_ranks(world_size, lambda end: front(end, same, dtype, **options))
    lent = run_ranks(world_size, lambda end: front(OfOneHost(end), rule, dtype, **options))
    for one, other in zip(plain, lent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_extension
@pytest.mark.usefixtures("by_threads")
def test_what_travels_in_16_bits_and_audits_take_it_too() -> None:
    for options in ({"compression": loft.Compression.bf16}, {"audit": 1.0}):

        def work(end: LocalTransport, options: dict[str, Any] = options) -> list[Tensor]:
            return by_optimizer(end, loft.Median(), torch.float32, **options)

        plain = run_ranks(3, work)
        lent = run_ranks(3, functools.partial(on_one_host, work))
        for one, other in zip(plain, lent, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def on_one_host(
    work: Callable[[LocalTransport], list[Tensor]], end: LocalTransport
) -> list[Tensor]:
    return work(OfOneHost(end))


class FromBuffers(Lane):
    """Sends all from the lane's buffers, one for each exchange."""

    def __init__(self, lane: PeerMemoryLane) -> None:
        super().__init__(lane)
        self.lane = lane
        self.sent: list[Tensor] = []

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        self.sent.append(self.lane.zeros(send.numel(), send.dtype).copy_(send))
        return self.lane.alltoall(self.sent[-1], recv, name=name, skips_own=skips_own)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        self.sent.append(self.lane.zeros(send.numel(), send.dtype).copy_(send))
        return self.lane.allgather(self.sent[-1], recv, name=name)


@needs_extension
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_conforms(world_size: int) -> None:
    memories = Memories()

    def work(end: LocalTransport) -> None:
        opened = connected(end, memories)
        lane = FromBuffers(lane_of(end, opened))
        for check in CHECKS.values():
            check(lane)
        opened.close()  # the last buffers live until the others have copied them

    run_ranks(world_size, work)


@needs_extension
def test_rows_are_where_their_ranks_have_them() -> None:
    memories = Memories()

    def work(end: LocalTransport) -> None:
        lane = lane_of(end, connected(end, memories))
        sent = lane.zeros(6, torch.float32)
        for step in range(40):  # events are recorded anew
            sent.copy_(torch.arange(6.0) + 10 * end.rank + 100 * step)
            work, brought = lane.bring(sent, None, name="rows")
            wait(work)
            wanted = [[10 * r + 100 * step + 2 * end.rank + at for at in (0, 1)] for r in range(3)]
            assert [row.tolist() for row in brought.rows] == wanted
            addresses.setdefault(end.rank, set()).update(row.data_ptr() for row in brought.rows)
            brought.release()
            result, all_results = lane.zeros(1, torch.float32), torch.zeros(3)
            results.append(result)
            wait(lane.allgather(result.fill_(step), all_results, name="results"))
            assert all_results.tolist() == [step] * 3

    addresses: dict[int, set[int]] = {}
    results: list[Tensor] = []
    run_ranks(3, work)
    assert all(len(each) == 3 for each in addresses.values())  # not copied, and mapped once
    assert not set.intersection(*addresses.values())


@needs_extension
def test_ranks_that_take_other_steps_are_named() -> None:
    memories = Memories()

    def work(end: LocalTransport) -> None:
        lane = lane_of(end, connected(end, memories))
        sent = lane.zeros(4 if end.rank else 2, torch.float32)
        received = torch.zeros(2 * sent.numel())
        with pytest.raises(TransportError, match=r"rank \d shows .* take different steps"):
            wait(lane.allgather(sent, received, name="x"))

    run_ranks(2, work)


@needs_extension
def test_values_elsewhere_are_refused() -> None:
    memories = Memories()

    def work(end: LocalTransport) -> None:
        lane = lane_of(end, connected(end, memories))
        with pytest.raises(TransportError, match="lies in other memory than it was made in"):
            lane.allgather(torch.zeros(2), torch.zeros(4), name="x")

    run_ranks(2, work)


# Ends.


@needs_extension
def test_buffers_that_have_ended_are_let_go_once_all_is_copied() -> None:
    memories = Memories()

    def work(end: LocalTransport) -> None:
        opened = connected(end, memories)
        lane, gate = lane_of(end, opened), Channel(end, "gate", 20.0)
        mapped = lane._series._mapped
        peers = opened.peers
        assert isinstance(peers, ThreadPeers)

        def exchange(values: Tensor) -> None:
            wait(lane.allgather(values, torch.zeros(4), name=f"of {values.numel()}"))

        first = lane.zeros(2, torch.float32)
        exchange(first)
        assert {number for _, number in mapped} == {1}
        peers.withholds_counts = True  # as if the device were behind
        exchange(first)
        del first
        second = lane.zeros(2, torch.float32)
        exchange(second)
        gate.allgather_rows(torch.zeros(1))
        assert {number for _, number in mapped} == {1, 2}
        peers.withholds_counts = False
        lane._series._copied += 2
        gate.allgather_rows(torch.zeros(1))
        exchange(second)
        assert {number for _, number in mapped} == {2}

    run_ranks(2, work)


@needs_extension
def test_a_rank_leaves_once_the_others_have_copied() -> None:
    memories = Memories()

    def work(end: LocalTransport) -> None:
        opened = connected(end, memories)
        lane, gate = lane_of(end, opened), Channel(end, "gate", 20.0)
        peers = opened.peers
        assert isinstance(peers, ThreadPeers)
        peers.withholds_counts = end.rank == 1
        sent = lane.zeros(2, torch.float32)
        wait(lane.allgather(sent, torch.zeros(4), name="x"))
        gate.allgather_rows(torch.zeros(1))
        assert lane._series.is_done == (end.rank == 1)
        gate.allgather_rows(torch.zeros(1))
        if end.rank == 1:
            opened.close()  # nobody copies from it
            assert peers.counted == []
            lane._series._copied += 1
        gate.allgather_rows(torch.zeros(1))
        if end.rank == 0:
            assert lane._series.is_done
            opened.close()
            with pytest.raises(TransportError, match="were closed with the engine"):
                lane.allgather(sent, torch.zeros(4), name="x")

    run_ranks(2, work)


@needs_extension
def test_a_rank_does_not_wait_for_ever_for_those_that_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_memory, "_LEAVE_S", 0.05)
    memories = Memories()

    def work(end: LocalTransport) -> None:
        opened = connected(end, memories)
        lane = lane_of(end, opened)
        assert isinstance(opened.peers, ThreadPeers)
        opened.peers.withholds_counts = True
        sent = lane.zeros(2, torch.float32)
        wait(lane.allgather(sent, torch.zeros(4), name="x"))
        began = time.monotonic()
        opened.close()
        assert 0.05 <= time.monotonic() - began < 5.0

    run_ranks(2, work)


@needs_extension
def test_what_a_lane_held_goes_when_the_next_one_is_made() -> None:
    memories = Memories()

    def work(end: LocalTransport) -> None:
        opened = connected(end, memories)
        assert isinstance(opened.peers, ThreadPeers)
        lane = lane_of(end, opened)
        wait(lane.allgather(lane.zeros(1, torch.float32), torch.zeros(2), name="x"))
        Channel(end, "gate", 20.0).allgather_rows(torch.zeros(1))
        assert len(opened.peers.counted) == 1
        del lane
        gc.collect()
        kept.append(lane_of(end, opened))
        assert len(opened.peers.counted) == 1

    kept: list[Lane] = []
    run_ranks(2, work)


# Who refuses.


class Blind(ThreadPeers):
    """A device that reaches no other."""

    def unreachable(self, identity: int) -> str:
        return "cuda:0 cannot read the memory of cuda:1"


class Mistaken(ThreadPeers):
    """A device that reads something else, as some have been."""

    def map(self, description: bytes) -> Tensor:
        return torch.zeros_like(super().map(description))


class Failing(ThreadPeers):
    def share(self, values: Tensor) -> bytes:
        raise RuntimeError("no handle")


@needs_extension
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Blind, r"cuda:0 cannot read the memory of cuda:1"),
        (Mistaken, r"what it reads of rank \d is not what rank \d has written"),
        (Failing, "no handle"),
        (lambda _: CudaPeers(torch.device("cuda")), ".+"),
    ],
    ids=["unreachable", "mistaken", "failing", "no GPU"],
)
def test_no_rank_takes_it_where_one_cannot(
    kind: Callable[[Memories], Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind not in (Blind, Mistaken, Failing) and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    caplog.set_level(logging.INFO)
    memories = Memories()

    def work(end: LocalTransport) -> PeerMemory | None:
        make = kind if end.rank == 1 else ThreadPeers
        return connect_peers(Channel(end, "peers", 20.0), lambda: make(memories))

    assert run_ranks(3, work) == [None] * 3
    said = rf"rank 1 reads no memory of the other GPUs of its host \({says}\), so no rank does"
    assert len(re.findall(said, caplog.text)) == caplog.text.count("reads no memory") == 1


@needs_extension
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_is_not_opened() -> None:
    def work(end: LocalTransport) -> PeerMemory | None:
        return open_peer_memory(Channel(end, "peers", 20.0), torch.device("cuda", 0))

    assert run_ranks(2, work) == [None, None]


def test_values_on_a_cpu_do_not_take_it() -> None:
    with environment(LOFT_HVD_LANE="peer-memory"):
        names = run_ranks(
            2, lambda end: choose_lane(Channel(OfOneHost(end), "test"), Needs("cpu")).name
        )
    assert names == ["the engine's own"] * 2
