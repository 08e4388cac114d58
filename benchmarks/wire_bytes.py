"""Counts what all-reduces send out of each host, and times them: run it on ranks of several hosts.

    horovodrun -np 8 -H host0:4,host1:4 python benchmarks/wire_bytes.py --json FILE

One tensor is reduced by Horovod's own all-reduce, by a rule over all ranks, and in two levels, with
each wire format that is asked for, in turn. Bytes are those that the hosts' network interfaces have
sent (/proc/net/dev, loopback left out), headers and acknowledgements included, per reduction;
nothing else should use the network meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.bench.record import write_record

Step = Callable[[], object]


def sent_bytes() -> int:
    """Return the bytes that this host's interfaces have sent so far, but for loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(words[9]) for words in fields if words[0] != "lo")


def formula(kind: str, num_nodes: int, per_node: int) -> float:
    """Return the bytes that leave a node, over the bytes of the values that travel."""
    num_ranks = num_nodes * per_node
    if kind == "horovod":
        return 2 * (num_ranks - 1) / num_ranks
    if kind == "flat":
        return per_node * (num_ranks - per_node) / num_ranks + (num_ranks - 1) / num_ranks
    return 2 * (num_nodes - 1) / num_nodes


def finish(handle: int) -> torch.Tensor:
    """Wait for Horovod without spinning: many ranks may share few cores."""
    while not hvd.poll(handle):
        time.sleep(200e-6)
    result: torch.Tensor = hvd.synchronize(handle)
    return result


def meet() -> None:
    """Wait until every rank is here."""
    finish(hvd.allreduce_async(torch.zeros(1), name="meet"))


def horovod_step(numel: int) -> Step:
    """Return what sums a tensor by Horovod's own all-reduce."""
    values = torch.randn(numel)
    return lambda: finish(hvd.allreduce_async_(values, op=hvd.Average, name="horovod"))


def loft_step(numel: int, rule: loft.Rule, name: str, wire: str, over: str | None) -> Step:
    """Return what takes an optimizer's step on one parameter, all of it communication."""
    weight = torch.nn.Parameter(torch.zeros(numel))
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.0),
        [(name, weight)],
        compression=loft.Compression[wire],
        rule=rule,
        over=over,
        bucket_bytes=1 << 40,
        diagnostics=False,
    )
    row = torch.randn(numel)

    def step() -> None:
        (weight * row).sum().backward()
        optimizer.synchronize()
        optimizer.zero_grad(set_to_none=False)

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Take every step in turn; return seconds and bytes out of each host, one a round."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "host_bytes": []} for name in steps
    }
    for at in range(-2, rounds):  # two rounds to warm up
        for name, step in steps.items():
            meet()
            before, began = sent_bytes(), time.perf_counter()
            step()
            took = time.perf_counter() - began
            meet()
            mine = torch.tensor([float(sent_bytes() - before), took], dtype=torch.float64)
            rows = finish(hvd.allgather_async(mine.view(1, -1), name="measured"))
            if at >= 0:
                found[name]["seconds"].append(float(rows[:, 1].max()))
                found[name]["host_bytes"].append(float(rows[:, 0].max()))
    return found


def main() -> None:
    """Measure and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=float, default=16.0, help="megabytes of float32 values")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wires", default="none", help="such as none,bf16")
    parser.add_argument("--kinds", default="horovod,flat,two-level")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    logging.basicConfig()
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    num_nodes, per_node = hvd.cross_size(), hvd.local_size()
    numel = int(args.mb * 1e6 / 4) // (16 * hvd.size()) * 16 * hvd.size()
    steps: dict[str, Step] = {}
    for kind in args.kinds.split(","):
        if kind == "horovod":
            steps["horovod none"] = horovod_step(numel)
            continue
        over = "nodes" if kind == "two-level" else None
        for wire in args.wires.split(","):
            name = f"{kind} {wire}"
            steps[name] = loft_step(numel, loft.Median(), name, wire, over)
    found = measure(steps, args.rounds)
    rows: list[dict[str, Any]] = []
    for name, values in found.items():
        kind, wire = name.split()
        payload = numel * (4 if wire == "none" else 2)
        expected = formula(kind, num_nodes, per_node) * payload
        sent = statistics.median(values["host_bytes"])
        row = {
            "kind": kind,
            "wire": wire,
            "host_bytes": sent,
            "formula_bytes": expected,
            "ratio": sent / expected if expected else None,
            "seconds": statistics.median(values["seconds"]),
            "all_seconds": values["seconds"],
            "all_host_bytes": values["host_bytes"],
        }
        rows.append(row)
        if hvd.rank() == 0:
            print(  # noqa: T201 - a script that reports
                f"{name:16} {sent / 1e6:9.2f} MB out of a host, formula {expected / 1e6:9.2f} MB, "
                f"ratio {row['ratio']:.3f}, {row['seconds'] * 1e3:8.1f} ms",
                flush=True,
            )
    if args.json and hvd.rank() == 0:
        shape = {"num_nodes": num_nodes, "ranks_per_node": per_node, "values": numel}
        write_record(args.json, shape | {"results": rows}, command=sys.argv)
    hvd.shutdown()


if __name__ == "__main__":
    main()
