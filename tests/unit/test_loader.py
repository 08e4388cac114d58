"""``DataLoader``: torch's batches, our sizes; what reaches the balancer, and when."""

from __future__ import annotations

import os
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from loft_hvd.data import loader as loader_module
from loft_hvd.data.loader import DataLoader, FetchingDataset, Request, TimedCollate, sure_fork
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import BatchSampler
from loft_hvd.errors import ArgumentTypeError, DataError
from tests.support.plans import FakePlans

NUMBERS = torch.arange(53)
Pair = namedtuple("Pair", ["x", "y"])


class Tagged(Dataset[dict[str, Any]]):
    """Samples as nested structures, with an attribute that a loader process may set."""

    tag = 0

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pair": Pair(torch.tensor(index), [index, str(index)]), "tag": self.tag}


class Broken(Tagged):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise KeyError(f"sample {index} is gone")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


def set_tag(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.tag = 7  # type: ignore[attr-defined]


def keep_lists(samples: list[Any]) -> list[Any]:
    return samples


def trained(loader: DataLoader) -> list[int]:
    """One epoch's samples of this rank, padding left out."""
    return [int(i) for (x,) in loader if not loader.is_padding for i in x]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("placement", [None, Placement.sharded(53, 4)])
def test_ranks_share_every_epoch_exactly_once(
    num_workers: int, placement: Placement | None
) -> None:
    seen = []
    for rank in range(4):
        plans = FakePlans([6, 4, 2, 0], rank=rank, later={2: [0, 4, 4, 4]})
        loader = DataLoader(
            TensorDataset(NUMBERS), plans, placement=placement, num_workers=num_workers
        )
        seen += trained(loader)
        assert len(loader) == len(plans.fetches) == 5
        assert plans.num_epochs_ended == 1
    assert sorted(seen) == NUMBERS.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (Tagged(), None),
        (Tagged(), keep_lists),
        (TensorDataset(NUMBERS, NUMBERS * 2), None),
        (Subset(TensorDataset(NUMBERS), list(range(5, 40))), None),
        (NUMBERS.tolist(), None),
    ],
    ids=["nested", "collate", "tensors", "subset", "list"],
)
def test_batches_are_those_of_torchs_own_loader(
    dataset: Any, collate_fn: Any, num_workers: int
) -> None:
    mine = DataLoader(
        dataset, FakePlans([8]), shuffle=False, collate_fn=collate_fn, num_workers=num_workers
    )
    torchs = TorchDataLoader(dataset, batch_size=8, collate_fn=collate_fn)
    batches, expected = list(mine), list(torchs)
    assert len(mine) == len(torchs)
    assert repr(batches) == repr(expected)


def test_loader_processes_show_the_users_own_data_set() -> None:
    loader = DataLoader(Tagged(), FakePlans([8]), num_workers=1, worker_init_fn=set_tag)
    assert {int(tag) for batch in loader for tag in batch["tag"]} == {7}


def test_spawned_loader_processes_work() -> None:
    loader = DataLoader(
        TensorDataset(NUMBERS), FakePlans([20]), num_workers=1, multiprocessing_context="spawn"
    )
    assert sorted(trained(loader)) == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        ({}, 1),
        ({"num_workers": 2}, 5),
        ({"num_workers": 2, "prefetch_factor": 3}, 7),
        # Sets that neither nest nor keep apart: assignments are begun a step ahead, not drawn.
        ({"placement": Placement.from_function(lambda i: [i % 3, (i + 1) % 3], 53)}, 1),
    ],
    ids=["alone", "processes", "prefetch", "dear"],
)
def test_a_loader_draws_as_deep_as_it_said_when_it_was_made(
    options: dict[str, Any], depth: int
) -> None:
    plans = FakePlans([2, 1, 1])
    loader = DataLoader(TensorDataset(NUMBERS), plans, **options)
    assert plans.depth == depth
    # Before a step is trained, the newest one trained on is the one before it.
    assert max(max(plans.asked) - (step - 1) for step, _ in enumerate(loader)) == depth


def test_a_loader_for_evaluation_puts_no_plan_off() -> None:
    plans = FakePlans([8])
    DataLoader(TensorDataset(NUMBERS), plans, train=False, num_workers=2)
    assert plans.depth == 0


def test_errors_of_the_data_set_pass_through() -> None:
    with pytest.raises(KeyError, match="is gone"):
        next(iter(DataLoader(Broken(), FakePlans([8]))))


