"""The published claim, simulated: twelve models, four data sets, edge clusters of eight nodes.

    python -m benchmarks.published_claim --json benchmarks/results/published-claim.json
    python -m benchmarks.published_claim --models resnet50 --datasets imagenet --steps 100

LOFT's abstract (IEEE TCC 12(2):370-387, 2024, doi 10.1109/TCC.2024.3351716) says: up to 46 % less
training time than LB-BSP, over twelve public models and four open data sets, at the edge. Which
ones, on what cluster, is not public. So this is no repetition of it: it is a simulation, on
profiles and clusters that are written down here, and its figures stand beside the published one.
The controller, the policies, the sampler and the decisions of the store are the real ones; times
follow the model in ``balance/latency.py`` with 5 % noise.

What is assumed, beside the sources named below:

* A training step costs three forward passes, and a multiply-add is two operations. Computing takes
  a time in proportion to the batch, so LB-BSP is its rule for that case, "lbbsp-cpu".
* Devices reach 30 % of their peak in single precision with every model. By the times of NVIDIA's
  torch2trt (docs/benchmarks/jetson_nano.md in its repository: PyTorch on a Nano, forward passes of
  one image in half precision) ten models reach 23 to 48 % of it, SqueezeNet and DenseNet least,
  ResNets most.
* Each node holds an eighth of the data, and reads it at 500 MB/s. The rest comes from the other
  nodes over its own link, with 0.2 ms a sample beside the bytes. One node of each kind has 1 Gb/s,
  the other 200 Mb/s.
* In a store each node keeps as many samples again as it holds, an eighth of the data. What is said
  of stores holds from the eighth epoch on.
* The exchange of gradients, 4 bytes a parameter, takes 2 (n - 1) / n of them at the slowest link,
  after the slowest rank; nothing is fetched meanwhile. It is the same whatever the sizes; savings
  are said without and with it.
* Images are enlarged or cut to the size that the model takes (224, or 299 for Inception), and
  models keep their 1,000 classes. Memory is not modelled: VGG's batches would need micro-batches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loft_hvd.bench.record import write_record
from loft_hvd.simulate.scenario import RankTraits, Scenario
from loft_hvd.simulate.simulation import PolicyRun, simulate

__all__ = [
    "CLUSTERS",
    "CONTESTANTS",
    "DATASETS",
    "GLOBAL_BATCH",
    "LOADERS",
    "MODELS",
    "Case",
    "Contestant",
    "Saved",
    "epoch_seconds",
    "read_names",
    "saved",
    "simulate_case",
]

PUBLISHED = 46  # per cent, "up to", against LB-BSP

# Parameters, and 10^9 multiply-adds of a forward pass of one image: "num_params" and "_ops" of the
# weights IMAGENET1K_V1 in torchvision/models (table: docs.pytorch.org/vision/stable/models.html).
MODELS: dict[str, tuple[int, float]] = {
    "alexnet": (61_100_840, 0.714),
    "vgg16": (138_357_544, 15.47),
    "googlenet": (6_624_904, 1.498),
    "inception_v3": (27_161_264, 5.713),
    "resnet18": (11_689_512, 1.814),
    "resnet50": (25_557_032, 4.089),
    "resnet152": (60_192_808, 11.514),
    "densenet121": (7_978_856, 2.834),
    "mobilenet_v2": (3_504_872, 0.301),
    "shufflenet_v2_x1_0": (2_278_604, 0.145),
    "squeezenet1_1": (1_235_496, 0.349),
    "efficientnet_b0": (5_288_548, 0.386),
}

# Labelled training samples, and bytes of one as it is stored.
DATASETS: dict[str, tuple[int, float]] = {
    # 1,281,167 images in ILSVRC2012_img_train.tar, 147,897,477,120 bytes (image-net.org).
    "imagenet": (1_281_167, 115.4e3),
    # 75,750 training images; all 101,000, longest side 512, in food-101.tar.gz, 4,996,278,331 bytes
    # (Bossard et al., ECCV 2014; data.vision.ee.ethz.ch/cvl/datasets_extra/food-101).
    "food101": (75_750, 49.5e3),
    # 5,000 labelled images of 96 x 96 x 3 bytes
    # (Coates et al., AISTATS 2011; cs.stanford.edu/~acoates/stl10).
    "stl10": (5_000, 27_648.0),
    # 50,000 images, 3,073 bytes each in the binary version (Krizhevsky 2009;
    # cs.toronto.edu/~kriz/cifar.html).
    "cifar10": (50_000, 3_073.0),
}

LOADERS = {"serial": 0.0, "prefetch": 1.0}  # what is hidden of the shorter of fetch and compute


@dataclass(frozen=True)
class Node:
    """A device and its link."""

    name: str
    peak_flops: float  # operations a second in single precision
    link_bytes_per_s: float


def _nodes(peaks: Mapping[str, float]) -> tuple[Node, ...]:
    """Return two nodes of each kind of device, the second one on a slower link."""
    return tuple(Node(name, peak, rate) for rate in (125e6, 25e6) for name, peak in peaks.items())


# CUDA cores times two times the highest clock, as NVIDIA's data sheets of the modules have them.
CLUSTERS = {
    # Of 2017 to 2020: Nano 128 cores at 921 MHz, TX2 256 at 1.3 GHz, Xavier NX 384 at 1.1 GHz,
    # AGX Xavier 512 at 1.377 GHz.
    "xavier": _nodes({"nano": 0.236e12, "tx2": 0.666e12, "nx": 0.845e12, "agx": 1.41e12}),
    # Of 2022 and 2023: Orin Nano 8GB 1024 cores at 625 MHz, Orin NX 16GB 1024 at 918 MHz, AGX Orin
    # 32GB 1792 at 930 MHz, AGX Orin 64GB 2048 at 1.3 GHz.
    "orin": _nodes({"nano": 1.28e12, "nx": 1.88e12, "agx-32": 3.33e12, "agx-64": 5.32e12}),
}
GLOBAL_BATCH = 256
_EFFICIENCY, _OPERATIONS = 0.3, 6.0  # of the peak; of a step for each multiply-add of the forward
# An epoch of the simulation is short: what counts is the share of the data that a node holds, and
# the copies in a store follow the sizes over some ten epochs.
_NUM_SAMPLES = 25 * GLOBAL_BATCH


@dataclass(frozen=True)
class Contestant:
    """A policy, and what it has beside it."""

    name: str
    policy: str
    sampler: str = "locality"  # samples are computed where they lie, as far as sizes allow; "blind"
    store: bool = False


CONTESTANTS = (
    Contestant("uniform", "uniform"),
    Contestant("LB-BSP", "lbbsp-cpu"),
    Contestant("LB-BSP:busy", "lbbsp-cpu:busy"),
    Contestant("LOFT", "loft"),
    # LB-BSP as published knows nothing of where samples lie.
    Contestant("LB-BSP, blind", "lbbsp-cpu", sampler="blind"),
    Contestant("LB-BSP, store", "lbbsp-cpu", store=True),
    Contestant("LOFT, store", "loft", store=True),
)
EXCHANGE = "exchange"  # stands beside the contestants' names
# Who saves how much against whom.
_PAIRS = (
    ("LOFT", "uniform"),
    ("LOFT", "LB-BSP"),
    ("LOFT", "LB-BSP:busy"),
    ("LOFT", "LB-BSP, blind"),
    ("LOFT, store", "LB-BSP"),
    ("LOFT, store", "LB-BSP, blind"),
    ("LOFT, store", "LB-BSP, store"),
    ("LOFT, store", "LOFT"),
)


@dataclass(frozen=True)
class Case:
    """One model on one data set, with one kind of loader on one cluster."""

    model: str
    dataset: str
    loader: str  # one of LOADERS
    cluster: str  # one of CLUSTERS

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The cluster, a rank a node."""
        return CLUSTERS[self.cluster]

    @property
    def exchange_s(self) -> float:
        """Seconds that exchanging gradients adds to a step."""
        num_bytes = 4.0 * MODELS[self.model][0]
        share = 2.0 * (len(self.nodes) - 1) / len(self.nodes)
        return share * num_bytes / min(node.link_bytes_per_s for node in self.nodes)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that all samples of the data set take; the last one may be a part."""
        return DATASETS[self.dataset][0] / GLOBAL_BATCH

    def scenario(self, contestants: Sequence[Contestant], *, steps: int) -> Scenario:
        """Return the case for the simulator, without the exchange.

        Args:
            contestants: with one sampler, and all with a store or all without.
            steps: to run.
        """
        operations = _OPERATIONS * 1e9 * MODELS[self.model][1]
        first = contestants[0]
        return Scenario(
            f"{self.model} on {self.dataset}",
            len(self.nodes),
            GLOBAL_BATCH,
            steps=steps,
            num_samples=_NUM_SAMPLES,
            sample_bytes=DATASETS[self.dataset][1],
            noise=0.05,
            sampler=first.sampler,
            store=first.store,
            policies=tuple(each.policy for each in contestants),
            ranks=RankTraits(
                compute_s=[operations / (_EFFICIENCY * node.peak_flops) for node in self.nodes],
                local_bytes_per_s=500e6,
                remote_bytes_per_s=[node.link_bytes_per_s for node in self.nodes],
                remote_latency_s=2e-4,
                overlap=LOADERS[self.loader],
                cache_samples=_NUM_SAMPLES / len(self.nodes) if first.store else 0.0,
            ),
        )


def simulate_case(
    case: Case, *, steps: int, contestants: Sequence[Contestant] = CONTESTANTS
) -> dict[str, PolicyRun]:
    """Return the run of each contestant by its name; all see the same samples and noise."""
    runs: dict[str, PolicyRun] = {}
    for sampler, store in dict.fromkeys((each.sampler, each.store) for each in contestants):
        alike = [each for each in contestants if (each.sampler, each.store) == (sampler, store)]
        results = simulate(case.scenario(alike, steps=steps))
        runs |= {each.name: results.run(each.policy) for each in alike}
    return runs


@dataclass(frozen=True)
class Saved:
    """What one contestant saves of another one's epoch over some cases, in per cent."""

    median: float
    largest: float
    least: float
    largest_case: str  # "model/dataset"


