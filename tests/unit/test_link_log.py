"""What users see of a loss-tolerant gather: the run log, the report, explain(), warnings."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import datagram_extension
from loft_hvd.balance import live
from loft_hvd.pipeline import link_log
from loft_hvd.pipeline.link_log import LinkLog
from loft_hvd.pipeline.ring import ExchangeSpec, on_shard_owners, run_rule
from loft_hvd.pipeline.trace import Trace, TraceRow
from loft_hvd.pipeline.wire import Compression
from loft_hvd.report.entries import LinksLine, read_lines
from loft_hvd.report.export import prometheus_text, scalars_of
from loft_hvd.report.page import render_page
from loft_hvd.report.text import render_text
from loft_hvd.report.verdict import judge
from loft_hvd.runlog import MOST_ROWS, RunLog, read_run_log
from loft_hvd.transport import datagram
from loft_hvd.transport.base import Abilities, Brought, Lane, LossLimits, Work
from loft_hvd.transport.datagram import DatagramPort, LinkLosses, LossTolerant
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clock import Clock
from tests.support.ddp_buckets import backward
from tests.support.worlds import environment
from tests.unit.test_runlog import train_some

_MODULE, _REASON = datagram_extension()
needs_datagrams = pytest.mark.skipif(_MODULE is None, reason=_REASON)

GOOD = LinkLosses(
    peer=1, packets_sent=1000, packets_lost=10, blocks_sent_again=9, blocks=1000, blocks_filled=5
)
LOSSY = replace(GOOD, peer=2, packets_lost=150, blocks_filled=200)
WAITING = replace(GOOD, peer=3, share_in_time=0.64, waits=True)


class CanOpen(LocalTransport):
    """One rank's end of a world whose ranks may open lanes."""

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end._world, end.rank)
        self.can = Abilities(world=(end._world, end.rank))


class FakePort:
    """A port of which a test says what its links have done so far."""

    gather, rank = LossTolerant(), 0

    def __init__(self, *links: LinkLosses) -> None:
        self.now = list(links)

    def links(self) -> list[LinkLosses]:
        return self.now


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> FakePort:
    """The only port that there is."""
    port = FakePort(GOOD)
    monkeypatch.setattr(link_log, "datagram_ports", lambda *_: (port,))
    monkeypatch.setattr(live, "datagram_ports", lambda *_: (port,))
    return port


def links_of(log: RunLog) -> list[dict[str, Any]]:
    assert log.path is not None
    return [entry for entry in read_run_log(log.path) if entry["kind"] == "links"]


# The run log.


def test_a_line_has_what_links_did_since_the_line_before(port: FakePort, tmp_path: Path) -> None:
    clock, log = Clock(), RunLog(tmp_path)
    written = LinkLog(LocalWorld(4).transport(0), FakePort.gather, log, clock=clock)
    due = {5.0: GOOD, 35.0: replace(GOOD, packets_sent=1600, packets_lost=30, waits=True)}
    for log.step in range(1, 41):  # one a second
        clock.now += 1.0
        port.now = [due.get(float(log.step), GOOD)]
        written.step_ended()
    first, second = links_of(log)
    assert (first["step"], first["since"], first["seconds"], first["rank"]) == (5, 0, 5.0, 0)
    assert first["links"] == [asdict(GOOD)]
    assert (second["step"], second["since"], second["seconds"]) == (35, 5, 30.0)
    (link,) = second["links"]
    assert (link["packets_sent"], link["packets_lost"], link["blocks"]) == (600, 20, 0)
    assert link["waits"] is True


def test_without_a_log_nobody_asks_for_links(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), []
    monkeypatch.setattr(link_log, "datagram_ports", lambda *_: asked.append(1))
    written = LinkLog(LocalWorld(4).transport(0), FakePort.gather, RunLog(None), clock=clock)
    clock.now += 100.0
    written.step_ended()
    assert not asked


def test_a_line_of_many_links_has_those_that_lose_most(port: FakePort, tmp_path: Path) -> None:
    clock, log = Clock(), RunLog(tmp_path)
    port.now = [replace(GOOD, peer=peer) for peer in range(1, 100)]
    port.now[98 - 1] = replace(LOSSY, peer=98)
    port.now[97 - 1] = replace(WAITING, peer=97)
    written = LinkLog(LocalWorld(100).transport(0), FakePort.gather, log, clock=clock)
    clock.now += 5.0
    written.step_ended()
    (line,) = links_of(log)
    peers = [link["peer"] for link in line["links"]]
    assert len(peers) == MOST_ROWS
    assert peers == sorted(peers)
    assert {97, 98} < set(peers)
    assert line["num_links"] == 99


