"""A small training job for tests that end it in a hurry: ``train.py WHAT RANK``.

At step 5 rank RANK is killed ("kill"), stops answering ("freeze"), raises in its backward pass
("raise"), or leaves without a word ("leave").
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import horovod.torch as hvd
import torch

import loft_hvd as loft
from tests.support.training import make_data, make_model

FAULT_STEP = 5


class RaiseInBackward(torch.autograd.Function):
    """The identity, whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"rank {hvd.rank()} raises in its backward pass")


def main(what: str, faulty_rank: int) -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = make_model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        rule=loft.Median(),
    )
    x, y = make_data(16).tensors
    for step in range(20):
        is_faulty = step == FAULT_STEP and hvd.rank() == faulty_rank
        if is_faulty and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_faulty and what == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_faulty and what == "leave":
            sys.exit(3)
        hidden = model(x)
        if is_faulty and what == "raise":
            hidden = RaiseInBackward.apply(hidden)  # type: ignore[no-untyped-call]  # by torch
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(hidden, y).backward()
        optimizer.step()
    print(f"rank {hvd.rank()} has finished", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
