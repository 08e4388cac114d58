"""Public bug reports put to the product; ``tests/reports.md`` has their sources and verdicts.

Those that a file of its own holds are not here.
"""

from __future__ import annotations

import copy
import json
import math
import tarfile
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import loft_hvd as loft
from loft_hvd.errors import MismatchError, UsageError
from loft_hvd.optimizer import replicas
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.plans import FakePlans
from tests.support.training import make_data, make_model, max_difference

MODEL = make_model()  # one for all: threads share torch's random numbers
SIZES = [7, 3, 2]
Step = Callable[[int, Any, nn.Module, Tensor, Tensor], None]
mse = torch.nn.functional.mse_loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def train(
    transport: LocalTransport | None,
    begin: Callable[[nn.Module, Any], Step],
    *,
    model: nn.Module = MODEL,
    data: Any = None,
    num_epochs: int = 1,
    **options: Any,
) -> nn.Module:
    """Train over ranks, or with torch's optimizer in this process without a transport.

    ``begin`` gets the model and the optimizer, and returns what trains on a batch.
    """
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    balancer = loft.Balancer(12, transport=LocalWorld(1).transport(0))
    if transport is not None:
        balancer = loft.Balancer(12, SIZES, transport=transport)
        named = model.named_parameters()
        optimizer = loft.DistributedOptimizer(
            optimizer, named, balancer=balancer, transport=transport, **options
        )
    step = begin(model, optimizer)
    loader = loft.DataLoader(make_data(144) if data is None else data, balancer, seed=3)
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        for at, (x, y) in enumerate(loader):
            step(at, optimizer, model, x, y)
    return model


def check_exact(begin: Callable[[nn.Module, Any], Step], **options: Any) -> None:
    """Compare three ranks of unequal batches with one process."""
    of_ours = {"backward_passes_per_step"}
    here = {name: value for name, value in options.items() if name not in of_ours}
    alone = train(None, begin, **here)
    for found in run_ranks(3, lambda end: train(end, begin, **options)):
        assert max_difference(found, alone) < 1e-6
    assert max_difference(alone, here.get("model", MODEL)) > 1e-3


