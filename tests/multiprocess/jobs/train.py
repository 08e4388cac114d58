"""A small training job for tests that end it in a hurry: ``train.py WHAT RANK``.

At step 5 rank RANK is killed ("kill"), stops answering ("freeze", "freeze-alone" before the others
come to that step, or "freeze-foreign" while they wait in a call of Horovod's own), raises in its
backward pass ("raise") or in a hook ("raise-hook"), leaves without a word ("leave", or
"leave-slowly", with an exit handler from before Horovod began that takes 30 s), or steps two
optimizers the other way round ("order"). With "shape" its model differs from the start. With "hold"
nothing is wrong: the rank holds the Python interpreter for long, as some calls do, and the others
must wait for it; with "hold-foreign" for a minute, while they wait in a call of Horovod's own. With
"sleep" it takes a minute over its step. With "slow-foreign" that call of Horovod's own takes 12 s
there, as over a slow link, when the others are through with it. Where nothing watches a rank
that is frozen, the first to give up ends it: Horovod's own end would wait for it for good.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.config import config
from tests.support.raising import raise_in_backward
from tests.support.training import make_data, make_model

FAULT_STEP = 5
is_at_fault = threading.Event()  # for an exit handler, which knows no rank when it is registered


def raise_in_hook(*_: object) -> None:
    raise RuntimeError(f"rank {hvd.rank()} raises in a hook")


def slow_down() -> None:
    """Let this rank's next waits for Horovod end in 12 s."""
    library = importlib.import_module("horovod.torch.mpi_ops").mpi_lib
    wait, gate = library.horovod_torch_wait_and_clear, threading.Lock()
    gate.acquire()
    library.horovod_torch_wait_and_clear = gate.acquire  # of C, as the wait is; it takes any number

    def go_on() -> None:
        library.horovod_torch_wait_and_clear = wait
        gate.release()

    threading.Timer(12.0, go_on).start()


def await_pause() -> None:
    """Return between two of Horovod's cycles, 60 ms after one, or after a second.

    With dynamic process sets a cycle begins with a wait for all ranks, for which it holds the table
    of sets; so a look into that table waits, too. The rest of an idle cycle takes less than 60 ms,
    also on busy cores. Where no look waits in five cycles, they are so short that hardly a moment
    is in one; the others come to the step in 2 s.
    """
    library = importlib.import_module("horovod.torch.mpi_ops")._basics.MPI_LIB_CTYPES
    now, limit, held_at = time.monotonic(), time.monotonic() + 1.0, math.inf
    while (now - held_at < 0.06 or held_at == math.inf) and now < limit:
        before = time.monotonic()
        library.horovod_number_of_process_sets()
        now = time.monotonic()
        if now - before > 1e-4:  # a look takes microseconds
            held_at = now


def take_long_to_end() -> None:
    """End this process 30 s late, if it is the one at fault."""
    if is_at_fault.is_set():
        time.sleep(30)


def at_once(what: str) -> None:
    """Do what ends or stops this process in place."""
    if what == "freeze-alone":
        await_pause()
    print(f"fault at {time.time()}", flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("freeze"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if what.startswith("leave"):
        is_at_fault.set()
        sys.exit(3)
    if what == "sleep":
        time.sleep(60)
    if what.startswith("hold"):  # unlike CDLL, PyDLL keeps the interpreter's lock
        ctypes.PyDLL(None).sleep(60 if what == "hold-foreign" else 13)
    if what == "slow-foreign":
        slow_down()


def trainer(what: str) -> tuple[Any, Callable[[bool], None]]:
    """Return an optimizer and one of its steps, which raises if told to."""
    model = make_model() if what != "shape" else torch.nn.Linear(6, 2)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        [(f"{what}.{name}", value) for name, value in model.named_parameters()],
        rule=loft.Median(),
    )
    x, y = make_data(16).tensors

    def step(should_raise: bool = False) -> None:
        out = model(x)
        if should_raise:
            out = raise_in_backward(out, f"rank {hvd.rank()} raises in its backward pass")
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(out, y).backward()
        optimizer.step()

    return optimizer, step


def train(what: str, faulty_rank: int) -> None:
    """Take 20 steps, and do what is asked at one of them."""
    is_faulty_rank = hvd.rank() == faulty_rank
    if what == "shape" and is_faulty_rank:
        print(f"fault at {time.time()}", flush=True)
    optimizer, step = trainer("shape" if what == "shape" and is_faulty_rank else "model")
    steps = [step]
    if what == "order":
        steps.append(trainer("other")[1])
    for number in range(20):
        is_faulty = number == FAULT_STEP and is_faulty_rank
        if is_faulty:
            at_once(what)
        if is_faulty and what == "raise-hook":
            optimizer.register_outgoing_hook(raise_in_hook)
        if number == FAULT_STEP and what == "freeze-alone":
            time.sleep(2)
        if number == FAULT_STEP and what.endswith("-foreign"):
            hvd.allreduce(torch.zeros(3), name="foreign")
        for each in reversed(steps) if is_faulty else steps:
            each(is_faulty and what == "raise")


def main(what: str, faulty_rank: int) -> None:
    if what == "leave-slowly":
        atexit.register(take_long_to_end)
    hvd.init()
    torch.set_num_threads(1)
    processes = hvd.allgather(torch.tensor([os.getpid()]), name="processes").tolist()
    try:
        train(what, faulty_rank)
    except loft.LoftError:
        if not what.startswith("freeze") or config().heartbeat_s > 0:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os.kill(processes[faulty_rank], signal.SIGKILL)
        os._exit(1)
    print(f"rank {hvd.rank()} has finished", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
