"""``accelerator_link``: unequal batches and a rule in a loop of Accelerate's, with DDP or FSDP2.

::

    accelerator = Accelerator()
    link = loft.accelerator_link(accelerator, [2, 2, 2, 15])
    model, optimizer, loader = link.prepare(model, optimizer, loader)

``link.prepare`` stands for ``accelerator.prepare``, which it calls for all but the loader that is
trained on: that one is made anew, by plan. Loops stay as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, SequentialSampler

from loft_hvd.aggregation.rules import Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.codec import decode, encode
from loft_hvd.data.loader import DataLoader
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.optimizer.ddp import DDPHook, ddp_hook
from loft_hvd.optimizer.fsdp import FSDPHook, fsdp_hook
from loft_hvd.optimizer.options import check_each_step_has_a_batch
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine

__all__ = ["AcceleratorLink", "PreparedLoader", "accelerator_link"]


def accelerator_link(
    accelerator: Any,
    sizes: Sequence[int] | Balancer | None = None,
    rule: Rule | None = None,
    *,
    seed: int | None = None,
    scope: Scope | None = None,
    diagnostics: bool | Suspicion | None = None,
    quarantine: bool | Quarantine = False,
    worker_momentum: float | None = None,
    timeout_s: float | None = None,
) -> AcceleratorLink:
    """Return what prepares model and training batches of an ``Accelerator`` by plan, and a rule.

    It serves accelerate 1.0 and newer where it wraps models in ``DistributedDataParallel``, or
    shards them by FSDP2 (``FullyShardedDataParallelPlugin(fsdp_version=2)``). Call it on every
    rank. ``accumulate``, ``backward``, clipping, mixed precision, ``save_state`` and
    ``load_state`` are Accelerate's own; a state holds what the balancer has learnt and where the
    loader stands, and goes on with any number of ranks.

    Args:
        accelerator: ``Accelerator()``.
        sizes: samples of each rank in a backward pass, [world_size]; or a balancer with more to
            say. None for sizes that follow the ranks' speed, with the loader's batch size times
            the number of ranks in all.
        rule: how gradients are aggregated, ``Mean()`` by default.
        seed: of the order of samples, equal on all ranks; None for the accelerator's ``data_seed``,
            or 0.
        scope: by which values rows are judged, as in ``ddp_hook`` or ``fsdp_hook``, as are all that
            follow.
        diagnostics: watch which worker is off.
        quarantine: leave a worker out that stands out for long.
        worker_momentum: let ranks send averages of their gradients over time.
        timeout_s: longest wait in seconds.

    Returns:
        A link, with ``prepare`` and a ``report()``.

    Raises:
        ArgumentTypeError: ``accelerator`` is no ``Accelerator``.
        PlanError: there is not one size a rank.
    """
    if not hasattr(accelerator, "prepare") or not hasattr(accelerator, "gradient_state"):
        raise ArgumentTypeError(
            f"accelerator_link: accelerator is a {type(accelerator).__name__}; give an "
            "accelerate.Accelerator"
        )
    balancer = sizes if isinstance(sizes, Balancer) else None
    if balancer is None and sizes is not None:
        balancer = Balancer(sum(sizes), list(sizes))  # type: ignore[arg-type]  # no balancer
    if balancer is not None:
        check_each_step_has_a_batch(balancer, what="accelerator_link")
    options = {
        "scope": scope,
        "diagnostics": diagnostics,
        "quarantine": quarantine,
        "worker_momentum": worker_momentum,
        "timeout_s": timeout_s,
    }
    if seed is None:
        seed = getattr(accelerator.dataloader_config, "data_seed", None) or 0
    return AcceleratorLink(accelerator, balancer, rule, options=options, seed=seed)


@dataclass(frozen=True)
class _LinkState:
    balancer: Any  # as the balancer itself reads it
    loader: Any


class AcceleratorLink:
    """What ``accelerator_link`` returns."""

    def __init__(
        self,
        accelerator: Any,
        balancer: Balancer | None,
        rule: Rule | None,
        *,
        options: dict[str, Any],  # of the hook
        seed: int,
    ) -> None:
        self._accelerator = accelerator
        self._balancer = balancer
        self._rule, self._options = rule, options
        self._seed = seed
        self._hook: DDPHook | FSDPHook | None = None
        self._loader: PreparedLoader | None = None

    @property
    def balancer(self) -> Balancer:
        """The balancer: ``print(link.balancer.explain())`` says who is slow.

        Raises:
            UsageError: without sizes it is made with the loader, which was not prepared yet.
        """
        if self._balancer is None:
            raise UsageError(
                "accelerator_link: without sizes the global batch is that of the loader, and none "
                "was prepared so far; call link.prepare(model, optimizer, loader) first"
            )
        return self._balancer

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        if self._hook is None:
            return SuspicionReport(0, (), note="nobody is watched: no ranks have trained so far")
        return self._hook.report()

    def prepare(self, *objects: Any) -> Any:
        """Prepare what is trained, as ``accelerator.prepare`` does, and in its order.

        Args:
            objects: one model, one torch ``DataLoader`` of training batches, optimizers,
                schedulers. Loaders for evaluation go to ``accelerator.prepare``.

        Returns:
            What was given, prepared: a tuple, or one thing where one was given.

        Raises:
            ArgumentError: there are several loaders, or one that chooses samples in a way that a
                plan cannot take over.
            UsageError: the model is neither wrapped in ``DistributedDataParallel`` nor sharded by
                FSDP2.
        """
        loaders = [each for each in objects if isinstance(each, TorchDataLoader)]
        if len(loaders) > 1 or (loaders and self._loader is not None):
            raise ArgumentError(
                "link.prepare: a plan is for one loader, the one that is trained on; give "
                "loaders for evaluation to accelerator.prepare"
            )
        others = [each for each in objects if not isinstance(each, TorchDataLoader)]
        made = self._prepare_others(others)
        if loaders:  # behind the model, whose memory first sizes are not to count as free
            self._loader = self._prepare_loader(loaders[0])
        if self._accelerator.num_processes > 1:
            for given, model in zip(others, made, strict=True):
                if isinstance(given, torch.nn.Module):
                    self._hook_up(model)
        prepared = iter(made)
        done = tuple(
            self._loader if isinstance(each, TorchDataLoader) else next(prepared)
            for each in objects
        )
        return done[0] if len(done) == 1 else done

    def _prepare_others(self, others: list[Any]) -> list[Any]:
        if not others:
            return []
        done = self._accelerator.prepare(*others)
        return [done] if len(others) == 1 else list(done)

    def _hook_up(self, model: Any) -> None:
        if self._hook is not None:
            raise ArgumentError("link.prepare: a link is for one model; make another for each")
        options = dict(self._options)
        options["scaler"] = getattr(self._accelerator, "scaler", None)  # of mixed_precision="fp16"
        if getattr(self._accelerator, "is_fsdp2", False):
            options["scope"] = options["scope"] or "shard"
            self._hook = fsdp_hook(model, self._rule, self.balancer, **options)
        elif isinstance(model, DistributedDataParallel):
            names = list(model.module.named_parameters())
            hook = ddp_hook(self._rule, self.balancer, named_parameters=names, **options)
            model.register_comm_hook(None, hook)
            self._hook = hook
        else:
            raise UsageError(
                f"link.prepare: Accelerate has made a {type(model).__name__} of the model, and a "
                "rule needs the rows that DistributedDataParallel and FSDP2 have; leave FSDP1, "
                "DeepSpeed and tensor parallelism away, or give "
                "FullyShardedDataParallelPlugin(fsdp_version=2)"
            )

    def _prepare_loader(self, given: TorchDataLoader[Any]) -> PreparedLoader:
        sampler = given.sampler
        # By class: one that is derived may draw otherwise.
        is_plain = type(sampler) in (RandomSampler, SequentialSampler)
        if given.batch_size is None or not is_plain:
            raise ArgumentError(
                f"link.prepare: batches are chosen by a {type(given.batch_sampler).__name__} over "
                f"a {type(sampler).__name__}, and so they are by the plan; give a DataLoader with "
                "batch_size= and shuffle=, or make a loft.DataLoader of your own "
                "(docs/migrate.md)"
            )
        if self._balancer is None:
            is_split = getattr(self._accelerator, "split_batches", False)
            num_ranks = 1 if is_split else int(self._accelerator.num_processes)
            self._balancer = Balancer(int(given.batch_size) * num_ranks)
        planned = DataLoader(
            given.dataset,
            self._balancer,
            shuffle=isinstance(sampler, RandomSampler),
            seed=self._seed,
            drop_last=given.drop_last,
            num_workers=given.num_workers,
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory,
            prefetch_factor=given.prefetch_factor,
            persistent_workers=given.persistent_workers,
            worker_init_fn=given.worker_init_fn,
            timeout=given.timeout,
            multiprocessing_context=given.multiprocessing_context,
        )
        self._accelerator.register_for_checkpointing(self)
        return PreparedLoader(self._accelerator, planned)

    # What Accelerate's checkpoints hold.

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, and the balancer's state."""
        assert self._loader is not None  # it is registered with a loader
        return encode(_LinkState(self.balancer.state_dict(), self._loader.state_dict()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was written, with any number of ranks.

        Raises:
            ArgumentError: it is no state of a link; nothing has changed.
        """
        assert self._loader is not None
        saved = decode(_LinkState, state, what="AcceleratorLink")
        self.balancer.load_state_dict(saved.balancer)
        self._loader.load_state_dict(saved.loader)


class PreparedLoader:
    """A ``loft.DataLoader`` as Accelerate's loops know loaders; ``link.prepare`` returns it.

    Batches are on the accelerator's device. Each iteration is the next epoch, unless ``set_epoch``
    says which, and Accelerate learns which batch is its last.

    Attributes:
        planned: the loader itself: ``planned.is_padding``, ``planned.local_batch_size``.
        end_of_dataloader: whether the batch that was yielded last is the last of its epoch.
    """

    end_of_dataloader = False
    remainder = -1  # of a padded last batch, which gather_for_metrics cuts off; here none is

    def __init__(self, accelerator: Any, planned: DataLoader) -> None:
        self.planned = planned
        self.dataset = planned.dataset
        self.gradient_state = accelerator.gradient_state
        self._accelerator = accelerator
        self._epoch = 0
        self._to_device = importlib.import_module("accelerate.utils").send_to_device

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it on every rank."""
        self._epoch = epoch
        self.planned.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands; the state of its link has it too."""
        return self.planned.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, with any number of ranks."""
        self.planned.load_state_dict(state)
        self._epoch = int(state["epoch"])

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[Any]:
        self.planned.set_epoch(self._epoch)
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            for batch in self.planned:
                self.end_of_dataloader = self.planned.num_left == 0
                if self._accelerator.device_placement:
                    batch = self._to_device(batch, self._accelerator.device)
                yield batch
            self._epoch += 1
        finally:
            self.gradient_state._remove_dataloader(self)
