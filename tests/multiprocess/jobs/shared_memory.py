"""A job whose ranks share memory, end the engine and start it again: ``shared_memory.py``."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.errors import TransportError
from loft_hvd.transport.lanes import _worlds
from loft_hvd.transport.shared_memory import SharedMemory


def num_mapped() -> int:
    """Return how many memories of other ranks this process has mapped."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return sum(" r--s " in line and "/memfd:loft_hvd " in line for line in maps)


def step() -> torch.nn.Parameter:
    """Take a step with an optimizer of its own; return its parameter, of which ranks average 1."""
    weight = torch.nn.Parameter(torch.zeros(7))
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = loft.DistributedOptimizer(sgd, [("w", weight)], rule=loft.Median())
    (-hvd.rank() * weight).sum().backward()
    optimizer.step()
    assert weight.detach().eq(1.0).all(), weight
    return weight


def fork_and_write(weight: torch.nn.Parameter) -> None:
    """Have a forked child write to the gradient, which lies in shared memory."""
    assert weight.grad is not None
    before = weight.grad.clone()
    child = os.fork()
    if child == 0:
        weight.grad.fill_(123.0)
        os._exit(0 if weight.grad.eq(123.0).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(weight.grad, before)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    rank = hvd.rank()
    weight = step()
    ((memory,),) = [world.by_kind.values() for world in _worlds().values()]
    assert isinstance(memory, SharedMemory)
    assert memory.num_posted > 0
    fork_and_write(weight)
    mapped = num_mapped()
    hvd.barrier()  # another rank may take its step while this one shuts down
    hvd.shutdown()
    try:
        memory.has_all(1, 1)
        said = "nothing"
    except TransportError as error:
        said = str(error)
    hvd.init()
    step()
    ((again,),) = [world.by_kind.values() for world in _worlds().values()]
    assert again is not memory
    hvd.barrier()
    hvd.shutdown()
    del weight, memory, again
    gc.collect()
    sys.stdout.write(f"rank {rank}: mapped {mapped}, left {num_mapped()}, {said}\n")


if __name__ == "__main__":
    main()
