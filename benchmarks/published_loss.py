"""The published claim on training loss, in equal time: what more steps and robust rules bring.

    python -m benchmarks.published_loss --json benchmarks/results/published-loss.json
    python -m benchmarks.published_loss --cases orin/vgg16/cifar10/serial --seeds 2

LOFT's abstract (IEEE TCC 12(2):370-387, 2024, doi 10.1109/TCC.2024.3351716) says: up to 67 % lower
training loss than LB-BSP, and that its rule is "fault-tolerant under Byzantine gradients brought by
a small batch size". Models, data, times and faults are not public. Here a real small model, an MLP
on scikit-learn's digits, is trained as long as a case of ``published_claim.py`` lets it: step times
and sizes of both policies are simulated, LB-BSP takes ``--steps`` steps, and LOFT as many as fit
into that time, the exchange of gradients counted. The loss is the cross-entropy over all training
images. So the digits stand for another data set, whose loss falls at another rate.

*Small batch only.* All workers are right. The global batch is the same under both policies, and so
are its samples; the plan says only who computes which. Ranks count by their samples, as in this
library, or, to show what small batches do by themselves, all alike.

*Faulty worker.* One of the eight sends wrong gradients throughout, another one with each seed. It
knows its own gradient; under "ALIE" all others'. LB-BSP averages by samples. LOFT does so too, or
has a rule that expects one wrong worker.

What is assumed: the sizes are those that a policy has in force at the end of its simulation, and a
rule takes no time. Data are shuffled, so a rank's samples are a random part of the batch. Workers
send averages of their gradients over time (``worker_momentum=0.9``), which under the mean is
momentum in SGD. Rules see whole rows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import loft_hvd as loft
from benchmarks.published_claim import (
    CLUSTERS,
    CONTESTANTS,
    DATASETS,
    GLOBAL_BATCH,
    LOADERS,
    MODELS,
    Case,
    read_names,
    simulate_case,
)
from loft_hvd.attacks import ALIE, Attack, Gaussian, LabelFlip, SignFlip, Zero
from loft_hvd.bench.attacked import LEARNING_RATES, load_digits
from loft_hvd.bench.attacked import MODELS as NETWORKS
from loft_hvd.bench.record import write_record
from loft_hvd.data.draws import epoch_order
from loft_hvd.pipeline.weights import capped_weights

__all__ = ["FAULTS", "Timed", "Training", "equal_time", "lower", "timed_plans", "train"]

PUBLISHED = 67  # per cent, "up to", against LB-BSP
_RIVAL, _OURS = "LB-BSP", "LOFT"
_MEAN, _TRIMMED, _ROBUST = loft.Mean(), loft.TrimmedMean(1), loft.Robust(1)


@dataclass(frozen=True)
class Fault:
    """What a faulty worker does: it sends what ``attack`` makes, or learns wrong labels.

    Attributes:
        attack: makes its row of those that it knows.
        knows_all: it knows the rows of all others, else only its own.
        flips_labels: it computes right gradients of wrong labels.
    """

    attack: Attack | None = None
    knows_all: bool = False
    flips_labels: bool = False


NONE = "none"
FAULTS = {
    NONE: Fault(),
    "zeros": Fault(Zero()),
    "label flip": Fault(flips_labels=True),
    "noise 0.1": Fault(Gaussian(sigma=0.1)),
    "sign flip": Fault(SignFlip()),
    "sign flip x10": Fault(SignFlip(scale=10.0)),
    "ALIE z=1": Fault(ALIE(z=1.0), knows_all=True),
}
_NUM_CLASSES = 10
_MOMENTUM = 0.9  # and rates: as in `loft-hvd bench robustness`
_GUESSING = math.log(_NUM_CLASSES)  # the loss of saying that all digits are equally likely


@dataclass(frozen=True)
class Training:
    """How one run trains.

    Attributes:
        sizes: samples of each rank in a step, [world_size].
        rule: how rows are aggregated.
        fault: one of ``FAULTS``.
        counts_alike: every rank weighs the same, whatever its batch.
    """

    sizes: tuple[int, ...]
    rule: loft.Rule = _MEAN
    fault: str = NONE
    counts_alike: bool = False

    @property
    def weights(self) -> tuple[int, ...] | None:
        """What rows weigh, [world_size], as in training; None for all alike."""
        if self.counts_alike:
            return None
        return self.sizes if isinstance(self.rule, loft.Mean) else capped_weights(self.sizes)


def _global_batches(num_samples: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield the samples of one step after the other, [batch], in the sampler's order."""
    epoch = 0
    while True:
        order = torch.from_numpy(epoch_order(num_samples, seed=seed, epoch=epoch).astype(np.int64))
        yield from order[: num_samples // batch * batch].split(batch)
        epoch += 1


def train(training: Training, *, seed: int, looks: Sequence[int], network: str) -> list[float]:
    """Train on the digits and return the training loss after each number of steps.

    Args:
        training: sizes, rule and fault.
        seed: of samples, first weights and which rank is faulty.
        looks: numbers of steps, ascending, >= 1.
        network: one of the networks of ``bench/attacked.py``.

    Returns:
        The cross-entropy over all training images, one a look; infinite where it is not finite.
    """
    data, sizes = load_digits(), training.sizes
    images, labels = data.images, data.labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NETWORKS[network]()
    parameters = list(model.parameters())
    numels = [parameter.numel() for parameter in parameters]
    fault, faulty = FAULTS[training.fault], seed % len(sizes)
    flip = LabelFlip(_NUM_CLASSES)
    rate = LEARNING_RATES[network]
    sums, weight = torch.zeros(len(sizes), sum(numels)), 0.0  # worker momentum, a row a worker
    losses = []
    batches = _global_batches(len(labels), sum(sizes), seed)
    for step, batch in zip(range(1, looks[-1] + 1), batches, strict=False):
        sums.mul_(_MOMENTUM)
        weight = _MOMENTUM * weight + 1.0
        for rank, samples in enumerate(batch.split(list(sizes))):
            is_flipped = fault.flips_labels and rank == faulty
            wanted = flip(labels[samples]) if is_flipped else labels[samples]
            loss = F.cross_entropy(model(images[samples]), wanted)
            gradients = torch.autograd.grad(loss, parameters)
            sums[rank] += torch.cat([gradient.flatten() for gradient in gradients])
        rows = sums / weight  # [world_size, numel]
        if fault.attack is not None:
            others = torch.cat([rows[:faulty], rows[faulty + 1 :]])
            known = others if fault.knows_all else rows[faulty : faulty + 1]
            rows[faulty] = fault.attack(known, num_rows=1)[0]
        update: Tensor = loft.aggregate(rows, training.rule, weights=training.weights)
        with torch.no_grad():
            for parameter, part in zip(parameters, update.split(numels), strict=True):
                parameter.sub_(part.view_as(parameter), alpha=rate)
            if step in looks:
                found = float(F.cross_entropy(model(images), labels))
                losses.append(found if math.isfinite(found) else math.inf)
    return losses


@dataclass(frozen=True)
class Timed:
    """What a policy gives to the training."""

    sizes: tuple[int, ...]
    step_s: float  # without the exchange
    exchange_s: float


def timed_plans(case: Case, *, steps: int) -> dict[str, Timed]:
    """Simulate LB-BSP and LOFT and return the sizes and times that each ends with."""
    contestants = [each for each in CONTESTANTS if each.name in (_RIVAL, _OURS)]
    runs = simulate_case(case, steps=steps, contestants=contestants)
    return {
        name: Timed(run.decisions[-1].sizes, run.settled_s, case.exchange_s)
        for name, run in runs.items()
    }


def equal_time(steps: int, rival: Timed, ours: Timed, *, counts_exchange: bool = True) -> int:
    """Return how many of our steps fit into the time of ``steps`` of the rival's."""
    rival_s, ours_s = rival.step_s, ours.step_s
    if counts_exchange:
        rival_s, ours_s = rival_s + rival.exchange_s, ours_s + ours.exchange_s
    return int(steps * rival_s / ours_s)


def lower(ours: Sequence[float], rival: Sequence[float]) -> list[float]:
    """Return how much lower each of our losses is than the rival's with the same seed, per cent.

    Where the rival's is infinite, ours is 100 % lower, or 0 if it is infinite as well.
    """
    found = []
    for our_loss, rival_loss in zip(ours, rival, strict=True):
        if math.isinf(rival_loss):
            found.append(0.0 if math.isinf(our_loss) else 100.0)
        else:
            found.append(100.0 * (1.0 - our_loss / rival_loss))
    return found


def _range(numbers: Sequence[float], digits: int) -> str:
    """Write numbers as a median and a range."""
    three = (statistics.median(numbers), min(numbers), max(numbers))
    middle, low, high = (f"{round(number, digits) + 0.0:.{digits}f}" for number in three)  # no -0.0
    return f"{middle} ({low} to {high})"


@dataclass(frozen=True)
class Bench:
    """What is run, of one case."""

    plans: Mapping[str, Timed]
    steps: int  # of LB-BSP
    seeds: int
    network: str

    @property
    def our_steps(self) -> int:
        """Steps of LOFT in the time of LB-BSP's, the exchange counted."""
        return equal_time(self.steps, self.plans[_RIVAL], self.plans[_OURS])

    def train(self, training: Training, *looks: int) -> list[list[float]]:
        """Return the losses of all seeds at each number of steps, [looks, seeds], as given."""
        ascending = sorted(set(looks))
        by_seed = [
            train(training, seed=seed, looks=ascending, network=self.network)
            for seed in range(self.seeds)
        ]
        return [[losses[ascending.index(look)] for losses in by_seed] for look in looks]


def small_batch(bench: Bench) -> dict[str, tuple[int, list[float]]]:
    """Train with all workers right; return steps and the losses of all seeds by way of training."""
    rival, ours = bench.plans[_RIVAL], bench.plans[_OURS]
    steps, more = bench.steps, bench.our_steps
    most = equal_time(steps, rival, ours, counts_exchange=False)
    sizes = ours.sizes
    (found,) = bench.train(Training(rival.sizes), steps)
    rows = {f"{_RIVAL}, mean": (steps, found)}
    same, longer, longest = bench.train(Training(sizes), steps, more, most)
    rows[f"{_OURS}, mean, as many steps"] = (steps, same)
    rows[f"{_OURS}, mean, equal time"] = (more, longer)
    rows[f"{_OURS}, mean, equal time without the exchange"] = (most, longest)
    for name, training in (
        ("mean, ranks count alike", Training(sizes, counts_alike=True)),
        ("TrimmedMean(1)", Training(sizes, _TRIMMED)),
        ("TrimmedMean(1), ranks count alike", Training(sizes, _TRIMMED, counts_alike=True)),
        ("Robust(1)", Training(sizes, _ROBUST)),
    ):
        (found,) = bench.train(training, more)
        rows[f"{_OURS}, {name}, equal time"] = (more, found)
    return rows


def faulty_worker(bench: Bench, fault: str) -> dict[str, tuple[int, list[float]]]:
    """Train with one worker wrong; return steps and the losses of all seeds by way of training."""
    rival, ours = bench.plans[_RIVAL], bench.plans[_OURS]
    (found,) = bench.train(Training(rival.sizes, fault=fault), bench.steps)
    rows = {f"{_RIVAL}, mean": (bench.steps, found)}
    rules = {"mean": _MEAN, "TrimmedMean(1)": _TRIMMED, "Robust(1)": _ROBUST}
    for name, rule in rules.items():
        (found,) = bench.train(Training(ours.sizes, rule, fault), bench.our_steps)
        rows[f"{_OURS}, {name}, equal time"] = (bench.our_steps, found)
    return rows


def _report(title: str, rows: Mapping[str, tuple[int, list[float]]]) -> dict[str, object]:
    """Print a table, LB-BSP first, and return it for the record."""
    write = sys.stdout.write
    head = f"{title:52}{'steps':>7}   {'loss: median (range)':26}  lower than {_RIVAL}, per cent"
    write(f"\n{head}\n")
    rival = next(iter(rows.values()))[1]
    record: dict[str, object] = {}
    for name, (steps, losses) in rows.items():
        gains, learns = lower(losses, rival), statistics.median(losses) < _GUESSING
        told_loss = _range(losses, 3) if learns else "learns nothing"
        told_gain = _range(gains, 1) if learns and losses is not rival else ""
        write(f"{name:52}{steps:7}   {told_loss:26}  {told_gain}\n")
        record[name] = {
            "steps": steps,
            "loss": [None if math.isinf(loss) else loss for loss in losses],
            "lower_percent": round(statistics.median(gains), 1) if learns else None,
        }
    sys.stdout.flush()
    return record


def _read_case(text: str) -> Case:
    parts = text.split("/")
    known: list[Collection[str]] = [CLUSTERS, MODELS, DATASETS, LOADERS]
    if len(parts) != 4 or any(part not in names for part, names in zip(parts, known, strict=True)):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be cluster/model/dataset/loader, of "
            + "; ".join(", ".join(names) for names in known)
        )
    cluster, model, dataset, loader = parts
    return Case(model, dataset, loader, cluster)


