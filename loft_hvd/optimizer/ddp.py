"""``ddp_hook``: a rule instead of the mean under ``torch.nn.parallel.DistributedDataParallel``.

::

    model = DistributedDataParallel(model)
    hook = loft.ddp_hook(loft.TrimmedMean(f=1))
    model.register_comm_hook(None, hook)
    ...
    print(hook.report())

Each of DDP's buckets is one robust all-reduce, started in the backward pass as soon as DDP has
filled it; the backward pass ends when all are there. Traffic and memory are those of
``loft.allreduce``: 2 (n-1)/n of the bytes, 16-bit ones as they are, and one buffer more for each
bucket.

A step ends with the backward pass that DDP reduces after. Passes before it, under ``no_sync()``,
add up in ``.grad``, each weighed by its own batch.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.balance.plan import StepSizes
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.optimizer.options import (
    EqualBatches,
    advised_momentum,
    advised_scope,
    batches_of,
    check_watching,
)
from loft_hvd.optimizer.parameters import check_whole, parts_error
from loft_hvd.optimizer.workers import StandingLog, are_all_on_cpu, make_watch
from loft_hvd.pipeline.allreduce import Handle, forget_transport, start_allreduce
from loft_hvd.pipeline.momentum import Ages, Blend, LossScaler, WorkerMomentum
from loft_hvd.pipeline.selection import Scope, Selection, SelectionPart, check_scope
from loft_hvd.pipeline.suspicion.report import SuspicionReport, ZeroedParameter
from loft_hvd.pipeline.suspicion.spread import (
    JUDGE_IN_SHARDS_BELOW,
    WARN_ABOVE,
    SpreadWatch,
    tell_scope,
)
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine, Unwatched, WorkerWatch
from loft_hvd.pipeline.suspicion.zeroed import ZeroedWatch, is_not_zero
from loft_hvd.pipeline.weights import PassWeights, combine_passes, in_training
from loft_hvd.runlog import RunLog
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport, locate, watch_of
from loft_hvd.transport.mesh import meshed
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["DDPHook", "ddp_hook"]

_logger = logging.getLogger(__name__)
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
    rule = Mean() if rule is None else rule
    if not isinstance(rule, Rule):
        raise ArgumentTypeError(
            f"ddp_hook: rule={rule!r} is of type {type(rule).__name__}; pass one such as "
            "loft.TrimmedMean(f=1)"
        )
    if balancer is not None and balancer.splits:
        raise ArgumentError(
            "ddp_hook: with Balancer(micro_batches=True) ranks make different numbers of backward "
            "passes, and DDP reduces after each that no_sync() does not hold back; use "
            "loft.DistributedOptimizer without DDP"
        )
    check_watching([rule], diagnostics, quarantine)
    scope = advised_scope([rule], scope)
    check_scope(scope, [rule], what="ddp_hook")
    names = {id(parameter): (name, parameter) for name, parameter in named_parameters or ()}
    texts = {key: name for key, (name, _) in names.items()}
    check_whole(texts, [parameter for _, parameter in names.values()], what="ddp_hook")
    ends = TorchDistributedTransport() if transport is None else transport
    channel = Channel(ends, "loft.ddp", config().timeout_s if timeout_s is None else timeout_s)
    world = {"rank": ends.rank, "world_size": ends.world_size}
    batches = batches_of(balancer, RunLog(None), log_dir, **world)
    if ends.world_size > 1:
        rule.check(ends.world_size)
        if isinstance(ends, TorchDistributedTransport):
            ends.open_heartbeat()
        fields = {
            "option rule": str(rule),
            "variable LOFT_HVD_MESH": config().mesh,
            "option balancer": "none" if balancer is None else str(balancer.global_batch_size),
            "option scope": scope,
            "option diagnostics": str(diagnostics),
            "option quarantine": str(quarantine),
            "option worker_momentum": str(worker_momentum),
            "option scaler": "none" if scaler is None else "given",
        }
        check_agreement(channel, fields, what="ddp_hook", refusal=batches.log.refusal)
        if balancer is not None:  # in a world of one any plan will do
            balancer.require(min_ranks=rule.min_rows, num_passes=1)
    elif batches.log.refusal:
        raise ArgumentError(batches.log.refusal)
    beta = advised_momentum([rule], worker_momentum)
    if worker_momentum is None and beta and ends.rank == 0:
        _logger.warning(
            "ddp_hook: with %s ranks send averages of worker_momentum=%g; the optimizer under DDP "
            "must have no momentum of its own: SGD momentum=0 and lr / %.3g, or Adam "
            "betas=(0.0, b2); give worker_momentum= to say so",
            rule,
            beta,
            1 - beta,
        )
    hook = DDPHook(
        rule,
        batches,
        channel,
        texts,
        scope=scope,
        diagnostics=diagnostics,
        quarantine=quarantine,
        momentum=WorkerMomentum(beta, scaler=scaler) if beta else None,
    )
    if transport is None:  # the hook's own: one that was given may have others on it
        weakref.finalize(hook, forget_transport, ends).atexit = False
    return hook


@contextmanager
def _located(place: str) -> Iterator[None]:
    """Let errors say which bucket they met."""
    try:
        yield
    except BaseException as error:
        raise locate(error, place) from error.__cause__


class _StepPasses:
    """The batches of which DDP's buckets hold gradients: of one backward pass, or of several.

    A pass begins with the first gradient after a forward pass of the model. Under ``no_sync()``
    DDP adds its gradients to ``.grad`` and calls no hook, so each is weighed as it comes, and so
    are those of the pass that ends the step. Gradients of a lone pass are weighed in the buckets.

    Attributes:
        sizes: of the step's batches, in order; empty where all weigh the same.
        has_shares: whether gradients were weighed as they came.
    """

    def __init__(self, source: Balancer | EqualBatches, rank: int, *, is_mean: bool) -> None:
        self._source = source
        self._rank = rank
        self._is_mean = is_mean
        self._is_fresh = False  # no gradient has come since the newest forward pass
        self._is_held_back = False  # that was under no_sync()
        # A pass begins once: autograd has a thread for each device. Reentrant, as a signal handler
        # of the script's may compute gradients.
        self._beginning = threading.RLock()
        self.sizes: list[StepSizes] = []
        self.has_shares = False

    def forward_began(self, *, is_held_back: bool) -> None:
        self._is_fresh, self._is_held_back = True, is_held_back

    def weigh(self, grad: Tensor) -> Tensor | None:
        """Return a gradient of this rank times its share of the batch, n x_i / X under a mean."""
        with self._beginning:
            if self._is_fresh and (self._is_held_back or self.has_shares):
                self._begin()
                self.has_shares = True
        if not self.has_shares:
            return None
        if self._is_held_back:  # no bucket will tell
            self._source.gradient_arrived(blocked_s=0.0)
        newest = self.sizes[-1]
        mine = newest.sizes[self._rank]
        if mine == 0:
            return torch.zeros_like(grad)  # of a dummy batch: 0 * NaN is NaN
        share = mine * len(newest.sizes) / newest.total
        return grad * share if self._is_mean and share != 1.0 else None

    def bucket_began(self) -> None:
        """Begin the pass that ends a step, with its first bucket, unless a gradient has."""
        with self._beginning:
            if self._is_fresh or not self.sizes:
                self._begin()

    def _begin(self) -> None:
        self._is_fresh = False
        sizes = self._source.take_step()
        # A batch that the script cuts up itself is one batch, however many passes it takes.
        if sizes is not None and not (self.sizes and sizes is self.sizes[-1]):
            self.sizes.append(sizes)

    def step_ended(self) -> None:
        self.sizes.clear()
        self.has_shares = self._is_fresh = False


@dataclass(frozen=True)
class _Weighing:
    """What rows of a step weigh."""

    weights: tuple[int, ...] | None  # of the all-reduces, [world_size]
    present: tuple[bool, ...] | None
    by_worker: PassWeights  # as those are told who watch workers
    row_scale: float  # what this rank's values are multiplied by
    blend: Blend | None  # with momentum: how its row comes about of its gradient
    ages: Ages | None


@dataclass(frozen=True)
class _Flight:
    """A bucket on its way: what DDP waits for, its values, [numel], its name, what it is of."""

    handle: Handle
    future: torch.futures.Future[Tensor]
    values: Tensor
    place: str
    parameters: list[Tensor]


class _ZeroedBuckets:
    """Tells ``ZeroedWatch`` of the parameters in DDP's buckets, whose layout changes at first."""

    def __init__(self, channel: Channel, names: dict[int, str]) -> None:
        self._channel = channel
        self._names = names  # of parameters, by id; filled before the first step ends
        self._watch: ZeroedWatch | None = None  # made with the first step, which is looked at
        self._own: dict[int, Tensor] = {}

    def sent(self, bucket: GradBucket) -> None:
        """Note where this rank's own gradients are not zero, if the step is looked at."""
        if self._watch is None or self._watch.is_due:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._own[id(parameter)] = is_not_zero(gradient)

    def step_reduced(self, flights: Sequence[_Flight]) -> None:
        """Look at a step whose buckets are reduced by now, if it is time to."""
        if self._watch is None:
            parameters = [each for flight in flights for each in flight.parameters]
            names = [self._names.get(id(p)) or f"of shape {list(p.shape)}" for p in parameters]
            self._watch = ZeroedWatch(parameters, names, self._channel, advice=_ZEROED_ADVICE)
        own, self._own = self._own, {}
        results: dict[int, Tensor] = {}
        if self._watch.is_due:
            for flight in flights:
                pieces = flight.values.split([p.numel() for p in flight.parameters])
                results |= zip(map(id, flight.parameters), pieces, strict=True)
        self._watch.step_reduced(own, results)

    @property
    def found(self) -> tuple[ZeroedParameter, ...]:
        """The parameters that lose something, the largest share first."""
        return () if self._watch is None else self._watch.found


