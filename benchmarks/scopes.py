"""What ``Robust`` costs in a step between hosts, in shards and over the whole model.

On one machine, as root, with hosts that are network namespaces, one rank on each:

    export PATH=$PWD/.venv/bin:$PWD/tests/testbed:$PATH
    testbed up 4 --rate 1gbit
    testbed run python benchmarks/scopes.py --json FILE

As ``loft-hvd bench step --scopes``, where ranks share a host: there collectives cost CPU time, here
they wait for links. The formula is that of ``loft_hvd.bench.scopes``. When the last rank has ended
its backward pass is told by the machine's clock, so hosts that are other machines will not do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict

import horovod.torch as hvd
import torch

from loft_hvd.bench.collectives import BASELINE
from loft_hvd.bench.record import write_record
from loft_hvd.bench.scopes import cost_of
from loft_hvd.bench.steps import StepBench, measure_step


def main() -> None:
    """Measure, and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    bench = StepBench(batch=args.batch, rounds=args.rounds, scopes=True)
    samples = measure_step(bench)[bench.model]
    if hvd.rank() == 0:
        cost = cost_of(samples, next(name for name in samples if name.startswith("trimmed_mean")))
        took = {name: statistics.median(seconds) for name, seconds in samples.items()}
        for name, seconds in took.items():
            ratio = seconds / took[BASELINE]
            print(f"{name:32} {1e3 * seconds:8.1f} ms, {ratio:.2f} x {BASELINE}")  # noqa: T201
        print(  # noqa: T201 - a script that reports
            f"in shards: a step {cost.over_trimmed_mean:.2f} x TrimmedMean's; whole model: "
            f"{1e3 * cost.exposed_s:.1f} ms left after the backward pass, by formula "
            f"{1e3 * cost.exposed_formula_s:.1f} ms, ratio {cost.exposed_ratio:.2f}",
            flush=True,
        )
        if args.json:
            shape = {"ranks": hvd.size(), **asdict(bench)}
            found = {"scopes": asdict(cost), "ratio": cost.exposed_ratio, "seconds": samples}
            write_record(args.json, shape | found, command=sys.argv)
    hvd.shutdown()


if __name__ == "__main__":
    main()
