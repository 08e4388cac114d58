"""``attach``: times and exact weights for a script that keeps its ``hvd.DistributedOptimizer``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from loft_hvd.balance.balancer import Balancer
from loft_hvd.errors import ArgumentTypeError, UsageError

__all__ = ["Attachment", "attach"]


class Attachment:
    """What watches an optimizer for a balancer; made by ``attach``.

    A step's fetch runs from the end of the step before to the first forward pass of a module in
    training mode, its computing from there to the last gradient. A step with an evaluation in
    front of it (a forward pass without gradients) is left out of all times.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, balancer: Balancer) -> None:
        self._balancer = balancer
        self._seen: set[int] = set()  # parameters whose gradient of this backward pass is there
        self._scale: float | None = None
        self._depth = 0  # Horovod's step calls the user's step: both run the step hooks
        self._waited_s = 0.0
        self._synchronize: Callable[[], None] = optimizer.synchronize  # type: ignore[attr-defined]  # checked by ``attach``
        self._optimizer = optimizer
        self._thread = threading.get_ident()  # forward passes of other threads are not ours
        self._forward: RemovableHandle | None = None
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(self._step_ends),
        ]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._watch(parameter)
        optimizer.synchronize = self._synchronized  # type: ignore[attr-defined]  # Horovod's step calls it
        self._await_forward()

    def _watch(self, parameter: Tensor) -> None:
        key = id(parameter)
        self._handles.append(parameter.register_hook(lambda gradient: self._weigh(key, gradient)))
        self._handles.append(
            parameter.register_post_accumulate_grad_hook(
                lambda _: self._balancer.gradient_arrived(blocked_s=0.0)
            )
        )

    def _weigh(self, key: int, gradient: Tensor) -> Tensor | None:
        """Scale a gradient so that Horovod's average over ranks weighs every sample the same."""
        if not self._seen or key in self._seen:  # the first gradient of a backward pass
            self._seen.clear()
            self._depth = 0
            self._begin_batch()
            sizes = self._balancer.take_step()
            mine = sizes.sizes[self._balancer.rank]
            self._scale = mine * self._balancer.world_size / sizes.total
        self._seen.add(key)
        if self._scale == 1.0:
            return None
        return gradient * self._scale if self._scale else torch.zeros_like(gradient)

    def _await_forward(self) -> None:
        if self._forward is None:
            self._forward = register_module_forward_pre_hook(self._forward_begins)

    def _forward_begins(self, module: torch.nn.Module, _arguments: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if module.training and torch.is_grad_enabled():
            self._begin_batch()
        else:
            self._balancer.leave_step_out()

    def _begin_batch(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
            self._balancer.begin_own_batch()

    def _synchronized(self) -> None:
        self._balancer.computing_ended()
        began = time.monotonic()
        try:
            with self._balancer.log.faults():
                self._synchronize()
        finally:
            self._waited_s += time.monotonic() - began

    def _step_begins(self, _optimizer: Any, arguments: Any, options: Any) -> None:
        if any(callable(value) for value in (*arguments[1:], *options.values())):
            raise UsageError(
                "attach: optimizer.step(closure) computes gradients inside the step, whose times "
                "and weights cannot be told apart; call the closure before step()"
            )
        self._depth += 1

    def _step_ends(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._seen.clear()
        waited_s, self._waited_s = self._waited_s, 0.0
        self._balancer.step_ended(waited_s=waited_s)
        self._await_forward()

    def detach(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        self._optimizer.synchronize = self._synchronize  # type: ignore[attr-defined]  # as above


def attach(optimizer: torch.optim.Optimizer, balancer: Balancer) -> Attachment:
    """Let a balancer see and weigh the steps of a ``hvd.DistributedOptimizer``.

    One line in a script that otherwise stays as it is::

        loft.attach(optimizer, balancer)  # balancer = loft.Balancer(batch * hvd.size(), "report")

    With equal sizes gradients keep their bits. With other sizes each is scaled by
    ``world_size * size / global_batch_size``, which makes Horovod's average exact; batches then
    come from a ``loft.DataLoader``, a ``loft.BatchSampler`` or ``with balancer.step(n)``. With a
    loader of the script's own a batch is taken to have the planned size, and the fetch of later
    backward passes of one step counts as computing.

    Args:
        optimizer: what ``hvd.DistributedOptimizer`` returned, averaging (its default).
        balancer: made on every rank, for the same ranks.

    Returns:
        A handle whose ``detach`` undoes it.

    Raises:
        ArgumentTypeError: the optimizer has no ``synchronize``, as Horovod's has.
        PlanError: the plan leaves too few ranks with samples.
    """
    if not callable(getattr(optimizer, "synchronize", None)):
        raise ArgumentTypeError(
            f"attach: {type(optimizer).__name__} has no synchronize(); it takes what "
            "hvd.DistributedOptimizer returned, or give balancer= to loft.DistributedOptimizer"
        )
    num_passes = int(getattr(optimizer, "backward_passes_per_step", 1))
    balancer.require(min_ranks=1, num_passes=num_passes)
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    if devices:
        balancer.compute_on(devices[0])
    return Attachment(optimizer, balancer)
