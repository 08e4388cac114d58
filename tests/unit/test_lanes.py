"""Who asks for a loss-tolerant gather and cannot have it is told why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loft_hvd.config import LANES, config
from loft_hvd.transport import datagram, lanes
from loft_hvd.transport.base import Abilities, Channel
from loft_hvd.transport.datagram import LossTolerant
from loft_hvd.transport.lanes import Needs, choose_lane
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.worlds import environment


class CanOpen(LocalTransport):
    """One rank's end of a world whose ranks may open lanes."""

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end._world, end.rank)
        self.can = Abilities(world=(end._world, end.rank))


@pytest.fixture
def told_anew() -> Iterator[None]:
    lanes._tell_of_gather.cache_clear()
    yield
    lanes._tell_of_gather.cache_clear()


@pytest.mark.usefixtures("told_anew")
@pytest.mark.parametrize(
    ("can_open", "device", "variables", "reason"),
    [
        (False, "cpu", {"HOROVOD_ELASTIC": "1"}, "the ranks of an elastic job change"),
        (False, "cpu", {}, "these ranks are a process set"),
        (True, "cuda:0", {}, "values on cuda:0 do not travel by datagrams"),
        (True, "cpu", {"LOFT_HVD_LANE": "engine"}, "LOFT_HVD_LANE=engine names another lane"),
        (True, "cpu", {"LOFT_HVD_MESH": "off"}, "LOFT_HVD_MESH=off"),
    ],
)
def test_who_asks_in_vain_is_told_why_once(
    can_open: bool,
    device: str,
    variables: dict[str, str],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(end: LocalTransport) -> None:
        channel = Channel(CanOpen(end) if can_open else end, "test")
        for _ in range(2):
            choose_lane(channel, Needs(device, gather=LossTolerant()))
            choose_lane(channel, Needs(device))

    with environment(**variables):
        assert config().is_elastic == ("HOROVOD_ELASTIC" in variables)
        run_ranks(2, work)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"gather=LossTolerant(): {reason}")
    assert "all of them arrive" in record.getMessage()


@pytest.mark.usefixtures("told_anew")
def test_ranks_on_different_devices_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def work(end: LocalTransport) -> None:
        mixed = CanOpen(end)
        mixed.can = replace(mixed.can, mixes_devices=True)
        device = "cpu" if end.rank == 0 else "cuda:0"
        choose_lane(Channel(mixed, "test"), Needs(device, gather=LossTolerant()))

    run_ranks(2, work)
    (record,) = caplog.records
    assert "some ranks have values on a GPU" in record.getMessage()


@pytest.mark.usefixtures("told_anew")
def test_one_host_needs_no_word_and_a_failed_opening_has_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def work(end: LocalTransport) -> str:
        return choose_lane(Channel(CanOpen(end), "test"), Needs(gather=LossTolerant())).name

    assert run_ranks(2, work) == ["shared memory"] * 2
    assert not caplog.records
    monkeypatch.setattr(datagram, "datagram_extension", lambda: (None, "it is not built"))
    with environment(LOFT_HVD_MESH="on"):
        run_ranks(2, work)
    told = {record.getMessage() for record in caplog.records}
    assert all("no datagrams between ranks (it is not built)" in each for each in told)


@pytest.mark.usefixtures("told_anew")
def test_alone_a_rank_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    choose_lane(Channel(LocalWorld(1).transport(0), "test"), Needs(gather=LossTolerant()))
    assert not caplog.records


def test_every_list_of_lanes_is_the_table() -> None:
    assert (*(kind.name for kind in lanes._KINDS), "engine") == LANES

    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "allreduce.md").read_text(encoding="utf-8")
    table = page.split("| lane | values | taken |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == LANES

    usage = (docs / "usage.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `LOFT_HVD_LANE` .*: (.*), for all values", usage, re.MULTILINE)
    assert tuple(re.findall(r"`([\w-]+)`", re.sub(r"\(.*?\)", "", row))) == LANES
