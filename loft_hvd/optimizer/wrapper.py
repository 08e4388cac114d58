"""The optimizer that ``DistributedOptimizer`` returns: the user's, which reduces before it steps.

It is a genuine optimizer of the user's class that owns nothing: state, parameter groups and hooks
are the user's optimizer's own (``OptimizerProxy``). Its class is made for it, as Horovod makes one:
before there is an optimizer to wrap, none of torch's classes has a subclass here. The class says it
lives in Horovod's optimizer module, which is how ``hvd.broadcast_optimizer_state`` tells optimizers
whose ``step`` communicates: it then calls the base class's ``step``, the proxy's, which must not.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.config import config
from loft_hvd.copies import NeverCopied
from loft_hvd.errors import ArgumentError, ArgumentTypeError, LoftError, UsageError
from loft_hvd.optimizer.horovods import HOROVODS_MODULE, users_class
from loft_hvd.optimizer.options import (
    BetasAdvice,
    OptimizerOptions,
    advised_momentum,
    check_groups,
    check_passes,
    check_step,
)
from loft_hvd.optimizer.workers import IdleWorld, OptimizerWorld
from loft_hvd.pipeline.gradients import OutgoingHook, OutgoingHooks
from loft_hvd.pipeline.momentum import STATE_KEY, check_state
from loft_hvd.pipeline.scalers import tell_of_unscaling
from loft_hvd.pipeline.suspicion.report import SuspicionReport

__all__ = ["OptimizerProxy", "OptimizerWrapper", "wrap"]

if TYPE_CHECKING:
    _Optimizer = torch.optim.Optimizer  # which ``wrap`` brings in, with the user's class
else:
    _Optimizer = object

# Attributes that torch's GradScaler sets on an optimizer whose fused step unscales by itself. It
# looks for the step's arguments on the wrapper, but the user's optimizer is what reads them.
_OF_GRAD_SCALER = ("grad_scale", "found_inf")
_NOT_BEGUN = (
    "over= in an elastic job: ranks make groups together when hvd.elastic.run begins a "
    "world, so that one that joins can take part; give this optimizer to a "
    "loft.elastic.State, and use it inside the function that hvd.elastic.run calls"
)
_CLOSED = (
    "this optimizer is closed: it no longer reduces gradients; step with the one that has its "
    "parameters now"
)


class OptimizerProxy(_Optimizer):
    """Everything a ``torch.optim.Optimizer`` has, taken from the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # No super().__init__: it would build a second state and second parameter groups.
        # Of our own, as they are set before there is an optimizer: whether it has taken a step of
        # training, and what tells the state that ``step`` has made up from a later one.
        self._is_stepped = False
        self._made_up: dict[Any, Any] = {}
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet, while being copied or unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # By ``object``: an optimizer's own __setattr__ is for its own attributes.
    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_inner(name):
            setattr(self._optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_inner(name):
            delattr(self._optimizer, name)
        else:
            object.__delattr__(self, name)

    def _is_inner(self, name: str) -> bool:
        """Say whether an attribute is the user's optimizer's, which then reads what is set."""
        own = vars(self)
        # Before there is an optimizer every name is the wrapper's; what it has from then stays so,
        # and what its class has, such as the ``step`` that a learning-rate scheduler replaces.
        if "_optimizer" not in own or name in own or hasattr(OptimizerWrapper, name):
            return False
        inner = self._optimizer
        return name in _OF_GRAD_SCALER or name in vars(inner) or hasattr(type(inner), name)

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in the base class
        return self._optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # as above
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # as above
        return self._optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's state; it loads into one that is wrapped or not."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the user's optimizer; one that torch refuses changes nothing.

        Raises:
            ArgumentError: torch, or the optimizer, cannot take it.
        """
        # torch checks some of it, and puts the rest in place before an optimizer's own __setstate__
        # looks at it: what was there comes back.
        before = self._optimizer.__dict__.copy()
        try:
            self._optimizer.load_state_dict(state_dict)
            self._check_loaded()
            self._is_stepped = False  # what is loaded may be from before the first step
        except Exception as error:
            self._optimizer.__dict__.update(before)
            raise ArgumentError(
                f"load_state_dict: {type(self._optimizer).__name__} cannot take this state "
                f"({type(error).__name__}: {error}); give what state_dict of an optimizer with the "
                "same parameter groups returned, whole"
            ) from error

    def _check_loaded(self) -> None:
        """Raise where the user's optimizer cannot be used with what was just loaded."""

    def step(  # type: ignore[override]  # one signature for both of the base's overloads
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Create the optimizer's state without moving a parameter.

        ``hvd.broadcast_optimizer_state`` calls this, with zero gradients, where a state is still
        empty (a new run, or a worker that joins one).
        """
        # A step with zero gradients moves parameters by weight decay, and by momentum if there is
        # any, and some optimizers count in their groups: all of it is put back.
        groups = self._optimizer.param_groups
        kept = [[p.detach().clone() for p in group["params"]] for group in groups]
        options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in groups
        ]
        for group in groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0
        try:
            self._optimizer.step()
        finally:
            for group, before, values in zip(groups, options, kept, strict=True):
                for name in set(group) - set(before) - {"params"}:
                    del group[name]
                group.update(before)
                with torch.no_grad():
                    for parameter, value in zip(group["params"], values, strict=True):
                        parameter.copy_(value)
        # The step did not count. NAdam, say, has more in its state than numbers that begin at 0,
        # so what was made up goes before the first real step, unless another rank's took its place.
        state = self._optimizer.state
        for entry in state.values():
            if "step" in entry:
                entry["step"] = entry["step"] * 0
        self._made_up, self._is_stepped = _marks_of(state), False
        return None

    def _drop_made_up(self) -> None:
        """Before the first real step forget a state that no step of training has made.

        Decided by what is equal on all ranks after a broadcast, also on those that have loaded it.
        """
        if self._is_stepped:
            return
        self._is_stepped = True
        state = self._optimizer.state
        if self._made_up and self._made_up == _marks_of(state):
            state.clear()
        # One by one: ranks compare what is left, and of one entry that differs name that.
        for parameter in [each for each, entry in state.items() if _is_unstepped(entry)]:
            del state[parameter]


def _is_unstepped(entry: Mapping[str, Any]) -> bool:
    """Say whether a parameter's state has seen no step: its count is 0, or all of it."""
    if "step" in entry:
        return float(entry["step"]) == 0
    return all(isinstance(value, Tensor) and not value.any() for value in entry.values())


def _marks_of(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, Any]:
    """Return what tells a state from a later one: numbers, and sums of tensors."""
    # On the CPU: a script may move the state meanwhile.
    return {
        parameter: {
            name: (float(value.double().sum()), float(value.double().abs().sum()))
            if isinstance(value, Tensor)
            else repr(value)
            for name, value in entry.items()
        }
        for parameter, entry in state.items()
    }


class OptimizerWrapper(NeverCopied, OptimizerProxy):
    """The user's optimizer with reduced gradients; made by ``wrap``."""

    _in_place_of_a_copy = (
        "copy its state_dict(), or wrap an optimizer of a copied model, on every rank alike"
    )

    def __init__(self, options: OptimizerOptions, *_: object) -> None:
        if not isinstance(options, OptimizerOptions):
            # Horovod makes a class below this one, and calls it with its own arguments.
            raise ArgumentTypeError(
                "hvd.DistributedOptimizer: the optimizer is distributed already, by "
                "loft.DistributedOptimizer; turn them round: loft.DistributedOptimizer("
                "hvd.DistributedOptimizer(optimizer, ...), rule=rule, balancer=balancer), or leave "
                "hvd.DistributedOptimizer away"
            )
        self._options = options
        self._outgoing = OutgoingHooks()  # they outlive worlds
        self._momentum = options.make_momentum()  # this rank's averages do, too
        self._betas = BetasAdvice()
        self._should_synchronize = True
        self._is_synchronized = False
        self._is_unscaled = False  # by a scaler, which had the gradients reduced before
        self._has_warned = False  # of a step without gradients
        self._world: OptimizerWorld | IdleWorld = IdleWorld()
        is_elastic = config().is_elastic
        if is_elastic:
            options.collect()  # says at once what is wrong with the arguments
        if is_elastic and options.over is not None:
            # Groups take exchanges that a rank which joins late would miss: in ``begin_world``.
            self._world = IdleWorld(options.find_transport(), error=_NOT_BEGUN)
        else:
            self._world = self._make_world(should_agree=not is_elastic)
        # Last: from here on what the user's optimizer has by the name of an attribute is set there.
        super().__init__(options.optimizer)
        self._advise_betas()
        tell_of_unscaling(self)
        if options.balancer is not None and options.balancer.is_auto:
            options.balancer.scale_lr(options.optimizer)

    def _make_world(self, *, should_agree: bool) -> OptimizerWorld | IdleWorld:
        transport = self._options.find_transport()
        if transport is None:
            return IdleWorld()
        return OptimizerWorld(
            transport,
            self._options,
            self._outgoing,
            self._world.log,
            should_agree=should_agree,
            momentum=self._momentum,
        )

    def _advise_betas(self) -> None:
        if self._momentum is not None and self.rank == 0:
            self._betas.check(self._options.optimizer.param_groups)

    def begin_world(self) -> None:
        """Lay out buckets for the ranks there are now; ``loft.elastic.State`` calls it on each."""
        self._optimizer.zero_grad(set_to_none=True)
        self._outgoing.begin_world()
        self._world.detach()
        if self._momentum is not None:
            self._momentum.begin_world()
        with self._all_thawed():
            self._world = self._make_world(should_agree=True)
        self._is_synchronized = False

    @contextmanager
    def _all_thawed(self) -> Iterator[None]:
        """Let parameters that are reduced, but frozen at the moment, be laid out with the others.

        Else they would be left out when they thaw, and ranks that join have them.
        """
        frozen = [each for each in self._world.parameters if not each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's state; it loads into one that is wrapped or not.

        With worker momentum it has this rank's averages as well, under "worker_momentum": save it
        on each rank to go on with them.
        """
        state = super().state_dict()
        if self._momentum is not None:
            state[STATE_KEY] = self._momentum.state_dict(self._options.named())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the user's optimizer; one that torch refuses changes nothing.

        The averages of worker momentum go on where, before the first step, every rank loads what it
        has saved in a world of the same size; else they begin anew. After the first step they stay,
        unless ``loft.elastic.State`` goes back to a commit for ranks that are lost.

        Raises:
            ArgumentError: torch, or the optimizer, cannot take it.
        """
        averages = None
        if self._momentum is not None and isinstance(state_dict, Mapping):
            averages = state_dict.get(STATE_KEY)
            if averages is not None:
                check_state(averages, self._options.named())
        super().load_state_dict(state_dict)
        if self._momentum is not None:
            self._momentum.load_state_dict(averages, self._options.named())

    def _check_loaded(self) -> None:
        if self._momentum is not None:  # a state from before may bring SGD's own momentum back
            check_groups(self.param_groups, self._momentum.beta)

    def synchronize(self) -> None:
        """Wait until every gradient is reduced; for clipping or unscaling before ``step``."""
        self._world.synchronize()
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

    def before_unscaling(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Reduce the gradients of which a ``GradScaler`` takes its scale; it calls this itself."""
        if optimizer is not self:
            return
        if self._world.has_gradients or self._world.is_passed_over:
            self.synchronize()
            self._is_unscaled = True
        self._world.scaler_used(scaler)

    def _prepare_step(self) -> None:
        if self._is_synchronized:
            if not self._should_synchronize:
                return
            self._warn_of_synchronized()
            if not self._world.has_gradients:
                return
        misses = "" if self._is_synchronized else self._missing_gradients()
        self.synchronize()
        if misses:  # only now: an error of the wait says more
            self._has_warned = True
            warnings.warn(misses, stacklevel=3)

    def _warn_of_synchronized(self) -> None:
        if not self._is_unscaled:
            warnings.warn(
                # The first sentences are Horovod's own: scripts filter the warning by them.
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to "
                "consider using optimizer.skip_synchronize() context if you use "
                "optimizer.synchronize() in your code. Here the gradients are taken as they are, "
                "and nothing is reduced again.",
                stacklevel=4,
            )

    def _missing_gradients(self) -> str:
        """Say, once, of a step that no backward pass came before; "" otherwise."""
        is_idle = isinstance(self._world, IdleWorld)
        has_part = self._world.has_gradients or self._world.is_passed_over
        if has_part or self._has_warned or is_idle:
            return ""
        parameters = [p for group in self.param_groups for p in group["params"]]
        does = "uses its gradients, or what was set as .grad, once more"
        if all(parameter.grad is None for parameter in parameters):
            does = "finds no gradient at all: zeros are averaged with other ranks' gradients"
        return (
            f"optimizer.step() without a backward pass since the step before: it {does}; call "
            "loss.backward() before each step, on every rank"
        )

    def reduce_and_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Reduce the gradients, then take the user's optimizer's step.

        What a ``closure`` computes is reduced each time that the optimizer calls it.

        Raises:
            ArgumentError: with worker momentum, a group has got a momentum of its own.
        """
        if self._momentum is not None:
            check_step(self.param_groups, self._momentum.beta)
            self._advise_betas()
        self._drop_made_up()
        if closure is None:
            self._prepare_step()
            result = self._optimizer.step()
        else:
            result = self._optimizer.step(functools.partial(self._evaluate, closure))
        self._is_synchronized = self._is_unscaled = False
        self._world.step_ended()
        return result

    reduce_and_step.hooked = True  # type: ignore[attr-defined]  # as the proxy's step

    def _evaluate(self, closure: Callable[[], float]) -> float:
        loss = closure()
        self._prepare_step()
        self._is_synchronized = False  # the next evaluation has gradients of its own
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients; takes what the user's optimizer takes.

        Of a step with several backward passes it drops those that there have been so far.
        """
        if self._world.is_in_flight:
            raise UsageError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(): gradients are on the wire; to drop "
                "them call optimizer.synchronize() first, on every rank"
            )
        self._world.forget_gradients()
        self._is_synchronized = self._is_unscaled = False
        self._optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike, between two steps; lays the buckets out anew.

        Parameters that ``named_parameters`` did not name are named by their place. Where they
        cannot be reduced the group is not added.

        Raises:
            ArgumentError: their rule takes another worker momentum than the optimizer was made
                with, or another option does not suit them.
            UsageError: gradients are on their way.
        """
        self._check_between_steps("add_param_group")
        self._optimizer.add_param_group(param_group)
        try:
            self._check_advised()
            with self._all_thawed():
                self._options.collect()
                self._world.lay_out_anew(self._options)
        except LoftError:
            self._optimizer.param_groups.pop()
            raise

    def _check_between_steps(self, method: str) -> None:
        if self.world_size > 1 and self._world.has_gradients:
            raise UsageError(
                f"optimizer.{method}() was called after loss.backward() but before "
                "optimizer.step(): gradients are on their way; call it between steps"
            )

    def close(self) -> None:
        """Let the parameters go to another optimizer, on every rank alike, between two steps.

        One that nothing refers to any more does so by itself. The state stays readable.

        Raises:
            UsageError: gradients are on their way; later, in ``step``: it is closed.
        """
        if self._world.is_in_flight:
            raise UsageError(
                "optimizer.close() was called after loss.backward() but before optimizer.step(): "
                "gradients are on their way; call it between steps"
            )
        self._world.detach()
        self._world = IdleWorld(self._options.find_transport(), error=_CLOSED)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that are summed into one step."""
        return self._options.settings.num_passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum another number of backward passes into a step, on every rank alike, between steps.

        Raises:
            ArgumentError: ``passes`` is no whole number >= 1.
            UsageError: gradients are on their way.
        """
        check_passes(passes)
        self._check_between_steps("set_backward_passes_per_step")
        settings = replace(self._options.settings, num_passes=passes)
        self._options = replace(self._options, settings=settings)
        with self._all_thawed():
            self._world.lay_out_anew(self._options)

    def _check_advised(self) -> None:
        """Raise where the rules that there are now advise another worker momentum than there is."""
        options = self._options
        advised = advised_momentum(options.find_parameters().rules, options.worker_momentum)
        own = 0.0 if self._momentum is None else self._momentum.beta
        if advised != own:
            raise ArgumentError(
                f"add_param_group: with the new group's rule worker_momentum is {advised:g}, "
                f"unless given, but this optimizer was made with {own:g}; say it when it is made: "
                f"DistributedOptimizer(..., worker_momentum={advised:g}), or 0 for none"
            )

    def register_outgoing_hook(self, hook: OutgoingHook) -> RemovableHandle:
        """Call ``hook(bucket, values)`` before a bucket is sent; it may change values in place.

        In an elastic job register it before ``hvd.elastic.run``: it stays for all worlds. One that
        the function run there registers ends with its world, as the next one calls it again.

        Args:
            hook: gets the bucket and this rank's flat values of it, [numel]: the gradient it
                would send, scaled by its share of the batch under ``Mean``.

        Returns:
            A handle whose ``remove()`` takes the hook away, in later worlds too.
        """
        if self.rank < 0 and not config().is_elastic:
            # No later world could change that.
            raise UsageError("this rank is not in the optimizer's process set: it sends nothing")
        return self._outgoing.add(hook)

    def gather_outgoing(self, values: Tensor, *, name: str) -> Tensor:
        """Return every rank's values, [world_size, numel]: for trials of attacks, in a hook.

        A collective, which waits: every rank calls it in its outgoing hook of the same bucket.

        Args:
            values: the bucket's values in the hook, [numel].
            name: the same on every rank, another for each bucket.

        Raises:
            TransportTimeoutError: a rank has not come to it within the time limit.
        """
        return self._world.gather_outgoing(values, name=name)

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        return self._world.report()

    def log_scalars(self, **values: float | Tensor) -> None:
        """Write numbers of the script's own, such as ``loss=0.3``, to rank 0's run log, if any.

        They are rank 0's values: for those of all ranks give what ``loft.average`` returned. A
        tensor on a GPU is waited for.

        Raises:
            ArgumentTypeError: a value is no number; on every rank, not on rank 0 alone.
        """
        self._world.log.write_scalars(values)

    @property
    def rank(self) -> int:
        """This rank, or -1 outside the process set."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that reduce gradients together."""
        return self._world.world_size


class _Inner:
    """What a name of the user's class means: what it means for the user's optimizer."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name

    def __get__(self, wrapper: OptimizerProxy | None, _: type) -> Any:
        return getattr(self._kind if wrapper is None else wrapper._optimizer, self._name)


def _free_nothing(_: OptimizerWrapper) -> None:
    """Stand in for a user's ``__del__``: a wrapper owns nothing."""


def wrap(options: OptimizerOptions) -> OptimizerWrapper:
    """Return the optimizer of some options, wrapped; also an instance of its own class."""
    kind = users_class(options.optimizer)
    # A method of the user's class found on the wrapper would set attributes there, not where the
    # user's optimizer looks for them.
    own: dict[str, Any] = {
        name: _Inner(kind, name)
        for name in dir(kind)
        if not name.startswith("__") and not hasattr(OptimizerWrapper, name)
    }
    # hvd.broadcast_optimizer_state compares the module, and then calls the base class's step.
    own |= {"__module__": HOROVODS_MODULE, "step": OptimizerWrapper.reduce_and_step}
    if hasattr(kind, "__del__"):  # it would free what is the user's optimizer's, which does so too
        own["__del__"] = _free_nothing
    bases = (OptimizerWrapper, kind)
    made = types.new_class(kind.__name__, bases, exec_body=lambda names: names.update(own))
    return cast("type[OptimizerWrapper]", made)(options)
