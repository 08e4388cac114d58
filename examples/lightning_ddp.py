"""Lightning with unequal batches and a robust rule, started by itself or by torchrun.

    python examples/lightning_ddp.py --batch-sizes 16,16,8,4
    torchrun --nproc-per-node 4 examples/lightning_ddp.py --faulty 3 --save-to runs/lightning.ckpt

What loft_hvd changes in a script of Lightning's is marked ``# loft``. The callback makes the
balancer once ranks are connected, so what needs it is given as a function of it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytorch_lightning as pl
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

import loft_hvd as loft


def parse_sizes(text: str) -> list[int]:
    """Turn "16,16,8,4" into numbers."""
    return [int(part) for part in text.split(",")]


class Digits(pl.LightningModule):  # type: ignore[misc]  # a class that mypy does not read
    """A small net; the rank ``faulty`` computes from garbage."""

    def __init__(self, loader: Any, faulty: int) -> None:
        super().__init__()
        layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        self.net = torch.nn.Sequential(*layers)
        self.loader, self.faulty = loader, faulty
        self.mean_loss = MeanMetric()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the batch's mean loss."""
        x, y = batch
        if self.global_rank == self.faulty:
            return F.cross_entropy(self.net(-100 * x), y)
        loss = F.cross_entropy(self.net(x), y)
        self.mean_loss.update(loss, weight=self.loader.planned.local_batch_size)  # loft: samples
        return loss

    def on_train_epoch_end(self) -> None:
        """Show the epoch's loss."""
        mean = self.mean_loss.compute()  # on every rank
        self.print(f"epoch {self.current_epoch}: loss {mean:.4f}")
        self.mean_loss.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Train with the sizes given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=parse_sizes, default=[16, 16, 8, 4])
    parser.add_argument("--faulty", type=int, default=-1, help="a rank that computes from garbage")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-to", help="file of the state at the end")
    parser.add_argument("--resume-from", help="such a file")
    options = parser.parse_args()
    sizes: list[int] = options.batch_sizes
    torch.set_num_threads(1)  # the ranks share this machine's cores
    pl.seed_everything(1, verbose=False)
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    is_robust = len(sizes) > 2
    callback = loft.lightning_callback(  # loft
        lambda: loft.Balancer(sum(sizes), policy=sizes),
        loft.TrimmedMean(f=1) if is_robust else loft.Mean(),
        quarantine=is_robust,
    )
    loader = callback.loader(  # loft
        lambda balancer: loft.DataLoader(dataset, balancer, drop_last=True, seed=3)
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=len(sizes),
        max_epochs=options.epochs,
        callbacks=[callback],  # loft
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(loader, options.faulty), loader, ckpt_path=options.resume_from)
    if options.save_to:
        trainer.save_checkpoint(options.save_to)
    report = callback.report()  # loft
    if trainer.is_global_zero:
        sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
