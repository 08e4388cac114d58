"""``ddp_hook``: a rule instead of the mean under ``torch.nn.parallel.DistributedDataParallel``.

::

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, loft.ddp_hook(loft.TrimmedMean(f=1)))

Each of DDP's buckets is one robust all-reduce, started in the backward pass as soon as DDP has
filled it; the backward pass ends when all are there. Traffic and memory are those of
``loft.allreduce``: 2 (n-1)/n of the bytes, 16-bit ones as they are, and one buffer more for each
bucket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.balance.plan import StepSizes
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.optimizer.options import EqualBatches, advised_momentum
from loft_hvd.pipeline.allreduce import Handle, start_allreduce
from loft_hvd.pipeline.momentum import Ages, LossScaler, WorkerMomentum
from loft_hvd.pipeline.selection import Scope, Selection, SelectionPart, check_scope
from loft_hvd.pipeline.suspicion.spread import WARN_ABOVE, SpreadWatch
from loft_hvd.pipeline.weights import PassWeights, combine_passes, in_training
from loft_hvd.runlog import RunLog
from loft_hvd.transport.base import Channel, Transport, locate, watch_of
from loft_hvd.transport.mesh import meshed
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["ddp_hook"]

_logger = logging.getLogger(__name__)

CommHook = Callable[[Any, "GradBucket"], torch.futures.Future[Tensor]]


def ddp_hook(
    rule: Rule | None = None,
    balancer: Balancer | None = None,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    scope: Scope = "shard",
    transport: Transport | None = None,
    timeout_s: float | None = None,
    worker_momentum: float | None = None,
    scaler: LossScaler | None = None,
) -> CommHook:
    """Return a communication hook that aggregates gradients by a rule.

    Make it on every rank alike, after ``torch.distributed.init_process_group()``, and register it:
    ``model.register_comm_hook(None, hook)``. Gradients end with the same bits on every rank.

    Args:
        rule: how rows are aggregated, ``Mean()`` by default.
        balancer: says how many samples each rank's gradient stands for; equal without one. Then
            every backward pass is a step: use no ``no_sync()``.
        named_parameters: ``model.named_parameters()``, so that errors name parameters.
        scope: by which values a rule that sees rows judges them: "shard", by the slice of a bucket
            that one rank aggregates; "model", by all buckets of a backward pass, so that results
            travel only after it; "auto", in shards until a warning says that ranks' gradients
            differ lastingly.
        transport: the ranks; the default process group by default.
        timeout_s: longest wait in seconds; None takes ``LOFT_HVD_TIMEOUT_S``.
        worker_momentum: as in ``DistributedOptimizer``; the hook cannot see the optimizer, which
            must have no momentum of its own. A resumed run begins its averages anew.
        scaler: as in ``DistributedOptimizer``.

    Returns:
        A function of DDP's state, which it ignores, and a ``torch.distributed.GradBucket``.

    Raises:
        ArgumentTypeError: ``rule`` is not a rule.
        ArgumentError: the balancer plans micro-batches, or ``scope`` does not suit the rule.
        AggregationError: the rule does not fit the number of ranks.
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
            "ddp_hook: DDP reduces after every backward pass, and with "
            "Balancer(micro_batches=True) ranks make different numbers of them; use "
            "loft.DistributedOptimizer without DDP"
        )
    check_scope(scope, [rule], what="ddp_hook")
    ends = TorchDistributedTransport() if transport is None else transport
    if ends.world_size > 1:
        rule.check(ends.world_size)
        if isinstance(ends, TorchDistributedTransport):
            ends.open_heartbeat()
        if balancer is not None:  # in a world of one any plan will do
            balancer.require(min_ranks=rule.min_rows, num_passes=1)
    beta = advised_momentum([rule], worker_momentum)
    if worker_momentum is None and beta and ends.rank == 0:
        _logger.warning(
            "ddp_hook: with %s ranks send averages of worker_momentum=%g; the optimizer under DDP "
            "must have no momentum of its own: SGD momentum=0 and lr / %.3g, or Adam "
            "betas=(0, b2); give worker_momentum= to say so",
            rule,
            beta,
            1 - beta,
        )
    momentum = WorkerMomentum(beta, scaler=scaler) if beta else None
    names = {id(parameter): name for name, parameter in named_parameters or ()}
    channel = Channel(ends, "loft.ddp", config().timeout_s if timeout_s is None else timeout_s)
    batches = balancer or EqualBatches(RunLog(None))
    hook = _BucketReducer(rule, batches, channel, names, scope=scope, momentum=momentum)

    def reduce_bucket(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return hook.reduce(bucket)

    # DDP compares annotations with the types themselves, not with their names.
    reduce_bucket.__annotations__ = {
        "state": Any,
        "bucket": vars(dist)["GradBucket"],
        "return": torch.futures.Future[Tensor],
    }
    return reduce_bucket


@contextmanager
def _located(place: str) -> Iterator[None]:
    """Let errors say which bucket they met."""
    try:
        yield
    except BaseException as error:
        raise locate(error, place) from error.__cause__


@dataclass(frozen=True)
class _Flight:
    """A bucket on its way: what DDP waits for, its values, [numel], and its name in errors."""

    handle: Handle
    future: torch.futures.Future[Tensor]
    values: Tensor
    place: str


class _BucketReducer:
    """One model's buckets, backward pass by backward pass."""

    def __init__(
        self,
        rule: Rule,
        batches: Balancer | EqualBatches,
        channel: Channel,
        names: dict[int, str],
        *,
        scope: Scope,
        momentum: WorkerMomentum | None,
    ) -> None:
        self._momentum = momentum
        self._ages: Ages | None = None  # of this pass's averages, with momentum
        self._rule = rule
        self._batches = batches
        self._channel = channel
        self._names = names  # of parameters, by id
        self._sizes: StepSizes | None = None  # of this pass; None for equal ones
        self._flights: list[_Flight] = []
        self._device: torch.device | None = None  # that the balancer knows of
        # A mean over ranks does not mind that they draw from different data.
        self._spread = None if isinstance(rule, Mean) else SpreadWatch(channel)
        # What decides over all buckets of a pass, and each bucket's place in it, by its name.
        self._selection: Selection | None = None
        self._parts: dict[str, SelectionPart] = {}
        self._is_auto = scope == "auto"
        if scope == "model":
            self._judge_by_model()

    def _judge_by_model(self) -> bool:
        """Judge rows over all buckets from the next pass on; every rank alike.

        Returns:
            Whether there is anything to judge: a rule that sees rows, and other ranks.
        """
        if not isinstance(self._rule, RowRule) or self._channel.world_size == 1:
            return False
        lines = meshed(self._channel.transport)
        self._selection = Selection(lines, self._channel.name, self._rule, scope="model")
        return True

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start a bucket, and with the last one of a pass wait for all."""
        values, place = bucket.buffer(), self._place(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if bucket.index() == 0:
            self._sizes = self._batches.take_step()
            if self._selection is not None:
                self._selection.begin()
        if self._device != values.device:
            self._device = values.device
            self._batches.compute_on(values.device)
        self._batches.gradient_arrived(blocked_s=0.0)
        try:
            if self._spread is not None:
                self._spread.sent(bucket.index(), values)
            if self._momentum is not None:
                self._average(bucket, self._momentum)
            with _located(place):
                handle = self._start(bucket.index(), values)
            self._flights.append(_Flight(handle, future, values, place))
            # No thread moves these on: every new bucket gives itself and the others a push. What
            # fails of another is told when the pass is waited for.
            with _located(place):
                handle.done()
            if bucket.is_last():
                if self._selection is not None:
                    self._selection.complete()
                self._finish()
        except BaseException as error:
            self._flights.clear()
            watch_of(self._channel.transport).report(error)
            self._batches.log.write_fault(error)
            raise
        return future

    def _average(self, bucket: GradBucket, momentum: WorkerMomentum) -> None:
        """Let a bucket hold this rank's averages in place of its gradients."""
        if bucket.index() == 0:
            momentum.join(self._channel, {})
            self._ages = momentum.ages(None if self._sizes is None else self._sizes.sizes)
        assert self._ages is not None  # a pass begins with bucket 0
        rank = self._channel.rank
        blend = self._ages.blend(rank, gain=self._ages.counts[rank], scale=1.0)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            momentum.send(parameter, gradient, gradient, blend)

    def _start(self, index: int, values: Tensor) -> Handle:
        weights: tuple[int, ...] | None = None
        present: tuple[bool, ...] | None = None
        if self._sizes is not None or self._ages is not None:
            combined = PassWeights(None, (True,) * self._channel.world_size, 1.0)
            if self._sizes is not None:
                combined = combine_passes([self._sizes], rank=self._channel.rank)
            # The mean weighs exactly, by samples or by what averages are of; robust rules by
            # capped counts.
            if isinstance(self._rule, Mean):
                weights = combined.counts if self._ages is None else self._ages.exact()
                present = combined.present if self._ages is None else None
            else:
                combined = combined if self._ages is None else self._ages.weigh(combined)
                weights, present = in_training(self._rule, combined).weights, combined.present
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
            weights=weights,
            present=present,
            transport=self._channel.transport,
            selection=selection,
        )

    def _finish(self) -> None:
        self._batches.computing_ended()
        began = time.monotonic()
        handles = [flight.handle for flight in self._flights]
        with watch_of(self._channel.transport).waiting():
            for flight in self._flights:
                # One limit for all of them, as ranks come to all of them together. A bucket that
                # fails ends the wait for any: over the model all others wait for its rows.
                left_s = max(0.0, self._channel.timeout_s - (time.monotonic() - began))
                with self._told_by(flight):
                    flight.values.copy_(flight.handle.wait(left_s, beside=handles))
                flight.future.set_result(flight.values)
            reduced = [flight.values for flight in self._flights]
            found = None if self._spread is None else self._spread.step_reduced(reduced)
        if found is not None:
            self._batches.log.write("spread", **asdict(found))
            if self._is_auto and found.usual > WARN_ABOVE and self._judge_by_model():
                self._batches.log.write("scope", scope="model")
        self._flights.clear()
        if self._momentum is not None and self._ages is not None:
            self._momentum.step_ended(self._ages)
        self._batches.step_ended(waited_s=time.monotonic() - began)

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
