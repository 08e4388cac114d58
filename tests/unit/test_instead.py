"""What stands in the signatures of torch's loader and samplers, tried on ours."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import loft_hvd as loft
from loft_hvd.data.draws import check_weights
from loft_hvd.errors import ArgumentTypeError
from tests.support.plans import FakePlans

DATA = TensorDataset(torch.arange(40))
INDICES = [3, 1, 30, 7]
WEIGHTS = [1.0, 0.0] * 20
SAMPLERS: dict[str, tuple[Any, str]] = {
    "weighted": (WeightedRandomSampler(WEIGHTS, 9), r"weights=weights, num_samples=9$"),
    "unrepeated": (
        WeightedRandomSampler(WEIGHTS, 9, replacement=False),
        r"without replacement are not served; .*weights=weights, num_samples=9$",
    ),
    "random": (RandomSampler(DATA), r"give the data set, which is shuffled"),
    "repeated": (
        RandomSampler(DATA, replacement=True, num_samples=7),
        r"weights=torch.ones\(len\(dataset\)\), num_samples=7$",
    ),
    "sequential": (SequentialSampler(DATA), r"give the data set, and shuffle=False; train=False"),
    "subset": (SubsetRandomSampler(INDICES), r"Subset\(dataset, indices\) as the data set$"),
    "distributed": (DistributedSampler(DATA, 2, 0), r"which is shuffled; set_epoch\(epoch\)"),
    "in order": (DistributedSampler(DATA, 2, 0, shuffle=False), r"and shuffle=False; train=False"),
    "batches": (BatchSampler(SequentialSampler(DATA), 8, False), r"and shuffle=False; train=False"),
    "other": (type("Own", (torch.utils.data.Sampler,), {})(), r"weights=weights draws by weight"),
}


def collate(samples: list[Any]) -> Any:
    return [sample[0].item() for sample in samples]


def start(_: int) -> None: ...


# Values as scripts give them, of each name in torch's signatures.
VALUES: dict[str, Any] = {
    "dataset": DATA,
    "batch_size": 8,
    "shuffle": True,
    "sampler": RandomSampler(DATA),
    "batch_sampler": BatchSampler(SequentialSampler(DATA), 8, False),
    "num_workers": 0,
    "collate_fn": collate,
    "pin_memory": False,
    "drop_last": True,
    "timeout": 0,
    "worker_init_fn": start,
    "multiprocessing_context": None,
    "generator": torch.Generator(),
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
    "num_replicas": 2,
    "rank": 0,
    "seed": 3,
    "weights": WEIGHTS,
    "num_samples": 9,
    "replacement": True,
    "data_source": DATA,
    "indices": INDICES,
}
TORCHS = (
    DataLoader,
    BatchSampler,
    DistributedSampler,
    WeightedRandomSampler,
    RandomSampler,
    SubsetRandomSampler,
    SequentialSampler,
)
OURS: dict[Any, set[str]] = {  # and what each serves
    loft.DataLoader: {
        *("dataset", "shuffle", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout"),
        *("worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor"),
        *("persistent_workers", "seed", "weights", "num_samples"),
    },
    loft.BatchSampler: {"dataset", "shuffle", "seed", "drop_last", "weights", "num_samples"},
    loft.StreamLoader: {"collate_fn"},
}


def names_of(torchs: Any) -> list[str]:
    return [name for name in inspect.signature(torchs.__init__).parameters if name != "self"]


def make(kind: Any, **given: Any) -> Any:
    first = [(torch.zeros(1),)] * 9 if kind is loft.StreamLoader else DATA
    if "num_samples" in given and kind is not loft.StreamLoader:
        given.setdefault("weights", WEIGHTS)
    if "dataset" in given and kind is not loft.StreamLoader:
        return kind(balancer=FakePlans([5, 3]), **given)
    return kind(first, FakePlans([5, 3]), **given)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("name", sorted({name for each in TORCHS for name in names_of(each)}))
def test_each_name_of_torchs_is_served_or_refused_with_the_way_out(kind: Any, name: str) -> None:
    given = {name: VALUES[name]}
    if name in OURS[kind]:
        make(kind, **given)
        return
    with pytest.raises(ArgumentTypeError, match=rf"{kind.__name__}: unexpected argument '{name}'"):
        make(kind, **given)
    with pytest.raises(ArgumentTypeError) as raised:
        make(kind, **given)
    assert "no argument of this name" not in str(raised.value)


def positions_of(torchs: Any) -> list[list[Any]]:
    """Return the values of the first arguments of a class, one more each time."""
    parameters = inspect.signature(torchs.__init__).parameters.values()
    values = [
        VALUES[each.name]
        for each in parameters
        if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"
    ]
    return [values[:end] for end in range(2, len(values) + 1)]


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    "values", list(itertools.chain(*map(positions_of, TORCHS))), ids=lambda values: str(len(values))
)
def test_values_in_torchs_order_are_refused(kind: Any, values: list[Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"balancer=.*give a loft_hvd.Balancer"):
        kind(*values)
    with pytest.raises(ArgumentTypeError, match=r"balancer without a name|a sampler|a .*Sampler"):
        kind(values[0], FakePlans([5, 3]), *values[1:])


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(("sampler", "message"), SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_in_the_data_sets_place_is_refused(kind: Any, sampler: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        kind(sampler, FakePlans([5, 3]))


@pytest.mark.parametrize("kind", [loft.DataLoader, loft.BatchSampler])
@pytest.mark.parametrize(("sampler", "message"), SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_by_name_is_refused_with_the_line_to_write(
    kind: Any, sampler: Any, message: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        kind(DATA, FakePlans([5, 3]), sampler=sampler)


@pytest.mark.parametrize(
    "indices",
    [INDICES, tuple(INDICES), range(4, 9), np.array(INDICES), torch.randperm(9)],
    ids=lambda indices: type(indices).__name__,
)
def test_indices_are_no_data_set_of_a_batch_sampler(indices: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"whole numbers from \d+ to \d+, of which places"):
        loft.BatchSampler(indices, FakePlans([5, 3]))


@pytest.mark.parametrize(
    "dataset",
    [range(9), list(range(9)), torch.arange(9), torch.rand(9), [(1, 2)] * 9, ["a"] * 9, 9, []],
    ids=lambda dataset: f"{type(dataset).__name__}",
)
def test_samples_are_no_indices(dataset: Any) -> None:
    loft.BatchSampler(dataset, FakePlans([5, 3]))


# What the ways out do is what torch's own does.


@pytest.mark.parametrize(
    ("sampler", "served"),
    [
        (SequentialSampler(DATA), lambda: loft.BatchSampler(DATA, FakePlans([8]), shuffle=False)),
        (
            SubsetRandomSampler(INDICES),
            lambda: map(
                lambda places: [INDICES[at] for at in places],
                loft.BatchSampler(Subset(DATA, INDICES), FakePlans([8])),
            ),
        ),
        (RandomSampler(DATA), lambda: loft.BatchSampler(DATA, FakePlans([8]))),
    ],
    ids=["sequential", "subset", "random"],
)
def test_the_way_out_draws_the_samples_that_torchs_sampler_does(
    sampler: Any, served: Callable[[], Any]
) -> None:
    drawn = list(itertools.chain(*served()))
    expected = list(sampler)
    if isinstance(sampler, SequentialSampler):
        assert drawn == expected
    assert sorted(drawn) == sorted(expected)


def test_weights_draw_as_torchs_sampler_does() -> None:
    weights = [1.0, 2.0, 0.0, 5.0]
    ours = check_weights(weights, 40_000, 4, shuffle=None)
    assert ours is not None
    counts = np.bincount(ours.order(seed=0, epoch=0), minlength=4)
    theirs = WeightedRandomSampler(weights, 40_000, generator=torch.Generator().manual_seed(0))
    torchs = np.bincount(list(theirs), minlength=4)
    shares = np.array(weights) / sum(weights)
    sigma = np.sqrt(2 * 40_000 * shares * (1 - shares))  # of the difference
    assert (np.abs(counts - torchs) <= 3 * sigma).all(), (counts, torchs)


def test_what_serves_names_of_torchs_passes_them_on() -> None:
    context = multiprocessing.get_context("forkserver")
    loader = make(loft.DataLoader, num_workers=1, multiprocessing_context=context, timeout=5.0)
    assert loader._loader.timeout == 5.0
    assert loader._loader.multiprocessing_context is context
