"""What planning costs the thread that trains, in the worst cases known: milliseconds a step.

Seconds are the thread's own CPU time, so that other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from loft_hvd.data.draws import Draw, EpochSettings
from loft_hvd.data.flow import _native
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import GlobalBatches
from tests.support.plans import FakePlans

pytestmark = pytest.mark.long

MOST_S = 0.002  # of a step, on the thread that trains


def classes(holding: str) -> Placement:
    """1,000 classes on 64 ranks, sorted over their shards, mixed, or all on every rank."""
    num_samples = 200_000
    labels = np.arange(num_samples) * 1000 // num_samples
    if holding == "mixed":
        labels = np.random.default_rng(0).permutation(labels)
    replicated = Placement.replicated(num_samples)
    placement = replicated if holding == "all" else Placement.sharded(num_samples, 64)
    return placement.with_strata(labels)


def replicas() -> Placement:
    """Two random homes of 256 for each sample."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 256, 200_000)
    homes = np.stack([first, (first + rng.integers(1, 256, len(first))) % 256], axis=1)
    return Placement.from_function(lambda index: homes[index].tolist(), len(homes))


def nodes() -> Placement:
    """A shard for each of 128 nodes of 8 ranks."""
    return Placement.sharded(200_000, 1024, nodes=[rank // 8 for rank in range(1024)])


def unequal(world_size: int, each: int) -> list[int]:
    """Return sizes of 4:2:1 with ``each`` samples a rank on average."""
    share = np.resize([4, 2, 1], world_size)
    sizes = share * each * world_size // share.sum()
    sizes[0] += each * world_size - sizes.sum()
    return [int(size) for size in sizes]


def seconds_a_step(draws: Iterator[Draw], homes_of: GlobalBatches, num_steps: int) -> list[float]:
    """Return what this thread spent on each step."""
    spent = []
    for _ in range(num_steps):
        began = time.thread_time()
        draw = next(draws)
        draw.indices(0, min_batch=2, homes=homes_of.homes)
        spent.append(time.thread_time() - began)
    return spent[1:]  # the first one orders the epoch


@pytest.mark.skipif(_native() is None, reason="the extension is not built")
@pytest.mark.parametrize(
    ("placement", "sizes"),
    [
        (partial(classes, "sorted"), [64] * 64),
        (partial(classes, "sorted"), unequal(64, 64)),
        (partial(classes, "mixed"), [64] * 64),
        (partial(classes, "mixed"), unequal(64, 64)),
        (partial(classes, "all"), unequal(64, 64)),
        (replicas, [32] * 256),
        (replicas, unequal(256, 32)),
        (nodes, unequal(1024, 32)),
    ],
    ids=[
        "sorted",
        "sorted-4:2:1",
        "mixed",
        "mixed-4:2:1",
        "all-4:2:1",
        "pairs",
        "pairs-4:2:1",
        "nodes-4:2:1",
    ],
)
def test_drawing_costs_the_training_thread_two_milliseconds(
    placement: Callable[[], Placement], sizes: list[int]
) -> None:
    settings = EpochSettings(placement(), True, 0, True, False)
    batches = GlobalBatches(settings, FakePlans(sizes))
    draws = batches.start(first_step=0)[1]
    spent = seconds_a_step(draws, batches, min(12, len(batches)))
    assert np.median(spent) <= MOST_S, [f"{1e3 * each:.2f} ms" for each in spent]
