"""Gradients given to an ``fsdp_hook`` as FSDP2 gives them, without FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loft_hvd.aggregation.rules import Rule
from loft_hvd.optimizer import fsdp
from loft_hvd.optimizer.options import EqualBatches
from loft_hvd.optimizer.sharded import ShardedGroup
from loft_hvd.pipeline.momentum import WorkerMomentum
from loft_hvd.pipeline.suspicion.judgement import Watching
from loft_hvd.runlog import RunLog
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport

__all__ = ["Sharded"]


class _Inner:
    """What torch's group has, as far as it is asked for."""

    def __init__(self, lengths: Sequence[int], world_size: int, dtype: torch.dtype) -> None:
        mesh = SimpleNamespace(size=lambda: world_size)
        self.mesh_info = SimpleNamespace(mesh=mesh, shard_mesh_size=world_size)
        self.device, self.modules = torch.device("cpu"), ()
        self.reduce_grads = True
        self.gradient_divide_factor: float | None = None
        self._orig_dtype, self._all_reduce_hook = dtype, None
        self._reduce_scatter_comm: Any = None
        self.fsdp_params = [
            SimpleNamespace(
                sharded_param=torch.nn.Parameter(torch.zeros(length, dtype=dtype)),
                padded_sharded_param_size=torch.Size([length]),
                offload_to_cpu=False,
            )
            for length in lengths
        ]

    def unshard(self) -> None: ...

    wait_for_unshard = post_backward = unshard


class Sharded:
    """One rank's hook over some groups, ``lengths`` of whose parameters' shards are given."""

    def __init__(
        self,
        transport: LocalTransport,
        rule: Rule,
        lengths: Sequence[Sequence[int]],
        *,
        batches: Any = None,
        watching: Watching | None = None,
        momentum: WorkerMomentum | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.inners = [_Inner(each, transport.world_size, dtype) for each in lengths]
        self.groups, first = [], 0
        for number, inner in enumerate(self.inners):
            module: Any = torch.nn.Module()
            module.set_custom_reduce_scatter = lambda made, of=inner: setattr(
                of, "_reduce_scatter_comm", made
            )
            group = ShardedGroup(number, module, inner, first)
            group.names = [f"p{first + at}" for at in range(len(inner.fsdp_params))]
            first += len(group.names)
            self.groups.append(group)
        self.hook = fsdp.FSDPHook(
            torch.nn.Module(),
            self.groups,
            rule,
            EqualBatches(RunLog(None)) if batches is None else batches,
            Channel(transport, "fsdp", 20.0),
            watching=Watching() if watching is None else watching,
            momentum=momentum,
        )

    def backward(
        self, gradients: Sequence[Tensor], op: Any = dist.ReduceOp.AVG, *, is_new: bool = True
    ) -> list[Tensor]:
        """Reduce each group's gradients, [world_size * shard], in a backward pass; last one first.

        Without ``is_new`` its forward pass has been told of. Returns this rank's shards of the
        results.
        """
        if is_new:
            self.hook._forward_began()
        results = [
            torch.full((len(given) // group.num_shards,), torch.nan, dtype=given.dtype)
            for group, given in zip(self.groups, gradients, strict=True)
        ]

        def reduce() -> None:
            for at in reversed(range(len(results))):
                self.inners[at]._reduce_scatter_comm(results[at], gradients[at].clone(), None, op)

        during: Callable[..., Tensor] = _During.apply
        during(torch.zeros(1, requires_grad=True), reduce).backward()
        return results


class _During(torch.autograd.Function):
    """Calls something in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grads[0], None
