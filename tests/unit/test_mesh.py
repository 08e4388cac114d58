"""A mesh is a transport like any other, with any number of exchanges under way at once."""

from __future__ import annotations

import itertools
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.config import Config
from loft_hvd.errors import MismatchError, TransportError, TransportTimeoutError
from loft_hvd.pipeline import reduction as reduction_module
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import ExchangeSpec
from loft_hvd.transport import compact
from loft_hvd.transport import mesh as mesh_module
from loft_hvd.transport.agreement import share_keys
from loft_hvd.transport.base import Abilities, Channel, Lane, wait_for
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.congestion import CongestionControl
from loft_hvd.transport.local import LocalTransport, LocalWorld, _LocalWork, run_ranks
from loft_hvd.transport.mesh import (
    Mesh,
    MeshLane,
    MeshWork,
    _Addresses,
    _Meeting,
    open_mesh,
)
from tests.support.processes import own_sockets


def over_mesh(transport: LocalTransport, name: str = "mesh", *, compacts: str = "auto") -> MeshLane:
    mesh = open_mesh(Channel(transport, name, 20.0), interface="lo", compact_floats=compacts)
    assert mesh is not None
    return MeshLane(transport, mesh)


class Meshed(LocalTransport):
    """An engine that has a mesh for rules, as Horovod on several nodes; keeps what it started."""

    def __init__(self, end: LocalTransport, **options: Any) -> None:
        super().__init__(end._world, end.rank)
        self.local_size = 1  # a host of its own: else ranks would share memory
        self.started: list[str] = []
        self.mesh = over_mesh(end, **options).mesh
        self.at_end: list[Callable[[], None]] = []
        self.can = Abilities(
            world=("meshed", id(self)), at_end=self.at_end.append, open_mesh=lambda _: self.mesh
        )

    def _post(self, kind: str, name: str, send: Tensor, recv: Tensor) -> _LocalWork:
        self.started.append(f"{kind} {name}")
        return super()._post(kind, name, send, recv)


def test_messages_meet_by_name_size_dtype_and_phase_alone() -> None:
    values = torch.zeros(6)
    tags = [
        mesh_module._tag("loft.0", values, 0),
        mesh_module._tag("loft.0", values, 1),
        mesh_module._tag("loft.1", values, 0),
        mesh_module._tag("loft.0", values[:5], 0),
        mesh_module._tag("loft.0", values.view(torch.int32), 0),
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 2**31 for tag in tags)  # what C's int holds
    assert mesh_module._tag("loft.0", torch.ones(2, 3), 0) == tags[0]


needs_extension = pytest.mark.skipif(extension() is None, reason="the extension is not built")
COMPACTS = ["off", pytest.param("on", marks=needs_extension)]


