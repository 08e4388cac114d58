"""Between ``.grad`` and buckets: gradients live in their bucket where they can.

A gradient that is a view of its bucket is packed and unpacked without a copy. It becomes one as
soon as it has been computed, while it is still in the cache: autograd's new tensor is copied once
and freed, and stays a view while ``zero_grad(set_to_none=False)`` zeroes it in place. Gradients of
another dtype or memory layout than their bucket's are copied there and back.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.errors import ArgumentTypeError, UsageError
from loft_hvd.pipeline.buckets import Bucket, Slot
from loft_hvd.pipeline.momentum import Blend, WorkerMomentum
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.wire import Compression, Wire
from loft_hvd.transport.datagram import LossTolerant

__all__ = [
    "Gradients",
    "OutgoingHook",
    "OutgoingHooks",
    "ReducerSettings",
    "Untouched",
    "copy_scaled",
    "sum_up",
]

_logger = logging.getLogger(__name__)

OutgoingHook = Callable[[Bucket, Tensor], None]
"""``(bucket, values)``: looks at, or changes, what a rank is about to send, [numel]."""


@dataclass(frozen=True)
class ReducerSettings:
    """How gradients are reduced; equal on every rank. It follows from the optimizer's options."""

    bucket_bytes: int  # most bytes of a bucket
    num_passes: int = 1  # backward passes that are summed into one step
    is_sum: bool = False  # whether the result is a sum over ranks instead of an average
    predivide: float = 1.0  # what a mean divides by before the sum, and multiplies by after it
    sparse_as_dense: bool = False  # else sparse ones travel so under a mean, and are refused
    needs_sparse: bool = False  # the optimizer takes sparse gradients only
    wire: Wire = Compression.none  # the format in which values travel
    scope: Scope = "shard"  # by which values rules that see rows judge them
    audit: float = 0.0  # audits of shard owners a step, on average; 0 for none
    gather: LossTolerant | None = None  # how rows may travel to owners; None where all arrive


@functools.cache
def _holders() -> dict[int, weakref.WeakSet[Gradients]]:
    """Return who reduces a parameter's gradient, by the parameter's id."""
    # By id: a tensor's == compares values. Weak: an optimizer that is dropped holds nothing.
    return {}


class Untouched:
    """Gradients as their hooks left them: nobody else changes them until they are reduced.

    What a script changes meanwhile is sent or not by chance, and lost or not, on each rank
    otherwise.
    """

    def __init__(self) -> None:
        # By the parameter's id: with torch's count of what has changed the gradient in place.
        self._left: dict[int, tuple[str, Tensor, Tensor, int]] = {}

    def note(self, name: str, parameter: Tensor) -> None:
        """Take a parameter's gradient as it is now."""
        if parameter.grad is not None:
            self._left[id(parameter)] = name, parameter, parameter.grad, parameter.grad._version

    def check(self) -> None:
        """Raise where a gradient is another one, or has been changed in place.

        Raises:
            UsageError: names the first such parameter.
        """
        for name, parameter, grad, version in self._left.values():
            if parameter.grad is not grad or grad._version != version:
                raise UsageError(
                    f"the gradient of parameter {name!r} was changed between loss.backward() and "
                    "optimizer.step(), while it is on its way to other ranks: what clips or "
                    "changes gradients comes after optimizer.synchronize(), and the step then "
                    "goes into `with optimizer.skip_synchronize():`. A hook that changes its "
                    "parameter's gradient is registered before the optimizer is made"
                )

    def clear(self) -> None:
        """Forget them."""
        self._left.clear()


