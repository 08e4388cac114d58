"""``loft-hvd bench step``, on every rank: training steps against what a user would pick instead.

That is Horovod's optimizer, plain ``DistributedDataParallel``, or plain FSDP2. Against the last two
our hook is timed, and beside DDP in the same job, where Horovod has started its ranks, Horovod's
optimizer and ours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loft_hvd.aggregation.row_rules import Robust
from loft_hvd.aggregation.rules import Mean, Median, Rule, TrimmedMean
from loft_hvd.bench.collectives import (
    HOROVOD,
    Progress,
    TimedPart,
    again,
    check_device,
    interleave,
    rank_device,
)
from loft_hvd.bench.models import MODELS, random_inputs, random_targets
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
from loft_hvd.optimizer.ddp import ddp_hook
from loft_hvd.optimizer.distributed import DistributedOptimizer
from loft_hvd.optimizer.fsdp import fsdp_hook
from loft_hvd.pipeline.buckets import ParameterSpec, lay_out
from loft_hvd.pipeline.ring import Stage
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.suspicion.spread import COMPARED_AFTER
from loft_hvd.pipeline.trace import trace_of, trace_to
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.horovod import horovod_if_initialized, horovod_module

__all__ = ["DDP", "ENGINES", "FSDP", "StepBench", "measure_step"]

DDP, FSDP = "ddp", "fsdp"
# What steps are compared with, and how many steps a contestant takes in its turn. Against torch's
# several, as the first finds its memory out of the caches; with one a part is timed (`TimedPart`).
ENGINES = {HOROVOD: 1, DDP: 5, FSDP: 5}
_TRACED_STEPS = 5


@dataclass(frozen=True)
class StepBench:
    """What is measured."""

    model: str = "resnet18"  # a name in `MODELS`
    batch: int = 4  # samples of a rank
    rounds: int = 15  # turns of each contestant
    # File of a Chrome trace of a few more steps with `TrimmedMean`, or None; every rank writes its
    # own.
    trace: str | None = None
    # Also `Robust` in shards and over the whole model; on the CPU also the parts of its steps.
    scopes: bool = False
    device: str = "cpu"  # or "cuda": where models are trained (`rank_device`)
    engine: str = HOROVOD  # a name in `ENGINES`
    # Steps of robust contestants before the first round, under torch's engines and with `scopes`:
    # in so many an optimizer notes some coordinates of each gradient, to compare ranks once; later
    # ones do not.
    steps_before: int = COMPARED_AFTER

    def __post_init__(self) -> None:
        for option, allowed in (("model", MODELS), ("engine", ENGINES)):
            if (given := getattr(self, option)) not in allowed:
                raise ArgumentError(
                    f"bench step: {option}={given!r} is not one of {', '.join(allowed)}"
                )
        if self.engine != HOROVOD and (self.scopes or self.trace is not None):
            raise ArgumentError(
                f"bench step: scopes={self.scopes} and trace={self.trace!r} go with "
                f"engine={HOROVOD!r}, not with {self.engine!r}"
            )
        check_device("bench step", self.device)


@dataclass(frozen=True)
class _Training:
    """A contestant: its model, its optimizer, and this rank's batch."""

    model: nn.Module
    optimizer: Any  # torch's, Horovod's or ours
    inputs: Tensor
    targets: Tensor

    def forward(self) -> Tensor:
        return nn.functional.cross_entropy(self.model(self.inputs), self.targets)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def exposed(self, channel: Channel) -> TimedPart:
        """Time what is left when the last rank has ended its backward pass."""
        self.backward()
        ended = torch.tensor([time.perf_counter()], dtype=torch.float64)  # the machine's clock
        self.optimizer.synchronize()
        now = time.perf_counter()
        last = channel.allgather_rows(ended).max()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return TimedPart(now - float(last))