@pytest.fixture
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats travel compact however few they are."""
    monkeypatch.setattr(mesh_module, "_COMPACT_BYTES", 0)
    monkeypatch.setattr(mesh_module, "_COMPACT_EXCHANGE_BYTES", 0)


@pytest.mark.every(3)
@pytest.mark.usefixtures("short_messages")
@pytest.mark.parametrize("compacts", COMPACTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mesh_conforms(world_size: int, compacts: str) -> None:
    def work(transport: LocalTransport) -> None:
        ends = over_mesh(transport, compacts=compacts)
        assert ends.mesh.is_compact == (compacts == "on")
        for check in CHECKS.values():
            check(ends)

    run_ranks(world_size, work)


@pytest.mark.usefixtures("short_messages")
@pytest.mark.parametrize("compacts", COMPACTS)
def test_a_mesh_of_several_connections_conforms(
    compacts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "_num_connections", lambda *_: 4)
    monkeypatch.setattr(mesh_module, "_PART_BYTES", 1)

    def work(transport: LocalTransport) -> int:
        ends = over_mesh(transport, compacts=compacts)
        for check in CHECKS.values():
            check(ends)
        part = ends.subset([(0, 2), (1,)])
        return part.mesh.num_connections

    assert run_ranks(3, work) == [4, 4, 4]


@pytest.mark.parametrize("num_connections", [2, 5])
def test_messages_are_cut_evenly_over_the_connections_and_have_the_same_bits(
    num_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "_num_connections", lambda *_: num_connections)

    def work(transport: LocalTransport) -> list[int]:
        row = torch.randn(300_001, generator=torch.Generator().manual_seed(transport.rank))
        ends = Meshed(transport, compacts="off")
        groups = tuple(map(_Weighing, ends.mesh._groups))
        ends.mesh._groups = groups
        given = loft.allreduce(row, loft.Median(), name="x", transport=transport)
        assert torch.equal(loft.allreduce(row, loft.Median(), name="x", transport=ends), given)
        return [group.num_bytes for group in groups]

    for sent in run_ranks(3, work):
        assert len(sent) == num_connections
        assert max(sent) <= 1.001 * min(sent)


def test_where_a_kernel_refuses_bbr_to_a_rank_that_needs_it_all_take_several_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    class Refused(CongestionControl):
        def look(self) -> None:
            self.is_refused = self._rank == 1

    monkeypatch.setattr(mesh_module, "CongestionControl", Refused)
    found = run_ranks(3, lambda end: over_mesh(end).mesh.num_connections)
    assert found == [mesh_module._SEVERAL] * 3
    assert f"{mesh_module._SEVERAL} connections between two, floats travel" in caplog.text


def test_the_asked_number_of_connections_is_taken_and_none_more_where_they_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Config.from_environ({"LOFT_HVD_LINKS": "3"})
    monkeypatch.setattr(mesh_module, "config", lambda: settings)
    assert run_ranks(2, lambda end: over_mesh(end).mesh.num_connections) == [3, 3]
    connect = mesh_module._connect

    def one_only(channel: Channel, num_groups: int, **given: Any) -> list[Any] | str:
        return connect(channel, num_groups, **given) if num_groups == 1 else "no more ports"

    monkeypatch.setattr(mesh_module, "_connect", one_only)
    assert run_ranks(2, lambda end: over_mesh(end).mesh.num_connections) == [1, 1]
    assert "one connection to each rank and not 3: no more ports" in caplog.text


@needs_extension
@pytest.mark.parametrize(
    ("by_rank", "bytes_per_s", "is_compact"),
    [
        (("auto", "auto"), 25e6, True),  # 200 Mb/s
        (("auto", "auto"), 115e6, True),  # 1 Gb/s
        (("auto", "auto"), 300e6, False),  # 2.5 Gb/s
        (("on", "on"), 1e9, True),
        (("on", "auto"), 1e9, False),
        (("auto", "off"), 25e6, False),
    ],
)
def test_floats_travel_compact_where_links_are_slow_and_all_ranks_agree(
    by_rank: tuple[str, str],
    bytes_per_s: float,
    is_compact: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(mesh_module, "_try_links", lambda *_, **__: (bytes_per_s, []))

    def work(transport: LocalTransport) -> list[bool]:
        ends = over_mesh(transport, compacts=by_rank[transport.rank])
        part = ends.subset([(0, 1)])
        return [ends.mesh.is_compact, part.mesh.is_compact]

    assert run_ranks(2, work) == [[is_compact] * 2] * 2
    how = f"one connection between two, floats travel {'compact' if is_compact else 'plain'}"
    assert f"{8e-6 * bytes_per_s:.0f} Mb/s out of each, {how}" in caplog.text


def test_floats_travel_plain_where_a_rank_has_no_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([True, False])
    monkeypatch.setattr(compact, "is_available", lambda: next(answers))
    compacts = run_ranks(2, lambda each: over_mesh(each, compacts="on").mesh.is_compact)
    assert compacts == [False, False]


class _Weighing:
    """A process group that adds up the bytes that it is given to send."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.num_bytes = 0

    def send(self, tensors: list[Tensor], *given: Any) -> Any:
        self.num_bytes += sum(each.nbytes for each in tensors)
        return self.group.send(tensors, *given)

    def recv(self, *given: Any) -> Any:
        return self.group.recv(*given)


@needs_extension
@pytest.mark.parametrize(
    ("dtype", "numel", "share"),
    [
        (torch.float32, 1_500_000, 0.855),
        (torch.float16, 1_500_000, 0.895),
        (torch.bfloat16, 1_500_000, 0.71),
        (torch.float32, 150_000, 1.0),  # so few that it would gain nothing
        (torch.float64, 600_000, 1.0),
    ],
)
def test_an_allreduce_over_slow_links_sends_fewer_bytes_and_has_the_same_bits(
    dtype: torch.dtype, numel: int, share: float
) -> None:
    def work(transport: LocalTransport) -> float:
        row = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank)).to(dtype)
        ends = Meshed(transport, compacts="on")
        group = _Weighing(ends.mesh.group)
        ends.mesh._groups = (group,)
        rule = loft.TrimmedMean(f=1)
        given = loft.allreduce(row, rule, name="x", transport=transport)
        assert torch.equal(loft.allreduce(row, rule, name="x", transport=ends), given)
        return group.num_bytes / (2 * (2 / 3) * row.nbytes)

    for sent in run_ranks(3, work):
        assert share - 0.02 < sent < share + 1e-3


