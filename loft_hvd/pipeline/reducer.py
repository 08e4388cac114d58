"""From autograd's hooks to reduced gradients: what a wrapped optimizer does before it steps."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.aggregation.rules import Mean, Rule
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
from loft_hvd.pipeline.exchange_log import ExchangeTimes
from loft_hvd.pipeline.gradients import Gradients, OutgoingHooks, ReducerSettings
from loft_hvd.pipeline.momentum import Blend, WorkerMomentum
from loft_hvd.pipeline.passes import Passes, StepSource
from loft_hvd.pipeline.ring import MakeExchange, Owners, Record, flat_exchange
from loft_hvd.pipeline.sparse import agree_on_sparse, as_sparse, sum_sparse
from loft_hvd.pipeline.suspicion.judgement import Judgement
from loft_hvd.pipeline.unused import Unused
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression
from loft_hvd.transport.base import Channel
from loft_hvd.transport.waits import seconds, totals

__all__ = ["GradientReducer"]


class GradientReducer:
    """Reduces the gradients of some parameters over ranks, starting within the backward pass.

    ``parameters`` are in an order equal on every rank; ``specs`` says what each of them is, and
    refers to ``rules`` by index. Without a ``source`` all batches weigh the same. The ``run`` of
    ``judgement`` is in ``make_exchange``. With ``momentum`` ranks send averages over time.
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
        judgement: Judgement,
        momentum: WorkerMomentum | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._specs = list(specs)
        self._rules = list(rules)
        self._settings = settings
        self._channel = channel
        self._world_size = channel.world_size
        self._source = source
        self._make_exchange = make_exchange
        self._judgement = judgement
        self._spec_rules = [rules[spec.rule] for spec in specs]
        self._momentum = momentum
        self._passes = Passes(
            source,
            channel,
            num_passes=settings.num_passes,
            momentum=momentum,
            mask=lambda weights: judgement.watch.mask(weights),  # it may change with the rules
            predivide=settings.predivide,
        )
        self._passes.has_shares = settings.num_passes > 1
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
        is_audited = settings.audit > 0 and channel.world_size > 1
        self.audit = Audit(settings.audit) if is_audited else None
        self._unused = Unused(channel, [spec.name for spec in specs])
        self._arrivals: list[int] | None = []  # by parameter, until they have become the layout
        self._take_layout(lay_out(specs, bucket_bytes=settings.bucket_bytes), channel)
        self._began_s = 0.0  # when the first bucket of a step has started
        self.exchange: ExchangeTimes | None = None  # of the newest step; None where none was sent
        self._clear_step()
        self._handles = [handle for i in range(len(parameters)) for handle in self._hook(i)]

    def _take_layout(self, buckets: tuple[Bucket, ...], channel: Channel) -> None:
        settings = self._settings
        self.buckets = buckets
        self._places = {slot.parameter: (each, slot) for each in buckets for slot in each.slots}
        num_summed = self._world_size if settings.is_sum else 1
        records: list[Record] = []
        self.engine = Engine(
            channel,
            buckets,
            self._rules,
            pack=self._pack,
            mean_factor=settings.predivide * num_summed,
            wire=settings.wire,
            owners=Owners(
                "model" if self._judgement.is_model else "shard",
                None if self.audit is None else records,
                settings.gather,
            ),
            make_exchange=self._make_exchange,
        )
        if self.audit is not None:
            self.audit.lay_out(channel, records)

    def _clear_step(self) -> None:
        self._counts = [0] * len(self.parameters)  # backward passes that have reached each
        self._unready = [len(bucket.slots) for bucket in self.buckets]
        self._blocked_s = 0.0
        self._gradients.begin_step()

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived since the last ``synchronize``."""
        return self._passes.num_begun > 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a bucket is on the wire."""
        return self.engine.next_bucket > 0

    @property
    def is_passed_over(self) -> bool:
        """Whether this rank need not have computed anything in the step."""
        return self._passes.is_passed_over

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

    def _begin_pass(self, index: int) -> None:
        try:
            if self._passes.begin(self._counts[index]):
                self._blocked_s = 0.0
        except UsageError as error:
            if not self._gradients.is_shared(index):
                raise
            raise UsageError(
                f"parameter {self._specs[index].name!r} is in two optimizers, and one of them has "
                "not taken its step since loss.backward() was last called: an optimizer that is no "
                "longer used goes on reducing while something refers to it; call its close()"
            ) from error

    def _weigh_pass(self, index: int, grad: Tensor) -> Tensor | None:
        # As Horovod counts: one without a part in the passes before is taken for the first.
        number = self._counts[index]
        self._begin_pass(index)
        return self._passes.weigh(number, grad, is_mean=isinstance(self._spec_rules[index], Mean))

    def _arrived(self, index: int) -> None:
        self._begin_pass(index)
        self._counts[index] += 1
        self._judgement.sent(index, self.parameters[index].grad)
        if self._source is not None:
            self._source.gradient_arrived(blocked_s=self._blocked_s)
        if self._passes.has_begun_all and self._counts[index] == len(self._passes.parts):
            if self._arrivals is not None:
                self._arrivals.append(index)
            if self._world_size > 1:
                # What a hook spends is no computing: the balancer subtracts it.
                began, waits = time.monotonic(), totals()
                self._take(index)
                waited_s = seconds([threading.get_ident()], waits)
                self._blocked_s += time.monotonic() - began - waited_s

    def _take(self, index: int) -> None:
        if index in self._sparse:
            return  # it travels after all buckets: their number is not that of its rows
        bucket, slot = self._places[index]
        self._passes.fix_weights()
        if self._passes.has_gradient:
            self._gradients.take(slot, self.engine.values(bucket.index), scale=self._scale(bucket))
        self.engine.filled(bucket.index)
        # Counted only now that it is in its bucket: autograd has a thread for each device, and
        # another one's last gradient must not start the bucket before.
        with self._starting:
            self._unready[bucket.index] -= 1
            # By index, not as they fill: a full bucket waits for those before it on every rank.
            while (at := self.engine.next_bucket) < len(self.buckets) and self._unready[at] == 0:
                self._start(at)

    def _start(self, index: int) -> None:
        if index == 0:
            self._began_s = time.monotonic()
        self.engine.start(index)

    def _scale(self, bucket: Bucket) -> float | Blend:
        """Return what this rank's gradients are multiplied by before they are sent."""
        return self._passes.scale(self._rules[bucket.rule], is_sum=self.engine.is_sum(bucket.index))

    # In the engine's thread.

    def _pack(self, bucket: Bucket, values: Tensor) -> PassWeights:
        """Fill a bucket with what this rank sends, and say what the rows weigh in this step."""
        rule = self._rules[bucket.rule]
        if self._passes.has_gradient:
            self._gradients.pack(bucket, values, scale=self._scale(bucket))
        if self._passes.sends_zeros(rule):
            values.zero_()
        self._outgoing.call(bucket, values)
        self._judgement.packed(bucket, values, rule)
        if self._settings.wire is Compression.fp16:
            self._gradients.warn_of_overflow(bucket, values, torch.float16)
        return self._passes.row_weights(rule)

    # What the optimizer calls.

    def forget(self) -> None:
        """Drop the backward passes so far; the next one is the first of a step."""
        assert not self.is_in_flight
        if self.has_gradients:
            self._passes.clear()
            self._clear_step()
            if self._arrivals is not None:
                self._arrivals = []

    def synchronize(self) -> None:
        """Reduce every gradient that is not on its way yet, and wait until all are there."""
        if self._passes.is_passed_over:
            self._passes.pass_over()
        else:
            self._passes.check_complete(max(self._counts, default=0))
        if self._world_size > 1:  # alone, nothing is on its way
            self._gradients.untouched.check()
        self._passes.warn_of_other_passes()  # before the wait that it may make long
        self._passes.join()
        if self._world_size > 1:
            self._passes.fix_weights()
            for index in range(self.engine.next_bucket, len(self.buckets)):
                self._start(index)
            # Evidence goes out once all buckets are queued, so at one place in every rank's order.
            self._judgement.computing_ended()
            self._finish()
            if self.audit is not None:
                self.audit.step_reduced()
            self._multiply_means(self._passes.mean_factor)
            self._judgement.step_reduced(self._passes.weights())
            if self._arrivals is not None and any(self._may_be_sparse):
                self._agree_on_sparse()
            else:
                self._reduce_sparse()
            self._hand_out(self._find_unused())
            if self._arrivals is not None:
                self._lay_out_as_ready(self._arrivals)
        elif self._momentum is None and (factor := self._passes.alone_factor) != 1.0:
            self._multiply_all(factor)
        if self._world_size == 1 and (self._outgoing or self._momentum is not None):
            # A world of one sends nothing, but averages, and its hooks see the same buckets.
            with torch.no_grad():
                for bucket in self.buckets:
                    values = self.engine.values(bucket.index)
                    scale = 1.0 if self._momentum is None else self._scale(bucket)
                    self._gradients.pack(bucket, values, scale=scale)
                    self._outgoing.call(bucket, values)
            self._hand_out()
        samples = self._passes.samples(
            is_mean=all(isinstance(rule, Mean) for rule in self._spec_rules),
            is_sum=self._settings.is_sum,
        )
        if self._judgement.gradients_reduced([each.grad for each in self.parameters], samples):
            self.engine.judge_by(is_model=self._judgement.is_model)
        self._passes.step_reduced()
        self._clear_step()

    def _finish(self) -> None:
        """Wait until all buckets are there."""
        ended_s = time.monotonic()  # of this rank's own computing
        self.engine.finish(meanwhile=self._judgement.score)
        now = time.monotonic()
        self.exchange = ExchangeTimes(now - self._began_s, now - ended_s)

    def _multiply_all(self, factor: float) -> None:
        """Multiply the gradients of a rank that is alone; 0 leaves nothing of a NaN."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor) if factor else parameter.grad.zero_()

    def _multiply_means(self, factor: float) -> None:
        """Multiply what means have brought by what ranks knew only after they had sent."""
        if factor != 1.0:
            for bucket in self.buckets:
                if isinstance(self._rules[bucket.rule], Mean):
                    self.engine.values(bucket.index).mul_(factor)

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
        num_ranks = self._world_size
        is_present = self._passes.is_present
        sent = []
        for index, dim in self._sparse.items():
            parameter, rule = self.parameters[index], self._spec_rules[index]
            # An absent rank sends no row: 0 times what it has may be NaN.
            row = as_sparse(parameter.grad if is_present else None, parameter, dim)
            row = row.to(accumulation_dtype(parameter.dtype))
            scale = self._passes.row_scale(rule, is_sum=True)  # without momentum
            sent.append(row if scale == 1.0 else row * scale)
        sums = sum_sparse(self._channel, sent, name="rows")
        factor = self._settings.predivide * (num_ranks if self._settings.is_sum else 1)
        factor *= self._passes.mean_factor
        for index, total in zip(self._sparse, sums, strict=True):
            parameter = self.parameters[index]
            parameter.grad = (total if factor == 1.0 else total * factor).to(parameter.dtype)

    def _find_unused(self) -> frozenset[int]:
        """Return what no rank has a gradient of in this step."""
        # What a rank sends of a parameter without a gradient may be its average over time.
        averages = self._momentum
        has = [
            each.grad is not None
            or index in self._sparse
            or (averages is not None and averages.has_average(each))
            for index, each in enumerate(self.parameters)
        ]
        return self._unused.agree(has, self._passes.weights().present)

    def _hand_out(self, unused: Collection[int] = ()) -> None:
        for bucket in self.buckets:
            self._gradients.hand_out(bucket, self.engine.values(bucket.index), unused=unused)

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
