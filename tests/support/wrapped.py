"""Parameters without a model, an optimizer or a reducer over them, and one bucket by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.pipeline.buckets import Bucket, ParameterSpec, lay_out
from loft_hvd.pipeline.engine import Engine
from loft_hvd.pipeline.gradients import OutgoingHooks, ReducerSettings
from loft_hvd.pipeline.reducer import GradientReducer
from loft_hvd.pipeline.suspicion.watch import Unwatched
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel
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
    return GradientReducer(
        params,
        [ParameterSpec(f"p{at}", tuple(p.shape), p.dtype) for at, p in enumerate(params)],
        [rule],
        settings=ReducerSettings(bucket_bytes=bucket_bytes, **settings),
        channel=Channel(transport, "loft.test", timeout_s),
        source=None,
        outgoing=OutgoingHooks(),
        watch=Unwatched("a test"),
    )


def give_gradients(params: list[torch.nn.Parameter], value: float = 1.0) -> None:
    """Give every parameter a gradient of one value everywhere."""
    torch.autograd.backward(
        [p.view_as(p) for p in params], [torch.full_like(p, value) for p in params]
    )


def reduce_bucket(
    end: LocalTransport, rule: loft.Rule, *, numel: int = 5003, num_times: int = 2, **options: Any
) -> tuple[Tensor, Engine, RecordingTransport]:
    """Reduce one bucket of seeded values a few times with an engine of its own."""
    transport = RecordingTransport(end)
    buckets = lay_out([ParameterSpec("w", (numel,), torch.float32)], bucket_bytes=1 << 30)

    def pack(bucket: Bucket, values: Tensor) -> PassWeights | None:
        generator = torch.Generator().manual_seed(end.rank)
        values.copy_(torch.randn(numel, generator=generator))
        return None

    engine = Engine(Channel(transport, "loft", 30.0), buckets, [rule], pack=pack, **options)
    for _ in range(num_times):
        engine.start(0)
        engine.finish()
    engine.close()
    return engine.values(0).clone(), engine, transport
