"""The goals of the kernels, and whether timings meet them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loft_hvd.bench.kernels import ONE_THREAD, PASS, PASS_AGAIN, TWO_THREADS, Timing

__all__ = ["Goal", "goal_rows", "judge_kernels", "timing_rows"]

_SLACK = 1.15  # a goal missed by less than this is within what the machine adds
_NOISE_LIMIT = 0.08
# Most passes for median and trimmed mean in float32, by row count: [AVX-512, AVX2].
_PASSES = ((16, 1.15, 1.25), (32, 1.35, 2.0), (64, 1.9, 3.0), (128, 2.5, None))


@dataclass(frozen=True)
class Goal:
    """One goal and what was found.

    Attributes:
        what: the contestant, level and row count.
        limit: largest ratio wanted; for ``is_floor`` the smallest.
        found: the ratio.
        is_floor: more is better.
        is_judged: False where the pass itself was too noisy to say.
    """

    what: str
    limit: float
    found: float
    is_floor: bool = False
    is_judged: bool = True

    @property
    def verdict(self) -> str:
        """Return "met", "missed" or "too noisy"."""
        if not self.is_judged:
            return "too noisy"
        good = self.found >= self.limit if self.is_floor else self.found <= self.limit
        return "met" if good else "missed"

    @property
    def is_far(self) -> bool:
        """Whether the goal is missed by more than 15 %."""
        if self.verdict != "missed":
            return False
        if self.is_floor:
            return self.found * _SLACK < self.limit
        return self.found > self.limit * _SLACK


def judge_kernels(timings: Sequence[Timing]) -> list[Goal]:
    """Return every goal that these timings speak of.

    Args:
        timings: of one row count, all levels.
    """
    goals = []
    for level in dict.fromkeys(timing.level for timing in timings if timing.level):
        by_name = {t.contestant: t for t in timings if t.level == level}
        noise = abs(by_name[PASS_AGAIN].seconds / by_name[PASS].seconds - 1)
        for what, limit, found in _limits(by_name, level):
            rows = by_name[PASS].rows
            text = f"{what}, {rows} rows, {level}"
            goals.append(Goal(text, limit, found, is_judged=noise <= _NOISE_LIMIT))
    return goals + list(_by_two_threads(timings)) + list(_against_torch(timings))


def _limits(by_name: dict[str, Timing], level: str) -> Iterator[tuple[str, float, float]]:
    rows = by_name[PASS].rows
    column = {"avx512": 1, "avx2": 2}.get(level)
    limit = next((row[column] for row in _PASSES if rows <= row[0]), None) if column else None
    trimmed = _starting(by_name, "trimmed_mean f=")
    median = by_name["median"]
    if limit is not None:
        yield "median / pass", limit, median.passes
        yield "trimmed mean / pass", limit, trimmed.passes
    if level == "avx512" and rows in (4, 16):
        weighted = by_name["trimmed_mean weighted"].passes
        yield "weighted trimmed mean / pass", 1.3 if rows == 4 else 3.0, weighted
    if rows <= 32:
        for name in ("mean_around_median", "phocas"):
            ratio = _starting(by_name, name).seconds / trimmed.seconds
            yield f"{name} / trimmed mean", 1.25, ratio
    for name in ("median bfloat16", "median float16"):
        yield f"{name} / float32", 0.6, by_name[name].seconds / median.seconds
    diagnosed = by_name["trimmed_mean diagnosed 1/16"].seconds
    yield "sampled diagnostics", 1.10, diagnosed / trimmed.seconds


def _by_two_threads(timings: Sequence[Timing]) -> Iterator[Goal]:
    """Yield how many times faster two threads are; the pass says what the machine allows.

    Nothing is judged where one thread's pass took another time than it did before.
    """
    by_name = {
        t.contestant: t for t in timings if t.contestant.startswith((ONE_THREAD, TWO_THREADS))
    }
    if not by_name:
        return
    alone = by_name[f"{ONE_THREAD} {PASS}"]
    before = next(t for t in timings if t.contestant == PASS and t.level == alone.level)
    noise = abs(alone.seconds / before.seconds - 1)
    scaling = {
        name.removeprefix(f"{ONE_THREAD} "): one.seconds
        / by_name[name.replace(ONE_THREAD, TWO_THREADS)].seconds
        for name, one in by_name.items()
        if name.startswith(ONE_THREAD)
    }
    limit = min(1.7, 0.9 * scaling.pop(PASS))
    for name, found in scaling.items():
        text = f"two threads / one, {name}, {alone.rows} rows, {alone.level}"
        yield Goal(text, limit, found, is_floor=True, is_judged=noise <= _NOISE_LIMIT)


def _starting(by_name: dict[str, Timing], start: str) -> Timing:
    return next(timing for name, timing in by_name.items() if name.startswith(start))


def _against_torch(timings: Sequence[Timing]) -> Iterator[Goal]:
    """Yield how many times faster the best level is than torch.median."""
    torch_median = next((t for t in timings if t.contestant == "torch.median"), None)
    ours = [t for t in timings if t.contestant == "median"]
    if torch_median is None or not ours or not 3 <= torch_median.rows <= 64:
        return
    best = min(ours, key=lambda timing: timing.seconds)
    limit = 50.0 if best.rows <= 33 else 30.0
    speedup = torch_median.ns_a_coordinate / best.ns_a_coordinate
    yield Goal(f"torch.median / median, {best.rows} rows", limit, speedup, is_floor=True)


def timing_rows(timings: Sequence[Timing]) -> list[list[str]]:
    """Return rows to print, the first of them the header."""
    body = [
        [
            f"{t.contestant} {t.level}".strip(),
            str(t.rows),
            f"{t.ns_a_coordinate:.2f}",
            f"{t.gb_per_s:.1f}",
            f"{t.passes:.2f}",
        ]
        for t in timings
    ]
    return [["contestant", "rows", "ns/coordinate", "GB/s", "x pass"], *body]


def goal_rows(goals: Sequence[Goal]) -> list[list[str]]:
    """Return rows to print, the first of them the header."""
    sign = {True: ">=", False: "<="}
    body = [
        [g.what, f"{g.found:.2f}", f"{sign[g.is_floor]} {g.limit:.2f}", g.verdict] for g in goals
    ]
    return [["goal", "found", "limit", "verdict"], *body]
