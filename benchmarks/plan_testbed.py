"""A plan beside what its hosts then took: run it as root, with the test bed.

    python benchmarks/plan_testbed.py --json FILE [--runs calibrate,first,0123,012,...]

Four hosts that are network namespaces (tests/testbed) have links of 400, 400, 100 and 20 Mb/s, two
of them hold the data, and each computes at a pace of its own. Computing and reading are slept, so
that the machine's load does not matter: a sample from elsewhere takes as long as its bytes take on
the host's link. Gradients really cross the links. ``calibrate`` trains on all four from equal sizes
and leaves a run log; from it alone `loft-hvd plan` gets its models. ``first`` trains there once
more, from the plan's sizes. Each other run is a set of hosts, with the sizes planned for it, then
equal ones. What is in FILE and is not run anew stays there; models are of its ``calibrate``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from loft_hvd.bench.record import write_record
from loft_hvd.fleet.jobs import DataSet, Fleet, Host, Job
from loft_hvd.fleet.measured import with_logs
from loft_hvd.fleet.place import choose_hosts
from loft_hvd.fleet.rate import Prediction, predict
from loft_hvd.fleet.traffic import HostRanks, Layout
from tests.testbed.hosts import Testbed, why_not

LINKS_MBIT = (400, 400, 100, 20)
COMPUTE_S = (0.020, 0.020, 0.030, 0.060)  # a sample
SHARES = (0.6, 0.4, 0.0, 0.0)  # of the data
LOCAL_S, SAMPLE_BYTES, NUM_SAMPLES = 1e-3, 4e4, 48_000
BATCH, NUMEL = 64, 150_000
SETS = ("0123", "012", "013", "023", "01", "02", "12", "0")
FIRST, SETTLED, INTERVAL = 100, 20, 10  # steps
PLANNED, EQUAL, SKIPPED = 20, 10, 3  # steps of a set, and of each those that are not counted
JOB_S = 285.0


def fleet_of() -> Fleet:
    """Return the test bed as a file of machines would."""
    hosts = [
        Host(f"host{at}", {f"CPU host{at}": 1}, rate * 1e6 / 8)
        for at, rate in enumerate(LINKS_MBIT)
    ]
    total = NUM_SAMPLES * SAMPLE_BYTES
    homes = {f"host{at}": share * total for at, share in enumerate(SHARES) if share}
    return Fleet(hosts, data=[DataSet("made", NUM_SAMPLES, SAMPLE_BYTES, homes)])


def job_of(log: str) -> Job:
    """Return the job, whose models are of a run log."""
    words = ["python", "train.py"]
    sizes = {"global_batch_size": BATCH, "min_batch": 2}
    return Job("job", words, 4.0 * NUMEL, logs=[log], steps=1000, data="made", **sizes)  # type: ignore[arg-type]  # whole numbers


def layout_of(fleet: Fleet, hosts: str) -> Layout:
    """Return a rank on each host whose number is in a text."""
    taken = [fleet.hosts[int(number)] for number in hosts]
    return Layout.of([HostRanks(host, next(iter(host.slots)), 1) for host in taken])


def train(phases: Sequence[dict[str, Any]], log_dir: str | None) -> None:
    """Train as a rank, phase by phase; rank 0 prints the seconds of all steps."""
    import horovod.torch as hvd
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    import loft_hvd as loft

    hvd.init()
    torch.set_num_threads(1)
    me = int(socket.gethostname().removeprefix("host"))
    names = [f"host{at}" for at in hvd.allgather(torch.tensor([me]), name="hosts").tolist()]
    remote_s = LOCAL_S + SAMPLE_BYTES / (LINKS_MBIT[me] * 1e6 / 8)
    bounds = [0.0]
    for share in SHARES:
        bounds.append(bounds[-1] + share * NUM_SAMPLES)

    def home(index: int) -> int:
        return next(at for at, (low, high) in enumerate(pairwise(bounds)) if low <= index < high)

    def where(index: int) -> str:  # a host without a rank is a source from outside
        name = f"host{home(index)}"
        return f"node:{name}" if name in names else f"shared:{name}"

    class Samples(Dataset[Tensor]):
        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
            time.sleep(sum(LOCAL_S if home(at) == me else remote_s for at in indices))
            return [torch.ones(1)] * len(indices)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(NUMEL))

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(COMPUTE_S[me] * len(x))
            return self.weight.sum() * x.mean()

    placement = loft.Placement.from_function(where, NUM_SAMPLES, nodes=names)
    for phase in phases:
        model = Model()
        balancer = loft.Balancer(
            BATCH,
            phase["policy"],
            first_sizes=phase.get("first_sizes"),
            interval=INTERVAL,
            log_dir=log_dir,
        )
        loader = loft.DataLoader(Samples(), balancer, placement=placement)
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-6),
            model.named_parameters(),
            balancer=balancer,
        )
        ends = [time.monotonic()]
        for _, x in zip(range(phase["steps"]), loader, strict=False):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            ends.append(time.monotonic())
        if hvd.rank() == 0:
            found = {
                "seconds": [late - early for early, late in pairwise(ends)],
                "sizes": list(balancer.plan.sizes),
            }
            print(f"PHASE {json.dumps(found)}", flush=True)  # noqa: T201 - a script that reports
    hvd.shutdown()


def run(
    bed: Testbed, layout: Layout, phases: Sequence[dict[str, Any]], *, log_dir: str = ""
) -> list[dict[str, Any]]:
    """Train on hosts; return what each phase took."""
    bed.up(len(LINKS_MBIT), "--rate", ",".join(f"{rate}mbit" for rate in LINKS_MBIT))
    names = [host.name for host, _ in layout.hosts]
    hosts = ",".join(f"{name}:1" for name in names)
    words = ["horovodrun", "--gloo", "-np", str(len(names)), "-H", hosts, sys.executable, __file__]
    told = bed.tell(
        *("exec", names[0], *words, "--train", json.dumps(phases), "--log-dir", log_dir),
        timeout_s=JOB_S,
    )
    found = [json.loads(each) for each in re.findall(r"PHASE (\{.*\})", told)]
    if len(found) != len(phases):
        raise SystemExit(told[-4000:])
    return found


def usual(seconds: Sequence[float]) -> float:
    """Return the median, without the first steps."""
    return statistics.median(seconds[SKIPPED:])


def measure(bed: Testbed, name: str, log: Path) -> dict[str, Any]:
    """Return one run's figures, as the plan has them and as they were."""
    fleet = fleet_of()
    if name == "calibrate":
        shutil.rmtree(log, ignore_errors=True)
        phases = [{"policy": "loft", "steps": FIRST + SETTLED}]
        (found,) = run(bed, layout_of(fleet, "0123"), phases, log_dir=str(log))
        return _start(found)
    job, origins = with_logs(fleet, job_of(str(log)), now_s=time.time(), assume=True)
    layout = layout_of(fleet, "0123" if name == "first" else name)
    planned = predict(fleet, job, layout)
    if name == "first":
        phases = [{"policy": "loft", "first_sizes": list(planned.sizes), "steps": FIRST + SETTLED}]
        (found,) = run(bed, layout, phases)
        return _start(found) | {"planned": _said(planned)}
    parts = [
        BATCH // layout.world_size + (at < BATCH % layout.world_size) for at in range(len(name))
    ]
    equal = predict(fleet, job, layout, sizes=tuple(parts))
    phases = [
        {"policy": list(planned.sizes), "steps": PLANNED},
        {"policy": parts, "steps": EQUAL},
    ]
    taken = run(bed, layout, phases)
    best = choose_hosts(fleet, replace(job, logs=[])).best
    return {
        "planned": _said(planned) | {"took_s": usual(taken[0]["seconds"])},
        "equal": _said(equal) | {"took_s": usual(taken[1]["seconds"])},
        "seconds": [each["seconds"] for each in taken],
        "recommended": "".join(host.name[-1] for host, _ in best.layout.hosts),
        "models": {device: origin.text for device, origin in origins.items()},
    }


