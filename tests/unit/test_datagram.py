"""Datagrams between ranks: the lane, on loopback; who forges packets, and when rows are closed."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import datagram_extension
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError, LoftError, TransportError
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import ExchangeSpec
from loft_hvd.pipeline.tolerance import check_gather, loss_limits
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression
from loft_hvd.transport import compact, datagram
from loft_hvd.transport.base import Channel, Lane, wait_for
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.datagram import DatagramLane, LossTolerant, open_datagrams
from loft_hvd.transport.local import LocalTransport, run_ranks

_MODULE, _REASON = datagram_extension()
needs_datagrams = pytest.mark.skipif(_MODULE is None, reason=_REASON)
_LIMIT_S = 20.0


def _opened(transport: LocalTransport, gather: LossTolerant | None = None) -> DatagramLane:
    channel = Channel(transport, "datagram", _LIMIT_S)
    ends = open_datagrams(channel, LossTolerant() if gather is None else gather)
    assert ends is not None
    return DatagramLane(transport, ends)


def _close(lane: DatagramLane) -> None:
    channel = Channel(lane.below, "the end", _LIMIT_S)
    channel.allgather_rows(torch.zeros(1))  # nobody sends to who has left
    lane._ends.close()


def _run(
    num_ranks: int, work: Callable[[DatagramLane], Any], gather: LossTolerant | None = None
) -> list[Any]:
    def rank(transport: LocalTransport) -> Any:
        lane = _opened(transport, gather)
        try:
            return work(lane)
        finally:
            _close(lane)

    return run_ranks(num_ranks, rank)


def _reduce(lane: Lane, row: Tensor, rule: Rule, *, name: str = "x", **options: Any) -> Tensor:
    """Return what a bucket of a rank's row becomes."""

    def fill(values: Tensor) -> PassWeights | None:
        values.copy_(row)
        return options.get("weights")

    spec = ExchangeSpec(
        lane,
        name,
        row.numel(),
        row.dtype,
        "cpu",
        rule,
        critical=options.get("critical", ()),
    )
    reduction = BucketReduction(spec, pack=fill)
    reduction.start()
    until = time.monotonic() + _LIMIT_S
    while not reduction.advance():
        assert time.monotonic() < until
        time.sleep(1e-4)
    return reduction.values.clone()


@needs_datagrams
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_lane_does_what_every_transport_does(num_ranks: int) -> None:
    def work(lane: DatagramLane) -> None:
        for check in CHECKS.values():
            check(lane)

    _run(num_ranks, work)


_RULES = (loft.Mean(), loft.TrimmedMean(f=1), loft.Median(), loft.Robust(f=1))


