"""Two levels in a world that changes: ``elastic_levels.py FOLDER WHAT NUM_RANKS``.

A node is a host name of the launcher's. Every step's gradient is compared with the definition over
the nodes that there are; ten steps in a world of NUM_RANKS ranks end the job. With "listed" the
groups are written down for the first world; with "kill" and "raise" rank 1 fails at step 8, once.
FOLDER takes a file ``trained`` once the first world trains, and the time of the fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.transport.horovod import HorovodTransport

NUMEL = 1003
FAULT_STEP, MOST_STEPS = 8, 2000
MEAN = loft.Mean(reproducible=True)
HOST = os.environ["HOROVOD_HOSTNAME"]


def row_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(1, NUMEL, generator=torch.Generator().manual_seed(10 * step + rank))


def expected(nodes: dict[str, list[int]], step: int) -> torch.Tensor:
    """Return the median of the nodes' means, [1, NUMEL]."""
    rows = torch.cat([row_of(rank, step) for rank in range(hvd.size())])
    means = torch.stack([loft.aggregate(rows[ranks], MEAN) for ranks in nodes.values()])
    result: torch.Tensor = loft.median(means)
    return result.view(1, -1)


def fail_once(folder: Path, what: str, step: int) -> None:
    """Fail at the fault step of the first world."""
    if what not in ("kill", "raise") or step != FAULT_STEP or hvd.rank() != 1:
        return
    if not (folder / "fault").exists():
        (folder / "fault").write_text(str(time.time()))
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("rank 1 raises")


def main(folder: Path, what: str, num_ranks: int) -> None:
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    HorovodTransport.node = HOST  # type: ignore[assignment,method-assign]  # all on one
    model = torch.nn.Linear(NUMEL, 1, bias=False)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        rule=loft.Median(),
        over=[[0, 1]] if what == "listed" else "nodes",
    )
    state = loft.elastic.State(model, optimizer, step=0)

    @hvd.elastic.run  # type: ignore[untyped-decorator]  # Horovod has no types
    def train(state: Any) -> None:
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hvd.allgather_object(HOST)):
            nodes.setdefault(host, []).append(rank)
        told = sorted(nodes.values())
        print(f"rank {hvd.rank()} of {hvd.size()} goes on at step {state.step}: {told}", flush=True)
        first = state.step
        while state.step < MOST_STEPS and not (
            hvd.size() == num_ranks and state.step >= first + 10
        ):
            fail_once(folder, what, state.step)
            optimizer.zero_grad()
            model(row_of(hvd.rank(), state.step)).sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            assert torch.equal(model.weight.grad, expected(nodes, state.step)), state.step
            state.step += 1
            state.commit()
            if state.step == first + 3:
                (folder / "trained").touch()
            time.sleep(0.02)  # leave the launcher time to find hosts

    train(state)
    print(f"rank {hvd.rank()} of {hvd.size()} has finished", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
