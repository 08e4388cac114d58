"""The kernels' benchmark: it times what it says, checks results first, and judges by the goals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loft_hvd._native import extension
from loft_hvd.bench import commands, gate, kernels
from loft_hvd.bench.contestants import (
    CALLED,
    DISTANCES,
    EQUAL,
    KEPT,
    MASKED,
    MIXED,
    NEW,
    check_contestants,
    random_mix,
)
from loft_hvd.bench.cuda import (
    COPY,
    COPY_AGAIN,
    device_seconds,
    judge_cuda,
    measure_cuda,
)
from loft_hvd.bench.gate import Goal, judge_kernels
from loft_hvd.bench.kernels import (
    Clock,
    KernelBench,
    Rounds,
    Timing,
    interleaved_minimum,
    measure_kernels,
)
from loft_hvd.bench.peers import Untimed
from loft_hvd.cli import build_app
from loft_hvd.errors import AggregationError, ArgumentError

pytestmark = pytest.mark.skipif(extension() is None, reason="the extension is not built here")

SMALL = KernelBench(rows=(4,), numel=50_000, repeats=2)


def test_every_contestant_of_a_row_count_is_timed_at_every_level() -> None:
    threads = torch.get_num_threads()
    untimed: list[Untimed] = []
    (timings,) = measure_kernels(SMALL, report=untimed.append)
    assert torch.get_num_threads() == threads
    names = [(timing.contestant, timing.level) for timing in timings]
    module = extension()
    assert module is not None
    for level in module.isa_levels():
        of_level = {name for name, other in names if other == level}
        assert {"pass", "pass again", "mean", "median", "trimmed_mean f=1"} <= of_level
        assert {"median bfloat16", "trimmed_mean weighted", DISTANCES, MIXED} <= of_level
    assert {"torch.median", "torch.median again", "numpy.median"} <= {name for name, _ in names}
    called = {name for name, level in names if name.startswith("called") and level}
    assert called == {CALLED, EQUAL, KEPT, MASKED, NEW}
    assert len(names) == len(set(names))
    assert all(timing.seconds > 0 for timing in timings)
    for level in module.isa_levels():
        own = [
            t for t in timings if t.level == level and not t.contestant.startswith(("one", "two"))
        ]
        best = min(t.seconds for t in own if t.contestant.startswith("pass"))
        for timing in own:
            assert timing.passes == pytest.approx(timing.seconds / best)


def made_up(passes: Mapping[str, float] | None = None, level: str = "avx512") -> list[Timing]:
    """Return timings at 16 rows with these passes, all others on AVX-512's goals."""
    named = {
        "pass": 1.0,
        "pass again": 1.0,
        "median": 1.15,
        "trimmed_mean f=4": 1.15,
        "mean_around_median f=4": 1.4,
        "phocas f=4": 1.4,
        "median bfloat16": 0.69,
        "median float16": 0.69,
        "trimmed_mean weighted": 3.0,
        "trimmed_mean diagnosed 1/16": 1.26,
        DISTANCES: 2.5,
        MIXED: 2.5,
        CALLED: 1.2,
        EQUAL: 1.25,
        KEPT: 1.2,
        MASKED: 1.25,
    } | dict(passes or {})
    return [Timing(name, level, 16, 1000, ratio, ratio, 1) for name, ratio in named.items()]


def test_timings_on_their_goals_meet_them() -> None:
    goals = judge_kernels(made_up())
    assert len(goals) == 12
    assert {goal.verdict for goal in goals} == {"met"}


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("median", 1.2),
        ("trimmed_mean weighted", 1.01),
        ("phocas f=4", 1.1),
        (EQUAL, 1.02),
        (MASKED, 1.02),
        (DISTANCES, 1.01),
        (MIXED, 1.01),
    ],
)
def test_a_goal_that_is_missed_is_said(name: str, factor: float) -> None:
    timings = made_up()
    slower = [
        replace(t, seconds=t.seconds * factor, passes=t.passes * factor)
        if t.contestant == name
        else t
        for t in timings
    ]
    assert "missed" in {goal.verdict for goal in judge_kernels(slower)}