def saved(
    epochs: Mapping[str, Mapping[str, float]], ours: str, rival: str, *, counts_exchange: bool
) -> Saved:
    """Sum up what ``ours`` saves of an epoch of ``rival``.

    Args:
        epochs: of each case the seconds of an epoch, by contestant and for the exchange.
        ours: a contestant.
        rival: another one.
        counts_exchange: whether the exchange is a part of the epoch.
    """
    found = {}
    for name, epoch in epochs.items():
        more = epoch[EXCHANGE] if counts_exchange else 0.0
        found[name] = 100.0 * (1.0 - (epoch[ours] + more) / (epoch[rival] + more))
    largest_case = max(found, key=found.__getitem__)
    numbers = (statistics.median(found.values()), found[largest_case], min(found.values()))
    median, largest, least = (round(number, 1) + 0.0 for number in numbers)  # no -0.0
    return Saved(median, largest, least, largest_case)


def epoch_seconds(case: Case, *, steps: int) -> dict[str, float]:
    """Return the seconds of an epoch by contestant, without the exchange, and of the exchange."""
    runs = simulate_case(case, steps=steps)
    step_s = {each.name: runs[each.name].settled_s for each in CONTESTANTS}
    step_s[EXCHANGE] = case.exchange_s
    return {name: round(seconds * case.steps_per_epoch, 3) for name, seconds in step_s.items()}


