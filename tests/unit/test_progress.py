"""How far ranks have come: as it travels, and as each keeps its own."""

from __future__ import annotations

import pytest

from loft_hvd.failures.call_sites import CallSite
from loft_hvd.failures.progress import Progress, ProgressMeter, blocked_by, key_of

NAMES = ["a|b", "a#1;x=2", "two words", "a\nb", "gewächs", "\ud800", "*of some", "%7C"]


@pytest.mark.parametrize("name", [*NAMES, "x" * 5000], ids=lambda name: ascii(name[:20]))
def test_operations_of_any_name_travel(name: str) -> None:
    meter = ProgressMeter()
    for _ in range(3):
        meter.ended(meter.posted(name))
    posted = meter.posted(name)
    back = Progress.decode(2.0, meter.progress().encode(1000))
    assert back.in_flight == (posted,)
    assert posted[1] == 4
    others = {1: back, 2: Progress(counts={}), 3: Progress(1.0, (("z", 1),), {key_of("z"): 1})}
    assert blocked_by(back.in_flight[0], others) == ([] if name.startswith("*") else [2, 3])


@pytest.mark.parametrize(
    "progress",
    [
        Progress(2.0),
        Progress(2.0, (("a", 1), ("b", 2)), {key_of("a"): 1, key_of("b"): 2}),
        Progress(2.0, (), {key_of("x"): 1}),
    ],
)
def test_progress_travels_as_text(progress: Progress) -> None:
    back = Progress.decode(2.0, progress.encode(1000))
    assert back.in_flight == progress.in_flight
    assert back.counts == (progress.counts or {})


@pytest.mark.parametrize("text", ["", "x", "a#b;;", "a#1;k=v", "a#1;=;", "a#1;*;a|b|c|d"])
def test_progress_that_does_not_parse_tells_nothing(text: str) -> None:
    assert Progress.decode(2.0, text).site == CallSite()
    if not text.startswith("a#1;*"):
        assert Progress.decode(2.0, text) == Progress(2.0)


def test_names_that_never_come_again_take_no_more_memory_and_blame_nobody() -> None:
    meters = [ProgressMeter(), ProgressMeter()]
    meters[1].ended(meters[1].posted("seldom"))
    meters[1].ended(meters[1].posted("often"))
    for number in range(10_000):
        for meter in meters:
            meter.ended(meter.posted(f"loss of step {number}"))
        if number % 1000 == 0:
            meters[1].ended(meters[1].posted("often"))
    for name in ("seldom", "often"):  # rank 1 no longer knows how often it did the first
        meters[0].posted(name)
    ones = meters[1].progress()
    assert len(ones.counts or {}) == 8192
    assert not ones.knows_all
    assert ones.has_started(("seldom", 1))
    assert ones.has_started(("often", 11))
    assert not ones.has_started(("often", 12))
    assert [number for _, number in meters[0].progress().in_flight] == [0, 0]
    assert Progress.decode(0.0, ones.encode(100_000)).knows_all is False
