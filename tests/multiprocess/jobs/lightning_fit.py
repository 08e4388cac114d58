"""Lightning with the callback, under torchrun: ``lightning_fit.py WHAT FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torchmetrics import MeanMetric

import loft_hvd as loft
from loft_hvd.errors import ArgumentTypeError, UsageError
from loft_hvd.transport.local import LocalWorld
from tests.support.training import make_data, make_model, max_difference

SIZES = (5, 1, 2)
# Of 50 the last batch has 2: other sizes than the plan's, and one of 3 ranks has none.
DATA = make_data(50)
NUM_EPOCHS = 3
STEPS = 7  # of an epoch
WORLD = int(os.environ["WORLD_SIZE"])


class Module(pl.LightningModule):  # type: ignore[misc]  # a class that mypy does not read
    """A small regression; ``scale`` is what a faulty rank multiplies its loss by."""

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.model = make_model()
        self.scale = scale
        self.loader: Any = None
        self.val_loader: Any = None
        # By samples: what self.log averages itself, Lightning divides by whole samples a rank.
        self.mean_loss, self.val_loss = MeanMetric(), MeanMetric()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.mean_loss.update(loss, weight=self.loader.planned.local_batch_size)
        self.log("loss", self.mean_loss, on_step=False, on_epoch=True)
        return self.scale * loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.val_loss.update(loss, weight=self.val_loader.planned.local_batch_size)
        self.log("val_loss", self.val_loss, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Sharded(Module):
    """The same, of which each rank holds a part."""

    def configure_model(self) -> None:
        """Shard the model, as ``ModelParallelStrategy`` asks of a module."""
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def alone(*, num_passes: int = 1) -> tuple[torch.nn.Module, list[float]]:
    """Train in this process alone; returns the model and each epoch's mean loss."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    balancer = loft.Balancer(sum(SIZES), transport=LocalWorld(1).transport(0))
    loader = loft.DataLoader(DATA, balancer, seed=3)
    means = []
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        total = 0.0
        for number, (x, y) in enumerate(loader, start=1):
            loss = torch.nn.functional.mse_loss(model(x), y)
            total += loss.item() * len(x)
            (loss / num_passes).backward()
            if number % num_passes == 0 or number == len(loader):  # as Lightning steps
                optimizer.step()
                optimizer.zero_grad()
        means.append(total / len(DATA))
    return model, means


def make_callback(
    rule: loft.Rule | None = None, *, policy: Any = None, **options: Any
) -> tuple[loft.LoftCallback, Any]:
    sizes = list(SIZES[:WORLD])
    sizes[-1] += sum(SIZES) - sum(sizes)  # the global batch of any world
    callback = loft.lightning_callback(
        lambda: loft.Balancer(sum(SIZES), policy=policy or sizes), rule, **options
    )
    return callback, callback.loader(lambda balancer: loft.DataLoader(DATA, balancer, seed=3))


def fit(
    folder: Path,
    callback: loft.LoftCallback,
    loader: Any,
    *,
    scale: float = 1.0,
    kind: type[Module] = Module,
    ckpt_path: Path | None = None,
    val: Any = None,
    more: Sequence[Any] = (),
    **options: Any,
) -> tuple[Module, pl.Trainer]:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": WORLD,
        "strategy": "ddp",
        "callbacks": [callback, *more],
        "max_epochs": NUM_EPOCHS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    trainer = pl.Trainer(**settings | options)
    module = kind(scale=scale)
    module.loader, module.val_loader = loader, val
    trainer.fit(module, loader, val, ckpt_path=ckpt_path)
    return module, trainer


def check_equal(what: str, module: Module, wanted: torch.nn.Module) -> None:
    apart = max_difference(module.model, wanted)
    assert apart <= 1e-5, f"{what}: {apart:g}"