def _run_cases(cases: Sequence[Case], *, steps: int) -> dict[str, dict[str, float]]:
    """Print and return the epochs of cases, by "model/dataset"."""
    columns = [*(each.name for each in CONTESTANTS), EXCHANGE]
    head = f"{cases[0].cluster}, {cases[0].loader} loader: an epoch, in s"
    sys.stdout.write(f"\n{head:40}" + "".join(f"{name:>15}" for name in columns) + "\n")
    epochs = {}
    for case in cases:
        name = f"{case.model}/{case.dataset}"
        epoch = epochs[name] = epoch_seconds(case, steps=steps)
        seconds = "".join(f"{epoch[column]:15,.1f}" for column in columns)
        sys.stdout.write(f"{name:40}{seconds}\n")
        sys.stdout.flush()
    return epochs


_ROW = "{:40}{:>9}{:>9}{:>9}   {:>9}{:>9}{:>9}   {}\n"


def _print_savings(epochs: Mapping[str, Mapping[str, float]], datasets: Sequence[str]) -> None:
    write = sys.stdout.write
    three = ("median", "largest", "least")
    write(f"\n{'':40}{'without the exchange':>27}   {'with it':>27}\n")
    write(_ROW.format("saved of an epoch, per cent", *three, *three, "largest with it"))
    rows = [(f"{ours}, against {rival}", epochs, ours, rival) for ours, rival in _PAIRS]
    for dataset in datasets:
        own = {name: epoch for name, epoch in epochs.items() if name.endswith(f"/{dataset}")}
        rows.append((f"LOFT, against LB-BSP, {dataset}", own, "LOFT", "LB-BSP"))
    for what, those, ours, rival in rows:
        both = [saved(those, ours, rival, counts_exchange=counts) for counts in (False, True)]
        numbers = [f"{n:.1f}" for found in both for n in (found.median, found.largest, found.least)]
        write(_ROW.format(what, *numbers, both[1].largest_case))
    write(f"published: LOFT, against LB-BSP, up to {PUBLISHED}\n")


