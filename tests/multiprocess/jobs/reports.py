"""Public bug reports that take real ranks: ``reports.py ENGINE CASE ..``.

Cases that end the job by an error come last; others say what they have found.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import loft_hvd as loft
from loft_hvd.errors import MismatchError, UsageError
from tests.support.training import make_data, make_model, max_difference
from tests.unit.test_unused import MODEL, Heads

mse = torch.nn.functional.mse_loss


def attached(rank: int, world_size: int) -> None:
    """Train with Horovod's own optimizer as its examples do; then clip before the reduction."""
    import horovod.torch as hvd

    model, x, y = make_model(), *(each[rank * 8 : rank * 8 + 8] for each in DATA)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer: Any = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    loft.attach(optimizer, loft.Balancer(8 * world_size, "report"))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(6):
        model.zero_grad(set_to_none=step % 2 == 0)
        if step == 3:
            scaler.scale(mse(model(x), y)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        else:
            mse(model(x), y).backward()
            optimizer.step()
    mse(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    try:
        optimizer.step()
    except UsageError as error:
        print(f"attached: {error}", flush=True)
    hvd.barrier()


def horovods(case: str, rank: int, world_size: int) -> None:
    """Train with a loader of the script's own, in the rhythm that the case has."""
    if case == "attached":
        attached(rank, world_size)
        return
    model = make_model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
    )
    data = make_data(400)
    # "uneven": rank 0 has more batches than the others.
    share = 160 if case == "uneven" and rank == 0 else 120
    loader = DataLoader(Subset(data, range(share)), batch_size=4)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        if case == "validates" and step == 5 and rank == 0:
            time.sleep(14)  # longer than silence is allowed to last
        if case == "stops" and step == 5 and rank == 1:
            print(f"fault at {time.time()}", flush=True)
            break  # its patience has come to an end
    if case == "uneven" and rank != 0:
        print(f"fault at {time.time()}", flush=True)
    if case == "validates":
        print(f"{case}: rank {rank} trained {step + 1} steps", flush=True)
    elif rank == 1 or (case == "uneven" and rank):
        return  # the script ends, before others
    print(f"rank {rank} has finished", flush=True)


def raised(train: Any) -> str:
    try:
        train()
    except MismatchError as error:
        return str(error)
    return "nothing"


def ddps(case: str, rank: int, world_size: int) -> None:
    """Train under DistributedDataParallel, in a way of the case's."""
    if case == "scale":
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(None, loft.ddp_hook())
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0 * (1 + (rank == 1)))
        x, y = next(iter(DataLoader(make_data(8), batch_size=8)))

        def scaled() -> None:
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(sgd)

        print(f"{case}: {raised(scaled)}", flush=True)
    elif case == "split":
        model = DistributedDataParallel(make_model())
        balancer = loft.Balancer(4 * world_size, "uniform")
        model.register_comm_hook(None, loft.ddp_hook(balancer=balancer))
        seed = torch.Generator().manual_seed(rank)
        own, _ = torch.utils.data.random_split(make_data(48), [36, 12], seed)
        x, y = next(iter(loft.DataLoader(own, balancer)))
        print(f"{case}: {raised(lambda: mse(model(x), y).backward())}", flush=True)
    else:
        assert case == "unused"
        alone, found = Heads(), Heads()
        for each in (alone, found):
            each.load_state_dict(MODEL.state_dict())
        wrapped = DistributedDataParallel(found, find_unused_parameters=True)
        wrapped.register_comm_hook(None, loft.ddp_hook())
        mine = slice(rank * 4, rank * 4 + 4)
        both: list[tuple[Any, slice]] = [(alone, slice(0, 4 * world_size)), (wrapped, mine)]
        for model, share in both:
            sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
            for step in range(6):
                begin = 4 * world_size * step
                x, y = (each[begin : begin + 4 * world_size][share] for each in DATA)
                sgd.zero_grad()
                mse(model(x, both=step % 3 == 1), y).backward()
                sgd.step()
        print(f"{case}: off by {max_difference(alone, found):.1e}", flush=True)


DATA = make_data(120).tensors


def main(engine: str, *cases: str) -> None:
    torch.set_num_threads(1)
    if engine == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank, world_size, train = hvd.rank(), hvd.size(), horovods
    else:
        dist.init_process_group("gloo")
        rank, world_size, train = dist.get_rank(), dist.get_world_size(), ddps
    for case in cases:
        train(case, rank, world_size)
    if engine == "torch":
        dist.destroy_process_group()
        print(f"rank {rank} has finished", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
