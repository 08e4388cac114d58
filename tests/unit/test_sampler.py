"""The sampler's pure core and ``BatchSampler`` in a user's own torch loader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

import loft_hvd as loft
from loft_hvd.data.draws import EpochSettings, epoch_order
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import BatchSampler, GlobalBatches
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError
from loft_hvd.transport.local import LocalWorld
from tests.support.plans import FakePlans


class Numbers(Dataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


def plain_loader(sampler: BatchSampler, num_workers: int = 0) -> Any:
    return TorchDataLoader(Numbers(53), batch_sampler=sampler, num_workers=num_workers)


def test_a_plan_set_later_applies_to_steps_not_yet_drawn() -> None:
    plans = FakePlans([4, 4])
    batches = GlobalBatches(EpochSettings(Placement.replicated(40), True, 0, False, False), plans)
    draws = batches.start(first_step=0)[1]
    next(draws)
    next(draws)
    assert plans.asked == [0, 1]
    plans.later = {2: [7, 1]}
    assert next(draws).step_sizes.sizes == (7, 1)


def test_a_tail_too_small_for_the_rule_is_skipped_with_one_warning_that_counts_it() -> None:
    plans = FakePlans([2, 2, 2], min_ranks=3)
    sampler = BatchSampler(14, plans)
    assert len(sampler) == 2
    with pytest.warns(UserWarning, match="has 2 samples, fewer than the 3 ranks") as warned:
        assert [len(batch) for _ in range(2) for batch in sampler] == [2, 2, 2, 2]
    assert len(warned) == 1


def test_only_rank_0_warns_of_a_skipped_tail() -> None:
    assert len(list(BatchSampler(14, FakePlans([2, 2, 2], rank=1, min_ranks=3)))) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sizes_reach_the_fifo_in_the_order_of_the_batches(num_workers: int) -> None:
    plans = FakePlans([6, 4, 2, 0], later={2: [1, 3, 4, 4]})
    sampler = BatchSampler(Numbers(53), plans, seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        num_batches = 0
        for i, batch in enumerate(plain_loader(sampler, num_workers)):
            step_sizes = plans.pending.pop(0)
            plans.next_step += 1
            assert step_sizes.step == epoch * 5 + i
            assert len(batch) == (step_sizes.sizes[0] or plans.min_batch)
            assert sampler.step_sizes_at(i) == step_sizes
            num_batches += 1
        assert num_batches == len(sampler) == 5
        assert plans.pending == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_epoch_set", [True, False])
def test_an_early_break_shifts_no_weights(num_workers: int, is_epoch_set: bool) -> None:
    plans = FakePlans([6, 6], later={1: [3, 9], 6: [8, 4]})
    sampler = BatchSampler(Numbers(53), plans)
    loader = plain_loader(sampler, num_workers)
    for _ in loader:
        break
    assert plans.pending  # drawn ahead, never trained
    if is_epoch_set:
        sampler.set_epoch(1)
        assert plans.pending == []
    for i, batch in enumerate(loader):
        step_sizes = plans.pending.pop(0)
        assert step_sizes.step == i  # nothing was trained before
        assert len(batch) == step_sizes.sizes[0]


def test_resume_goes_on_after_the_batches_trained_with_another_world() -> None:
    sampler = BatchSampler(Numbers(53), FakePlans([6, 6]), seed=5)
    sampler.set_epoch(2)
    lists = iter(sampler)
    for _ in range(4):
        next(lists)  # torch drew 4, the run trained 3
    state = sampler.state_dict(num_trained=3)
    rest: list[int] = []
    for rank in range(3):
        resumed = BatchSampler(Numbers(53), FakePlans([5, 4, 3], rank=rank), seed=5)
        resumed.load_state_dict(state)
        resumed.set_epoch(2)
        batches = list(resumed)
        assert resumed.step_sizes_at(0).step == 3
        rest += [index for batch in batches for index in batch]
    assert sorted(rest) == sorted(epoch_order(53, seed=5, epoch=2)[36:].tolist())


def test_the_state_before_the_first_batch_is_the_start() -> None:
    sampler = BatchSampler(20, FakePlans([2, 2]))
    assert sampler.state_dict(num_trained=0)["position"] == 0
    with pytest.raises(DataError, match="num_trained=1, but this iteration drew 0"):
        sampler.state_dict(num_trained=1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("num_samples", {}), ("seed", {"seed": 1}), ("shuffle", {"shuffle": False})],
)
def test_a_state_of_another_order_is_refused_by_name(kind: str, options: dict[str, Any]) -> None:
    state = BatchSampler(21 if kind == "num_samples" else 20, FakePlans([2, 2])).state_dict(
        num_trained=0
    )
    with pytest.raises(DataError, match=f"{kind} is"):
        BatchSampler(20, FakePlans([2, 2]), **options).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"position": 10**6}, "position=1000000 is beyond num_samples=20"),
        ({"position": 5.7}, "position needs int"),
        ({"position": -1}, "position needs int 0 to"),
        ({"epoch": -1}, "epoch needs int 0 to"),
        ({"step": 2**64}, "step needs int 0 to"),
        ({"done": "zz" * 3}, "done has 6 characters, but 20 samples take 6"),
        ({"done": "ff"}, "done has 2 characters"),
        ({"done": "ffffff"}, "position=4, but done has 20 samples"),
    ],
)
def test_a_state_that_would_lose_or_repeat_samples_is_refused(
    change: dict[str, Any], match: str
) -> None:
    sampler = BatchSampler(20, FakePlans([2, 2]))
    batches = iter(sampler)
    next(batches)
    state = sampler.state_dict(num_trained=1)
    with pytest.raises(ArgumentError, match=match):
        sampler.load_state_dict(state | change)
    assert sampler.state_dict(num_trained=1) == state


@pytest.mark.parametrize("options", [{"shuffle": 1}, {"shuffle": 1, "relaxed": 1}, {"shuffle": 0}])
def test_a_state_goes_on_where_a_script_says_0_and_1(options: dict[str, Any]) -> None:
    state = BatchSampler(20, FakePlans([2, 2]), **options).state_dict(num_trained=0)
    resumed = BatchSampler(20, FakePlans([2, 2]), **options)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_dict(num_trained=0) == state


@pytest.mark.parametrize("dataset", [Stream(), iter([1]), -1, True])
def test_data_without_a_fixed_length_is_refused(dataset: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="map-style"):
        BatchSampler(dataset, FakePlans([2, 2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"relaxed": True, "shuffle": False}, "drop one of them"),
        ({"placement": Placement.sharded(20, 3)}, "rank 2 holds samples"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        BatchSampler(20, FakePlans([2, 2]), **options)


def test_a_negative_epoch_is_an_error() -> None:
    with pytest.raises(DataError, match="epoch=-1"):
        BatchSampler(20, FakePlans([2, 2])).set_epoch(-1)


def test_a_loaded_state_is_what_is_saved_before_the_next_batch() -> None:
    sampler = BatchSampler(53, FakePlans([6, 6]))
    lists = iter(sampler)
    for _ in range(4):
        next(lists)
    state = sampler.state_dict(num_trained=3)
    resumed = BatchSampler(53, FakePlans([6, 6]))
    resumed.load_state_dict(state)
    assert resumed.state_dict(num_trained=0) == state


def test_a_state_between_two_epochs_has_the_step_of_the_next() -> None:
    plans = FakePlans([6, 6])
    sampler = BatchSampler(48, plans)
    assert len(list(sampler)) == 4
    plans.next_step = 4
    sampler.set_epoch(1)
    assert sampler.state_dict(num_trained=0)["step"] == 4


@pytest.mark.parametrize("how", ["DataLoader", "BatchSampler"])
def test_an_epoch_that_comes_again_in_its_order_is_told_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    transport = LocalWorld(1).transport(0)

    def epochs(*, calls_set_epoch: bool, shuffle: bool = True, whole: bool = True) -> list[str]:
        caplog.clear()
        balancer = loft.Balancer(4, transport=transport)
        batches: Any
        if how == "DataLoader":
            batches = loft.DataLoader(Numbers(12), balancer, shuffle=shuffle)
        else:
            batches = BatchSampler(12, balancer, shuffle=shuffle)
        for epoch in range(3):
            if calls_set_epoch:
                batches.set_epoch(epoch)
            for at, _ in enumerate(batches):
                if at == 1 and not whole:
                    break
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level("WARNING", "loft_hvd.data.sampler"):
        (told,) = epochs(calls_set_epoch=False)
        assert told.startswith("epoch 0 begins again, with the same samples in each step")
        assert not epochs(calls_set_epoch=True)
        assert not epochs(calls_set_epoch=False, shuffle=False)
        assert not epochs(calls_set_epoch=False, whole=False)


@pytest.mark.parametrize("indices", [[5, 9, 3], (0, 2), range(4, 9), [2, 0, 1]])
def test_indices_in_the_place_of_the_data_set_are_refused(indices: Any) -> None:
    """As torch's own sampler takes them: here samples 0 to len - 1 would be drawn."""
    with pytest.raises(ArgumentTypeError, match=r"places would be drawn.*Subset\(dataset"):
        BatchSampler(indices, FakePlans([4]))
    drawn = list(BatchSampler([0, 1, 2], FakePlans([4])))
    assert [sorted(batch) for batch in drawn] == [[0, 1, 2]]
    assert len(list(BatchSampler(["a", "b"], FakePlans([4])))) == 1
