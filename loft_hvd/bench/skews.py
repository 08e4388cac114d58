"""What workers draw: digits dealt out evenly, or so that workers see different classes.

    shuffled      every worker draws from all samples
    capped        homes sorted by class; a worker takes at most 1.5 times its share of a class in a
                  step: what `Placement.with_strata(labels, cap=1.5)` makes of sorted homes
    dirichlet     each class is dealt out by shares from Dirichlet(0.1)
    sorted        samples sorted by class, cut into equal shards

Whatever the skew, all workers draw equally many samples a step, and those of a step's workers come
from ranges of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.data.assign import assign
from loft_hvd.data.draws import epoch_order
from loft_hvd.data.placement import Placement
from loft_hvd.errors import ArgumentError

__all__ = ["SKEWS", "draw_batches"]

SKEWS = ("shuffled", "capped", "dirichlet", "sorted")
_CAP = 1.5
_ALPHA = 0.1  # of the Dirichlet distribution
_FEWEST = 8  # samples of a worker under "dirichlet": shares are drawn again until all have as many

Ints = npt.NDArray[np.int64]


def draw_batches(
    skew: str, labels: npt.NDArray[Any], *, num_workers: int, batch: int, steps: int, seed: int
) -> Ints:
    """Return the samples of every step and worker, [steps, num_workers, batch].

    Args:
        skew: one of ``SKEWS``.
        labels: the class of each sample, [num_samples].
        num_workers: workers that hold the data among them.
        batch: samples of a worker in a step.
        steps: training steps.
        seed: of who holds what, and of the order.
    """
    if skew not in SKEWS:
        raise ArgumentError(f"skew {skew!r} is unknown; the skews are {', '.join(SKEWS)}")
    if skew in ("shuffled", "capped"):
        return _assigned(labels, num_workers, batch, steps, seed, is_capped=skew == "capped")
    generator = np.random.default_rng(seed)
    by_class = np.argsort(labels, kind="stable")
    shards = (
        np.array_split(by_class, num_workers)
        if skew == "sorted"
        else _dealt(labels, num_workers, generator)
    )
    drawn = np.empty((steps, num_workers, batch), np.int64)
    for worker, shard in enumerate(shards):
        # One permutation of its shard after the other.
        epochs = -(-steps * batch // len(shard))
        order = np.concatenate([generator.permutation(shard) for _ in range(epochs)])
        drawn[:, worker] = order[: steps * batch].reshape(steps, batch)
    return drawn


def _assigned(
    labels: npt.NDArray[Any],
    num_workers: int,
    batch: int,
    steps: int,
    seed: int,
    *,
    is_capped: bool,
) -> Ints:
    """Draw global batches as the sampler does, and assign each by a placement."""
    by_class = np.argsort(labels, kind="stable")
    placement = Placement.replicated(len(labels))
    if is_capped:
        sharded = Placement.sharded(len(labels), num_workers)
        placement = sharded.with_strata(labels[by_class], cap=_CAP)
    homes = placement.at(num_workers)
    sizes = np.full(num_workers, batch, np.int64)
    total = num_workers * batch
    drawn = np.empty((steps, num_workers, batch), np.int64)
    order, position, epoch = np.empty(0, np.int64), 0, 0
    for step in range(steps):
        if position + total > len(order):
            order, position = epoch_order(len(labels), seed=seed, epoch=epoch), 0
            epoch += 1
        samples = order[position : position + total]
        position += total
        owners = assign(samples, sizes, homes).owners
        drawn[step] = by_class[samples[np.argsort(owners, kind="stable")]].reshape(-1, batch)
    return drawn


def _dealt(
    labels: npt.NDArray[Any], num_workers: int, generator: np.random.Generator
) -> list[Ints]:
    """Deal every class out by shares of its own; no worker goes without samples."""
    if len(labels) < 4 * _FEWEST * num_workers:
        raise ArgumentError(
            f"dirichlet: {len(labels)} samples for {num_workers} workers; give at least "
            f"{4 * _FEWEST} a worker"
        )
    while True:
        shards: list[list[Ints]] = [[] for _ in range(num_workers)]
        for label in np.unique(labels):
            samples = generator.permutation(np.flatnonzero(labels == label))
            shares = generator.dirichlet(np.full(num_workers, _ALPHA))
            ends = (np.cumsum(shares)[:-1] * len(samples)).astype(np.int64)
            for shard, part in zip(shards, np.split(samples, ends), strict=True):
                shard.append(part)
        dealt = [np.concatenate(shard) for shard in shards]
        if min(map(len, dealt)) >= _FEWEST:
            return dealt
