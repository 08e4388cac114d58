"""What a user asks ``DistributedOptimizer`` for: checked, and as what ranks must agree on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.row_rules import Robust
from loft_hvd.aggregation.rules import Custom, Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.balance.plan import StepSizes
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.optimizer.parameters import (
    ReducedParameters,
    RuleChoice,
    collect_parameters,
    parameters_by_name,
)
from loft_hvd.pipeline.gradients import ReducerSettings
from loft_hvd.pipeline.momentum import LossScaler, WorkerMomentum, read_momentum
from loft_hvd.pipeline.selection import Scope, check_scope
from loft_hvd.pipeline.suspicion.judgement import Watching
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine
from loft_hvd.pipeline.wire import Compression, wire_name
from loft_hvd.runlog import RunLog, open_run_log
from loft_hvd.transport.base import Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.groups import Over
from loft_hvd.transport.horovod import is_member

__all__ = [
    "BetasAdvice",
    "EqualBatches",
    "OptimizerOptions",
    "advised_momentum",
    "advised_scope",
    "check_each_step_has_a_batch",
    "check_groups",
    "check_passes",
    "check_step",
    "check_watching",
]

_logger = logging.getLogger(__name__)

_ADVISED_MOMENTUM = 0.9  # measured: ALIE costs a trimmed mean 5 points with it, 24 without


@dataclass(frozen=True, eq=False)
class OptimizerOptions:
    """The arguments of ``DistributedOptimizer``, which says what each of them means.

    They are the same in all worlds of an elastic job; what follows from them and from the ranks
    there are is worked out anew in each (``find_transport``, ``collect``).
    """

    # What is wrapped, and what ranks call its parameters.
    optimizer: torch.optim.Optimizer
    names: Sequence[tuple[str, torch.nn.Parameter]] | None
    num_named_groups: int  # parameter groups that it had when it was wrapped
    # How gradients are reduced.
    groups: int | Sequence[Sequence[Tensor]] | None
    rule: RuleChoice
    settings: ReducerSettings
    # Who the workers are, and who watches them.
    over: Over
    diagnostics: bool | Suspicion | None
    quarantine: bool | Quarantine
    # What workers send: None for what suits the rule.
    worker_momentum: float | None
    scaler: LossScaler | None
    # Over which ranks, and who is told of it.
    balancer: Balancer | None
    log_dir: str | Path | None
    process_set: Any
    transport: Transport | None

    def __post_init__(self) -> None:
        check_watching((), self.diagnostics, self.quarantine)
        if self.scaler is not None and not callable(getattr(self.scaler, "scale", None)):
            raise ArgumentTypeError(
                f"scaler={self.scaler!r} is of type {type(self.scaler).__name__}; give the "
                "torch.amp.GradScaler whose scale() multiplies the loss"
            )

    @property
    def watching(self) -> Watching:
        """How workers are judged."""
        return Watching(self.settings.scope, self.diagnostics, self.quarantine, self.over)

    def find_transport(self) -> Transport | None:
        """Return the ranks there are now; None where this rank is not in the process set."""
        # A process set says who is in it only in a world that it was made for: asked each time.
        if self.transport is not None or not is_member(self.process_set):
            return self.transport
        return default_transport(self.process_set)

    def find_parameters(self) -> ReducedParameters:
        """Return the parameters that the optimizer has now, whatever the options say of them."""
        return collect_parameters(
            self.optimizer.param_groups,
            self.names,
            rule=self.rule,
            groups=self.groups,
            num_named_groups=self.num_named_groups,
        )

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return all parameters that the optimizer has now by name, frozen ones among them."""
        return parameters_by_name(self.optimizer.param_groups, self.names, self.num_named_groups)

    def collect(self) -> ReducedParameters:
        """Return the parameters that the optimizer has now, with rules that fit the options."""
        found = self.find_parameters()
        robust = [rule for rule in found.rules if not isinstance(rule, Mean)]
        check_watching(found.rules, self.diagnostics, self.quarantine)
        check_scope(self.settings.scope, found.rules, what="DistributedOptimizer")
        self._check_audit(found.rules)
        is_sum, predivide = self.settings.is_sum, self.settings.predivide
        if predivide <= 0 or (is_sum and predivide != 1.0):
            raise ArgumentError(
                f"gradient_predivide_factor={predivide} must be > 0, and 1 with op=Sum"
            )
        if robust and (is_sum or predivide != 1.0):
            given = "op=Sum" if is_sum else f"gradient_predivide_factor={predivide}"
            raise ArgumentError(
                f"rule={robust[0]} does not take {given}: it does not add the ranks' gradients up; "
                f"leave it away, or use Mean()"
            )
        if beta := advised_momentum(found.rules, self.worker_momentum):
            check_groups(self.optimizer.param_groups, beta)
        return found

    def _check_audit(self, rules: Sequence[Rule]) -> None:
        """Raise unless what owners do can be done again elsewhere, if it is to be audited."""
        audit = self.settings.audit
        if isinstance(audit, bool) or not isinstance(audit, int | float):
            raise ArgumentTypeError(f"audit={audit!r} must be a number, of audits a step")
        if not 0 <= audit <= 1:
            raise ArgumentError(f"audit={audit} must be >= 0 and <= 1: audits a step, on average")
        if audit == 0:
            return
        for rule in rules:
            if isinstance(rule, Mean | Custom):
                raise ArgumentError(
                    f"audit= needs rules whose result has the same bits wherever it is computed, "
                    f"from the rows of a shard, which {rule} does not promise; use a robust rule "
                    "such as loft.TrimmedMean(f=1) for every parameter group, or leave audit= away"
                )
        if self.over is not None or not isinstance(self.settings.wire, Compression):
            given = "over=" if self.over is not None else f"compression={self.settings.wire!r}"
            raise ArgumentError(
                f"audit= does not go with {given}: it compares what ranks sent and got, value by "
                "value, at shard owners of all ranks; leave one of the two away"
            )

    def make_momentum(self) -> WorkerMomentum | None:
        """Return what keeps this rank's averages; None without worker momentum."""
        beta = advised_momentum(self.collect().rules, self.worker_momentum)
        return WorkerMomentum(beta, scaler=self.scaler) if beta else None

    def fields(self) -> dict[str, str]:
        """Return what must be equal on every rank, by name."""
        # The texts of values: two ranks' objects are never the same one.
        settings, balancer = self.settings, self.balancer
        return {
            "option backward_passes_per_step": str(settings.num_passes),
            "option op": "sum" if settings.is_sum else "average",
            "option gradient_predivide_factor": str(settings.predivide),
            "option bucket_bytes": str(settings.bucket_bytes),
            "option compression": wire_name(settings.wire),
            "option sparse_as_dense": str(settings.sparse_as_dense),
            "variable LOFT_HVD_COPIES": config().copies,
            "variable LOFT_HVD_LANE": config().lane,
            "variable LOFT_HVD_MESH": config().mesh,
            "option balancer": "none" if balancer is None else str(balancer.global_batch_size),
            "option scope": self.settings.scope,
            "option audit": str(self.settings.audit),
            "option gather": str(self.settings.gather),
            "option over": str(self.over),
            "option diagnostics": str(self.diagnostics),
            "option quarantine": str(self.quarantine),
            "option worker_momentum": str(self.worker_momentum),
            "option scaler": "none" if self.scaler is None else "given",
        }

    def batches(self, before: RunLog, *, rank: int, world_size: int) -> Balancer | EqualBatches:
        """Return whom to tell of steps in a world, with a log that rank 0 writes.

        Without a balancer rank 0 goes on with the log of the world before.
        """
        return batches_of(self.balancer, before, self.log_dir, rank=rank, world_size=world_size)


