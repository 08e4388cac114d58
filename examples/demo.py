"""Four unequal ranks, one of them sending garbage: {mean, trimmed mean} x {equal, fitted sizes}.

    horovodrun -np 4 --gloo python examples/demo.py
    torchrun --nproc-per-node 4 examples/demo.py    # without Horovod

Rank 2 does every forward and backward pass three times. Rank 3 sends its gradients sign-flipped
and ten times as long. The training itself is in `examples/demo_engine.py`. Writes to `runs/demo`:
`summary.json`, `steps.png`, and every rank's final weights. Runs under `mpirun` and alone too
(where there is nobody slow or faulty).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import demo_engine as engine
import torch
from demo_report import Progress, Warnings, plot, print_table
from digits_task import Digits, accuracy

import loft_hvd as loft

GLOBAL_BATCH_SIZE = 256
SLOW_RANK, SLOWDOWN = 2, 3
FAULTY_RANK = 3
FAULT = loft.attacks.SignFlip(scale=10)
NUM_TIMED = 20  # steps at equal sizes that the fitted sizes come from, after as many to warm up


@dataclass(frozen=True)
class Row:
    """One training run.

    Attributes:
        rule: "mean" or "trimmed_mean".
        sizes: "equal" or "fitted".
        local_batch_sizes: samples of each rank in a step.
        test_accuracy: share of the test images named rightly by rank 0's model.
        step_s: median seconds a step.
        wall_s: seconds of training, all epochs together.
        identical: whether all ranks ended with the same bits.
    """

    rule: str
    sizes: str
    local_batch_sizes: list[int]
    test_accuracy: float
    step_s: float
    wall_s: float
    identical: bool


def slowdown() -> int:
    """Return how many times this rank does its work."""
    return SLOWDOWN if engine.rank() == SLOW_RANK else 1


def fit_sizes(data: Digits) -> list[int]:
    """Time some steps at equal sizes and return the sizes that take every rank the same time."""
    balancer = loft.Balancer(GLOBAL_BATCH_SIZE, policy="report", interval=NUM_TIMED)
    steps_per_epoch = -(-len(data.train) // GLOBAL_BATCH_SIZE)
    epochs = -(-2 * NUM_TIMED // steps_per_epoch)
    progress = Progress("timing at equal sizes", epochs * steps_per_epoch)
    training = engine.Training(data, rule=loft.Mean(), balancer=balancer, slowdown=slowdown())
    for epoch in range(epochs):
        training.run_epoch(epoch, progress.advance)
    if engine.rank() == 0:
        print(balancer.explain(), flush=True)
    return list(balancer.suggest_sizes())


def is_identical(model: torch.nn.Module) -> bool:
    """Say whether every rank holds the same bits."""
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    everyone = engine.gather(weights.view(torch.int32))  # [world_size, numel]
    return bool((everyone == everyone[0]).all())


class Run:
    """One of the four training runs, with its times.

    Args:
        data: training and test images.
        rule: how gradients are aggregated.
        sizes: "equal" or "fitted".
        policy: what the balancer is told.
    """

    def __init__(self, data: Digits, rule: loft.Rule, sizes: str, policy: str | list[int]) -> None:
        self.label = f"{rule.name}, {sizes}"
        self.step_s: list[float] = []
        self._wall_s = 0.0
        self._data, self._rule, self._sizes = data, rule, sizes
        self._balancer = loft.Balancer(GLOBAL_BATCH_SIZE, policy=policy)
        self._training = engine.Training(
            data, rule=rule, balancer=self._balancer, slowdown=slowdown()
        )
        if engine.world_size() > FAULTY_RANK:
            loft.attacks.attach(self._training.optimizer, FAULT, ranks=[FAULTY_RANK])

    def run_epoch(self, epoch: int, progress: Progress) -> None:
        """Train for an epoch and keep its times."""
        began = time.monotonic()
        ends = [began]

        def on_step() -> None:
            ends.append(time.monotonic())
            progress.advance()

        self._training.run_epoch(epoch, on_step)
        self._wall_s += time.monotonic() - began
        self.step_s += [end - start for start, end in itertools.pairwise(ends)]

    def finish(self, out: Path) -> Row:
        """Save this rank's weights and return the result."""
        model = self._training.model
        file = f"{self._rule.name}-{self._sizes}-rank{engine.rank()}.pt"
        torch.save(model.state_dict(), out / file)
        return Row(
            rule=self._rule.name,
            sizes=self._sizes,
            local_batch_sizes=list(self._balancer.plan.sizes),
            test_accuracy=accuracy(model, self._data.test),
            step_s=statistics.median(self.step_s),
            wall_s=self._wall_s,
            identical=is_identical(model),
        )


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    out: Path
    epochs: int


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each of the four runs")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Run all four, print a table, write summary and plot."""
    options = parse_options()
    engine.start()
    torch.set_num_threads(1)  # four ranks share this machine's cores
    warnings = Warnings()
    logging.getLogger("loft_hvd").addHandler(warnings)
    options.out.mkdir(parents=True, exist_ok=True)
    data = Digits.load()
    with warnings.of_run("timing at equal sizes"):
        fitted = fit_sizes(data)
    steps_per_epoch = -(-len(data.train) // GLOBAL_BATCH_SIZE)
    runs: list[Run] = []
    for rule in (loft.Mean(), loft.TrimmedMean(f=1)):
        pair = [Run(data, rule, "equal", "uniform"), Run(data, rule, "fitted", fitted)]
        progress = Progress(f"{rule.name}, both sizes", 2 * options.epochs * steps_per_epoch)
        for epoch in range(options.epochs):
            for one in pair:  # in turn, so that other work on the machine slows both alike
                with warnings.of_run(f"{one.label} sizes"):
                    one.run_epoch(epoch, progress)
        runs += pair
    rows = [one.finish(options.out) for one in runs]
    step_s = {one.label: one.step_s for one in runs}
    if engine.rank() == 0:
        summary = [asdict(row) for row in rows]
        (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        plot(step_s, summary, options.out / "steps.png")
        print_table(summary, options.out)
    engine.end()


if __name__ == "__main__":
    main()
