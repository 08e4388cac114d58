"""``loft-hvd doctor --ranks`` with ranks as threads: what differs is named, whatever it is."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loft_hvd import cli
from loft_hvd.config import Config, config
from loft_hvd.doctor import ranks as doctor
from loft_hvd.doctor.ranks import (
    Offset,
    RankComparison,
    RankFacts,
    clock_offsets,
    compare,
    compare_launched,
    describe,
    gather_facts,
    judge,
    look_here,
)
from loft_hvd.errors import TransportTimeoutError, UsageError
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks

_EXACT = (Offset(0.0, 0.0),) * 8


def _like(facts: RankFacts, host: str = "", **changed: str) -> RankFacts:
    return dataclasses.replace(facts, host=host or facts.host, facts=facts.facts | changed)


@pytest.fixture
def here() -> RankFacts:
    """What this very process finds, as if it could use 8 CPUs with one thread."""
    return dataclasses.replace(look_here(), host="node0", cpus=tuple(range(8)), threads=1)


def _compare(ranks: list[RankFacts], *, offsets: tuple[float, ...] = ()) -> list[RankComparison]:
    ahead = offsets or (0.0,) * len(ranks)

    def work(transport: LocalTransport) -> RankComparison:
        rank = transport.rank
        return compare(
            transport,
            ranks[rank],
            engine="threads",
            timeout_s=10.0,
            clock=lambda: time.time() + ahead[rank],
        )

    return run_ranks(len(ranks), work)


def test_equal_ranks_fit_together_and_all_say_the_same(here: RankFacts) -> None:
    found = _compare([here, here, here])
    assert [each.rank for each in found] == [0, 1, 2]
    assert found[0].ranks == (here, here, here)
    assert [dataclasses.replace(each, rank=0) for each in found] == [found[0]] * 3
    assert found[0].is_fit
    lines = describe(found[0])
    assert lines[0] == "3 ranks on 1 host, threads"
    assert lines[1].startswith("  node0: ranks 0 to 2; 8 CPUs, threads a rank 1, ")
    assert lines[-1] == "Verdict: the 3 ranks fit together."


@pytest.mark.parametrize(
    "name", ["loft-hvd", "loft-hvd files", "Python", "torch", "Horovod", "GPU"]
)
def test_what_must_be_equal_is_a_fault_that_names_ranks_and_the_way_out(
    here: RankFacts, name: str
) -> None:
    odd = dataclasses.replace(here, host="node1", facts=here.facts | {name: "9.9"})
    found = _compare([here, here, here, odd])
    assert not any(each.is_fit for each in found)
    (difference,) = found[2].differences
    assert difference.name == name
    assert difference.value == f"{here.facts[name]} on ranks 0 to 2; 9.9 on rank 3"
    assert difference.advice
    last = describe(found[0])[-1]
    assert last == f"Verdict: mend {name} first, {difference.value}: {difference.advice}."


def test_a_setting_that_one_rank_lacks_is_a_fault(here: RankFacts) -> None:
    (difference,) = judge([here, _like(here, LOFT_HVD_MESH="off")], _EXACT[:2])
    assert (difference.value, difference.is_fault) == ("auto on rank 0; off on rank 1", True)
    assert "mpirun" in difference.advice


def test_what_a_rank_may_have_for_itself_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Config(threads=3, isa="baseline", log_dir="runs", trace_file="trace.json")
    plain = look_here()
    monkeypatch.setattr(doctor, "config", lambda: own)
    changed = look_here()
    differing = {name for name in plain.facts if plain.facts[name] != changed.facts[name]}
    assert differing <= {"kernels"}
    assert changed.facts["kernels"].startswith("baseline")


def test_kernels_and_devices_may_differ(here: RankFacts) -> None:
    odd = _like(here, kernels="avx2", CPU="Old", GPUs="2 T4")
    found = _compare([_like(here, kernels="avx512", CPU="New", GPUs="4 H100"), odd])[0]
    assert found.is_fit
    assert {each.name for each in found.differences} == {"kernels", "CPU", "GPUs"}
    text = "\n".join(describe(found))
    assert "avx512 on rank 0; avx2 on rank 1 (fine: results have the same bits" in text
    assert text.endswith("Verdict: the 2 ranks fit together.")


@pytest.mark.parametrize(
    ("cpus", "threads", "says"),
    [
        ([(0, 1, 2, 3)] * 2, [2, 2], ""),
        ([(0, 1), (2, 3)], [2, 2], ""),  # bound to CPUs of their own
        ([(0, 1)] * 2, [2, 2], "ranks 0 and 1 on node0 start 4 threads and may use 2 CPUs"),
        ([(0,)] * 3, [1, 1, 1], ""),  # more ranks than CPUs: fewer threads there cannot be
        ([()] * 2, [64, 64], ""),  # not known
    ],
)
def test_more_threads_than_cpus_are_worth_mending(
    here: RankFacts, cpus: list[tuple[int, ...]], threads: list[int], says: str
) -> None:
    ranks = [
        dataclasses.replace(here, cpus=own, threads=count)
        for own, count in zip(cpus, threads, strict=True)
    ]
    found = judge(ranks, _EXACT[: len(ranks)])
    assert [each.value for each in found] == [says] * bool(says)
    assert [each.advice for each in found] == ["OMP_NUM_THREADS=1 on that host"] * bool(says)
    assert not any(each.is_fault for each in found)


@pytest.mark.parametrize("seconds", [0.0, 3.25, -60.0])
def test_offsets_hold_the_true_one_within_their_error(seconds: float) -> None:
    def work(transport: LocalTransport) -> tuple[Offset, ...]:
        ahead = seconds * transport.rank
        return clock_offsets(Channel(transport, "clocks", 10.0), clock=lambda: time.time() + ahead)

    faults = Faults(seed=3, max_delay_s=0.003)  # ranks see ends at different times
    for offsets in run_ranks(3, work, faults=faults):
        assert offsets[0] == Offset(0.0, 0.0)
        for rank, offset in enumerate(offsets):
            # 1 us: clocks of 1e9 s as float64 are good to 0.2 us.
            assert abs(offset.seconds - seconds * rank) <= offset.error_s + 1e-6
            assert offset.error_s < 0.1


def test_a_clock_that_is_off_is_named_with_its_rank(here: RankFacts) -> None:
    found = _compare([here, here, here], offsets=(0.0, 0.0, -2.0))[1]
    assert found.is_fit
    (difference,) = found.differences
    assert difference.value.startswith("off from rank 0's: rank 2 by -2.0")
    assert describe(found)[-1] == (
        "Verdict: the 3 ranks fit together; worth mending: clocks (marked ->)."
    )


def test_a_clock_that_may_be_right_is_not_called_off() -> None:
    here = dataclasses.replace(look_here(), threads=1)
    assert judge([here] * 2, [Offset(0.0, 0.0), Offset(0.3, 0.25)]) == ()


def test_faults_come_before_what_is_worth_mending(here: RankFacts) -> None:
    odd = dataclasses.replace(_like(here, torch="1.0", kernels="none"), cpus=(0,), host="b")
    crowded = [dataclasses.replace(odd, threads=4)] * 2
    found = judge([here, here, *crowded], _EXACT[:4])
    assert [each.name for each in found] == ["torch", "threads", "kernels"]


def test_a_rank_of_another_version_is_named_though_it_says_other_things(here: RankFacts) -> None:
    @dataclasses.dataclass(frozen=True)
    class Newer:
        host: str = "node1"
        cpus: tuple[int, ...] = (0,)
        threads: int = 1
        moon: str = "full"
        facts: dict[str, str] = dataclasses.field(
            default_factory=lambda: here.facts | {"loft-hvd": "2.0", "moon": "new"}
        )

    @dataclasses.dataclass(frozen=True)
    class Strange:
        said: int = 7

    def work(transport: LocalTransport) -> tuple[RankFacts, ...]:
        own: Any = [here, Newer(), Strange()][transport.rank]
        return gather_facts(Channel(transport, "facts", 10.0), own)

    ranks = run_ranks(3, work)[0]
    assert ranks[1].facts["moon"] == "new"
    (first, *_) = judge(ranks, _EXACT[:3])
    assert first.name == "loft-hvd"
    assert "2.0 on rank 1; another version" in first.value


def test_what_ranks_say_cannot_steer_a_terminal(here: RankFacts) -> None:
    odd = dataclasses.replace(here, facts=here.facts | {"torch": "\x1b[2J"})
    assert "\x1b" not in "\n".join(describe(_compare([here, odd])[0]))


def test_the_page_shows_what_is_printed(here: RankFacts) -> None:
    told = {"loft-hvd": "0.1.0", "loft-hvd files": "3e4eb5ba", "Python": "3.11", "numpy": "2.4.6"}
    told |= {"torch": "2.13.0", "Horovod": "0.28.1", "GPUs": "none", "LOFT_HVD_MESH": "auto"}
    order = ("loft-hvd", "loft-hvd files", "Python", "torch", "Horovod", "numpy", "LOFT_HVD_MESH")
    facts = {name: told[name] for name in (*order, "GPUs")}
    first = dataclasses.replace(
        here, threads=8, facts=facts | {"CPU": "AMD EPYC", "kernels": "avx512"}
    )
    odd = {"CPU": "Intel Xeon", "kernels": "avx2", "LOFT_HVD_MESH": "off"}
    ranks = (first, dataclasses.replace(first, host="node1", facts=facts | odd))
    offsets = (Offset(0.0, 0.0), Offset(2.002, 0.002))
    found = RankComparison(0, "Horovod on MPI", ranks, offsets, judge(ranks, offsets))
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"(?ms)^```text\n(.*?)\n```$", page)
    assert "\n".join(describe(found)) == shown


def test_many_hosts_are_counted_not_listed(here: RankFacts) -> None:
    ranks = tuple(_like(here, host=f"node{number}") for number in range(40))
    lines = describe(RankComparison(0, "threads", ranks, (Offset(0.0, 0.0),) * 40, ()))
    assert "  and 8 more hosts" in lines
    assert len(lines) < 40


def test_a_rank_that_does_not_come_ends_the_wait(here: RankFacts) -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 0:
            compare(transport, here, engine="threads", timeout_s=0.2)

    with pytest.raises(TransportTimeoutError, match=r"waited 0.2 s; ranks \[1\]"):
        run_ranks(2, work)


def test_without_a_launcher_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "config", Config)
    with pytest.raises(UsageError, match="mpirun -np 4 loft-hvd doctor --ranks"):
        compare_launched(timeout_s=1.0)


def test_an_engine_of_one_rank_beside_a_launcher_of_four_is_an_error(
    monkeypatch: pytest.MonkeyPatch, here: RankFacts
) -> None:
    monkeypatch.setattr(doctor, "config", lambda: Config(ranks=4))
    ended: list[object] = []

    def start(timeout_s: float) -> object:
        return run_ranks(1, lambda transport: transport)[0], "Horovod on MPI", ended.append

    monkeypatch.setattr(doctor, "_start_engine", start)
    with pytest.raises(UsageError, match=r"started 4 ranks, but Horovod on MPI knows 1.*pmix"):
        compare_launched(timeout_s=5.0)


@pytest.mark.parametrize("is_fit", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_command_prints_on_rank_0_and_ends_alike_on_all(
    monkeypatch: pytest.MonkeyPatch, here: RankFacts, is_fit: bool, rank: int
) -> None:
    ranks = [here, _like(here, torch=here.facts["torch"] if is_fit else "1.0")]
    found = dataclasses.replace(_compare(ranks)[0], rank=rank)
    monkeypatch.setattr(cli, "compare_launched", lambda *, timeout_s: found)
    result = CliRunner().invoke(cli.build_app(), ["doctor", "--ranks"])
    assert result.exit_code == (0 if is_fit else 1)
    assert ("Verdict: " in result.output) is (rank == 0)


def test_run_and_ranks_exclude_each_other() -> None:
    result = CliRunner().invoke(cli.build_app(), ["doctor", "--ranks", "--run"])
    assert result.exit_code == 1
    assert isinstance(result.exception, UsageError)


def test_this_process_has_read_its_settings() -> None:
    assert look_here().facts["LOFT_HVD_MESH"] == config().mesh
