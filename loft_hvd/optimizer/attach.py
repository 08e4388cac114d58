"""``attach``: times and exact weights for a script that keeps its ``hvd.DistributedOptimizer``."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from loft_hvd.balance.balancer import Balancer
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.optimizer.replicas import ReplicaCheck
from loft_hvd.pipeline.gradients import Untouched
from loft_hvd.pipeline.passes import Passes
from loft_hvd.pipeline.scalers import tell_of_unscaling
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport, watch_of
from loft_hvd.transport.waits import waiting

__all__ = ["Attachment", "attach"]


class Attachment:
    """What watches an optimizer for a balancer; made by ``attach``.

    A step's fetch runs from the end of the step before to the first forward pass of a module that
    has parameters of the optimizer, its computing from there to the last gradient. A step with an
    evaluation in front of it (a pass without gradients, or in ``eval()`` of a model that trains in
    ``train()``) is left out of all times; a teacher that is asked in every step is no evaluation.

    As Horovod counts, each parameter's k-th gradient in a step is of the step's k-th batch: passes
    for losses that share no parameter are one pass, whatever their order. A parameter without a
    part in a step's first batch is taken to be of that batch.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        balancer: Balancer,
        *,
        num_passes: int,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self._balancer = balancer
        self._replicas = replicas
        self._num_passes = num_passes
        self._num_seen: dict[int, int] = {}  # gradients of each parameter in this step
        self._untouched = Untouched()
        self._names: dict[Tensor, str] = getattr(optimizer, "_parameter_names", {})  # Horovod's
        # A gradient is counted once: autograd has a thread for each device. Reentrant, as a signal
        # handler of the script's may compute gradients.
        self._counting = threading.RLock()
        # Horovod divides the sum by world_size: shares make it sum_i size_i / total * gradient_i.
        self._passes = Passes(
            balancer, Channel(balancer.transport, "loft.attach"), num_passes=num_passes
        )
        self._passes.has_shares = True
        self._depth = 0  # Horovod's step calls the user's step: both run the step hooks
        # Whether gradients were reduced since the last step. Where they were not the step is one
        # that ``hvd.broadcast_optimizer_state`` takes, on the ranks that have no state yet.
        self._is_reduced = False
        self._synchronize: Callable[[], None] = optimizer.synchronize  # type: ignore[attr-defined]  # checked by ``attach``
        self._optimizer = optimizer
        # Forward passes of other threads, and of loader processes, which are forks with a copy of
        # the hook, are not ours; nor are those of transforms and frozen teachers.
        self._place = os.getpid(), threading.get_ident()
        self._own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        # Modules without parameters.
        self._bare: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._trains_in_train = False
        # Whether models of other parameters were asked, without gradients, in front of this step
        # and of the one before.
        self._has_asked_others = self._asked_before = False
        # Waits for the step's first forward pass; gone as soon as that has come, because a hook
        # on all modules costs every forward pass of the process.
        self._forward: RemovableHandle | None = None
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._step_began),
            optimizer.register_step_post_hook(self._step_ended),
        ]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    weigh = functools.partial(self._weigh, id(parameter))
                    self._handles.append(parameter.register_hook(weigh))
                    arrived = _weak_hook(weakref.WeakMethod(self._arrived))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))
        optimizer.synchronize = self._synchronized  # type: ignore[attr-defined]  # Horovod's step calls it
        tell_of_unscaling(self)
        self._await_forward()

    def _arrived(self, parameter: Tensor) -> None:
        self._balancer.gradient_arrived(blocked_s=0.0)  # Horovod's own hooks do not wait
        if self._num_seen.get(id(parameter), 0) == self._num_passes:  # it is on its way
            self._untouched.note(self._names.get(parameter, "without a name"), parameter)

    def _weigh(self, key: int, gradient: Tensor) -> Tensor | None:
        """Scale a gradient so that Horovod's average over ranks weighs every sample the same."""
        with self._counting:
            if self._num_seen.get(key, 0) >= self._num_passes:  # the step before was never taken
                self._forget_gradients()
            at = self._num_seen.get(key, 0)
            if at == self._passes.num_begun:
                self._depth = 0
                self._begin_batch()
                self._passes.begin(at)
            self._num_seen[key] = at + 1
            return self._passes.weigh(at, gradient, is_mean=True)

    def before_unscaling(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Refuse that a ``GradScaler`` unscales gradients on their way; compare its scale."""
        if optimizer is not self._optimizer:
            return
        if self._num_seen and self._balancer.transport.world_size > 1:
            raise UsageError(
                "attach: torch.amp.GradScaler was called between loss.backward() and "
                "optimizer.synchronize(): gradients are on their way to other ranks, and come back "
                "with their scale. As Horovod's examples have it: optimizer.synchronize(), "
                "scaler.unscale_(optimizer), `with optimizer.skip_synchronize(): "
                "scaler.step(optimizer)`, scaler.update(); loft.DistributedOptimizer needs no such "
                "lines"
            )
        if self._replicas is not None:
            self._replicas.scales.use(scaler)

    def _forget_gradients(self) -> None:
        self._num_seen.clear()
        self._untouched.clear()
        self._passes.clear()

    def _await_forward(self) -> None:
        if self._forward is None:
            began = weakref.WeakMethod(self._forward_began, lambda _: handle.remove())
            handle = self._forward = register_module_forward_pre_hook(_weak_hook(began))

    def _forward_began(self, module: torch.nn.Module, _arguments: Any) -> None:
        if (os.getpid(), threading.get_ident()) != self._place or module in self._bare:
            return
        parameters = list(module.parameters())
        if not any(id(parameter) in self._own for parameter in parameters):
            if not parameters:  # others may be a model whose parameters are replaced for a while
                self._bare.add(module)
            elif not torch.is_grad_enabled():
                self._has_asked_others = True
            return
        # A model that was trained in training mode is evaluated in the other, perhaps with
        # gradients; one that never was is trained in that.
        if torch.is_grad_enabled() and (module.training or not self._trains_in_train):
            self._trains_in_train |= module.training
            # A teacher is asked in each step, a copy of averages that is evaluated in some.
            if self._has_asked_others != self._asked_before:
                self._balancer.leave_step_out()
            self._asked_before, self._has_asked_others = self._has_asked_others, False
            self._begin_batch()
        else:  # an evaluation
            self._balancer.leave_step_out()

    def _begin_batch(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
            self._balancer.begin_own_batch()

    def _synchronized(self) -> None:
        self._is_reduced = True
        self._balancer.computing_ended()
        self._passes.warn_of_other_passes()  # before the wait, which it may make long
        if self._balancer.transport.world_size > 1:
            self._untouched.check()
        with waiting(), self._balancer.log.faults():  # it writes what was added to an error too
            factor = self._passes.sum_factor
            self._forget_gradients()  # a GradScaler may skip the step from here on
            self._wait_for_engine()
            if factor != 1.0:  # what ranks knew only after they had sent
                self._multiply(factor)
            if self._replicas is not None:
                self._replicas.gradients_reduced()

    def _multiply(self, factor: float) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _wait_for_engine(self) -> None:
        """Synchronize as Horovod does; its errors say which rank is behind them."""
        ranks = self._balancer.transport
        try:
            with watch_of(ranks).waiting():
                self._synchronize()
        except Exception as error:
            ranks.can.explain(error)
            raise

    def _step_began(self, _optimizer: Any, arguments: Any, options: Any) -> None:
        if any(callable(value) for value in (*arguments[1:], *options.values())):
            raise UsageError(
                "attach: optimizer.step(closure) computes gradients inside the step, whose times "
                "and weights cannot be told apart; call the closure before step()"
            )
        self._depth += 1

    def _step_ended(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or not self._is_reduced:
            return
        self._is_reduced = False
        self._forget_gradients()
        self._balancer.step_ended()
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


def _weak_hook(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """Return a hook that keeps no training alive that is over.

    Hooks on all modules stay with the process, and torch does not collect those on gradients that
    have arrived, nor what they hold.
    """

    def call(*arguments: Any) -> None:
        if (bound := method()) is not None:
            bound(*arguments)

    return call


def attach(optimizer: torch.optim.Optimizer, balancer: Balancer) -> Attachment:
    """Let a balancer see and weigh the steps of a ``hvd.DistributedOptimizer``.

    One line in a script that otherwise stays as it is, before its first step::

        loft.attach(optimizer, balancer)  # balancer = loft.Balancer(batch * hvd.size(), "report")

    With equal sizes gradients keep their bits. With other sizes each is scaled by
    ``world_size * size / global_batch_size``, which makes Horovod's average exact; batches then
    come from a ``loft.DataLoader``, a ``loft.BatchSampler`` or ``with balancer.step(n)``. With a
    loader of the script's own a batch is taken to have the planned size, and the fetch of later
    backward passes of one step counts as computing.

    In the first step, and now and then, the ranks' copies of the parameters are compared: ranks
    that start from different models, as without ``hvd.broadcast_parameters``, end with an error.
    Not in an elastic job. It opens a heartbeat, as ``loft.DistributedOptimizer`` does: when a rank
    fails, the others end and say which one (``docs/failures.md``). In an elastic job
    ``loft.elastic.State`` opens it.

    Several backward passes for one batch (two losses, each with parameters of its own) count as
    one batch, computed from its arrival to the last gradient of them all.

    Args:
        optimizer: what ``hvd.DistributedOptimizer`` returned, averaging (its default).
        balancer: made on every rank, for the same ranks; each of them calls ``attach``.

    Returns:
        A handle whose ``detach`` undoes it.

    Raises:
        ArgumentTypeError: the optimizer has no ``synchronize``, as Horovod's has.
        ArgumentError: the balancer plans micro-batches, chooses the global batch, or leaves ranks
            out.
        PlanError: the plan leaves too few ranks with samples.
        MismatchError: later, in ``step``: copies differ; names the ranks and the parameter.
    """
    if not callable(getattr(optimizer, "synchronize", None)):
        raise ArgumentTypeError(
            f"attach: {type(optimizer).__name__} has no synchronize(); it takes what "
            "hvd.DistributedOptimizer returned; or give balancer= to loft.DistributedOptimizer or, "
            "under DistributedDataParallel, to loft.ddp_hook"
        )
    if balancer.splits:
        raise ArgumentError(
            "attach: Horovod's optimizer counts the same backward passes on every rank, and with "
            "Balancer(micro_batches=True) ranks make different ones; give the optimizer itself and "
            "the balancer to loft.DistributedOptimizer"
        )
    if balancer.is_auto:
        raise ArgumentError(
            "attach: Balancer('auto') goes by the gradients' noise, and Horovod's optimizer does "
            "not show it; give the optimizer itself and the balancer to loft.DistributedOptimizer, "
            "or use a fixed global batch"
        )
    if balancer.min_batch == 0:
        raise ArgumentError(
            "attach: Horovod's optimizer reduces what backward passes leave, and with "
            "Balancer(min_batch=0) a rank may have none; give the optimizer itself and the "
            "balancer to loft.DistributedOptimizer, or min_batch=1 or more"
        )
    ranks = balancer.transport
    if not config().is_elastic:  # ranks that join would open theirs while the others train
        ranks.can.open_heartbeat()
    num_passes = int(getattr(optimizer, "backward_passes_per_step", 1))
    balancer.require(min_ranks=1, num_passes=num_passes)
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    if devices:
        balancer.compute_on(devices[0])
    return Attachment(
        optimizer, balancer, num_passes=num_passes, replicas=_replicas_of(optimizer, ranks)
    )


def _replicas_of(optimizer: torch.optim.Optimizer, ranks: Transport) -> ReplicaCheck | None:
    """Return what compares the ranks' copies; None where ranks may join, or need no equal copies.

    Raises:
        MismatchError: some ranks want to compare and others do not.
    """
    names = getattr(optimizer, "_parameter_names", {})  # Horovod's, by parameter
    every = (p for group in optimizer.param_groups for p in group["params"])
    named = [(names.get(p, str(at)), p) for at, p in enumerate(every) if p.requires_grad]
    if config().is_elastic:
        return None
    some = getattr(optimizer, "process_set", None)  # each set of ranks may train a model of its own
    is_of_all = some is None or some.size() == ranks.world_size
    channel = Channel(ranks, "loft.attach")
    fields = {
        "LOFT_HVD_COPIES": config().copies,
        "number of parameters": str(len(named)),
        "whether the optimizer is of all the balancer's ranks": str(is_of_all),
    }
    check_agreement(channel, fields, what="attach", advice="Start all ranks alike")
    return ReplicaCheck(channel, optimizer, named) if named and is_of_all else None