def advised_momentum(rules: Sequence[Rule], given: float | None) -> float:
    """Return the worker momentum for these rules: with the advised one 0.9 unless told otherwise.

    Raises:
        ArgumentError: what is given is outside 0 <= b < 1.
        ArgumentTypeError: it is no number.
    """
    if given is not None:
        return read_momentum(given)
    return _ADVISED_MOMENTUM if any(isinstance(rule, Robust) for rule in rules) else 0.0


def advised_scope(rules: Sequence[Rule], given: Scope | None) -> Scope:
    """Return by which values these rules judge rows: with the advised one "auto" unless told."""
    if given is not None:
        return given
    return "auto" if any(isinstance(rule, Robust) for rule in rules) else "shard"


def check_each_step_has_a_batch(balancer: Balancer, *, what: str) -> None:
    """Raise where a framework's loop could not go on: a rank has no batch, or batches grow."""
    if balancer.min_batch == 0 or balancer.is_auto:
        raise ArgumentError(
            f"{what}: with Balancer(min_batch=0) a loader yields None to ranks that are left out, "
            "and Balancer('auto') changes how many steps an epoch has and the learning rate, which "
            "the framework's loop does not know of; give min_batch=1 or more and a fixed global "
            "batch, or use loft.DistributedOptimizer or loft.ddp_hook in a loop of your own"
        )


