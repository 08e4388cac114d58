"""What losses that are not sent again cost: accuracy on the digits, nobody attacking and attacked.

    python -m benchmarks.lossy --json benchmarks/results/lossy.json

The task is that of ``loft-hvd bench robustness``: an MLP of 4,810 values, trained for 400 steps by
five workers. Of each block of 1,280 bytes that travels so large a share is lost, biases' too, and
filled in from the other rows before the rule, which sees whole rows; only what a rule cannot do
without arrives. Under attack one worker sends wrong rows, and its blocks are lost as others' are.
Optimised attacks know what will be lost.

"job" is not simulated: ``DistributedOptimizer`` with ``gather=loft.LossTolerant(critical=())`` on
ranks that are threads, nobody attacking, with the same batches, first weights and learning rates.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loft_hvd as loft
from loft_hvd.aggregation.filling import Holes, fill_holes
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.bench.attacked import (
    LEARNING_RATES,
    MODELS,
    NONE,
    AttackTrial,
    Setting,
    load_digits,
    train,
)
from loft_hvd.bench.defences import Defence
from loft_hvd.bench.record import check_writable, write_record
from loft_hvd.bench.skews import draw_batches
from loft_hvd.pipeline.buckets import part_bounds
from loft_hvd.pipeline.tolerance import loss_limits
from loft_hvd.transport.datagram import BLOCK_BYTES
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks

NUM_WORKERS, SEEDS = 5, range(5)  # in which each of the five attacks once
LOSSES = (0.0, 0.01, 0.05, 0.1)
ATTACKS = ("sign flip x10", "ALIE z=1", "optimised ALIE", "IPM 0.1", "mimic")
ADVISED, TRIMMED = "robust", "trimmed_mean"
BEHIND = ", momentum in SGD"  # a worker's hole then loses a gradient, and not a step of an average
UNATTACKED = (ADVISED, TRIMMED, TRIMMED + BEHIND, "mean" + BEHIND)
JOBS = {ADVISED: loft.Robust(1), TRIMMED + BEHIND: loft.TrimmedMean(1), "mean" + BEHIND: None}
MOMENTUM = 0.9


@dataclass(frozen=True)
class LossyDefence(Defence):
    """A rule whose owners miss a share of the blocks that travel to them."""

    loss: float = 0.0

    def rule(self, f: int) -> Rule:
        """Return what fills holes, and then applies the rule to whole rows."""
        inner, faults = super().rule(f), Faults(loss=self.loss)

        def aggregate(rows: Tensor) -> Tensor:
            # The bench seeds torch anew for every step of a trial, as it is tried and as it is.
            return reduce_lossy(rows, inner, faults, exchange=str(torch.initial_seed()))

        return Custom(aggregate, f=inner.f)


def reduce_lossy(rows: Tensor, rule: Rule, faults: Faults, *, exchange: str) -> Tensor:
    """Return what shard owners make of rows [n, numel], where a rule sees whole rows."""
    num_rows, numel = rows.shape
    padded = part_bounds(numel, num_rows, itemsize=rows.itemsize, part_bytes=None)[-1]
    shards = F.pad(rows, (0, padded - numel)).view(num_rows, num_rows, -1)  # [row, owner, shard]
    block_numel = BLOCK_BYTES // rows.itemsize
    filled = []
    for own, shard in enumerate(shards.unbind(dim=1)):
        lost = faults.lost_blocks(
            exchange,
            loss_limits(rule, num_rows, None, own=own),
            ranks=range(num_rows),
            own=own,
            shard=shard.shape[1],
            block_numel=block_numel,
        )
        filled.append(shard.clone())
        if lost.any():
            fill_holes(filled[-1], Holes(lost.to(torch.uint8), block_numel), rule, own=own)
    result: Tensor = loft.aggregate(torch.cat(filled, dim=1)[:, :numel], rule.over_model)
    return result


def simulated(defence: str, attack: str, loss: float) -> list[float]:
    """Return the accuracy of each seed, in percent."""
    setting = Setting("mlp", NUM_WORKERS, f=1)
    given = LossyDefence(defence, loss=loss)
    trials = [AttackTrial(given, attack, "shuffled", seed) for seed in SEEDS]
    return [100 * each for each in train(trials, setting)]


def job(defence: str, loss: float, *, steps: int = 400) -> list[float]:
    """Return the accuracy of each seed, in percent, of jobs on a lossy local world."""
    return [_run_job(defence, loss, seed, steps) for seed in SEEDS]


def _run_job(defence: str, loss: float, seed: int, steps: int) -> float:
    data = load_digits()
    drawn = draw_batches(
        "shuffled",
        data.labels.numpy(),
        num_workers=NUM_WORKERS,
        batch=256 // NUM_WORKERS,
        steps=steps,
        seed=seed,
    )
    torch.manual_seed(seed)
    first = MODELS["mlp"]()
    is_behind = defence.endswith(BEHIND)
    lr = LEARNING_RATES["mlp"] * (1 - MOMENTUM if is_behind else 1)

    def work(end: LocalTransport) -> float:
        model = copy.deepcopy(first)
        optimizer: Any = loft.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr, momentum=MOMENTUM * is_behind),
            model.named_parameters(),
            rule=JOBS[defence],
            worker_momentum=0.0 if is_behind else MOMENTUM,
            transport=end,
            gather=loft.LossTolerant(critical=()),
        )
        looks = []
        for step, batch in enumerate(torch.from_numpy(drawn[:, end.rank])):
            optimizer.zero_grad()
            F.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
            optimizer.step()
            if (left := steps - 1 - step) < 50 and left % 5 == 0:
                looks.append(_accuracy(model, data.test_images, data.test_labels))
        return statistics.fmean(looks)

    found = run_ranks(NUM_WORKERS, work, timeout_s=600, faults=Faults(seed=seed, loss=loss))
    assert len(set(found)) == 1, found  # one model
    return found[0]


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((model(images).argmax(dim=1) == labels).float().mean())


def lines(*, has_jobs: bool) -> Iterator[dict[str, Any]]:
    """Yield what a rule, an attack and a loss leave, compared with no loss, seed by seed."""
    kinds = [("simulated", *each) for each in itertools.product(UNATTACKED, [NONE])]
    kinds += [("simulated", *each) for each in itertools.product([ADVISED, TRIMMED], ATTACKS)]
    kinds += [("job", defence, NONE) for defence in JOBS if has_jobs]
    for how, defence, attack in kinds:
        whole: list[float] = []
        for loss in LOSSES:
            found = job(defence, loss) if how == "job" else simulated(defence, attack, loss)
            whole = whole or found
            line: dict[str, Any] = {"how": how, "rule": defence, "attack": attack, "loss": loss}
            line |= {"by_seed": [round(each, 3) for each in found], **_summary(found, whole)}
            yield line


def _summary(found: Sequence[float], whole: Sequence[float]) -> dict[str, float]:
    apart = [one - other for one, other in zip(found, whole, strict=True)]
    return {
        "accuracy": round(statistics.fmean(found), 3),
        "standard_error": round(statistics.stdev(found) / len(found) ** 0.5, 3),
        "less_than_whole": round(-statistics.fmean(apart), 3),
        "standard_error_of_that": round(statistics.stdev(apart) / len(apart) ** 0.5, 3),
    }


def main() -> None:
    """Measure, print a line a cell, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", default="")
    parser.add_argument("--without-jobs", action="store_true", help="leave the real jobs out")
    given = parser.parse_args()
    check_writable(given.json or None)
    torch.set_num_threads(1)
    found = []
    for line in lines(has_jobs=not given.without_jobs):
        found.append(line)
        what = f"{line['how']}, {line['rule']}, {line['attack']}, {line['loss']:.0%} lost"
        accuracy = f"{line['accuracy']:.2f} ({line['standard_error']:.2f})"
        less = f"{line['less_than_whole']:+.2f} ({line['standard_error_of_that']:.2f})"
        print(f"{what:62} {accuracy:>14}, less than whole {less}", flush=True)  # noqa: T201 - a script that reports
    if given.json:
        about = {"workers": NUM_WORKERS, "f": 1, "seeds": len(SEEDS), "steps": 400}
        write_record(given.json, {**about, "results": found}, command=sys.argv)


if __name__ == "__main__":
    main()
