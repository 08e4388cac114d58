"""One optimizer in one world of ranks: its workers, who watches them, and what reduces gradients.

Whatever is made anew when an elastic world changes is here, and nothing that outlives a world. It
has two shapes: ranks that reduce together, perhaps one alone (``OptimizerWorld``), and a rank that
takes no part (``IdleWorld``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import AggregationError, LoftError, UsageError
from loft_hvd.optimizer.options import OptimizerOptions
from loft_hvd.optimizer.parameters import ReducedParameters, check_none_thawed
from loft_hvd.optimizer.replicas import ReplicaCheck
from loft_hvd.pipeline.exchange_log import ExchangeLog
from loft_hvd.pipeline.gradients import OutgoingHooks, ReducerSettings
from loft_hvd.pipeline.levels import exchange_maker
from loft_hvd.pipeline.link_log import LinkLog
from loft_hvd.pipeline.momentum import WorkerMomentum
from loft_hvd.pipeline.reducer import GradientReducer
from loft_hvd.pipeline.suspicion.judgement import Judgement
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.tolerance import check_gather
from loft_hvd.runlog import RunLog
from loft_hvd.transport.agreement import check_agreement, new_number
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.groups import Over, find_groups
from loft_hvd.transport.waits import waiting

__all__ = ["IdleWorld", "OptimizerWorld", "Workers"]

_logger = logging.getLogger(__name__)


class Workers:
    """Who an optimizer's workers are: all ranks, or groups of them; the same everywhere."""

    def __init__(
        self, channel: Channel, rules: Sequence[Rule], over: Over, settings: ReducerSettings
    ) -> None:
        self._is_alone = channel.world_size == 1  # which is the identity: any rule fits
        # By a fixed name: ranks whose parameters differ must still meet here.
        shared = Channel(channel.transport, "loft", channel.timeout_s)
        self.groups = None if self._is_alone else find_groups(shared, over)
        num_workers = self.groups.num_groups if self.groups else channel.world_size
        self.check(rules, num_workers=num_workers)
        check_gather(
            settings.gather,
            rules,
            num_workers,
            what="DistributedOptimizer",
            wire=settings.wire,
            audit=settings.audit,
        )
        if over is None and not all(isinstance(rule, Mean) for rule in rules):
            _advise_levels(channel.transport)

    def check(self, rules: Sequence[Rule], *, num_workers: int) -> None:
        """Raise ``AggregationError`` unless every rule fits the number of workers."""
        for rule in () if self._is_alone else rules:
            try:
                rule.check(num_workers)
            except AggregationError as error:
                if self.groups is None:
                    raise
                raise AggregationError(
                    f"over=: f counts groups, and there are {num_workers} of "
                    f"{self.groups.group_size} ranks each: {error}"
                ) from error

    def min_ranks(self, rules: Sequence[Rule]) -> int:
        """Return so many ranks that any of them are in enough groups for every rule."""
        if self._is_alone:
            return 1
        # Three groups of 2 needed: any 4 ranks may be two whole groups, any 5 are in three.
        most = max(rule.min_rows for rule in rules)
        return (most - 1) * (self.groups.group_size if self.groups else 1) + 1


def _advise_levels(transport: Transport) -> None:
    """Say once, on rank 0, when two levels would send fewer bytes between nodes."""
    per_node, num_ranks = transport.local_size, transport.world_size
    if transport.rank != 0 or per_node < 2 or num_ranks <= per_node or num_ranks % per_node:
        return
    num_nodes = num_ranks // per_node
    # Times the gradients' bytes that leave a node (docs/levels.md). Flat: each of its ranks sends
    # a shard to every rank elsewhere, then the ring of the all-gather leaves the node once.
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


_ZEROED_ADVICE = (
    "Give them a rule of their own, rule={{{name!r}: loft.Mean(), '*': ...}}, or one over the "
    "ranks that have a gradient there (docs/rules.md); see optimizer.report()"
)


