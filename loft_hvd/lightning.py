"""``lightning_callback``: unequal batches and a rule in a script of Lightning's, with DDP.

::

    callback = loft.lightning_callback(lambda: loft.Balancer(256), loft.TrimmedMean(f=1))
    loader = callback.loader(lambda balancer: loft.DataLoader(dataset, balancer, num_workers=2))
    trainer = Trainer(strategy="ddp", devices=4, callbacks=[callback])
    trainer.fit(model, loader)
    print(callback.report())

Ranks meet only when a fit begins: Lightning starts the process group then, and with
``strategy="ddp"`` the other processes as well. So the callback is given functions, which make
balancer and loader once ranks are there.

It takes the place of no part of Lightning's: Lightning wraps the model, steps, and writes
checkpoints. The hook that the callback registers reduces the gradients; batches come from a loader
that Lightning leaves as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch.nn.parallel import DistributedDataParallel

from loft_hvd.aggregation.rules import Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.codec import decode, encode
from loft_hvd.data.loader import DataLoader
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.optimizer.ddp import DDPHook, ddp_hook
from loft_hvd.pipeline.momentum import LossScaler
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine
from loft_hvd.report.export import ScalarFeed

__all__ = ["LightningLoader", "LoftCallback", "lightning_callback"]

_STATE_KEY = "loft_hvd"  # of the callback's state in a checkpoint
MadeT = TypeVar("MadeT", bound=DataLoader)


@dataclass(frozen=True)
class _CallbackState:
    balancer: Any  # as the balancer itself reads it


class MakeHook(Protocol):
    """Makes the hook of a model, once its process group is there."""

    def __call__(self, balancer: Balancer, *, names: Any, scaler: LossScaler | None) -> DDPHook: ...


def lightning_callback(
    make_balancer: Callable[[], Balancer],
    rule: Rule | None = None,
    *,
    scope: Scope | None = None,
    diagnostics: bool | Suspicion | None = None,
    quarantine: bool | Quarantine = False,
    worker_momentum: float | None = None,
    timeout_s: float | None = None,
) -> LoftCallback:
    """Return a callback for Lightning's ``Trainer``: batches by plan, a rule, a report.

    It serves ``lightning`` and ``pytorch_lightning``, 2.2 and newer, with a strategy that wraps
    the model in ``DistributedDataParallel``. Give training batches to the trainer by its
    ``loader``. Accumulated batches are weighed each by its own size, checkpoints hold what the
    balancer has learnt and where the loader stands, and the trainer's loggers get the numbers of
    the run log, which is written beside their files.

    Args:
        make_balancer: makes the balancer, on every rank alike, when ranks are there.
        rule: how gradients are aggregated, ``Mean()`` by default.
        scope: by which values rows are judged, as in ``ddp_hook``, as are all that follow.
        diagnostics: watch which worker is off.
        quarantine: leave a worker out that stands out for long.
        worker_momentum: let ranks send averages of their gradients over time; the loss scale of
            ``precision="16-mixed"`` is taken out of them.
        timeout_s: longest wait in seconds.

    Returns:
        A callback, one for each ``Trainer``.

    Raises:
        UsageError: Lightning is not installed.
    """

    def make_hook(balancer: Balancer, *, names: Any, scaler: LossScaler | None) -> DDPHook:
        return ddp_hook(
            rule,
            balancer,
            named_parameters=names,
            scope=scope,
            diagnostics=diagnostics,
            quarantine=quarantine,
            worker_momentum=worker_momentum,
            timeout_s=timeout_s,
            scaler=scaler,
        )

    kind = type("LoftCallback", (LoftCallback, *_callback_classes()), {})
    callback: LoftCallback = kind(make_balancer, make_hook)
    return callback


def _callback_classes() -> list[type]:
    """Return Lightning's own class of callbacks, or both where a process has both packages."""
    # They hold the same code, and each asks whether a callback is of its own class. What the
    # script has imported counts; importing both where it has none would take twice as long.
    importers = {
        "lightning": lambda: importlib.import_module("lightning.pytorch"),
        "pytorch_lightning": lambda: importlib.import_module("pytorch_lightning"),
    }
    imported = [name for name in importers if sys.modules.get(name) is not None]
    found: list[type] = []
    for name in imported or importers:
        try:
            found.append(importers[name]().Callback)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in importers:
                raise
        if found and not imported:
            break
    if not found:
        raise UsageError(
            "lightning_callback: Lightning is not installed; pip install 'loft-hvd[lightning]', "
            "or pip install lightning"
        )
    return found