def spoil_messages(monkeypatch: pytest.MonkeyPatch, *, first: float) -> None:
    """Have messages of values that begin with ``first`` be none."""
    honest = compact.message_of

    def message_of(values: Tensor) -> Tensor:
        message = honest(values)
        if values[0] == first:
            message[8] = 77  # a width of exponents that there is not
        return message

    monkeypatch.setattr(compact, "message_of", message_of)


@needs_extension
@pytest.mark.usefixtures("short_messages")
def test_a_message_that_is_none_ends_the_exchange_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_messages(monkeypatch, first=1.0)

    def work(transport: LocalTransport) -> str:
        ends = over_mesh(transport, compacts="on")
        row = torch.full((1024,), float(ends.rank))
        works = ends.allgather(row, torch.zeros(2048), name="x")
        if ends.rank == 1:
            wait_for(works, what="x", timeout_s=20)
            return ""
        with pytest.raises(TransportError) as caught:
            wait_for(works, what="x", timeout_s=20)
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == (
        "x: between ranks: from rank 1: what came is no message of 1024 torch.float32 values"
    )
    assert second == ""


@needs_extension
@pytest.mark.usefixtures("short_messages")
def test_a_faulty_message_among_some_ranks_names_the_rank_of_the_job_and_others_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_messages(monkeypatch, first=2.0)

    def work(transport: LocalTransport) -> tuple[str, list[float]]:
        part = over_mesh(transport, compacts="on").subset([(1, 2, 3), (0,)])
        if transport.rank == 0:
            return "", []
        rows = torch.zeros(3 * 1024)
        works = part.allgather(torch.full((1024,), float(transport.rank)), rows, name="x")
        try:
            wait_for(works, what="x", timeout_s=20)
        except TransportError as error:
            return str(error).partition(":")[2], rows[::1024].tolist()
        return "", rows[::1024].tolist()

    found = run_ranks(4, work)
    for rank in (1, 3):
        says, rows = found[rank]
        assert "from rank 2: what came is no message" in says
        assert (rows[0], rows[2]) == (1.0, 3.0)
    assert found[2] == ("", [1.0, 2.0, 3.0])


def test_ranks_of_one_node_send_each_other_floats_as_they_are() -> None:
    """Of two nodes; between nodes each rank has its share of what must be sent to gain."""
    nodes = ((0, 1, 2, 3), (4, 5, 6, 7))
    mesh = Mesh(None, rank=5, ranks=range(8), is_compact=True, nodes=nodes)
    values = torch.zeros(75_000)  # 0.3 MB
    near, far, mixed = mesh.subset([4, 5, 6, 7]), mesh.subset([1, 5]), mesh.subset([0, 4, 5])
    assert mesh._travels_compact(values)
    assert [near._travels_compact(values), far._travels_compact(values)] == [False, True]
    assert mixed._travels_compact(values)
    assert not far._travels_compact(values[:60_000])  # 0.24 of the 0.25 MB, of 1 MB by four pairs
    alone = Mesh(None, rank=5, ranks=range(8), is_compact=True, nodes=(tuple(range(8)),))
    assert alone.subset([4, 5, 6, 7])._travels_compact(torch.zeros(200_000))