class OptimizerWorld:
    """Some ranks, from one change of them to the next, and an optimizer that reduces over them.

    ``before`` is the run log of the world before. With ``should_agree`` ranks compare what they
    were given. Elastic ones start at different times, so the first world of a process is made
    without; the next one catches up.
    """

    def __init__(
        self,
        transport: Transport,
        options: OptimizerOptions,
        outgoing: OutgoingHooks,
        before: RunLog,
        *,
        should_agree: bool,
        momentum: WorkerMomentum | None = None,
    ) -> None:
        self._momentum = momentum
        self._transport = transport
        self._options = options
        self._outgoing = outgoing
        # Horovod renumbers an elastic transport under this object, and its balancer may begin a
        # world without it: these two are what it was made for.
        self._made_for = transport.world_size
        self._batches = options.batches(before, rank=self.rank, world_size=self.world_size)
        self._number = self._batches.num_worlds
        self.log = self._batches.log
        gather = options.settings.gather
        self._links = None if gather is None else LinkLog(transport, gather, self.log)
        # Two optimizers over models of one kind have the same names for their parameters. In an
        # elastic job ranks of the first world are not there together.
        self._own = ""
        found = options.collect()
        if should_agree:
            self._agree(found)
            self._own = f".{new_number(Channel(transport, 'loft.optimizer.number'))}"
        self._workers = Workers(self._channel(found), found.rules, options.over, options.settings)
        self._judgement = Judgement(
            self._channel(found),
            found.rules,
            options.watching,
            groups=self._workers.groups,
            is_on_cpu=found.are_on_cpu,
            knows_sizes=options.balancer is not None,
            log=self.log,
        )
        self._look_at(found)
        self._make_exchange = exchange_maker(self._workers.groups, run=self._judgement.run)
        self._lay_out(found)

    def _look_at(self, found: ReducedParameters) -> None:
        self._found = found, self._options.settings.num_passes
        rules = [found.rules[spec.rule] for spec in found.specs]
        names = [spec.name for spec in found.specs]
        self._judgement.look_at(found.parameters, names, rules, _ZEROED_ADVICE)

    def _is_of(self, found: ReducedParameters, num_passes: int) -> bool:
        """Whether these are the parameters, rules and passes a step that are looked at."""
        own, own_passes = self._found
        if (found.specs, found.rules, num_passes) != (own.specs, own.rules, own_passes):
            return False  # sums of more passes have other lengths
        return all(a is b for a, b in zip(found.parameters, own.parameters, strict=True))

    def _channel(self, found: ReducedParameters) -> Channel:
        return Channel(self._transport, f"{found.name}{self._own}")

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    def _agree(self, found: ReducedParameters) -> None:
        """Open the heartbeat, and compare parameters and options over ranks."""
        with self.log.faults():
            self._transport.can.open_heartbeat()
            # Not found.name: ranks may differ in what it comes from.
            channel = Channel(self._transport, "loft.optimizer")
            own = found.fields(mixes_devices=self._transport.can.mixes_devices)
            fields = own | self._options.fields()
            check_agreement(channel, fields, what="DistributedOptimizer", refusal=self.log.refusal)

    def lay_out_anew(self, options: OptimizerOptions) -> None:
        """Take the parameters that there are now, and options that differ in what buckets do alone.

        Every rank calls it alike, between two steps.
        """
        found = options.collect()
        # The workers stay, with what is known of them; the parameters' rules may be new. All that
        # refuses comes before anything is taken off, and first what all ranks refuse together.
        before, self._options = self._options, options
        try:
            self._agree(found)
            self._workers.check(found.rules, num_workers=self._judgement.num_workers)
            self._require(found)
        except LoftError:
            self._options = before
            raise
        self._reducer.detach()
        self._judgement.take_rules(found.rules, is_on_cpu=found.are_on_cpu)
        if not self._is_of(found, options.settings.num_passes):
            self._look_at(found)
        self._lay_out(found)

    def _require(self, found: ReducedParameters) -> None:
        min_ranks = self._workers.min_ranks(found.rules)
        self._batches.require(min_ranks=min_ranks, num_passes=self._options.settings.num_passes)

    def _lay_out(self, found: ReducedParameters) -> None:
        options = self._options
        self._batches.check_world(self.world_size)
        self._batches.compute_on(found.parameters[0].device)
        self._require(found)
        channel = self._outgoing_channel = self._channel(found)
        names = (spec.name for spec in found.specs)
        self._replicas = ReplicaCheck(
            channel,
            options.optimizer,
            list(zip(names, found.parameters, strict=True)),
            batch=lambda: self._batches.newest_batch,
        )
        self._reducer = GradientReducer(
            found.parameters,
            found.specs,
            found.rules,
            settings=options.settings,
            channel=channel,
            source=options.balancer,
            outgoing=self._outgoing,
            make_exchange=self._make_exchange,
            judgement=self._judgement,
            momentum=self._momentum,
        )
        self._exchanges = ExchangeLog(
            self.log,
            self._reducer.engine.lane,
            num_bytes=sum(spec.num_bytes for spec in found.specs),
        )

    def gather_outgoing(self, values: Tensor, *, name: str) -> Tensor:
        """Return every rank's values of a bucket, [world_size, numel]; see the wrapper's."""
        rows = values.new_empty(self.world_size, values.numel())
        channel = self._outgoing_channel.sub(name)
        work = self._transport.allgather(values, rows.view(-1), name=channel.name)
        channel.wait(work, what=f"rows gathered for {name}")
        return rows

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """What is reduced, also while it is frozen."""
        return self._reducer.parameters

    @property
    def has_gradients(self) -> bool:
        return self._reducer.has_gradients

    @property
    def is_passed_over(self) -> bool:
        return self._reducer.is_passed_over

    @property
    def is_in_flight(self) -> bool:
        return self._reducer.is_in_flight

    def forget_gradients(self) -> None:
        """Forget the backward passes of a step, of which nothing is on its way."""
        self._reducer.forget()

    def synchronize(self) -> None:
        self._check_unchanged()
        if self.world_size > 1:  # alone, a gradient that is not reduced parts no models
            check_none_thawed(self._options.optimizer.param_groups, self._reducer.parameters)
        self._batches.computing_ended()
        with waiting(), self.log.faults():
            self._reducer.synchronize()
            self._replicas.gradients_reduced()

    def scaler_used(self, scaler: torch.amp.GradScaler) -> None:
        """Compare a scaler's scale over ranks, before it takes it off reduced gradients."""
        with self.log.faults():
            self._replicas.scales.use(scaler)

    def _check_unchanged(self) -> None:
        """Raise unless buckets and groups are those of the ranks that there are."""
        if self._made_for != self.world_size:
            raise UsageError(
                f"the world has changed from {self._made_for} to {self.world_size} ranks under "
                "this optimizer; with hvd.elastic.run, give it to a loft.elastic.State, which "
                "makes it fit"
            )
        if self._number != self._batches.num_worlds:
            raise UsageError(
                f"the balancer has begun world {self._batches.num_worlds}, and this optimizer is "
                f"still that of world {self._number}: plans may leave fewer ranks with samples "
                "than its rule needs; with hvd.elastic.run, give both to the loft.elastic.State"
            )

    def step_ended(self) -> None:
        """Note that the optimizer has taken its step."""
        # Before the step ends: a plan may be made at its end.
        self._batches.hold(self._judgement.watch.absent_ranks)
        self._batches.note_noise(self._judgement.noise)
        self._batches.step_ended()
        self._exchanges.step_ended(self._reducer.exchange)
        if self._links is not None:
            self._links.step_ended()

    def report(self) -> SuspicionReport:
        return self._judgement.report()

    def detach(self) -> None:
        """Take all hooks off the parameters."""
        self._reducer.detach()


class IdleWorld:
    """In place of an ``OptimizerWorld``: outside the process set, or (``error``) not begun yet."""

    has_gradients = is_in_flight = is_passed_over = False
    parameters: Sequence[torch.nn.Parameter] = ()

    def __init__(self, transport: Transport | None = None, *, error: str = "") -> None:
        self.rank = -1 if transport is None else transport.rank
        self.world_size = 0 if transport is None else transport.world_size
        self.log = RunLog(None)
        self._error = error

    def _ignore(self, options: OptimizerOptions | None = None) -> None:
        """Lay out nothing, tell nobody."""

    lay_out_anew = step_ended = detach = forget_gradients = _ignore

    def scaler_used(self, scaler: torch.amp.GradScaler) -> None:
        """Compare nothing."""

    def synchronize(self) -> None:
        """Leave gradients as they are, or raise that they cannot be reduced yet."""
        if self._error:
            raise UsageError(self._error)

    def gather_outgoing(self, values: Tensor, *, name: str) -> Tensor:
        """Return this rank's own values, [1, numel]."""
        return values.unsqueeze(0)

    def report(self) -> SuspicionReport:
        return SuspicionReport(0, (), note="nobody is watched: this rank reduces alone")