def check_watching(
    rules: Sequence[Rule], diagnostics: bool | Suspicion | None, quarantine: bool | Quarantine
) -> None:
    """Raise unless workers can be watched, and left out, as asked under these rules.

    Raises:
        ArgumentError: a quarantine has no diagnostics, or a rule that one worker spoils.
        ArgumentTypeError: one of the two is of another kind.
    """
    if not isinstance(diagnostics, bool | Suspicion | None):
        raise ArgumentTypeError(
            f"diagnostics={diagnostics!r} must be True, False or a loft.Suspicion"
        )
    if not isinstance(quarantine, bool | Quarantine):
        raise ArgumentTypeError(
            f"quarantine={quarantine!r} must be True, False or a loft.Quarantine"
        )
    if quarantine and diagnostics is False:
        raise ArgumentError(
            "quarantine= needs diagnostics: without them nobody is named; leave "
            "diagnostics=False away"
        )
    if quarantine and any(isinstance(rule, Mean) for rule in rules):
        raise ArgumentError(
            "quarantine= needs a robust rule for every parameter group, but one has a mean, "
            "which a single worker spoils before it is named; pass rule=, such as "
            "loft.TrimmedMean(f=1)"
        )


def check_passes(passes: int) -> None:
    """Raise ``ArgumentError`` unless so many backward passes can be one step."""
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes!r} must be a whole number >= 1")


def check_groups(param_groups: Sequence[dict[str, Any]], beta: float) -> None:
    """Refuse an optimizer's own momentum on top of the workers', and say which lr replaces it.

    Raises:
        ArgumentError: a parameter group has a momentum above 0.
    """
    for number, group, own in _with_momentum(param_groups):
        # Its steps add up to gradients times this; a gradient that is an average stays one.
        lr = float(group["lr"]) * (1 - float(group.get("dampening", 0))) / (1 - own)
        raise ArgumentError(
            f"DistributedOptimizer: parameter group {number} has momentum={own:g}, and "
            f"worker_momentum={beta:g} would count it twice; use momentum=0 with lr={lr:.6g} "
            f"in place of {float(group['lr']):g}, for steps as long, or worker_momentum=0"
        )


def check_step(param_groups: Sequence[dict[str, Any]], beta: float) -> None:
    """Refuse a momentum that a group has got since ``check_groups``, as from a scheduler.

    Raises:
        ArgumentError: a parameter group has a momentum above 0.
    """
    for number, _, own in _with_momentum(param_groups):
        raise ArgumentError(
            f"optimizer.step(): parameter group {number} has got momentum={own:g} since the "
            f"optimizer was made, and worker_momentum={beta:g} would count it twice; a "
            "scheduler such as OneCycleLR sets it unless it is given cycle_momentum=False; "
            "use that, or worker_momentum=0"
        )


def _with_momentum(
    param_groups: Sequence[dict[str, Any]],
) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Yield the groups that have a momentum of their own: number, group, momentum."""
    for number, group in enumerate(param_groups):
        own = float(group.get("momentum") or 0.0)
        if own > 0:
            yield number, group, own


class BetasAdvice:
    """Says once of a parameter group when an optimizer such as Adam averages averages over time."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def check(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Warn of groups that do so by now: a scheduler, or a state that is loaded, sets betas."""
        for number, group in enumerate(param_groups):
            betas = group.get("betas")
            if number in self._told or not betas or float(betas[0]) <= 0:
                continue
            self._told.add(number)
            _logger.warning(
                "parameter group %d averages gradients by betas=(%g, ...), and with worker "
                "momentum they are averages already, so steps lag behind twice; use "
                "betas=(0.0, %s), and cycle_momentum=False with a scheduler such as OneCycleLR",
                number,
                betas[0],
                ", ".join(f"{float(beta):g}" for beta in betas[1:]),
            )


class EqualBatches:
    """In place of a ``Balancer`` where there is none: every rank's gradient weighs the same."""

    num_worlds = 0
    splits = is_auto = False
    newest_batch = ""  # any: ranks draw them as they like

    def __init__(self, log: RunLog) -> None:
        self.log = log  # counts the steps, as a balancer's does

    def take_step(self) -> StepSizes | None:
        return None  # sizes are equal

    def is_weighed(self, _: StepSizes) -> bool:
        return False

    def step_ended(self) -> None:
        self.log.step += 1

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Time nothing, plan nothing, and let any world and any rule be right."""

    check_world = require = compute_on = gradient_arrived = computing_ended = _ignore
    hold = note_noise = _ignore


def batches_of(
    balancer: Balancer | None,
    before: RunLog,
    log_dir: str | Path | None,
    *,
    rank: int,
    world_size: int,
) -> Balancer | EqualBatches:
    """Return whom to tell of steps, the balancer if there is one, with a log that rank 0 writes.

    Without a balancer rank 0 goes on with the log ``before``, if that is written.
    """
    if balancer is not None:
        if log_dir is not None:
            balancer.log_to(log_dir)
        return balancer
    if rank == 0 and before.path is not None:
        before.write_run(world_size=world_size)  # each world begins with one
        return EqualBatches(before)
    log = open_run_log(log_dir, rank=rank)
    log.write_run(world_size=world_size)
    return EqualBatches(log)