@needs_datagrams
@pytest.mark.parametrize("rule", _RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_where_nothing_is_lost_results_have_the_bits_of_other_lanes(
    rule: Rule, dtype: torch.dtype
) -> None:
    rows = [
        torch.randn(70_003, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(4)
    ]

    def work(lane: DatagramLane) -> tuple[Tensor, Tensor]:
        engine = Lane(lane.below)
        engine.adds_up = False  # shard owners, as on this lane
        row = rows[lane.rank]
        return _reduce(lane, row, rule), _reduce(engine, row, rule)

    for result, due in _run(4, work):
        assert torch.equal(result, due)


@needs_datagrams
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["normal", "any bits", "zeros"])
def test_floats_travel_compact_bit_for_bit(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "SLOW_BYTES_PER_S", float("inf"))

    def sent_by(rank: int) -> Tensor:
        draw = torch.Generator().manual_seed(rank)
        if kind == "any bits":
            num_bytes = 50_001 * dtype.itemsize
            drawn = torch.randint(0, 256, (num_bytes,), generator=draw, dtype=torch.uint8)
            return drawn.view(dtype)
        values = torch.randn(50_001, generator=draw) * 1e-3
        return (values * float(kind == "normal")).to(dtype)

    def work(lane: DatagramLane) -> Tensor:
        received = torch.empty(3 * 50_001, dtype=dtype)
        work = lane.allgather(sent_by(lane.rank), received, name="all")
        wait_for(work, what="all", timeout_s=_LIMIT_S)
        return received

    due = torch.cat([sent_by(rank) for rank in range(3)]).view(torch.uint8)
    for received in _run(3, work):
        assert torch.equal(received.view(torch.uint8), due)


@needs_datagrams
def test_many_exchanges_of_a_name_follow_each_other_and_leave_nothing() -> None:
    def work(lane: DatagramLane) -> int:
        for step in range(300):
            row = torch.full((5000,), float(step + lane.rank))
            result = _reduce(lane, row, loft.Mean())
            assert torch.allclose(result, torch.full((5000,), step + 1.0)), step
        lane._ends.begin("last")  # who is released is told then
        return len(lane._ends._held)

    assert max(_run(3, work)) <= 3


@needs_datagrams
def test_parts_of_the_ranks_exchange_at_once_under_one_name() -> None:
    def work(lane: DatagramLane) -> Tensor:
        part = lane.subset([(0, 2), (1, 3)])
        received = torch.zeros(2 * 999)
        sent = torch.full((999,), float(lane.rank))
        wait_for(part.allgather(sent, received, name="same"), what="part", timeout_s=_LIMIT_S)
        return received.view(2, -1)[:, 0]

    assert [each.tolist() for each in _run(4, work)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@needs_datagrams
def test_ranks_that_bring_other_sizes_are_told() -> None:
    def work(lane: DatagramLane) -> str:
        sent, received = torch.zeros((2, 2 * (100 + lane.rank)))
        with pytest.raises(TransportError) as caught:
            wait_for(lane.alltoall(sent, received, name="odd"), what="odd", timeout_s=_LIMIT_S)
        return str(caught.value)

    for rank, told in enumerate(_run(2, work)):
        theirs, own = 4 * (100 + 1 - rank), 4 * (100 + rank)
        assert f"rank {1 - rank} sends rows of {theirs} bytes, this one of {own}" in told


@needs_datagrams
def test_what_strangers_send_changes_nothing_and_gets_no_answer() -> None:
    """Garbage, what is too short or too long, and packets of a rank sent again by another."""

    def work(lane: DatagramLane) -> dict[str, int]:
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        place, _, port = lane._ends.places[lane.rank].removesuffix("/udp").partition(":")
        for size in (0, 1, 31, 47, 48, 60, 500, 1328, 1329, 9000):
            for seed in range(20):
                stranger.sendto(
                    bytes([1, 1 + seed % 6]) + bytes(max(0, size - 2)), (place, int(port))
                )
        row = torch.full((90_000,), float(lane.rank))
        result = _reduce(lane, row, loft.Mean())
        assert torch.equal(result, torch.full((90_000,), 1.0))
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(10)
        stranger.close()
        counts: dict[str, int] = lane._ends.wire.counts()
        return counts

    for counts in _run(3, work):
        assert counts["strangers"] >= 190


class _Between:
    """Stands between two ports, for each as the other one; loses UDP packets once it is cut."""

    def __init__(self) -> None:
        self.is_cut = False
        self._ends = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        self._listeners = [socket.socket() for _ in range(2)]
        for end, listener in zip(self._ends, self._listeners, strict=True):
            end.bind(("127.0.0.1", 0))
            listener.bind(end.getsockname())
            listener.listen()
        self.numbers = [end.getsockname()[1] for end in self._ends]
        self.num_calls = 0

    def start(self, ports: list[int]) -> None:
        for at in range(2):
            for each in (self._forward, self._connect):
                threading.Thread(target=each, args=(at, ports), daemon=True).start()

    def _forward(self, at: int, ports: list[int]) -> None:
        while True:
            packet = self._ends[at].recv(65536)
            if not self.is_cut:
                self._ends[1 - at].sendto(packet, ("127.0.0.1", ports[at]))

    def _connect(self, at: int, ports: list[int]) -> None:
        while True:
            caller, _ = self._listeners[at].accept()
            self.num_calls += 1
            called = socket.create_connection(("127.0.0.1", ports[at]))
            for one, other in ((caller, called), (called, caller)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    @staticmethod
    def _pump(one: socket.socket, other: socket.socket) -> None:
        with suppress(ConnectionError):  # at the end a port resets what it has not read
            while data := one.recv(65536):
                other.sendall(data)


@needs_datagrams
@pytest.mark.long
def test_where_udp_is_cut_packets_go_by_tcp() -> None:
    """In the midst of exchanges; none of them loses or repeats a value."""
    assert _MODULE is not None
    keys, between = [b"a" * 16, b"b" * 16], _Between()
    ports = []
    for rank in range(2):
        out, into = [b""] * 2, [b""] * 2
        out[1 - rank], into[1 - rank] = keys[rank], keys[1 - rank]
        out[rank] = into[rank] = b"-" * 16
        ports.append(_MODULE.Port(rank, 2, 1, "127.0.0.1", 0, 0, out, into, 0.0))
    for rank, port in enumerate(ports):
        places = [("127.0.0.1", port.number)] * 2
        places[1 - rank] = ("127.0.0.1", between.numbers[1 - rank])
        port.connect(places)
    between.start([port.number for port in ports])
    sent, received = torch.randn(2, 300_000), torch.empty(2, 300_000)
    began = time.monotonic()
    for step in range(30):
        between.is_cut = step >= 10
        received.zero_()
        for rank, port in enumerate(ports):
            rooms = [received[rank].data_ptr()] * 2
            port.begin(step, [sent[rank].data_ptr()] * 2, rooms, sent[rank].nbytes, 1, False)
        while not all(port.is_done(step) for port in ports):
            assert time.monotonic() - began < _LIMIT_S, [step] + [
                str(port.state(1 - r)) + str(port.tunnelled()) for r, port in enumerate(ports)
            ]
            time.sleep(1e-3)
        assert [port.take(step) for port in ports] == [(b"", "")] * 2
        assert torch.equal(received, sent.flip(0))
    assert [port.tunnelled() for port in ports] == [[1], [0]]
    assert between.num_calls == 1
    assert time.monotonic() - began < 12  # once 5 s of silence had passed
    for port in ports:
        port.close()


@needs_datagrams
def test_who_is_late_for_more_than_is_kept_for_it_is_not_silent() -> None:
    """Of 40 MB 32 MiB are kept for a rank that computes on; the rest waits, and is no failure."""
    assert _MODULE is not None
    ports = []
    for rank in range(2):
        out, into = [b"-" * 16] * 2, [b"-" * 16] * 2
        out[1 - rank], into[1 - rank] = bytes([rank]) * 16, bytes([1 - rank]) * 16
        ports.append(_MODULE.Port(rank, 2, 1, "127.0.0.1", 0, 0, out, into, 0.0))
    for port in ports:
        port.connect([("127.0.0.1", each.number) for each in ports])
    sent, received = torch.ones(2, 10**7), torch.zeros(2, 10**7)

    def begin(rank: int) -> None:
        places = [[values[rank].data_ptr()] * 2 for values in (sent, received)]
        ports[rank].begin(1, *places, sent[rank].nbytes, 1, False)

    begin(0)
    silent, until = [], time.monotonic() + 3.0
    while time.monotonic() < until:
        silent += ports[0].silent(1.0)
        time.sleep(0.05)
    assert silent == []
    begin(1)
    until = time.monotonic() + _LIMIT_S
    while not all(port.is_done(1) for port in ports):
        assert time.monotonic() < until
        time.sleep(1e-3)
    assert torch.equal(received, sent)
    for port in ports:
        port.close()


@needs_datagrams
def test_a_port_that_is_not_reached_leaves_all_without_datagrams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 has a wrong key of rank 2's, so nothing of it can be opened."""
    honest, own = datagram._key, threading.local()
    monkeypatch.setattr(datagram, "_TRY_S", 0.5)

    def key(shared: bytes, world: int, source: int, target: int) -> bytes:
        is_wrong = own.rank == 0 and source == 2
        return bytes(16) if is_wrong else honest(shared, world, source, target)

    monkeypatch.setattr(datagram, "_key", key)

    def work(transport: LocalTransport) -> bool:
        own.rank = transport.rank
        return open_datagrams(Channel(transport, "d", _LIMIT_S), LossTolerant()) is None

    assert run_ranks(3, work) == [True] * 3
    assert re.search(r"rank 0 does not hear rank 2 \(127.0.0.1:\d+/udp to 127", caplog.text)


def test_a_key_is_of_one_direction_and_one_world() -> None:
    keys = {
        datagram._key(shared, world, source, target)
        for shared in (b"a" * 32, b"b" * 32)
        for world in (1, 2)
        for source, target in ((0, 1), (1, 0), (0, 2))
    }
    assert len(keys) == 12
    assert {len(key) for key in keys} == {16}


def test_keys_are_derived_as_rfc_5869_does() -> None:
    """Its first test case: a salt, an input and an info of those bytes."""
    found = datagram._derived(
        b"\x0b" * 22, salt=bytes(range(13)), info=bytes(range(0xF0, 0xFA)), num_bytes=16
    )
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a"


# When rows are closed: a link of 20 ms there and back that carries 2 MB/s. 100,000 bytes take
# 1.5 * 20 + 50 = 80 ms; with 100 ms of slack the deadline is 180.


@needs_datagrams
def test_the_usual_time_is_one_and_a_half_round_trips_and_that_of_the_bytes() -> None:
    assert _MODULE is not None
    assert _MODULE.usual_time_s(0.020, 100e3, 2e6) == pytest.approx(0.080)


@needs_datagrams
@pytest.mark.parametrize(
    ("elapsed_s", "share", "is_closed"),
    [
        (0.010, 1.0, True),  # complete: at once
        (0.079, 0.99, False),  # before the usual time nothing else closes a row
        (0.080, 0.8, True),  # at that time, if enough is there
        (0.080, 0.79, False),
        (0.150, 0.79, False),
        (0.150, 0.80, True),  # from then on the moment enough is there
        (0.1799, 0.5, False),
        (0.180, 0.0, True),  # at the deadline, with what is there
    ],
)
def test_a_row_is_closed_in_four_cases(elapsed_s: float, share: float, is_closed: bool) -> None:
    assert _MODULE is not None
    assert _MODULE.may_close(elapsed_s, share, 0.8, 0.080, 0.180) is is_closed


# What users may ask for.


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"share": 0}, ArgumentError, "share=0 must be > 0 and <= 1"),
        ({"share": 1.01}, ArgumentError, "reliable=True waits for all"),
        ({"share": True}, ArgumentError, "share=True"),
        ({"slack_s": -1}, ArgumentError, "slack_s=-1 must be a number >= 0"),
        ({"slack_s": float("nan")}, ArgumentError, "slack_s=nan"),
        ({"max_bytes_per_s": 0}, ArgumentError, "max_bytes_per_s=0 must be a number >= 1"),
        ({"critical": "bias"}, ArgumentTypeError, "critical='bias' must be patterns"),
        ({"critical": (1,)}, ArgumentTypeError, "patterns of parameters' names"),
        ({"reliable": 1}, ArgumentTypeError, "reliable=1 must be True or False"),
    ],
)
def test_wrong_options_are_refused_with_the_way_out(
    options: dict[str, Any], kind: type[LoftError], told: str
) -> None:
    with pytest.raises(kind, match=re.escape(told)):
        LossTolerant(**options)


