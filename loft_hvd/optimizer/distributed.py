"""``DistributedOptimizer``: the optimizer with gradients reduced by a rule before it steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Mean
from loft_hvd.balance.balancer import Balancer
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.optimizer.horovods import end_horovods, is_horovods, read_horovods
from loft_hvd.optimizer.options import OptimizerOptions, advised_scope, check_passes
from loft_hvd.optimizer.parameters import RuleChoice, collect_parameters
from loft_hvd.optimizer.wrapper import OptimizerWrapper, wrap
from loft_hvd.pipeline.gradients import ReducerSettings
from loft_hvd.pipeline.momentum import LossScaler
from loft_hvd.pipeline.passes import StepSource
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine
from loft_hvd.pipeline.wire import Wire, read_compression
from loft_hvd.transport.base import Transport
from loft_hvd.transport.datagram import LossTolerant
from loft_hvd.transport.groups import Over
from loft_hvd.transport.horovod import reduce_op_name

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802, PLR0913 - the name and the arguments are Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Wire | None = None,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    rule: RuleChoice | None = None,
    balancer: Balancer | None = None,
    bucket_bytes: int | None = None,
    scope: Scope | None = None,
    audit: float = 0.0,
    over: Over = None,
    diagnostics: bool | Suspicion | None = None,
    quarantine: bool | Quarantine = False,
    log_dir: str | Path | None = None,
    transport: Transport | None = None,
    worker_momentum: float | None = None,
    scaler: LossScaler | None = None,
    gather: LossTolerant | None = None,
) -> OptimizerWrapper:
    """Wrap an optimizer so that gradients are reduced over ranks before each of its steps.

    A superset of ``hvd.DistributedOptimizer``, whose arguments come first, in its order. Make it on
    every rank alike, after ``hvd.init()``. Gradients are exchanged while the backward pass runs.

    Args:
        optimizer: any optimizer that steps once per gradient (not L-BFGS). Also what
            ``hvd.DistributedOptimizer`` returned, before its first step: its arguments are taken
            over, its own reduction ends, and the object becomes the plain optimizer of its class.
        named_parameters: ``model.named_parameters()``; names appear in errors and must be equal
            on every rank. None names parameters by their place in the optimizer.
        compression: ``loft.Compression.none``, ``.fp16`` or ``.bf16``, one of Horovod's, or an
            object with ``compress`` and ``decompress``; what travels, not what is computed with.
        backward_passes_per_step: backward passes summed into one step, >= 1.
        op: ``hvd.Average`` (the default) or ``hvd.Sum``; ``Sum`` only with ``Mean``.
            ``hvd.Adasum`` is not offered.
        gradient_predivide_factor: with ``Average`` and ``Mean``, what gradients are divided by
            before the sum and multiplied by after it.
        num_groups: Horovod's older name of ``groups``, which goes before it.
        groups: a number of equal groups, or lists of parameters; each group is one bucket.
        sparse_as_dense: make sparse gradients dense on the way. Otherwise they travel as the rows
            that ranks have touched, from the second step on, under ``Mean()``; a robust rule and
            worker momentum refuse them.
        process_set: a ``hvd.ProcessSet``; other ranks step on their own gradients.
        rule: how rows are aggregated, ``Mean()`` by default; or a rule for each pattern of
            parameters' names, such as ``{"table.*": Mean(), "*": TrimmedMean(f=1)}``: the first
            that fits counts (``*``, ``?`` and ``[abc]`` as in file names). A parameter group's own
            ``"rule"`` entry goes before it.
        balancer: says how many samples each rank's gradient stands for; equal without one.
        bucket_bytes: most bytes sent together; None takes ``LOFT_HVD_BUCKET_BYTES``.
        scope: by which values rules that see rows, such as ``loft.Robust``, judge them: "shard", by
            the slice of a bucket that one rank aggregates; "model", by all values of the rule, so
            that results travel only after the backward pass; "auto", over the model at first, and
            in shards once ranks' gradients are found to be alike. None is "auto"
            with a ``rule=`` that is or has ``loft.Robust(f)``, else "shard".
        audit: how many shard owners are audited a step, on average, 0 to 1: another rank computes
            1/16 of what one owner did again, and a bit that differs ends the job on every rank.
        over: None for a rule over ranks; "nodes", or the ranks of every group, for a plain mean
            inside each group and the rule over groups, which f then counts.
        diagnostics: watch which worker is off, for ``report()`` and warnings; None where that is
            cheap (all ranks on CPUs), or a ``loft.Suspicion`` with the details.
        quarantine: leave a worker out that stands out for long; True, or a ``loft.Quarantine``.
        log_dir: folder in which rank 0 writes the run log, the balancer's own if it has one; None
            takes ``LOFT_HVD_LOG_DIR``, and without it there is none.
        transport: the ranks; by default Horovod's, else those of torch.distributed, else this one
            alone.
        worker_momentum: ranks send the average of their gradients over time, with this momentum,
            0 <= b < 1; None is 0.9 with ``Robust`` and else 0. ``.grad`` is then an average
            gradient, as long as one: where SGD had momentum=b use momentum=0 and lr / (1 - b), with
            Adam betas=(0.0, b2). A rank keeps one float32 value more for each of the parameters'.
        scaler: the ``torch.amp.GradScaler`` whose ``scale`` multiplies the loss, for
            ``worker_momentum``: averages are kept without its scale.
        gather: ``loft.LossTolerant()`` for links that are long and lose packets: rows travel to
            shard owners by datagrams, and what is lost of them is filled in from the others. With
            ``over=`` across groups alone. None for the best way on which all arrives.

    Returns:
        An optimizer with ``synchronize``, ``skip_synchronize``, ``register_outgoing_hook`` and
        ``report``.

    Raises:
        ArgumentError: an argument outside its limits, such as duplicate names.
        ArgumentTypeError: a parameter that is not floating point, or not an optimizer.
        AggregationError: a rule whose f is too large for the world.
        MismatchError: ranks disagree; names the rank and the field.
    """
    _check_kinds(optimizer, named_parameters, balancer)
    if is_horovods(optimizer):
        theirs = read_horovods(optimizer)
        given = {
            "compression": compression is not None,
            "backward_passes_per_step": backward_passes_per_step != 1,
            "op": op is not None,
            "gradient_predivide_factor": gradient_predivide_factor != 1.0,
            "num_groups": num_groups != 0,
            "groups": groups is not None,
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set is not None,
        }
        if twice := [name for name, is_given in given.items() if is_given]:
            raise ArgumentError(
                f"DistributedOptimizer: {', '.join(twice)} is taken over from the "
                "hvd.DistributedOptimizer that it wraps; give it there alone"
            )
        named_parameters = named_parameters or theirs.named_parameters
        compression, op, groups = theirs.compression, theirs.op, theirs.groups
        backward_passes_per_step = theirs.backward_passes_per_step
        gradient_predivide_factor = theirs.gradient_predivide_factor
        sparse_as_dense, process_set = theirs.sparse_as_dense, theirs.process_set
    check_passes(backward_passes_per_step)
    if num_groups != 0:
        warnings.warn(  # Horovod's own sentence: scripts filter the warning by it
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    # A generator gives its items once, and groups may be added later: kept as a list.
    names = None if named_parameters is None else list(named_parameters)
    rule, num_named_groups = Mean() if rule is None else rule, len(optimizer.param_groups)
    # Rules as read: they may be given as text, and by parameter group.
    rules = collect_parameters(
        optimizer.param_groups, names, rule=rule, groups=groups, num_named_groups=num_named_groups
    ).rules
    settings = ReducerSettings(
        bucket_bytes=config().bucket_bytes if bucket_bytes is None else bucket_bytes,
        num_passes=backward_passes_per_step,
        is_sum=reduce_op_name(op) == "sum",
        predivide=float(gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        needs_sparse=isinstance(optimizer, torch.optim.SparseAdam),
        wire=read_compression(compression),
        scope=advised_scope(rules, scope),
        audit=audit,
        gather=gather,
    )
    options = OptimizerOptions(
        optimizer=optimizer,
        names=names,
        num_named_groups=num_named_groups,
        groups=groups,
        rule=rule,
        settings=settings,
        over=over,
        diagnostics=diagnostics,
        quarantine=quarantine,
        worker_momentum=worker_momentum,
        scaler=scaler,
        balancer=balancer,
        log_dir=log_dir,
        process_set=process_set,
        transport=transport,
    )
    wrapper = wrap(options)
    if is_horovods(optimizer):  # only now: where the wrap is refused, Horovod's goes on as it was
        end_horovods(optimizer)
    return wrapper


def _check_kinds(optimizer: object, named_parameters: object, balancer: object) -> None:
    """Refuse what is no optimizer to wrap, no names, or no balancer."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ArgumentTypeError(
            "DistributedOptimizer: ZeroRedundancyOptimizer shares the optimizer's state out over "
            "torch.distributed and sends parameters in its step(), so it cannot be wrapped; leave "
            "it as it is, under DistributedDataParallel with "
            "model.register_comm_hook(None, loft.ddp_hook(rule, balancer))"
        )
    # An optimizer that evaluates its closure on its own compares losses that differ by rank.
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentTypeError(
            f"DistributedOptimizer: {type(optimizer).__name__} cannot be wrapped; it takes a "
            "torch.optim.Optimizer other than LBFGS (which steps by the local loss)"
        )
    if isinstance(optimizer, OptimizerWrapper):
        raise ArgumentTypeError(
            "DistributedOptimizer: the optimizer is distributed already, by loft; gradients would "
            "be reduced before the rule sees them. Give the torch optimizer itself"
        )
    # Mixed up arguments: found here, before hooks raise in the middle of a backward pass.
    if balancer is not None and not isinstance(balancer, StepSource):
        raise ArgumentTypeError(
            f"DistributedOptimizer: balancer={balancer!r} is of type {type(balancer).__name__}; "
            "give a loft.Balancer, or none for equal batches"
        )
    if callable(named_parameters):
        what = "a model" if isinstance(named_parameters, torch.nn.Module) else "a function"
        raise ArgumentTypeError(
            f"DistributedOptimizer: named_parameters is {what}; give what it returns: "
            "named_parameters=model.named_parameters()"
        )
