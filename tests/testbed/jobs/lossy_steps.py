"""1,000 steps whose rows travel by datagrams over links that lose packets."""

from __future__ import annotations

import resource
from pathlib import Path

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.transport.lanes import datagram_ports

NUM_STEPS, WIDTH = 1000, 192
WARM_STEPS = 200  # by then all buffers are there


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # one start for all ranks
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        rule=loft.Median(),
        gather=loft.LossTolerant(),
    )
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(hvd.rank()))
    warm_bytes = 0
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step == WARM_STEPS:
            warm_bytes = resident_bytes()
        if step % 100 == 0:
            values = torch.cat([each.detach().flatten() for each in model.parameters()])
            bits = hvd.broadcast(values, 0, name="bits").view(torch.int32)
            assert torch.equal(bits, values.view(torch.int32)), f"step {step}"
    (port,) = datagram_ports(("horovod", hvd.size(), hvd.rank()))
    lost = sum(each.packets_lost for each in port.links())
    filled = sum(each.blocks_filled for each in port.links())
    more = (resident_bytes() - warm_bytes) / 1e6
    print(f"rank {hvd.rank()} has finished; {lost} lost, {filled} filled, {more:.1f} MB more")


if __name__ == "__main__":
    main()