def test_biases_and_norms_are_critical_unless_told_otherwise() -> None:
    usual, own = LossTolerant(), LossTolerant(critical=("head.*",))
    assert usual.is_critical("a.bias", 1)
    assert not usual.is_critical("a.weight", 2)
    assert own.is_critical("head.weight", 2)
    assert not own.is_critical("a.bias", 1)


@pytest.mark.parametrize(
    ("rules", "options", "told"),
    [
        ([loft.TrimmedMean(f=1)], {"num_rows": 3}, "needs 3 rows at each value and there are 3"),
        ([loft.Custom(lambda rows: rows[0])], {}, "nobody knows what stands"),
        ([loft.Mean(reproducible=True)], {}, "differ from run to run"),
        ([loft.TrimmedMean(f=1)], {"audit": 0.5}, "audit=0.5 does not go with"),
        ([loft.TrimmedMean(f=1)], {"wire": object()}, "compression="),
    ],
)
def test_what_cannot_miss_rows_is_refused(
    rules: list[Rule], options: dict[str, Any], told: str
) -> None:
    given = {"num_rows": 5, **options}
    with pytest.raises(ArgumentError, match=re.escape(told)):
        check_gather(LossTolerant(), rules, what="it", **given)
    check_gather(LossTolerant(reliable=True), rules, what="it", **given)
    check_gather(None, rules, what="it", **given)


