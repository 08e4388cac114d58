"""An elastic training job: ``elastic.py FOLDER WHAT[:POLICY]``.

At step 8 the rank on host 127.0.0.1 is killed ("kill"), frozen ("freeze") or raises ("raise"),
once, or reduces something of its own ("astray"); with "mismatch" it has another model. With "join"
ranks train until three are there; with "join-sets" until four are, and only ranks 0 and 1 reduce
gradients; with "join-averaged" and "raise-averaged" ranks send averages over time, which each keeps
by itself as well.
At the end ranks compare the states of their loaders and balancers. FOLDER takes the times of the
fault and of the first step that the newest world has committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft

NUM_SAMPLES = 192
EPOCHS = 3
FAULT_STEP = 8
MOMENTUM = 0.9


def fail_once(folder: Path, what: str, state: Any) -> None:
    """Fail at the fault step, on one host, and only there and then."""
    mark = folder / "fault"
    is_it = os.environ.get("HOROVOD_HOSTNAME") == "127.0.0.1" and state.step == FAULT_STEP
    if not is_it or mark.exists():
        return
    mark.write_text(f"{time.time()} {hvd.rank()}")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "astray":
        loft.allreduce(torch.zeros(3), name="astray")
    if what == "raise":
        raise RuntimeError(f"rank {hvd.rank()} raises")


class Averages:
    """What this process's averages hold, written out, while the world may change around it.

    Make it before the optimizer, whose own hooks then find the gradients as they come.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._own: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._held: dict[int, tuple[torch.Tensor, float]] = {}  # before each step

    def _arrived(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._own[parameter] = parameter.grad.double().flatten()

    def check(self, count: int, step: int) -> None:
        """Let a step of ``count`` samples in; compare what the ranks of now have reduced by it."""
        row = torch.cat([self._own[p] for p in self._parameters])
        # Of a step that is tried again what was held before it the first time.
        sums, weight = self._held.get(step, (torch.zeros_like(row), 0.0))
        sums, weight = MOMENTUM * sums + count * row, MOMENTUM * weight + count
        self._held[step + 1] = sums, weight
        mine = torch.cat([sums, torch.tensor([weight], dtype=torch.float64)])
        total = hvd.allgather(mine.view(1, -1), name="written-out").sum(dim=0)
        got = torch.cat([p.grad.flatten() for p in self._parameters])  # type: ignore[union-attr]
        torch.testing.assert_close(got.double(), total[:-1] / total[-1], rtol=1e-4, atol=1e-6)


def main(folder: Path, what: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    is_odd = what == "mismatch" and os.environ.get("HOROVOD_HOSTNAME") == "127.0.0.1"
    model = torch.nn.Linear(4 if is_odd else 3, 2)
    what, _, policy = what.partition(":")
    is_joined = what.startswith("join")
    wanted = 4 if what == "join-sets" else 3
    balancer = loft.Balancer(12, policy=policy or "uniform", interval=3)
    x = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(NUM_SAMPLES)
    loader = loft.DataLoader(TensorDataset(x, numbers), balancer, seed=5)
    sets = [hvd.add_process_set([0, 1])] if what == "join-sets" else []
    averages = Averages(model) if what.endswith("-averaged") else None
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if averages else MOMENTUM),
        model.named_parameters(),
        rule=loft.Mean() if averages else loft.Median(),
        balancer=None if sets else balancer,
        process_set=sets[0] if sets else None,
        worker_momentum=MOMENTUM if averages else 0.0,
    )
    state = loft.elastic.State(
        model,
        optimizer,
        balancer=balancer,
        loader=loader,
        process_sets=sets,
        epoch=0,
        step=0,
        trained=[],
    )

    @hvd.elastic.run  # type: ignore[untyped-decorator]  # Horovod has no types
    def train(state: Any) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} goes on at step {state.step}", flush=True)
        first = state.step
        while state.epoch < EPOCHS or (is_joined and hvd.size() < wanted and state.epoch < 500):
            loader.set_epoch(state.epoch)
            for inputs, which in loader:
                if not is_joined:
                    fail_once(folder, what.removesuffix("-averaged"), state)
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                if averages is not None:
                    averages.check(loader.local_batch_size, state.step)
                if sets and optimizer.rank < 0:
                    assert hvd.rank() >= 2
                rows = hvd.allgather_object(which[: loader.local_batch_size].tolist())
                state.trained.append([number for row in rows for number in row])
                state.step += 1
                state.commit()
                if hvd.rank() == 0 and state.step == first + 1:
                    (folder / "recovered").write_text(str(time.time()))
                if is_joined and hvd.size() < wanted:
                    time.sleep(0.05)  # leave the launcher time to find the host
            assert sorted(n for step in state.trained for n in step) == list(range(NUM_SAMPLES))
            state.trained = []
            state.epoch += 1

    train(state)
    if sets and hvd.rank() >= 2:  # it has stepped on its own gradients
        model.load_state_dict(hvd.broadcast_object(None, root_rank=0, name="model"))
    elif sets:
        hvd.broadcast_object(model.state_dict(), root_rank=0, name="model")
    states = [loader.state_dict(), {**balancer.state_dict(), "controller": None}]
    digests = hvd.allgather_object(hashlib.sha256(json.dumps(states).encode()).hexdigest())
    assert len(set(digests)) == 1, "loaders or balancers differ"
    if balancer.rank == 0:
        print(f"plans {[plan.sizes for plan in balancer.history]} of {balancer.policy}", flush=True)
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = hvd.allgather(values.view(1, -1), name="final")
    assert all(torch.equal(row, rows[0]) for row in rows), "ranks end with different weights"
    print(f"rank {hvd.rank()} of {hvd.size()} has finished at step {state.step}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
