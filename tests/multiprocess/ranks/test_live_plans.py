"""Plans that change while ranks train and loaders run ahead: same step, same result."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

import loft_hvd as loft
from tests.support.plans import Wandering
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference, train_alone

GLOBAL_BATCH_SIZE = 24
NUM_SAMPLES = 230  # ten steps an epoch, the last one of 14 samples


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}], ids=str
)
def test_training_through_many_plans_equals_one_process(
    workers: dict[str, int], num_passes: int
) -> None:
    num_steps = 100
    model = make_model()
    balancer = loft.Balancer(GLOBAL_BATCH_SIZE, policy=Wandering(GLOBAL_BATCH_SIZE), interval=4)
    loader = loft.DataLoader(make_data(NUM_SAMPLES), balancer, seed=3, **workers)  # type: ignore[arg-type]
    optimizer = loft.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=num_passes,
        balancer=balancer,
    )
    used: list[tuple[int, ...]] = []
    passes = epoch = 0
    while passes < num_steps * num_passes:
        loader.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            used.append((loader.step_sizes.plan_id, *loader.step_sizes.sizes))
            torch.nn.functional.mse_loss(model(x), y).backward()
            passes += 1
            if passes % num_passes == 0:
                optimizer.step()
                optimizer.zero_grad()
            if passes == num_steps * num_passes:
                break
    everyone = hvd.allgather(torch.tensor(used).unsqueeze(0))
    assert bool((everyone == everyone[0]).all()), "ranks used different plans at a step"
    if hvd.size() > 1:
        assert len(balancer.history) > 4
    alone = train_alone(
        make_data(NUM_SAMPLES),
        OPTIMIZERS["sgd"],
        global_batch_size=GLOBAL_BATCH_SIZE,
        num_steps=num_steps,
        num_passes=num_passes,
    )
    assert max_difference(model, alone) <= 1e-5
