"""A small training job that meets one fault: ``faulty.py FOLDER FAULT RANK [attached]``.

At step FAULT_STEP of the first world, rank RANK does what FAULT names, once; "cut" and "crash" come
from outside. With "attached" the optimizer is Horovod's own, with ``loft.attach``. FOLDER takes
what the one who watches wants to know: where each rank runs, what it logs, the time of the fault,
and that of the first step which a newer world has committed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor
from torch.utils.data import Dataset

import loft_hvd as loft
from tests.support.raising import raise_in_backward

_logger = logging.getLogger(__name__)
GLOBAL_BATCH, NUM_STEPS, FAULT_STEP = 12, 4000, 6
STEP_S = 0.02  # as training does: a rank may be lost in any part of a step
LAST_STEP = 40  # where nothing comes from outside


class Samples(Dataset[Tensor]):
    """Whose reading fails in a loader process: raises, or ends it."""

    def __init__(self, fault: str, begin: Callable[[], bool]) -> None:
        self._fault, self._begin = fault, begin
        self._num_read = 0

    def __len__(self) -> int:
        return GLOBAL_BATCH * NUM_STEPS

    def __getitem__(self, index: int) -> Tensor:
        self._num_read += 1
        if self._num_read > FAULT_STEP * GLOBAL_BATCH // 3 and self._begin():
            if self._fault == "loader-kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"sample {index} cannot be read")
        return torch.full((6,), float(index % 7))


def fill_memory() -> None:
    """Run out of this process's memory: of what the kernel lets it have."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = 64 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
    torch.ones(4 * room, dtype=torch.uint8)


def raise_in_hook(*_: object) -> None:
    raise RuntimeError("raised in a hook")


def end_here(fault: str) -> None:
    """Do what ends or stops this process in place."""
    signals = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}
    if fault in signals:
        os.kill(os.getpid(), signals[fault])
    if fault == "segv":
        ctypes.memset(0, 0, 1)
    if fault == "exit":
        sys.exit(0)
    if fault == "_exit":
        os._exit(0)
    if fault == "forward":
        raise RuntimeError("raised in the forward pass")
    if fault == "memory":
        fill_memory()
    if fault == "cuda-memory":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 "
            "GiB of which 1.19 GiB is free."
        )


def make_optimizer(model: torch.nn.Module, balancer: loft.Balancer, *, is_attached: bool) -> Any:
    """Return ours, or Horovod's own with its attachment."""
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if not is_attached:
        return loft.DistributedOptimizer(
            inner, model.named_parameters(), rule=loft.Median(), balancer=balancer
        )
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    loft.attach(optimizer, balancer)
    return optimizer


class Fault:
    """What is to happen to one rank, and the word that is left of it."""

    def __init__(self, folder: Path, name: str, faulty_rank: int) -> None:
        self.folder, self.name = folder, name
        self._is_mine = hvd.rank() == faulty_rank  # by the first world; a loader process keeps it
        self.is_of_reading = "loader" in name
        self.is_from_outside = name in ("cut", "crash")

    @property
    def is_over(self) -> bool:
        """Whether a newer world trains."""
        return (self.folder / "recovered").exists()

    def begin(self) -> bool:
        """Say whether it is to happen now; it does once, in the first world."""
        mark = self.folder / "fault"
        if not self._is_mine or mark.exists() or self.is_over:
            return False
        mark.write_text(str(time.time()))
        return True

    def begin_in_step(self, number: int) -> bool:
        """Say whether it is to happen in this step of the training."""
        is_of_steps = not (self.is_of_reading or self.is_from_outside)
        return is_of_steps and number == FAULT_STEP and self.begin()


class Training:
    """The training of one rank."""

    def __init__(self, fault: Fault, *, is_attached: bool) -> None:
        self._fault, self._is_attached = fault, is_attached
        self._own_rank = hvd.rank()  # in the first world
        self.model = torch.nn.Linear(6, 2)
        self.balancer = loft.Balancer(GLOBAL_BATCH, "uniform")
        reads = fault.is_of_reading
        dataset = Samples(fault.name, fault.begin if reads else lambda: False)
        self.loader = loft.DataLoader(dataset, self.balancer, seed=5, num_workers=int(reads))
        self.optimizer = make_optimizer(self.model, self.balancer, is_attached=is_attached)

    def step(self, x: Tensor, number: int) -> None:
        is_faulty, name = self._fault.begin_in_step(number), self._fault.name
        self.optimizer.zero_grad()
        out = self.model(x)
        if is_faulty:
            end_here(name)
        if is_faulty and name == "backward":
            out = raise_in_backward(out, "raised in the backward pass")
        if is_faulty and name == "hook" and self._is_attached:
            self.model.weight.register_hook(raise_in_hook)
        elif is_faulty and name == "hook":
            self.optimizer.register_outgoing_hook(raise_in_hook)
        time.sleep(STEP_S)
        out.square().mean().backward()
        self.optimizer.step()
        if number == FAULT_STEP:
            self._tell_place()

    def _tell_place(self) -> None:
        part, place = (self._fault.folder / f"{name}{self._own_rank}" for name in ("part", "rank"))
        if not place.exists():
            part.write_text(socket.gethostname())
            part.rename(place)

    def is_last(self, number: int, *, last: int) -> bool:
        """Agree on the end: rank 0 says so."""
        is_over = number >= last or self._fault.is_over
        return bool(hvd.broadcast_object(is_over, root_rank=0, name="is_last"))

    def run(self) -> None:
        last = NUM_STEPS // 2 if self._fault.is_from_outside else LAST_STEP
        for number, x in enumerate(self.loader):
            self.step(x, number)
            if self.is_last(number, last=last):
                break

    def run_elastically(self, state: Any) -> None:
        """Train in one world."""
        _logger.warning("rank %d of %d goes on at %d", hvd.rank(), hvd.size(), state.step)
        first, folder = state.step, self._fault.folder
        try:
            for x in self.loader:
                self.step(x, state.step)
                state.step += 1
                state.commit()
                is_first = hvd.rank() == 0 and state.step == first + 1
                if is_first and (folder / "fault").exists():
                    (folder / "recovered").write_text(str(time.time()))
                if self.is_last(state.step, last=NUM_STEPS // 2):
                    break
        except BaseException as error:
            _logger.warning("%s ends this world", type(error).__name__)
            raise


def main(folder: Path, fault: str, faulty_rank: int, *, is_attached: bool) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    # Of a rank that is cut off from the launcher nobody sees what it prints.
    log = folder / f"log{hvd.rank()}.txt"
    line = f"%(created).2f rank {hvd.rank()}: %(message)s"
    logging.basicConfig(handlers=[logging.FileHandler(log), logging.StreamHandler()], format=line)
    training = Training(Fault(folder, fault, faulty_rank), is_attached=is_attached)
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        state = loft.elastic.State(
            training.model,
            training.optimizer,
            balancer=training.balancer,
            loader=training.loader,
            step=0,
        )
        state.register_reset_callbacks([lambda: _logger.warning("is in a new world")])
        hvd.elastic.run(training.run_elastically)(state)
    else:
        training.run()
    print(f"rank {hvd.rank()} of {hvd.size()} has finished", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), is_attached=sys.argv[4:] == ["attached"])