def test_another_kind_of_gather_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="gather='lossy' is of type str"):
        check_gather("lossy", [loft.Mean()], 4, what="it")  # type: ignore[arg-type]  # the test


@pytest.mark.parametrize(
    ("rule", "present", "most"),
    [
        (loft.TrimmedMean(f=1), (True,) * 5, 2),
        (loft.TrimmedMean(f=1), (True, True, True, False, True), 1),
        (loft.TrimmedMean(f=2), (True,) * 5, 0),
        (loft.Median(), (True,) * 5, 2),  # of three rows one may be wrong
        (loft.Mean(), (True,) * 5, 3),  # of four that travel
        (loft.Mean(), (True, False, False, False, True), 0),
        (loft.Mean(), (True, False, False, False, False), 0),
    ],
)
def test_how_many_rows_may_lack_a_block(rule: Rule, present: tuple[bool, ...], most: int) -> None:
    weights = PassWeights(weights=None, present=present, row_scale=1.0)
    assert loss_limits(rule, 5, weights, own=0).most_missing == most


@needs_datagrams
def test_critical_parts_are_blocks_of_the_shards_that_they_lie_in() -> None:
    """Two ranks, shards of 1000 values: blocks 0 to 2 of 320 and block 3 of 40."""

    def work(lane: DatagramLane) -> list[int]:
        room = torch.zeros(2, 1000)
        found = lane._critical([(310, 330), (999, 1001), (1990, 2000)], room)
        return list(found)

    assert _run(2, work)[0] == [1, 1, 0, 1, 1, 0, 0, 1]


def test_what_travels_may_be_compressed_by_us() -> None:
    check_gather(LossTolerant(), [loft.Mean()], 4, what="it", wire=Compression.fp16)
