"""Parameters without a model, an optimizer or a reducer over them, and one bucket by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.pipeline.buckets import ParameterSpec
from loft_hvd.pipeline.gradients import OutgoingHooks, ReducerSettings
from loft_hvd.pipeline.reducer import GradientReducer
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import ExchangeSpec
from loft_hvd.pipeline.suspicion.judgement import Judgement, Watching
from loft_hvd.pipeline.wire import Wire
from loft_hvd.runlog import RunLog
from loft_hvd.transport.base import Channel, Lane
from loft_hvd.transport.local import LocalTransport
from tests.support.recording import RecordingTransport

__all__ = ["give_gradients", "make_parameters", "make_reducer", "reduce_bucket", "wrap"]

_SHAPES = [(40,), (3, 5), (), (64, 2)]


def make_parameters(shapes: Sequence[tuple[int, ...]] = _SHAPES) -> list[torch.nn.Parameter]:
    """Return parameters of zeros."""
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def wrap(params: list[torch.nn.Parameter], transport: LocalTransport, **options: Any) -> Any:
    """Return a ``DistributedOptimizer`` of parameters p0, p1 and so on."""
    named = [(f"p{at}", p) for at, p in enumerate(params)]
    sgd = torch.optim.SGD(params, lr=1.0)
    return loft.DistributedOptimizer(sgd, named, transport=transport, **options)


def make_reducer(
    params: list[torch.nn.Parameter],
    transport: LocalTransport,
    rule: loft.Rule,
    *,
    bucket_bytes: int = 1 << 25,
    timeout_s: float = 30.0,
    **settings: Any,
) -> GradientReducer:
    """Return what such an optimizer reduces its gradients with, nobody watching.

    ``settings`` are more of ``ReducerSettings``.
    """
    channel = Channel(transport, "loft.test", timeout_s)
    return GradientReducer(
        params,
        [ParameterSpec(f"p{at}", tuple(p.shape), p.dtype) for at, p in enumerate(params)],
        [rule],
        settings=ReducerSettings(bucket_bytes=bucket_bytes, **settings),
        channel=channel,
        source=None,
        outgoing=OutgoingHooks(),
        judgement=Judgement(
            channel,
            [rule],
            Watching(settings.get("scope", "shard"), diagnostics=False),
            is_on_cpu=True,
            knows_sizes=False,
            log=RunLog(None),
        ),
    )


def give_gradients(params: list[torch.nn.Parameter], value: float = 1.0) -> None:
    """Give every parameter a gradient of one value everywhere."""
    torch.autograd.backward(
        [p.view_as(p) for p in params], [torch.full_like(p, value) for p in params]
    )


def reduce_bucket(
    end: LocalTransport,
    rule: loft.Rule,
    *,
    numel: int = 5003,
    num_times: int = 2,
    wire: Wire = loft.Compression.none,
    part_bytes: int | None = None,
) -> tuple[Tensor, BucketReduction, RecordingTransport]:
    """Reduce one bucket of seeded values a few times."""
    transport = RecordingTransport(end)

    def pack(values: Tensor) -> None:
        generator = torch.Generator().manual_seed(end.rank)
        values.copy_(torch.randn(numel, generator=generator))

    spec = ExchangeSpec(Lane(transport), "loft", numel, torch.float32, "cpu", rule, wire)
    reduction = BucketReduction(spec, pack=pack, part_bytes=part_bytes)
    for _ in range(num_times):
        reduction.start()
        while not reduction.advance():
            time.sleep(1e-4)
    return reduction.values.clone(), reduction, transport
