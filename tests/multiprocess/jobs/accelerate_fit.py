"""Accelerate with the hook, under torchrun: ``accelerate_fit.py FOLDER``."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.transport.local import LocalWorld
from tests.support.training import make_data, make_model, max_difference

SIZES = [5, 1, 2]
# Of 50 the last batch has 2: other sizes than the plan's, and one of 3 ranks has none.
DATA = make_data(50)
NUM_EPOCHS = 3


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: loft.DataLoader,
    accelerator: Accelerator | None = None,
    *,
    epochs: range,
    num_passes: int = 1,
) -> None:
    """Train with Accelerate, or by a plain loop that steps as it does."""
    number = 0
    for epoch in epochs:
        loader.set_epoch(epoch)
        for x, y in loader:
            number += 1
            if accelerator is None:
                (torch.nn.functional.mse_loss(model(x), y) / num_passes).backward()
                if number % num_passes == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def alone(num_passes: int, data: TensorDataset = DATA) -> torch.nn.Module:
    model = make_model()
    balancer = loft.Balancer(sum(SIZES), transport=LocalWorld(1).transport(0))
    loader = loft.DataLoader(data, balancer, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, loader, epochs=range(NUM_EPOCHS), num_passes=num_passes)
    return model


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for num_passes in (1, 2):
        # The second half goes on from a saved state, with a new model.
        for epochs in (range(1), range(1, NUM_EPOCHS)) if num_passes == 1 else (range(NUM_EPOCHS),):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_passes)
            inner = make_model()
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
            model, optimizer = accelerator.prepare(inner, optimizer)
            balancer = loft.Balancer(sum(SIZES), policy=SIZES)
            loader = loft.DataLoader(DATA, balancer, seed=3)
            model.register_comm_hook(None, loft.ddp_hook(loft.Mean(), balancer))
            accelerator.register_for_checkpointing(balancer, loader)
            if epochs.start:
                accelerator.load_state(folder)
            train(model, optimizer, loader, accelerator, epochs=epochs, num_passes=num_passes)
            if epochs.stop < NUM_EPOCHS:
                accelerator.save_state(folder)
        apart = max_difference(inner, alone(num_passes))
        assert apart <= 1e-5, f"{num_passes} passes: {apart:g}"
    print(f"rank {accelerator.process_index} has finished", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
