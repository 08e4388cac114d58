"""Data sets whose numbers mean other samples on one rank are told apart; no others are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

import loft_hvd as loft
from loft_hvd.data.contents import content_of
from loft_hvd.errors import MismatchError
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.training import make_data

DATA = make_data(48)


class Column:
    """As a pandas Series whose labels are those of a table that it was chosen from."""

    ndim = 1

    def __init__(self, *values: str) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, label: int) -> str:
        return dict(zip((3, 5, 8), self.values, strict=True))[label]

    def to_numpy(self) -> Any:
        return np.array(self.values, dtype=object)


def test_a_column_of_a_table_is_read_by_place() -> None:
    def of(*values: str) -> int:
        dataset = Folder([])
        dataset.paths = Column(*values)  # type: ignore[attr-defined]
        return content_of(dataset)

    assert of("a", "b", "c") == of("a", "b", "c") != of("b", "a", "c")


class Folder(Dataset[Any]):
    """As torchvision's folders."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return DATA[int(self.samples[index][0].rpartition("/")[2])]


def split(seed: int) -> Any:
    """Split as scripts do, which keep the first part to train."""
    return random_split(DATA, [36, 12], torch.Generator().manual_seed(seed))[0]


def folder(root: str, *, is_sorted: bool = True) -> Folder:
    samples = [(f"{root}/{at}", at % 2) for at in range(36)]
    return Folder(samples if is_sorted else samples[::-1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (split(1), split(2)),
        (folder("/data"), folder("/data", is_sorted=False)),
        (Subset(DATA, [1, 2]), Subset(DATA, [2, 1])),
        (ConcatDataset([Subset(DATA, [1]), DATA]), ConcatDataset([Subset(DATA, [2]), DATA])),
        (Subset(Subset(DATA, [3, 1, 2]), [0, 1]), Subset(Subset(DATA, [1, 3, 2]), [0, 1])),
        (Subset(DATA, range(9999)), Subset(DATA, range(9998))),
    ],
)
def test_other_samples_have_another_content(one: Any, other: Any) -> None:
    assert content_of(one) != content_of(other)
    assert content_of(one) == content_of(one) != 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (split(1), split(1)),
        (folder("/host1/data"), folder("/scratch/of/host2")),
        (Subset(DATA, [1, 2]), Subset(DATA, torch.tensor([1, 2]))),  # type: ignore[arg-type]  # works
        (Subset(DATA, [1, 2]), Subset(DATA, np.array([1, 2]))),  # type: ignore[arg-type]  # as above
        (DATA, TensorDataset(torch.zeros(3))),
        (48, 48),
    ],
)
def test_equal_samples_have_equal_content(one: Any, other: Any) -> None:
    assert content_of(one) == content_of(other)


def test_what_is_no_list_tells_nothing() -> None:
    class Odd(Dataset[Any]):
        @property
        def samples(self) -> Any:
            raise OSError("the file is not open")

    odd: Any = Odd()
    odd.files, odd.paths, odd.indices = "a.tar", 7, {"a": 1}
    odd.dataset = odd  # round and round
    assert content_of(odd) == 0


@pytest.mark.parametrize(
    "samples",
    [torch.rand(5, 3), np.zeros((4, 2, 2)), torch.rand(4), [np.zeros(3)] * 4, [{"a": 1}] * 4, []],
)
def test_samples_that_are_no_names_count_by_their_number_at_most(samples: Any) -> None:
    one, other = (Folder([]) for _ in range(2))
    one.samples = samples
    other.samples = samples + 1 if hasattr(samples, "ndim") else samples[:0] + samples
    assert content_of(one) == content_of(other)


@pytest.mark.parametrize("how", ["DataLoader", "BatchSampler"])
@pytest.mark.parametrize(
    "dataset",
    [
        lambda rank: split(rank),
        lambda rank: folder("/data", is_sorted=rank != 1),
        lambda rank: Subset(DATA, range(36 - (rank == 1))),
    ],
    ids=["split", "folder", "length"],
)
def test_ranks_whose_data_sets_differ_are_told_in_the_first_step(dataset: Any, how: str) -> None:
    def work(transport: LocalTransport) -> None:
        model = torch.nn.Linear(6, 2)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        balancer = loft.Balancer(6, "uniform", transport=transport)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        named = model.named_parameters()
        optimizer = loft.DistributedOptimizer(sgd, named, balancer=balancer, transport=transport)
        own = dataset(transport.rank)
        loader: Any = loft.DataLoader(own, balancer)
        if how == "BatchSampler":
            sampler = loft.BatchSampler(own, balancer)
            loader = torch.utils.data.DataLoader(own, batch_sampler=sampler)
        x, y = next(iter(loader))
        torch.nn.functional.mse_loss(model(x), y).backward()
        told = r"step 1: the batch trained on .* differs on ranks .* sort lists of files, split"
        with pytest.raises(MismatchError, match=told):
            optimizer.step()

    run_ranks(2, work)