def test_fetch_time_runs_from_the_request_to_the_collated_batch() -> None:
    now = iter([10.0, 12.5])

    def clock() -> float:
        return next(now)

    fetched = FetchingDataset(TensorDataset(NUMBERS), clock).__getitems__(Request(4, [1, 2]))
    timed = TimedCollate(torch.utils.data.default_collate, clock)(fetched)
    (batch, *rest) = timed
    assert (batch[0].tolist(), *rest) == ([1, 2], 4, 2.5, 0)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_loader_processes_that_fetch_side_by_side_share_the_time_of_a_fetch(
    num_workers: int,
) -> None:
    plans = FakePlans([6, 2])
    loader = DataLoader(TensorDataset(NUMBERS), plans, num_workers=num_workers)
    inner: Any = loader._loader
    inner.dataset.clock, inner.collate_fn.clock = (lambda: 2.0), (lambda: 18.0)
    assert len(list(loader)) == len(plans.fetches) > 0
    assert {fetch.fetch_s for fetch in plans.fetches} == {16.0 / max(num_workers, 1)}


def test_local_and_remote_counts_travel_with_each_batch() -> None:
    placement = Placement.sharded(53, 2)
    plans = FakePlans([6, 2], rank=1)
    loader = DataLoader(TensorDataset(NUMBERS), plans, placement=placement)
    held = [sum(int(i) >= 27 for i in x) for (x,) in loader]
    assert [fetch.local for fetch in plans.fetches] == held
    assert all(fetch.local + fetch.remote == 2 for fetch in plans.fetches[:-1])
    assert all(fetch.fetch_s > 0 for fetch in plans.fetches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_batch_has_the_sizes_of_its_own_step(num_workers: int) -> None:
    plans = FakePlans([6, 4], later={1: [1, 9], 3: [9, 1]})
    loader = DataLoader(TensorDataset(NUMBERS), plans, num_workers=num_workers)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for i, (x,) in enumerate(loader):
            assert loader.step_sizes == plans.pending.pop(0)
            assert loader.step_sizes.step == epoch * 6 + i
            assert len(x) == loader.local_batch_size == loader.step_sizes.sizes[0]


def test_a_batch_joins_the_fifo_when_it_is_yielded_and_not_before() -> None:
    plans = FakePlans([6, 4])
    loader = DataLoader(TensorDataset(NUMBERS), plans, num_workers=2, prefetch_factor=2)
    batches = iter(loader)
    assert plans.pending == []
    assert max(plans.asked) == 3  # 2 processes x 2 batches drawn ahead
    next(batches)
    assert [sizes.step for sizes in plans.pending] == [0]
    assert max(plans.asked) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_early_break_shifts_no_weights(num_workers: int, persistent: bool) -> None:
    plans = FakePlans([6, 4], later={1: [3, 7], 5: [8, 2]})
    loader = DataLoader(
        TensorDataset(NUMBERS),
        plans,
        num_workers=num_workers,
        persistent_workers=persistent and num_workers > 0,
    )
    for _ in loader:
        break  # yielded, never trained
    steps = []
    for (x,) in loader:
        assert len(plans.pending) == 1
        step_sizes = plans.pending.pop()
        steps.append(step_sizes.step)
        assert len(x) == step_sizes.sizes[0]
    assert steps == [0, 1, 2, 3, 4, 5]  # the first iteration's step 0 was never trained
    assert plans.num_epochs_ended == 1


def test_an_older_iterator_ends_when_a_newer_one_begins() -> None:
    loader = DataLoader(TensorDataset(NUMBERS), FakePlans([6, 4]))
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(DataError, match="a newer one began"):
        next(older)
    assert len(list(newer)) == 5


def test_a_rank_without_samples_gets_a_dummy_of_the_same_global_batch() -> None:
    plans = FakePlans([0, 8], rank=0, min_batch=3)
    loader = DataLoader(TensorDataset(NUMBERS), plans, shuffle=False)
    for i, (x,) in enumerate(loader):
        assert loader.is_padding
        assert loader.local_batch_size == 0
        assert len(x) == min(3, 53 - 8 * i)
        assert set(x.tolist()) <= set(range(8 * i, 8 * i + 8))
    assert all((fetch.local, fetch.remote) == (0, 0) for fetch in plans.fetches)


def test_a_dummy_takes_local_samples_first() -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(8)),
        FakePlans([8, 0], rank=1),
        shuffle=False,
        placement=Placement.sharded(8, 2),
    )
    assert [x.tolist() for (x,) in loader] == [[4, 5]]


