"""One optimizer in one world of ranks: its workers, who watches them, and what reduces gradients.

Whatever is made anew when an elastic world changes is here, and nothing that outlives a world. It
has three shapes: ranks that reduce together (``OptimizerWorld``), one alone (its workers are a
``LoneWorker``), and a rank that takes no part (``IdleWorld``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from loft_hvd.aggregation.row_rules import Robust
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import AggregationError, LoftError, UsageError
from loft_hvd.optimizer.options import OptimizerOptions
from loft_hvd.optimizer.parameters import ReducedParameters, check_none_thawed
from loft_hvd.optimizer.replicas import ReplicaCheck
from loft_hvd.pipeline.gradients import OutgoingHooks
from loft_hvd.pipeline.levels import exchange_maker
from loft_hvd.pipeline.momentum import WorkerMomentum
from loft_hvd.pipeline.reducer import GradientReducer
from loft_hvd.pipeline.ring import MakeExchange, flat_exchange
from loft_hvd.pipeline.suspicion.report import FEWEST_WATCHED, SuspicionReport
from loft_hvd.pipeline.suspicion.spread import (
    JUDGE_IN_SHARDS_BELOW,
    WARN_ABOVE,
    ParameterSpread,
    Spread,
    tell_scope,
)
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine, Unwatched, WorkerWatch
from loft_hvd.pipeline.suspicion.zeroed import ParameterZeroed
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.runlog import MOST_ROWS, RunLog
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport, mixes_devices
from loft_hvd.transport.groups import Groups, Over, find_groups
from loft_hvd.transport.horovod import HorovodTransport
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

__all__ = [
    "IdleWorld",
    "OptimizerWorld",
    "StandingLog",
    "Workers",
    "are_all_on_cpu",
    "make_watch",
]

_logger = logging.getLogger(__name__)

# Steps between two looks at who is off: evidence is not exchanged more often by default.
_LOOK_EVERY = 10
# Steps after which the run log has who is off even though nothing has changed.
_WRITE_EVERY = 100


def are_all_on_cpu(channel: Channel, mine: bool) -> bool:
    """Say whether gradients are on a CPU on every rank; every rank calls it alike.

    ``mine`` says so of this rank.
    """
    if not mixes_devices(channel.transport):
        return mine  # ranks have agreed on the kind of their devices
    # One on a GPU that watches nobody would not come to where the others exchange evidence.
    return bool(channel.sub("cpu").allgather_rows(torch.tensor([int(mine)])).all())


def make_watch(
    channel: Channel,
    rules: Sequence[Rule],
    *,
    groups: Groups | None = None,
    diagnostics: bool | Suspicion | None,
    quarantine: bool | Quarantine,
    are_on_cpu: bool,
) -> WorkerWatch | Unwatched:
    """Return what watches the workers of these ranks, or says why nobody does; talks to nobody.

    All arguments are equal on every rank.
    """
    # A mean keeps every row: nobody can be outside, and nobody is looked at.
    robust = [rule for rule in rules if not isinstance(rule, Mean)]
    num_workers = groups.num_groups if groups else channel.world_size
    if channel.world_size == 1:
        return Unwatched("nobody is watched: this rank reduces alone")
    if num_workers < FEWEST_WATCHED:
        return Unwatched(
            f"nobody is watched: of {num_workers} workers nobody can say which one is off"
        )
    # On a GPU every look waits for the device: only where it was asked for.
    watches = are_on_cpu if diagnostics is None else bool(diagnostics)
    if not robust:
        return Unwatched("nobody is watched: that takes a robust rule; a mean keeps every value")
    if not (watches or quarantine):
        return Unwatched(
            "nobody is watched: diagnostics=False was given"
            if diagnostics is False
            else "nobody is watched: where gradients are on a GPU that takes diagnostics=True, and "
            "each bucket then waits for the device"
        )
    return WorkerWatch(
        channel,
        # The rule that needs most rows says whom it can spare.
        max(robust, key=lambda rule: rule.min_rows),
        groups=groups,
        settings=diagnostics if isinstance(diagnostics, Suspicion) else Suspicion(),
        quarantine=Quarantine() if quarantine is True else quarantine or None,
    )


class Workers:
    """Who an optimizer's workers are, two ranks or more, or groups of them; the same everywhere."""

    def __init__(
        self, channel: Channel, found: ReducedParameters, options: OptimizerOptions
    ) -> None:
        transport = channel.transport
        # By a fixed name: ranks whose parameters differ must still meet here.
        groups = find_groups(Channel(transport, "loft", channel.timeout_s), options.over)
        self._groups = groups
        self.num_workers = groups.num_groups if groups else transport.world_size
        self.check(found.rules)
        # A mean keeps every row: nobody can be outside, and nobody is looked at.
        robust = [rule for rule in found.rules if not isinstance(rule, Mean)]
        if options.over is None and robust:
            _advise_levels(transport)
        self.watch = self._make_watch(channel, found, options)
        # How values go over the wire: in one level, or in two of groups. By way of self: who
        # watches may change with the rules.
        self.make_exchange: MakeExchange = exchange_maker(transport, groups, run=self._run)

    def _run(self, rows: Tensor, rule: Rule, weights: PassWeights | None, out: Tensor) -> None:
        self.watch.run(rows, rule, weights, out)

    def _make_watch(
        self, channel: Channel, found: ReducedParameters, options: OptimizerOptions
    ) -> WorkerWatch | Unwatched:
        return make_watch(
            channel,
            found.rules,
            groups=self._groups,
            diagnostics=options.diagnostics,
            quarantine=options.quarantine,
            are_on_cpu=are_all_on_cpu(channel, found.are_on_cpu),
        )

    def take_rules(
        self, channel: Channel, found: ReducedParameters, options: OptimizerOptions
    ) -> None:
        """Watch by the rules that there are now; what is known of workers stays.

        Every rank calls it alike.
        """
        fresh = self._make_watch(channel, found, options)
        if isinstance(self.watch, Unwatched):
            self.watch = fresh
        elif isinstance(fresh, WorkerWatch):
            self.watch.judge_by(fresh.rule)

    def check(self, rules: Sequence[Rule]) -> None:
        """Raise ``AggregationError`` unless every rule fits the number of workers."""
        for rule in rules:
            try:
                rule.check(self.num_workers)
            except AggregationError as error:
                if self._groups is None:
                    raise
                raise AggregationError(
                    f"over=: f counts groups, and there are {self.num_workers} of "
                    f"{self._groups.group_size} ranks each: {error}"
                ) from error

    def min_ranks(self, rules: Sequence[Rule]) -> int:
        """Return so many ranks that any of them are in enough groups for every rule."""
        # Three groups of 2 needed: any 4 ranks may be two whole groups, any 5 are in three.
        most = max(rule.min_rows for rule in rules)
        return (most - 1) * (self._groups.group_size if self._groups else 1) + 1