@pytest.mark.parametrize("passes", [1.4, 1.6])
@pytest.mark.parametrize("numel", [1000, 10_000_000])
@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_a_new_result_is_judged_where_huge_pages_are_on_offer(
    monkeypatch: pytest.MonkeyPatch, passes: float, numel: int, has_huge_pages: bool
) -> None:
    monkeypatch.setattr(gate, "are_on_offer", lambda: has_huge_pages)
    given = [replace(t, rows=4, numel=numel) for t in made_up({NEW: passes})]
    found = [goal.verdict for goal in judge_kernels(given) if "new result" in goal.what]
    is_judged = has_huge_pages and numel > 1000
    assert found == (["met" if passes < 1.5 else "missed"] if is_judged else [])


def test_mixes_by_avx2_are_timed_and_not_judged() -> None:
    goals = {goal.what: goal.verdict for goal in judge_kernels(made_up({MIXED: 9.0}, "avx2"))}
    assert goals["distances / pass, 16 rows, avx2"] == "met"
    assert not any("mixed" in what for what in goals)


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_each_row_of_the_timed_mix_leaves_out_f_others(rows: int) -> None:
    mix = random_mix(rows)
    assert ((mix.matrix == 0).sum(axis=1) == mix.rule.f).all()
    assert (mix.matrix.diagonal() > 0).all()


@pytest.mark.parametrize("name", ["distances_cpu", "mix_cpu"])
def test_rows_measured_or_mixed_wrongly_are_not_timed(name: str) -> None:
    class Idle:
        """The extension, but for one kernel that does nothing."""

        def __getattr__(self, asked: str) -> object:
            return (lambda *_: None) if asked == name else getattr(extension(), asked)

    with pytest.raises(AggregationError, match="differ"):
        check_contestants(Idle(), 4, ("baseline",))


def test_a_pass_that_differs_from_itself_judges_nothing() -> None:
    assert {g.verdict for g in judge_kernels(made_up({"pass again": 1.2}))} == {"too noisy"}


def test_baseline_is_timed_and_not_judged() -> None:
    assert judge_kernels(made_up({"median": 9.0}, "baseline")) == []


@pytest.mark.parametrize("level", ["avx2", "avx512"])
@pytest.mark.parametrize(("passes", "verdict"), [(2.5, "met"), (2.51, "missed")])
def test_128_rows_are_judged_at_both_levels(level: str, passes: float, verdict: str) -> None:
    timings = [replace(t, rows=128) for t in made_up({"median": passes}, level)]
    goals = {goal.what: goal for goal in judge_kernels(timings)}
    goal = goals[f"median / pass, 128 rows, {level}"]
    assert (goal.limit, goal.verdict) == (2.5, verdict)


@pytest.mark.parametrize(
    ("again", "found", "verdict"),
    [(60.0, 1.0, "met"), (60.0, 1.3, "missed"), (70.0, 1.0, "too noisy"), (50.0, 9.0, "too noisy")],
)
def test_torch_is_no_measure_where_it_differs_from_itself(
    again: float, found: float, verdict: str
) -> None:
    named = {"torch.median": 60.0, "torch.median again": again}
    timings = made_up({"median": found})
    timings += [Timing(name, "", 16, 1000, ratio, ratio, 1) for name, ratio in named.items()]
    (goal,) = (g for g in judge_kernels(timings) if g.what.startswith("torch.median"))
    assert goal.verdict == verdict


def of_two_threads(two_passes: float, two_medians: float, **again: float) -> Goal:
    named = {"one thread: pass": 1.0, "one thread: median": 1.0}
    named |= {"two threads: pass": two_passes, "two threads: median": two_medians}
    named["one thread: pass again"] = again.get("one", 1.0)
    named["two threads: pass again"] = again.get("two", two_passes)
    (goal,) = (g for g in judge_kernels(made_up(named)) if g.what.startswith("two threads"))
    return goal


@pytest.mark.parametrize(
    ("two_passes", "two_medians", "verdict"),
    [(0.5, 0.57, "met"), (0.5, 0.6, "missed"), (0.8, 0.85, "met"), (0.8, 0.95, "missed")],
)
def test_two_threads_are_judged_by_the_scaling_of_the_pass(
    two_passes: float, two_medians: float, verdict: str
) -> None:
    assert of_two_threads(two_passes, two_medians).verdict == verdict


