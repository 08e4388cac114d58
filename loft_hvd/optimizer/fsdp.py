"""``fsdp_hook``: a rule instead of the mean under torch's FSDP2 (``fully_shard``).

::

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    hook = loft.fsdp_hook(model, loft.TrimmedMean(f=1), balancer)
    ...
    print(hook.report())

FSDP2 reduces the gradients of a group of parameters as soon as the backward pass has them, and
each rank keeps the shard that it owns. Here rows travel to shard owners by one all-to-all, which
apply the rule, and that is all: the bytes of a reduce-scatter, and no all-gather. Parameters are
gathered by FSDP2 as ever.

A step ends with the backward pass that FSDP2 reduces after. Passes before it, under
``set_requires_gradient_sync(False)``, add up on each rank, each weighed by its own batch.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.balance.meetings import take_as_exact
from loft_hvd.config import config
from loft_hvd.copies import NeverCopied
from loft_hvd.errors import ArgumentError, UsageError
from loft_hvd.optimizer.hooks import HookOptions, rule_of
from loft_hvd.optimizer.options import (
    EqualBatches,
)
from loft_hvd.optimizer.replicas import compare_batches
from loft_hvd.optimizer.sharded import (
    Scatter,
    ShardedGroup,
    at_end_of_backward,
    find_groups,
)
from loft_hvd.pipeline.buckets import Bucket, Slot
from loft_hvd.pipeline.gradients import copy_scaled
from loft_hvd.pipeline.momentum import (
    STATE_KEY,
    Blend,
    LossScaler,
    WorkerMomentum,
    check_state,
)
from loft_hvd.pipeline.passes import Passes, StepSource
from loft_hvd.pipeline.scalers import ScaleCheck, tell_of_unscaling
from loft_hvd.pipeline.scatter import ScatterExchanges
from loft_hvd.pipeline.selection import Scope, check_scope
from loft_hvd.pipeline.suspicion.judgement import Judgement, Watching
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.spread import ShardSpreadWatch
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel, watch_of
from loft_hvd.transport.default import torch_transport
from loft_hvd.transport.waits import waiting

__all__ = ["FSDPHook", "fsdp_hook"]

_logger = logging.getLogger(__name__)


def fsdp_hook(
    model: torch.nn.Module,
    rule: Rule | None = None,
    balancer: Balancer | None = None,
    *,
    scope: Scope = "shard",
    diagnostics: bool | Suspicion | None = None,
    quarantine: bool | Quarantine = False,
    log_dir: str | Path | None = None,
    timeout_s: float | None = None,
    worker_momentum: float | None = None,
    scaler: LossScaler | None = None,
) -> FSDPHook:
    """Have FSDP2 aggregate a model's gradients by a rule, and weigh unequal batches exactly.

    Call it on every rank alike, after torch's ``fully_shard(model)`` and before the first forward
    pass. Mixed precision, ``set_requires_gradient_sync(False)``, activation checkpointing and CPU
    offload work as without it.

    Args:
        model: what ``fully_shard`` was called on, with its sharded blocks inside. Its mesh is of
            all ranks, in their order; with replicas (HSDP) the rule is a mean.
        rule: how rows are aggregated, ``Mean()`` by default.
        balancer: says how many samples each rank's gradient stands for; equal without one. Each
            forward and backward pass, held back ones too, is of the next batch.
        scope: by which values a rule that sees rows judges them: "shard", by the slice of a group
            of parameters that one rank owns; "model", by all groups of a backward pass, whose
            results then come at its end: not with what needs them at once, as a
            ``MixedPrecisionPolicy`` that casts them, and each rank holds all rows of its shards
            until then.
        diagnostics: as in ``ddp_hook``.
        quarantine: as in ``ddp_hook``.
        log_dir: as in ``DistributedOptimizer``.
        timeout_s: longest wait in seconds; None takes ``LOFT_HVD_TIMEOUT_S``.
        worker_momentum: as in ``ddp_hook``. A rank's averages are as many values as the whole
            model: averages of n ranks, over n ranks.
        scaler: as in ``DistributedOptimizer``.

    Returns:
        The hook, at work; its ``report()`` says which worker was off, and its ``state_dict()`` is
        this rank's part of a checkpoint where there is worker momentum.

    Raises:
        ArgumentTypeError: ``rule`` is not a rule, or the model is one of FSDP1's or DeepSpeed's.
        ArgumentError: the model is not sharded over all ranks, its replicas do not suit the rule,
            the balancer plans micro-batches, leaves ranks out or chooses the global batch, or
            ``scope`` or ``quarantine`` does not suit the rule.
        AggregationError: the rule does not fit the number of ranks.
        MismatchError: ranks were given different options, or other models.
        UsageError: ``torch.distributed`` is not initialised.
    """
    rule = rule_of(rule, what="fsdp_hook")
    if balancer is not None and (balancer.min_batch == 0 or balancer.is_auto):
        raise ArgumentError(
            "fsdp_hook: with Balancer(min_batch=0) a rank may make no forward pass, in which FSDP2 "
            "gathers parameters, and Balancer('auto') goes by noise that is not measured here; "
            "give min_batch=1 or more, and a fixed global batch"
        )
    if balancer is not None and balancer.splits:
        raise ArgumentError(
            "fsdp_hook: with Balancer(micro_batches=True) ranks make different numbers of backward "
            "passes, and FSDP2 gathers parameters in each; give fixed sizes, or leave "
            "micro_batches=True away"
        )
    _check_scope(scope, rule)
    watching = Watching(scope, diagnostics, quarantine)
    options = HookOptions(
        "fsdp_hook",
        rule,
        balancer,
        watching=watching,
        log_dir=log_dir,
        timeout_s=timeout_s,
        worker_momentum=worker_momentum,
        scaler=scaler,
    )
    groups = find_groups(model, what="fsdp_hook")
    ends = torch_transport()
    _check_mesh(groups, rule, ends.world_size)
    fields = {}
    for group in groups:
        for name, parameter in zip(group.names, group.parameters, strict=True):
            about = f"shape {list(parameter.shape)}, {parameter.dtype}"
            fields[f"parameter {name}"] = f"{about}, in {group}"
    channel, batches = options.open(ends, fields)
    momentum = options.make_momentum(rank=ends.rank)
    if momentum is not None and ends.world_size == 1:
        _logger.warning("fsdp_hook: worker_momentum does nothing: one rank has nobody to send to")
    return FSDPHook(model, groups, rule, batches, channel, watching=watching, momentum=momentum)


def _check_scope(scope: str, rule: Rule) -> None:
    if scope == "auto":
        raise ArgumentError(
            'fsdp_hook: scope="auto" is not offered, as it would hold the rows of the whole model '
            'in the first 50 steps; choose scope="shard", or scope="model" where ranks draw from '
            "different data"
        )
    check_scope(scope, [rule], what="fsdp_hook")


def _check_mesh(groups: Sequence[ShardedGroup], rule: Rule, world_size: int) -> None:
    """Raise unless every group is of all ranks, as the rule needs them."""
    for group in groups:
        if isinstance(group.scatter, _GroupScatter):
            raise ArgumentError(
                f"fsdp_hook: {group} has a hook already, whose rows a second one would not see; "
                "make one hook for each model"
            )
        ranks, num_replicas = group.ranks, group.num_replicas
        if len(ranks) * num_replicas != world_size or (
            num_replicas == 1 and ranks != list(range(world_size))
        ):
            raise ArgumentError(
                f"fsdp_hook: {group} is sharded over the ranks {ranks} of {world_size}: rows are "
                "of all ranks, in their order; give fully_shard a mesh of all of them, such as "
                f'init_device_mesh("cuda", ({world_size},))'
            )
        if num_replicas > 1 and not isinstance(rule, Mean):
            raise ArgumentError(
                f"fsdp_hook: {group} has {num_replicas} replicas (HSDP), whose results FSDP2 adds "
                f"up by itself, so no rank has the rows of all for {rule}; use a mesh of one "
                "dimension, fully_shard(model), or loft.Mean()"
            )


class FSDPHook(NeverCopied):
    """Reduces the gradients of one sharded model; see ``fsdp_hook``."""

    _in_place_of_a_copy = "make another one by loft.fsdp_hook() for another model, on every rank"

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Sequence[ShardedGroup],
        rule: Rule,
        batches: Balancer | EqualBatches,
        channel: Channel,
        *,
        watching: Watching,
        momentum: WorkerMomentum | None,
    ) -> None:
        self._groups = tuple(groups)
        self._rule = rule
        self._batches = batches
        self._channel = channel
        self._momentum = momentum
        self._passes = Passes(
            batches if isinstance(batches, StepSource) else None,
            channel,
            momentum=momentum,
            mask=self._mask,
        )
        parameters = [each for group in groups for each in group.parameters]
        self._parameters = {id(each): each for each in parameters}
        device = groups[0].device
        batches.compute_on(device)
        self._judgement = Judgement(
            channel,
            [rule],
            watching,
            is_on_cpu=device.type == "cpu",
            knows_sizes=False,
            log=batches.log,
        )
        self._spread: ShardSpreadWatch | None = None
        if not isinstance(rule, Mean):
            self._spread = ShardSpreadWatch(channel, [group.numel for group in groups])
        # Of the watches that want a step's results no rank has them whole.
        names = [name for group in groups for name in group.names]
        unknown = [f"a parameter of {group}" for group in groups]
        self._judgement.look_at([], [*names, *unknown], [], "")
        self._num_named = len(names)
        self._slots: dict[tuple[int, int], tuple[Slot, ...]] = {}  # by group and number of values
        self._exchanges = ScatterExchanges(
            channel,
            rule,
            device=str(device),
            run=self._judgement.run,
            is_model=self._judgement.is_model,
        )
        self._is_fresh = False  # no gradient has come since the newest forward pass
        self._beginning = threading.RLock()  # autograd has a thread for each device
        self._most_passes = 1  # of a step so far
        self._is_compared = False
        # What stands for each group's gradients where averages are kept by parameter.
        self._averaged = {str(group): _like(group) for group in groups if momentum is not None}
        # Of the backward pass that goes on, if its gradients are reduced.
        self._is_reducing = False
        self._results: dict[int, Tensor] = {}  # each group's, by the parameter that it begins with
        self._shards: dict[int, Tensor] = {}  # the same by group, where no parameter is left out
        # Parameters, and .grad of steps before, set aside in a backward pass.
        self._earlier: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._scales = ScaleCheck(channel)
        tell_of_unscaling(self)
        for group in groups:
            take_as_exact(*group.meetings)
            group.scatter = _GroupScatter(self, group, group.scatter)
        self._listen(model)

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        return self._judgement.report()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's averages of worker momentum, for a file of its own; else nothing."""
        if self._momentum is None:
            return {}
        return {STATE_KEY: self._momentum.state_dict(self._averaged)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let averages go on where every rank loads what it has saved in a world of the same size.

        Call it before the first step; else, or with another world size, they begin anew.

        Args:
            state_dict: of this rank.

        Raises:
            ArgumentError: it cannot be taken.
        """
        if self._momentum is None:
            return
        if (averages := state_dict.get(STATE_KEY)) is not None:
            check_state(averages, self._averaged)
        self._momentum.load_state_dict(averages, self._averaged)

    def before_unscaling(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Compare the scale that a ``GradScaler`` takes off this model's gradients."""
        given = (id(each) for group in optimizer.param_groups for each in group["params"])
        if not self._parameters.keys().isdisjoint(given):
            with self._told():
                self._scales.use(scaler)

    # The model.

    def _listen(self, model: torch.nn.Module) -> None:
        """Hear of forward passes, and weigh gradients that add up before they are reduced."""
        # Weak: torch never frees a parameter whose hooks lead back to it.
        hook = weakref.ref(self)

        def began(_: torch.nn.Module, __: Any) -> None:
            if torch.is_grad_enabled() and (alive := hook()) is not None:
                alive._forward_began()

        def weigh(grad: Tensor) -> Tensor | None:
            return None if (alive := hook()) is None else alive._weigh(grad)

        def gathered(group: ShardedGroup) -> Callable[[torch.nn.Module, Any], None]:
            is_left = True

            def register(_: torch.nn.Module, __: Any) -> None:
                nonlocal is_left
                for parameter in group.whole_parameters() if is_left else ():
                    parameter.register_hook(weigh)
                is_left = False  # once: the parameters stay

            return register

        # As FSDP2's own hooks: torch.compile leaves them to Python.
        disable: Any = torch.compiler.disable
        model.register_forward_pre_hook(disable(began))
        # Equal batches need no look at single gradients; alone, FSDP2 asks for no exchange.
        if isinstance(self._batches, Balancer) or self._channel.world_size == 1:
            for group in self._groups:
                for module in group.modules:
                    module.register_forward_pre_hook(disable(gathered(group)))

    def _forward_began(self) -> None:
        self._is_fresh = True
        self._is_reducing = False  # of a backward pass that has failed
        self._clear()

    def _weigh(self, grad: Tensor) -> Tensor | None:
        """Weigh a gradient that adds up on this rank, or that follows such ones."""
        is_held_back, is_alone = self._groups[0].is_held_back, self._channel.world_size == 1
        if not (is_held_back or is_alone or self._passes.has_shares):
            return None
        with self._told():
            with self._beginning:
                if self._is_fresh:
                    self._begin_pass()
                    self._passes.has_shares |= is_held_back
            if is_held_back or is_alone:  # no exchange will tell
                self._batches.gradient_arrived(blocked_s=0.0)
            if is_alone and not is_held_back:
                self._begin_step()
            if not (is_alone or self._passes.has_shares):
                return None
            newest = len(self._passes.parts) - 1
            return self._passes.weigh(newest, grad, is_mean=isinstance(self._rule, Mean))

    def _clear(self) -> None:
        self._results.clear()
        self._shards.clear()
        for parameter, earlier in self._earlier:  # a backward pass has failed
            parameter.grad = earlier
        self._earlier.clear()

    def _begin_pass(self) -> None:
        self._is_fresh = False
        self._passes.begin(self._passes.num_begun)

    def _mask(self, weights: PassWeights) -> PassWeights:
        return self._judgement.watch.mask(weights)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Let other ranks, and the run log, know what fails."""
        try:
            yield
        except BaseException as error:
            self._clear()
            self._exchanges.give_up()
            watch_of(self._channel.transport).report(error)
            self._batches.log.write_fault(error)
            raise

    # A step.

    def reduce(
        self, group: ShardedGroup, given: Tensor, result: Tensor, op: Any, theirs: Callable[[], Any]
    ) -> Any:
        """Reduce a group's gradients ``given``, [world_size * shard]; FSDP2 calls it.

        Args:
            group: whose they are.
            given: this rank's; they may be changed.
            result: gets this rank's shard of the result, [shard].
            op: how torch would reduce them.
            theirs: does so, from ``given`` to ``result``.
        """
        with self._told():
            self._begin_step()
            self._batches.gradient_arrived(blocked_s=0.0)
            bucket = self._laid_out(group, given.numel(), given.dtype)
            begins = next(slot.parameter for slot in bucket.slots if slot.offset == 0)
            if self._passes.is_present:
                self._judgement.sent(begins, given)
                if self._spread is not None:
                    self._spread.sent(group.number, given)
            self._results[begins] = result
            if given.numel() == group.numel:
                self._shards[group.number] = result
            if self._is_torchs(group):
                self._pack(group, bucket, given, given)
                made = theirs()
                self._multiply(result, 1.0)
                return made
            sent = self._exchanges.memory_to_send(bucket)
            if sent is None or sent.data_ptr() == given.data_ptr():
                sent = given
            weights = self._pack(group, bucket, given, sent)
            why = group.why_at_once(result, op) if self._judgement.is_model else ""
            self._exchanges.start(bucket, sent, result, weights, why_at_once=why)
            self._multiply(result, group.sum_factor(op, self._channel.world_size))
            return None

    def _multiply(self, result: Tensor, factor: float) -> None:
        """Multiply a group's result; that of a mean also by what ranks count together."""
        if isinstance(self._rule, Mean):  # their counts went out before the first group
            factor *= self._passes.mean_factor
        if factor != 1.0:
            result.mul_(factor)

    def _multiply_alone(self) -> None:
        """Do the same on a rank that is alone: FSDP2 asks it for no exchange."""
        factor = self._passes.alone_factor
        for parameter in self._parameters.values():
            if factor != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)
        for parameter, earlier in self._earlier:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier.clear()

    def _is_torchs(self, group: ShardedGroup) -> bool:
        """Whether torch's own reduce-scatter does it: a mean over replicas, or by a GPU's NCCL."""
        is_mean = isinstance(self._rule, Mean) and not self._rule.reproducible
        return is_mean and (group.num_replicas > 1 or self._exchanges.lane.is_queued)

    def _begin_step(self) -> None:
        if self._is_reducing:
            return
        with self._beginning:
            if self._is_fresh or self._passes.num_begun == 0:
                self._begin_pass()
        self._passes.fix_weights()
        self._is_reducing = True
        if self._channel.world_size == 1 and self._passes.alone_factor != 1.0:
            for parameter in self._parameters.values():  # of a step before, weighed by then
                if parameter.grad is not None:
                    self._earlier.append((parameter, parameter.grad))
                    parameter.grad = None
        at_end_of_backward(self._finish)

    def memory(self, group: ShardedGroup, dtype: torch.dtype) -> Tensor | None:
        """Return where a group's gradients, [world_size * shard], are best put; None anywhere."""
        return self._exchanges.memory_to_send(self._laid_out(group, group.numel, dtype))

    def _laid_out(self, group: ShardedGroup, numel: int, dtype: torch.dtype) -> Bucket:
        key = group.number, numel
        if key not in self._slots:
            self._slots[key] = group.slots(numel) or self._part_of(group, numel)
        # Numbered in the order of the backward pass, which is the same on every rank.
        return Bucket(len(self._results), dtype, str(group.device), 0, self._slots[key])

    def _part_of(self, group: ShardedGroup, numel: int) -> tuple[Slot, ...]:
        """Return what stands for the parameters of a group of which some have no gradient."""
        if self._momentum is not None:
            raise UsageError(
                f"fsdp_hook: in {group} not all parameters have a gradient, and with worker "
                "momentum a rank keeps averages of all; "
                "model.set_reduce_scatter_unused_params(True) counts the others as zeros"
            )
        at = self._num_named + group.number
        return (Slot(at, f"a part of {group}", 0, numel, (numel,)),)

    def _pack(
        self, group: ShardedGroup, bucket: Bucket, given: Tensor, sent: Tensor
    ) -> PassWeights:
        """Fill in what is sent of a group."""
        passes, rule = self._passes, self._rule
        if passes.has_gradient:
            scale = passes.scale(rule, is_sum=False)
            if isinstance(scale, Blend):
                assert self._momentum is not None
                self._momentum.send(self._averaged[str(group)], given, sent, scale)
            elif sent is not given or scale != 1.0:
                copy_scaled(given, sent, scale)
        if passes.sends_zeros(rule):
            sent.zero_()
        self._judgement.packed(bucket, sent, rule, num_owners=group.num_shards)
        return passes.row_weights(rule)

    def _finish(self) -> None:
        """Close a step, whose backward pass has ended."""
        with self._told():
            self._batches.computing_ended()
            with waiting():
                self._reduced()
            self._end_step()

    def _reduced(self) -> None:
        judgement = self._judgement
        judgement.computing_ended()
        judgement.score()
        self._exchanges.finish()
        if self._channel.world_size == 1:
            self._multiply_alone()
        judgement.step_reduced(self._passes.weights())
        if not self._is_compared:
            self._is_compared = True
            if self._channel.world_size > 1 and config().copies != "ignore":
                newest = self._batches.newest_batch
                compare_batches(self._channel, newest, what="fsdp_hook, step 1")
        results: list[Tensor | None] = [None] * (self._num_named + len(self._groups))
        for at, result in self._results.items():
            results[at] = result
        judgement.gradients_reduced(results, None)
        if self._spread is not None and (found := self._spread.step_reduced(self._shards)):
            judgement.ranks_compared(found)
        self._clear()

    def _end_step(self) -> None:
        num_passes = len(self._passes.batches())
        if num_passes > self._most_passes and self._channel.world_size > 1:
            self._most_passes = num_passes  # plans may begin with a step's first pass
            self._batches.require(min_ranks=self._rule.min_rows, num_passes=num_passes)
        self._passes.step_reduced()
        self._passes.has_shares = self._is_fresh = self._is_reducing = False
        # Before the step ends: a plan may be made at its end.
        self._batches.hold(self._judgement.watch.absent_ranks)
        self._batches.step_ended()


def _like(group: ShardedGroup) -> Tensor:
    """Return a tensor like a group's gradients, [world_size * shard], that takes no memory."""
    first = group.parameters[0]
    one = torch.zeros(1, dtype=first.dtype, device=group.device)
    return one.expand(group.numel).requires_grad_()


class _GroupScatter:
    """Torch's reduce-scatter of one group, in whose place a hook does it."""

    def __init__(self, hook: FSDPHook, group: ShardedGroup, theirs: Scatter) -> None:
        self._hook = hook
        self._group = group
        self._theirs = theirs

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Of the two that are asked for, what is sent; gradients are then copied there at once.
        if math.prod(size) == self._group.numel:
            memory = self._hook.memory(self._group, dtype)
            if memory is not None:
                return memory
        return self._theirs.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        def theirs() -> Any:
            return self._theirs(output_tensor, input_tensor, group, op, async_op)

        return self._hook.reduce(self._group, input_tensor, output_tensor, op, theirs)