class LoneWorker:
    """In place of ``Workers`` in a world of one, which is the identity: any rule fits."""

    num_workers = 1

    def __init__(self) -> None:
        self.watch = Unwatched("nobody is watched: this rank reduces alone")
        self.make_exchange: MakeExchange = flat_exchange

    def check(self, rules: Sequence[Rule]) -> None:
        pass

    def take_rules(self, *_: object) -> None:
        pass

    def min_ranks(self, rules: Sequence[Rule]) -> int:
        return 1  # this one


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


def _advise_fewer(rules: Sequence[Rule], num_workers: int) -> None:
    """Say where the advised rule expects more wrong workers than it can do well with."""
    # Bound from the papers: the error grows with f / (n - 2f) times the workers' differences.
    for f in sorted({rule.f for rule in rules if isinstance(rule, Robust)}):
        if 4 * f > num_workers > 1:  # alone nothing is aggregated
            _logger.warning(
                "robust:f=%d expects more than a quarter of %d workers to be wrong: that costs "
                "accuracy even if none is, and most where workers draw from different data. With "
                "a quarter, the worst attack on digits left 96.1 %% right on shuffled data, 65.4 "
                "%% on data sorted by class and 95.0 %% on these with strata (8 workers, "
                'scope="model", docs/attacks.md). '
                "First give the placement strata: Placement.with_strata(labels, cap=1.5); then "
                "use %d workers or more%s",
                f,
                num_workers,
                4 * f,
                f", or f <= {num_workers // 4}" if num_workers >= 4 else "",
            )