def equal(folder: Path) -> None:
    """Unequal batches, accumulated or not, with validation: as in one process."""
    for num_passes in (1, 2):
        wanted, means = alone(num_passes=num_passes)
        callback, loader = make_callback()
        val = callback.loader(lambda balancer: loft.DataLoader(DATA, balancer, train=False))
        module, trainer = fit(folder, callback, loader, val=val, accumulate_grad_batches=num_passes)
        check_equal(f"{num_passes} passes", module, wanted)
        assert abs(float(trainer.callback_metrics["loss"]) - means[-1]) <= 1e-5
        with torch.no_grad():
            whole = torch.nn.functional.mse_loss(wanted(DATA.tensors[0]), DATA.tensors[1])
        assert abs(float(trainer.callback_metrics["val_loss"]) - float(whole)) <= 1e-5


# Steps after which a checkpoint is written: in an epoch, after its last batch, and at its end.
SAVED = {"batch": (10, STEPS), "epoch": (2 * STEPS,)}


def begin(folder: Path) -> None:
    """Write checkpoints while training."""
    options: dict[str, Any] = {"dirpath": folder, "save_top_k": -1}
    savers = [
        ModelCheckpoint(filename="batch-{step}", every_n_train_steps=steps, **options)
        for steps in SAVED["batch"]
    ]
    savers.append(ModelCheckpoint(filename="epoch-{step}", every_n_epochs=1, **options))
    callback, loader = make_callback(policy="report")
    module, _ = fit(folder, callback, loader, more=savers, enable_checkpointing=True)
    check_equal("with checkpoints", module, alone()[0])


def resume(folder: Path) -> None:
    """Go on from them, with any number of ranks."""
    wanted, _ = alone()
    for kind, steps in SAVED.items():
        for num_steps in steps:
            path = folder / f"{kind}-step={num_steps}.ckpt"
            callback, loader = make_callback(policy="report")
            module, trainer = fit(folder, callback, loader, ckpt_path=path)
            assert trainer.global_step == NUM_EPOCHS * STEPS, (path, trainer.global_step)
            assert callback.balancer.next_step == NUM_EPOCHS * STEPS, callback.balancer.next_step
            check_equal(f"resumed from {path}", module, wanted)


def watched(folder: Path) -> None:
    """One rank sends garbage: it is named, and the loggers get the numbers."""
    wrong = WORLD - 1
    scale = -20.0 if int(os.environ["RANK"]) == wrong else 1.0
    callback, loader = make_callback(
        loft.TrimmedMean(f=1),
        policy="report",
        diagnostics=loft.Suspicion(every=1, interval=5, patience=5),
    )
    logger = CSVLogger(str(folder), name="log", version=0, flush_logs_every_n_steps=1)
    fit(folder, callback, loader, scale=scale, logger=logger, max_epochs=8, log_every_n_steps=5)
    named = [worker.ranks for worker in callback.report().named]
    assert named == [(wrong,)], callback.report()
    if dist.get_rank() == 0:
        text = (folder / "log/version_0/metrics.csv").read_text()
        head = text.splitlines()[0].split(",")
        for name in (f"loft/suspicion/{wrong}", "loft/rank 0/compute_s", "loft/step_s", "loss"):
            assert name in head, head
        assert list((folder / "log/version_0").glob("loft-*.jsonl"))


def refused(folder: Path) -> None:
    """Batches of another loader, another balancer's world, a model that is sharded."""
    callback, _ = make_callback()
    other = torch.utils.data.DataLoader(DATA, batch_size=2)
    with pytest.raises(ArgumentTypeError, match="come from a DataLoader"):
        fit(folder, callback, other)
    single = loft.lightning_callback(lambda: loft.Balancer(8, transport=LocalWorld(1).transport(0)))
    loader = single.loader(lambda balancer: loft.DataLoader(DATA, balancer))
    with pytest.raises(UsageError, match="plans for 1 rank"):
        fit(folder, single, loader)
    # Of the strategies that shard a model, the one that Lightning runs without GPUs.
    strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
    says = r'ModelParallelStrategy does not wrap .* use Trainer\(strategy="ddp"\)'
    callback, loader = make_callback()
    with pytest.raises(UsageError, match=says):
        fit(folder, callback, loader, kind=Sharded, strategy=strategy)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[1].split(","):
        globals()[each](Path(sys.argv[2]))
    print(json.dumps({"finished": sys.argv[1]}), flush=True)
