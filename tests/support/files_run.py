"""Which files of the package run, and a rank that writes down those of another rank's failure.

``python -m tests.support.files_run FOLDER HOW``: it forks two ranks, for which it has imported
torch and its compiler, and tells at last with which status each has ended. Rank 1 dies (``kill``)
or hangs (``stop``) in its second step. Rank 0 then writes to FOLDER/files which it has passed.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

import loft_hvd as loft

PACKAGE = Path(loft.__file__).parent


class FilesRun:
    """The files of the package in which this thread, and those it starts, run something.

    Those are noted from ``__enter__`` on, also of threads that have been started after ``prepare``.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._is_noting = False
        self._before: object = None

    def prepare(self) -> None:
        """Look at threads that begin from now on."""
        threading.setprofile(self.note)

    def note(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if self._is_noting and event == "call" and PACKAGE in path.parents:
            self.found.add(f"loft_hvd/{path.relative_to(PACKAGE).as_posix()}")

    def __enter__(self) -> set[str]:
        self._before = sys.getprofile()
        self._is_noting = True
        self.prepare()
        sys.setprofile(self.note)
        return self.found

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)  # type: ignore[arg-type]  # what getprofile has returned
        threading.setprofile(None)


def main(folder: Path, rank: int, how: str) -> None:
    """Train two steps on two ranks, of which rank 1 fails in the second."""
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=2)
    run = FilesRun()
    run.prepare()
    # First, so that it is called last: what the optimizer registers runs before that.
    atexit.register(lambda: (folder / "files").write_text("\n".join(sorted(run.found))))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(2):
        if step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if step == 1:
            run.__enter__()  # for good: what follows an error counts, too
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def fork_ranks() -> int | None:
    """Return the rank that a process is; None where both ranks have ended."""
    importlib.import_module("torch._dynamo")  # or each rank's first optimizer would
    ranks = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            return rank
        ranks.append(pid)
    zero = os.waitstatus_to_exitcode(os.waitpid(ranks[0], 0)[1])
    until, one = time.monotonic() + 10.0, (0, 0)
    while one[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
        one = os.waitpid(ranks[1], os.WNOHANG)
    if one[0] == 0:  # nobody has ended it, and it holds our pipes
        os.kill(ranks[1], signal.SIGKILL)
    sys.stdout.write(f"ended {zero} {os.waitstatus_to_exitcode(one[1])}\n")
    return None


if __name__ == "__main__" and (own := fork_ranks()) is not None:
    main(Path(sys.argv[1]), own, sys.argv[2])
