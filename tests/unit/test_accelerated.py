"""The link for Accelerate on one rank; over ranks: multiprocess/test_frameworks.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),  # what Accelerate has to say of torch
]

DATA = TensorDataset(torch.arange(22.0))


@pytest.fixture
def accelerator() -> Any:
    accelerate: Any = importlib.import_module("accelerate")
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_what_it_cannot_serve_is_refused(accelerator: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"accelerator is a Linear; give an accelerate\."):
        loft.accelerator_link(torch.nn.Linear(1, 1))
    link = loft.accelerator_link(accelerator)
    with pytest.raises(UsageError, match="none was prepared so far"):
        assert link.balancer
    with pytest.raises(ArgumentError, match=r"loaders for evaluation to accelerator\.prepare"):
        link.prepare(DataLoader(DATA), DataLoader(DATA))
    drawn = DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * 22, 22))
    with pytest.raises(ArgumentError, match="over a WeightedRandomSampler, and so they are"):
        link.prepare(drawn)


def test_everything_else_is_prepared_by_accelerate_in_its_order(accelerator: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = loft.accelerator_link(accelerator, [5])
    made = link.prepare(optimizer, DataLoader(DATA, batch_size=3), model)
    assert type(made[0]).__name__ == "AcceleratedOptimizer"
    assert isinstance(made[1], loft.PreparedLoader)
    assert made[2] is model
    assert [len(x) for (x,) in made[1]] == [5, 5, 5, 5, 2]
    assert str(link.report()).startswith("nobody is watched")


@pytest.mark.parametrize("drop_last", [False, True])
def test_accelerate_learns_which_batch_is_the_last(accelerator: Any, drop_last: bool) -> None:
    link = loft.accelerator_link(accelerator)
    model, loader = link.prepare(
        torch.nn.Linear(1, 1), DataLoader(DATA, batch_size=4, shuffle=True, drop_last=drop_last)
    )
    assert len(loader) == 5 + (not drop_last)
    seen, synced, orders = [], [], []
    for _ in range(2):
        order = []
        for (x,) in loader:
            with accelerator.accumulate(model):
                seen.append(accelerator.gradient_state.end_of_dataloader)
                synced.append(accelerator.sync_gradients)
            order += x.tolist()
        orders.append(order)
        assert not accelerator.gradient_state.in_dataloader
    assert seen == ([False] * (len(loader) - 1) + [True]) * 2
    # Every second pass steps, and an epoch's last.
    of_an_epoch = [at % 2 == 1 for at in range(len(loader) - 1)] + [True]
    assert synced == of_an_epoch * 2
    assert orders[0] != orders[1]  # the next iteration is the next epoch
    if not drop_last:
        assert sorted(orders[0]) == DATA.tensors[0].tolist()


def test_a_state_brings_the_loader_to_where_it_was(accelerator: Any, tmp_path: Path) -> None:
    def begin() -> Any:
        link = loft.accelerator_link(accelerator, [4])
        return link.prepare(DataLoader(DATA, batch_size=4, shuffle=True))

    loader = begin()
    list(loader)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    accelerator.save_state(str(tmp_path))
    left = torch.cat([x for (x,) in batches])
    accelerator._custom_objects.clear()
    again = begin()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(torch.cat([x for (x,) in again]), left)
    assert sorted(torch.cat([x for (x,) in again]).tolist()) == DATA.tensors[0].tolist()
