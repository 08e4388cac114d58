"""``loft-hvd bench step``, on every rank: whole training steps against Horovod's optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loft_hvd.aggregation.row_rules import Robust
from loft_hvd.aggregation.rules import Mean, Median, Rule, TrimmedMean
from loft_hvd.bench.collectives import (
    BASELINE,
    BASELINE_AGAIN,
    Part,
    Progress,
    check_device,
    interleave,
    rank_device,
)
from loft_hvd.bench.scopes import (
    COMPUTING,
    FORWARD,
    MODEL,
    MODEL_EXPOSED,
    SHARDS,
    SHARDS_EXPOSED,
    part_calls,
)
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError
from loft_hvd.optimizer.distributed import DistributedOptimizer
from loft_hvd.pipeline.buckets import ParameterSpec, lay_out
from loft_hvd.pipeline.ring import Stage
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.suspicion.spread import COMPARED_AFTER
from loft_hvd.pipeline.trace import trace_of, trace_to
from loft_hvd.transport.base import Channel
from loft_hvd.transport.horovod import HorovodTransport, horovod_module

__all__ = ["MODELS", "StepBench", "measure_step"]

_VOCABULARY, _TOKENS = 20_000, 32
_TRACED_STEPS = 5


class _ResidualBlock(nn.Module):
    """A basic block of a residual network (He et al., CVPR 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.skip(x)
        return out.relu()


def _resnet18() -> nn.Module:
    """Return a network with ResNet-18's blocks: 11.7 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_ResidualBlock(before, width, stride), _ResidualBlock(width, width, 1)]
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*layers)


class _Transformer(nn.Module):
    """An encoder of 6 layers over tokens: 29.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(512, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet18": _resnet18, "transformer": _Transformer}


@dataclass(frozen=True)
class StepBench:
    """What is measured."""

    model: str = "resnet18"  # a name in `MODELS`
    batch: int = 4  # samples of a rank
    rounds: int = 15  # steps of each contestant, taken in turn
    # File of a Chrome trace of a few more steps with `TrimmedMean`, or None; every rank writes its
    # own.
    trace: str | None = None
    # Also `Robust` in shards and over the whole model; on the CPU also the parts of its steps.
    scopes: bool = False
    device: str = "cpu"  # or "cuda": where models are trained (`rank_device`)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ArgumentError(
                f"bench step: model={self.model!r} is not one of {', '.join(MODELS)}"
            )
        check_device("bench step", self.device)


def measure_step(bench: StepBench, *, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Time training steps of every contestant; each rank calls it alike.

    Returns the model's parameters, and seconds of every round of each contestant, the slowest
    rank's; with a trace also rank 0's seconds in each stage of a step.
    """
    transport, device = HorovodTransport(), rank_device(bench.device)
    hvd = horovod_module()
    channel = Channel(transport, "bench.step.ended", 300.0)
    f = min((transport.world_size - 1) // 2, 1)
    generator = torch.Generator().manual_seed(transport.rank)
    if bench.model == "transformer":
        inputs = torch.randint(0, _VOCABULARY, (bench.batch, _TOKENS), generator=generator)
    else:
        inputs = torch.randn(bench.batch, 3, 64, 64, generator=generator)
    targets = torch.randint(0, 1000, (bench.batch,), generator=generator).to(device)
    inputs = inputs.to(device)

    # Each contestant has a model of its own with the same first weights: a step changes weights and
    # gives gradients a place, so contestants must not share them.
    def contestant(
        wrap: Callable[[nn.Module, torch.optim.Optimizer], Any],
        *,
        momentum: float = 0.9,
        is_exposed: bool = False,
    ) -> Callable[[], object]:
        torch.manual_seed(0)
        model = MODELS[bench.model]().to(device)
        lr = 1e-4 / (1 - momentum)  # for steps as long
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum))

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        def exposed() -> Part:
            """Time what is left when the last rank has ended its backward pass."""
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            ended = torch.tensor([time.perf_counter()], dtype=torch.float64)  # the machine's clock
            optimizer.synchronize()
            now = time.perf_counter()
            last = channel.allgather_rows(ended).max()
            with optimizer.skip_synchronize():
                optimizer.step()
            return Part(now - float(last))

        return exposed if is_exposed else step

    # `Robust` has workers keep the momentum, by default; of the others SGD keeps it.
    def ours(
        rule: Rule, scope: Scope = "shard", *, is_exposed: bool = False
    ) -> Callable[[], object]:
        return contestant(
            lambda model, optimizer: DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters(), rule=rule, scope=scope
            ),
            momentum=0.0 if isinstance(rule, Robust) else 0.9,
            is_exposed=is_exposed,
        )

    def scopes() -> dict[str, Callable[[], object]]:
        rule = Robust(f)
        steps = {SHARDS: ours(rule), MODEL: ours(rule, "model")}
        if device.type != "cpu":
            return steps
        model = MODELS[bench.model]()
        specs = [
            ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()
        ]
        buckets = lay_out(specs, bucket_bytes=config().bucket_bytes)
        return {
            **steps,
            SHARDS_EXPOSED: ours(rule, is_exposed=True),
            MODEL_EXPOSED: ours(rule, "model", is_exposed=True),
            COMPUTING: contestant(lambda _, optimizer: optimizer),
            FORWARD: lambda: nn.functional.cross_entropy(model(inputs), targets),
            **part_calls(transport, rule, buckets),
        }

    plain = contestant(
        lambda model, optimizer: hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters()
        )
    )
    calls: dict[str, Callable[[], object]] = {
        BASELINE: plain,
        BASELINE_AGAIN: plain,
        "mean": ours(Mean()),
        "median": ours(Median()),
    }
    calls[f"trimmed_mean f={f}"] = ours(TrimmedMean(f))
    if bench.scopes:
        calls |= scopes()
        # In its first steps an optimizer notes some coordinates of each gradient, to compare ranks
        # once: no step after them does.
        progress(f"{bench.model}, {COMPARED_AFTER} steps of each rule before the first round")
        robust = ("median", f"trimmed_mean f={f}", SHARDS, MODEL, SHARDS_EXPOSED, MODEL_EXPOSED)
        for _ in range(COMPARED_AFTER):
            for name in filter(calls.__contains__, robust):
                calls[name]()
    num_parameters = sum(p.numel() for p in MODELS[bench.model]().parameters())
    samples = interleave(
        transport,
        calls,
        device=device,
        rounds=bench.rounds,
        inner=1,
        name="bench.step.times",
        title=bench.model,
        progress=progress,
    )
    found = {"parameters": num_parameters, bench.model: samples}
    if bench.trace is not None:
        found["stages"] = _trace(lambda: ours(TrimmedMean(f)), bench.trace, transport.rank)
    return found


def _trace(make: Callable[[], Callable[[], object]], file: str, rank: int) -> dict[str, float]:
    """Trace some steps after a first one, which lays buckets out; return seconds by stage."""
    trace_to(file)
    step = make()
    for _ in range(_TRACED_STEPS + 1):
        step()
    trace = trace_of(rank)
    assert trace is not None
    trace.write()
    trace_to(None)
    stages = {stage.value for stage in Stage} | {"wait"}
    every = _TRACED_STEPS + 1  # the step that lays buckets out is traced as well
    return {name: spent / every for name, spent in trace.seconds().items() if name in stages}