class Gradients:
    """The gradients of some parameters, to which buckets' slots refer by index.

    With ``momentum`` what is sent are averages: of each gradient, when it moves into its bucket.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        takes_sparse: Sequence[bool] | None = None,
        needs_sparse: bool = False,
        momentum: WorkerMomentum | None = None,
    ) -> None:
        self._parameters = list(parameters)
        # Which parameters may have a sparse gradient, to be made dense in its bucket, and of what
        # sparse dimensions it was; 0 for one that was dense.
        self._takes_sparse = takes_sparse or [False] * len(self._parameters)
        self.sparse_dims = [0] * len(self._parameters)
        # With what sparse dimensions gradients are handed out; 0 for dense ones.
        self.handed_dims = [int(needs_sparse)] * len(self._parameters)
        self._momentum = momentum
        self._overflown: set[int] = set()
        self._taken: set[int] = set()
        self.untouched = Untouched()
        for parameter in self._parameters:
            _holders().setdefault(id(parameter), weakref.WeakSet()).add(self)

    def release(self) -> None:
        """Leave the parameters to others."""
        for parameter in self._parameters:
            _holders()[id(parameter)].discard(self)

    def is_shared(self, index: int) -> bool:
        """Say whether another optimizer reduces a parameter's gradient, too."""
        return len(_holders()[id(self._parameters[index])]) > 1

    def take(self, slot: Slot, values: Tensor, *, scale: float | Blend) -> None:
        """Move a gradient that is complete into its bucket, times ``scale``, where it can live.

        With momentum a ``Blend`` of it and its average moves there instead.

        Until ``begin_step``, ``pack`` finds it there. Not while the bucket is in flight. Where
        several optimizers have the parameter, each packs its gradient later.
        """
        parameter = self._parameters[slot.parameter]
        if self.is_shared(slot.parameter):
            return
        grad = parameter.grad
        if grad is not None and grad.layout == torch.strided and _can_live_in(parameter, values):
            self._move(slot, grad, values, scale)
            self._taken.add(slot.parameter)
        self.untouched.note(slot.name, parameter)

    def _move(self, slot: Slot, grad: Tensor, values: Tensor, scale: float | Blend) -> None:
        parameter = self._parameters[slot.parameter]
        # Here the gradient is still in the cache. When whole buckets were copied later, a step of
        # 30 M parameters took 1.12 to 1.15 times Horovod's time, 1.01 to 1.05 times so (4 MPI ranks
        # on 2 cores, docs/allreduce.md).
        with torch.no_grad():
            target = _view(values, slot)
            is_home = _is_home(grad, values, slot)
            if isinstance(scale, Blend):
                self._send(parameter, grad, target, scale)
            elif not is_home:
                copy_scaled(grad, target, scale)
            elif scale != 1.0:
                target.mul_(scale)
            if not is_home:
                parameter.grad = _own_count(target)

    def _send(self, parameter: Tensor, grad: Tensor | None, target: Tensor, blend: Blend) -> None:
        assert self._momentum is not None  # who blends has given one
        self._momentum.send(parameter, grad, target, blend)

    def begin_step(self) -> None:
        """Forget what was taken: gradients are new from here on."""
        self._taken.clear()
        self.untouched.clear()

    def pack(self, bucket: Bucket, values: Tensor, *, scale: float | Blend = 1.0) -> None:
        """Put the gradients, times ``scale``, into their bucket's ``values``, [numel].

        Those that live there are not copied. With momentum a ``Blend`` is as in ``take``.
        """
        at_home = []  # gradients that live in the bucket
        for slot in bucket.slots:
            parameter = self._parameters[slot.parameter]
            grad = parameter.grad
            target = _view(values, slot)
            if isinstance(scale, Blend) and slot.parameter not in self._taken:
                self._send(
                    parameter, None if grad is None else self._dense(slot, grad), target, scale
                )
            elif grad is None:
                target.zero_()  # as Horovod does, so that ranks stay in step
            elif not _is_home(grad, values, slot):
                if slot.parameter in self._taken and scale != 1.0:
                    raise UsageError(
                        f"the gradient of parameter {slot.name!r} was replaced after its hook: it "
                        "is on its way, times this rank's share of the batch; call "
                        "optimizer.synchronize() first, then change it and step() inside "
                        "optimizer.skip_synchronize()"
                    )
                # Not a Blend here: that of a gradient not taken is above, of one taken refused.
                assert not isinstance(scale, Blend)
                copy_scaled(self._dense(slot, grad), target, scale)
            elif slot.parameter not in self._taken:
                at_home.append(target)
        # In one pass over the bucket where all live there: a loop over many small slots is slower.
        if not isinstance(scale, Blend) and scale != 1.0:
            for target in at_home if len(at_home) < len(bucket.slots) else [values]:
                target.mul_(scale)

    def hand_out(self, bucket: Bucket, values: Tensor, *, unused: Collection[int] = ()) -> None:
        """Let the parameters have the bucket's values as gradients; in the user's thread.

        ``unused`` ones, by index, have none.
        """
        for slot in bucket.slots:
            parameter = self._parameters[slot.parameter]
            if slot.parameter in unused:
                parameter.grad = None
                continue
            grad, sparse_dim = parameter.grad, self.handed_dims[slot.parameter]
            if grad is not None and not sparse_dim and _is_home(grad, values, slot):
                continue  # most are in place, and views of all took 0.5 to 0.7 ms of a ResNet-18
            source = _view(values, slot)
            if sparse_dim:
                parameter.grad = source.to(parameter.dtype).to_sparse(sparse_dim)
                continue
            if _can_live_in(parameter, values):
                parameter.grad = _own_count(source)
                continue
            if grad is None or grad.layout != torch.strided:
                parameter.grad = grad = torch.empty_like(parameter)
            with torch.no_grad():
                grad.copy_(source)

    def _dense(self, slot: Slot, grad: Tensor) -> Tensor:
        if grad.layout == torch.strided:
            return grad
        if not self._takes_sparse[slot.parameter]:
            why, way_out = "a robust rule takes", "give its parameter group the rule loft.Mean()"
            if self._momentum is not None:  # which no rule takes off
                why = "worker momentum takes"
                way_out = "use worker_momentum=0, with the rule loft.Mean() for its parameter group"
            raise ArgumentTypeError(
                f"parameter {slot.name!r} has a {grad.layout} gradient; {why} dense ones: pass "
                f"sparse_as_dense=True, use a layer with sparse=False, or {way_out}"
            )
        if grad.layout == torch.sparse_coo:
            self.sparse_dims[slot.parameter] = grad.sparse_dim()
        return grad.to_dense()

    def warn_of_overflow(self, bucket: Bucket, values: Tensor, dtype: torch.dtype) -> None:
        """Warn once for each parameter with finite values that ``dtype`` cannot hold."""
        # One pass over all values first: it is the usual case that none is beyond.
        most = torch.finfo(dtype).max
        low, high = torch.aminmax(values) if values.numel() else (values.sum(), values.sum())
        if -most <= float(low) and float(high) <= most:
            return
        for slot in bucket.slots:
            if slot.parameter in self._overflown:
                continue
            target = _view(values, slot)
            num_beyond = int(((target.abs() > most) & target.isfinite()).sum())
            if num_beyond:
                self._overflown.add(slot.parameter)
                _logger.warning(
                    "parameter %r: %d gradient values are beyond what %s holds (%g) and travel as "
                    "infinity; scale the loss down, or use loft.Compression.bf16",
                    slot.name,
                    num_beyond,
                    dtype,
                    most,
                )


