"""All-reduces over long and lossy links, by kind of connection: run it as root, with the test bed.

    python benchmarks/long_links.py --cells 50:1,50:0,1:0 --ways off,auto,8 --json FILE

For each cell, milliseconds there and back and percent of packets lost each way, hosts that are
network namespaces with links of 100 Mb/s (tests/testbed); on them, by turns, a job for each way:
LOFT_HVD_LINKS, of which "off" is the kernel's cubic on one connection; or "tolerant" or "reliable",
datagrams of which rows may lose some, or none; or "aioquic", a mean whose rows travel in QUIC's
datagrams (quic_ranks.py; with build/peers on PYTHONPATH). A job times `hvd.allreduce`, a plain mean
and a trimmed mean of the same tensor; a sample is the slowest rank's, the first of each is left
out. "off" is measured twice a round: what one gives over the other is noise. What is in FILE and is
not measured anew stays there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from loft_hvd.bench.record import write_record
from tests.testbed.hosts import Testbed, why_not

HOROVOD = "hvd.allreduce"
JOB_S = 400.0
GATHERS = ("tolerant", "reliable", "aioquic")


def job(megabytes: float, calls: int, *, with_horovod: bool, gather: str) -> None:
    """Time all-reduces in a rank; rank 0 prints the slowest rank's seconds by contestant."""
    import horovod.torch as hvd
    import torch
    from torch import Tensor

    import loft_hvd as loft

    hvd.init()
    torch.set_num_threads(1)
    numel = int(megabytes * 1e6 / 4)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(hvd.rank()))
    others = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for rank in range(hvd.size())
    ]

    def finish(handle: int) -> Tensor:
        while not hvd.poll(handle):  # without spinning: hosts may share cores
            time.sleep(100e-6)
        result: Tensor = hvd.synchronize(handle)
        return result

    contestants: dict[str, tuple[Callable[[], Tensor], Tensor]] = {}
    if with_horovod:
        mean = torch.stack(others).mean(0)
        contestants[HOROVOD] = (
            lambda: finish(hvd.allreduce_async(values, name="long.horovod")),
            mean,
        )
    gathers = {
        "": None,
        "tolerant": loft.LossTolerant(),
        "reliable": loft.LossTolerant(reliable=True),
    }
    rules: tuple[loft.Rule, ...] = (loft.Mean(), loft.TrimmedMean(f=1))
    if gather == "aioquic":
        from benchmarks.quic_ranks import QuicRanks

        place = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
        every = hvd.allgather(torch.tensor([list(place)]), name="long.places").tolist()
        quic = QuicRanks(hvd.rank(), [socket.inet_ntoa(bytes(each)) for each in every])
        contestants["mean"] = (
            lambda: torch.from_numpy(quic.mean(values.numpy())),
            torch.stack(others).mean(0),
        )
        rules = ()
    how = gathers.get(gather)
    for rule in rules:
        due = loft.aggregate(torch.stack(others), rule)
        contestants[str(rule)] = (
            lambda rule=rule: loft.allreduce(values, rule, name=f"long.{rule}", gather=how),
            due,
        )
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(calls + 1):
        for name, (call, due) in contestants.items():
            finish(hvd.allreduce_async(torch.zeros(1), name="long.meet"))
            began = time.perf_counter()
            result = call()
            mine = torch.tensor([[time.perf_counter() - began]], dtype=torch.float64)
            if gather in ("tolerant", "aioquic"):  # right where all has come, the same everywhere
                off = (result - due).abs() > 1e-5
                assert off.float().mean() < 0.3, off.float().mean()
                bits = hvd.allgather(result.view(torch.int32).sum().view(1), name="long.bits")
                assert len(set(bits.tolist())) == 1, bits
            else:
                torch.testing.assert_close(result, due)
            slowest = float(finish(hvd.allgather_async(mine, name="long.times")).max())
            if at > 0:
                found[name].append(slowest)
    if hvd.rank() == 0:
        print(f"SECONDS {json.dumps(found)}", flush=True)  # noqa: T201 - a script that reports
    hvd.shutdown()


def measure(bed: Testbed, cell: str, ways: Sequence[str], args: Any) -> dict[str, Any]:
    """Return all samples of a cell, by way and contestant."""
    round_trip_ms, lost_percent = map(float, cell.split(":"))
    # There and back takes a relay four times, and one way two of them.
    far = ["--delay", f"{round_trip_ms / 4}ms"] if round_trip_ms else []
    lossy = ["--loss", f"{lost_percent / 2}%"] if lost_percent else []
    bed.up(args.hosts, "--rate", args.rate, *far, *lossy)
    samples: dict[str, list[float]] = {}
    turns = [(way, way) for way in ways] + ([("off again", "off")] if args.again else [])
    for _, (key, way) in product(range(args.rounds), turns):
        words = [__file__, "--job", str(int(key == "off" and args.horovod)), "--mb", str(args.mb)]
        done = bed.run(
            [*words, "--calls", str(args.calls), "--gather", way if way in GATHERS else ""],
            timeout_s=JOB_S,
            env={
                "LOFT_HVD_LINKS": "auto" if way in GATHERS else way,
                "LOFT_HVD_TIMEOUT_S": "200",
            },
        )
        told = re.search(r"SECONDS (\{.*\})", done.output)
        if told is None:
            raise SystemExit(f"{cell}, {way}: {done.output[-4000:]}")
        for name, seconds in json.loads(told[1]).items():
            samples.setdefault(f"{key}: {name}", []).extend(seconds)
    return {"round_trip_ms": round_trip_ms, "lost_percent": lost_percent, "seconds": samples}


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", default="50:1,50:0.1,50:0,10:1,1:0")
    parser.add_argument("--ways", default="off,auto,8")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--mb", type=float, default=6.0, help="megabytes of float32 values")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--calls", type=int, default=5, help="of each contestant in a job")
    parser.add_argument("--no-horovod", dest="horovod", action="store_false")
    parser.add_argument("--no-again", dest="again", action="store_false", help="no row of noise")
    parser.add_argument("--json", default="")
    parser.add_argument("--gather", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        job(args.mb, args.calls, with_horovod=args.job == "1", gather=args.gather)
        return
    if reason := why_not():
        raise SystemExit(reason)
    # Hosts are taken down, too, where this process is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    bed = Testbed(f"long{os.getpid()}")
    kept: dict[tuple[float, float], dict[str, Any]] = {}
    if args.json and Path(args.json).exists():
        read = json.loads(Path(args.json).read_text(encoding="utf-8"))["cells"]
        kept = {(each["lost_percent"], each["round_trip_ms"]): each for each in read}
    try:
        for cell in args.cells.split(","):
            found = measure(bed, cell, args.ways.split(","), args)
            place = found["lost_percent"], found["round_trip_ms"]
            seconds = kept.get(place, {}).get("seconds", {}) | found["seconds"]
            kept[place] = found | {"seconds": seconds}
            medians = {name: statistics.median(each) for name, each in found["seconds"].items()}
            for name, seconds in medians.items():
                samples = found["seconds"][name]
                print(  # noqa: T201 - a script that reports
                    f"{cell:>8} {name:32} {seconds:7.2f} s, most {max(samples):.2f}", flush=True
                )
            if args.json:
                shape = {"hosts": args.hosts, "rate": args.rate, "megabytes": args.mb}
                cells = [kept[place] for place in sorted(kept)]
                write_record(args.json, shape | {"cells": cells}, command=sys.argv)
    finally:
        bed.down()


if __name__ == "__main__":
    main()