def read_names(text: str, known: Collection[str]) -> list[str]:
    """Return the names in a list such as "vgg16,resnet50"; raise unless all are known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main() -> None:
    """Simulate the cases, print the epochs and what is saved, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for what, known in (
        ("models", MODELS),
        ("datasets", DATASETS),
        ("loaders", LOADERS),
        ("clusters", CLUSTERS),
    ):
        names = list(known)
        read = functools.partial(read_names, known=names)
        parser.add_argument(f"--{what}", type=read, default=names)
    parser.add_argument("--steps", type=int, default=400, help="of which the second half counts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, object] = {
        "what": "a simulation; docs/simulate.md says of what",
        "published_percent": PUBLISHED,
        "steps": options.steps,
    }
    sys.stdout.write(f"A simulation of eight nodes, global batch {GLOBAL_BATCH}.\n")
    for cluster, loader in itertools.product(options.clusters, options.loaders):
        cases = [
            Case(model, dataset, loader, cluster)
            for dataset in options.datasets
            for model in options.models
        ]
        epochs = _run_cases(cases, steps=options.steps)
        _print_savings(epochs, options.datasets)
        record[f"{cluster}, {loader}"] = {
            "saved_percent": {
                f"{ours}, against {rival}": {
                    "without exchange": asdict(saved(epochs, ours, rival, counts_exchange=False)),
                    "with exchange": asdict(saved(epochs, ours, rival, counts_exchange=True)),
                }
                for ours, rival in _PAIRS
            },
            "epoch_s": epochs,
        }
    if options.json:
        # Of a module that is run, sys.argv[0] is a path of this machine.
        command = ["python", "-m", "benchmarks.published_claim", *sys.argv[1:]]
        write_record(options.json, record, command=command)


if __name__ == "__main__":
    main()