def test_of_two_passes_the_faster_says_how_two_threads_scale() -> None:
    assert of_two_threads(0.8, 0.85, one=0.95, two=0.82).limit == pytest.approx(0.9 * 0.95 / 0.8)


@pytest.mark.parametrize("again", [{"one": 1.2}, {"two": 0.6}], ids=str)
def test_two_threads_are_not_judged_where_a_pass_differs_from_itself(
    again: dict[str, float],
) -> None:
    assert of_two_threads(0.5, 0.57, **again).verdict == "too noisy"


def test_a_goal_is_met_within_its_margin() -> None:
    assert Goal("", 1.0, 1.01, margin=0.01 + 1e-9).verdict == "met"
    assert Goal("", 1.0, 1.02, margin=0.01).verdict == "missed"
    assert Goal("", 50.0, 49.5, is_floor=True, margin=0.5).verdict == "met"
    assert Goal("", 50.0, 49.4, is_floor=True, margin=0.5).verdict == "missed"


def test_gate_is_for_goals_missed_by_more_than_15_percent() -> None:
    assert not Goal("", 1.0, 1.14).is_far
    assert Goal("", 1.0, 1.16).is_far
    assert Goal("", 50.0, 40.0, is_floor=True).is_far
    assert not Goal("", 50.0, 45.0, is_floor=True).is_far
    assert not Goal("", 1.0, 9.0, is_judged=False).is_far


def test_command_writes_json_and_plot(tmp_path: Path) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--rows", "3,4", "--numel", "20000", "--repeats", "1"]
    files = ["--json", str(found), "--plot", str(picture)]
    result = CliRunner().invoke(build_app(), ["bench", "kernels", *options, *files])
    assert result.exit_code == 0, result.output
    record = json.loads(found.read_text())
    assert {timing["rows"] for timing in record["timings"]} == {3, 4}
    assert {goal["verdict"] for goal in record["goals"]} <= {"met", "missed", "too noisy"}
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_command_measures_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KernelBench] = []

    def record(bench: KernelBench, device: str, **options: object) -> int:
        asked.append(bench)
        return 0

    monkeypatch.setattr(commands, "bench_kernels", record)
    what = ["--rows", "3,5", "--numel", "2048", "--threads", "2", "--levels", "baseline"]
    often = ["--repeats", "4", "--seconds", "7"]
    result = CliRunner().invoke(build_app(), ["bench", "kernels", *what, *often])
    assert result.exit_code == 0, result.output
    assert asked == [KernelBench((3, 5), 2048, 2, 4, 7.0, ("baseline",))]
    endless = CliRunner().invoke(build_app(), ["bench", "kernels", "--seconds", "inf"])
    assert endless.exit_code == 2


def test_all_contestants_have_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Rounds] = []

    def record(
        calls: Mapping[str, Callable[[], object]], *, clock: Clock, rounds: Rounds
    ) -> dict[str, float]:
        found.append(rounds)
        return interleaved_minimum(calls, clock=clock, rounds=Rounds(1))

    monkeypatch.setattr(kernels, "interleaved_minimum", record)
    bench = KernelBench(rows=(3,), numel=2048, repeats=6, least_s=0.5, levels=("baseline",))
    list(measure_kernels(bench, report=lambda _: None))
    assert found
    assert set(found) == {Rounds(6, 0.5)}


def test_device_bench_times_rules_against_a_copy() -> None:
    small = KernelBench(rows=(4,), numel=20_000, repeats=1)
    (timings,) = measure_cuda(small, torch.device("cpu"))  # timed by the CPU
    names = [timing.contestant for timing in timings]
    assert {COPY, "mean", "median", "trimmed_mean f=1", "median bfloat16"} <= set(names)
    assert {COPY_AGAIN, DISTANCES, MIXED, "torch.median", "torch.median again"} <= set(names)
    copy = timings[names.index(COPY)]
    assert copy.passes == pytest.approx(1.0)
    for timing in timings:
        assert timing.passes == pytest.approx(copy.gb_per_s / timing.gb_per_s)