@pytest.mark.filterwarnings("ignore:an epoch has no step:UserWarning")
@pytest.mark.parametrize("num_samples", [0, 1, 3, 8, 53])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_counts_every_sample_once_and_tells_the_balancer_nothing(
    num_samples: int, num_workers: int
) -> None:
    total = count = 0
    num_steps = set()
    for rank in range(4):
        plans = FakePlans([0, 0, 1, 7], rank=rank, min_ranks=3)
        loader = DataLoader(
            TensorDataset(NUMBERS[:num_samples]), plans, train=False, num_workers=num_workers
        )
        num_steps.add(len(loader))
        for (x,) in loader:
            total += 0 if loader.is_padding else int(x.sum())
            count += loader.local_batch_size
        assert (plans.pending, plans.asked, plans.num_epochs_ended) == ([], [], 0)
    assert (total, count) == (int(NUMBERS[:num_samples].sum()), num_samples)
    assert num_steps == {-(-num_samples // 8)}


def test_evaluation_leaves_pending_batches_alone() -> None:
    plans = FakePlans([6, 4])
    train = DataLoader(TensorDataset(NUMBERS), plans)
    test = DataLoader(TensorDataset(NUMBERS), plans, train=False)
    for _ in train:
        before = list(plans.pending)
        list(test)
        test.set_epoch(0)
        assert plans.pending == before != []
        plans.pending.clear()


def test_an_evaluation_keeps_to_the_plan_it_began_with() -> None:
    plans = [FakePlans([6, 4], rank=rank) for rank in range(2)]
    loaders = [DataLoader(TensorDataset(NUMBERS), each, train=False) for each in plans]
    for sizes in ([6, 4], [3, 7]):
        seen: list[int] = []
        for rank, loader in enumerate(loaders):
            batches = iter(loader)
            lengths = []
            for (x,) in batches:
                plans[rank].later = {1: [1, 9]}  # training goes on beside the evaluation
                lengths.append(len(x))
                seen += x.tolist()
            assert set(lengths[:-1]) == {sizes[rank]}
            plans[rank].later = {1: [3, 7]}
        assert sorted(seen) == NUMBERS.tolist()


def test_evaluation_keeps_the_order_of_the_data_set() -> None:
    loader = DataLoader(TensorDataset(NUMBERS), FakePlans([10]), train=False)
    assert trained(loader) == NUMBERS.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("relaxed", [False, True])
def test_resume_mid_epoch_with_another_world_ends_the_epoch_exactly_once(
    num_workers: int, relaxed: bool
) -> None:
    dataset = TensorDataset(NUMBERS)
    seen: list[int] = []
    states = []
    for rank in range(4):
        loader = DataLoader(
            dataset,
            FakePlans([5, 3, 2, 0], rank=rank),
            placement=Placement.sharded(53, 4),
            num_workers=num_workers,
            relaxed=relaxed,
        )
        loader.set_epoch(4)
        for i, (x,) in enumerate(loader):
            seen += [] if loader.is_padding else x.tolist()
            if i == 2:
                break
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(3):
        loader = DataLoader(
            dataset,
            FakePlans([4, 4, 4], rank=rank),
            placement=Placement.sharded(53, 3),
            relaxed=relaxed,
        )
        loader.load_state_dict(states[0])
        loader.set_epoch(4)
        seen += trained(loader)
        assert loader.step_sizes.step == 4
    assert sorted(seen) == NUMBERS.tolist()


def test_a_position_belongs_to_its_epoch() -> None:
    loader = DataLoader(TensorDataset(NUMBERS), FakePlans([10]))
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert len(trained(loader)) == 53


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_finished_epoch_has_nothing_left_to_resume(drop_last: bool) -> None:
    loader = DataLoader(TensorDataset(NUMBERS), FakePlans([10]), drop_last=drop_last)
    num_trained = 50 if drop_last else 53
    assert len(trained(loader)) == num_trained
    state = loader.state_dict()
    assert state["position"] == 53  # also where a smaller last batch was left out
    loader.load_state_dict(state)
    assert trained(loader) == []
    assert len(trained(loader)) == num_trained  # iterating again repeats the epoch


def test_the_state_survives_torch_save(tmp_path: Any) -> None:
    loader = DataLoader(TensorDataset(NUMBERS), FakePlans([10]), relaxed=True)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "loader.pt")
    assert torch.load(tmp_path / "loader.pt", weights_only=True) == loader.state_dict()


def test_iterable_data_sets_are_refused_with_the_way_out() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Stream: .*map-style"):
        DataLoader(Stream(), FakePlans([4]))


def test_a_balancer_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="give a loft_hvd"):
        DataLoader(TensorDataset(NUMBERS), None)  # type: ignore[arg-type]


def test_a_world_that_grows_between_epochs_is_followed() -> None:
    plans = FakePlans([6, 4])
    loader = DataLoader(TensorDataset(NUMBERS), plans)
    assert len(trained(loader)) == 32
    plans.sizes = [2, 2, 6]
    plans.rank = 2
    assert len(trained(loader)) == 32


def test_asking_for_sizes_before_the_first_batch_is_an_error() -> None:
    loader = DataLoader(TensorDataset(NUMBERS), FakePlans([4]))
    with pytest.raises(DataError, match="no batch has been yielded"):
        _ = loader.is_padding


