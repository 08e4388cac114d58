"""Train for long with all that changes while training, and look at what it leaves behind.

    python -m tests.faults.soak --steps 50000    # four ranks, threads of one process
    horovodrun -np 4 --gloo python -m tests.faults.soak --steps 5000 --horovod

Ranks' speeds drift, so that plans change; ranks send wrong gradients in turns, so that they come
into quarantine and out again; loaders, metrics, run logs, saved and loaded states go on all the
while. After ``--warm`` steps and at the end a process counts its memory, descriptors and threads.
All ranks' parameters must have the same bits, every 200 steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import loft_hvd as loft
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.local import run_ranks

__all__ = ["Left", "soak"]

GLOBAL_BATCH, NUM_SAMPLES = 48, 48 * 40
INTERVAL, PROBATION = 20, 150
CHECK_EVERY = 200  # steps between two comparisons of all parameters
PHASE = 400  # steps of an attack, and as many of peace after it
_SEEDING, _ONE_AT_A_TIME = threading.Lock(), threading.Lock()
SAMPLE_S = 4e-5  # a rank's time a sample, times 1 to 4


@dataclass(frozen=True)
class Left:
    """What a run was made of, and what it has left behind; of one process."""

    num_steps: int
    num_plans: int
    num_quarantines: int
    grown_bytes: int  # of resident memory, from the warm-up to the end
    grown_descriptors: int
    grown_threads: int

    def faults(self) -> list[str]:
        """Say what is not as it must be."""
        told = [
            (self.grown_bytes > 5e6, f"memory grew by {self.grown_bytes / 1e6:.1f} MB"),
            (self.grown_descriptors > 0, f"{self.grown_descriptors} descriptors more"),
            (self.grown_threads > 0, f"{self.grown_threads} threads more"),
            (self.num_plans < 3, f"{self.num_plans} plans only"),
            (self.num_quarantines < 1, "no quarantine"),
        ]
        return [text for is_wrong, text in told if is_wrong]


@dataclass(frozen=True)
class _Held:
    """What a process holds."""

    num_bytes: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def now(cls) -> _Held:
        with _ONE_AT_A_TIME:  # looking takes a descriptor, which another thread would count
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            descriptors = len(os.listdir("/proc/self/fd"))
        return cls(pages * resource.getpagesize(), descriptors, threading.active_count())


class _Samples(torch.utils.data.Dataset[Any]):
    """A regression of which every sample is computed when it is asked for."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(1, 13) * (1.0 + index))
        return x, x[:2] * x[2:4]


