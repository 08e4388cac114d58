"""The options of ``DistributedOptimizer``: checked, and as what ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.errors import ArgumentError, UsageError
from loft_hvd.parameters import GradientSet
from loft_hvd.pipeline.settings import ReducerSettings
from loft_hvd.pipeline.wire import wire_name
from loft_hvd.runlog import RunLog
from loft_hvd.team import TeamOptions
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Transport
from loft_hvd.transport.horovod import HorovodTransport
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

__all__ = ["agree", "at_least_one", "check_rules", "check_world"]


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


def check_world(before: int | None, now: int) -> None:
    """Raise unless an optimizer's buckets and groups are those of the ranks that there are.

    Args:
        before: ranks that they were made for, or None before that.
        now: ranks that there are.

    Raises:
        UsageError: they are not; says how otherwise.
    """
    if before is None:
        raise UsageError(
            "over= in an elastic job: ranks make groups together when hvd.elastic.run begins a "
            "world, so that one that joins can take part; give this optimizer to a "
            "loft.elastic.State, and use it inside the function that hvd.elastic.run calls"
        )
    if before != now:
        raise UsageError(
            f"the world has changed from {before} to {now} ranks under this optimizer; with "
            "hvd.elastic.run, give it to a loft.elastic.State, which makes it fit"
        )


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
    if isinstance(transport, HorovodTransport | TorchDistributedTransport):
        transport.open_heartbeat()
    check_agreement(
        transport,
        found.fields() | _option_fields(settings, balancer) | team_options.fields(),
        what="DistributedOptimizer",
        name="loft.optimizer",  # not found.name: ranks may differ in what it comes from
        timeout_s=settings.timeout_s,
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
