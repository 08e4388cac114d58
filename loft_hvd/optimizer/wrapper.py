"""The optimizer that ``DistributedOptimizer`` returns: the user's, which reduces before it steps.

It is a genuine ``torch.optim.Optimizer`` that owns nothing: state, parameter groups and hooks are
the user's optimizer's own. Its class says it lives in Horovod's optimizer module, which is how
``hvd.broadcast_optimizer_state`` tells optimizers whose ``step`` communicates.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from loft_hvd.balance.balancer import Balancer
from loft_hvd.config import config
from loft_hvd.errors import LoftError, UsageError
from loft_hvd.optimizer.delegate import Delegate
from loft_hvd.optimizer.gradient_log import GradientLog
from loft_hvd.optimizer.options import World, agree, check_world, open_log
from loft_hvd.optimizer.parameters import GradientSet, check_none_thawed
from loft_hvd.optimizer.workers import Team, TeamOptions
from loft_hvd.pipeline.outgoing import OutgoingHooks
from loft_hvd.pipeline.reducer import GradientReducer
from loft_hvd.pipeline.settings import OutgoingHook, ReducerSettings
from loft_hvd.pipeline.stages import flat_exchange
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.watch import Unwatched, WorkerWatch
from loft_hvd.runlog import RunLog
from loft_hvd.transport.base import Channel, Transport

__all__ = ["ReducingOptimizer"]

_ALONE = Unwatched("nobody is watched: this rank reduces alone")


class ReducingOptimizer(Delegate):
    """The user's optimizer with reduced gradients; made by ``DistributedOptimizer``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        collect: Callable[[], GradientSet],
        *,
        settings: ReducerSettings,
        find_transport: Callable[[], Transport | None],
        balancer: Balancer | None,
        log_dir: str | Path | None,
        team_options: TeamOptions,
    ) -> None:
        super().__init__(optimizer)
        self._collect = collect
        self._settings = settings
        self._find_transport = find_transport
        self._transport = find_transport()
        self._balancer = balancer
        self._log_dir = log_dir
        self._team_options = team_options
        self._team: Team | None = None
        self._watch: WorkerWatch | Unwatched = _ALONE
        self._log = self._open_log()
        self._gradient_log: GradientLog | None = None
        self._outgoing = OutgoingHooks()
        self._made_for: World | None = None  # as the reducer is
        # Elastic ranks start at different times: they agree, and make groups, in ``begin_world``.
        if is_elastic := config().is_elastic:
            self._collect()  # says what is wrong with the arguments
        waits = is_elastic and team_options.over is not None
        self._reducer = None if waits else self._make_reducer(should_agree=not is_elastic)
        self._should_synchronize = True
        self._is_synchronized = False
        self._waited_s = 0.0

    def _open_log(self) -> RunLog:
        return open_log(self._log_dir, self._balancer, rank=self.rank, world_size=self.world_size)

    def _make_reducer(self, *, should_agree: bool = True) -> GradientReducer | None:
        transport = self._transport
        if transport is None:  # this rank is not in the process set
            return None
        found = self._collect()
        self._made_for = World.now(transport, self._balancer)
        if should_agree:
            agree(transport, found, self._settings, self._balancer, self._team_options, self._log)
        team = self._find_team(transport, found)
        if self._balancer is not None:
            self._balancer.check_world(transport.world_size)
            if found.parameters:
                self._balancer.compute_on(found.parameters[0].device)
        if self._balancer is not None and team is not None:
            min_ranks = team.min_ranks(found.rules)
            self._balancer.require(min_ranks=min_ranks, num_passes=self._settings.num_passes)
        if self._gradient_log is not None:
            self._gradient_log.detach()
        self._watch = _ALONE if team is None else team.watch
        channel = Channel(transport, found.name, self._settings.timeout_s)
        self._gradient_log = GradientLog(found, channel)
        return GradientReducer(
            found.parameters,
            found.specs,
            found.rules,
            settings=self._settings,
            transport=transport,
            source=self._balancer,
            outgoing=self._outgoing,
            name=found.name,
            make_exchange=flat_exchange if team is None else team.make_exchange,
            watch=self._watch,
        )

    def _find_team(self, transport: Transport, found: GradientSet) -> Team | None:
        """Return the workers of this world, made at the first call in it; None where none are."""
        if transport.world_size == 1:
            return None
        if self._team is None:
            self._team = Team(
                transport,
                found.rules,
                self._team_options,
                on_cpu=all(parameter.device.type == "cpu" for parameter in found.parameters),
                name=found.name,
                timeout_s=self._settings.timeout_s,
            )
        self._team.check(found.rules)
        return self._team

    def begin_world(self) -> None:
        """Lay out buckets for the ranks there are now; ``loft.elastic.State`` calls it on each."""
        self._optimizer.zero_grad(set_to_none=True)
        self._transport = self._find_transport()
        self._team, self._watch = None, _ALONE
        self._outgoing.begin_world()
        if self._balancer is not None or self.rank != 0 or self._log.path is None:
            self._log = self._open_log()  # ranks are numbered anew
        self._lay_out_anew()
        self._is_synchronized = False
        self._waited_s = 0.0

    def _lay_out_anew(self) -> None:
        if self._reducer is not None:
            self._reducer.detach()
        self._reducer = self._make_reducer()

    def synchronize(self) -> None:
        """Wait until every gradient is reduced; for clipping or unscaling before ``step``."""
        if self._transport is not None:
            check_world(self._made_for, World.now(self._transport, self._balancer))
        if self._reducer is not None and self._transport is not None:
            if self._transport.world_size > 1:
                check_none_thawed(self._optimizer.param_groups, self._reducer.parameters)
            if self._balancer is not None:
                self._balancer.computing_ended()
            began = time.monotonic()
            with self._log.faults():
                self._reducer.synchronize()
                if self._gradient_log is not None:
                    self._gradient_log.step_reduced(self._log, self._watch)
            self._waited_s += time.monotonic() - began
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` take the gradients as they are, after a ``synchronize`` of the script's.

        ::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def _prepare_step(self) -> None:
        if not self._should_synchronize:
            if not self._is_synchronized:
                self.synchronize()
            return
        if self._is_synchronized:
            warnings.warn(
                "optimizer.step() called after optimizer.synchronize() without "
                "optimizer.skip_synchronize(); the gradients are taken as they are, wrap step() "
                "in `with optimizer.skip_synchronize()` to say so",
                stacklevel=3,
            )
            if self._reducer is None or not self._reducer.has_gradients:
                return
        self.synchronize()

    def step(  # type: ignore[override]  # one signature for both of the base's overloads
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Reduce the gradients, then take the user's optimizer's step.

        Args:
            closure: computes the loss and its gradients; they are reduced each time it is called.
        """
        if closure is None:
            self._prepare_step()
            result = self._optimizer.step()
        else:
            evaluate = closure

            def reduced() -> float:
                loss = evaluate()
                self._prepare_step()
                self._is_synchronized = False  # the next evaluation has gradients of its own
                return loss

            result = self._optimizer.step(reduced)
        self._is_synchronized = False
        if self._balancer is None:
            self._log.step += 1
        elif self._reducer is not None:
            self._balancer.hold(self._watch.absent_ranks)
            self._balancer.step_ended(waited_s=self._waited_s)
        self._waited_s = 0.0
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the user's own step runs the step hooks

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients; takes what the user's optimizer takes.

        Raises:
            UsageError: gradients are on the wire.
        """
        if self._reducer is not None and self._reducer.is_in_flight:
            raise UsageError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(): gradients are on the wire"
            )
        self._optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike; lays the buckets out anew.

        Parameters that ``named_parameters`` did not name are named by their place.

        Raises:
            LoftError: they cannot be reduced, or a step is under way; the group is not added.
        """
        if self._reducer is not None and self.world_size > 1 and self._reducer.has_gradients:
            raise UsageError(
                "optimizer.add_param_group() was called after loss.backward() but before "
                "optimizer.step(): gradients are on their way; call it between steps"
            )
        self._optimizer.add_param_group(param_group)
        try:
            self._collect()
        except LoftError:
            self._optimizer.param_groups.pop()
            raise
        if self._reducer is not None:
            self._lay_out_anew()

    def register_outgoing_hook(self, hook: OutgoingHook) -> RemovableHandle:
        """Call ``hook(bucket, values)`` before a bucket is sent; it may change values in place.

        In an elastic job register it before ``hvd.elastic.run``: it stays for all worlds. One that
        the function run there registers ends with its world, as the next one calls it again.

        Args:
            hook: gets the bucket and this rank's flat values of it, [numel]: the gradient it
                would send, scaled by its share of the batch under ``Mean``.

        Returns:
            A handle whose ``remove()`` takes the hook away, in later worlds too.

        Raises:
            UsageError: this rank is not in the process set, and no elastic world changes that.
        """
        if self._transport is None and not config().is_elastic:
            raise UsageError("this rank is not in the optimizer's process set: it sends nothing")
        return self._outgoing.add(hook)

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        return self._watch.report()

    @property
    def rank(self) -> int:
        """This rank, or -1 outside the process set."""
        return -1 if self._transport is None else self._transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that reduce gradients together."""
        return 0 if self._transport is None else self._transport.world_size


# hvd.broadcast_optimizer_state compares this name, and then calls the base class's step.
ReducingOptimizer.__module__ = "horovod.torch.optimizer"