class LoftCallback:
    """What ``lightning_callback`` returns, together with Lightning's own class of callbacks.

    Its hooks are called by the trainer, on every rank alike.
    """

    def __init__(self, make_balancer: Callable[[], Balancer], make_hook: MakeHook) -> None:
        self._make_balancer = make_balancer
        self._make_hook = make_hook
        self._balancer: Balancer | None = None
        self._hook: DDPHook | None = None
        self._feed: ScalarFeed | None = None
        self._fed: Path | None = None  # the log that it reads
        self._trainer: Any = None  # since it has started

    @property
    def balancer(self) -> Balancer:
        """The balancer, made when the trainer starts.

        Raises:
            UsageError: it has not started yet.
        """
        if self._balancer is None:
            raise UsageError(
                "lightning_callback: ranks meet when the trainer starts, and it has not started "
                "yet, or lacks this callback: Trainer(callbacks=[callback]); ask in setup() of "
                "the LightningModule or later"
            )
        return self._balancer

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        if self._hook is None:
            return SuspicionReport(0, (), note="nobody is watched: no ranks have trained so far")
        return self._hook.report()

    @property
    def epoch(self) -> int:
        """The epoch that the trainer is in, as it tells its samplers."""
        # Not current_epoch, which lags behind after some resumes.
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    def loader(self, make: Callable[[Balancer], DataLoader]) -> LightningLoader:
        """Return a loader for ``trainer.fit``, or for ``train_dataloader`` of a module.

        Args:
            make: makes the ``loft.DataLoader`` with the balancer that it gets; with
                ``train=False`` one for ``trainer.validate`` and the like.
        """
        return LightningLoader(self, make)

    # What Lightning calls.

    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints."""
        return _STATE_KEY

    def state_dict(self) -> dict[str, Any]:
        """Return the balancer's state; the loader's is among those that Lightning saves."""
        return encode(_CallbackState(self.balancer.state_dict()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written, with any number of ranks.

        Raises:
            ArgumentError: it is no state of a callback; nothing has changed.
        """
        saved = decode(_CallbackState, state, what="LoftCallback")
        self.balancer.load_state_dict(saved.balancer)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the balancer: the process group is there, data and model are not asked for yet."""
        self._trainer = trainer
        if self._balancer is None:
            self._balancer = self._make_balancer()
        if self._balancer.min_batch == 0:
            raise ArgumentError(
                "lightning_callback: with Balancer(min_batch=0) a loader yields None to ranks that "
                "are left out, and Lightning takes no step then; give min_batch=1 or more"
            )
        if self._balancer.world_size != trainer.world_size:
            raise UsageError(
                f"lightning_callback: the balancer plans for {self._balancer.world_size} ranks, "
                f"and the trainer runs on {trainer.world_size}; start it with as many devices, and "
                'Trainer(strategy="ddp")'
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook with the model that the strategy has wrapped by now."""
        folder = trainer.log_dir  # asked on every rank: it is exchanged
        if trainer.loggers and folder is not None:
            self.balancer.log_to(Path(folder))
        log = self.balancer.log.path
        if log != self._fed:  # another fit goes on with the log, and its numbers have been told
            self._fed = log
            writer = _Loggers(lambda: self._trainer.loggers)
            self._feed = None if log is None else ScalarFeed(log, writer)
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            names = list(model.module.named_parameters())
            scaler = getattr(trainer.precision_plugin, "scaler", None)  # of "16-mixed"
            self._hook = self._make_hook(self.balancer, names=names, scaler=scaler)
            model.register_comm_hook(None, self._hook)
        elif trainer.world_size > 1:
            raise UsageError(
                f"lightning_callback: {type(trainer.strategy).__name__} does not wrap the model in "
                "DistributedDataParallel, where each rank has a whole gradient for the rule; use "
                'Trainer(strategy="ddp")'
            )
        elif self.balancer.log.refusal:  # where there are more ranks the hook says it on all
            raise ArgumentError(self.balancer.log.refusal)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse batches of which the plan knows nothing."""
        given = trainer.train_dataloader
        if not isinstance(given, LightningLoader) or given.callback is not self:
            raise ArgumentTypeError(
                f"lightning_callback: training batches come from a {type(given).__name__}, and "
                "gradients would be weighed by sizes that its batches do not have; give the "
                "trainer callback.loader(lambda balancer: loft.DataLoader(dataset, balancer))"
            )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Hand over what the run log has got, as seldom as Lightning itself logs."""
        if self._feed is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            self._feed.update()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave the step that goes on out of all times: it evaluates as well."""
        self.balancer.leave_step_out()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the epoch for the balancer: Lightning counts, and does not ask for the end."""
        self.balancer.end_epoch()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Hand over the rest of the run log."""
        if self._feed is not None:
            self._feed.update()


class _Loggers:
    """A trainer's loggers, those of the newest fit, as what ``ScalarFeed`` writes to."""

    def __init__(self, newest: Callable[[], list[Any]]) -> None:
        self._newest = newest

    def log(self, values: dict[str, float], *, step: int) -> None:
        for logger in self._newest():
            logger.log_metrics(values, step=step)


class LightningLoader:
    """A ``loft.DataLoader`` that is made when ranks are there; ``LoftCallback.loader`` returns it.

    Lightning makes an iterator before it knows which epoch it trains, above all on a resume. So an
    iteration begins with its first batch, and asks then. A position that was loaded holds in its
    own epoch; at the end of one Lightning has gone on to the next.
    """

    def __init__(self, callback: LoftCallback, make: Callable[[Balancer], DataLoader]) -> None:
        self.callback = callback
        self._make = make
        self._made: DataLoader | None = None

    @property
    def planned(self) -> DataLoader:
        """The loader itself: ``planned.is_padding``, ``planned.local_batch_size``."""
        if self._made is None:
            made = self._make(self.callback.balancer)
            if not isinstance(made, DataLoader):
                raise ArgumentTypeError(
                    f"callback.loader: a {type(made).__name__} was made; it takes a "
                    "loft.DataLoader, whose length is known: of others Lightning fetches a batch "
                    "ahead of the one that it trains on"
                )
            self._made = made
        return self._made

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[Any]:
        self.planned.set_epoch(self.callback.epoch)
        yield from self.planned

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands; Lightning saves it."""
        return self.planned.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken; Lightning calls it."""
        self.planned.load_state_dict(state)
