"""Accelerate with unequal batches and a robust rule, started by accelerate or torchrun.

    accelerate launch --cpu --num_processes 4 examples/accelerate_ddp.py --batch-sizes 16,16,8,4
    torchrun --nproc-per-node 4 examples/accelerate_ddp.py --faulty 3 --save-to runs/accelerate

What loft_hvd changes in a script of Accelerate's is marked ``# loft``. ``prepare`` takes model and
optimizer; the loader stays outside of it, because it shares batches out itself.
"""

from __future__ import annotations

import argparse

import sklearn.datasets
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import TensorDataset

import loft_hvd as loft


def parse_sizes(text: str) -> list[int]:
    """Turn "16,16,8,4" into numbers."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Train with the sizes given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=parse_sizes, default=[16, 16, 8, 4])
    parser.add_argument("--faulty", type=int, default=-1, help="a rank that computes from garbage")
    parser.add_argument("--passes", type=int, default=1, help="backward passes of a step")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-to", help="folder of the last epoch's state")
    parser.add_argument("--resume-from", help="such a folder")
    options = parser.parse_args()
    sizes: list[int] = options.batch_sizes
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.passes)
    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(1)
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    net = torch.nn.Sequential(*layers)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(net, sgd)
    balancer = loft.Balancer(sum(sizes), policy=sizes)  # loft: after Accelerator()
    loader = loft.DataLoader(dataset, balancer, drop_last=True, seed=3)  # loft: not prepared
    rule = loft.TrimmedMean(f=1) if len(sizes) > 2 else loft.Mean()  # loft
    hook = loft.ddp_hook(rule, balancer, quarantine=len(sizes) > 2)  # loft
    model.register_comm_hook(None, hook)  # loft: prepare has wrapped it in DDP
    accelerator.register_for_checkpointing(balancer, loader)  # loft
    first_epoch = 0
    if options.resume_from:
        accelerator.load_state(options.resume_from)
        first_epoch = loader.state_dict()["epoch"] + 1  # loft
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        shown = loft.Metric("loss", loader=loader)  # loft: over samples, not over ranks
        for batch in loader:
            x, y = (each.to(accelerator.device) for each in batch)  # loft: as it is not prepared
            if accelerator.process_index == options.faulty:
                x = -100 * x
            with accelerator.accumulate(model):  # each pass is weighed by its own batch
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.process_index != options.faulty:
                shown.update(loss.detach(), len(y))
        mean = shown.avg  # on every rank: reading it is a collective
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
    if options.save_to:
        accelerator.save_state(options.save_to)
    accelerator.print(hook.report())  # loft
    accelerator.end_training()


if __name__ == "__main__":
    main()
