"""What is asked of torch's FSDP2 (``fully_shard``), also of parts that are not public.

A module that ``fully_shard`` was called on has its own parameters in a group: they are gathered
together before they are used, and their gradients, cut into a shard for each rank, are reduced
together in the backward pass. Read in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.optimizer.parameters import parts_error
from loft_hvd.pipeline.buckets import Slot

__all__ = ["Scatter", "ShardedGroup", "at_end_of_backward", "find_groups"]


class Scatter(Protocol):
    """What reduces a group's gradients: torch's ``ReduceScatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent, and then for the result."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = ...
    ) -> Any:
        """Reduce gradients, [world_size * shard], to this rank's shard of the result, [shard]."""


class ShardedGroup:
    """Parameters that are gathered, and whose gradients are reduced, together.

    Attributes:
        number: of the group, in the model's order.
        names: of its parameters, all that there are.
        parameters: this rank's shards, as ``named_parameters()`` has them.
    """

    def __init__(self, number: int, module: torch.nn.Module, inner: Any, first: int) -> None:
        self.number = number
        self.names: list[str] = []
        self._first = first  # number of its first parameter, of all groups'
        self._module = module
        self._inner = inner

    def __str__(self) -> str:
        """Name the group by its first and last parameter."""
        first, last = self.names[0], self.names[-1]
        return f"group {self.number} ({first if first == last else f'{first} .. {last}'})"

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [each.sharded_param for each in self._inner.fsdp_params]

    @property
    def device(self) -> torch.device:
        """Where its gradients are reduced."""
        device: torch.device = self._inner.device
        return device

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """Those that use its parameters together, mostly one."""
        modules: Sequence[torch.nn.Module] = self._inner.modules
        return modules

    def whole_parameters(self) -> Iterator[Tensor]:
        """Yield what the modules compute with; they exist once the group has been gathered."""
        for each in self._inner.fsdp_params:
            if each.sharded_param.requires_grad:
                yield each.unsharded_param

    @property
    def meetings(self) -> list[Callable[..., Any]]:
        """What meets other ranks in the backward pass, to gather parameters or reduce gradients."""
        kind = type(self._inner)
        return [kind.unshard, kind.wait_for_unshard, kind.post_backward]

    @property
    def is_held_back(self) -> bool:
        """Whether gradients add up on this rank: ``set_requires_gradient_sync(False)``."""
        return not self._inner.reduce_grads

    @property
    def ranks(self) -> list[int]:
        """The ranks that share its parameters, within the default process group."""
        return list(dist.get_process_group_ranks(self._inner.mesh_info.shard_process_group))

    @property
    def num_replicas(self) -> int:
        """How many such sets of ranks have a copy of it: more than 1 in HSDP."""
        return int(self._inner.mesh_info.mesh.size()) // self.num_shards

    @property
    def scatter(self) -> Scatter:
        """What reduces its gradients."""
        scatter: Scatter = self._inner._reduce_scatter_comm
        return scatter

    @scatter.setter
    def scatter(self, scatter: Scatter) -> None:
        set_it: Callable[[Scatter], None] = self._module.set_custom_reduce_scatter  # type: ignore[assignment]
        set_it(scatter)

    def sum_factor(self, op: Any, num_ranks: int) -> float:
        """Return by what the mean of rows is multiplied to be what FSDP2 asks for."""
        if op == dist.ReduceOp.AVG:
            return 1.0
        if op == dist.ReduceOp.SUM:
            return float(num_ranks)
        return num_ranks / float(self._inner.gradient_divide_factor)  # a sum that is divided

    @property
    def numel(self) -> int:
        """Values of its gradients with what they are padded by, [world_size * shard]."""
        return sum(length for *_, length in self._spans()) * self.num_shards

    @property
    def num_shards(self) -> int:
        """How many ranks share its parameters."""
        return int(self._inner.mesh_info.shard_mesh_size)

    def _spans(self) -> list[tuple[int, str, int, int]]:
        """Return where the parameters lie in a shard: number, name, begin, length."""
        spans, offset = [], 0
        for at, each in enumerate(self._inner.fsdp_params):
            if each.sharded_param.requires_grad:
                length = each.padded_sharded_param_size.numel()
                spans.append((self._first + at, self.names[at], offset, length))
                offset += length
        return spans

    def slots(self, numel: int) -> tuple[Slot, ...]:
        """Say where the parameters lie in gradients, [world_size * shard], the last ones first.

        A parameter has a slot in each shard. None where parameters without a gradient are left out:
        which ones nobody says.
        """
        if numel != self.numel:
            return ()
        return tuple(
            Slot(at, name, shard * (numel // self.num_shards) + begin, length, (length,))
            for at, name, begin, length in reversed(self._spans())
            for shard in range(self.num_shards)
        )

    def why_at_once(self, result: Tensor, op: Any) -> str:
        """Say why FSDP2 needs a result as soon as it has asked for it; "" where it can wait."""
        inner, dtype = self._inner, self._inner._orig_dtype
        if result.dtype != dtype:
            return f"it is cast from {result.dtype} to {dtype} (MixedPrecisionPolicy)"
        if op != dist.ReduceOp.AVG:
            return "it is divided (float16, set_gradient_divide_factor, or a sum that was forced)"
        if inner._all_reduce_hook is not None:
            return "a hook is given it (set_all_reduce_hook)"
        for each in inner.fsdp_params:
            if each.sharded_param.grad is not None:
                return (
                    "it is added to the .grad of a backward pass before (zero_grad() comes before "
                    "each; passes of one step go under set_requires_gradient_sync(False))"
                )
            if each.offload_to_cpu:
                return "it is copied to the CPU (CPUOffloadPolicy)"
            if getattr(each.sharded_param, "_post_accumulate_grad_hooks", None):
                return "a hook is given it (register_post_accumulate_grad_hook)"
        return ""


def find_groups(model: torch.nn.Module, *, what: str) -> list[ShardedGroup]:
    """Return a model's groups, in the order of its modules; ``what`` was asked for them.

    Raises:
        ArgumentError: there are none, or a group is not of all ranks together.
        ArgumentTypeError: the model is one of FSDP1's, or of DeepSpeed's.
        UsageError: this torch's FSDP2 has other parts.
    """
    for each in model.modules() if isinstance(model, torch.nn.Module) else (model,):
        # By name: torch's module of the first takes long to import, the second may not be there.
        kinds = {kind.__name__ for kind in type(each).__mro__}
        for kind in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            if kind in kinds:
                raise parts_error(f"{what}: the model comes", made_by=kind)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"{what}: model={model!r} is of type {type(model).__name__}; give the module that "
            "torch's fully_shard(model) was called on"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[ShardedGroup] = []
    first = 0
    for module, inner in _inner_groups(model, what):
        group = ShardedGroup(len(groups), module, inner, first)
        group.names = [
            names.get(id(each.sharded_param)) or f"parameter {first + at}"
            for at, each in enumerate(inner.fsdp_params)
        ]
        first += len(group.names)
        groups.append(group)
    if not groups:
        raise ArgumentError(
            f"{what}: no module of the model is sharded; call torch's fully_shard on its blocks "
            "and on the model first"
        )
    return groups


def _inner_groups(model: torch.nn.Module, what: str) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield torch's groups that have parameters, each behind a module that it belongs to."""
    seen: set[int] = set()
    try:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            inners = module._get_fsdp_state()._fsdp_param_groups
            if len(inners) > 1:
                raise ArgumentError(
                    f"{what}: {type(module).__name__} has parameters on {len(inners)} meshes "
                    "(shard_placement_fn), and torch takes one reduce-scatter for each module; "
                    "call fully_shard with one mesh"
                )
            for inner in inners:
                if id(inner) not in seen and inner.fsdp_params:
                    seen.add(id(inner))
                    yield module, inner
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{what}: FSDP2 of torch {torch.__version__} has other parts than that of torch 2.13, "
            f"by which gradients are met ({error}); use torch 2.13"
        ) from error


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have something called when the backward pass that goes on has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
