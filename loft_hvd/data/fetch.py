"""What travels between the loader and its processes: requests out, timed batches back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

__all__ = ["FetchingDataset", "Request", "TimedCollate", "WorkerInit"]

Clock = Callable[[], float]


@dataclass(frozen=True)
class Request:
    """One batch to fetch.

    Attributes:
        step: step of the batch, to match it with its draw when it arrives.
        indices: samples of this rank.
    """

    step: int
    indices: list[int]


@dataclass(frozen=True)
class Fetched:
    """Samples on their way from the data set to the collate function."""

    step: int
    started_s: float
    samples: Any
    cached: int  # samples that the data set's own cache had


class FetchingDataset(Dataset[Any]):
    """The user's data set, asked for whole batches and on the clock."""

    def __init__(self, dataset: Dataset[Any], clock: Clock = time.monotonic) -> None:
        self.dataset = dataset
        self.clock = clock

    def __getitems__(self, request: Request) -> Fetched:
        """Fetch a batch the way torch's own loader would."""
        started_s = self.clock()
        hits = getattr(self.dataset, "cache_hits", 0)
        get_items = getattr(self.dataset, "__getitems__", None)
        samples = (
            get_items(request.indices)
            if get_items
            else [self.dataset[index] for index in request.indices]
        )
        cached = getattr(self.dataset, "cache_hits", 0) - hits
        return Fetched(request.step, started_s, samples, cached)


class TimedCollate:
    """The user's collate function; adds step, seconds since the fetch began, and cache hits."""

    def __init__(self, collate: Callable[[Any], Any], clock: Clock = time.monotonic) -> None:
        self.collate = collate
        self.clock = clock

    def __call__(self, fetched: Fetched) -> tuple[Any, int, float, int]:
        batch = self.collate(fetched.samples)
        # A plain tuple, so that torch pins the batch inside it as it would pin the batch alone.
        return batch, fetched.step, self.clock() - fetched.started_s, fetched.cached


class WorkerInit:
    """Shows a loader process the user's own data set, then runs the user's function there."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self.user_init = user_init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, FetchingDataset):
            # torch freezes this record; users read and change ``get_worker_info().dataset``.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.user_init is not None:
            self.user_init(worker_id)
