"""Losses over tokens, whose number differs by rank: ``counted.py ddp|fsdp|horovod|attach``."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.transport.local import LocalWorld
from tests.support.training import make_model, max_difference

SIZES = [96, 96, 48, 16]
LENGTH = 5  # labels of a text
NUM_STEPS = 4
IGNORED = -100


def make_texts() -> TensorDataset:
    """Return texts whose labels a random mask leaves out, of some nearly all."""
    random = torch.Generator().manual_seed(8)
    num_texts = sum(SIZES) * NUM_STEPS * 3
    labels = torch.randint(0, 2, (num_texts, LENGTH), generator=random)
    kept = torch.rand(num_texts, 1, generator=random) ** 3
    labels[torch.rand(labels.shape, generator=random) > kept] = IGNORED
    return TensorDataset(torch.randn(num_texts, LENGTH, 6, generator=random), labels)


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
    if kind == "fsdp":
        for layer in (model[0], model[2], model):  # type: ignore[index]  # a Sequential
            fully_shard(layer)
        loft.fsdp_hook(model, balancer=balancer)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if kind == "fsdp":
        yield model, optimizer
        return
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


def held_back(kind: str, model: Any, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    """Let gradients of all passes of a step but the last add up on this rank."""
    if kind == "fsdp":
        model.set_requires_gradient_sync(is_last)
    if kind != "ddp" or is_last:
        return contextlib.nullcontext()
    return model.no_sync()  # type: ignore[no-any-return]  # DDP's


def honest(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())


def train(
    kind: str,
    sizes: list[int],
    num_passes: int,
    *,
    is_sum: bool = False,
    claim: Callable[[torch.Tensor], int] = honest,
) -> torch.nn.Module:
    model = make_model()
    balancer = loft.Balancer(sum(sizes), sizes, max_count=LENGTH)
    batches = iter(loft.DataLoader(TEXTS, balancer))
    with front_end(kind, model, balancer, num_passes) as (trained, optimizer):
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            for number in range(num_passes):
                x, labels = next(batches)
                with held_back(kind, trained, is_last=number + 1 == num_passes):
                    loss = loss_of(trained, x, labels, "sum" if is_sum else "mean")
                    balancer.count(claim(labels), is_sum=is_sum)
                    (loss if is_sum else loss / num_passes).backward()
            optimizer.step()
    if kind == "fsdp":
        state = {name: shard.full_tensor() for name, shard in model.state_dict().items()}
        model = make_model()
        model.load_state_dict(state)
    return model


def claim_too_much(kind: str, rank: int) -> None:
    """A rank that claims ten times what its samples hold counts for what they hold."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("loft_hvd").addHandler(handler)
    most = SIZES[3] * LENGTH

    def trained(claim: int) -> torch.nn.Module:
        claims = honest if rank != 3 else lambda _: claim
        return train(kind, SIZES, 1, claim=claims)

    at_most, beyond = trained(most), trained(10 * most)
    # Horovod adds up in the order in which tensors happen to come together.
    assert max_difference(beyond, at_most) <= (1e-6 if kind == "attach" else 0.0)
    if rank == 0:
        said = f"rank 3 counts {10 * most} in a step of which it has 16 samples"
        assert [said in each for each in told].count(True) == 1, told


def pass_twice() -> None:
    """Two backward passes that FSDP2 reduces add up, each by itself; a failed one adds nothing."""
    model, (x, labels) = make_model(), TEXTS[:64]
    halves = [slice(0, 40), slice(40, 64)]
    for half in halves:
        (loss_of(model, x[half], labels[half], "sum") / honest(labels[half])).backward()
    wanted = [p.grad for p in model.parameters()]
    model, balancer = make_model(), loft.Balancer(64)
    with front_end("fsdp", model, balancer, 1) as (trained, _):
        shards = list(model.parameters())  # a forward pass has others take their place
        for half in halves:
            balancer.begin_own_batch()
            balancer.count(honest(labels[half]), is_sum=True)
            loss_of(trained, x[half], labels[half], "sum").backward()
        failing = x[:40].clone().requires_grad_()
        failing.register_hook(lambda _: 1 // 0)
        balancer.begin_own_batch()
        balancer.count(honest(labels[:40]), is_sum=True)
        with contextlib.suppress(ZeroDivisionError):
            loss_of(trained, failing, labels[:40], "sum").backward()
        trained(x)
    for parameter, want in zip(shards, wanted, strict=True):
        got = parameter.grad.full_tensor()  # type: ignore[union-attr]  # a DTensor's
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def main(kind: str) -> None:
    torch.set_num_threads(1)
    if kind in ("ddp", "fsdp"):
        torch.distributed.init_process_group("gloo")
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        import horovod.torch as hvd

        hvd.init()
        rank, world_size = hvd.rank(), hvd.size()
    sizes = SIZES if world_size > 1 else [sum(SIZES)]
    for num_passes in (1, 2, 3):
        wanted = alone(num_passes)
        for is_sum in (False, True):
            apart = max_difference(train(kind, sizes, num_passes, is_sum=is_sum), wanted)
            print(f"{num_passes} passes, {'sums' if is_sum else 'means'}: {apart:.1e}", flush=True)
            assert apart <= 1e-6, (num_passes, is_sum, apart)
    if world_size > 1:
        claim_too_much(kind, rank)
    elif kind == "fsdp":
        pass_twice()
    print(f"{kind} has finished", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
