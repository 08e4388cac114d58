"""From autograd's hooks to reduced gradients: what a wrapped optimizer does before it steps."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.plan import StepSizes
from loft_hvd.errors import UsageError
from loft_hvd.pipeline.audit import Audit
from loft_hvd.pipeline.buckets import (
    Bucket,
    ParameterSpec,
    accumulation_dtype,
    agree_on_order,
    lay_out,
)
from loft_hvd.pipeline.engine import Engine
from loft_hvd.pipeline.gradients import Gradients, OutgoingHooks, ReducerSettings, StepSource
from loft_hvd.pipeline.momentum import Ages, Blend, WorkerMomentum
from loft_hvd.pipeline.ring import MakeExchange, Owners, Record, flat_exchange, is_engine_sum
from loft_hvd.pipeline.sparse import agree_on_sparse, as_sparse, sum_sparse
from loft_hvd.pipeline.suspicion.watch import Unwatched, WorkerWatch
from loft_hvd.pipeline.weights import PassWeights, combine_passes, in_training
from loft_hvd.pipeline.wire import Compression
from loft_hvd.transport.base import Channel

__all__ = ["GradientReducer", "warn_of_other_passes"]

_logger = logging.getLogger(__name__)


def warn_of_other_passes(rank: int, *, begun: int, asked: int) -> bool:
    """Warn of a step that ends after other numbers of passes than asked; say whether it does."""
    if begun in (0, asked):
        return False
    _logger.warning(
        "rank %d: a step ends after %d of backward_passes_per_step=%d backward passes; where "
        "ranks have unequal batches, what each pass does with other ranks (a metric's "
        "hvd.allreduce, say) is done more often on one rank than on another: use loft.Metric, "
        "which talks to other ranks once a step",
        rank,
        begun,
        asked,
    )
    return True


class GradientReducer:
    """Reduces the gradients of some parameters over ranks, starting within the backward pass.

    ``parameters`` are in an order equal on every rank; ``specs`` says what each of them is, and
    refers to ``rules`` by index. Without a ``source`` all batches weigh the same. The ``run`` of
    ``watch`` is in ``make_exchange``. With ``momentum`` ranks send averages over time.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        rules: Sequence[Rule],
        *,
        settings: ReducerSettings,
        channel: Channel,
        source: StepSource | None,
        outgoing: OutgoingHooks,
        make_exchange: MakeExchange = flat_exchange,
        watch: WorkerWatch | Unwatched,
        momentum: WorkerMomentum | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._specs = list(specs)
        self._rules = list(rules)
        self._settings = settings
        self._channel = channel
        self._transport = channel.transport
        self._source = source
        self._make_exchange = make_exchange
        self._watch = watch
        self._spec_rules = [rules[spec.rule] for spec in specs]
        self._momentum = momentum
        # A sum over ranks may be sparse; rules and averages need all values.
        self._may_be_sparse = [
            isinstance(rule, Mean) and momentum is None and not settings.sparse_as_dense
            for rule in self._spec_rules
        ]
        self._sparse: dict[int, int] = {}  # those that are, and their sparse dimensions
        self._gradients = Gradients(
            parameters,
            takes_sparse=[settings.sparse_as_dense or may for may in self._may_be_sparse],
            needs_sparse=settings.needs_sparse,
            momentum=momentum,
        )
        self._outgoing = outgoing
        self._starting = threading.Lock()  # a bucket becomes ready once, whichever thread sees it
        # A pass begins once, too: autograd has a thread for each device. Reentrant, as a signal
        # handler of the script's may compute gradients.
        self._beginning = threading.RLock()
        self._has_warned = False  # of a step that ended with too few passes
        is_audited = settings.audit > 0 and channel.world_size > 1
        self.audit = Audit(settings.audit) if is_audited else None
        self._scope = settings.scope
        self._arrivals: list[int] | None = []  # by parameter, until they have become the layout
        self._take_layout(lay_out(specs, bucket_bytes=settings.bucket_bytes), channel)
        self._clear_step()
        self._handles = [handle for i in range(len(parameters)) for handle in self._hook(i)]

    def _take_layout(self, buckets: tuple[Bucket, ...], channel: Channel) -> None:
        settings = self._settings
        self.buckets = buckets
        self._places = {slot.parameter: (each, slot) for each in buckets for slot in each.slots}
        num_summed = channel.world_size if settings.is_sum else 1
        records: list[Record] = []
        self.engine = Engine(
            channel,
            buckets,
            self._rules,
            pack=self._pack,
            mean_factor=settings.predivide * num_summed,
            wire=settings.wire,
            owners=Owners(self._scope, None if self.audit is None else records),
            make_exchange=self._make_exchange,
        )
        if self.audit is not None:
            self.audit.lay_out(channel, records)

    def _clear_step(self) -> None:
        self._counts = [0] * len(self.parameters)  # backward passes that have reached each
        self._unready = [len(bucket.slots) for bucket in self.buckets]
        self._passes: list[StepSizes] = []  # that have begun, with a source
        self._num_passes_begun = 0
        # The backward passes that this rank makes of them: which pass each is of, and its share
        # of the rank's samples in that. Other ranks may make more or fewer; buckets leave once a
        # step everywhere.
        self._parts: list[tuple[int, float]] = []
        self._blocked_s = 0.0
        self._step_weights: PassWeights | None = None
        self._step_ages: Ages | None = None
        self._blends: dict[Rule, Blend] = {}
        self._gradients.begin_step()

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived since the last ``synchronize``."""
        return self._num_passes_begun > 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a bucket is on the wire."""
        return self.engine.next_bucket > 0

    def _begin_pass(self, number: int) -> None:
        """Learn which batch this rank's backward pass ``number`` (from 0) of a step belongs to."""
        if number < len(self._parts):  # without the lock: so for all gradients of a pass but one
            return
        with self._beginning:
            if number < len(self._parts):  # another device's thread has begun it meanwhile
                return
            if self._num_passes_begun >= self._settings.num_passes:
                raise UsageError(
                    f"a gradient arrived for backward pass {number + 1} of a step, but "
                    f"{self._expected()}; call step() in between or raise backward_passes_per_step"
                )
            self._join()
            # The first gradient of a pass takes the pass's batch off the source's queue; the
            # others of the pass find it here.
            at = self._num_passes_begun
            self._num_passes_begun += 1
            self._blocked_s = 0.0
            sizes: Sequence[int] = (1,)
            if self._source is not None:
                self._passes.append(self._source.take_step())
                sizes = self._passes[at].micro_sizes(self._transport.rank)
            # At last: who finds it here takes the rest as it is.
            self._parts += [(at, size / sum(sizes) if sum(sizes) else 1.0) for size in sizes]

    def _join(self) -> None:
        """Let ranks learn what each other's averages weigh, in the first step of a world."""
        if self._momentum is not None:
            most = self._transport.world_size  # a sample each, as in ``Ages``
            if self._source is not None:
                most = self._source.global_batch_size * self._settings.num_passes
            self._momentum.join(self._channel, most_samples=most)

    def _expected(self) -> str:
        text = f"backward_passes_per_step={self._settings.num_passes}"
        if len(self._parts) > self._num_passes_begun:
            rank = self._transport.rank
            sizes = [list(sizes.micro_sizes(rank)) for sizes in self._passes]
            text += f" and rank {rank} has micro-batches of {sizes} samples"
        return text

    def _check_complete(self) -> None:
        """Raise when micro-batches of a batch are missing: the step would leave them out."""
        num_seen = max(self._counts, default=0)
        if num_seen < len(self._parts):
            raise UsageError(
                f"{num_seen} backward passes came before step(), but {self._expected()}: "
                "with Balancer(micro_batches=True) a loader yields the list of a step's "
                "micro-batches; run forward and backward on each, then step() once"
            )

    # Hooks.

    def _hook(self, index: int) -> list[RemovableHandle]:
        parameter = self.parameters[index]
        # Weak: torch never frees a parameter whose hooks lead back to it.
        reducer = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            if (alive := reducer()) is not None:
                alive._arrived(index)

        def weigh(grad: Tensor) -> Tensor | None:
            return None if (alive := reducer()) is None else alive._weigh_pass(index, grad)

        handles = [parameter.register_post_accumulate_grad_hook(arrived)]
        if self._source is not None and (self._settings.num_passes > 1 or self._source.splits):
            # Passes are summed in .grad, so each must be weighed before it is added.
            handles.append(parameter.register_hook(weigh))
        return handles

    def _weigh_pass(self, index: int, grad: Tensor) -> Tensor | None:
        # As Horovod counts: one without a part in the passes before is taken for the first.
        self._begin_pass(self._counts[index])
        at, scale = self._parts[self._counts[index]]
        sizes = self._passes[at]
        if sizes.sizes[self._transport.rank] == 0:
            return torch.zeros_like(grad)
        is_mean = isinstance(self._spec_rules[index], Mean)
        if self._settings.num_passes > 1 and is_mean and self._transport.world_size > 1:
            scale *= self._share(sizes)
        return None if scale == 1.0 else grad * scale

    def _share(self, sizes: StepSizes) -> float:
        """Return this rank's part of a batch, times the number of ranks: 1 for equal sizes."""
        return sizes.sizes[self._transport.rank] * self._transport.world_size / sizes.total

    def _arrived(self, index: int) -> None:
        self._begin_pass(self._counts[index])
        self._counts[index] += 1
        if self._source is not None:
            self._source.gradient_arrived(blocked_s=self._blocked_s)
        has_all = self._num_passes_begun == self._settings.num_passes
        if has_all and self._counts[index] == len(self._parts):
            if self._arrivals is not None:
                self._arrivals.append(index)
            if self._transport.world_size > 1:
                # What a hook spends is no computing: the balancer subtracts it.
                began = time.monotonic()
                self._take(index)
                self._blocked_s += time.monotonic() - began

    def _take(self, index: int) -> None:
        if index in self._sparse:
            return  # it travels after all buckets: their number is not that of its rows
        bucket, slot = self._places[index]
        weights = self._step_weights = self._weights()  # every pass of the step has begun
        if weights.present[self._transport.rank] or self._momentum is not None:
            scale = self._scale(self._rules[bucket.rule], weights)
            self._gradients.take(slot, self.engine.values(bucket.index), scale=scale)
        self.engine.filled(bucket.index)
        # Counted only now that it is in its bucket: autograd has a thread for each device, and
        # another one's last gradient must not start the bucket before.
        with self._starting:
            self._unready[bucket.index] -= 1
            # By index, not as they fill: a full bucket waits for those before it on every rank.
            while (at := self.engine.next_bucket) < len(self.buckets) and self._unready[at] == 0:
                self.engine.start(at)

    # In the engine's thread.

    def _pack(self, bucket: Bucket, values: Tensor) -> PassWeights:
        """Fill a bucket with what this rank sends, and say what the rows weigh in this step."""
        rule, weights = self._rules[bucket.rule], self._weights()
        is_present = weights.present[self._transport.rank]
        # An absent rank's average goes on: in quarantine it has samples all the same.
        if is_present or self._momentum is not None:
            self._gradients.pack(bucket, values, scale=self._scale(rule, weights))
        # A mean takes averages however faint, and without momentum zeros: its shares are 0.
        if not is_present and not (isinstance(rule, Mean) and self._momentum is not None):
            values.zero_()  # never 0 times what an absent rank has
        self._outgoing.call(bucket, values)
        if self._settings.wire is Compression.fp16:
            self._gradients.warn_of_overflow(bucket, values, torch.float16)
        if isinstance(rule, Mean):
            # Its weights are in the values already, zeros for an absent rank: rows count alike.
            present = (True,) * self._transport.world_size
            weights = PassWeights(weights=None, present=present, row_scale=1.0)
        return in_training(rule, weights)

    def _scale(self, rule: Rule, weights: PassWeights) -> float | Blend:
        """Return what this rank's gradients are multiplied by before they are sent."""
        if self._momentum is not None:
            if rule not in self._blends:  # once a step, not once a parameter
                self._blends[rule] = self._blend(rule, weights, self._ages())
            return self._blends[rule]
        if not isinstance(rule, Mean):
            return weights.row_scale
        # Rank i has x_i of the step's X samples, and n ranks: a mean of rows on shard owners gives
        # sum(n x_i / X * g_i) / n, so a row is scaled by n x_i / X, and by 1/n more where an
        # engine only sums. With several passes each was weighed as it came (_weigh_pass).
        scale = 1 / self._settings.predivide
        if self._passes and self._settings.num_passes == 1:
            scale *= self._share(self._passes[0])
        if is_engine_sum(rule, self._settings.wire):
            scale /= self._transport.world_size
        return scale

    def _blend(self, rule: Rule, weights: PassWeights, ages: Ages) -> Blend:
        """Return how this rank's row comes about of its averages and its gradients."""
        rank, num_ranks = self._transport.rank, self._transport.world_size
        count, total = ages.counts[rank], sum(ages.counts)
        if not isinstance(rule, Mean):
            return ages.blend(rank, gain=count * weights.row_scale, scale=1.0)
        # With several passes gradients are times their shares already, n x_i / X (_weigh_pass).
        has_shares = bool(self._passes) and self._settings.num_passes > 1
        gain = total / num_ranks if has_shares else count
        # A row is scaled as in _scale, by its average's weight in place of its samples.
        scale = 1.0
        if num_ranks > 1:
            scale = ages.weights[rank] * num_ranks / ages.total / self._settings.predivide
        if is_engine_sum(rule, self._settings.wire):
            scale /= num_ranks
        return ages.blend(rank, gain=gain, scale=scale)

    def _ages(self) -> Ages:
        assert self._momentum is not None
        if self._step_ages is None:
            # Not before all passes have begun. Two threads that come here find the same.
            self._step_ages = self._momentum.ages(self._samples())
        return self._step_ages

    def _samples(self) -> Sequence[int] | None:
        """Return the samples of each rank in this step; None where all have as many."""
        if not self._passes:
            return None
        return [sum(counts) for counts in zip(*(e.sizes for e in self._batches()), strict=True)]

    def _batches(self) -> list[StepSizes]:
        """Return the step's batches: one that the script cuts up itself takes several passes."""
        passes = self._passes
        return [each for at, each in enumerate(passes) if not at or each is not passes[at - 1]]

    def _weights(self) -> PassWeights:
        if self._step_weights is not None:
            return self._step_weights
        if self._passes:
            weights = combine_passes(self._batches(), rank=self._transport.rank)
        else:
            weights = PassWeights(None, (True,) * self._transport.world_size, 1.0)
        if self._momentum is not None:
            weights = self._ages().weigh(weights)
        return self._watch.mask(weights)

    # What the optimizer calls.

    def synchronize(self) -> None:
        """Reduce every gradient that is not on its way yet, and wait until all are there."""
        self._check_complete()
        self._warn_of_other_passes()
        self._join()
        if self._transport.world_size > 1:
            for index in range(self.engine.next_bucket, len(self.buckets)):
                self.engine.start(index)
            # Evidence goes out once all buckets are queued, so at one place in every rank's order.
            self._watch.computing_ended()
            self.engine.finish(meanwhile=self._watch.score)
            if self.audit is not None:
                self.audit.step_reduced()
            self._watch.step_reduced(self._weights())
            if self._arrivals is not None and any(self._may_be_sparse):
                self._agree_on_sparse()
            else:
                self._reduce_sparse()
            self._hand_out()
            if self._arrivals is not None:
                self._lay_out_as_ready(self._arrivals)
        elif self._outgoing or self._momentum is not None:
            # A world of one sends nothing, but averages, and its hooks see the same buckets.
            with torch.no_grad():
                for bucket in self.buckets:
                    values = self.engine.values(bucket.index)
                    scale: float | Blend = 1.0
                    if self._momentum is not None:
                        scale = self._scale(self._rules[bucket.rule], self._weights())
                    self._gradients.pack(bucket, values, scale=scale)
                    self._outgoing.call(bucket, values)
            self._hand_out()
        if self._momentum is not None:
            self._momentum.step_ended(self._ages())
        self._clear_step()

    def judge_by(self, *, is_model: bool) -> None:
        """Let rules judge rows so from the next step on; every rank alike."""
        self._scope = "model" if is_model else "shard"
        self.engine.judge_by(is_model=is_model)

    def _warn_of_other_passes(self) -> None:
        """Say once, before the wait that it may make long, that a step has had too few passes."""
        begun, asked = self._num_passes_begun, self._settings.num_passes
        if not self._has_warned:
            self._has_warned = warn_of_other_passes(self._transport.rank, begun=begun, asked=asked)

    def _agree_on_sparse(self) -> None:
        """Learn which gradients are sparse on any rank; those leave their buckets."""
        seen = zip(self._gradients.sparse_dims, self._may_be_sparse, strict=True)
        dims = agree_on_sparse(self._channel, [dim if may else 0 for dim, may in seen])
        self._sparse = {index: dim for index, dim in enumerate(dims) if dim}
        for index, dim in self._sparse.items():
            self._gradients.handed_dims[index] = dim

    def _reduce_sparse(self) -> None:
        """Reduce the gradients that are in no bucket."""
        if not self._sparse:
            return
        num_ranks, weights = self._transport.world_size, self._weights()
        is_present = weights.present[self._transport.rank]
        sent = []
        for index, dim in self._sparse.items():
            parameter, rule = self.parameters[index], self._spec_rules[index]
            # An absent rank sends no row: 0 times what it has may be NaN.
            row = as_sparse(parameter.grad if is_present else None, parameter, dim)
            row = row.to(accumulation_dtype(parameter.dtype))
            scale = self._scale(rule, weights)
            assert isinstance(scale, float)  # without momentum
            if not is_engine_sum(rule, self._settings.wire):
                scale /= num_ranks  # else it is in the scale: an engine only sums
            sent.append(row if scale == 1.0 else row * scale)
        sums = sum_sparse(self._channel, sent, name="rows")
        factor = self._settings.predivide * (num_ranks if self._settings.is_sum else 1)
        for index, total in zip(self._sparse, sums, strict=True):
            parameter = self.parameters[index]
            parameter.grad = (total if factor == 1.0 else total * factor).to(parameter.dtype)

    def _hand_out(self) -> None:
        for bucket in self.buckets:
            self._gradients.hand_out(bucket, self.engine.values(bucket.index))

    def _lay_out_as_ready(self, arrivals: list[int]) -> None:
        """Lay the buckets out by the order in which gradients came in rank 0's first step."""
        self._arrivals = None
        order = agree_on_order(self._channel, arrivals, len(self.parameters))
        order = tuple(index for index in order if index not in self._sparse)
        buckets = lay_out(self._specs, bucket_bytes=self._settings.bucket_bytes, order=order)
        if buckets != self.buckets:
            self.engine.close()
            # New names: of the old ones Horovod remembers other sizes.
            self._take_layout(buckets, self._channel.sub("ready"))

    def detach(self) -> None:
        """Take all hooks off the parameters, and end the engine's thread."""
        for handle in self._handles:
            handle.remove()
        self._gradients.release()
        self.engine.close()