@needs_datagrams
@pytest.mark.parametrize("front", ["optimizer", "hook"])
def test_a_training_by_datagrams_writes_of_its_links(
    front: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(link_log, "_FIRST_S", 0.0)
    monkeypatch.setattr(link_log, "_EVERY_S", 0.0)

    def work(end: LocalTransport) -> None:
        options: dict[str, Any] = {
            "rule": loft.TrimmedMean(f=1),
            "gather": LossTolerant(),
            "log_dir": tmp_path,
            "transport": CanOpen(end),
        }
        parameter = torch.nn.Parameter(torch.zeros(100, 100))
        if front == "hook":
            hook = loft.ddp_hook(**options)
            for _ in range(3):
                backward(hook, [[parameter]], {parameter: torch.ones(10_000)})
            return
        optimizer = loft.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), **options)
        for _ in range(3):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()

    with environment(LOFT_HVD_LANE="datagram"):
        run_ranks(4, work)
    (path,) = tmp_path.iterdir()
    lines = [entry for entry in read_run_log(path) if entry["kind"] == "links"]
    assert [entry["step"] for entry in lines] == [1, 2, 3]
    for line in lines:
        assert [link["peer"] for link in line["links"]] == [1, 2, 3]
        # Shards of 2,512 values, 320 a block: each rank sends its row once a step.
        assert [link["blocks"] for link in line["links"]] == [8, 8, 8]
        assert all(link["packets_sent"] > 0 for link in line["links"])
        assert all(link["address"].startswith("127.0.0.1:") for link in line["links"])
    assert "of the values that came to rank 0 by datagrams" in render_text(read_run_log(path))


# What the report makes of it.


def line_of(*links: LinkLosses, step: int = 20) -> dict[str, Any]:
    return {
        "kind": "links",
        "step": step,
        "since": step - 10,
        "seconds": 30.0,
        "rank": 0,
        "num_links": len(links),
        "links": [asdict(link) for link in links],
    }


def test_the_verdict_names_links_that_wait_or_lose_more_than_a_tenth() -> None:
    assert judge(read_lines([line_of(GOOD, LOSSY, WAITING)])) == [
        "Rank 0 waits for the whole rows of rank 3, as without datagrams: 64% of one is there once "
        "all has been sent.",
        "The link from rank 0 to rank 2 loses 15% of its packets.",
        "20% of what rank 2 sends to rank 0 is filled in from other rows.",
    ]


def test_the_verdict_is_of_the_newest_interval() -> None:
    told = judge(read_lines([line_of(LOSSY, step=10), line_of(GOOD)]))
    assert told[0].startswith("Nothing has gone wrong so far")


def test_the_verdict_names_few_of_many_links() -> None:
    links = [replace(WAITING, peer=peer) for peer in range(1, 7)]
    told = judge(read_lines([line_of(*links)]))
    assert len(told) == 4
    assert told[-1] == "The table of links has 3 more."


@pytest.mark.parametrize(
    "link",
    [
        GOOD,
        replace(GOOD, packets_lost=100, blocks_filled=100),  # a tenth is not more than one
        replace(GOOD, packets_sent=20, packets_lost=9, blocks=20, blocks_filled=9),  # chance
    ],
)
def test_of_a_good_link_nothing_is_told(link: LinkLosses) -> None:
    assert link.news(0) == []


def test_the_report_has_a_table_of_links_and_what_was_filled_in() -> None:
    entries = [line_of(replace(GOOD, blocks_filled=15), LOSSY, step=10), line_of(GOOD, WAITING)]
    text = render_text(entries)
    # 15 + 200 + 5 + 5 of 4,000 blocks.
    assert "by datagrams 5.62% were filled in from other rows; its links up to step 20" in text
    (row,) = (line for line in text.splitlines() if line.startswith("   3 "))
    assert row.split()[3:5] == ["1000", "1.00%"]
    assert row.endswith("waits for whole rows")


def test_the_page_shows_links_and_marks_those_that_lose() -> None:
    page = render_page([line_of(GOOD, LOSSY, step=10), line_of(GOOD, LOSSY)], title="x")
    assert "<h2>Links</h2>" in page
    assert '<tr class="named"><td>2, ' in page
    assert '<tr class="named"><td>1, ' not in page


def test_a_log_from_before_there_were_links_has_no_word_of_them() -> None:
    entries: list[dict[str, Any]] = [{"kind": "run", "step": 0, "world_size": 3}]
    assert "Links" not in render_page(entries, title="x")
    assert "datagrams" not in render_text(entries)


def test_a_line_of_links_of_another_version_is_read() -> None:
    """It lacks what we know, and has what we do not."""
    entry = {"kind": "links", "step": 3, "rank": 0, "links": [{"peer": 1, "colour": "red"}]}
    (line,) = read_lines([entry, {"kind": "of tomorrow", "step": 4}])[:1]
    assert isinstance(line, LinksLine)
    assert line.links == [LinkLosses(peer=1)]
    assert "rank 0 by datagrams 0.00%" in render_text([entry])
    render_page([entry, {"kind": "links", "step": 4, "rank": 0, "links": []}], title="x")


def test_other_tools_get_shares() -> None:
    read = read_lines([line_of(GOOD, LOSSY)])
    found = scalars_of(read[0])
    assert found["loft/link 2/lost"] == 0.15
    assert found["loft/link 2/filled_in"] == 0.2
    assert found["loft/filled_in"] == 0.1025
    text = prometheus_text(read)
    assert 'loft_link_lost{peer="2"} 0.15' in text
    assert 'loft_link_waits{peer="1"} 0.0' in text


