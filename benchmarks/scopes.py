"""What a step costs between hosts; what ``Robust`` does, in shards and over the whole model.

On one machine, as root, with hosts that are network namespaces, one rank on each:

    export PATH=$PWD/.venv/bin:$PWD/tests/testbed:$PATH
    testbed up 4 --rate 1gbit
    testbed run python benchmarks/scopes.py --json FILE

As ``loft-hvd bench step --scopes``, where ranks share a host: there collectives cost CPU time, here
they wait for links. The formula is that of ``loft_hvd.bench.scopes``. When the last rank has ended
its backward pass is told by the machine's clock, so hosts that are other machines will not do.
``--engine ddp`` as there: steps against plain ``DistributedDataParallel``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import horovod.torch as hvd
import torch

from loft_hvd.bench.collectives import HOROVOD
from loft_hvd.bench.models import MODELS
from loft_hvd.bench.ranks import judge, step_goal, table
from loft_hvd.bench.record import write_record
from loft_hvd.bench.scopes import cost_of
from loft_hvd.bench.steps import ENGINES, StepBench, measure_step


def main() -> None:
    """Measure, and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=list(ENGINES), default=HOROVOD)
    parser.add_argument("--model", choices=list(MODELS), default="resnet18")
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    bench = StepBench(
        args.model, args.batch, args.rounds, engine=args.engine, scopes=args.engine == HOROVOD
    )
    samples = measure_step(bench)[bench.model]
    if hvd.rank() == 0:
        report(bench, samples, args.json)
    hvd.shutdown()


def report(bench: StepBench, samples: dict[str, list[float]], json_file: str) -> None:
    """Print what steps took, and write it."""
    limits = {name: step_goal(name, bench) for name in samples}
    judged = judge(samples, limits, baseline=bench.engine)
    found: dict[str, Any] = {bench.model: judged, "seconds": samples}
    title = f"{bench.model}, {hvd.size()} hosts"
    for name, *cells in table(title, judged, baseline=bench.engine):
        print(f"{name:32}", *(f"{cell:>10}" for cell in cells))  # noqa: T201 - a script that reports
    if bench.scopes:
        cost = cost_of(samples, next(name for name in samples if name.startswith("trimmed_mean")))
        found |= {"scopes": asdict(cost), "ratio": cost.exposed_ratio}
        print(  # noqa: T201
            f"in shards: a step {cost.over_trimmed_mean:.2f} x TrimmedMean's; whole model: "
            f"{1e3 * cost.exposed_s:.1f} ms left after the backward pass, by formula "
            f"{1e3 * cost.exposed_formula_s:.1f} ms, ratio {cost.exposed_ratio:.2f}",
            flush=True,
        )
    if json_file:
        write_record(json_file, {"ranks": hvd.size(), **asdict(bench)} | found, command=sys.argv)


if __name__ == "__main__":
    main()
