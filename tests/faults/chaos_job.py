"""The training of ``chaos.py``: ``python -m tests.faults.chaos_job FOLDER STEPS`` on every rank.

It goes on from FOLDER's checkpoint to STEPS optimizer steps, and meets the fault of
FOLDER/fault.json.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import loft_hvd as loft
from loft_hvd.failures.watched import heartbeat_of
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport
from tests.support.raising import raise_in_backward
from tests.support.training import make_data, make_model

__all__ = ["NUM_RANKS", "Fault", "train", "write_plans"]

NUM_RANKS, GLOBAL_BATCH = 3, 24
SAVE_EVERY = 50  # steps
_SEEDING = threading.Lock()
DISK_STEPS = 60  # for which a disk is full: more than from one checkpoint to the next


@dataclass(frozen=True)
class Fault:
    """What goes wrong on a rank at a step."""

    kind: str
    rank: int
    step: int
    seconds: float = 0.0  # of a pause


def write_plans(folder: Path, num_steps: int) -> None:
    """Write the sizes that all jobs replay: others every 30 steps."""
    lines = []
    for first_step in range(0, num_steps, 30):
        slow = first_step // 30 % NUM_RANKS
        sizes = [4 if rank == slow else 10 for rank in range(NUM_RANKS)]
        lines.append(json.dumps({"first_step": first_step, "sizes": sizes}))
    (folder / "plans.jsonl").write_text("\n".join(lines) + "\n")


class _Checkpoint:
    """What rank 0 writes, and all ranks read at their start."""

    def __init__(self, folder: Path, **parts: Any) -> None:
        self._path, self._step = folder / "checkpoint.pt", folder / "step"
        self._parts = parts

    def load(self) -> tuple[int, int]:
        """Return the step and the epoch to go on at."""
        if not self._path.exists():
            return 0, 0
        saved = torch.load(self._path, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        return int(saved["step"]), int(saved["epoch"])

    def save(self, step: int, epoch: int) -> None:
        """Write it, or leave the one before in place where the disk is full."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        saved = {"step": step, "epoch": epoch, **states}
        new = self._path.with_suffix(".new")
        with suppress(OSError, RuntimeError):  # torch's own error for a disk that is full
            torch.save(saved, new)
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(self._path)
            part = self._step.with_suffix(".new")
            part.write_text(str(step))
            part.replace(self._step)


@contextmanager
def full_disk(is_full: bool) -> Iterator[None]:
    """Let no file of this process grow inside, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def meet(fault: Fault) -> None:
    """Do what a fault is, between two steps."""
    print(f"fault at {time.time()}", flush=True)
    own = os.getpid()
    if fault.kind == "kill":
        os.kill(own, signal.SIGKILL)
    elif fault.kind == "segv":
        os.kill(own, signal.SIGSEGV)
    elif fault.kind == "freeze":
        os.kill(own, signal.SIGSTOP)
    elif fault.kind == "leave":
        os._exit(0)
    elif fault.kind == "exit":
        sys.exit(0)
    elif fault.kind == "out-of-memory":
        torch.empty(2**50)
    elif fault.kind == "pause":
        time.sleep(fault.seconds)
    elif fault.kind == "hold":
        ctypes.PyDLL(None).usleep(int(1e6 * fault.seconds))  # keeps the interpreter's lock
    elif fault.kind == "stop":  # shorter than what counts as frozen
        if os.fork() == 0:
            time.sleep(fault.seconds)
            os.kill(own, signal.SIGCONT)
            os._exit(0)
        os.kill(own, signal.SIGSTOP)


def train(
    transport: Transport,
    folder: Path,
    num_steps: int,
    *,
    is_calm: bool,
    began: Callable[[], None] = lambda: None,
) -> str:
    """Train to a step and return the digest of the parameters.

    ``is_calm``: from step 0 on and without a fault. ``began`` is called once ranks are connected.
    """
    with _SEEDING:  # threads that are ranks share torch's generator
        model = make_model()
    balancer = loft.Balancer(GLOBAL_BATCH, loft.Replay(folder / "plans.jsonl"), transport=transport)
    loader = loft.DataLoader(make_data(GLOBAL_BATCH * 33), balancer, seed=5)
    optimizer = loft.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3),
        model.named_parameters(),
        rule=loft.TrimmedMean(f=1),
        balancer=balancer,
        transport=transport,
    )
    # An attack is part of the training; a fault is not.
    loft.attacks.attach(optimizer, loft.attacks.SignFlip(3.0), ranks=[1])
    checkpoint = _Checkpoint(
        folder, model=model, optimizer=optimizer, balancer=balancer, loader=loader
    )
    fault, step, epoch = Fault("none", 0, -1), 0, 0
    if not is_calm:
        step, epoch = checkpoint.load()
        fault = Fault(**json.loads((folder / "fault.json").read_text()))
    began()
    is_guilty = fault.rank == transport.rank
    while step < num_steps:
        loader.set_epoch(epoch)
        for x, y in loader:
            is_met = is_guilty and step == fault.step
            if is_met:
                meet(fault)
            out = model(x)
            if is_met and fault.kind == "raise":
                out = raise_in_backward(out, "chaos in a backward pass")
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(out, y).backward()
            optimizer.step()
            step += 1
            is_due = step % SAVE_EVERY == 0 or step == num_steps
            if is_due and transport.rank == 0 and not is_calm:
                is_full = fault.kind == "disk" and 0 <= step - fault.step < DISK_STEPS
                with full_disk(is_full):
                    checkpoint.save(step, epoch)
            if step == num_steps:
                break  # here: a batch that is drawn is trained
        else:
            epoch += 1
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def write_place(folder: Path) -> None:
    """Tell strangers where rank 0 listens."""
    heartbeat: Any = heartbeat_of("horovod.0")
    (address, port), *_ = heartbeat._connections._maker.addresses
    part = folder / "place.part"
    part.write_text(f"{address} {port}")
    part.rename(folder / "place")


def main(folder: Path, num_steps: int) -> None:
    import horovod.torch as hvd  # not where ranks are threads

    hvd.init()
    torch.set_num_threads(1)
    transport = default_transport()

    def began() -> None:
        if hvd.rank() == 0:
            write_place(folder)

    digest = train(transport, folder, num_steps, is_calm=False, began=began)
    digests = hvd.allgather_object(digest)
    if hvd.rank() == 0:
        (folder / "digests").write_text(json.dumps(digests))
    Channel(transport, "chaos.end").allgather_rows(torch.zeros(1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