def _start(found: dict[str, Any]) -> dict[str, Any]:
    """Return the first steps of a training beside its settled ones."""
    seconds = found["seconds"]
    settled_s = statistics.median(seconds[FIRST:])
    return {
        "first_s": statistics.mean(seconds[:FIRST]),
        "first_median_s": statistics.median(seconds[:FIRST]),
        "settled_s": settled_s,
        "first_over_settled": statistics.mean(seconds[:FIRST]) / settled_s,
        "sizes": found["sizes"],
        "seconds": seconds,
    }


def _said(found: Prediction) -> dict[str, Any]:
    return {
        "sizes": list(found.sizes),
        "predicted_s": found.step_s,
        "exchange_s": found.exchange.exposed_s,
    }


def summary(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Say how far off plans were, and how good the recommended hosts are."""
    lines = []
    for name in ("calibrate", "first"):
        if name in runs:
            lines.append(
                f"{name:>9}: first {FIRST} steps {1e3 * runs[name]['first_s']:.0f} ms (median "
                f"{1e3 * runs[name]['first_median_s']:.0f}), settled "
                f"{1e3 * runs[name]['settled_s']:.0f} ms"
            )
    sets = {name: each for name, each in runs.items() if name in SETS}
    for name, each in sets.items():
        for sizes in ("planned", "equal"):
            one = each[sizes]
            lines.append(
                f"{name:>9}: {sizes:7} sizes {one['sizes']}: predicted "
                f"{1e3 * one['predicted_s']:.0f} ms, took {1e3 * one['took_s']:.0f} ms "
                f"({one['predicted_s'] / one['took_s'] - 1:+.1%})"
            )
    if sets:
        took = {name: each["planned"]["took_s"] for name, each in sets.items()}
        best = next(iter(sets.values()))["recommended"]
        fastest = min(took, key=lambda name: took[name])
        if best in took:
            lines.append(
                f"recommended {best}: {took[best] / took[fastest]:.3f} times the step of the "
                f"fastest of {len(took)} sets, {fastest}"
            )
    return lines


def main() -> None:
    """Run, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", default=",".join(("calibrate", "first", *SETS)))
    parser.add_argument("--json", default="")
    parser.add_argument("--log", default="", help="folder of the run log; beside FILE")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--log-dir", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(json.loads(args.train), args.log_dir or None)
        return
    if reason := why_not():
        raise SystemExit(reason)
    runs: dict[str, dict[str, Any]] = {}
    if args.json and Path(args.json).exists():
        runs = json.loads(Path(args.json).read_text(encoding="utf-8"))["runs"]
    log = Path(args.log or f"{args.json or 'build/plan_testbed'}.log").resolve()
    bed = Testbed(f"plan{os.getpid()}")
    try:
        for name in args.runs.split(","):
            runs[name] = measure(bed, name, log)
            if args.json:
                write_record(args.json, {"runs": runs, "summary": summary(runs)}, command=sys.argv)
    finally:
        bed.down()
    print("\n".join(summary(runs)))  # noqa: T201 - a script that reports


if __name__ == "__main__":
    main()
