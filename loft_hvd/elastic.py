"""Training that survives ranks that are lost or join: the state of ``hvd.elastic.run``.

::

    state = loft.elastic.State(model, optimizer, balancer=balancer, loader=loader, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            loader.set_epoch(state.epoch)
            for x, y in loader:
                ...
                optimizer.step()
                state.commit()
            state.epoch += 1

    train(state)

After a loss or a join ranks go back to the last commit, and everything that depends on the number
of ranks is made anew: plans, buckets, the heartbeat. Horovod gives a world of new ranks its own
numbers, so the samples of the rest of the epoch are drawn for them; none is lost or doubled, but
for those since the last commit, which are trained again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from loft_hvd.errors import ArgumentError
from loft_hvd.failures.watched import close_heartbeats
from loft_hvd.pipeline.allreduce import forget_reductions
from loft_hvd.transport.base import watch_of
from loft_hvd.transport.horovod import (
    ElasticNotices,
    HorovodTransport,
    horovod_module,
    restore_process_set,
)

__all__ = ["State"]


@runtime_checkable
class _ForOneWorld(Protocol):
    """What is made for the ranks there are, such as an optimizer of ours or a balancer."""

    def begin_world(self) -> None: ...


class State:
    """What a training run is, for ``hvd.elastic.run``: committed, restored, the same everywhere.

    Make it on every rank, after ``hvd.init()``, and change the world only through it.

    Args:
        model: a ``torch.nn.Module``, or None.
        optimizer: a ``loft.DistributedOptimizer`` (or any optimizer), or None.
        balancer: the optimizer's balancer, or None.
        loader: a ``loft.DataLoader``, or None.
        process_sets: every ``hvd.ProcessSet`` in use, in one order on all ranks; each is made
            again for a new world, by rank numbers. It takes HOROVOD_DYNAMIC_PROCESS_SETS=1.
        fields: more models, optimizers or objects with ``state_dict``, and plain values such as
            ``epoch=0``; each becomes an attribute.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        balancer: Any | None = None,
        loader: Any | None = None,
        process_sets: Sequence[Any] = (),
        **fields: Any,
    ) -> None:
        if taken := sorted(name for name in fields if hasattr(type(self), name)):
            raise ArgumentError(f"elastic.State: {taken} are names of its own; choose others")
        named = {"model": model, "balancer": balancer, "optimizer": optimizer, "loader": loader}
        everything = {name: value for name, value in named.items() if value is not None} | fields
        self._hvd = horovod_module()
        self._notices = ElasticNotices()
        self._process_sets = list(process_sets)
        self._has_new_world = False
        self._callbacks: list[Callable[[], None]] = []
        self._objects: dict[str, Any] = {
            name: value
            for name, value in everything.items()
            if hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        }
        self._values = [name for name in everything if name not in self._objects]
        self._saved: dict[str, Any] = {}
        for name, value in everything.items():
            setattr(self, name, value)
        self.save()  # ranks may be lost before the first commit

    # What a script calls.

    def commit(self) -> None:
        """Keep the state as it is now, and let ranks that wait to join do so.

        Call it after ``optimizer.step()``; it costs a copy of the state and a small exchange.

        Raises:
            HostsUpdatedInterrupt: hosts have come or gone; ``hvd.elastic.run`` handles it.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on every rank when hosts have come or gone."""
        with watch_of(HorovodTransport()).waiting():
            self._notices.check(self._hvd.broadcast_object)

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these functions whenever the world has changed, before ranks agree on the state."""
        self._callbacks += callbacks

    # What hvd.elastic.run calls.

    def on_hosts_updated(self, timestamp: int, update_res: Any) -> None:
        # From a thread of Horovod's, on the rank that the launcher tells of new or lost hosts.
        self._notices.put(timestamp, update_res)

    def on_reset(self) -> None:
        """Forget what belonged to the old world; called in the new one."""
        # Connections to ranks that may be gone, and buffers cut for as many as there were.
        close_heartbeats()
        forget_reductions()
        self._notices.clear()
        self._has_new_world = True
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        # In this process's memory: copied, as a state_dict shares its tensors with the object, and
        # the next step changes them.
        states = {name: copy.deepcopy(each.state_dict()) for name, each in self._objects.items()}
        values = {name: copy.deepcopy(getattr(self, name)) for name in self._values}
        self._saved = states | values

    def restore(self) -> None:
        """Go back to the last ``commit``; averages of worker momentum do as a new world begins."""
        # hvd.elastic.run calls it while it handles the engine's error. That may come from a call of
        # the script's own: then nobody has been asked yet which rank is behind it, and the
        # heartbeat, which knows, ends with this world.
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            HorovodTransport().explain(error)
        # Copied again: what is restored is trained on, and may be restored a second time.
        for name, each in self._objects.items():
            each.load_state_dict(copy.deepcopy(self._saved[name]))
        for name in self._values:
            setattr(self, name, copy.deepcopy(self._saved[name]))

    def sync(self) -> None:
        """Make everything anew for the ranks there are, and take rank 0's state.

        The order is the same on every rank: what plans, then what reduces, then what they hold.
        """
        if self._has_new_world:  # a rank that joins has just made its sets in the script
            for process_set in self._process_sets:
                restore_process_set(self._hvd, process_set)
        self._has_new_world = False
        # First, so that a rank which is lost in the exchanges below is named.
        HorovodTransport().open_heartbeat()
        for name in self._by_kind():
            each = self._objects[name]
            if isinstance(each, _ForOneWorld):
                each.begin_world()
        # Horovod's own functions send tensors as tensors; the rest goes as one pickled object.
        plain: dict[str, Any] = {name: getattr(self, name) for name in self._values}
        for name in self._by_kind():
            each = self._objects[name]
            if isinstance(each, torch.nn.Module):
                self._hvd.broadcast_parameters(each.state_dict(), root_rank=0)
            elif isinstance(each, torch.optim.Optimizer):
                self._hvd.broadcast_optimizer_state(each, root_rank=0)
            else:
                plain[name] = each.state_dict()
        plain = self._hvd.broadcast_object(plain, root_rank=0, name="loft.elastic.state")
        for name, value in plain.items():
            if name in self._objects:
                self._objects[name].load_state_dict(value)
            else:
                setattr(self, name, value)
        self.save()

    # Called for names that are not there: the error says what to do.
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"elastic.State has no field {name!r}; give it as State(..., {name}=...)"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):  # a field of the user's
            if name in self._objects:
                self._objects[name] = value
            elif name not in self._values:
                raise AttributeError(
                    f"elastic.State does not keep {name!r}: a commit or a joining rank would lose "
                    f"it; give it as State(..., {name}=...)"
                )
        super().__setattr__(name, value)

    def _by_kind(self) -> list[str]:
        """Return the names of all objects: plans first, as optimizers ask them for their limits."""
        # False sorts before True: neither of the two, then modules, then optimizers.
        kinds = torch.optim.Optimizer, torch.nn.Module
        return sorted(
            self._objects,
            key=lambda name: (*(isinstance(self._objects[name], kind) for kind in kinds), name),
        )