class StandingLog:
    """Writes how gradients are aggregated, and of the steps who was off.

    Every way to reduce by a rule has one, which also says what the rule itself advises against.
    """

    def __init__(self, *, rank: int, num_workers: int) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._num_steps = 0
        self._rules: tuple[Rule, ...] = ()  # in the log
        self._seen: tuple[object, ...] = ()  # each worker's standing in the newest line

    def write_rules(
        self, log: RunLog, rules: tuple[Rule, ...], watch: WorkerWatch | Unwatched, *, over: Over
    ) -> None:
        """Write the rules from here on, if they are new, and when somebody looks at gradients."""
        if rules == self._rules:
            return
        if self._rank == 0:
            _advise_fewer([rule for rule in rules if rule not in self._rules], self._num_workers)
        self._rules = rules
        note = watch.report().note
        log.write(
            "rules",
            rules=[str(rule) for rule in rules],
            over=None if over is None else str(over),
            watched_from=None if note else log.step + _LOOK_EVERY,
            note=note,
        )

    def step_reduced(self, log: RunLog, watch: WorkerWatch | Unwatched) -> None:
        """Write who is off, if it is time to and somebody's standing is new."""
        self._num_steps += 1
        if log.path is None or self._num_steps % _LOOK_EVERY:
            return
        report = watch.report()
        standing = tuple((worker.is_named, worker.in_quarantine_until) for worker in report.workers)
        if report.workers and (standing != self._seen or self._num_steps % _WRITE_EVERY == 0):
            self._seen = standing
            # The most suspicious of many, in the order of ranks.
            most = sorted(report.workers, key=lambda each: (not each.is_named, -each.suspicion))
            shown = sorted(most[:MOST_ROWS], key=lambda each: each.ranks)
            workers = [asdict(worker) for worker in shown]
            log.write("suspicion", num_steps=report.num_steps, workers=workers)