def test_strata_limit_what_a_rank_takes_of_a_class() -> None:
    labels = np.arange(400) // 100
    for rank in range(4):
        plain = Placement.sharded(400, 4)
        counts = {}
        for name, placement in (("plain", plain), ("capped", plain.with_strata(labels, cap=1.25))):
            loader = DataLoader(
                TensorDataset(torch.as_tensor(labels)),
                FakePlans([10] * 4, rank=rank),
                placement=placement,
            )
            counts[name] = max(int(torch.bincount(y).max()) for (y,) in loader)
        assert counts["plain"] >= 8
        assert counts["capped"] <= 6  # at most ceil(1.25 * 1/4 * c), and c stays under 20


class Cached(Dataset[torch.Tensor]):
    """Finds every third of its samples in a cache."""

    cache_hits = 0

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cache_hits += index % 3 == 0
        return NUMBERS[index]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cache_hits_travel_with_each_batch_and_count_as_local(num_workers: int) -> None:
    placement = Placement.from_function(lambda _: [1], 53)  # all samples are elsewhere
    plans = FakePlans([8, 8])
    loader = DataLoader(Cached(), plans, placement=placement, num_workers=num_workers)
    hits = [sum(int(i) % 3 == 0 for i in x) for x in loader]
    assert [fetch.local for fetch in plans.fetches] == hits
    assert sum(hits) > 0


def test_evaluation_leaves_the_step_in_progress_out() -> None:
    plans = FakePlans([20])
    list(DataLoader(TensorDataset(NUMBERS), plans, train=False))
    assert plans.num_left_out == 1
    list(DataLoader(TensorDataset(NUMBERS), plans))
    assert plans.num_left_out == 1


# Loader processes start, or are started again.


class StuckForks:
    """``os.fork`` whose first children never get anywhere."""

    def __init__(self, num_stuck: int) -> None:
        self.num_stuck = num_stuck
        self.pids: list[int] = []
        self._fork: Callable[[], int] = os.fork

    def __call__(self) -> int:
        pid = self._fork()
        if pid == 0 and len(self.pids) < self.num_stuck:
            while True:
                signal.pause()
        self.pids.append(pid)
        return pid


def read_by(context: Any) -> list[int]:
    data = TensorDataset(torch.arange(12))
    loader = TorchDataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
    return [int(value) for (batch,) in loader for value in batch]


@pytest.mark.parametrize("num_stuck", [0, 1, 2])
def test_a_loader_process_that_does_not_start_is_started_again(
    num_stuck: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = StuckForks(num_stuck)
    monkeypatch.setattr(os, "fork", stuck)
    monkeypatch.setattr(loader_module, "START_LIMIT_S", 1.0)
    assert read_by(sure_fork(None, num_workers=1)) == list(range(12))
    assert len(stuck.pids) == num_stuck + 1
    assert caplog.text.count("did not start") == num_stuck
    for pid in stuck.pids[:num_stuck]:
        with pytest.raises(ProcessLookupError):  # ended and waited for
            os.kill(pid, 0)


def test_too_many_that_do_not_start_are_an_error_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fork", StuckForks(99))
    monkeypatch.setattr(loader_module, "START_LIMIT_S", 0.05)
    process = sure_fork("fork", num_workers=1).Process(target=print)
    with pytest.raises(DataError, match="num_workers=0"):
        process.start()


@pytest.mark.parametrize(("wanted", "num_workers"), [("spawn", 2), ("forkserver", 1), ("fork", 0)])
def test_other_start_methods_are_left_alone(wanted: str, num_workers: int) -> None:
    assert sure_fork(wanted, num_workers=num_workers) is wanted


def test_what_scripts_read_of_torchs_own_loader() -> None:
    loader = DataLoader(
        TensorDataset(NUMBERS), FakePlans([5, 3, 0], rank=1), collate_fn=keep_lists, drop_last=True
    )
    assert (loader.batch_size, loader.drop_last, loader.collate_fn) == (3, True, keep_lists)
    assert len(loader.batch_sampler) == len(loader) == 6
    # As pytorch/examples' ImageNet script looks for samples that are left over.
    assert not len(loader.sampler) * 3 < len(NUMBERS) <= len(loader.sampler) * 3 + 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (WeightedRandomSampler([1.0, 0.0], 100), "the data set, weights=weights, num_samples=100"),
        (SequentialSampler(range(9)), "give the data set, and shuffle=False"),
        (TorchDataLoader(range(9)), "give the map-style data set itself"),  # type: ignore[arg-type]  # has a length
    ],
    ids=["weights", "order", "loader"],
)
def test_what_draws_samples_is_no_data_set(given: Any, says: str) -> None:
    for make in (DataLoader, BatchSampler):
        with pytest.raises(ArgumentTypeError, match=says):
            make(given, FakePlans([5, 3]))
