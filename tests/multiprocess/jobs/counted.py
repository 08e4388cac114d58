"""Losses over tokens, whose number differs from rank to rank: ``counted.py ddp|horovod|attach``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.transport.local import LocalWorld
from tests.support.training import make_model, max_difference

SIZES = [96, 96, 48, 16]
NUM_STEPS = 4
IGNORED = -100


def make_texts() -> TensorDataset:
    """Return texts whose labels a random mask leaves out, of some nearly all."""
    random = torch.Generator().manual_seed(8)
    num_texts = sum(SIZES) * NUM_STEPS * 3
    labels = torch.randint(0, 2, (num_texts, 5), generator=random)
    kept = torch.rand(num_texts, 1, generator=random) ** 3
    labels[torch.rand(labels.shape, generator=random) > kept] = IGNORED
    return TensorDataset(torch.randn(num_texts, 5, 6, generator=random), labels)


TEXTS = make_texts()


def loss_of(model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor, how: str) -> Any:
    return cross_entropy(
        model(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how
    )


def alone(num_passes: int) -> torch.nn.Module:
    """Train in this process, each step on the mean over all labels that count in it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = iter(
        loft.DataLoader(TEXTS, loft.Balancer(sum(SIZES), transport=LocalWorld(1).transport(0)))
    )
    for _ in range(NUM_STEPS):
        batches = [next(loader) for _ in range(num_passes)]
        total = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        optimizer.zero_grad()
        for x, labels in batches:
            (loss_of(model, x, labels, "sum") / total).backward()
        optimizer.step()
    return model


@contextlib.contextmanager
def front_end(
    kind: str, model: torch.nn.Module, balancer: loft.Balancer, num_passes: int
) -> Iterator[tuple[torch.nn.Module, Any]]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, loft.ddp_hook(balancer=balancer))
        yield wrapped, optimizer
        return
    named: Any = {
        "named_parameters": list(model.named_parameters()),
        "backward_passes_per_step": num_passes,
    }
    if kind == "horovod":
        optimizer = loft.DistributedOptimizer(optimizer, balancer=balancer, **named)
        yield model, optimizer
        optimizer.close()
        return
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(optimizer, **named)
    attached = loft.attach(optimizer, balancer)
    yield model, optimizer
    attached.detach()


def train(kind: str, num_passes: int, *, is_sum: bool) -> torch.nn.Module:
    model = make_model()
    balancer = loft.Balancer(sum(SIZES), SIZES, max_count=5)
    batches = iter(loft.DataLoader(TEXTS, balancer))
    with front_end(kind, model, balancer, num_passes) as (trained, optimizer):
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            for number in range(num_passes):
                x, labels = next(batches)
                held_back = kind == "ddp" and number < num_passes - 1
                with trained.no_sync() if held_back else contextlib.nullcontext():  # type: ignore[operator]  # DDP's
                    loss = loss_of(trained, x, labels, "sum" if is_sum else "mean")
                    balancer.count((labels != IGNORED).sum(), is_sum=is_sum)
                    (loss if is_sum else loss / num_passes).backward()
            optimizer.step()
    return model


def main(kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "ddp":
        torch.distributed.init_process_group("gloo")
    else:
        import horovod.torch as hvd

        hvd.init()
    for num_passes in (1, 2, 3):
        wanted = alone(num_passes)
        for is_sum in (False, True):
            apart = max_difference(train(kind, num_passes, is_sum=is_sum), wanted)
            print(f"{num_passes} passes, {'sums' if is_sum else 'means'}: {apart:.1e}", flush=True)
            assert apart <= 1e-6, (num_passes, is_sum, apart)
    print(f"{kind} has finished", flush=True)
    if kind == "ddp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
