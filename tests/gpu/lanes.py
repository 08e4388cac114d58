"""Lanes on the GPUs that are here: the bits of the CPU's lanes, and time against the bound.

    torchrun --nproc-per-node 4 -m tests.gpu.lanes bits --lane peer-memory
    torchrun --nproc-per-node 1 -m tests.gpu.lanes bits --lane device
    horovodrun -np 1 --gloo python -m tests.gpu.lanes bits --lane device --horovod
    torchrun --nproc-per-node 4 -m tests.gpu.lanes bound --json bound.json

Rank r computes on GPU r modulo their number; without a GPU, on the CPU. ``bits`` fails unless that
lane is taken, and every rule, dtype and scope gives the bits of the CPU's default lane. ``bound``
times ``TrimmedMean(1)`` of one tensor a rank against two copies of it on each rank's device, all at
once, and fails where it takes longer than ``_GOAL`` times that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation.rules import Rule
from loft_hvd.config import config
from loft_hvd.pipeline.buckets import Bucket, ParameterSpec, lay_out
from loft_hvd.pipeline.engine import Engine
from loft_hvd.pipeline.ring import Owners
from loft_hvd.pipeline.selection import Scope
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.lanes import Needs, choose_lane
from tests.support.worlds import environment

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((300, 7), (64,), (41,), (5003,))
_GOAL = 1.5  # times the bound
_STEPS = 3
_WARM_UPS = 3


def rules_of(num_ranks: int) -> list[tuple[Rule, Scope]]:
    """Return every kind of rule, with an f that so many ranks bear."""
    f = min((num_ranks - 1) // 2, 1)
    plain: list[Rule] = [
        loft.Mean(reproducible=True),
        loft.Median(),
        loft.TrimmedMean(f),
        loft.Phocas(f),
        loft.MeanAroundMedian(f),
        loft.Custom(lambda rows: rows.mean(dim=0)),
        loft.Robust(f),
    ]
    return [(rule, "shard") for rule in plain] + [(loft.Robust(f), "model")]


def device_here(rank: int) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def results(
    transport: Transport, device: str, rule: Rule, scope: Scope, dtype: torch.dtype
) -> Tensor:
    """Return the results of a few steps of an engine, as bytes on the CPU."""
    specs = [
        ParameterSpec(f"p{at}", shape, dtype, device=device) for at, shape in enumerate(SHAPES)
    ]
    random = torch.Generator().manual_seed(transport.rank)

    def pack(_: Bucket, values: Tensor) -> None:
        values.copy_(torch.randn(values.numel(), generator=random, dtype=torch.float64).to(dtype))

    buckets = lay_out(specs, bucket_bytes=1)
    channel = Channel(transport, "lanes", 60.0)
    engine = Engine(channel, buckets, [rule], pack=pack, owners=Owners(scope))
    found = []
    for _ in range(_STEPS):
        for at in range(len(buckets)):
            engine.start(at)
        engine.finish()
        found += [engine.values(at).clone() for at in range(len(buckets))]
    engine.close()
    return torch.cat([each.cpu().view(-1).view(torch.uint8) for each in found])


def check_bits(transport: Transport, device: str, lane: str, *, is_few: bool) -> None:
    """Compare with the CPU's lane; every rank says alike whether all is equal."""
    dtypes, rules = list(DTYPES), rules_of(transport.world_size)
    if is_few:  # under a sanitizer, which makes kernels hundreds of times slower
        dtypes, rules = dtypes[:1], rules[1:3]
    with environment(LOFT_HVD_LANE=lane):
        channel = Channel(transport, "lanes.asked", 60.0)
        taken = choose_lane(channel, Needs(device)).name
    if taken.replace(" ", "-") != lane:
        raise SystemExit(f"rank {transport.rank}: values on {device} take {taken}, not {lane}")
    for dtype in dtypes:
        for rule, scope in rules:
            plain = results(transport, "cpu", rule, scope, dtype)
            with environment(LOFT_HVD_LANE=lane):
                found = results(transport, device, rule, scope, dtype)
            is_equal = torch.tensor([torch.equal(plain, found)])
            equal = channel.sub("equal").allgather_rows(is_equal).flatten().tolist()
            if not all(equal):
                raise SystemExit(f"{rule} {scope} {dtype} by {lane}: equal on ranks {equal}")
    if transport.rank == 0:
        say(f"{transport.world_size} ranks on {where(device)} by {lane}: equal bits")


def measure_bound(
    transport: Transport, device: str, *, megabytes: float, rounds: int, path: Path | None
) -> float:
    """Return how long a trimmed mean takes, times the bound; medians of the slowest rank."""
    gate = Channel(transport, "lanes.gate", 60.0)
    random = torch.Generator().manual_seed(transport.rank)
    tensor = torch.randn(int(megabytes * 1e6 / 4), generator=random).to(device)
    first, second = torch.empty_like(tensor), torch.empty_like(tensor)
    rule = loft.TrimmedMean(1 if transport.world_size > 2 else 0)

    def settle() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def bound() -> None:
        first.copy_(tensor)
        second.copy_(first)

    def ours() -> None:
        loft.allreduce(tensor, rule, name="lanes.bound")

    taken: dict[str, list[float]] = {"bound": [], "ours": []}
    for number in range(_WARM_UPS + rounds):
        for name, call in (("bound", bound), ("ours", ours)):
            settle()
            gate.allgather_rows(torch.zeros(1))  # all begin at once
            began = time.perf_counter()
            call()
            settle()
            row = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            if number >= _WARM_UPS:
                taken[name].append(float(gate.sub("took").allgather_rows(row).max()))
            else:
                gate.sub("took").allgather_rows(row)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    found = {
        "what": f"TrimmedMean of {megabytes:g} MB by {transport.world_size} ranks",
        "device": where(device),
        "lane": choose_lane(gate, Needs(device, is_named=True)).name,
        "goal": _GOAL,
        "ratio": medians["ours"] / medians["bound"],
        **{f"{name}_s": seconds for name, seconds in medians.items()},
    }
    if transport.rank == 0:
        say(json.dumps(found))
        if path is not None:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return float(medians["ours"] / medians["bound"])


def where(device: str) -> str:
    return "the CPU" if device == "cpu" else torch.cuda.get_device_name(device)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a script that reports


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("bits", "bound"))
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--few", action="store_true", help="one dtype and two rules")
    parser.add_argument("--horovod", action="store_true", help="ranks are Horovod's")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.horovod:
        hvd = importlib.import_module("horovod.torch")
        hvd.init()
    else:
        is_alone = os.environ.get("WORLD_SIZE") == "1" and torch.cuda.is_available()
        dist.init_process_group("nccl" if is_alone else "gloo")  # NCCL wants a GPU a rank
    transport = default_transport()
    device = device_here(transport.rank)
    status = 0
    if given.what == "bits":
        check_bits(transport, device, given.lane, is_few=given.few)
    else:
        with environment(LOFT_HVD_LANE=given.lane):
            assert config().lane == given.lane
            ratio = measure_bound(
                transport,
                device,
                megabytes=given.megabytes,
                rounds=given.rounds,
                path=given.json,
            )
        status = int(ratio > _GOAL)
    if given.horovod:
        hvd.shutdown()
    else:
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