class GradientLog:
    """Writes of each step's gradients how far ranks lie apart for good, and what a rule zeroes.

    Make it on every rank alike, before what else hooks into the gradients.
    """

    def __init__(self, channel: Channel, found: ReducedParameters, *, num_passes: int) -> None:
        pairs = zip(found.parameters, found.specs, strict=True)
        # A mean over ranks does not mind that they draw from different data.
        robust = [
            (p, spec.name) for p, spec in pairs if not isinstance(found.rules[spec.rule], Mean)
        ]
        parameters, names = [p for p, _ in robust], [name for _, name in robust]
        self._found, self._num_passes = found, num_passes
        self._spread = ParameterSpread(parameters, channel)
        self.zeroed = ParameterZeroed(parameters, names, channel)

    @property
    def compares_ranks(self) -> bool:
        """Whether ranks are still to be compared."""
        return not self._spread.has_ended

    def is_of(self, found: ReducedParameters, *, num_passes: int) -> bool:
        """Whether these are the parameters, rules and passes a step that it was made for."""
        own = self._found
        if (found.specs, found.rules, num_passes) != (own.specs, own.rules, self._num_passes):
            return False  # sums of more passes have other lengths
        return all(a is b for a, b in zip(found.parameters, own.parameters, strict=True))

    def step_reduced(self, log: RunLog, watch: WorkerWatch | Unwatched) -> Spread | None:
        """Compare ranks when enough steps were seen; write what is new.

        Returns:
            How far ranks lie apart for good, in the step that compares them, on all of them.
        """
        self.zeroed.step_reduced()
        if (spread := self._spread.step_reduced()) is not None:
            log.write("spread", **asdict(spread))
            watch.ranks_compared(are_apart=spread.usual > WARN_ABOVE)
        return spread

    def detach(self) -> None:
        self._spread.detach()
        self.zeroed.detach()


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
        self._waited_s = 0.0
        found = options.collect()
        if should_agree:
            self._agree(found)
        is_alone = transport.world_size == 1
        self._workers = LoneWorker() if is_alone else Workers(self._channel(found), found, options)
        self._standing = StandingLog(rank=self.rank, num_workers=self._workers.num_workers)
        self._write_rules(found)
        # Hooks run in the order in which they are made: the log sees gradients before they move
        # into their bucket.
        num_passes = options.settings.num_passes
        self._gradient_log = GradientLog(self._channel(found), found, num_passes=num_passes)
        # How scope="auto" judges rows now: in shards from the start where nobody will compare.
        self._is_model, self._is_compared = self._gradient_log.compares_ranks, False
        self._lay_out(found)

    def _write_rules(self, found: ReducedParameters) -> None:
        over = self._options.over
        self._standing.write_rules(self.log, found.rules, self._workers.watch, over=over)

    def _channel(self, found: ReducedParameters) -> Channel:
        return Channel(self._transport, found.name)

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    def _agree(self, found: ReducedParameters) -> None:
        """Open the heartbeat, and compare parameters and options over ranks."""
        with self.log.faults():
            if isinstance(self._transport, HorovodTransport | TorchDistributedTransport):
                self._transport.open_heartbeat()
            # Not found.name: ranks may differ in what it comes from.
            channel = Channel(self._transport, "loft.optimizer")
            own = found.fields(mixes_devices=mixes_devices(self._transport))
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
            self._workers.check(found.rules)
            self._require(found)
        except LoftError:
            self._options = before
            raise
        self._reducer.detach()
        self._workers.take_rules(self._channel(found), found, options)
        self._write_rules(found)
        num_passes = options.settings.num_passes
        if not self._gradient_log.is_of(found, num_passes=num_passes):
            self._gradient_log.detach()
            self._gradient_log = GradientLog(self._channel(found), found, num_passes=num_passes)
            if not self._is_compared:
                self._is_model = self._gradient_log.compares_ranks
        self._lay_out(found)

    def _require(self, found: ReducedParameters) -> None:
        min_ranks = self._workers.min_ranks(found.rules)
        self._batches.require(min_ranks=min_ranks, num_passes=self._options.settings.num_passes)

    def _lay_out(self, found: ReducedParameters) -> None:
        options, workers = self._options, self._workers
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
            make_exchange=workers.make_exchange,
            watch=workers.watch,
            momentum=self._momentum,
        )
        if options.settings.scope == "auto":
            self._reducer.judge_by(is_model=self._is_model)

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
    def is_in_flight(self) -> bool:
        return self._reducer.is_in_flight

    def synchronize(self) -> None:
        self._check_unchanged()
        if self.world_size > 1:  # alone, a gradient that is not reduced parts no models
            check_none_thawed(self._options.optimizer.param_groups, self._reducer.parameters)
        self._batches.computing_ended()
        began = time.monotonic()
        with self.log.faults():
            self._reducer.synchronize()
            self._replicas.gradients_reduced()
            spread = self._gradient_log.step_reduced(self.log, self._workers.watch)
            self._standing.step_reduced(self.log, self._workers.watch)
            if spread is not None:
                self._judge_by(spread)
        self._waited_s += time.monotonic() - began

    def _judge_by(self, spread: Spread) -> None:
        """Take the scope that suits ranks so far apart, if that is left to them; all alike."""
        if self._options.settings.scope != "auto" or not self._reducer.engine.sees_rows:
            return
        if not math.isnan(spread.usual):
            was_model, self._is_compared = self._is_model, True
            self._is_model = spread.usual > JUDGE_IN_SHARDS_BELOW
            if self._is_model != was_model:
                self._reducer.judge_by(is_model=self._is_model)
                self.log.write("scope", scope="model" if self._is_model else "shard")
        if self.rank == 0:
            tell_scope(spread, is_model=self._is_model)

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
        self._batches.hold(self._workers.watch.absent_ranks)
        self._batches.step_ended(waited_s=self._waited_s)
        self._waited_s = 0.0

    def report(self) -> SuspicionReport:
        return replace(self._workers.watch.report(), zeroed=self._gradient_log.zeroed.found)

    def detach(self) -> None:
        """Take all hooks off the parameters."""
        self._gradient_log.detach()
        self._reducer.detach()


class IdleWorld:
    """In place of an ``OptimizerWorld``: outside the process set, or (``error``) not begun yet."""

    has_gradients = is_in_flight = False
    parameters: Sequence[torch.nn.Parameter] = ()

    def __init__(self, transport: Transport | None = None, *, error: str = "") -> None:
        self.rank = -1 if transport is None else transport.rank
        self.world_size = 0 if transport is None else transport.world_size
        self.log = RunLog(None)
        self._error = error

    def _ignore(self, options: OptimizerOptions | None = None) -> None:
        """Lay out nothing, tell nobody."""

    lay_out_anew = step_ended = detach = _ignore

    def synchronize(self) -> None:
        """Leave gradients as they are, or raise that they cannot be reduced yet."""
        if self._error:
            raise UsageError(self._error)

    def gather_outgoing(self, values: Tensor, *, name: str) -> Tensor:
        """Return this rank's own values, [1, numel]."""
        return values.unsqueeze(0)

    def report(self) -> SuspicionReport:
        return SuspicionReport(0, (), note="nobody is watched: this rank reduces alone")
