"""From autograd's hooks to reduced gradients: what a wrapped optimizer does before it steps."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.plan import StepSizes
from loft_hvd.errors import ArgumentTypeError, UsageError
from loft_hvd.pipeline.buckets import Bucket, ParameterSpec, Slot, lay_out
from loft_hvd.pipeline.engine import Engine, is_engine_sum
from loft_hvd.pipeline.stages import Compressor
from loft_hvd.pipeline.weights import PassWeights, combine_passes
from loft_hvd.transport.base import Transport

__all__ = ["GradientReducer", "OutgoingHook", "ReducerSettings", "StepSource"]

OutgoingHook = Callable[[Bucket, Tensor], None]


class StepSource(Protocol):
    """What the reducer asks of a balancer, and tells it."""

    def take_step(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to."""
        ...

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Hear of each gradient, and what its hook and those before it spent on the wire."""
        ...


@dataclass(frozen=True)
class ReducerSettings:
    """How gradients are reduced; equal on every rank.

    Attributes:
        bucket_bytes: most bytes of a bucket.
        num_passes: backward passes that are summed into one step.
        is_sum: whether the result is a sum over ranks instead of an average.
        predivide: what the plain mean divides by before the sum, and multiplies by after it.
        sparse_as_dense: whether sparse gradients are made dense.
        compression: wire format, or None.
        timeout_s: longest wait for other ranks in seconds.
    """

    bucket_bytes: int
    timeout_s: float
    num_passes: int = 1
    is_sum: bool = False
    predivide: float = 1.0
    sparse_as_dense: bool = False
    compression: Compressor | None = None


class GradientReducer:
    """Reduces the gradients of some parameters over ranks, starting within the backward pass.

    Args:
        parameters: the parameters, in an order equal on every rank.
        specs: what each of them is, [len(parameters)].
        rules: the rules that ``specs`` refer to by index.
        settings: how gradients are reduced.
        transport: the ranks.
        source: tells which batch a backward pass belongs to; None for equal weights.
        name: stem of the operations' names, equal on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        rules: Sequence[Rule],
        *,
        settings: ReducerSettings,
        transport: Transport,
        source: StepSource | None,
        name: str,
    ) -> None:
        self._parameters = list(parameters)
        self._rules = list(rules)
        self._settings = settings
        self._transport = transport
        self._source = source
        self.buckets = lay_out(specs, bucket_bytes=settings.bucket_bytes)
        self._bucket_of = {s.parameter: b.index for b in self.buckets for s in b.slots}
        self._spec_rules = [rules[spec.rule] for spec in specs]
        self.engine = Engine(
            transport,
            self.buckets,
            rules,
            timeout_s=settings.timeout_s,
            name=name,
            compression=settings.compression,
        )
        self._outgoing: OrderedDict[int, OutgoingHook] = OrderedDict()
        self._clear_step()
        self._handles = [handle for i in range(len(parameters)) for handle in self._hook(i)]

    # One step's bookkeeping.

    def _clear_step(self) -> None:
        self._counts = [0] * len(self._parameters)
        self._unready = [len(bucket.slots) for bucket in self.buckets]
        self._passes: list[StepSizes] = []
        self._num_passes_begun = 0
        self._blocked_s = 0.0

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived since the last ``synchronize``."""
        return self._num_passes_begun > 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a bucket is on the wire."""
        return self.engine.next_bucket > 0

    def _begin_pass(self, number: int) -> None:
        """Learn which batch backward pass ``number`` (from 0) of this step belongs to."""
        if number < self._num_passes_begun:
            return
        if number >= self._settings.num_passes:
            raise UsageError(
                f"a gradient arrived for backward pass {number + 1} of a step, but "
                f"backward_passes_per_step={self._settings.num_passes}; call step() in between "
                "or raise backward_passes_per_step"
            )
        self._num_passes_begun = number + 1
        self._blocked_s = 0.0
        if self._source is not None:
            self._passes.append(self._source.take_step())

    # Hooks.

    def _hook(self, index: int) -> list[RemovableHandle]:
        parameter = self._parameters[index]
        handles = [parameter.register_post_accumulate_grad_hook(lambda _: self._arrived(index))]
        if self._settings.num_passes > 1 and self._source is not None:
            # Passes are summed in .grad, so each must be weighed before it is added.
            handles.append(parameter.register_hook(lambda grad: self._weigh_pass(index, grad)))
        return handles

    def _weigh_pass(self, index: int, grad: Tensor) -> Tensor | None:
        self._begin_pass(self._counts[index])
        sizes = self._passes[self._counts[index]]
        if sizes.sizes[self._transport.rank] == 0:
            return torch.zeros_like(grad)
        if isinstance(self._spec_rules[index], Mean) and self._transport.world_size > 1:
            return grad * self._share(sizes)
        return None

    def _share(self, sizes: StepSizes) -> float:
        """Return this rank's part of a batch, times the number of ranks: 1 for equal sizes."""
        return sizes.sizes[self._transport.rank] * self._transport.world_size / sizes.total

    def _arrived(self, index: int) -> None:
        self._begin_pass(self._counts[index])
        self._counts[index] += 1
        if self._source is not None:
            self._source.gradient_arrived(blocked_s=self._blocked_s)
        if self._counts[index] == self._settings.num_passes:
            self._unready[self._bucket_of[index]] -= 1
            began = time.monotonic()
            self._start_full_buckets()
            self._blocked_s += time.monotonic() - began

    def _start_full_buckets(self) -> None:
        if self._transport.world_size == 1:
            return
        while (at := self.engine.next_bucket) < len(self.buckets) and self._unready[at] == 0:
            self._start_bucket(at)
        self.engine.advance()

    # From .grad to the wire and back.

    def _start_bucket(self, index: int) -> None:
        bucket, rule = self.buckets[index], self._rules[self.buckets[index].rule]
        values = self.engine.values(index)
        weights = self._weights()
        self._pack(bucket, values)
        if not weights.present[self._transport.rank]:
            values.zero_()
        elif isinstance(rule, Mean):
            scale = 1 / self._settings.predivide
            if self._passes and self._settings.num_passes == 1:
                scale *= self._share(self._passes[0])
            if is_engine_sum(rule):
                scale /= self._transport.world_size
            values.mul_(scale)
        elif weights.row_scale != 1.0:
            values.mul_(weights.row_scale)
        self._call_outgoing(bucket, values)
        if isinstance(rule, Mean):  # its weights are in the values
            present = (True,) * self._transport.world_size
            weights = PassWeights(weights=None, present=present, row_scale=1.0)
        self.engine.start(index, weights)

    def _weights(self) -> PassWeights:
        if self._passes:
            return combine_passes(self._passes, rank=self._transport.rank)
        return PassWeights(None, (True,) * self._transport.world_size, 1.0)

    def _pack(self, bucket: Bucket, values: Tensor) -> None:
        for slot in bucket.slots:
            grad = self._parameters[slot.parameter].grad
            target = values[slot.offset : slot.offset + slot.numel]
            if grad is None:
                target.zero_()  # as Horovod does, so that ranks stay in step
            else:
                target.view(slot.shape).copy_(self._dense(slot, grad))

    def _dense(self, slot: Slot, grad: Tensor) -> Tensor:
        if grad.layout == torch.strided:
            return grad
        if not self._settings.sparse_as_dense:
            raise ArgumentTypeError(
                f"parameter {slot.name!r} has a {grad.layout} gradient; a rule aggregates dense "
                "ones: pass sparse_as_dense=True, or use a layer with sparse=False"
            )
        return grad.to_dense()

    def _unpack(self, bucket: Bucket, values: Tensor) -> None:
        if isinstance(self._rules[bucket.rule], Mean):
            factor = self._settings.predivide
            factor *= self._transport.world_size if self._settings.is_sum else 1
            if factor != 1.0:
                values.mul_(factor)
        for slot in bucket.slots:
            parameter = self._parameters[slot.parameter]
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                parameter.grad = torch.empty_like(parameter)
            source = values[slot.offset : slot.offset + slot.numel]
            parameter.grad.copy_(source.view(slot.shape))

    def _call_outgoing(self, bucket: Bucket, values: Tensor) -> None:
        for hook in self._outgoing.values():
            hook(bucket, values)

    # What the optimizer calls.

    def synchronize(self) -> None:
        """Reduce every gradient that is not on its way yet, and wait until all are there.

        Raises:
            TransportTimeoutError: other ranks did not answer in time.
            ArgumentTypeError: a gradient is sparse and may not be made dense.
        """
        if self._transport.world_size > 1:
            for index in range(self.engine.next_bucket, len(self.buckets)):
                self._start_bucket(index)
            self.engine.finish()
            for bucket in self.buckets:
                self._unpack(bucket, self.engine.values(bucket.index))
        elif self._outgoing:
            for bucket in self.buckets:
                values = self.engine.values(bucket.index)
                self._pack(bucket, values)
                self._call_outgoing(bucket, values)
                self._unpack(bucket, values)
        self._clear_step()

    def register_outgoing_hook(self, hook: OutgoingHook) -> RemovableHandle:
        """Call ``hook(bucket, values)`` before a bucket is sent; it may change values in place.

        Args:
            hook: gets the bucket and this rank's flat values of it, [numel]: the gradient it
                would send, scaled by its share of the batch under ``Mean``.

        Returns:
            A handle whose ``remove()`` takes the hook away.
        """
        handle = RemovableHandle(self._outgoing)
        self._outgoing[handle.id] = hook
        return handle

    def adopt_hooks(self, older: GradientReducer) -> None:
        """Go on with the outgoing hooks of a reducer that this one replaces."""
        self._outgoing = older._outgoing

    def detach(self) -> None:
        """Take all hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
