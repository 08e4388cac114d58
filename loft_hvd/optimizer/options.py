"""The options of ``DistributedOptimizer``: checked, and as what ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.errors import ArgumentError, UsageError
from loft_hvd.optimizer.parameters import GradientSet
from loft_hvd.optimizer.workers import TeamOptions
from loft_hvd.pipeline.settings import ReducerSettings
from loft_hvd.pipeline.wire import wire_name
from loft_hvd.runlog import RunLog, open_run_log
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.horovod import HorovodTransport
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

__all__ = ["World", "agree", "at_least_one", "check_rules", "check_world", "open_log"]


def at_least_one(passes: int) -> int:
    """Return ``backward_passes_per_step``.

    Raises:
        ArgumentError: it is not a whole number >= 1.
    """
    if not isinstance(passes, int) or passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes!r} must be a whole number >= 1")
    return passes


def check_rules(rules: Sequence[Rule], settings: ReducerSettings) -> None:
    """Raise unless every rule goes with the other options.

    Raises:
        ArgumentError: a scale outside its limits, or one for a rule that does not add rows up.
    """
    if settings.predivide <= 0 or (settings.is_sum and settings.predivide != 1.0):
        raise ArgumentError(
            f"gradient_predivide_factor={settings.predivide} must be > 0, and 1 with op=Sum"
        )
    robust = [rule for rule in rules if not isinstance(rule, Mean)]
    if robust and (settings.is_sum or settings.predivide != 1.0):
        given = "op=Sum" if settings.is_sum else f"gradient_predivide_factor={settings.predivide}"
        raise ArgumentError(
            f"rule={robust[0]} does not take {given}: it does not add the ranks' gradients up; "
            f"leave it away, or use Mean()"
        )


@dataclass(frozen=True)
class World:
    """The ranks an optimizer's buckets and groups are made for, as far as it can tell them apart.

    Attributes:
        size: number of ranks.
        number: how many worlds its balancer had begun by then; 0 without a balancer.
    """

    size: int
    number: int

    @classmethod
    def now(cls, transport: Transport, balancer: Balancer | None) -> World:
        """Return the present world."""
        return cls(transport.world_size, 0 if balancer is None else balancer.num_worlds)


def check_world(before: World | None, now: World) -> None:
    """Raise unless an optimizer's buckets and groups are those of the ranks that there are.

    Args:
        before: the world that they were made for, or None before that.
        now: the world that there is.

    Raises:
        UsageError: they are not; says how otherwise.
    """
    if before is None:
        raise UsageError(
            "over= in an elastic job: ranks make groups together when hvd.elastic.run begins a "
            "world, so that one that joins can take part; give this optimizer to a "
            "loft.elastic.State, and use it inside the function that hvd.elastic.run calls"
        )
    if before.size != now.size:
        raise UsageError(
            f"the world has changed from {before.size} to {now.size} ranks under this optimizer; "
            "with hvd.elastic.run, give it to a loft.elastic.State, which makes it fit"
        )
    if before.number != now.number:
        raise UsageError(
            f"the balancer has begun world {now.number}, and this optimizer is still that of world "
            f"{before.number}: plans may leave fewer ranks with samples than its rule needs; with "
            "hvd.elastic.run, give both to the loft.elastic.State"
        )


def open_log(
    log_dir: str | Path | None, balancer: Balancer | None, *, rank: int, world_size: int
) -> RunLog:
    """Return the run log of an optimizer: its balancer's, or one of its own."""
    if balancer is None:
        log = open_run_log(log_dir, rank=rank)
        log.write("run", world_size=world_size)
        return log
    if log_dir is not None:
        balancer.log_to(log_dir)
    return balancer.log


def agree(
    transport: Transport,
    found: GradientSet,
    settings: ReducerSettings,
    balancer: Balancer | None,
    team_options: TeamOptions,
    log: RunLog,
) -> None:
    """Open the heartbeat, and compare parameters and options over ranks.

    Raises:
        ArgumentError: rank 0 cannot write the log it was asked for.
        MismatchError: ranks differ; names the ranks and the field.
    """
    with log.faults():
        if isinstance(transport, HorovodTransport | TorchDistributedTransport):
            transport.open_heartbeat()
        check_agreement(
            # Not found.name: ranks may differ in what it comes from.
            Channel(transport, "loft.optimizer", settings.timeout_s),
            found.fields() | _option_fields(settings, balancer) | team_options.fields(),
            what="DistributedOptimizer",
            refusal=log.refusal,
        )


def _option_fields(settings: ReducerSettings, balancer: Balancer | None) -> dict[str, str]:
    return {
        "option backward_passes_per_step": str(settings.num_passes),
        "option op": "sum" if settings.is_sum else "average",
        "option gradient_predivide_factor": str(settings.predivide),
        "option bucket_bytes": str(settings.bucket_bytes),
        "option compression": wire_name(settings.wire),
        "option sparse_as_dense": str(settings.sparse_as_dense),
        "option balancer": "none" if balancer is None else str(balancer.global_batch_size),
    }