class FakeStream:
    """A host that queues and a device that follows, each with its own time in seconds."""

    def __init__(self) -> None:
        self.host = self.ends = 0.0
        self.slept = 0

    def sleep(self, cycles: int) -> None:
        self.work(1e-9 * cycles)
        self.slept += 1

    def work(self, seconds: float) -> None:
        self.ends = max(self.ends, self.host) + seconds

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.at = 0.0

    def record(self) -> None:
        self.stream.work(0.0)
        self.at = self.stream.ends

    def query(self) -> bool:
        return self.stream.host >= self.at

    def synchronize(self) -> None:
        self.stream.host = max(self.stream.host, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize(("queueing_s", "sleeps"), [(1e-5, 1), (0.01, 2), (0.1, 3)])
def test_a_device_is_timed_without_the_host_that_queues(queueing_s: float, sleeps: int) -> None:
    stream = FakeStream()

    def run() -> None:
        for _ in range(2):  # two kernels
            stream.host += queueing_s
            stream.work(2e-5)

    seconds = device_seconds(run, event=stream.event, sleep=stream.sleep)
    assert seconds == pytest.approx(4e-5)
    assert stream.slept == sleeps


def test_a_call_that_waits_for_the_device_is_not_timed() -> None:
    stream = FakeStream()

    def run() -> None:
        stream.work(2e-5)
        stream.host = stream.ends

    with pytest.raises(AggregationError, match="wait for the device cannot be timed"):
        device_seconds(run, event=stream.event, sleep=stream.sleep)


def on_device(**seconds: float) -> dict[str, str]:
    """Return the verdicts of a device's timings at 16 rows, some of them as given."""
    named = {COPY: 1.0, COPY_AGAIN: 1.0, "median": 1.1, "trimmed_mean f=4": 1.2}
    named |= {"torch.median": 60.0, "torch.median again": 60.0} | seconds
    timings = [Timing(name, "", 16, 1000, ratio, ratio, 1) for name, ratio in named.items()]
    return {goal.what: goal.verdict for goal in judge_cuda(timings)}


def test_device_goals_are_shares_of_the_copy() -> None:
    assert on_device() == {
        "median by a copy's bandwidth, 16 rows": "met",
        "trimmed_mean f=4 by a copy's bandwidth, 16 rows": "missed",
        "torch.median / median, 16 rows": "met",
    }


def test_device_goals_are_not_judged_where_a_reference_differs_from_itself() -> None:
    assert on_device(**{COPY_AGAIN: 1.1}) == {
        "median by a copy's bandwidth, 16 rows": "too noisy",
        "trimmed_mean f=4 by a copy's bandwidth, 16 rows": "too noisy",
        "torch.median / median, 16 rows": "met",
    }
    assert (
        on_device(**{"torch.median again": 50.0})["torch.median / median, 16 rows"] == "too noisy"
    )


@pytest.mark.parametrize(
    ("again", "far", "status"), [(1.0, False, 0), (1.2, False, 2), (1.2, True, 1)]
)
def test_device_gate_ends_with_2_where_a_reference_is_noisy(
    again: float, far: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {COPY: 1.0, COPY_AGAIN: again, "median": 1.0, "trimmed_mean f=4": 1.0}
    named |= {"torch.median": 10.0 if far else 60.0, "torch.median again": 10.0 if far else 60.0}
    timings = [Timing(name, "", 16, 1000, ratio, ratio, 1) for name, ratio in named.items()]
    device = {"name": "scripted", "cuda": "13.0"}
    monkeypatch.setattr(commands, "require_cuda", lambda what: torch.device("cpu"))
    monkeypatch.setattr(commands, "describe_device", lambda found: device)
    monkeypatch.setattr(commands, "measure_cuda", lambda bench, device: iter([timings]))
    path = tmp_path / "kernels.json"
    found = commands.bench_kernels(
        SMALL, "cuda", files=(str(path), None), gate=True, show=lambda rows: None
    )
    assert found == status
    assert json.loads(path.read_text())["device"] == device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_bench_says_that_there_is_no_cuda_device() -> None:
    result = CliRunner().invoke(build_app(), ["bench", "kernels", "--device", "cuda"])
    assert result.exit_code != 0
    assert "needs a CUDA device" in f"{result.output} {result.exception}"


@pytest.mark.parametrize("rows", [0, 1025])
def test_row_counts_that_no_call_takes_are_refused(rows: int) -> None:
    with pytest.raises(ArgumentError, match=f"{rows} rows; row counts are from 1 to 1024"):
        list(measure_kernels(replace(SMALL, rows=(4, rows)), report=lambda _: None))
