"""How ``ddp_hook`` and ``fsdp_hook`` begin: options are checked, and compared over ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.optimizer.options import (
    EqualBatches,
    advised_momentum,
    batches_of,
    check_watching,
)
from loft_hvd.pipeline.momentum import LossScaler, WorkerMomentum
from loft_hvd.pipeline.suspicion.judgement import Watching
from loft_hvd.runlog import RunLog
from loft_hvd.transport.agreement import check_agreement, new_number
from loft_hvd.transport.base import Channel, Transport

__all__ = ["HookOptions", "rule_of"]

_logger = logging.getLogger(__name__)


def rule_of(given: Rule | None, *, what: str) -> Rule:
    """Return the rule of a hook, a mean unless one is given."""
    if given is not None and not isinstance(given, Rule):
        raise ArgumentTypeError(
            f"{what}: rule={given!r} is of type {type(given).__name__}; pass one such as "
            "loft.TrimmedMean(f=1)"
        )
    return Mean() if given is None else given


@dataclass(frozen=True, eq=False)
class HookOptions:
    """The options that both hooks have; ``what`` is the name of the one that was called."""

    what: str
    rule: Rule
    balancer: Balancer | None
    watching: Watching
    log_dir: str | Path | None
    timeout_s: float | None
    worker_momentum: float | None
    scaler: LossScaler | None

    def __post_init__(self) -> None:
        check_watching([self.rule], self.watching.diagnostics, self.watching.quarantine)

    def open(
        self, ends: Transport, fields: Mapping[str, str]
    ) -> tuple[Channel, Balancer | EqualBatches]:
        """Meet the other ranks; return the hook's own channel, and whom to tell of steps.

        Args:
            ends: the ranks.
            fields: what else must be equal on every rank, by name.

        Raises:
            AggregationError: the rule does not fit the number of ranks.
            MismatchError: ranks were given different options.
        """
        timeout_s = config().timeout_s if self.timeout_s is None else self.timeout_s
        channel = Channel(ends, f"loft.{self.what.removesuffix('_hook')}", timeout_s)
        world = {"rank": ends.rank, "world_size": ends.world_size}
        batches = batches_of(self.balancer, RunLog(None), self.log_dir, **world)
        if ends.world_size > 1:
            self.rule.check(ends.world_size)
            ends.can.open_heartbeat()
            check_agreement(
                channel,
                {**self._fields(), **fields},
                what=self.what,
                refusal=batches.log.refusal,
            )
            channel = channel.sub(str(new_number(channel.sub("number"))))  # one for each model
            if self.balancer is not None:  # in a world of one any plan will do
                self.balancer.require(min_ranks=self.rule.min_rows, num_passes=1)
        elif batches.log.refusal:
            raise ArgumentError(batches.log.refusal)
        return channel, batches

    def _fields(self) -> dict[str, str]:
        """Return what must be equal on every rank, by name."""
        balancer = self.balancer
        return {
            "option rule": str(self.rule),
            "variable LOFT_HVD_LANE": config().lane,
            "variable LOFT_HVD_MESH": config().mesh,
            "option balancer": "none" if balancer is None else str(balancer.global_batch_size),
            "option scope": self.watching.scope,
            "option diagnostics": str(self.watching.diagnostics),
            "option quarantine": str(self.watching.quarantine),
            "option worker_momentum": str(self.worker_momentum),
            "option scaler": "none" if self.scaler is None else "given",
        }

    def make_momentum(self, *, rank: int) -> WorkerMomentum | None:
        """Return what keeps this rank's averages; None without worker momentum."""
        beta = advised_momentum([self.rule], self.worker_momentum)
        if self.worker_momentum is None and beta and rank == 0:
            _logger.warning(
                "%s: with %s ranks send averages of worker_momentum=%g, for which each rank keeps "
                "as many values as the whole model has; the optimizer must have no momentum of its "
                "own: SGD momentum=0 and lr / %.3g, or Adam betas=(0.0, b2); give worker_momentum= "
                "to say so, or worker_momentum=0",
                self.what,
                self.rule,
                beta,
                1 - beta,
            )
        return WorkerMomentum(beta, scaler=self.scaler) if beta else None
