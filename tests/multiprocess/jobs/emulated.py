"""A job whose devices are emulated: a sample takes a fixed time, on one rank three times as long.

``python emulated.py slowdown RUNS``: each run trains under ``policy="loft"`` and slows rank 2
half-way; then fixed splits are tried, interleaved, on the slowed ranks. ``contended RUNS``: the
same with real computing, for which the ranks compete. ``equal ROUNDS``: "loft" against "uniform"
on ranks that are alike, in turn, and the share of a step that timing and planning take. ``capped
STEPS``: on such ranks with little memory, caps as limits of a rank's share, of a micro-batch, and
none, a step of each in turn. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import loft_hvd as loft

SAMPLE_S, SLOW_RANK, FACTOR = 1.5e-3, 2, 3.0
GLOBAL_BATCH, INTERVAL, CHANGE_STEP, REPLANS, MEASURED = 96, 10, 50, 5, 20
EQUAL_STEPS = 60  # of a round
CAPPED_BATCH, CAPS, CAPPED_FACTOR = 256, (96, 96, 48, 16), 4.0
PORTS = ("plan_at", "begin_batch", "take_step", "gradient_arrived", "computing_ended", "step_ended")


class Device(nn.Module):
    """A layer that takes as long as an accelerator with a fixed time a sample would."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.factor * SAMPLE_S * len(x))
        out: Tensor = self.layer(x)
        return out


class Processor(Device):
    """A layer with real work: about half a millisecond of one core for a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.work = torch.randn(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.work
        for _ in range(int(self.factor * len(x))):
            rows = rows @ self.work / 16
        out: Tensor = self.layer(x) + 0.0 * rows[0, 0]
        return out


class Run:
    """One balancer with model, optimizer and loader; ``step`` trains one batch."""

    def __init__(
        self,
        policy: str | list[int],
        device: Callable[[], Device] = Device,
        *,
        interval: int | None = INTERVAL,
        global_batch_size: int = GLOBAL_BATCH,
        caps: Sequence[int] | None = None,
        micro_batches: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = device()
        self.balancer = loft.Balancer(
            global_batch_size,
            policy,
            interval=interval,
            max_batch=caps,
            micro_batches=micro_batches,
        )
        self.largest = 0  # samples of a backward pass
        dataset = TensorDataset(torch.randn(192_000, 16), torch.randint(0, 4, (192_000,)))
        self.loader = loft.DataLoader(dataset, self.balancer, num_workers=0)
        self.optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01),
            named_parameters=self.model.named_parameters(),
            balancer=self.balancer,
        )
        self.batches = iter(self.loader)

    def slow_down(self) -> None:
        """Make one rank slow."""
        self.model.factor = FACTOR if hvd.rank() == SLOW_RANK else 1.0

    def step(self) -> float:
        """Train one batch and return the seconds it took, the optimizer's step included."""
        began = time.perf_counter()
        batch = next(self.batches)
        self.optimizer.zero_grad()
        for x, y in batch if self.balancer.splits else [batch]:
            self.largest = max(self.largest, len(x))
            nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        return time.perf_counter() - began


def adapt(device: Callable[[], Device]) -> tuple[float, list[int]]:
    """Return the median step after the change and five re-plans, and the sizes there."""
    run = Run("loft", device)
    for _ in range(CHANGE_STEP):
        run.step()
    run.slow_down()
    for _ in range(REPLANS * INTERVAL):
        run.step()
    taken = [run.step() for _ in range(MEASURED)]
    return statistics.median(taken), list(run.balancer.plan.sizes)


