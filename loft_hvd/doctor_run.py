"""``loft-hvd doctor --run``: two ranks do one robust all-reduce and agree that it is right.

The launched half is this module run by Python; the launching half counts what the ranks said.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from loft_hvd.aggregation.reference import reference
from loft_hvd.aggregation.rules import Median
from loft_hvd.doctor import HorovodBuild, launcher
from loft_hvd.errors import MissingDependencyError
from loft_hvd.pipeline.allreduce import allreduce
from loft_hvd.transport.base import allgather_rows
from loft_hvd.transport.horovod import HorovodTransport, horovod_module

__all__ = ["RunResult", "launch_command", "run_check"]

_RANKS = 2
_NUMEL = 1003
_RIGHT = "loft_hvd: the robust all-reduce is right on rank"


@dataclass(frozen=True)
class RunResult:
    """What the two ranks said.

    Attributes:
        is_right: every rank found the result equal to the reference and to the other ranks'.
        command: how they were started.
        seconds: how long it took.
        output: the end of what they printed.
    """

    is_right: bool
    command: tuple[str, ...]
    seconds: float
    output: str


def launch_command(build: HorovodBuild, *, is_root: bool) -> tuple[str, ...]:
    """Return the command that starts the ranks: horovodrun with Gloo, else mpirun.

    Raises:
        MissingDependencyError: Horovod has no controller that a launcher here can start.
    """
    script = (sys.executable, "-m", "loft_hvd.doctor_run")
    horovodrun, mpirun = launcher("horovodrun"), launcher("mpirun")
    if "Gloo" in build.controllers and horovodrun:
        return (horovodrun, "-np", str(_RANKS), "--gloo", *script)
    if "MPI" in build.controllers and mpirun:
        root = ("--allow-run-as-root",) if is_root else ()
        return (mpirun, *root, "--oversubscribe", "-np", str(_RANKS), *script)
    raise MissingDependencyError(
        f"doctor --run needs horovodrun with Gloo, or mpirun with MPI; Horovod here has "
        f"{', '.join(build.controllers) or 'neither'} {build.trouble}: run `make setup`"
    )


def run_check(build: HorovodBuild, *, timeout_s: float = 120.0) -> RunResult:
    """Start two ranks and say whether both found the result right; never longer than the limit.

    Args:
        build: what the installed Horovod was built with.
        timeout_s: longest wait in seconds; everything that was started is ended then.

    Raises:
        MissingDependencyError: there is nothing to start them with.
    """
    command = launch_command(build, is_root=os.geteuid() == 0)
    start_s = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own, so that all of it can be ended
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = f"{process.communicate()[0]}\nnot done within {timeout_s:g} s; ended"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    is_right = process.returncode == 0 and all(
        f"{_RIGHT} {rank} of {_RANKS}" in output for rank in range(_RANKS)
    )
    spent_s = time.monotonic() - start_s
    return RunResult(is_right, tuple(command), spent_s, "\n".join(output.splitlines()[-30:]))


def _check_this_rank() -> str:
    """Reduce rows that every rank can make; return what is wrong with the result, or ""."""
    transport = HorovodTransport()
    generator = torch.Generator().manual_seed(20)
    rows = torch.randn(transport.world_size, _NUMEL, generator=generator)
    result = allreduce(rows[transport.rank], Median(), name="loft_hvd.doctor")
    expected = torch.from_numpy(reference(rows.numpy(), Median()))
    worst = float((result.double() - expected).abs().max())
    if not worst <= 1e-6:
        return f"it differs from the reference by {worst:g}, more than 1e-6"
    bits = result.view(torch.int32)
    everyone = allgather_rows(transport, bits, name="loft_hvd.doctor.bits", timeout_s=30.0)
    return "" if bool((everyone == bits).all()) else "ranks do not hold the same bits"


def main() -> int:
    """Be one of the two ranks."""
    torch.set_num_threads(1)
    hvd = horovod_module()
    hvd.init()
    wrong = _check_this_rank()
    place = f"{hvd.rank()} of {hvd.size()}"
    sys.stdout.write(f"wrong on rank {place}: {wrong}\n" if wrong else f"{_RIGHT} {place}\n")
    sys.stdout.flush()
    hvd.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
