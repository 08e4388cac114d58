"""Who an optimizer's workers are, ranks or groups of them, and who watches them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError
from loft_hvd.pipeline.levels import Levels, exchange_maker
from loft_hvd.pipeline.stages import MakeExchange
from loft_hvd.pipeline.suspicion.report import FEWEST_WATCHED
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine, Unwatched, WorkerWatch
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.groups import Over, find_groups

__all__ = ["Team", "TeamOptions", "advise_levels"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeamOptions:
    """What a user asked for; equal on every rank.

    Attributes:
        over: what f counts: None for ranks, "nodes", or the ranks of every group.
        diagnostics: whether workers are watched, or how; None where that is cheap: on a CPU.
        quarantine: whether named workers are left out, or for how long.

    Raises:
        ArgumentTypeError: a value of another kind.
        ArgumentError: a quarantine without diagnostics.
    """

    over: Over = None
    diagnostics: bool | Suspicion | None = None
    quarantine: bool | Quarantine = False

    def __post_init__(self) -> None:
        if not isinstance(self.diagnostics, bool | Suspicion | None):
            raise ArgumentTypeError(
                f"diagnostics={self.diagnostics!r} must be True, False or a loft.Suspicion"
            )
        if not isinstance(self.quarantine, bool | Quarantine):
            raise ArgumentTypeError(
                f"quarantine={self.quarantine!r} must be True, False or a loft.Quarantine"
            )
        if self.quarantine and self.diagnostics is False:
            raise ArgumentError(
                "quarantine= needs diagnostics: without them nobody is named; leave "
                "diagnostics=False away"
            )

    def check(self, rules: Sequence[Rule]) -> None:
        """Raise unless the rules can do without a worker that is in quarantine.

        Raises:
            ArgumentError: a rule that tolerates nobody.
        """
        if self.quarantine and any(isinstance(rule, Mean) for rule in rules):
            raise ArgumentError(
                "quarantine= needs a robust rule for every parameter group, but one has a mean, "
                "which a single worker spoils before it is named; pass rule=, such as "
                "loft.TrimmedMean(f=1)"
            )

    def fields(self) -> dict[str, str]:
        """Return what must be equal on every rank, by name."""
        return {
            "option over": str(self.over),
            "option diagnostics": str(self.diagnostics),
            "option quarantine": str(self.quarantine),
        }


class Team:
    """The workers of one optimizer in one world; every rank makes it alike.

    Args:
        transport: all ranks, two or more.
        rules: the rules of the optimizer's parameters.
        options: what the user asked for.
        on_cpu: whether all parameters are on a CPU.
        name: stem of the operations' names, equal on every rank.
        timeout_s: longest wait for other ranks in seconds.

    Raises:
        AggregationError: a rule does not fit the number of workers.
        ArgumentError: groups that do not fit the ranks.
        UsageError: the transport cannot exchange inside groups.
    """

    def __init__(
        self,
        transport: Transport,
        rules: Sequence[Rule],
        options: TeamOptions,
        *,
        on_cpu: bool,
        name: str,
        timeout_s: float,
    ) -> None:
        robust = [rule for rule in rules if not isinstance(rule, Mean)]
        groups = find_groups(Channel(transport, "loft", timeout_s), options.over)
        self._groups = groups
        self._num_workers = groups.num_groups if groups else transport.world_size
        self.check(rules)
        if options.over is None and robust:
            advise_levels(transport)
        watches = on_cpu if options.diagnostics is None else bool(options.diagnostics)
        self.watch: WorkerWatch | Unwatched = Unwatched(_why_nobody(self._num_workers))
        if robust and self._num_workers >= FEWEST_WATCHED and (watches or options.quarantine):
            given, held = options.diagnostics, options.quarantine
            self.watch = WorkerWatch(
                Channel(transport, name, timeout_s),
                max(robust, key=lambda rule: rule.min_rows),
                groups=groups,
                settings=given if isinstance(given, Suspicion) else Suspicion(),
                quarantine=(held if isinstance(held, Quarantine) else Quarantine())
                if held
                else None,
            )
        levels = Levels.of(transport, groups) if groups else None
        self.make_exchange: MakeExchange = exchange_maker(levels, run=self.watch.run)

    def check(self, rules: Sequence[Rule]) -> None:
        """Raise unless every rule fits the number of workers.

        Raises:
            AggregationError: a rule does not.
        """
        for rule in rules:
            try:
                rule.check(self._num_workers)
            except AggregationError as error:
                if self._groups is None:
                    raise
                raise AggregationError(
                    f"over=: f counts groups, and there are {self._num_workers} of "
                    f"{self._groups.group_size} ranks each: {error}"
                ) from error

    def min_ranks(self, rules: Sequence[Rule]) -> int:
        """Return so many ranks that any of them are in enough groups for every rule."""
        most = max(rule.min_rows for rule in rules)
        return (most - 1) * (self._groups.group_size if self._groups else 1) + 1


def _why_nobody(num_workers: int) -> str:
    if num_workers < FEWEST_WATCHED:
        return f"nobody is watched: of {num_workers} workers nobody can say which one is off"
    return (
        "nobody is watched: that takes a robust rule, and diagnostics=True where gradients are on "
        "a GPU"
    )


def advise_levels(transport: Transport) -> None:
    """Say once, on rank 0, when two levels would send fewer bytes between nodes."""
    per_node, num_ranks = transport.local_size, transport.world_size
    if transport.rank != 0 or per_node < 2 or num_ranks <= per_node or num_ranks % per_node:
        return
    num_nodes = num_ranks // per_node
    flat = per_node * (num_ranks - per_node) / num_ranks + (num_ranks - 1) / num_ranks
    two_level = 2 * (num_nodes - 1) / num_nodes
    _logger.info(
        'each of %d nodes has %d ranks: over="nodes" would send %.2g times the gradients\' bytes '
        "out of a node instead of %.2g times; f then counts nodes (docs/levels.md)",
        num_nodes,
        per_node,
        two_level,
        flat,
    )