def splits() -> list[list[int]]:
    """Return fixed splits that give the slow rank 2 to 24 samples, and the others the rest."""
    found = []
    for slow in (2, 4, 6, 8, 9, 10, 11, 12, 14, 16, 20, 24):
        rest = GLOBAL_BATCH - slow
        sizes = [rest // 3 + (place < rest % 3) for place in range(3)]
        found.append([*sizes[:SLOW_RANK], slow, *sizes[SLOW_RANK:]])
    return found


def slowdown(num_runs: int, device: Callable[[], Device]) -> dict[str, Any]:
    """Compare what LOFT arrives at with the best of the fixed splits."""
    runs = [adapt(device) for _ in range(num_runs)]
    arrived = [sizes for _, sizes in runs]
    tried = {str(sizes): Run(sizes, device) for sizes in [*splits(), *arrived]}
    taken: dict[str, list[float]] = {name: [] for name in tried}
    for run in tried.values():
        run.slow_down()
        run.step()
    for _ in range(8):  # interleaved: a slow moment of the machine falls on all
        for name, run in tried.items():
            taken[name].append(run.step())
    fixed = {name: statistics.median(times) for name, times in taken.items()}
    best = min((str(sizes) for sizes in splits()), key=lambda name: fixed[name])
    return {
        "runs": runs,
        "best": best,
        "best_s": fixed[best],
        "equal_s": fixed[str([GLOBAL_BATCH // 4] * 4)],
        "arrived_s": [fixed[str(sizes)] for sizes in arrived],  # beside the splits, at their time
    }


class Meter:
    """Adds up what a balancer's own calls take of this rank's CPU."""

    def __init__(self, balancer: loft.Balancer) -> None:
        self.seconds = 0.0
        for name in PORTS:
            setattr(balancer, name, self._timed(getattr(balancer, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def equal(num_rounds: int) -> dict[str, Any]:
    """Compare "loft" with "uniform", both at the default interval, some steps of each in turn."""
    runs = {name: Run(name, interval=None) for name in ("uniform", "loft")}
    meter = Meter(runs["loft"].balancer)
    blocks: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(25):
            run.step()
    meter.seconds = 0.0
    for number in range(num_rounds):
        for name in sorted(runs, reverse=number % 2 == 1):
            blocks[name].append(sum(runs[name].step() for _ in range(EQUAL_STEPS)))
    ratios = [b / a for a, b in zip(blocks["uniform"], blocks["loft"], strict=True)]
    medians = {name: statistics.median(times) / EQUAL_STEPS for name, times in blocks.items()}
    return {
        "step_s": medians,
        "ratio": medians["loft"] / medians["uniform"],
        "ratios": [round(ratio, 4) for ratio in ratios],
        "own_share": meter.seconds / sum(blocks["loft"]),
        "plans": [list(plan.sizes) for plan in runs["loft"].balancer.history],
    }


def flat(model: nn.Module) -> Tensor:
    """Return a copy of all weights, [numel]."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def capped(num_steps: int) -> dict[str, Any]:
    """Compare what caps limit: a rank's share of a step, or a micro-batch."""
    given: dict[str, Any] = {"global_batch_size": CAPPED_BATCH}
    runs = {
        "share": Run("loft", caps=CAPS, **given),
        "micro": Run("loft", caps=CAPS, micro_batches=True, **given),
        "free": Run("loft", **given),
    }
    for run in runs.values():
        run.model.factor = CAPPED_FACTOR  # a step of 0.4 s, beside which waking up takes little
    start = flat(runs["free"].model)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_steps):
        for name, run in runs.items():
            taken[name].append(run.step())
    weights = {name: flat(run.model) for name, run in runs.items()}
    # Of steps that followed each other: a slow minute of the machine falls on both.
    steps = zip(taken["micro"][INTERVAL:], taken["share"][INTERVAL:], strict=True)
    ratios = [micro_s / share_s for micro_s, share_s in steps]
    largest = hvd.allgather(torch.tensor([[run.largest for run in runs.values()]]), name="largest")
    return {
        "step_s": {name: statistics.median(times[INTERVAL:]) for name, times in taken.items()},
        "ratio": statistics.median(ratios),
        "apart": {name: float((w - weights["free"]).abs().max()) for name, w in weights.items()},
        "largest": dict(zip(runs, largest.T.tolist(), strict=True)),
        "sizes": {name: list(run.balancer.plan.sizes) for name, run in runs.items()},
        "moved": float((weights["free"] - start).abs().max()),
    }


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    mode, count = sys.argv[1], int(sys.argv[2])
    if mode == "equal":
        found = equal(count)
    elif mode == "capped":
        found = capped(count)
    else:
        found = slowdown(count, Processor if mode == "contended" else Device)
    if hvd.rank() == 0:
        print("found " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
