"""Plain DDP under ``loft.watch``, and one rank, or each in turn, is slow: ``watched.py CASES``.

CASES is a JSON list of [where, how, rank]: where a step's time goes ("fetch", "forward",
"backward", "other", "queue", "turns fetch" and so on, or "" for nowhere), whether the slow rank
sleeps or spins, and which rank it is. Rank 0 prints for each what the watch and the report say.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import loft_hvd as loft
from loft_hvd.report.entries import read_lines
from loft_hvd.report.verdict import judge
from loft_hvd.runlog import read_run_log

WIDTH, BATCH, INTERVAL, SLOW_S = 384, 64, 24, 0.04
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
_ALL_CPUS = os.sched_getaffinity(0)


def spend(seconds: float, how: str) -> None:
    if how == "sleep":
        time.sleep(seconds)
    began = time.thread_time()
    while how == "spin" and time.thread_time() - began < seconds:
        pass


class Slow(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, case: Case) -> Tensor:
        ctx.case = case
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.case.spend("backward")
        return gradients[0], None


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.case.spend("forward")
        return Slow.apply(self.layers(x), self.case)  # type: ignore[no-any-return, no-untyped-call]


class Case:
    """What is planted."""

    def __init__(self, where: str, how: str, slow: int) -> None:
        self.where, self.how, self.slow = where.removeprefix("turns "), how, slow
        self.takes_turns = where.startswith("turns ")
        self.step = 0

    def spend(self, where: str) -> None:
        slow = self.step % world_size if self.takes_turns else self.slow
        if where == self.where and rank == slow:
            spend(SLOW_S, self.how)


class Samples(Dataset[Tensor]):
    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 10_000 * world_size

    def __getitem__(self, index: int) -> Tensor:
        if index % BATCH == 0:
            return torch.ones(WIDTH)
        return torch.full((WIDTH,), index / 1e5)


class Collate:
    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.case.spend("fetch")
        return torch.stack(samples)


def burn(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


def run(where: str, how: str, slow: int) -> dict[str, Any]:
    case = Case(where, how, slow)
    burners = []
    if where == "queue" and rank == slow:
        cpu = min(_ALL_CPUS)
        os.sched_setaffinity(0, {cpu})
        context = multiprocessing.get_context("fork")
        # On two CPUs the other ranks share one, and wait for each other: this queue is longer.
        burners = [
            context.Process(target=burn, args=(cpu,), daemon=True) for _ in range(world_size)
        ]
        for burner in burners:
            burner.start()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Model(case))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dataset = Samples(case)
    loader = DataLoader(
        dataset, batch_size=BATCH, sampler=DistributedSampler(dataset), collate_fn=Collate(case)
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        loft.watch(model, log_dir=folder, interval=INTERVAL) as watch,
    ):
        for case.step, x in enumerate(loader):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            case.spend("other")
            if case.step == 2 * INTERVAL + 1:
                break
        told = watch.explain()
        logs = sorted(Path(folder).glob("loft-*.jsonl"))
        verdict = judge(read_lines(read_run_log(logs[-1]))) if rank == 0 else []
    for burner in burners:
        burner.kill()
        burner.join()
    os.sched_setaffinity(0, _ALL_CPUS)
    dist.barrier()
    return {"case": [where, how, slow], "verdict": verdict, "explain": told}


for each in json.loads(sys.argv[1]):
    found = run(*each)
    if rank == 0:
        print(f"CASE {json.dumps(found)}", flush=True)
print(f"rank {rank} has finished", flush=True)
