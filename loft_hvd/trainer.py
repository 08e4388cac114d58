"""``trainer_callback``: unequal batches and a rule under the ``Trainer`` of transformers, with DDP.

::

    trainer = Trainer(model, args, train_dataset=dataset)
    callback = loft.trainer_callback(trainer, [2, 2, 2, 15])
    trainer.train()
    print(callback.report())

The trainer wraps the model, steps, logs, evaluates and writes checkpoints as always. Two of its
methods are stood in for: the one that makes its loader of training batches, and the training step,
in front of which ranks say what they count. With ``average_tokens_across_devices`` the trainer has
weighed its loss by tokens already: gradients then are not weighed again, and rules still get what
each rank has counted.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from loft_hvd.aggregation.rules import Rule
from loft_hvd.balance.balancer import Balancer
from loft_hvd.data.loader import DataLoader
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.optimizer.ddp import DDPHook, ddp_hook
from loft_hvd.optimizer.options import check_each_step_has_a_batch
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine

__all__ = ["TrainerLink", "trainer_callback"]

_STATE_KEY = "loft_hvd"  # in the trainer's own state, which checkpoints hold
_IGNORED = -100  # a label that no loss of transformers counts


def trainer_callback(
    trainer: Any,
    sizes: Sequence[int] | Balancer | None = None,
    rule: Rule | None = None,
    *,
    is_scaled: bool | None = None,
    scope: Scope | None = None,
    diagnostics: bool | Suspicion | None = None,
    quarantine: bool | Quarantine = False,
    worker_momentum: float | None = None,
    timeout_s: float | None = None,
) -> TrainerLink:
    """Let a ``transformers.Trainer`` train with batches by plan, and a rule; call it on every rank.

    It serves transformers 4.57 and newer, under torchrun or ``accelerate launch``, where the
    trainer wraps the model in ``DistributedDataParallel``. Data set, collator, columns, loader
    processes, accumulation, checkpoints and evaluation are the trainer's own. Batches are shuffled
    by ``data_seed``, or ``seed``. Gradients count every token, or what else labels are of, the
    same: as in one process that has the whole batch. The callback adds itself to the trainer.

    Args:
        trainer: before ``train()``.
        sizes: samples of each rank in a backward pass, [world_size]; or a balancer with more to
            say. None for sizes that follow the ranks' speed, of ``per_device_train_batch_size``
            times the number of ranks in all.
        rule: how gradients are aggregated, ``Mean()`` by default.
        is_scaled: of a trainer with a ``compute_loss`` of its own, whether that returns what
            ``Trainer.compute_loss`` does; if not, the mean over the batch's labels.
        scope: by which values rows are judged, as in ``ddp_hook``, as are all that follow.
        diagnostics: watch which worker is off.
        quarantine: leave a worker out that stands out for long.
        worker_momentum: let ranks send averages of their gradients over time.
        timeout_s: longest wait in seconds.

    Returns:
        What the trainer calls, with a ``report()``.

    Raises:
        ArgumentTypeError: ``trainer`` is no ``transformers.Trainer``.
        ArgumentError: ``compute_loss`` is the script's own, and ``is_scaled`` does not say what it
            returns; or the batches are chosen in a way that a plan cannot take over.
        PlanError: there is not one size a rank.
        UsageError: transformers is not installed.
    """
    library = _transformers()
    if not isinstance(trainer, library.Trainer):
        raise ArgumentTypeError(
            f"trainer_callback: trainer is a {type(trainer).__name__}; give the "
            "transformers.Trainer, once it is made"
        )
    has_own_loss = type(trainer).compute_loss is not library.Trainer.compute_loss
    if has_own_loss and is_scaled is None:
        raise ArgumentError(
            f"trainer_callback: {type(trainer).__name__} computes its own loss, and whether that "
            "is divided by all that is counted in a step is not known: give is_scaled=True where "
            "it returns what super().compute_loss returns, and False where it returns the mean "
            "over the batch's labels"
        )
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(
        trainer, "is_deepspeed_enabled", False
    ):
        raise UsageError(
            "trainer_callback: FSDP and DeepSpeed shard the model, and no rank has a whole "
            "gradient for the rule; train with DDP, the trainer's default"
        )
    if any(isinstance(each, TrainerLink) for each in trainer.callback_handler.callbacks):
        raise ArgumentError(
            "trainer_callback: this trainer has a callback of loft_hvd already, and a second one "
            "would weigh its gradients again; make another Trainer"
        )
    if trainer.args.auto_find_batch_size:
        raise ArgumentError(
            "trainer_callback: auto_find_batch_size=True lowers per_device_train_batch_size where "
            "memory is full, and batches are those of the plan; leave it away, and give "
            "loft.Balancer(total, max_batch=...) in place of the sizes"
        )
    if trainer.args.n_gpu > 1:
        raise UsageError(
            f"trainer_callback: one process with {trainer.args.n_gpu} GPUs is a single rank, whose "
            "batches torch cuts alike; start one process for each GPU: torchrun "
            "--nproc-per-node N train.py"
        )
    if isinstance(sizes, Balancer):
        balancer = sizes
    elif sizes is None:
        world_size = int(trainer.args.world_size)
        balancer = Balancer(int(trainer.args.per_device_train_batch_size) * world_size)
    else:
        balancer = Balancer(sum(sizes), list(sizes))
    check_each_step_has_a_batch(balancer, what="trainer_callback")
    if balancer.splits:
        raise ArgumentError(
            "trainer_callback: with Balancer(micro_batches=True) ranks make different numbers of "
            "backward passes, and the trainer makes gradient_accumulation_steps on each; lower the "
            "sizes and raise gradient_accumulation_steps"
        )
    make_hook = functools.partial(
        ddp_hook,
        rule,
        balancer,
        scope=scope,
        diagnostics=diagnostics,
        quarantine=quarantine,
        worker_momentum=worker_momentum,
        timeout_s=timeout_s,
    )
    kind = type("LoftTrainerCallback", (TrainerLink, library.TrainerCallback), {})
    link: TrainerLink = kind(trainer, balancer, make_hook, is_scaled=is_scaled is not False)
    _leave_ours_whole()
    trainer.add_callback(link)
    return link


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "transformers":
            raise
        raise UsageError(
            "trainer_callback: transformers is not installed; pip install transformers accelerate"
        ) from error


def _leave_ours_whole() -> None:
    """Let the trainer skip no batches of a loader of ours where it resumes: it stands there."""
    # What skips makes another loader, of torch's own class, from parts that ours has not.
    module = importlib.import_module("transformers.trainer")
    skip: Callable[..., Any] = module.skip_first_batches
    if hasattr(skip, "of_loft_hvd"):
        return

    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader if isinstance(dataloader, DataLoader) else skip(dataloader, num_batches)

    skip_first_batches.of_loft_hvd = True  # type: ignore[attr-defined]  # the mark of ours
    module.skip_first_batches = skip_first_batches  # type: ignore[attr-defined]  # not typed here


class TrainerLink:
    """What ``trainer_callback`` returns, together with transformers' own class of callbacks.

    Attributes:
        balancer: plans the batches; ``print(callback.balancer.explain())`` says who is slow.
    """

    def __init__(
        self,
        trainer: Any,
        balancer: Balancer,
        make_hook: Callable[..., DDPHook],
        *,
        is_scaled: bool,
    ) -> None:
        self.balancer = balancer
        self._trainer = trainer
        self._make_hook = make_hook
        self._is_scaled = is_scaled
        self._hook: DDPHook | None = None
        self._hooked: DistributedDataParallel | None = None
        self._loader: DataLoader | None = None
        self._make_trainers_loader = trainer.get_train_dataloader
        self._trainers_step = trainer.training_step
        trainer.get_train_dataloader = self._make_loader
        trainer.training_step = self._training_step

    def report(self) -> SuspicionReport:
        """Return what is known of every worker: who was off, and how far; print it for a table."""
        if self._hook is None:
            return SuspicionReport(0, (), note="nobody is watched: no ranks have trained so far")
        return self._hook.report()

    # What stands in for methods of the trainer's.

    def _make_loader(self) -> DataLoader:
        """Return a loader by plan, of all else that the trainer's own is made of."""
        args = self._trainer.args
        if isinstance(self._trainer.train_dataset, torch.utils.data.IterableDataset):
            raise ArgumentError(
                "trainer_callback: the training data are an IterableDataset, which cannot be "
                "asked for the samples of a plan; give a data set with __len__ and __getitem__, "
                "or use loft.StreamLoader in a loop of your own"
            )
        strategy = getattr(args, "train_sampling_strategy", "random")
        if getattr(args, "group_by_length", False):  # as it was called before
            strategy = "group_by_length"
        if strategy not in ("random", "sequential"):
            raise ArgumentError(
                f"trainer_callback: train_sampling_strategy={strategy!r} chooses which samples a "
                "rank gets, and so does the plan; use 'random' or 'sequential'"
            )
        own = self._make_trainers_loader()
        self._loader = DataLoader(
            own.dataset,
            self.balancer,
            shuffle=strategy == "random",
            seed=int(args.seed if args.data_seed is None else args.data_seed),
            drop_last=bool(args.dataloader_drop_last),
            num_workers=own.num_workers,
            collate_fn=own.collate_fn,
            pin_memory=own.pin_memory,
            prefetch_factor=own.prefetch_factor,
            persistent_workers=own.persistent_workers,
            worker_init_fn=own.worker_init_fn,
            multiprocessing_context=own.multiprocessing_context,
        )
        # The trainer takes all batches of a step before the first backward pass.
        self.balancer.expect_ahead(int(args.gradient_accumulation_steps) - 1)
        return self._loader

    def _training_step(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kw: Any) -> Any:
        """Say what a batch's loss is over, and let the trainer train on it."""
        if self._hook is not None:
            self._count(inputs, kw.get("num_items_in_batch", args[0] if args else None))
        return self._trainers_step(model, inputs, *args, **kw)

    def _count(self, inputs: Mapping[str, Any], num_items: Tensor | int | None) -> None:
        trainer = self._trainer
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs.get("labels")
            if isinstance(labels, Tensor) and getattr(trainer, "_loss_shifts_labels", False):
                labels = labels[..., 1:]  # the first of a text is never predicted
        if not isinstance(labels, Tensor):
            return  # samples count alike, as planned
        # As Trainer.compute_loss has it, so that this is whether it has divided by ``num_items``.
        is_divided = num_items is not None and (
            trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        )
        if is_divided and self._is_scaled:
            to_sum = float(num_items)  # type: ignore[arg-type]  # it is not None
            if trainer.args.average_tokens_across_devices:
                # ``num_items`` is of all ranks, and the loss was multiplied by their number.
                to_sum /= trainer.accelerator.num_processes
            self.balancer.count_scaled(int(labels.ne(_IGNORED).sum()), to_sum=to_sum)
        elif not labels.is_floating_point():
            self.balancer.count(labels.ne(_IGNORED).sum())

    # What the trainer calls.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Register the hook with the model that is wrapped by now; go on from a checkpoint."""
        model = self._trainer.model_wrapped
        self.balancer.log_to(Path(args.output_dir))
        # Alone there is nothing to weigh, and accelerate holds no pass of DDP's back.
        is_alone = self.balancer.world_size == 1
        if not is_alone and not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"trainer_callback: the trainer has wrapped the model in {type(model).__name__}, "
                "and a rule needs the whole gradients that DistributedDataParallel has; start it "
                "by torchrun, without FSDP, DeepSpeed or tensor parallelism"
            )
        if not is_alone and model is not self._hooked:
            self._hooked = model
            scaler = getattr(self._trainer.accelerator, "scaler", None)  # of fp16=True
            names = list(model.module.named_parameters())
            self._hook = self._make_hook(named_parameters=names, scaler=scaler)
            model.register_comm_hook(None, self._hook)
        if state.global_step and not args.ignore_data_skip:
            self._go_on((state.stateful_callbacks or {}).get(_STATE_KEY))

    def _go_on(self, saved: Mapping[str, Any] | None) -> None:
        if saved is None:
            raise ArgumentError(
                "trainer_callback: the checkpoint is of a run without it, whose order of samples "
                "was another: which of the epoch are trained is not known. "
                "TrainingArguments(ignore_data_skip=True) goes on with a whole epoch"
            )
        total = self.balancer.global_batch_size
        if saved.get("global_batch_size") != total:
            raise ArgumentError(
                f"trainer_callback: the checkpoint is of a run with "
                f"{saved.get('global_batch_size')} samples in a backward pass of all ranks, and "
                f"now there are {total}: the trainer finds its place by counting steps. Give "
                f"sizes that add up to {saved.get('global_batch_size')}"
            )
        assert self._loader is not None  # it is made before training begins
        self.balancer.load_state_dict(saved["balancer"])
        self._loader.load_state_dict(saved["loader"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the state into the trainer's, if that will be saved now."""
        if control.should_save:
            self._keep_state(state)

    def _keep_state(self, state: Any) -> None:
        assert self._loader is not None
        state.stateful_callbacks[_STATE_KEY] = {
            "global_batch_size": self.balancer.global_batch_size,
            "balancer": self.balancer.state_dict(),
            "loader": self._loader.state_dict(),
        }

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the epoch: the trainer counts batches, and does not ask for the end."""
        self.balancer.end_epoch()
        if control.should_save:
            self._keep_state(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the step that goes on out of all times: it evaluates as well."""
        self.balancer.leave_step_out()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the step that goes on out of all times: it writes a checkpoint as well."""
        self.balancer.leave_step_out()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget batches that were taken and will not be trained."""
        self.balancer.clear_pending()
