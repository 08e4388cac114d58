"""The published claim, simulated: twelve models, four data sets, an edge cluster of eight nodes.

    python -m benchmarks.published_claim --json benchmarks/results/published_claim.json
    python -m benchmarks.published_claim --models resnet50 --datasets imagenet --steps 100

LOFT's abstract (IEEE TCC 12(2):370-387, 2024) says: up to 46 % less training time than LB-BSP, over
twelve DNN models and four data sets. Which ones, on what cluster, is not public. So this is no
repetition of it: it is a simulation, on profiles and a cluster that are written down here, and its
figures stand beside the published one. The controller, the policies and the sampler are the real
ones; times follow the model in ``balance/latency.py`` with 5 % noise.

What is assumed, beside the sources named below:

* A training step costs three forward passes, and a multiply-add is two operations.
* Devices reach 30 % of their peak in single precision.
* Each node holds an eighth of the data. The rest comes over its own link, 0.2 ms a sample beside
  the bytes. One node of each kind has 1 Gb/s, the other 200 Mb/s.
* The exchange of gradients, 4 bytes a parameter, takes 2 (n - 1) / n of them at the slowest link,
  after the slowest rank. It is the same under every policy; savings are said with and without it.
* Small images are enlarged to the size that the model takes (224, or 299 for Inception).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from loft_hvd.bench.record import write_record
from loft_hvd.simulate.scenario import RankTraits, Scenario
from loft_hvd.simulate.simulation import simulate

__all__ = ["CLUSTER", "DATASETS", "MODELS", "run_case"]

# Parameters, and 10^9 multiply-adds of a forward pass of one image: "num_params" and "_ops" of the
# weights IMAGENET1K_V1 in torchvision 0.29.2 (table: docs.pytorch.org/vision/0.20/models.html).
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

# Training samples, and bytes of one as it is stored.
DATASETS: dict[str, tuple[int, float]] = {
    # 1,281,167 images in ILSVRC2012_img_train.tar, 147.9 GB (image-net.org).
    "imagenet": (1_281_167, 115.4e3),
    # 75,750 images, longest side 512, 3.84 GB (Bossard et al., ECCV 2014; the size is that of the
    # copy huggingface.co/datasets/SmolVEncoder/food101).
    "food101": (75_750, 50.7e3),
    # 100,000 unlabelled and 5,000 labelled images of 96 x 96 x 3 bytes
    # (Coates et al., AISTATS 2011; cs.stanford.edu/~acoates/stl10).
    "stl10": (105_000, 27_648.0),
    # 50,000 images, 3,073 bytes each in the binary version (Krizhevsky 2009;
    # cs.toronto.edu/~kriz/cifar.html).
    "cifar10": (50_000, 3_073.0),
}


@dataclass(frozen=True)
class Node:
    """A device and its link."""

    name: str
    peak_flops: float  # single precision
    link_bytes_per_s: float


# CUDA cores times two times the highest clock, as NVIDIA's data sheets of the modules have them:
# Nano 128 at 921 MHz, TX2 256 at 1.3 GHz, Xavier NX 384 at 1.1 GHz, AGX Xavier 512 at 1.377 GHz.
_PEAKS = {"nano": 0.236e12, "tx2": 0.666e12, "xavier-nx": 0.845e12, "agx-xavier": 1.41e12}
CLUSTER = tuple(Node(name, peak, rate) for rate in (125e6, 25e6) for name, peak in _PEAKS.items())
_EFFICIENCY, _OPERATIONS = 0.3, 6.0  # of the peak; of a step for each multiply-add of the forward
_GLOBAL_BATCH = 256
POLICIES = ("uniform", "lbbsp-cpu", "lbbsp-cpu:busy", "loft")


@dataclass(frozen=True)
class Case:
    """One model on one data set with one kind of loader."""

    model: str
    dataset: str
    overlap: float  # 0 for a serial loader, 1 for one that hides all it can

    @property
    def exchange_s(self) -> float:
        """Seconds that exchanging gradients adds to a step."""
        num_bytes = 4.0 * MODELS[self.model][0]
        share = 2.0 * (len(CLUSTER) - 1) / len(CLUSTER)
        return share * num_bytes / min(node.link_bytes_per_s for node in CLUSTER)

    def scenario(self, steps: int) -> Scenario:
        """Return the case for the simulator, without the exchange."""
        multiply_adds = 1e9 * MODELS[self.model][1]
        return Scenario(
            f"{self.model} on {self.dataset}",
            len(CLUSTER),
            _GLOBAL_BATCH,
            steps=steps,
            num_samples=50 * _GLOBAL_BATCH,
            sample_bytes=DATASETS[self.dataset][1],
            noise=0.05,
            policies=POLICIES,
            ranks=RankTraits(
                compute_s=[
                    _OPERATIONS * multiply_adds / (_EFFICIENCY * node.peak_flops)
                    for node in CLUSTER
                ],
                remote_bytes_per_s=[node.link_bytes_per_s for node in CLUSTER],
                remote_latency_s=2e-4,
                overlap=self.overlap,
            ),
        )


def run_case(case: Case, *, steps: int) -> dict[str, float]:
    """Return the seconds of an epoch under each policy, without the exchange, and of that."""
    num_steps = DATASETS[case.dataset][0] / _GLOBAL_BATCH
    results = simulate(case.scenario(steps))
    epoch_s = {name: results.run(name).settled_s * num_steps for name in POLICIES}
    return {**epoch_s, "exchange": case.exchange_s * num_steps}


def summarise(rows: list[tuple[Case, dict[str, float]]]) -> dict[str, float]:
    """Return what LOFT saves of an epoch against the others, median and largest, in per cent."""
    found: dict[str, float] = {}
    for rival in POLICIES[:-1]:
        for what in ("", ", with the exchange"):
            saved = []
            for _, epoch in rows:
                more = epoch["exchange"] if what else 0.0
                saved.append(100.0 * (1.0 - (epoch["loft"] + more) / (epoch[rival] + more)))
            found[f"against {rival}{what}: median"] = round(statistics.median(saved), 1)
            found[f"against {rival}{what}: largest"] = round(max(saved), 1)
    return found


def main() -> None:
    """Run the cases, print a table and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    write = sys.stdout.write
    record: dict[str, object] = {"what": "a simulation; docs/benchmarks.md says of what"}
    write(f"{'model':20}{'data set':10}{'loader':10}" + "".join(f"{p:>16}" for p in POLICIES))
    write(f"{'exchange':>12}   epoch, in s\n")
    for overlap, loader in ((0.0, "serial"), (1.0, "prefetch")):
        rows = []
        for dataset in options.datasets.split(","):
            for model in options.models.split(","):
                case = Case(model, dataset, overlap)
                epoch = run_case(case, steps=options.steps)
                rows.append((case, epoch))
                write(f"{model:20}{dataset:10}{loader:10}")
                write("".join(f"{epoch[p]:16.1f}" for p in POLICIES))
                write(f"{epoch['exchange']:12.1f}\n")
                sys.stdout.flush()
        summary = summarise(rows)
        record[loader] = {
            "saved": summary,
            "epoch_s": {f"{case.model}/{case.dataset}": epoch for case, epoch in rows},
        }
        for text, per_cent in summary.items():
            write(f"  {loader}, {text}: {per_cent} %\n")
    write('  published, against LB-BSP: "up to 46 %"\n')
    if options.json:
        write_record(options.json, record, command=sys.argv)


if __name__ == "__main__":
    main()