def _can_live_in(parameter: Tensor, values: Tensor) -> bool:
    """Say whether a parameter's gradient can be a view of its bucket."""
    return parameter.dtype == values.dtype and parameter.is_contiguous()


def copy_scaled(source: Tensor, target: Tensor, scale: float) -> None:
    """Put ``source * scale`` into ``target`` in one pass, rounded once."""
    if scale == 1.0:
        target.copy_(source)
    elif source.dtype == target.dtype:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source).mul_(scale)


def sum_up(gradient: Tensor, num_sums: int) -> Tensor | None:
    """Return sums over a gradient, each of every ``num_sums``-th value, float32, on its device.

    None for one that is neither dense nor a sparse one of rows.
    """
    dense = gradient.detach()
    if dense.layout == torch.sparse_coo:
        dense = dense._values()
    if dense.layout != torch.strided or not dense.is_floating_point():
        return None
    flat = dense.reshape(-1)
    num_whole = flat.numel() // num_sums * num_sums
    sums = flat[:num_whole].view(-1, num_sums).sum(dim=0, dtype=torch.float32)
    sums[: flat.numel() - num_whole] += flat[num_whole:]
    return sums


def _view(values: Tensor, slot: Slot) -> Tensor:
    return values[slot.offset : slot.offset + slot.numel].view(slot.shape)


def _own_count(view: Tensor) -> Tensor:
    """Return the same memory as a tensor that counts its own changes, not those of its bucket."""
    return view.data  # detach() would share the count


def _is_home(grad: Tensor, values: Tensor, slot: Slot) -> bool:
    """Say whether a gradient, of the slot's shape, is its place in the bucket's values."""
    if grad.layout != torch.strided or grad.dtype != values.dtype or grad.requires_grad:
        return False
    if slot.numel == 0:  # whose data_ptr() is 0
        return True
    place = values.data_ptr() + slot.offset * values.itemsize
    return grad.data_ptr() == place and grad.is_contiguous()


class OutgoingHooks:
    """An optimizer's outgoing hooks; they outlive its reducers.

    Horovod calls the function of ``hvd.elastic.run`` anew in every world, so a hook that it
    registers would run once more in each, and on ranks that join only once. Those end with the
    world they were added in; those from before the first world stay.
    """

    def __init__(self) -> None:
        self._hooks: OrderedDict[int, OutgoingHook] = OrderedDict()
        self._lasting: frozenset[int] | None = None  # those from before the first world

    def add(self, hook: OutgoingHook) -> RemovableHandle:
        """Call a hook from now on, after those there are; ``remove()`` of the handle ends that."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def begin_world(self) -> None:
        """Drop the hooks that were added in the world before."""
        if self._lasting is None:
            self._lasting = frozenset(self._hooks)
        for key in self._hooks.keys() - self._lasting:
            del self._hooks[key]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, bucket: Bucket, values: Tensor) -> None:
        """Let every hook look at, or change, the values of a bucket, [numel]."""
        for hook in list(self._hooks.values()):  # one may take itself away
            hook(bucket, values)