@pytest.mark.every(3)  # of eight numbers of ranks, and else of two or four: each meets each
@pytest.mark.parametrize("wire", [loft.Compression.none, loft.Compression.bf16])
@pytest.mark.parametrize("bytes_per_s", [25e6, 115e6])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16, 33, 64, 100])
@pytest.mark.parametrize("megabytes", [5, 12.5, 25, 33.5])
def test_every_part_of_a_bucket_travels_compact_over_slow_links(
    megabytes: float, num_ranks: int, bytes_per_s: float, wire: loft.Compression
) -> None:
    mesh = Mesh(None, rank=0, ranks=range(num_ranks), bytes_per_s=bytes_per_s, is_compact=True)
    ends = MeshLane(LocalWorld(num_ranks).transport(0), mesh)
    numel = int(megabytes * 250_000)
    spec = ExchangeSpec(ends, "x", numel, torch.float32, "cpu", loft.Median(), wire)
    bounds = reduction_module._bounds(spec, num_ranks, None)
    for begin, end in itertools.pairwise(bounds):
        shard = torch.zeros((end - begin) // num_ranks, dtype=wire.dtype or torch.float32)
        assert mesh._travels_compact(shard)


class _Over:
    """A send or receive that ends at once, well or badly."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self, longest: timedelta) -> None:
        if self.error is not None:
            raise self.error


def test_a_connection_that_fails_after_a_faulty_message_does_not_hide_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault = mesh_module._FaultyMessageError("from rank 2: what came is no message")
    closed = RuntimeError("Connection closed by peer")
    mesh = Mesh(None, rank=0, ranks=range(4))
    with pytest.raises(TransportError, match="from rank 2") as caught:
        mesh._wait([_Over(), _Over(fault), _Over(closed)])
    assert caught.value.__cause__ is closed
    assert "from rank 2: what came is no message" in caplog.text
    with pytest.raises(RuntimeError, match="closed by peer"):
        mesh._wait([_Over(), _Over(closed)])


@needs_extension
@pytest.mark.usefixtures("short_messages")
def test_ranks_that_disagree_on_the_dtype_wait_and_go_on() -> None:
    """One would send more bytes than the other has room for, which ends a process in Gloo."""

    def work(transport: LocalTransport) -> list[float]:
        ends = over_mesh(transport, compacts="on")
        dtype = torch.float32 if ends.rank == 0 else torch.int32
        row = torch.full((4096,), 12345.678).to(dtype)
        work = ends.allgather(row, torch.zeros(2 * row.numel(), dtype=dtype), name="x")
        with pytest.raises(TransportTimeoutError):
            wait_for(work, what="x", timeout_s=0.2)
        rows = torch.zeros(2)
        wait_for(ends.allgather(torch.ones(1), rows, name="y"), what="y", timeout_s=20)
        return rows.tolist()

    assert run_ranks(2, work) == [[1.0, 1.0]] * 2


def test_a_rank_without_an_interface_leaves_all_without_a_mesh(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: LocalTransport) -> bool:
        interface = "" if transport.rank == 1 else "lo"
        return open_mesh(Channel(transport, "mesh", 20.0), interface=interface) is None

    assert run_ranks(3, work) == [True] * 3
    assert "rank 1: no connections between all ranks (no interface is known)" in caplog.text


def test_a_stranger_in_a_ranks_place_leaves_all_without_a_mesh(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has connected as rank 2, and says what it likes; the engine has given it no key."""
    honest = share_keys

    def share(channel: Channel) -> list[bytes]:
        keys = honest(channel)
        return [bytes(32)] * 3 if channel.rank == 2 else keys

    monkeypatch.setattr(mesh_module, "share_keys", share)

    def work(transport: LocalTransport) -> bool:
        return open_mesh(Channel(transport, "mesh", 20.0), interface="lo") is None

    assert run_ranks(3, work) == [True] * 3
    for rank in (0, 1):
        says = f"rank {rank}: no connections between all ranks (who answers as ranks [2] has not"
        assert says in caplog.text


def test_a_stranger_that_says_nothing_is_waited_for_no_longer_than_for_a_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = mesh_module._prove

    def prove(group: Any, keys: Sequence[bytes], *, rank: int) -> str:
        monkeypatch.setattr(mesh_module, "_CONNECT_S", 0.2)  # ranks are connected by now
        return "silent" if rank == 1 else honest(group, keys, rank=rank)

    monkeypatch.setattr(mesh_module, "_prove", prove)

    def work(transport: LocalTransport) -> bool:
        return open_mesh(Channel(transport, "mesh", 20.0), interface="lo") is None

    assert run_ranks(2, work) == [True] * 2
    assert "rank 0: no connections between all ranks (not all ranks have proven" in caplog.text


@pytest.mark.parametrize(
    ("took_s", "bytes_per_s"),
    [
        ((9.0, 0.004, 0.02, 0.01), 2**23 / 0.01),  # a long first try says nothing
        ((0.01, 0.004, 0.08), 2**20 / 0.004),
        ((0.5, 0.25), 2**20 / 0.25),
    ],
)
def test_all_ranks_know_how_fast_the_slowest_link_is(
    took_s: tuple[float, ...], bytes_per_s: float
) -> None:
    def work(transport: LocalTransport) -> tuple[float, list[int]]:
        # Rank 1 is slow, the others twice as fast. The clock is read before and after a try.
        share = 1.0 if transport.rank == 1 else 0.5
        readings = iter([at for each in took_s for at in (0.0, share * each)])
        ends = over_mesh(transport)
        channel = Channel(transport, "again", 20.0)
        found = mesh_module._try_links(
            ends.mesh.group, range(3), channel, clock=lambda: next(readings)
        )
        assert next(readings, None) is None
        return found

    for rate, silent in run_ranks(3, work):
        assert rate == pytest.approx(bytes_per_s)
        assert silent == []


def test_a_mesh_and_its_groups_know_how_fast_links_are() -> None:
    def work(transport: LocalTransport) -> list[float | None]:
        ends = over_mesh(transport)
        return [each.bytes_per_s for each in (ends, ends.subset([(0, 1), (2,)]), Lane(transport))]

    found = run_ranks(3, work)
    rate = found[0][0]
    assert rate is not None
    assert rate > 0
    assert found == [[rate, rate, None]] * 3


@pytest.mark.parametrize("failing", ["link 0", "link 1"])
def test_links_on_which_nothing_arrives_leave_all_without_a_mesh(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def alltoall(self: Mesh, *given: Any, name: str, **options: Any) -> Any:
        if name == failing and self.rank == 1:
            raise TransportError("gone")
        return honest(self, *given, name=name, **options)

    def try_links(*given: Any, **options: Any) -> Any:
        monkeypatch.setattr(mesh_module, "_CONNECT_S", 0.2)  # ranks are connected by now
        return honest_tries(*given, **options)

    honest, honest_tries = Mesh.alltoall, mesh_module._try_links
    monkeypatch.setattr(Mesh, "alltoall", alltoall)
    monkeypatch.setattr(mesh_module, "_try_links", try_links)
    monkeypatch.setattr(mesh_module, "_LONG_TRY_S", 60.0)

    def work(transport: LocalTransport) -> bool:
        return open_mesh(Channel(transport, "mesh", 20.0), interface="lo") is None

    assert run_ranks(3, work) == [True] * 3
    assert "rank 0: no connections between all ranks (ranks [0, 1, 2] could not send" in caplog.text


@pytest.mark.parametrize(
    ("bytes_per_s", "megabytes", "num_parts", "of_16_bits"),
    [
        (25e6, 5, 2, 1),  # 200 Mb/s
        (25e6, 12.5, 5, 2),
        (25e6, 25, 11, 5),
        (110e6, 5, 2, 1),  # 900 Mb/s
        (110e6, 12.5, 5, 2),
        (110e6, 25, 5, 5),
        (1e9, 12.5, 1, 1),  # 8 Gb/s
        (1e9, 25, 3, 3),
        (None, 12.5, 2, 2),  # unknown
        (None, 25, 5, 5),
        (25e6, 100, 12, 12),
        (110e6, 100, 12, 11),
        (1e9, 100, 12, 12),
        (None, 100, 12, 12),
    ],
)
@pytest.mark.parametrize("wire", [loft.Compression.none, loft.Compression.fp16])
def test_thin_links_take_smaller_parts(
    bytes_per_s: float | None,
    megabytes: float,
    num_parts: int,
    of_16_bits: int,
    wire: loft.Compression,
) -> None:
    mesh = Mesh(None, rank=0, ranks=range(3), bytes_per_s=bytes_per_s)
    ends = MeshLane(LocalWorld(3).transport(0), mesh)
    numel = int(megabytes * 250_000)
    spec = ExchangeSpec(ends, "x", numel, torch.float32, "cpu", loft.Median(), wire)
    bounds = reduction_module._bounds(spec, 3, None)
    assert len(bounds) - 1 == (num_parts if wire is loft.Compression.none else of_16_bits)


def test_every_two_ranks_have_a_key_that_no_third_has() -> None:
    def work(transport: LocalTransport) -> list[bytes]:
        return share_keys(Channel(transport, "keys", 20.0))

    keys = run_ranks(3, work)
    for one in range(3):
        for other in range(3):
            assert keys[one][other] == keys[other][one]
    pairs = {keys[one][other] for one in range(3) for other in range(one)}
    assert len(pairs) == 3


def test_a_proof_is_of_its_rank_its_key_and_both_numbers() -> None:
    proofs = {
        mesh_module._proof(key, rank, own, other)
        for key in (b"k", b"l")
        for rank in (0, 1)
        for own in ([1, 2], [3, 4])
        for other in ([5, 6], [7, 8])
    }
    assert len(proofs) == 16


def test_ranks_may_start_exchanges_in_any_order() -> None:
    def work(transport: LocalTransport) -> list[list[int]]:
        ends = over_mesh(transport)
        names = [f"x{at}" for at in range(8)]
        rows = {name: torch.zeros(3, dtype=torch.int64) for name in names}
        own = [torch.tensor([10 * at + ends.rank]) for at in range(8)]
        order = range(8) if ends.rank == 0 else range(7, -1, -1)
        works = [ends.allgather(own[at], rows[names[at]], name=names[at]) for at in order]
        for each in works:
            wait_for(each, what="x", timeout_s=20)
        return [rows[name].tolist() for name in names]

    expected = [[10 * at, 10 * at + 1, 10 * at + 2] for at in range(8)]
    assert run_ranks(3, work) == [expected] * 3


def test_ranks_that_disagree_on_the_size_wait_and_go_on() -> None:
    def work(transport: LocalTransport) -> list[float]:
        ends = over_mesh(transport)
        row = torch.zeros(1000 * (1 + ends.rank))
        work = ends.allgather(row, torch.zeros(2 * row.numel()), name="x")
        with pytest.raises(TransportTimeoutError):
            wait_for(work, what="x", timeout_s=0.2)
        rows = torch.zeros(2)
        wait_for(ends.allgather(torch.ones(1), rows, name="y"), what="y", timeout_s=20)
        return rows.tolist()

    assert run_ranks(2, work) == [[1.0, 1.0]] * 2


def test_ranks_that_bring_other_sizes_to_an_allreduce_hear_so_and_may_try_again() -> None:
    def work(transport: LocalTransport) -> Tensor:
        ends = Meshed(transport)
        with pytest.raises(MismatchError, match=r"numel differs on ranks \[1\]"):
            loft.allreduce(torch.zeros(6 + ends.rank % 2), loft.Median(), name="x", transport=ends)
        return loft.allreduce(
            torch.full((7,), float(ends.rank)), loft.Median(), name="x", transport=ends
        )

    for result in run_ranks(3, work):
        assert torch.equal(result, torch.ones(7))


@pytest.mark.parametrize(
    "rule", [loft.Mean(), loft.Mean(reproducible=True), loft.Median()], ids=str
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_may_wait_for_allreduces_in_any_order(num_ranks: int, rule: loft.Rule) -> None:
    def work(transport: LocalTransport) -> list[float]:
        ends = Meshed(transport)
        names = ["a", "b", "c"]
        handles = {
            name: loft.allreduce_async(
                torch.full((7,), float(at + ends.rank)), rule, name=name, transport=ends
            )
            for at, name in enumerate(names)
        }
        turned = names[ends.rank :] + names[: ends.rank]  # every rank begins with another
        results = {name: handles[name].wait(5.0) for name in turned}
        return [float(results[name].mean()) for name in names]

    middle = (num_ranks - 1) / 2
    assert run_ranks(num_ranks, work) == [[middle, middle + 1, middle + 2]] * num_ranks


def test_whoever_asks_for_one_allreduce_moves_those_on_that_began_before_and_after() -> None:
    def work(transport: LocalTransport) -> Tensor:
        ends = Meshed(transport)
        handles = [
            loft.allreduce_async(torch.ones(6), loft.Median(), name=name, transport=ends)
            for name in ("a", "b", "c")
        ]
        asked = handles[transport.rank]  # others than the one that is waited for
        while not asked.done():
            pass
        return handles[2].wait(5.0)

    for result in run_ranks(2, work):
        assert torch.equal(result, torch.ones(6))


def test_an_allreduce_that_fails_tells_who_waits_for_it_and_nobody_else() -> None:
    def refuse(_: Tensor) -> Tensor:
        raise ArithmeticError("a rule of the user's fails")

    def work(transport: LocalTransport) -> Tensor:
        ends = Meshed(transport)
        bad = loft.allreduce_async(torch.ones(6), loft.Custom(refuse), name="bad", transport=ends)
        good = loft.allreduce_async(torch.ones(6), loft.Median(), name="good", transport=ends)
        result = good.wait(5.0)
        with pytest.raises(ArithmeticError):
            bad.wait(5.0)
        return result

    for result in run_ranks(2, work):
        assert torch.equal(result, torch.ones(6))


@pytest.mark.parametrize("has_mesh", [False, True])
def test_a_mean_begins_before_ranks_agree_where_it_takes_the_engine(has_mesh: bool) -> None:
    may_come = threading.Event()
    started = [] if has_mesh else ["allreduce x"]

    def work(transport: LocalTransport) -> list[str]:
        ends = Meshed(transport)
        if not has_mesh:
            ends.can = replace(ends.can, world=None)
        loft.allreduce(torch.ones(1), loft.Median(), name="first", transport=ends)
        ends.started.clear()
        if ends.rank == 1:
            assert may_come.wait(20.0)
        handle = loft.allreduce_async(torch.ones(6), loft.Mean(), name="x", transport=ends)
        until = time.monotonic() + (20.0 if started else 0.2)
        while ends.rank == 0 and "allreduce x" not in ends.started and time.monotonic() < until:
            time.sleep(0.001)
        begun = [each for each in ends.started if "agree" not in each]
        may_come.set()
        assert torch.equal(handle.wait(5.0), torch.ones(6))
        return begun if ends.rank == 0 else started

    assert run_ranks(2, work) == [started] * 2


class _Endless:
    """An operation that other ranks never come to."""

    watch = None

    def done(self) -> bool:
        return False

    def finish(self) -> None:
        pytest.fail("it is not done")


class MeshedForSome(Meshed):
    """An engine on which values of another device wait for those of other ranks in vain."""

    def __init__(self, end: LocalTransport, waits: threading.Event) -> None:
        super().__init__(end)
        self._waits = waits

    def alltoall(
        self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False
    ) -> _LocalWork:
        self._waits.set()
        return cast(_LocalWork, _Endless())


def test_ranks_that_bring_a_tensor_on_other_devices_are_told() -> None:
    waits = threading.Event()

    def work(transport: LocalTransport) -> None:
        ends = MeshedForSome(transport, waits)
        row = torch.zeros(6, device="meta" if ends.rank == 1 else "cpu")
        if ends.rank != 1:  # which has looked in vain by the time it hears of the others
            assert waits.wait(20.0)
            time.sleep(0.1)
        with pytest.raises(MismatchError, match=r"device differs on ranks \[1\]"):
            loft.allreduce(row, loft.Median(), name="x", transport=ends, timeout_s=20.0)

    run_ranks(3, work)


def test_groups_of_a_mesh_exchange_among_themselves() -> None:
    def work(transport: LocalTransport) -> list[int]:
        part = over_mesh(transport).subset(((0, 2), (1, 3)))
        rows = torch.zeros(2, dtype=torch.int64)
        own = torch.tensor([transport.rank])
        wait_for(part.allgather(own, rows, name="x"), what="x", timeout_s=20)
        return rows.tolist()

    assert run_ranks(4, work) == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.every(3)
@pytest.mark.usefixtures("short_messages")
@pytest.mark.parametrize("compacts", COMPACTS)
@pytest.mark.parametrize("wire", [loft.Compression.none, loft.Compression.bf16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_parts_have_the_same_bits(
    num_ranks: int, wire: loft.Compression, compacts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction_module, "OVERLAPPING_PART_BYTES", ((math.inf, 4096, 4096),))

    def reduced(lane: Lane, row: Tensor, num_parts: int) -> Tensor:
        spec = ExchangeSpec(lane, "x", row.numel(), torch.float32, "cpu", loft.Median(), wire)

        def pack(values: Tensor) -> None:
            values.copy_(row)

        reduction = BucketReduction(spec, pack=pack)
        assert reduction.num_parts == num_parts
        for _ in range(3):  # buffers and names serve again
            reduction.start()
            while not reduction.advance():
                pass
        return reduction.values.clone()

    def work(transport: LocalTransport) -> bool:
        row = torch.randn(20_011, generator=torch.Generator().manual_seed(transport.rank))
        whole = reduced(Lane(transport), row, 1)
        ends = over_mesh(transport, compacts=compacts)
        ends.bytes_per_s = 1e9  # a busy machine has measured less, by which it cuts otherwise
        # Of 80,044 bytes, twelve parts are longer than the least.
        return torch.equal(whole, reduced(ends, row, 12))

    assert run_ranks(num_ranks, work) == [True] * num_ranks


class _Listening:
    """A process group that notes the order of its calls."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: list[str] = []

    def send(self, *given: Any) -> Any:
        self.calls.append("send")
        return self.group.send(*given)

    def recv(self, *given: Any) -> Any:
        self.calls.append("recv")
        return self.group.recv(*given)


@pytest.mark.parametrize(("num_ranks", "has_bucket"), [(3, True), (3, False), (2, False)])
def test_ranks_are_ready_to_receive_all_parts_before_they_send_the_second(
    num_ranks: int, has_bucket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction_module, "OVERLAPPING_PART_BYTES", ((math.inf, 4096, 4096),))

    def work(transport: LocalTransport) -> list[str]:
        ends = over_mesh(transport)
        group = _Listening(ends.mesh.group)
        ends.mesh._groups = (group,)
        spec = ExchangeSpec(ends, "x", 6144, torch.float32, "cpu", loft.Median())
        row = torch.full((6144,), float(ends.rank))

        def pack(values: Tensor) -> None:
            values.copy_(row)

        reduction = BucketReduction(spec, pack=pack, is_given=not has_bucket)
        assert reduction.num_parts > 2
        result = reduction.padded if has_bucket else torch.zeros(6144)
        reduction.start(*(() if has_bucket else (row.clone(), result)))
        while not reduction.advance():
            pass
        assert torch.equal(result, torch.full((6144,), (num_ranks - 1) / 2))
        num_exchanges = reduction.num_parts * (1 if num_ranks == 2 else 2)
        assert group.calls.count("recv") == num_exchanges * (num_ranks - 1)
        return group.calls

    num_peers = num_ranks - 1
    for calls in run_ranks(num_ranks, work):
        sends = [at for at, call in enumerate(calls) if call == "send"]
        ready = [sum(call == "recv" for call in calls[:at]) for at in sends]
        assert ready[num_peers] == calls.count("recv")
        # The first is under way before others are prepared.
        assert set(ready[:num_peers]) == {num_peers * (1 if num_ranks == 2 else 2)}


def test_a_closed_mesh_has_no_connections_and_says_so() -> None:
    before = own_sockets()
    opened: list[set[str]] = []

    def work(transport: LocalTransport) -> None:
        ends = over_mesh(transport)
        part = ends.subset(((0, 1, 2),))
        row = torch.ones(3)
        wait_for(part.alltoall(row, torch.zeros(3), name="x"), what="x", timeout_s=20)
        transport_barrier(transport, "open")
        opened.append(own_sockets() - before)
        transport_barrier(transport, "seen")
        ends.mesh.close()
        for each in (ends, part):
            with pytest.raises(TransportError, match=r"closed with the engine, by hvd\.shutdown"):
                each.alltoall(row, torch.zeros(3), name="y")
        assert transport_barrier(transport, "closed") == 3

    run_ranks(3, work)
    assert all(len(each) >= 6 for each in opened)  # one for each rank and peer
    until = time.monotonic() + 10
    while own_sockets() & opened[0] and time.monotonic() < until:
        time.sleep(0.01)
    assert not own_sockets() & opened[0]


def test_a_closed_mesh_ends_what_was_given_up_and_no_other_mesh() -> None:
    def work(transport: LocalTransport) -> list[float]:
        one, other = (over_mesh(transport, name) for name in ("one", "other"))
        if transport.rank == 1:
            one.mesh.close()
        transport_barrier(transport, "rank 1 has gone")
        if transport.rank == 2:
            move = one.mesh.broadcast(torch.zeros(3), name="x")  # rank 0 never comes
            given_up = MeshWork("x", move, one.mesh)
            one.mesh.close()
            with pytest.raises(TransportError, match="x: between ranks"):
                wait_for(given_up, what="x", timeout_s=10)
        transport_barrier(transport, "rank 2 has closed")
        rows = torch.zeros(3)
        own = torch.full((3,), float(transport.rank))
        wait_for(other.alltoall(own, rows, name="x"), what="x", timeout_s=20)
        one.mesh.close()
        return rows.tolist()

    assert run_ranks(3, work) == [[0.0, 1.0, 2.0]] * 3


_GIVES_UP = """
import atexit, threading, torch

def say_what_is_left():
    print([each.name for each in threading.enumerate() if each.name.startswith("loft-")])

atexit.register(say_what_is_left)  # first, so it is called last

from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import run_ranks
from loft_hvd.transport.mesh import MeshLane, open_mesh

kept = []

def work(transport):
    mesh = open_mesh(Channel(transport, "mesh", 20.0), interface="lo")
    kept.append(mesh)
    if transport.rank == 0:
        MeshLane(transport, mesh).alltoall(torch.ones(2), torch.zeros(2), name="x")

run_ranks(2, work)
"""


def test_what_was_given_up_ends_before_the_interpreter_does() -> None:
    command = [sys.executable, "-c", _GIVES_UP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def transport_barrier(transport: LocalTransport, name: str) -> int:
    rows = Channel(transport, name, 20.0).allgather_rows(torch.ones(1, dtype=torch.int64))
    return len(rows)


def test_an_allreduce_takes_the_connections_that_there_are() -> None:
    def work(transport: LocalTransport) -> list[float]:
        ends = Meshed(transport)
        found = []
        for _ in range(2):
            result = loft.allreduce(torch.ones(6), loft.Median(), name="x", transport=ends)
            found.append(float(result.sum()))
            while ends.at_end:  # as hvd.shutdown() does, and then hvd.init()
                ends.at_end.pop()()
            ends.mesh = over_mesh(transport).mesh
        return found

    assert run_ranks(2, work) == [[6.0, 6.0]] * 2


def test_addresses_of_many_ranks_have_room() -> None:
    channel: Any = SimpleNamespace(world_size=512, allgather_rows=lambda row: row.view(1, -1))
    channel.sub = lambda _: channel
    addresses = _Addresses(_Meeting(channel, 1), 0)
    told = bytes(158 + 8 * 512)  # what Gloo of torch 2 tells
    addresses.set("0", told)
    addresses._meeting.meet(0, "0", told)
    assert addresses._meeting.heard == [{"0": told}]