def main() -> None:
    """Simulate the times, train, print the losses and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--cases",
        type=lambda text: [_read_case(part) for part in text.split(",")],
        default="xavier/shufflenet_v2_x1_0/imagenet/serial,orin/shufflenet_v2_x1_0/imagenet/serial",
        help="cluster/model/dataset/loader, which step times and sizes come from",
    )
    faults = [name for name in FAULTS if name != NONE]
    parser.add_argument("--faults", type=lambda text: read_names(text, faults), default=faults)
    parser.add_argument("--steps", type=int, default=200, help=f"of {_RIVAL}")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--network", choices=tuple(NETWORKS), default="mlp")
    parser.add_argument("--simulated-steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, object] = {
        "what": "real training in simulated time; docs/simulate.md says of what",
        "published_percent": PUBLISHED,
        "network": options.network,
        "global_batch": GLOBAL_BATCH,
        "seeds": options.seeds,
    }
    for case in options.cases:
        plans = timed_plans(case, steps=options.simulated_steps)
        bench = Bench(plans, options.steps, options.seeds, options.network)
        name = f"{case.cluster}/{case.model}/{case.dataset}/{case.loader}"
        sys.stdout.write(f"\nStep times and sizes of {name}, a simulation.\n")
        for policy, plan in plans.items():
            sizes = " ".join(map(str, plan.sizes))
            whole_s = plan.step_s + plan.exchange_s
            sys.stdout.write(f"{policy}: {whole_s:.3f} s a step, {plan.exchange_s:.3f} of it ")
            sys.stdout.write(f"the exchange; sizes {sizes}\n")
        tables = {"small batch only": _report("small batch only", small_batch(bench))}
        for fault in options.faults:
            title = f"faulty worker: {fault}"
            tables[title] = _report(title, faulty_worker(bench, fault))
        record[name] = {
            "plans": {
                policy: {
                    "sizes": list(plan.sizes),
                    "step_s": plan.step_s,
                    "exchange_s": plan.exchange_s,
                }
                for policy, plan in plans.items()
            },
            **tables,
        }
    sys.stdout.write(f"\npublished: LOFT, lower than LB-BSP, up to {PUBLISHED} per cent\n")
    if options.json:
        # Of a module that is run, sys.argv[0] is a path of this machine.
        command = ["python", "-m", "benchmarks.published_loss", *sys.argv[1:]]
        write_record(options.json, record, command=command)


if __name__ == "__main__":
    main()
