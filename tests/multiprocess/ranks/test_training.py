"""Training over ranks with any legal sizes equals training in one process."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

import loft_hvd as loft
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference, train_alone

GLOBAL_BATCH_SIZE = 16
NUM_SAMPLES = 103  # seven steps an epoch, the last one of 7 samples
TOLERANCE = 1e-5
NUM_STEPS = 25


def sizes_for(kind: str) -> list[int]:
    """Split the global batch over the ranks in one of several legal ways."""
    size = hvd.size()
    if kind == "uneven":
        return [GLOBAL_BATCH_SIZE - sum(range(1, size)), *range(1, size)]
    if kind == "one rank idle" and size > 1:
        return [0, *[len(part) for part in torch.arange(GLOBAL_BATCH_SIZE).tensor_split(size - 1)]]
    return [len(part) for part in torch.arange(GLOBAL_BATCH_SIZE).tensor_split(size)]


def wrap(
    plain: torch.optim.Optimizer,
    model: torch.nn.Module,
    balancer: loft.Balancer,
    *,
    form: str,
    rule: loft.Rule,
    num_passes: int,
) -> torch.optim.Optimizer:
    """Return ours ("direct"), ours around Horovod's ("wrapped"), or Horovod's ("attached")."""
    named = model.named_parameters()
    passes: dict[str, Any] = {"backward_passes_per_step": num_passes}
    ours: dict[str, Any] = {"rule": rule, "balancer": balancer, "bucket_bytes": 256}
    if form == "direct":
        return loft.DistributedOptimizer(plain, named, **passes, **ours)
    theirs: torch.optim.Optimizer = hvd.DistributedOptimizer(plain, named, **passes)
    if form == "wrapped":
        return loft.DistributedOptimizer(theirs, **ours)
    assert form == "attached"
    assert rule == loft.Mean()  # Horovod's averages
    loft.attach(theirs, balancer)
    return theirs


def train_together(
    make_optimizer: str,
    policy: list[int],
    rule: loft.Rule,
    *,
    num_steps: int,
    num_passes: int = 1,
    form: str = "direct",
) -> torch.nn.Module:
    model = make_model()
    balancer = loft.Balancer(GLOBAL_BATCH_SIZE, policy=policy)
    loader = loft.DataLoader(make_data(NUM_SAMPLES), balancer, seed=3)
    plain = OPTIMIZERS[make_optimizer](model.parameters())
    optimizer = wrap(plain, model, balancer, form=form, rule=rule, num_passes=num_passes)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if form != "attached":
        # Of Horovod's optimizer it takes a first step, with gradients of zero: weight decay and
        # Adam's count of steps see it. Of ours it takes none.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    done = passes = epoch = 0
    while done < num_steps:
        loader.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            passes += 1
            if passes % num_passes == 0:
                optimizer.step()
                if form == "attached":
                    optimizer.zero_grad()  # Horovod's takes no arguments
                else:
                    optimizer.zero_grad(set_to_none=done % 2 == 0)
                done += 1
                if done == num_steps:
                    break
    return model


def check_equals_one_process(
    rule: loft.Rule, optimizer: str, kind: str, num_passes: int, *, form: str = "direct"
) -> None:
    together = train_together(
        optimizer, sizes_for(kind), rule, num_steps=NUM_STEPS, num_passes=num_passes, form=form
    )
    alone = train_alone(
        make_data(NUM_SAMPLES),
        OPTIMIZERS[optimizer],
        global_batch_size=GLOBAL_BATCH_SIZE,
        num_steps=NUM_STEPS,
        num_passes=num_passes,
    )
    assert max_difference(together, alone) <= TOLERANCE


# Each optimizer meets each way to split a batch, and each of both one and two passes.
UNEQUAL = [
    ("sgd", "uneven", 2),
    ("sgd", "one rank idle", 1),
    ("adam", "uneven", 1),
    ("adam", "one rank idle", 2),
]
CASES = [
    *UNEQUAL,
    ("sgd", "equal", 1),
    ("adam", "equal", 2),
    ("adamw", "equal", 1),
    ("adamw", "uneven", 2),
    ("adamw", "one rank idle", 1),
]


@pytest.mark.parametrize(("optimizer", "kind", "num_passes"), CASES)
def test_mean_equals_one_process(optimizer: str, kind: str, num_passes: int) -> None:
    check_equals_one_process(loft.Mean(), optimizer, kind, num_passes)


@pytest.mark.parametrize(("optimizer", "kind", "num_passes"), UNEQUAL)
@pytest.mark.parametrize("form", ["wrapped", "attached"])
def test_mean_with_horovods_optimizer_equals_one_process(
    form: str, optimizer: str, kind: str, num_passes: int
) -> None:
    check_equals_one_process(loft.Mean(), optimizer, kind, num_passes, form=form)


@pytest.mark.parametrize("num_passes", [1, 2])
def test_reproducible_mean_equals_one_process(num_passes: int) -> None:
    check_equals_one_process(loft.Mean(reproducible=True), "sgd", "one rank idle", num_passes)


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("kind", ["equal", "uneven"])
def test_robust_rules_leave_the_same_bits_on_every_rank(kind: str, num_passes: int) -> None:
    rule = loft.TrimmedMean(f=(hvd.size() - 1) // 2)
    model = train_together("adamw", sizes_for(kind), rule, num_steps=20, num_passes=num_passes)
    weights = torch.cat([value.detach().flatten() for value in model.parameters()])
    everyone = hvd.allgather(weights.view(torch.int32).view(1, -1))
    assert bool((everyone == everyone[0]).all())


def test_rows_that_agree_train_as_one_process_under_every_rule() -> None:
    """Every rank computes the same batch: then any rule must give what one process gets."""
    alone = make_model()
    model = make_model()
    plain = OPTIMIZERS["adam"](alone.parameters())
    optimizer = loft.DistributedOptimizer(
        OPTIMIZERS["adam"](model.parameters()), model.named_parameters(), rule=loft.Median()
    )
    x, y = make_data(32).tensors
    for _ in range(20):
        for net, stepper in ((alone, plain), (model, optimizer)):
            stepper.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            stepper.step()
    assert max_difference(alone, model) <= TOLERANCE


@pytest.mark.parametrize("early", [0, -1])
def test_streams_train_as_one_process_until_one_of_them_ends(early: int) -> None:
    sizes, num_steps = sizes_for("uneven"), 5
    data = make_data(hvd.size() * 100)
    mine = [data[100 * hvd.rank() + at] for at in range(100)]
    if hvd.rank() == early % hvd.size():
        mine = mine[: (num_steps + 1) * sizes[hvd.rank()] - 1]
    model, balancer = make_model(), loft.Balancer(GLOBAL_BATCH_SIZE, policy=sizes)
    optimizer = loft.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), balancer=balancer
    )
    taken = 0
    # Streams of 100 samples hold more shares than that of the rank whose stream ends early.
    for x, y in loft.StreamLoader(mine, balancer):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        taken += 1
    assert taken == num_steps
    alone = make_model()
    plain = OPTIMIZERS["sgd"](alone.parameters())
    for step in range(num_steps):
        parts = [
            data[100 * rank + step * size : 100 * rank + (step + 1) * size]
            for rank, size in enumerate(sizes)
        ]
        plain.zero_grad()
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        torch.nn.functional.mse_loss(alone(x), y).backward()
        plain.step()
    assert max_difference(model, alone) <= TOLERANCE