class _Contestants:
    """Makes what is timed. Each has a model of its own with the same first weights.

    A step changes weights and gives gradients a place, so contestants must not share them.

    Attributes:
        robust: those with another rule than the mean.
    """

    def __init__(self, bench: StepBench, device: torch.device, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self._make = MODELS[bench.model]
        self._device = device
        self._inputs = random_inputs(bench.model, bench.batch, generator).to(device)
        self._targets = random_targets(bench.batch, generator).to(device)
        self.robust: list[_Training] = []

    def alone(self, rule: Rule | None = None) -> _Training:
        """Return a training of this rank for itself, as one that aggregates by a rule begins."""
        # `Robust` has workers keep the momentum, by default; of the others SGD keeps it.
        momentum = 0.0 if isinstance(rule, Robust) else 0.9
        torch.manual_seed(0)
        model = self._make().to(self._device)
        lr = 1e-4 / (1 - momentum)  # for steps as long
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        return _Training(model, optimizer, self._inputs, self._targets)

    def horovod(self) -> _Training:
        """Return a training by ``hvd.DistributedOptimizer``."""
        found, wrap = self.alone(), horovod_module().DistributedOptimizer
        named = found.model.named_parameters()
        return replace(found, optimizer=wrap(found.optimizer, named_parameters=named))

    def ours(self, rule: Rule, scope: Scope = "shard") -> _Training:
        """Return a training by ``loft.DistributedOptimizer``."""
        found = self.alone(rule)
        named = found.model.named_parameters()
        optimizer = DistributedOptimizer(found.optimizer, named, rule=rule, scope=scope)
        return self._noted(replace(found, optimizer=optimizer), rule)

    def ddp(self) -> _Training:
        """Return a training under plain ``DistributedDataParallel``."""
        found = self.alone()
        return replace(found, model=DistributedDataParallel(found.model))

    def hook(self, rule: Rule) -> _Training:
        """Return a training under ``DistributedDataParallel`` with ``loft.ddp_hook``."""
        found = self.alone(rule)
        model = DistributedDataParallel(found.model)
        model.register_comm_hook(None, ddp_hook(rule, scope="shard"))
        return self._noted(replace(found, model=model), rule)

    def fsdp(self, rule: Rule | None = None) -> _Training:
        """Return a training under FSDP2, its modules sharded one by one; plain without a rule."""
        from torch.distributed.fsdp import fully_shard

        found = self.alone(rule)
        for module in [*found.model.children(), found.model]:
            fully_shard(module)
        if rule is None:
            return found
        fsdp_hook(found.model, rule)
        return self._noted(found, rule)

    def _noted(self, found: _Training, rule: Rule) -> _Training:
        if not isinstance(rule, Mean):
            self.robust.append(found)
        return found


def measure_step(bench: StepBench, *, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Time training steps of every contestant; each rank calls it alike.

    Horovod is initialised; or torchrun has started the ranks, and only torch's contestants train.

    Returns the model's parameters, and seconds of a step in every round of each contestant, the
    slowest rank's; with a trace also rank 0's seconds in each stage of a step.
    """
    device = rank_device(bench.device)
    if bench.engine == HOROVOD:
        return _measure(bench, device, horovod_module().barrier, progress)
    with _process_group(device):
        return _measure(bench, device, dist.barrier, progress)


@contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """Open torch's process group for a while: of torchrun's ranks, or beside Horovod's."""
    hvd = horovod_if_initialized()
    world_size = config().ranks if hvd is None else hvd.size()
    options: dict[str, Any] = {"backend": "gloo"}
    # NCCL refuses two ranks on one GPU.
    if device.type == "cuda" and world_size <= torch.cuda.device_count():
        options = {"backend": "nccl", "device_id": device}
    if hvd is None:
        dist.init_process_group(**options)
        yield
        dist.destroy_process_group()
        return
    # Horovod's ranks find each other by a file of rank 0's: they are on one machine.
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{hvd.broadcast_object(str(Path(folder, 'ranks')))}"
        dist.init_process_group(
            **options, init_method=place, rank=hvd.rank(), world_size=world_size
        )
        yield
        dist.destroy_process_group()
        hvd.barrier()  # nobody reads the file any more


def _measure(
    bench: StepBench, device: torch.device, barrier: Callable[[], object], progress: Progress
) -> dict[str, Any]:
    transport = default_transport()
    contestants = _Contestants(bench, device, transport.rank)
    f = min((transport.world_size - 1) // 2, 1)
    against = {HOROVOD: _against_horovod, DDP: _against_ddp, FSDP: _against_fsdp}
    calls = against[bench.engine](contestants, f)
    if bench.scopes:
        calls |= _scopes(bench, contestants, Robust(f), transport)
    if bench.scopes or bench.engine != HOROVOD:
        progress(f"{bench.model}, {bench.steps_before} steps of each rule before the first round")
        for _ in range(bench.steps_before):
            for training in contestants.robust:
                training.step()
    samples = interleave(
        transport,
        calls,
        barrier=barrier,
        device=device,
        rounds=bench.rounds,
        inner=ENGINES[bench.engine],
        name="bench.step.times",
        title=bench.model,
        progress=progress,
    )
    num_parameters = sum(p.numel() for p in MODELS[bench.model]().parameters())
    found = {"parameters": num_parameters, bench.model: samples}
    if bench.trace is not None:
        found["stages"] = _trace(
            lambda: contestants.ours(TrimmedMean(f)), bench.trace, transport.rank
        )
    return found


def _against_horovod(contestants: _Contestants, f: int) -> dict[str, Callable[[], object]]:
    plain = contestants.horovod().step
    return {
        HOROVOD: plain,
        again(HOROVOD): plain,
        "mean": contestants.ours(Mean()).step,
        "median": contestants.ours(Median()).step,
        f"trimmed_mean f={f}": contestants.ours(TrimmedMean(f)).step,
    }


def _rules(f: int) -> dict[str, Rule]:
    return {"mean": Mean(), f"trimmed_mean f={f}": TrimmedMean(f), f"robust f={f}": Robust(f)}


def _against_fsdp(contestants: _Contestants, f: int) -> dict[str, Callable[[], object]]:
    plain = contestants.fsdp().step
    calls: dict[str, Callable[[], object]] = {FSDP: plain, again(FSDP): plain}
    return calls | {f"hook {name}": contestants.fsdp(rule).step for name, rule in _rules(f).items()}


def _against_ddp(contestants: _Contestants, f: int) -> dict[str, Callable[[], object]]:
    rules = _rules(f)
    plain = contestants.ddp().step
    calls: dict[str, Callable[[], object]] = {DDP: plain, again(DDP): plain}
    calls |= {f"hook {name}": contestants.hook(rule).step for name, rule in rules.items()}
    if horovod_if_initialized() is not None:
        calls[HOROVOD] = contestants.horovod().step
        calls |= {f"optimizer {name}": contestants.ours(rule).step for name, rule in rules.items()}
    return calls


def _scopes(
    bench: StepBench, contestants: _Contestants, rule: Robust, transport: Transport
) -> dict[str, Callable[[], object]]:
    shards, model = contestants.ours(rule), contestants.ours(rule, "model")
    steps: dict[str, Callable[[], object]] = {SHARDS: shards.step, MODEL: model.step}
    if bench.device != "cpu":
        return steps
    channel = Channel(transport, "bench.step.ended", 300.0)
    shards, model = contestants.ours(rule), contestants.ours(rule, "model")
    alone = contestants.alone()
    specs = [
        ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in alone.model.named_parameters()
    ]
    buckets = lay_out(specs, bucket_bytes=config().bucket_bytes)
    return {
        **steps,
        SHARDS_EXPOSED: partial(shards.exposed, channel),
        MODEL_EXPOSED: partial(model.exposed, channel),
        COMPUTING: alone.step,
        FORWARD: alone.forward,
        **part_calls(transport, rule, buckets),
    }


def _trace(make: Callable[[], _Training], file: str, rank: int) -> dict[str, float]:
    """Trace some steps after a first one, which lays buckets out; return seconds by stage."""
    trace_to(file)
    training = make()
    for _ in range(_TRACED_STEPS + 1):
        training.step()
    trace = trace_of(rank)
    assert trace is not None
    trace.write()
    trace_to(None)
    stages = {stage.value for stage in Stage} | {"wait"}
    every = _TRACED_STEPS + 1  # the step that lays buckets out is traced as well
    return {name: spent / every for name, spent in trace.seconds().items() if name in stages}