class DDPHook:
    """A communication hook for one model under ``DistributedDataParallel``; see ``ddp_hook``."""

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
        scope: Scope,
        diagnostics: bool | Suspicion | None,
        quarantine: bool | Quarantine,
        momentum: WorkerMomentum | None,
    ) -> None:
        self.__name__ = self.__qualname__ = "ddp_hook"  # DDP asks a hook for both
        self._momentum = momentum
        self._rule = rule
        self._batches = batches
        self._channel = channel
        self._names = names  # of parameters, by id
        self._passes = _StepPasses(batches, channel.rank, is_mean=isinstance(rule, Mean))
        self._num_passes = 1  # the most of a step so far
        self._weighing: _Weighing | None = None  # of the step whose buckets come
        self._flights: list[_Flight] = []
        self._device: torch.device | None = None  # that the balancer knows of
        # Who watches depends on where gradients are: with the first of them.
        self._diagnostics, self._quarantine = diagnostics, quarantine
        self._watch: WorkerWatch | Unwatched | None = None
        self._standing = StandingLog(rank=channel.rank, num_workers=channel.world_size)
        # A mean over ranks does not mind that they draw from different data.
        is_mean = isinstance(rule, Mean)
        self._spread = None if is_mean else SpreadWatch(channel)
        self._zeroed = None if is_mean else _ZeroedBuckets(channel, names)
        # What decides over all buckets of a pass, and each bucket's place in it, by its name.
        self._selection: Selection | None = None
        self._parts: dict[str, SelectionPart] = {}
        self._is_auto = scope == "auto"
        # Without other ranks there is nothing to judge, and of few nobody says that they are alike.
        is_compared = self._spread is not None and not self._spread.has_ended
        is_whole = scope == "model" or (self._is_auto and is_compared)
        if is_whole and isinstance(rule, RowRule) and channel.world_size > 1:
            lines = meshed(channel.transport)
            self._selection = Selection(lines, channel.name, rule, scope="model")
        # Equal batches need no look at the model.
        self._stop_looking: Callable[[], object] = lambda: None
        if isinstance(batches, Balancer):
            self._stop_looking = _look_for_model(self)

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        if self._watch is None:
            return SuspicionReport(0, (), note="nobody is watched yet: no gradient has come so far")
        found = () if self._zeroed is None else self._zeroed.found
        return replace(self._watch.report(), zeroed=found)

    def __call__(
        self, state: Any, bucket: GradBucket, *others: object
    ) -> torch.futures.Future[Tensor]:
        """Start a bucket, and with the last one of a pass wait for all; DDP calls it."""
        if isinstance(bucket, Tensor):
            raise parts_error("ddp_hook: it was called", made_by="FullyShardedDataParallel")
        return self._reduce(bucket)

    # The model, of which only buckets are seen otherwise.

    def take_model(self, model: DistributedDataParallel) -> None:
        """Weigh the gradients of passes that DDP holds back; called in a forward pass."""
        self._stop_looking()
        # Weak: torch never frees a parameter whose hooks lead back to it.
        hook = weakref.ref(self)

        def began(module: torch.nn.Module, _: Any) -> None:
            if not torch.is_grad_enabled() or (alive := hook()) is None:
                return
            is_held_back = not module.require_backward_grad_sync
            alive._passes.forward_began(is_held_back=is_held_back)
            while is_held_back and parameters:  # once: a run without no_sync() pays nothing
                parameters.pop().register_hook(weigh)

        def weigh(grad: Tensor) -> Tensor | None:
            return None if (alive := hook()) is None else alive._weigh(grad)

        parameters = [p for p in model.parameters() if p.requires_grad]
        for name, parameter in model.module.named_parameters():
            self._names.setdefault(id(parameter), name)
        model.register_forward_pre_hook(began)
        began(model, ())

    def _weigh(self, grad: Tensor) -> Tensor | None:
        with self._told():
            return self._passes.weigh(grad)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Let other ranks, and the run log, know what fails."""
        try:
            yield
        except BaseException as error:
            self._flights.clear()
            watch_of(self._channel.transport).report(error)
            self._batches.log.write_fault(error)
            raise

    # A step.

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        values, place = bucket.buffer(), self._place(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with self._told():
            if bucket.index() == 0:
                self._begin_step(values.device)
            self._batches.gradient_arrived(blocked_s=0.0)
            assert self._weighing is not None  # a pass begins with bucket 0
            assert self._watch is not None
            if self._zeroed is not None and self._weighing.by_worker.present[self._channel.rank]:
                self._zeroed.sent(bucket)
            if self._weighing.row_scale != 1.0:
                values.mul_(self._weighing.row_scale)
            if self._spread is not None:
                self._spread.sent(bucket.index(), values)
            if self._momentum is not None and self._weighing.blend is not None:
                pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
                for parameter, gradient in pairs:
                    self._momentum.send(parameter, gradient, gradient, self._weighing.blend)
            with _located(place):
                handle = self._start(bucket.index(), values, self._weighing, self._watch)
            self._flights.append(_Flight(handle, future, values, place, bucket.parameters()))
            # No thread moves these on: every new bucket gives itself and the others a push. What
            # fails of another is told when the pass is waited for.
            with _located(place):
                handle.done()
            if bucket.is_last():
                if self._selection is not None:
                    self._selection.complete()
                self._finish(self._weighing, self._watch)
        return future

    def _begin_step(self, device: torch.device) -> None:
        self._stop_looking()  # a model whose hook is not this one itself stays unknown
        if self._watch is None:
            self._watch = make_watch(
                self._channel,
                [self._rule],
                diagnostics=self._diagnostics,
                quarantine=self._quarantine,
                are_on_cpu=are_all_on_cpu(self._channel, device.type == "cpu"),
            )
            self._standing.write_rules(self._batches.log, (self._rule,), self._watch, over=None)
        if self._device != device:
            self._device = device
            self._batches.compute_on(device)
        self._passes.bucket_began()
        self._weighing = self._weigh_rows(self._passes.sizes, self._watch)
        if self._selection is not None:
            self._selection.begin()

    def _weigh_rows(self, sizes: Sequence[StepSizes], watch: WorkerWatch | Unwatched) -> _Weighing:
        """Say what rows weigh: under a mean exactly, else by capped counts; see ``weights.py``."""
        rank, num_ranks = self._channel.rank, self._channel.world_size
        own = PassWeights(None, (True,) * num_ranks, 1.0)
        if sizes:
            own = combine_passes(sizes, rank=rank)
        has_shares, is_mean = self._passes.has_shares, isinstance(self._rule, Mean)
        ages = blend = None
        if self._momentum is not None:
            # This step's: a hook begins with no averages, so an honest claim is 0.
            most = num_ranks if own.counts is None else sum(own.counts)
            self._momentum.join(self._channel, most_samples=most)
            ages = self._momentum.ages(own.counts)
            gain = ages.counts[rank] * own.row_scale
            if is_mean:  # gradients with shares are times n x_i / X already
                gain = sum(ages.counts) / num_ranks if has_shares else ages.counts[rank]
            blend = ages.blend(rank, gain=gain, scale=1.0)
        if is_mean:
            exact = None if has_shares else own.counts
            present = own.present if sizes and ages is None and not has_shares else None
            weights = exact if ages is None else ages.exact()
            return _Weighing(weights, present, own, 1.0, blend, ages)
        by_worker = watch.mask(own if ages is None else ages.weigh(own))
        # With momentum it is in the gain; an absent rank's values are not looked at.
        row_scale = own.row_scale if ages is None and own.row_scale else 1.0
        weights = in_training(self._rule, by_worker).weights
        return _Weighing(weights, by_worker.present, by_worker, row_scale, blend, ages)

    def _start(
        self, index: int, values: Tensor, weighing: _Weighing, watch: WorkerWatch | Unwatched
    ) -> Handle:
        # DDP lays its buckets out anew after the first pass: a size of its own, a name.
        name = f"{self._channel.name}.b{index:02d}.{values.numel()}"
        selection = None
        if self._selection is not None and values.numel():
            selection = self._parts.setdefault(name, SelectionPart(self._selection))
            self._selection.join(selection)
        return start_allreduce(
            values,
            self._rule,
            name=name,
            weights=weighing.weights,
            present=weighing.present,
            transport=self._channel.transport,
            selection=selection,
            run=watch.run,
        )

    def _finish(self, weighing: _Weighing, watch: WorkerWatch | Unwatched) -> None:
        self._batches.computing_ended()
        began = time.monotonic()
        handles = [flight.handle for flight in self._flights]
        with watch_of(self._channel.transport).waiting():
            watch.computing_ended()
            watch.score()
            for flight in self._flights:
                # One limit for all of them, as ranks come to all of them together. A bucket that
                # fails ends the wait for any: over the model all others wait for its rows.
                left_s = max(0.0, self._channel.timeout_s - (time.monotonic() - began))
                with self._told_by(flight):
                    flight.values.copy_(flight.handle.wait(left_s, beside=handles))
                flight.future.set_result(flight.values)
            watch.step_reduced(weighing.by_worker)
            reduced = [flight.values for flight in self._flights]
            found = None if self._spread is None else self._spread.step_reduced(reduced)
            if self._zeroed is not None:
                self._zeroed.step_reduced(self._flights)
        if found is not None:
            self._batches.log.write("spread", **asdict(found))
            watch.ranks_compared(are_apart=found.usual > WARN_ABOVE)
            if self._is_auto and self._selection is not None:
                is_alike = found.usual <= JUDGE_IN_SHARDS_BELOW
                if is_alike:  # every rank alike, from the next pass on
                    self._selection = None
                    self._parts.clear()
                    self._batches.log.write("scope", scope="shard")
                if self._channel.rank == 0:
                    tell_scope(found, is_model=not is_alike)
        self._standing.step_reduced(self._batches.log, watch)
        self._flights.clear()
        if self._momentum is not None and weighing.ages is not None:
            self._momentum.step_ended(weighing.ages)
        self._end_step(watch, waited_s=time.monotonic() - began)

    def _end_step(self, watch: WorkerWatch | Unwatched, *, waited_s: float) -> None:
        num_passes = len(self._passes.sizes)
        if (
            num_passes > self._num_passes and self._channel.world_size > 1
        ):  # plans may begin with a step's first pass
            self._num_passes = num_passes
            self._batches.require(min_ranks=self._rule.min_rows, num_passes=num_passes)
        self._passes.step_ended()
        self._weighing = None
        # Before the step ends: a plan may be made at its end.
        self._batches.hold(watch.absent_ranks)
        self._batches.step_ended(waited_s=waited_s)

    @contextmanager
    def _told_by(self, waited_for: _Flight) -> Iterator[None]:
        """Let errors say which bucket has failed: perhaps another than the one waited for."""
        try:
            yield
        except BaseException as error:
            failed = (each for each in self._flights if each.handle.failure is error)
            with _located(next(failed, waited_for).place):
                raise

    def _place(self, bucket: GradBucket) -> str:
        parameters = bucket.parameters()
        known = [self._names.get(id(parameter), "") for parameter in parameters]
        ends = [name or f"shape {list(p.shape)}" for name, p in zip(known, parameters, strict=True)]
        inside = " .. ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else "no parameters"
        return f"bucket {bucket.index()} ({inside})"


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