def usual(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()


# huggingface/accelerate#2926: a schedule that goes by as many times too fast as there are ranks.


@pytest.mark.parametrize(
    "schedule",
    [
        lambda each: lr_scheduler.StepLR(each, 3, 0.3),
        lambda each: lr_scheduler.OneCycleLR(each, 0.1, total_steps=13),  # momentum, too
        lambda each: lr_scheduler.SequentialLR(
            each,
            [lr_scheduler.LinearLR(each, total_iters=4), lr_scheduler.CosineAnnealingLR(each, 8)],
            [4],
        ),
    ],
)
@pytest.mark.parametrize("scales", [False, True])
def test_schedules_go_by_steps(schedule: Any, scales: bool) -> None:
    def begin(_: nn.Module, optimizer: Any) -> Step:
        steps, scaler = schedule(optimizer), torch.amp.GradScaler("cpu", init_scale=64.0)

        def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
            if scales:
                optimizer.zero_grad()
                scaler.scale(mse(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                usual(at, optimizer, model, x, y)
            steps.step()

        return step

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        check_exact(begin)


# lucidrains/DALLE-pytorch#268: ReduceLROnPlateau by each rank's own loss.


def test_a_plateau_by_a_ranks_own_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_FEWEST_STEPS", 5)
    monkeypatch.setattr(replicas, "_MOST_STEPS", 5)

    def work(transport: LocalTransport) -> None:
        def begin(_: nn.Module, optimizer: Any) -> Step:
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

            def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
                usual(at, optimizer, model, x, y)
                plateau.step(1.0 - 0.1 * at * (transport.rank == 1))

            return step

        with pytest.raises(MismatchError, match=r"option lr of parameter group 0 differs .*\[1\]"):
            train(transport, begin)

    run_ranks(3, work)


# Megvii-BaseDetection/YOLOX#1176: averages of a model (EMA), by deepcopy.


def test_a_copy_of_the_model_is_none_of_the_optimizers() -> None:
    def begin(model: nn.Module, _: Any) -> Step:
        averages = copy.deepcopy(model)

        def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            mse(model(x), y).backward()
            mse(averages(x), y).backward()  # a gradient of its own, which nobody waits for
            optimizer.step()
            with torch.no_grad():
                for mean, value in zip(averages.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
                    mean.grad = None
                    if at == 11:
                        value.copy_(mean)

        return step

    check_exact(begin)


# pytorch/pytorch#81296: a layer used twice inside torch.utils.checkpoint has two gradients.


class Twice(nn.Module):
    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.how = how

    def _again(self, x: Tensor) -> Any:
        if self.how == "plain":
            return self.middle(x).tanh()
        is_reentrant = self.how == "reentrant"
        return checkpoint(lambda z: self.middle(z).tanh(), x, use_reentrant=is_reentrant)

    def forward(self, x: Tensor) -> Any:
        return self.last(self._again(self._again(self.first(x).tanh())))


@pytest.mark.parametrize("how", ["plain", "not reentrant"])
def test_a_layer_used_twice_has_one_gradient(how: str) -> None:
    torch.manual_seed(1)
    check_exact(lambda *_: usual, model=Twice(how=how))


def test_a_layer_used_twice_in_reentrant_checkpoints_is_told_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"runs twice inside torch.*use_reentrant=False"):
        run_ranks(3, lambda end: train(end, lambda *_: usual, model=Twice(how="reentrant")))


# horovod/horovod#2420: a gradient that is computed and not used.


def test_a_gradient_is_dropped_after_synchronize() -> None:
    def begin(*_: Any) -> Step:
        def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if at % 3 != 1:
                optimizer.step()
            elif hasattr(optimizer, "synchronize"):
                optimizer.synchronize()

        return step

    check_exact(begin)


def test_a_gradient_on_its_way_is_not_dropped_by_zero_grad() -> None:
    def begin(*_: Any) -> Step:
        def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
            mse(model(x), y).backward()
            optimizer.zero_grad()

        return step

    with pytest.raises(UsageError, match=r"to drop them call optimizer.synchronize\(\) first"):
        run_ranks(3, lambda end: train(end, begin))


# Lightning-AI/pytorch-lightning#19987: batches too few for a step at an epoch's end.


@pytest.mark.parametrize("steps_at_the_end", [True, False])
def test_a_window_of_passes_may_be_cut_short(steps_at_the_end: bool) -> None:
    def begin(*_: Any) -> Step:
        def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
            (mse(model(x), y) / 2).backward()
            if at % 2 == 1 or (at == 4 and steps_at_the_end):
                optimizer.step()
                optimizer.zero_grad()
            elif at == 4:
                optimizer.zero_grad()

        return step

    check_exact(begin, data=make_data(60), num_epochs=3, backward_passes_per_step=2)


# horovod/horovod#2154: two optimizers, each with a part of the model, and one loss.


def test_two_optimizers_share_a_model() -> None:
    def work(transport: LocalTransport | None) -> nn.Module:
        model = copy.deepcopy(MODEL)
        parts = [
            [each for each in model.named_parameters() if each[0].startswith(name)]
            for name in ("0.", "2.")
        ]
        optimizers: list[Any] = [
            sgd([p for _, p in parts[0]]),
            torch.optim.Adam([p for _, p in parts[1]], lr=0.01),
        ]
        balancer = loft.Balancer(12, transport=LocalWorld(1).transport(0))
        if transport is not None:
            balancer = loft.Balancer(12, SIZES, transport=transport)
            optimizers = [
                loft.DistributedOptimizer(each, part, balancer=balancer, transport=transport)
                for each, part in zip(optimizers, parts, strict=True)
            ]
        for x, y in loft.DataLoader(make_data(120), balancer, seed=3):
            for each in optimizers:
                each.zero_grad()
            mse(model(x), y).backward()
            for each in optimizers:
                each.step()
        return model

    alone = work(None)
    assert all(max_difference(found, alone) < 1e-6 for found in run_ranks(3, work))


# pytorch/pytorch#31579: a mean over fewer targets than samples (ignore_index, padding, weights).


def test_a_mean_over_targets_is_exact_by_the_share_of_targets() -> None:
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 2, (144,), generator=generator)
    labels[torch.rand(144, generator=generator) < 0.4] = -100
    x, _ = make_data(144).tensors
    cross_entropy = torch.nn.functional.cross_entropy

    def work(transport: LocalTransport | None) -> nn.Module:
        def begin(*_: Any) -> Step:
            def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
                optimizer.zero_grad()
                if transport is None:
                    loss = cross_entropy(model(x), y)
                else:
                    share = (y != -100).float().mean()  # of this rank's samples
                    share = loft.average(share, len(y), transport=transport)
                    loss = cross_entropy(model(x), y, reduction="sum") / len(y) / share
                loss.backward()
                optimizer.step()

            return step

        return train(transport, begin, data=TensorDataset(x, labels))

    alone = work(None)
    assert all(max_difference(found, alone) < 1e-6 for found in run_ranks(3, work))


# Lightning-AI/pytorch-lightning#21838: an epoch's mean over ranks with unequal numbers of samples.


def test_an_epochs_mean_counts_samples() -> None:
    values = [[(1.0, 8), (2.0, 8), (7.0, 3)], [(4.0, 8)], []]

    def work(transport: LocalTransport) -> float:
        metric = loft.Metric("loss", transport=transport)
        for value, count in values[transport.rank]:
            metric.update(torch.tensor(value), count)
        return float(metric.avg)

    assert run_ranks(3, work) == pytest.approx([77 / 27] * 3)


# pytorch/pytorch#25162: evaluation counts the samples that fill up the last batch.


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [1, 3, 20, 21])
def test_evaluation_counts_every_sample_once(num_ranks: int, num_samples: int) -> None:
    data = TensorDataset(torch.arange(float(num_samples)) ** 2)

    def work(transport: LocalTransport) -> float:
        balancer = loft.Balancer(8, "uniform", transport=transport)
        loader = loft.DataLoader(data, balancer, train=False)
        total, count = 0.0, 0
        for (x,) in loader:
            if not loader.is_padding:
                total, count = total + float(x.sum()), count + len(x)
        return loft.average(total / max(count, 1), count, transport=transport)

    wanted = float(data.tensors[0].mean())
    assert run_ranks(num_ranks, work) == pytest.approx([wanted] * num_ranks)


# huggingface/accelerate#2016: a run that goes on in the middle of a later epoch.


@pytest.mark.parametrize("stops_after", [1, 4, 6, 9])
def test_a_run_goes_on_in_a_later_epoch(stops_after: int) -> None:
    def work(transport: LocalTransport) -> bool:
        def make() -> loft.DataLoader:
            balancer = loft.Balancer(6, [3, 2, 1], transport=transport)
            return loft.DataLoader(TensorDataset(torch.arange(22)), balancer, seed=1)

        def go(loader: loft.DataLoader, epoch: int, limit: float) -> tuple[list[Any], Any]:
            seen: list[Any] = []
            for at in range(epoch, 3):
                loader.set_epoch(at)
                for (x,) in loader:
                    seen.append([] if loader.is_padding else x.tolist())
                    if len(seen) == limit:
                        return seen, (at, json.dumps(loader.state_dict()))
            return seen, None

        whole, _ = go(make(), 0, math.inf)
        first, (epoch, state) = go(make(), 0, stops_after)
        again = make()
        again.load_state_dict(json.loads(state))
        return first + go(again, epoch, math.inf)[0] == whole

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batches go out, but no backward pass")
        assert run_ranks(3, work) == [True] * 3


# webdataset/webdataset#65: fewer shards than ranks, of unequal lengths.


def test_fewer_shards_than_ranks_are_read_once(tmp_path: Path) -> None:
    paths = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for path, numbers in zip(paths, (range(7), range(7, 19)), strict=True):
        with tarfile.open(path, "w") as archive:
            for number in numbers:
                entry = tarfile.TarInfo(f"{number:05d}.json")
                text = json.dumps(number).encode()
                entry.size = len(text)
                archive.addfile(entry, BytesIO(text))

    def decode(sample: Any) -> Any:
        return json.loads(sample["json"])

    def work(transport: LocalTransport) -> tuple[int, list[int]]:
        balancer = loft.Balancer(8, "uniform", transport=transport)
        loader = loft.DataLoader(loft.TarShards(paths, decode=decode), balancer)
        steps = [[] if loader.is_padding else batch.tolist() for batch in loader]
        return len(steps), [number for step in steps for number in step]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batches go out, but no backward pass")
        found = run_ranks(4, work)
    assert [num_steps for num_steps, _ in found] == [3] * 4
    assert sorted(number for _, seen in found for number in seen) == list(range(19))


# huggingface/transformers#37932: ranks that are seeded alike augment their samples alike.


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[float, float]:
        return float(torch.rand(())), float(np.random.rand())


def test_loader_processes_of_ranks_seeded_alike_draw_other_numbers() -> None:
    def draws(rank: int) -> list[float]:
        torch.manual_seed(7)
        loader = loft.DataLoader(Noise(), FakePlans([4, 4], rank=rank), num_workers=1)
        return [float(value) for pair in loader for values in pair for value in values]

    first, again, other = draws(0), draws(0), draws(1)
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == len(first) == 16


# Lightning-AI/pytorch-lightning#5243: a rank that passes over a batch is a step behind.


def test_a_rank_that_passes_over_a_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_FEWEST_STEPS", 5)
    monkeypatch.setattr(replicas, "_MOST_STEPS", 5)

    def work(transport: LocalTransport) -> None:
        def begin(*_: Any) -> Step:
            def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
                if at != 2 or transport.rank != 1:
                    usual(at, optimizer, model, x, y)

            return step

        with pytest.raises(MismatchError, match=r"the batch trained on .* differs on ranks \[1\]"):
            train(transport, begin)

    run_ranks(3, work)


# Neighbours of other faults, for which there was no report.


class Normalised(nn.Module):
    """With a layer between two others, or a parametrization of the last one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        norms = {"group norm": nn.GroupNorm(2, 8), "layer norm": nn.LayerNorm(8)}
        self.norm = norms.get(how, nn.Identity())
        if how in ("spectral_norm", "weight_norm"):
            getattr(nn.utils.parametrizations, how)(self.last)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x)).tanh())


@pytest.mark.parametrize("how", ["group norm", "layer norm", "spectral_norm", "weight_norm"])
def test_layers_that_normalise_by_sample_or_by_weight_are_exact(how: str) -> None:
    torch.manual_seed(1)
    check_exact(lambda *_: usual, model=Normalised(how))


def test_a_gradient_penalty_is_exact() -> None:
    def begin(*_: Any) -> Step:
        def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            x = x.clone().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (mse(out, y) + (slope**2).sum(dim=1).mean()).backward()
            optimizer.step()

        return step

    check_exact(begin)


def test_a_batch_that_is_augmented_twice_is_exact() -> None:
    def begin(*_: Any) -> Step:
        def step(at: int, optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
            usual(at, optimizer, model, torch.cat([x, -x]), torch.cat([y, y]))

        return step

    check_exact(begin)


def test_trainings_in_one_process_without_names_are_told_apart() -> None:
    """Also where all that they made is still referenced, as in a search for a learning rate."""

    def work(transport: LocalTransport | None) -> nn.Module:
        kept: list[Any] = []
        for lr in (0.01, 0.05, 0.1):
            model = copy.deepcopy(MODEL)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr)
            balancer = loft.Balancer(12, transport=LocalWorld(1).transport(0))
            if transport is not None:
                balancer = loft.Balancer(12, SIZES, transport=transport)
                optimizer = loft.DistributedOptimizer(
                    optimizer, balancer=balancer, transport=transport
                )
            kept.append((model, optimizer, balancer))
            for x, y in loft.DataLoader(make_data(60), balancer, seed=3):
                usual(0, optimizer, model, x, y)
        return nn.ModuleList(model for model, _, _ in kept)

    alone = work(None)
    assert all(max_difference(found, alone) < 1e-6 for found in run_ranks(3, work))


@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_generator_and_a_critic_train_by_turns(num_passes: int) -> None:
    """As PyTorch's DCGAN example: the critic's step has two passes, the generator's leaves some."""
    softplus = torch.nn.functional.softplus
    torch.manual_seed(5)
    start = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)])

    def work(transport: LocalTransport | None) -> nn.Module:
        both = copy.deepcopy(start)
        generator, critic = both
        optimizers: list[Any] = [torch.optim.SGD(part.parameters(), lr=0.05) for part in both]
        balancer = loft.Balancer(12, transport=LocalWorld(1).transport(0))
        if transport is not None:
            balancer = loft.Balancer(12, SIZES, transport=transport)
            optimizers = [
                loft.DistributedOptimizer(
                    each, balancer=balancer, transport=transport, backward_passes_per_step=passes
                )
                for each, passes in zip(optimizers, (1, num_passes), strict=True)
            ]
        for x, _ in loft.DataLoader(make_data(96), balancer, seed=3):
            optimizers[1].zero_grad()
            softplus(-critic(x)).mean().backward()
            softplus(critic(generator(x).detach())).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            softplus(-critic(generator(x))).mean().backward()
            optimizers[0].step()
        return both

    if num_passes == 1:
        with pytest.raises(UsageError, match="backward pass 2 of a step, but backward_passes_per"):
            run_ranks(3, work)
        return
    alone = work(None)
    assert all(max_difference(found, alone) < 1e-6 for found in run_ranks(3, work))
