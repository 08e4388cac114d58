"""Each sentence of the first report is true: worked out again, of random times."""

from __future__ import annotations

import random
import re
import statistics
from dataclasses import asdict

import pytest

from loft_hvd.balance.explain import describe
from loft_hvd.balance.interval import RankTimes
from loft_hvd.report.entries import read_lines
from loft_hvd.report.verdict import judge

STEP_SHARE, RATIO = 0.03, 1.10  # as docs/balance.md has them


def drawn(seed: int, num_ranks: int) -> list[RankTimes]:
    """Return times of a few kinds: even, one or several ranks slow or fast, by fetch or compute."""
    draw = random.Random(1000 * num_ranks + seed)
    kinds = draw.choices(["even", "fetch", "compute", "fast"], [4, 1, 1, 1], k=num_ranks)
    stalls = [draw.uniform(0.1, 0.5) if each == "fetch" else 0.007 for each in kinds]
    factor = {"compute": draw.uniform(1.2, 30.0), "fast": 0.3}
    computes = [0.1 * factor.get(each, draw.uniform(0.99, 1.01)) for each in kinds]
    busy = [stall + compute for stall, compute in zip(stalls, computes, strict=True)]
    step_s = max(busy) + 0.02
    return [
        RankTimes(
            rank,
            steps=20,
            samples=8,
            local=8,
            remote=0,
            fetch_s=stalls[rank],
            stall_s=stalls[rank],
            compute_s=computes[rank],
            queued_s=0.0,
            wait_s=step_s - busy[rank],
            other_s=0.0,
            wall_s=step_s,
            busy_s2=busy[rank] ** 2,
        )
        for rank in range(num_ranks)
    ]


class Truth:
    """What holds of some times, by the definitions in docs/balance.md and docs/report.md."""

    def __init__(self, times: list[RankTimes]) -> None:
        self.busy = [each.busy_s for each in times]
        self.stalls = [each.stall_s for each in times]
        self.computes = [each.compute_s for each in times]
        self.step_s = times[0].wall_s
        self.waited = (max(self.busy) - statistics.fmean(self.busy)) / self.step_s
        self.slow = [rank for rank in range(len(times)) if self.above(rank) > 0]
        self.fast = [rank for rank in range(len(times)) if self.above(rank) < 0]

    @staticmethod
    def of_others(values: list[float], rank: int) -> float:
        return statistics.median(values[:rank] + values[rank + 1 :])

    def above(self, rank: int) -> float:
        mine, usual = self.busy[rank], self.of_others(self.busy, rank)
        difference = mine - usual
        least = max((RATIO - 1) * min(mine, usual), STEP_SHARE * self.step_s)
        return difference if abs(difference) > least else 0.0

    def ratio(self, rank: int) -> float:
        return self.busy[rank] / self.of_others(self.busy, rank)

    def cause(self, rank: int) -> str:
        stall = self.stalls[rank] - self.of_others(self.stalls, rank)
        compute = self.computes[rank] - self.of_others(self.computes, rank)
        return "fetch" if stall > compute else "compute"

    def saved(self, without: list[int]) -> float:
        """Return the share of a step that is saved without some ranks."""
        rest = [busy for rank, busy in enumerate(self.busy) if rank not in without]
        return (max(self.busy) - max(rest, default=0.0)) / self.step_s


SEEDS = range(40)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_explain_says(seed: int, num_ranks: int) -> None:
    times = drawn(seed, num_ranks)
    truth, text = Truth(times), describe(times)
    head = re.search(r"one ([\d.]+) ms of a step of ([\d.]+) ms on average, (\d+)%", text)
    assert head is not None
    assert float(head[1]) == pytest.approx(1e3 * truth.waited * truth.step_s, abs=0.06)
    assert float(head[2]) == pytest.approx(1e3 * truth.step_s, abs=0.06)
    assert float(head[3]) == pytest.approx(100 * truth.waited, abs=0.51)
    named = re.findall(
        r"rank (\d) is slow: (\w+) \(its own work takes ([\d.]+)x ([^)]*)\); "
        r"without it( and those above)? a step would be ([\d.]+)% shorter",
        text,
    )
    assert sorted(int(rank) for rank, *_ in named) == truth.slow
    above: list[int] = []
    for rank, cause, ratio, than, more, saved in named:
        above.append(int(rank))
        assert cause == truth.cause(int(rank))
        assert float(ratio) == pytest.approx(truth.ratio(int(rank)), abs=0.006)
        assert than == ("the other rank's" if num_ranks == 2 else "the median of the others'")
        assert bool(more) == (len(above) > 1)
        assert float(saved) == pytest.approx(100 * truth.saved(above), abs=0.06)
    assert ("no rank is slow" in text) == (not truth.slow)
    if not truth.slow and truth.waited >= STEP_SHARE:  # never that alone beside a wait
        told = re.search(r"no rank is slow: ranks? ([\d ]+?) (?:is|are) faster", text)
        assert told is not None
        assert [int(rank) for rank in told[1].split()] == truth.fast


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_verdict_says(seed: int, num_ranks: int) -> None:
    times = drawn(seed, num_ranks)
    truth = Truth(times)
    line = {"kind": "times", "step": 20, "ranks": [asdict(each) for each in times]}
    sentences = judge(read_lines([line]))
    costs = [each for each in sentences if " of a step by " in each]
    assert bool(costs) == bool(truth.slow)
    told: list[int] = []
    total = 0.0
    for each in costs:
        found = re.match(r"Ranks? ([\d ]+?) costs? (?:another )?(\d+)% of a step by", each)
        assert found is not None, each
        told += [int(rank) for rank in found[1].split()]
        total += float(found[2])
        assert total == pytest.approx(100 * truth.saved(told), abs=0.51 * len(told))
        least = min(truth.ratio(int(rank)) for rank in found[1].split())
        assert f"takes {least:.2f}x" in each
    assert set(told) <= set(truth.slow)
    none = [each for each in sentences if each.startswith("No rank is slow")]
    assert bool(none) == (not truth.slow)
    if none:
        share = re.search(r"longest ([\d.]+)% of a step", none[0])
        assert share is not None
        assert float(share[1]) == pytest.approx(100 * truth.waited, abs=0.06)
        assert ("faster than the others" in none[0]) == (truth.waited >= STEP_SHARE)
    starved = [each for each in sentences if "wait for their data" in each]
    if starved:
        share = re.search(r"their data (\d+)% of a step", starved[0])
        assert share is not None
        part = float(share[1]) / 100 - 0.006
        at_least = sum(stall >= part * truth.step_s for stall in truth.stalls)
        assert 2 * at_least > num_ranks
