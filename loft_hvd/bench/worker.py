"""One rank of a benchmark, started by ``ranks.py``: its arguments are WHAT and JSON options."""

from __future__ import annotations

import json
import sys

import torch

from loft_hvd.bench.collectives import AllreduceBench, measure_allreduce
from loft_hvd.bench.steps import StepBench, measure_step
from loft_hvd.transport.horovod import horovod_module

__all__ = ["MARK", "main"]

MARK = "loft_hvd bench: "


def main(arguments: list[str]) -> int:
    """Measure what the arguments ask for; rank 0 prints one line of JSON."""
    torch.set_num_threads(1)
    hvd = horovod_module()
    hvd.init()
    what, options = arguments[0], json.loads(arguments[1])
    if what == "allreduce":
        sizes = tuple(float(size) for size in options.pop("megabytes"))
        found = measure_allreduce(AllreduceBench(megabytes=sizes, **options))
    else:
        found = measure_step(StepBench(**options))
    if hvd.rank() == 0:
        sys.stdout.write(f"{MARK}{json.dumps(found)}\n")
        sys.stdout.flush()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
