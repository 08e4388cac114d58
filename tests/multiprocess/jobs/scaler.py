"""Trains in float16 with a growing loss scale, watched; arguments: steps, whom to attack."""

from __future__ import annotations

import logging
import sys

import horovod.torch as hvd
import torch

import loft_hvd as loft


def main(num_steps: int, attacked: int | None) -> None:
    hvd.init()
    torch.set_num_threads(1)
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        rule=loft.TrimmedMean(f=1),
        quarantine=True,
    )
    if attacked is not None:
        loft.attacks.attach(optimizer, loft.attacks.NaN(), ranks=[attacked])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Grows so often that single ranks, and then all, overflow again and again.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10)
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    truth = torch.randn(32, 10, generator=torch.Generator().manual_seed(7))
    num_skipped = 0
    for _ in range(num_steps):
        x = torch.randn(16, 32, generator=generator)
        y = (x @ truth).argmax(dim=1)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        before = scaler.get_scale()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        num_skipped += scaler.get_scale() < before
    workers = optimizer.report().workers
    until = torch.tensor([worker.in_quarantine_until or 0 for worker in workers])
    everyone = hvd.allgather(until.view(1, -1), name="until")
    assert bool((everyone == until).all()), "ranks differ about who is in quarantine"
    if hvd.rank() == 0:
        named = [list(worker.ranks) for worker in optimizer.report().named]
        print(optimizer.report(), flush=True)
        held = [list(worker.ranks) for worker in workers if worker.in_quarantine_until]
        end = f"skipped {num_skipped} of {num_steps} steps, loss {loss:.3f}"
        print(f"named {named}, held {held}, {end}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
