"""The smallest elastic run: it counts steps, keeps a model, survives lost and joining hosts.

testbed run --min-np 2 --np 4 --max-np 4 python tests/testbed/examples/elastic.py STEPS [MARK]

MARK is a file that appears once the job has saved its state for the first time.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

torch.set_num_threads(1)
hvd.init()
NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
MARK = Path(sys.argv[2]) if len(sys.argv) > 2 else None


def say(*words: object) -> None:
    clock = time.strftime("%H:%M:%S")
    print(clock, socket.gethostname(), f"r{hvd.rank()}/{hvd.size()}", *words, flush=True)


model = torch.nn.Linear(1000, 100)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)


@hvd.elastic.run  # type: ignore[untyped-decorator]  # Horovod has no annotations
def train(state: Any) -> None:
    say("begins at step", state.step)
    while state.step < NUM_STEPS:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 1000)).square().mean()
        loss.backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.2)
        if state.step % 5 == 0:
            say("step", state.step, f"loss {loss.item():.4f}")
            state.commit()
            if MARK is not None:
                MARK.touch()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
state.register_reset_callbacks([lambda: say("reset")])
train(state)
say("done", state.step)
