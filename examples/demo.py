"""Four unequal ranks, one of them sending garbage: {mean, trimmed mean} x {equal, fitted sizes}.

    horovodrun -np 4 --gloo python examples/demo.py

Rank 2 does every forward and backward pass three times. Rank 3 sends its gradients sign-flipped
and ten times as long. The training itself is `examples/digits.py`. Writes to `runs/demo`:
`summary.json`, `steps.png`, and every rank's final weights. Runs under `mpirun` and alone too
(where there is nobody slow or faulty).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import digits
import horovod.torch as hvd
import torch
from demo_report import Progress, plot, print_table

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
        wall_s: seconds of the whole run.
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
    return SLOWDOWN if hvd.rank() == SLOW_RANK else 1


def fit_sizes(data: digits.Digits) -> list[int]:
    """Time some steps at equal sizes and return the sizes that take every rank the same time."""
    balancer = loft.Balancer(GLOBAL_BATCH_SIZE, policy="report", interval=NUM_TIMED)
    steps_per_epoch = -(-len(data.train) // GLOBAL_BATCH_SIZE)
    epochs = -(-2 * NUM_TIMED // steps_per_epoch)
    progress = Progress("timing at equal sizes", epochs * steps_per_epoch)
    digits.train(
        data,
        rule=loft.Mean(),
        balancer=balancer,
        epochs=epochs,
        slowdown=slowdown(),
        on_step=progress.advance,
    )
    if hvd.rank() == 0:
        print(balancer.explain(), flush=True)
    return list(balancer.suggest_sizes())


def is_identical(model: torch.nn.Module) -> bool:
    """Say whether every rank holds the same bits."""
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    everyone = hvd.allgather(weights.view(torch.int32).unsqueeze(0))  # [world_size, numel]
    return bool((everyone == everyone[0]).all())


def run(
    data: digits.Digits, rule: loft.Rule, sizes: str, policy: str | list[int], options: Options
) -> tuple[Row, list[float]]:
    """Train once with one rule and one choice of sizes; return the result and all step times."""
    balancer = loft.Balancer(GLOBAL_BATCH_SIZE, policy=policy)
    num_steps = options.epochs * -(-len(data.train) // GLOBAL_BATCH_SIZE)
    progress = Progress(f"{rule.name}, {sizes} sizes", num_steps)
    ends: list[float] = []

    def on_step() -> None:
        ends.append(time.monotonic())
        progress.advance()

    hvd.barrier()
    began = time.monotonic()
    model = digits.train(
        data,
        rule=rule,
        balancer=balancer,
        epochs=options.epochs,
        slowdown=slowdown(),
        attack=FAULT if hvd.size() > FAULTY_RANK else None,
        attackers=(FAULTY_RANK,),
        on_step=on_step,
    )
    wall_s = time.monotonic() - began
    step_s = [end - start for start, end in itertools.pairwise(ends)]
    torch.save(model.state_dict(), options.out / f"{rule.name}-{sizes}-rank{hvd.rank()}.pt")
    row = Row(
        rule=rule.name,
        sizes=sizes,
        local_batch_sizes=list(balancer.plan.sizes),
        test_accuracy=digits.accuracy(model, data.test),
        step_s=statistics.median(step_s),
        wall_s=wall_s,
        identical=is_identical(model),
    )
    return row, step_s


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    out: Path
    epochs: int


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of each of the four runs")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Run all four, print a table, write summary and plot."""
    options = parse_options()
    hvd.init()
    torch.set_num_threads(1)  # four ranks share this machine's cores
    options.out.mkdir(parents=True, exist_ok=True)
    data = digits.Digits.load()
    fitted = fit_sizes(data)
    rows, step_s = [], {}
    for rule in (loft.Mean(), loft.TrimmedMean(f=1)):
        for sizes, policy in (("equal", "uniform"), ("fitted", fitted)):
            row, times = run(data, rule, sizes, policy, options)
            rows.append(row)
            step_s[f"{rule.name}, {sizes}"] = times
    if hvd.rank() == 0:
        summary = [asdict(row) for row in rows]
        (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        plot(step_s, summary, options.out / "steps.png")
        print_table(summary, options.out)


if __name__ == "__main__":
    main()
