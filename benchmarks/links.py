"""Robust all-reduces between hosts, against Horovod's and the line: run it on every host.

    horovodrun -H host0:1,host1:1,host2:1,host3:1 -np 4 python benchmarks/links.py --rate 1e9

On one machine, as root, with hosts that are network namespaces:

    export PATH=$PWD/.venv/bin:$PWD/tests/testbed:$PATH
    testbed up 4 --rate 1gbit
    testbed run python benchmarks/links.py --rate 1e9 --json FILE

Contestants are called in turn, every second round from last to first, and a sample is the slowest
rank's. Ratios are those of samples of one round, the median over rounds: a slow minute of the
machine falls on both. The line needs 2 (n-1)/n of the tensor's bytes at ``--rate``. Headers are not
among them, and take their part of a link: with frames of 1,514 bytes, of which TCP leaves 1,448 to
values, nobody who sends values as they are can have more than 95.6 % of the line; those that travel
compact do (``LOFT_HVD_COMPACT``). Bytes are those that a host's interfaces have sent
(/proc/net/dev, loopback left out), headers included; nothing else should use the network.
Linux only, one rank a host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.bench.record import write_record

Call = Callable[[], object]
HOROVOD = "hvd.allreduce"


def sent_bytes() -> int:
    """Return the bytes that this host's interfaces have sent so far, but for loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(words[9]) for words in fields if words[0] != "lo")


def finish(handle: int) -> Tensor:
    """Wait for Horovod without spinning: hosts may share cores."""
    while not hvd.poll(handle):
        time.sleep(100e-6)
    result: Tensor = hvd.synchronize(handle)
    return result


def contestants(numel: int) -> dict[str, Call]:
    """Return what is timed, by name; results are checked against each other first."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(hvd.rank()))
    rule = loft.TrimmedMean(f=1 if hvd.size() > 2 else 0)
    calls: dict[str, Call] = {
        HOROVOD: lambda: finish(hvd.allreduce_async(values, name="links.horovod"))
    }
    rows = finish(hvd.allgather_async(values[:4096].view(1, -1), name="links.rows"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = f"trimmed_mean {str(dtype).removeprefix('torch.')}"
        given = values.to(dtype)

        def call(given: Tensor = given, name: str = name) -> Tensor:
            return loft.allreduce(given, rule, name=name)

        expected = loft.aggregate(rows.to(dtype), rule)
        if not torch.equal(call()[:4096], expected):
            raise SystemExit(f"{name}: the result is wrong")
        calls[name] = call
    return calls


def measure(calls: dict[str, Call], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return by name seconds of the slowest rank and bytes out of a host, one a round."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for at in range(-1, rounds):  # one round to warm up
        turns = list(calls.items())
        for name, call in turns[::-1] if at % 2 else turns:
            finish(hvd.allreduce_async(torch.zeros(1), name="links.meet"))
            before, began = sent_bytes(), time.perf_counter()
            call()
            mine = torch.tensor([[time.perf_counter() - began, float(sent_bytes() - before)]])
            rows = finish(hvd.allgather_async(mine.double(), name="links.times"))
            if at >= 0:
                found[name][0].append(float(rows[:, 0].max()))
                found[name][1].append(float(rows[:, 1].max()))
    return found


def ratio(seconds: list[float], others: list[float]) -> float:
    """Return the median over rounds of what one took by what another did."""
    return statistics.median(one / other for one, other in zip(seconds, others, strict=True))


def main() -> None:
    """Measure, and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, required=True, help="bits a second of a host's link")
    parser.add_argument("--mb", default="25,100", help="megabytes of float32 values")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    results = []
    for megabytes in map(float, args.mb.split(",")):
        numel = int(megabytes * 1e6 / 4)
        found = measure(contestants(numel), args.rounds)
        line_s = 2 * (hvd.size() - 1) / hvd.size() * numel * 4 * 8 / args.rate
        for name, (seconds, num_bytes) in found.items():
            took_s = statistics.median(seconds)
            width = 0.5 if "16" in name else 1.0
            row = {
                "megabytes": megabytes,
                "contestant": name,
                "seconds": took_s,
                "of_line_rate": line_s * width / took_s,
                "over_horovod": ratio(seconds, found[HOROVOD][0]),
                "over_float32": ratio(seconds, found["trimmed_mean float32"][0]),
                "host_bytes": statistics.median(num_bytes),
                "all_seconds": seconds,
                "all_host_bytes": num_bytes,
            }
            results.append(row)
            if hvd.rank() == 0:
                print(  # noqa: T201 - a script that reports
                    f"{megabytes:6.0f} MB {name:24} {took_s * 1e3:8.1f} ms, "
                    f"{row['of_line_rate']:.1%} of line rate, {row['over_horovod']:.2f} x Horovod, "
                    f"{row['over_float32']:.2f} x float32, "
                    f"{statistics.median(num_bytes) / 1e6:7.2f} MB out of a host",
                    flush=True,
                )
    if args.json and hvd.rank() == 0:
        shape = {"ranks": hvd.size(), "bits_per_s": args.rate, "rounds": args.rounds}
        write_record(args.json, shape | {"results": results}, command=sys.argv)
    hvd.shutdown()


if __name__ == "__main__":
    main()
