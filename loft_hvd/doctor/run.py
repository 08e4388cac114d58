"""``loft-hvd doctor --run``: two ranks do one robust all-reduce and agree that it is right.

The launched half is this module run by Python; the launching half counts what the ranks said.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from loft_hvd.aggregation.reference import reference
from loft_hvd.aggregation.rules import Median
from loft_hvd.doctor.inspect import HorovodBuild
from loft_hvd.doctor.launch import launch_command, run_limited
from loft_hvd.pipeline.allreduce import allreduce
from loft_hvd.transport.base import Channel
from loft_hvd.transport.horovod import HorovodTransport, horovod_module

__all__ = ["RunResult", "run_check"]

_RANKS = 2  # the fewest that exchange anything
_NUMEL = 1003  # a choice: odd, so that shards are unequal and padded
_RIGHT = "loft_hvd: the robust all-reduce is right on rank"


@dataclass(frozen=True)
class RunResult:
    """What the two ranks said."""

    is_right: bool  # every rank found the result equal to the reference and to the other ranks'
    command: tuple[str, ...]  # how they were started
    seconds: float  # how long it took
    output: str  # the end of what they printed


def run_check(build: HorovodBuild, *, timeout_s: float = 120.0) -> RunResult:
    """Start two ranks and say whether both found the result right; never longer than the limit."""
    command = launch_command(build, ("-m", "loft_hvd.doctor.run"), num_ranks=_RANKS)
    done = run_limited(command, timeout_s=timeout_s)
    is_right = done.is_over and all(
        f"{_RIGHT} {rank} of {_RANKS}" in done.output for rank in range(_RANKS)
    )
    last = "\n".join(done.output.splitlines()[-30:])
    return RunResult(is_right, command, done.seconds, last)


def _check_this_rank() -> str:
    """Reduce rows that every rank can make; return what is wrong with the result, or ""."""
    transport = HorovodTransport()
    generator = torch.Generator().manual_seed(20)
    rows = torch.randn(transport.world_size, _NUMEL, generator=generator)
    result = allreduce(rows[transport.rank], Median(), name="loft_hvd.doctor")
    expected = torch.from_numpy(reference(rows.numpy(), Median()))
    worst = float((result.double() - expected).abs().max())
    # Values of a few units in float32, and one average of two: 1e-6 is more than their rounding.
    if not worst <= 1e-6:  # this way round, NaN is wrong too
        return f"it differs from the reference by {worst:g}, more than 1e-6"
    bits = result.view(torch.int32)  # as integers: equal NaNs would not be equal as floats
    everyone = Channel(transport, "loft_hvd.doctor.bits", 30.0).allgather_rows(bits)
    return "" if bool((everyone == bits).all()) else "ranks do not hold the same bits"


def main() -> int:
    """Be one of the two ranks."""
    torch.set_num_threads(1)  # the ranks share this machine
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