def speed_of(rank: int, step: int) -> float:
    """Return the seconds a sample of a rank at a step: another rank is the slow one every 700."""
    return SAMPLE_S * (4 if (step // 700) % 4 == rank else 1 + rank % 2)


def attack_at(step: int, world_size: int) -> tuple[int, loft.attacks.Attack] | None:
    """Return who sends what in the phase of a step, or None in peace."""
    phase, is_war = divmod(step // PHASE, 2)
    kinds: tuple[loft.attacks.Attack, ...] = (
        loft.attacks.NaN(),
        loft.attacks.SignFlip(10.0),
        loft.attacks.HugeValue(),
    )
    return (phase % world_size, kinds[phase % len(kinds)]) if is_war else None


class _Job:
    """One rank's model, loader and all that watches them."""

    def __init__(self, transport: Transport, log_dir: str, num_warm: int) -> None:
        self.transport, self.num_warm = transport, num_warm
        with _SEEDING:  # threads that are ranks share torch's generator
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(
                torch.nn.Linear(12, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)
            )
        self.balancer = loft.Balancer(
            GLOBAL_BATCH, "loft", interval=INTERVAL, log_dir=log_dir, transport=transport
        )
        self.loader = loft.DataLoader(_Samples(), self.balancer)
        self.optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9),
            self.model.named_parameters(),
            rule=loft.TrimmedMean(f=1),
            balancer=self.balancer,
            bucket_bytes=2048,
            quarantine=loft.Quarantine(probation=PROBATION),
            transport=transport,
        )
        self.optimizer.register_outgoing_hook(self.attack)
        self.num_steps = self.num_plans = self.num_quarantines = 0
        self.plan_id = self.balancer.plan.plan_id
        self.held: tuple[int, ...] = ()  # in quarantine
        self.warm: _Held | None = None

    def attack(self, _: Any, values: torch.Tensor) -> None:
        """Send wrong values, where it is this rank's turn."""
        told = attack_at(self.num_steps, self.transport.world_size)
        if told is not None and told[0] == self.transport.rank:
            values.copy_(told[1](values.unsqueeze(0), num_rows=1)[0])

    def train(self, num_steps: int) -> None:
        epoch = 0
        while self.num_steps < num_steps:
            loss_of_epoch = loft.Metric("loss", loader=self.loader, transport=self.transport)
            self.loader.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                time.sleep(len(x) * speed_of(self.transport.rank, self.num_steps))
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                loss_of_epoch.update(loss, len(x))
                self.num_steps += 1
                self.note()
                if self.num_steps == num_steps:
                    break
            assert loss_of_epoch.avg.isfinite()
            self.save_and_load()
            epoch += 1

    def note(self) -> None:
        """Count what happens, and compare copies now and then."""
        if (plan_id := self.balancer.plan.plan_id) != self.plan_id:
            self.plan_id, self.num_plans = plan_id, self.num_plans + 1
        if self.num_steps % INTERVAL == 0:
            held = tuple(
                worker.ranks[0]
                for worker in self.optimizer.report().workers
                if worker.in_quarantine_until is not None
            )
            self.num_quarantines += len(set(held) - set(self.held))
            self.held = held
        if self.num_steps % CHECK_EVERY == 0:
            self.compare()
        if self.num_steps == self.num_warm:
            self.warm = _Held.now()

    def compare(self) -> None:
        bits = [each.detach().view(torch.int32).flatten() for each in self.model.parameters()]
        rows = Channel(self.transport, "soak.bits").allgather_rows(torch.cat(bits))
        assert bool((rows == rows[0]).all()), f"step {self.num_steps}: ranks have other bits"

    def save_and_load(self) -> None:
        """Take states through JSON, as a script that saves an epoch's end does."""
        self.balancer.explain()
        str(self.optimizer.report())
        self.loader.load_state_dict(json.loads(json.dumps(self.loader.state_dict())))


def soak(transport: Transport, num_steps: int, *, log_dir: str, num_warm: int) -> Left:
    """Train so many steps on one rank; every rank calls it alike."""
    job = _Job(transport, log_dir, num_warm)
    job.train(num_steps)
    Channel(transport, "soak.end").allgather_rows(torch.zeros(1))  # nobody has ended before this
    end = _Held.now()
    Channel(transport, "soak.over").allgather_rows(torch.zeros(1))
    assert job.warm is not None, "no more steps than the warm-up"
    return Left(
        num_steps,
        job.num_plans,
        job.num_quarantines,
        end.num_bytes - job.warm.num_bytes,
        end.num_descriptors - job.warm.num_descriptors,
        end.num_threads - job.warm.num_threads,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--warm", type=int, default=0, help="a tenth of the steps by default")
    parser.add_argument("--ranks", type=int, default=4, help="threads that are ranks")
    parser.add_argument("--horovod", action="store_true", help="processes that are ranks")
    options = parser.parse_args()
    num_warm = options.warm or options.steps // 10
    logging.disable(logging.WARNING)  # quarantines, in turns
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def work(transport: Transport) -> Left:
            return soak(transport, options.steps, log_dir=folder, num_warm=num_warm)

        if options.horovod:
            import horovod.torch as hvd

            hvd.init()
            left = [work(default_transport())]
            name = f"rank {hvd.rank()}"
        else:
            left, name = run_ranks(options.ranks, work, timeout_s=1e6)[:1], "all ranks"
    faults = left[0].faults()
    print(f"{name}: {left[0]}, {time.monotonic() - began:.0f} s: {faults or 'ok'}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
