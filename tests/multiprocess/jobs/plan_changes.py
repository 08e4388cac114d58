"""Training through 20 changes of plan: ``plan_changes.py WORKERS:PREFETCH[:FLAGS] ...``.

FLAGS are letters: p for persistent loader processes, m for pinned memory, s for a
``loft.BatchSampler`` behind torch's own loader, d for double steps, of two backward passes, a for
a loop that fetches a batch ahead, between forward and backward. For each setting rank 0 prints
"found" and a JSON object: the number of changes and steps, at how many steps ranks had different
plans or batches of another size than planned, and how far the result is from training in one
process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader

import loft_hvd as loft
from loft_hvd.balance.plan import StepSizes
from tests.support.plans import Wandering
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference, train_alone

GLOBAL_BATCH, NUM_SAMPLES, NUM_CHANGES = 24, 1390, 20  # 57 steps of 24 and one of 22 an epoch


def batches(balancer: loft.Balancer, setting: str) -> Iterator[tuple[Any, StepSizes]]:
    """Yield batches, epoch after epoch, with the sizes of their step."""
    workers, prefetch, flags, *_ = f"{setting}::".split(":")
    options: dict[str, Any] = {"num_workers": int(workers)}
    if int(workers):
        options |= {"prefetch_factor": int(prefetch), "persistent_workers": "p" in flags}
    options["pin_memory"] = "m" in flags
    data = make_data(NUM_SAMPLES)
    sampler = loft.BatchSampler(data, balancer, seed=3)
    ours = loft.DataLoader(data, balancer, seed=3, **options)
    loader: Any = DataLoader(data, batch_sampler=sampler, **options) if "s" in flags else ours
    epoch = 0
    while True:
        (sampler if "s" in flags else ours).set_epoch(epoch)
        epoch += 1
        for index, batch in enumerate(loader):
            yield batch, sampler.step_sizes_at(index) if "s" in flags else ours.step_sizes


def train(setting: str) -> dict[str, Any]:
    """Train until the last plan has been in force for a while; returns what was found."""
    torch.manual_seed(0)
    model = make_model()
    balancer = loft.Balancer(GLOBAL_BATCH, Wandering(GLOBAL_BATCH), interval=4)
    num_passes = 2 if "d" in setting else 1
    optimizer = loft.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=num_passes,
        balancer=balancer,
    )
    used: list[tuple[int, ...]] = []
    num_odd = 0
    source = batches(balancer, setting)
    following = next(source) if "a" in setting else None
    while True:
        (x, y), sizes = following or next(source)
        with balancer.step(len(x)) if "s" in setting else nullcontext():
            loss = torch.nn.functional.mse_loss(model(x), y)
            following = next(source) if "a" in setting else None
            loss.backward()
            used.append((sizes.step, sizes.plan_id, *sizes.sizes))
            is_step = len(used) % num_passes == 0
            if is_step:
                optimizer.step()
                optimizer.zero_grad()
        planned = balancer.plan_at(sizes.step)
        is_full = sizes.total == GLOBAL_BATCH
        num_odd += len(x) != sizes.sizes[hvd.rank()] or (planned.plan_id != sizes.plan_id)
        num_odd += is_full and planned.sizes != sizes.sizes
        if is_step and sizes.plan_id >= NUM_CHANGES and sizes.step > planned.first_step + 2:
            break
    everyone = hvd.allgather(torch.tensor(used).unsqueeze(0))
    odd = hvd.allgather(torch.tensor([num_odd]))
    alone = train_alone(
        make_data(NUM_SAMPLES),
        OPTIMIZERS["sgd"],
        global_batch_size=GLOBAL_BATCH,
        num_steps=len(used) // num_passes,
        num_passes=num_passes,
    )
    return {
        "setting": setting,
        "changes": len({plan for _, plan, *_ in used}) - 1,
        "steps": len(used),
        "steps with different plans": int((everyone != everyone[0]).any(dim=2).any(dim=0).sum()),
        "batches of another size": int(odd.sum()),
        "difference": max_difference(model, alone),
    }


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    for setting in sys.argv[1:]:
        found = train(setting)
        if hvd.rank() == 0:
            print("found", json.dumps(found), flush=True)
    print(f"rank {hvd.rank()} has finished")


if __name__ == "__main__":
    main()