def test_explain_names_links_that_lose_much(port: FakePort) -> None:
    port.now = [GOOD, LOSSY]
    balancer = train_some(LocalWorld(1).transport(0))
    lines = balancer.explain().splitlines()
    assert "the link from rank 0 to rank 2 loses 15% of its packets" in lines
    assert not any("rank 1" in line and "loses" in line for line in lines)


class Ends(LocalTransport):
    """One rank's end of an engine that may end."""

    has_ended = False

    @property
    def can(self) -> Abilities:  # asked each time, as Horovod's
        assert not self.has_ended, "Horovod has not been initialized"
        return Abilities()


def test_explain_needs_no_engine_for_links() -> None:
    transport = Ends(LocalWorld(1), 0)
    balancer = train_some(transport)
    transport.has_ended = True
    assert "ranks exchange times next at step" in balancer.explain()


# What is counted and warned of while rows come.


class Wire:
    """In place of a port of the extension."""

    def __init__(self, waits: set[int]) -> None:
        self.waits = waits

    def state(self, peer: int) -> dict[str, Any]:
        counts = ("packets_sent", "packets_lost", "blocks_sent_again")
        known = {"round_trip_s": 0.05, "bytes_per_s": 1e6, "mean_share": 0.61}
        return {**dict.fromkeys(counts, 3), **known, "waits": peer in self.waits}


def ends(wire: Wire) -> DatagramPort:
    places = [f"10.0.0.{rank}:5100/udp" for rank in range(3)]
    return DatagramPort(wire, places, rank=1, gather=LossTolerant())


def test_holes_are_counted_by_the_rank_whose_row_has_them() -> None:
    """Three ranks, rows of 700 values: blocks of 320, 320 and 60."""
    port, room = ends(Wire(set())), torch.zeros(3, 700)
    present = (True, True, False)
    gathered = datagram._Gathered(port, 1, "x", room, [0, 1, 2], present)
    gathered.took(bytes([0, 1, 1, 0, 0, 0, 1, 1, 1]))
    gathered.took(b"")
    to_0, to_2 = port.links()
    assert (to_0.rows_closed_early, to_0.blocks, to_0.blocks_filled) == (1, 6, 2)
    assert to_2.blocks == to_2.blocks_filled == 0  # its rows do not count
    assert gathered.missing is not None
    assert gathered.missing[0].tolist() == [0, 1, 1]


def test_a_link_without_a_deadline_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr("loft_hvd.transport.datagram.time.monotonic", clock)
    wire = Wire(set())
    port = ends(wire)
    for _ in range(4):
        clock.now += 6.0
        port.look_for_waits()
        wire.waits = {2}
    (record,) = caplog.records
    told = record.getMessage()
    assert record.levelno == logging.WARNING
    assert told.startswith("rank 1 (10.0.0.1:5100/udp): the link from rank 2 (10.0.0.2:5100/udp)")
    assert "61 % of its rows" in told
    assert "max_bytes_per_s=" in told


def test_links_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(), [0]
    monkeypatch.setattr("loft_hvd.transport.datagram.time.monotonic", clock)
    port = ends(Wire(set()))

    def links() -> list[LinkLosses]:
        looks[0] += 1
        return []

    monkeypatch.setattr(port, "links", links)
    for _ in range(100):
        clock.now += 1.0
        port.look_for_waits()
    assert looks == [20]


class Holed(Lane):
    """A lane on which the rows of rank 2 miss their last block, in the second exchange alone."""

    loses = True
    num_brought = 0

    def bring(
        self, send: Tensor, room: Tensor | None, *, name: str, limits: LossLimits | None = None
    ) -> tuple[Work, Brought]:
        assert limits is not None
        work, brought = super().bring(send, room, name=name)
        self.num_brought += 1
        if self.num_brought == 2:
            brought.block_numel = 16
            brought.missing = torch.zeros(4, 2, dtype=torch.uint8)
            brought.missing[2, 1] = 1
        return work, brought


def test_a_trace_marks_an_exchange_whose_rows_had_holes(tmp_path: Path) -> None:
    def work(end: LocalTransport) -> list[str]:
        trace = Trace(tmp_path / f"{end.rank}.json", end.rank)
        row = TraceRow(trace, "bucket 0")
        lane = Holed(end)
        spec = ExchangeSpec(lane, "b", 128, torch.float32, "cpu", loft.TrimmedMean(f=1), row=row)
        exchange = on_shard_owners(spec, Compression.none, run_rule)
        values = torch.ones(128)
        for _ in range(2):
            exchange.start(values, values, None)
            while not exchange.advance():
                time.sleep(1e-4)
        assert torch.equal(values, torch.ones(128))
        trace.write()
        found = json.loads((tmp_path / f"{end.rank}.json").read_text())["traceEvents"]
        return [event["name"] for event in found if event["ph"] == "X"]

    usual = ["all-to-all", "aggregate", "all-gather"]
    with_holes = ["all-to-all", "fill", "aggregate", "all-gather"]
    assert run_ranks(4, work) == [usual + with_holes] * 4
