"""``loft.watch``: which rank is slow, in a script that has neither our loader nor our optimizer.

A model's hooks and those of torch's optimizers say where a step is. What they say goes to a
balancer that plans nothing, as from every other front end: its times, its run log, its report.

::

    fetch     from the end of a step to the forward pass; of a torch loader what is spent in it
    forward   to the first gradient of the model's output
    backward  to the last gradient, before DDP waits for other ranks
    waiting   in collectives, and in what DDP does at the end of a backward pass
    queueing  the rank could run, but others had its core, wherever in the step
    other     the optimizer, and the script between steps
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from loft_hvd.balance.balancer import Balancer
from loft_hvd.balance.policies import Unplanned
from loft_hvd.config import config
from loft_hvd.data.fetches import unwatch_fetches, watch_fetches
from loft_hvd.errors import ArgumentTypeError, UsageError
from loft_hvd.transport.base import Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.waits import waiting

__all__ = ["TrainingWatch", "watch"]

_logger = logging.getLogger(__name__)
_MOST_OUTPUTS = 16  # tensors of an output that are asked when their gradients come
_DEPTH = 3  # of the containers in which they lie


class TrainingWatch:
    """What watches a model's training; made by ``watch``, and a context manager."""

    def __init__(
        self,
        model: nn.Module,
        *,
        log_dir: str | Path | None = None,
        interval: int | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir, self._interval, self._transport = log_dir, interval, transport
        self._clock = clock
        self._model = weakref.ref(model)
        self._balancer: Balancer | None = None  # made in the first pass: ranks are connected then
        # Passes of other threads, and of loader processes, which are forks, are none of ours.
        self._place = os.getpid(), threading.get_ident()
        self._is_own: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._trains_in_train = False
        self._num_passes = 0  # of this step so far
        self._is_in_pass = False  # whose backward pass has not begun
        self._backward = -1  # the newest backward pass, as autograd counts them
        self._wait: waiting | None = None  # for other ranks, at the end of a backward pass
        self._on_gradient = _Hook(self, "_backward_began")  # of what the model returns
        self._stall_s: float | None = None  # in loaders since the last pass; None: none is known
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_Hook(self, "_forward_began"), with_kwargs=True),
            model.register_forward_hook(_Hook(self, "_forward_ended")),
            register_optimizer_step_post_hook(_Hook(self, "_step_ended")),
        ]
        weakref.finalize(model, self._handles[-1].remove)  # torch keeps it, for all optimizers
        watch_fetches(self)

    def explain(self) -> str:
        """Say what waiting costs, which rank is slow and why, and what steps consist of."""
        if self._balancer is None:
            return (
                "nothing is known yet: no forward pass in training mode has come through the model "
                "that loft.watch was given; with torch.compile give it what compile returned"
            )
        return self._balancer.explain()

    def detach(self) -> None:
        """Leave the model, and torch's optimizers and loaders, as they were."""
        unwatch_fetches(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> TrainingWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _is_here(self) -> bool:
        return bool(self._handles) and (os.getpid(), threading.get_ident()) == self._place

    def _tell(self, call: Callable[[Balancer], object]) -> None:
        """Tell the balancer; a fault of the watching ends the watching, and nothing else."""
        try:
            if self._balancer is None:
                self._balancer = self._connect()
            call(self._balancer)
        except Exception as error:  # whatever an engine raises whose ranks have left
            self.detach()
            _logger.warning("loft.watch ends, and training goes on: %s", error)

    def _connect(self) -> Balancer:
        if config().is_elastic:
            raise UsageError(
                "watch: ranks of an elastic job come and go; give a loft.Balancer(batch, 'report') "
                "to loft.elastic.State and to loft.attach(optimizer, balancer)"
            )
        ranks = self._transport or default_transport()
        made = Balancer(
            ranks.world_size,
            Unplanned(),
            interval=self._interval,
            log_dir=self._log_dir,
            transport=ranks,
            clock=self._clock,
        )
        model = self._model()
        parameter = None if model is None else next(model.parameters(), None)
        if parameter is not None:
            made.compute_on(parameter.device)
        return made

    # What torch calls, in the order of a step.

    def fetched(self, seconds: float) -> None:
        """Note that the script has got a batch of a torch loader."""
        if not self._is_here():
            return
        if self._is_in_pass and self._balancer is not None:  # the next batch, ahead of its turn
            self._balancer.fetched_ahead(stall_s=seconds)
        else:
            self._stall_s = (self._stall_s or 0.0) + seconds

    def _forward_began(self, model: nn.Module, given: tuple[Any, ...], named: Any) -> None:
        # Within a backward pass it is computed again, for a checkpoint.
        if not self._is_here() or torch._C._current_graph_task_id() != -1:
            return
        self._end_wait()  # of a backward pass that has failed
        if not torch.is_grad_enabled() or (self._trains_in_train and not model.training):
            if self._balancer is not None:
                self._balancer.leave_step_out()  # it evaluates
            return
        self._trains_in_train |= model.training
        if self._is_in_pass:  # of two forward passes and one backward
            return
        samples = _num_samples((*given, *named.values()))
        stall_s, is_first = self._stall_s, self._num_passes == 0
        self._tell(
            lambda balancer: balancer.begin_watched_pass(
                samples=samples, stall_s=stall_s, is_first=is_first
            )
        )
        self._stall_s = None if stall_s is None else 0.0
        self._num_passes += 1
        self._is_in_pass = True

    def _forward_ended(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._is_in_pass and self._is_here() and torch.is_grad_enabled():
            for tensor in _tensors(output, _DEPTH):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_gradient)

    def _backward_began(self, _: Tensor) -> None:
        # In a thread of autograd's, where a device has one.
        task = torch._C._current_graph_task_id()
        if task == self._backward or not self._handles:
            return
        self._backward, self._is_in_pass = task, False
        self._tell(Balancer.backward_began)
        # What is queued here runs when all gradients are there, and before what DDP has queued
        # since, which waits for other ranks; what that queues in turn runs behind it.
        Variable._execution_engine.queue_callback(self._gradients_came)

    def _gradients_came(self) -> None:
        self._wait = waiting()
        self._wait.__enter__()
        self._tell(lambda balancer: balancer.gradient_arrived(blocked_s=0.0))
        Variable._execution_engine.queue_callback(self._end_wait)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.__exit__()
            self._wait = None

    def _step_ended(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._num_passes or not self._is_here() or not self._owns(optimizer):
            return
        self._num_passes, self._is_in_pass = 0, False
        self._tell(Balancer.step_ended)

    def _owns(self, optimizer: Optimizer) -> bool:
        """Say whether an optimizer is of the watched model's parameters."""
        known = self._is_own.get(optimizer)
        if known is None:
            model = self._model()
            own = set() if model is None else {id(each) for each in model.parameters()}
            groups = optimizer.param_groups
            known = any(id(each) in own for group in groups for each in group["params"])
            self._is_own[optimizer] = known
        return known


class _Hook:
    """Calls a method of what watches, for as long as that lives; a copy of the model's does not."""

    def __init__(self, watch: TrainingWatch, method: str) -> None:
        self._call: Callable[..., None] = getattr(watch, method)

    def __call__(self, *given: Any) -> None:
        if not torch.compiler.is_compiling():  # what is traced has no clock
            self._call(*given)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _nobody, ()


def _nobody() -> Callable[..., None]:
    return _unwatched


def _unwatched(*_: Any) -> None:
    """Stand for the hook in a copy of a watched model."""


def _num_samples(given: tuple[Any, ...]) -> int:
    """Return how many samples a model is given, by its first tensor; 1 where that does not tell."""
    for each in given:
        if isinstance(each, Tensor) and each.ndim:
            return max(len(each), 1)
    return 1


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors of what a model returns, some of them."""
    found = 0
    todo = [(value, 0)]
    while todo and found < _MOST_OUTPUTS:
        each, at = todo.pop(0)
        if isinstance(each, Tensor):
            found += 1
            yield each
        elif at <= depth and isinstance(each, Mapping):
            todo += [(item, at + 1) for item in each.values()]
        elif at <= depth and isinstance(each, tuple | list):
            todo += [(item, at + 1) for item in each]


def watch(
    model: nn.Module,
    *,
    log_dir: str | Path | None = None,
    interval: int | None = None,
    transport: Transport | None = None,
) -> TrainingWatch:
    """Say which rank of a training is slow, and by what, in a script that stays as it is.

    One line on every rank, behind ``torch.compile``, ``DistributedDataParallel`` or
    ``fully_shard``; or a ``with`` around the training::

        loft.watch(model, log_dir="runs")  # then, in the shell: loft-hvd report runs

    It needs no loader and no optimizer of ours. Every rank takes the same optimizer steps; once an
    interval ranks exchange a few numbers each, in the background. A step of several passes is one
    step. A fault of the watching is a warning, and training goes on.

    Args:
        model: what the script calls in training. An evaluation of it leaves its step out.
        log_dir: folder of rank 0's run log; None takes ``LOFT_HVD_LOG_DIR``, and without it there
            is none.
        interval: optimizer steps between two exchanges, >= 1; None takes 20 at first, then at least
            20 and as many as take 30 seconds.
        transport: the ranks; by default Horovod's, else those of ``torch.distributed`` when the
            first forward pass comes, else this one alone.

    Returns:
        A handle with ``explain()`` and ``detach()``; the model's hooks keep it alive.

    Raises:
        ArgumentTypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"watch: model is of type {type(model).__name__}, and must be a torch.nn.Module: the "
            "one that the script calls in training"
        )
    return TrainingWatch(model, log_dir=log_dir, interval=interval, transport=transport)
