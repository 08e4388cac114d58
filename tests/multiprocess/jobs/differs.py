"""A job in which one rank starts otherwise than the others: ``differs.py RANK WHAT ..``.

Of several WHATs the next one follows where every rank has raised for the one before, and the last
one ends the job. WHAT is "parameters", "state" (of the optimizer), "rule", "seed" (of the loader),
"batch" (the global one), "sizes" (the ranks' shares of it), "shape" or "dtype" (of the parameters);
"attached" is "parameters" with Horovod's own optimizer.
"""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.errors import MismatchError
from tests.support.training import make_data, make_model


def train(what: str, *, is_other: bool) -> None:
    """Train as one of several ranks, and otherwise where ``is_other``."""
    model = make_model()
    assert isinstance(model, torch.nn.Sequential)  # whose parts are put in by number
    if is_other and what == "shape":
        model[0] = torch.nn.Linear(6, 17)
        model[2] = torch.nn.Linear(17, 2)
    if is_other and what == "dtype":
        model[2].double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if is_other and what in ("parameters", "attached"):
        with torch.no_grad():
            model.get_parameter("2.bias")[1] += 1e-6
    if what == "state":
        for parameter in model.parameters():
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        if is_other:
            sgd.state[model.get_parameter("0.weight")]["momentum_buffer"][3, 2] = 1e-9
    sizes = [16, 16, 16] if not (is_other and what == "sizes") else [20, 16, 12]
    balancer = loft.Balancer(
        48 if not (is_other and what == "batch") else 60, sizes if what != "batch" else "uniform"
    )
    optimizer: torch.optim.Optimizer
    if what == "attached":
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        loft.attach(optimizer, balancer)
    else:
        optimizer = loft.DistributedOptimizer(
            sgd,
            model.named_parameters(),
            rule=loft.Median() if not (is_other and what == "rule") else loft.TrimmedMean(f=1),
            balancer=balancer,
        )
    loader = loft.DataLoader(make_data(480), balancer, seed=int(is_other and what == "seed"))
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.to(torch.float32)), y).backward()
        optimizer.step()


def main(other_rank: int, *whats: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    is_other = hvd.rank() == other_rank
    torch.optim.SGD([torch.zeros(1)])  # imports half of torch: not what is timed here
    for what in whats[:-1]:
        try:
            train(what, is_other=is_other)
        except MismatchError as error:
            print(f"{what}: MismatchError: {error}", flush=True)
    hvd.barrier()
    if is_other:
        print(f"differs at {time.time()}", flush=True)
    train(whats[-1], is_other=is_other)
    print(f"rank {hvd.rank()} has finished", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
