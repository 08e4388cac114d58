"""``ddp_hook``: a rule instead of the mean under ``torch.nn.parallel.DistributedDataParallel``.

::

    model = DistributedDataParallel(model)
    hook = loft.ddp_hook(loft.TrimmedMean(f=1))
    model.register_comm_hook(None, hook)
    ...
    print(hook.report())

Each of DDP's buckets starts in the backward pass as soon as DDP has filled it, on the engine that
serves ``loft.DistributedOptimizer``; the backward pass ends when all are there. Traffic is
2 (n-1)/n of the bytes, 16-bit ones as they are.

A step ends with the backward pass that DDP reduces after. Passes before it, under ``no_sync()``,
add up in ``.grad``, each weighed by its own batch.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.config import config
from loft_hvd.copies import NeverCopied
from loft_hvd.errors import ArgumentError
from loft_hvd.optimizer.hooks import HookOptions, rule_of
from loft_hvd.optimizer.options import (
    EqualBatches,
    advised_scope,
)
from loft_hvd.optimizer.parameters import check_whole, parts_error
from loft_hvd.optimizer.replicas import compare_batches
from loft_hvd.pipeline.buckets import Bucket, Slot
from loft_hvd.pipeline.engine import Engine
from loft_hvd.pipeline.gradients import copy_scaled
from loft_hvd.pipeline.link_log import LinkLog
from loft_hvd.pipeline.momentum import Blend, LossScaler, WorkerMomentum
from loft_hvd.pipeline.passes import Passes, StepSource
from loft_hvd.pipeline.ring import Owners, flat_exchange
from loft_hvd.pipeline.scalers import ScaleCheck, tell_of_unscaling
from loft_hvd.pipeline.selection import Scope, check_scope
from loft_hvd.pipeline.suspicion.judgement import Judgement, Watching
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine
from loft_hvd.pipeline.tolerance import check_gather
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport, watch_of
from loft_hvd.transport.datagram import LossTolerant
from loft_hvd.transport.default import torch_transport
from loft_hvd.transport.waits import waiting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["DDPHook", "ddp_hook"]

_ZEROED_ADVICE = (
    "ddp_hook has one rule for all parameters: use loft.DistributedOptimizer without DDP, with "
    "rule={{{name!r}: loft.Mean(), '*': ...}}, or a rule over the ranks that have a gradient there "
    "(docs/rules.md); see hook.report()"
)


def ddp_hook(  # noqa: PLR0913 - a script sets few of them, by name
    rule: Rule | None = None,
    balancer: Balancer | None = None,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    scope: Scope | None = None,
    diagnostics: bool | Suspicion | None = None,
    quarantine: bool | Quarantine = False,
    log_dir: str | Path | None = None,
    transport: Transport | None = None,
    timeout_s: float | None = None,
    worker_momentum: float | None = None,
    scaler: LossScaler | None = None,
    gather: LossTolerant | None = None,
) -> DDPHook:
    """Return a communication hook that aggregates gradients by a rule.

    Make it on every rank alike, after ``torch.distributed.init_process_group()``, and register it:
    ``model.register_comm_hook(None, hook)``. Gradients end with the same bits on every rank.
    ``no_sync()``, ``find_unused_parameters=True`` and ``static_graph=True`` work as without it.

    Args:
        rule: how rows are aggregated, ``Mean()`` by default.
        balancer: says how many samples each rank's gradient stands for; equal without one. Each
            forward and backward pass, under ``no_sync()`` too, is of the next batch.
        named_parameters: ``model.named_parameters()``, so that errors name parameters.
        scope: by which values a rule that sees rows judges them: "shard", by the slice of a bucket
            that one rank aggregates; "model", by all buckets of a backward pass, so that results
            travel only after it; "auto", over the model until ranks' gradients are found to be
            alike. None is "auto" with loft.Robust(f), else "shard".
        diagnostics: watch which worker is off, for ``report()`` and warnings; None where that is
            cheap (all ranks on CPUs), or a ``loft.Suspicion`` with the details.
        quarantine: leave a worker out that stands out for long; True, or a ``loft.Quarantine``.
        log_dir: as in ``DistributedOptimizer``.
        transport: the ranks; the default process group by default.
        timeout_s: longest wait in seconds; None takes ``LOFT_HVD_TIMEOUT_S``.
        worker_momentum: as in ``DistributedOptimizer``; the hook cannot see the optimizer, which
            must have no momentum of its own. A resumed run begins its averages anew.
        scaler: as in ``DistributedOptimizer``.
        gather: as in ``DistributedOptimizer``.

    Returns:
        A hook for DDP, of its state, which is ignored, and a ``torch.distributed.GradBucket``; its
        ``report()`` says which worker was off.

    Raises:
        ArgumentTypeError: ``rule`` is not a rule, or a parameter is one of FSDP's.
        ArgumentError: the balancer plans micro-batches, or ``scope`` or ``quarantine`` does not
            suit the rule.
        AggregationError: the rule does not fit the number of ranks.
        MismatchError: ranks were given different options.
        UsageError: ``torch.distributed`` is not initialised.
    """
    rule = rule_of(rule, what="ddp_hook")
    if balancer is not None and balancer.splits:
        raise ArgumentError(
            "ddp_hook: with Balancer(micro_batches=True) ranks make different numbers of backward "
            "passes, and DDP reduces after each that no_sync() does not hold back; use "
            "loft.DistributedOptimizer without DDP"
        )
    scope = advised_scope([rule], scope)
    check_scope(scope, [rule], what="ddp_hook")
    watching = Watching(scope, diagnostics, quarantine)
    options = HookOptions(
        "ddp_hook",
        rule,
        balancer,
        watching=watching,
        log_dir=log_dir,
        timeout_s=timeout_s,
        worker_momentum=worker_momentum,
        scaler=scaler,
    )
    names = {id(parameter): (name, parameter) for name, parameter in named_parameters or ()}
    texts = {key: name for key, (name, _) in names.items()}
    check_whole(texts, [parameter for _, parameter in names.values()], what="ddp_hook")
    ends = torch_transport() if transport is None else transport
    if ends.world_size > 1:
        check_gather(gather, [rule], ends.world_size, what="ddp_hook")
    channel, batches = options.open(ends, {"option gather": str(gather)})
    momentum = options.make_momentum(rank=ends.rank)
    return DDPHook(
        rule, batches, channel, texts, watching=watching, momentum=momentum, gather=gather
    )


class DDPHook(NeverCopied):
    """A communication hook for one model under ``DistributedDataParallel``; see ``ddp_hook``."""

    _in_place_of_a_copy = "make another one by loft.ddp_hook() for another model, on every rank"

    # DDP compares annotations with the types themselves, not with their names: here are none.
    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("state", "bucket")
        ]
    )

    def __init__(
        self,
        rule: Rule,
        batches: Balancer | EqualBatches,
        channel: Channel,
        names: dict[int, str],
        *,
        watching: Watching,
        momentum: WorkerMomentum | None,
        gather: LossTolerant | None,
    ) -> None:
        self.__name__ = self.__qualname__ = "ddp_hook"  # DDP asks a hook for both
        self._rule = rule
        self._batches = batches
        self._channel = channel
        self._names = names  # of parameters, by id
        self._watching = watching
        self._momentum = momentum
        self._gather = gather
        self._links = None
        if gather is not None:
            self._links = LinkLog(channel.transport, gather, batches.log)
        self._passes = Passes(
            batches if isinstance(batches, StepSource) else None,
            channel,
            momentum=momentum,
            mask=self._mask,
        )
        # Of the forward pass before: whether no gradient has come since, and whether it was one
        # under no_sync(), after which DDP adds gradients to .grad and calls no hook.
        self._is_fresh = self._is_held_back = False
        # A pass begins once: autograd has a thread for each device. Reentrant, as a signal handler
        # of the script's may compute gradients.
        self._beginning = threading.RLock()
        self._most_passes = 1  # of a step so far
        # What depends on where gradients are is made with the first of them.
        self._device: torch.device | None = None
        self._engine: Engine | None = None
        self._judgement: Judgement | None = None
        self._parameters: dict[int, Tensor] = {}  # by id, in the order in which they came first
        self._places: dict[int, int] = {}  # by id
        self._is_looked_at = False
        self._step: list[tuple[GradBucket, torch.futures.Future[Tensor]]] = []
        self._scales = ScaleCheck(channel)
        tell_of_unscaling(self)
        # Equal batches need no look at the model.
        self._stop_looking: Callable[[], object] = lambda: None
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        if isinstance(batches, Balancer):
            self._stop_looking = _look_for_model(self)

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        if self._judgement is None:
            return SuspicionReport(0, (), note="nobody is watched yet: no gradient has come so far")
        return self._judgement.report()

    def before_unscaling(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Compare the scale that a ``GradScaler`` takes off this model's gradients."""
        given = (id(each) for group in optimizer.param_groups for each in group["params"])
        if not self._parameters.keys().isdisjoint(given):
            self.synchronize()
            with self._told():
                self._scales.use(scaler)

    def __call__(
        self, state: Any, bucket: GradBucket, *others: object
    ) -> torch.futures.Future[Tensor]:
        """Start a bucket, and with the last one of a pass wait for all; DDP calls it."""
        if isinstance(bucket, Tensor):
            raise parts_error("ddp_hook: it was called", made_by="FullyShardedDataParallel")
        return self._reduce(bucket)

    def synchronize(self) -> None:
        """Take part in a step whose batch leaves this rank without samples; else do nothing.

        ``optimizer.step()`` calls it where the balancer may leave ranks out. A script that looks at
        reduced gradients before, as ``clip_grad_norm_`` does, calls it itself, on every rank.
        """
        model = self._model()
        if model is None or not self._passes.is_passed_over:
            return
        with self._told():
            self._passes.pass_over()
            # As torch's own join of uneven inputs does: what a forward and a backward pass meet
            # other ranks in, with zeros in DDP's buckets.
            reducer: Any = model.reducer
            reducer._rebuild_buckets()
            if model._check_sync_bufs_pre_fwd():
                model._sync_buffers()
            buckets = reducer._get_zeros_like_grad_buckets()
        for bucket in buckets:
            self._reduce(bucket)
        with torch.no_grad():
            for bucket in buckets:
                for parameter, gradient in zip(
                    bucket.parameters(), bucket.gradients(), strict=True
                ):
                    if parameter.grad is None:
                        parameter.grad = gradient.clone()
                    else:
                        parameter.grad.copy_(gradient)
        reducer._push_all_rebuilt_params()

    # The model, of which only buckets are seen otherwise.

    def take_model(self, model: DistributedDataParallel) -> None:
        """Weigh the gradients of passes that DDP holds back; called in a forward pass."""
        self._stop_looking()
        # Weak: torch never frees a parameter whose hooks lead back to it.
        hook = weakref.ref(self)
        if isinstance(self._batches, Balancer) and self._batches.min_batch == 0:
            self._take_part_with(model)

        def began(module: torch.nn.Module, _: Any) -> None:
            if not torch.is_grad_enabled() or (alive := hook()) is None:
                return
            is_held_back = not module.require_backward_grad_sync
            alive._is_fresh, alive._is_held_back = True, is_held_back
            while is_held_back and parameters:  # once: a run without no_sync() pays nothing
                parameters.pop().register_hook(weigh)

        def weigh(grad: Tensor) -> Tensor | None:
            return None if (alive := hook()) is None else alive._weigh(grad)

        parameters = [p for p in model.parameters() if p.requires_grad]
        for name, parameter in model.module.named_parameters():
            self._names.setdefault(id(parameter), name)
        model.register_forward_pre_hook(began)
        began(model, ())

    def _take_part_with(self, model: DistributedDataParallel) -> None:
        """Reduce in ``optimizer.step()`` where this rank has computed nothing in a step."""
        if model.find_unused_parameters:
            raise ArgumentError(
                "ddp_hook: Balancer(min_batch=0) leaves ranks out of steps, and with "
                "find_unused_parameters=True DDP asks all of them what they have used; give "
                "find_unused_parameters=False, or min_batch=1 or more"
            )
        self._model = weakref.ref(model)
        own = {id(parameter) for parameter in model.parameters()}
        hook = weakref.ref(self)

        def step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            alive = hook()
            if alive is not None and any(
                id(each) in own for group in optimizer.param_groups for each in group["params"]
            ):
                alive.synchronize()

        handle = register_optimizer_step_pre_hook(step_begins)
        weakref.finalize(self, handle.remove).atexit = False

    def _weigh(self, grad: Tensor) -> Tensor | None:
        """Weigh a gradient that DDP adds to ``.grad``, or that follows such ones."""
        with self._told():
            with self._beginning:
                if self._is_fresh and (self._is_held_back or self._passes.has_shares):
                    self._begin_pass()
                    self._passes.has_shares = True
            if not self._passes.has_shares:
                return None
            if self._is_held_back:  # no bucket will tell
                self._batches.gradient_arrived(blocked_s=0.0)
            newest = len(self._passes.parts) - 1
            return self._passes.weigh(newest, grad, is_mean=isinstance(self._rule, Mean))

    def _begin_pass(self) -> None:
        self._is_fresh = False
        self._passes.begin(self._passes.num_begun)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Let other ranks, and the run log, know what fails."""
        try:
            yield
        except BaseException as error:
            self._step.clear()
            watch_of(self._channel.transport).report(error)
            self._batches.log.write_fault(error)
            raise

    # A step.

    def _mask(self, weights: PassWeights) -> PassWeights:
        return weights if self._judgement is None else self._judgement.watch.mask(weights)

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with self._told():
            if bucket.index() == 0:
                self._begin_step(bucket.buffer().device)
            self._batches.gradient_arrived(blocked_s=0.0)
            self._step.append((bucket, future))
            self._start(bucket)
            if bucket.is_last():
                self._finish()
        return future

    def _begin_step(self, device: torch.device) -> None:
        self._stop_looking()  # a model whose hook is not this one itself stays unknown
        if self._judgement is None:
            self._judgement = Judgement(
                self._channel,
                [self._rule],
                self._watching,
                is_on_cpu=device.type == "cpu",
                knows_sizes=isinstance(self._batches, StepSource),
                log=self._batches.log,
            )
        if self._device != device:
            self._device = device
            self._batches.compute_on(device)
        with self._beginning:
            if self._is_fresh or self._passes.num_begun == 0:
                self._begin_pass()
        self._passes.fix_weights()

    def _start(self, bucket: GradBucket) -> None:
        assert self._judgement is not None  # a step begins with bucket 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            key = id(parameter)
            if key not in self._places:
                self._places[key], self._parameters[key] = len(self._places), parameter
            if self._passes.is_present:
                self._judgement.sent(self._places[key], gradient)
        values = bucket.buffer()
        if self._channel.world_size == 1:  # the identity, but for an average
            self._pack(self._laid_out(bucket), values)
            return
        engine = self._engine_for(bucket)
        engine.filled(bucket.index())
        engine.start(bucket.index(), values)

    def _engine_for(self, bucket: GradBucket) -> Engine:
        """Return the engine, which knows this bucket: DDP lays them out anew after a first pass."""
        assert self._judgement is not None
        if self._engine is None:
            self._engine = Engine(
                self._channel,
                (),
                [self._rule],
                pack=self._pack,
                owners=Owners(
                    "model" if self._judgement.is_model else "shard", gather=self._gather
                ),
                make_exchange=functools.partial(flat_exchange, run=self._judgement.run),
                is_given=True,
            )
        engine, made, index = self._engine, self._laid_out(bucket), bucket.index()
        if index < len(engine.buckets) and engine.buckets[index] != made:
            engine.cut(index)
        if index == len(engine.buckets):
            # What DDP has checked are parameters; here what travels is compared, once a layout.
            fields = {"number of values": str(made.numel), "dtype": str(made.dtype)}
            check_agreement(self._channel.sub("bucket"), fields, what=f"ddp_hook: {made}")
            engine.add(made, is_last=bucket.is_last())
        return engine

    def _laid_out(self, bucket: GradBucket) -> Bucket:
        values, slots, offset = bucket.buffer(), [], 0
        for parameter in bucket.parameters():
            key, numel = id(parameter), parameter.numel()
            name = self._names.get(key) or f"shape {list(parameter.shape)}"
            slots.append(Slot(self._places[key], name, offset, numel, tuple(parameter.shape)))
            offset += numel
        return Bucket(bucket.index(), values.dtype, str(values.device), 0, tuple(slots))

    def _pack(self, bucket: Bucket, values: Tensor) -> PassWeights:
        """Fill in what is sent of a bucket; it may be DDP's own memory."""
        given, passes, rule = self._step[bucket.index][0].buffer(), self._passes, self._rule
        is_sum = self._engine is not None and self._engine.is_sum(bucket.index)
        if passes.has_gradient:
            scale = passes.scale(rule, is_sum=is_sum)
            if isinstance(scale, Blend):
                assert self._momentum is not None
                for slot, parameter in zip(
                    bucket.slots, self._step[bucket.index][0].parameters(), strict=True
                ):
                    span = slice(slot.offset, slot.offset + slot.numel)
                    own, sent = given[span].view(slot.shape), values[span].view(slot.shape)
                    self._momentum.send(parameter, own, sent, scale)
            elif values.data_ptr() != given.data_ptr() or scale != 1.0:
                copy_scaled(given, values, scale)
        if passes.sends_zeros(rule):
            values.zero_()
        if self._judgement is not None:
            # In DDP's first pass a bucket has its parameters in the model's order; later in that in
            # which gradients come.
            back = bucket if self._is_looked_at else replace(bucket, slots=bucket.slots[::-1])
            self._judgement.packed(back, values, rule)
        return passes.row_weights(rule)

    def _finish(self) -> None:
        self._batches.computing_ended()
        with waiting():
            self._reduced()
        self._end_step()

    def _reduced(self) -> None:
        """Wait until all buckets are reduced, and hand them to DDP."""
        judgement = self._judgement
        assert judgement is not None
        # Evidence goes out once all buckets are queued, so at one place in every rank's order.
        judgement.computing_ended()
        if self._engine is not None:
            self._engine.finish(meanwhile=judgement.score)
        if isinstance(self._rule, Mean) and (factor := self._passes.mean_factor) != 1.0:
            for bucket, _ in self._step:  # what ranks knew only after they had sent
                bucket.buffer().mul_(factor)
        results: list[Tensor | None] = [None] * len(self._places)
        for bucket, future in self._step:
            future.set_result(bucket.buffer())
            for parameter, result in zip(bucket.parameters(), bucket.gradients(), strict=True):
                results[self._places[id(parameter)]] = result
        judgement.step_reduced(self._passes.weights())
        if not self._is_looked_at:
            self._is_looked_at = True
            if self._channel.world_size > 1 and config().copies != "ignore":
                # Of a model's copies DDP itself takes care.
                newest = self._batches.newest_batch
                compare_batches(self._channel, newest, what="ddp_hook, step 1")
            parameters = list(self._parameters.values())
            names = [self._names.get(id(p)) or f"of shape {list(p.shape)}" for p in parameters]
            judgement.look_at(parameters, names, [self._rule] * len(names), _ZEROED_ADVICE)
        samples = self._passes.samples(is_mean=isinstance(self._rule, Mean))
        if judgement.gradients_reduced(results, samples) and self._engine is not None:
            self._engine.judge_by(is_model=judgement.is_model)
        self._step.clear()

    def _end_step(self) -> None:
        assert self._judgement is not None
        num_passes = len(self._passes.batches())
        if num_passes > self._most_passes and self._channel.world_size > 1:
            self._most_passes = num_passes  # plans may begin with a step's first pass
            self._batches.require(min_ranks=self._rule.min_rows, num_passes=num_passes)
        self._passes.step_reduced()
        self._passes.has_shares = self._is_fresh = False
        # Before the step ends: a plan may be made at its end.
        self._batches.hold(self._judgement.watch.absent_ranks)
        self._batches.note_noise(self._judgement.noise)
        self._batches.step_ended()
        if self._links is not None:
            self._links.step_ended()


def _look_for_model(hook: DDPHook) -> Callable[[], object]:
    """Tell a hook of the model that it is registered with, in that one's first forward pass.

    Returns:
        What ends it.
    """
    # DDP tells a hook of buckets alone, and of passes under no_sync() nothing. A hook on all
    # modules costs every forward pass of the process, so it goes with the first of the model.
    alive = weakref.ref(hook)

    def began(module: torch.nn.Module, _: Any) -> None:
        if not isinstance(module, DistributedDataParallel) or (found := alive()) is None:
            return
        if any(_calls(each, found) for each, _ in module._comm_hooks):
            found.take_model(module)

    handle = register_module_forward_pre_hook(began)
    weakref.finalize(hook, handle.remove).atexit = False
    return handle.remove


def _calls(registered: object, hook: DDPHook) -> bool:
    """Say whether what is registered is a hook, or a function around it, as torch's wrappers."""
    cells = getattr(registered, "__closure__", None) or ()
    return registered is hook or any(cell.cell_contents is hook for cell in cells)
