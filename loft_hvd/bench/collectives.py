"""``loft-hvd bench allreduce``, on every rank: robust all-reduces against Horovod's own."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.reference import reference
from loft_hvd.aggregation.rules import Mean, Median, Rule, TrimmedMean
from loft_hvd.bench.cuda import require_cuda
from loft_hvd.config import config
from loft_hvd.errors import AggregationError, ArgumentError
from loft_hvd.pipeline.allreduce import allreduce
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.horovod import (
    HorovodTransport,
    horovod_if_initialized,
    horovod_module,
)

__all__ = [
    "HOROVOD",
    "PEER",
    "AllreduceBench",
    "Progress",
    "TimedPart",
    "again",
    "check_device",
    "interleave",
    "measure_allreduce",
    "rank_device",
]

HOROVOD = "horovod"
PEER = "blocking, torch.median"
_CHECKED = 4096  # values of each result that are compared; the definition takes seconds for all
_WARM_UPS = 2  # buffers, and the layout of an optimizer's buckets
_SAMPLE_MB = 8.0  # smaller tensors are reduced several times in one sample


Progress = Callable[[str], None]  # told how far a bench is


@dataclass(frozen=True)
class TimedPart:
    """A call returns this to have a part of it timed alone."""

    seconds: float  # that the part took


@dataclass(frozen=True)
class AllreduceBench:
    """What is measured."""

    megabytes: tuple[float, ...] = (1.0, 4.0, 25.0, 100.0)  # sizes of the tensor, float32
    rounds: int = 15  # samples of each contestant, taken in turn
    # Also time the way research codes do it: a blocking exchange, torch.median, gather.
    has_peer: bool = False
    device: str = "cpu"  # or "cuda"; see `rank_device`

    def __post_init__(self) -> None:
        check_device("bench allreduce", self.device)
        # One value at least. This way round NaN is refused as well.
        if not all(4e-6 <= megabytes < math.inf for megabytes in self.megabytes):
            sizes = ", ".join(f"{size:g}" for size in self.megabytes)
            raise ArgumentError(
                f"bench allreduce: sizes of {sizes} MB; give numbers from 4e-6, which is one "
                "float32 value"
            )


def again(baseline: str) -> str:
    """Return the name of a baseline that is timed a second time: its noise."""
    return f"{baseline} again"


def check_device(what: str, device: str) -> None:
    """Raise unless a bench can run on a device here."""
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"{what}: device={device!r} is not one of cpu, cuda")
    if device == "cuda":
        require_cuda(what)


def rank_device(device: str) -> torch.device:
    """Return where this rank's tensors lie: for "cuda" on one of the machine's GPUs, in turn."""
    if device == "cpu":
        return torch.device("cpu")
    hvd = horovod_if_initialized()
    local_rank = config().rank if hvd is None else hvd.local_rank()  # torchrun's are all here
    found = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def measure_allreduce(
    bench: AllreduceBench, *, progress: Progress = lambda text: None
) -> dict[str, Any]:
    """Return by size in megabytes and contestant the seconds of every round, the slowest rank's."""
    transport, device = HorovodTransport(), rank_device(bench.device)
    # Two ranks bear no wrong row, so their trimmed mean has f = 0: a mean by the robust way.
    f = max((transport.world_size - 1) // 2, 0)
    rules: dict[str, Rule] = {
        "mean": Mean(),
        "median": Median(),
        f"trimmed_mean f={min(f, 1)}": TrimmedMean(min(f, 1)),
    }
    found = {}
    for megabytes in bench.megabytes:
        generator = torch.Generator().manual_seed(transport.rank)
        tensor = torch.randn(int(megabytes * 1e6 / 4), generator=generator).to(device)
        calls = _calls(tensor, rules, stem=f"bench.{megabytes:g}", has_peer=bench.has_peer)
        for name, rule in rules.items():
            _check(transport, tensor, calls[name](), rule)
        # Below 8 MB a sample would be a few cycles of Horovod (1 ms each), and mostly their phase.
        inner = max(1, round(_SAMPLE_MB / megabytes))
        found[f"{megabytes:g}"] = interleave(
            transport,
            calls,
            barrier=horovod_module().barrier,
            device=device,
            rounds=bench.rounds,
            inner=inner,
            name=f"bench.{megabytes:g}.times",
            title=f"{megabytes:g} MB",
            progress=progress,
        )
    return found


def interleave(
    transport: Transport,
    calls: dict[str, Callable[[], Any]],
    *,
    barrier: Callable[[], object],
    device: torch.device,
    rounds: int,
    inner: int,
    name: str,
    title: str,
    progress: Progress,
) -> dict[str, list[float]]:
    """Time calls in turn, the same ones on every rank; a sample is ``inner`` calls.

    It begins behind a ``barrier`` of all ranks, and ends when ``device`` has done all that was
    queued.

    With one call a sample, a call may return a ``TimedPart``, which is then the sample.

    ``progress`` is told of each tenth of the rounds, beside ``title``, while nothing is timed.

    Returns seconds of one call in every round, the slowest rank's, by name.
    """

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    order = list(calls)
    own: dict[str, list[float]] = {key: [] for key in order}
    for _ in range(_WARM_UPS):
        for call in calls.values():
            call()
    settle()
    # Another order each round, so that no call always runs behind the same one; seeded by the
    # round, because ranks that called in different orders would wait for each other for ever.
    for number in range(rounds):
        for key in random.Random(number).sample(order, len(order)):
            barrier()  # else a rank that is ahead would time its wait for the others
            began = time.perf_counter()
            found = [calls[key]() for _ in range(inner)]
            settle()
            took = (time.perf_counter() - began) / inner
            is_part = inner == 1 and isinstance(found[0], TimedPart)
            own[key].append(found[0].seconds if is_part else took)
        if (number + 1) * 10 // rounds > number * 10 // rounds:
            progress(f"{title}, {number + 1} of {rounds} rounds")
    # One row a rank, [contestants * rounds]. A collective takes as long as its slowest rank.
    row = torch.tensor([own[key] for key in order], dtype=torch.float64).view(-1)
    slowest = Channel(transport, name, 300.0).allgather_rows(row).amax(dim=0)
    return dict(zip(order, slowest.view(len(order), rounds).tolist(), strict=True))


def _calls(
    tensor: Tensor, rules: dict[str, Rule], *, stem: str, has_peer: bool
) -> dict[str, Callable[[], Tensor]]:
    hvd = horovod_module()

    def ours(name: str, rule: Rule) -> Callable[[], Tensor]:
        return lambda: allreduce(tensor, rule, name=f"{stem}.{name}")

    calls: dict[str, Callable[[], Tensor]] = {
        HOROVOD: lambda: hvd.allreduce(tensor, name=f"{stem}.h"),
        again(HOROVOD): lambda: hvd.allreduce(tensor, name=f"{stem}.h"),
    }
    calls |= {name: ours(name, rule) for name, rule in rules.items()}
    if has_peer:
        calls[PEER] = lambda: _blocking_median(tensor, stem)
    return calls


def _blocking_median(tensor: Tensor, stem: str) -> Tensor:
    """Exchange shards, sort, gather: each stage ends before the next begins."""
    hvd = horovod_module()
    world_size = hvd.size()
    shard = -(-tensor.numel() // world_size)  # equal shards: the last one is padded with zeros
    padded = tensor.new_zeros(world_size * shard)
    padded[: tensor.numel()] = tensor
    rows = hvd.alltoall(padded, name=f"{stem}.peer.a2a").view(world_size, shard)
    result: Tensor = hvd.allgather(rows.median(dim=0).values, name=f"{stem}.peer.ag")
    return result[: tensor.numel()]


def _check(transport: Transport, tensor: Tensor, result: Tensor, rule: Rule) -> None:
    """Compare a slice of a result with the rule's definition on everybody's rows."""
    kept = min(_CHECKED, tensor.numel())
    rows = Channel(transport, "bench.check", 300.0).allgather_rows(tensor[:kept].cpu())
    wanted = torch.from_numpy(reference(rows.numpy(), rule))
    worst = float((result[:kept].cpu().double() - wanted).abs().max()) if kept else 0.0
    if not worst <= 1e-6:
        raise AggregationError(
            f"bench: {rule} of {tensor.numel()} values differs from its definition by {worst:g}"
        )
