"""The noise of gradients: unbiased for unequal sizes, with errors that say what they say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.bench.attacked import load_digits
from loft_hvd.pipeline.noise import PairSums, estimate, estimate_pairs
from loft_hvd.report.page import render_page
from loft_hvd.report.text import render_text
from loft_hvd.runlog import read_run_log
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.ddp_buckets import backward

Floats = npt.NDArray[np.float64]
Spoil = Callable[[Floats, np.random.Generator], Floats]
SIZES = (96, 96, 48, 16)


class Regression:
    """Least squares on normal inputs, of which mean and covariance of gradients are known."""

    def __init__(self, *, dim: int = 12, away: float = 0.3, noise: float = 1.0) -> None:
        self.scales = np.linspace(0.5, 1.5, dim)  # standard deviations of the inputs
        self.away, self.noise = np.full(dim, away), noise  # from the best parameters
        variances = self.scales**2
        self.gradient = variances * self.away
        squared = float((variances * self.away**2).sum())
        # Of a (a . away - e), by Isserlis' theorem.
        self.trace = float(variances.sum() * (squared + noise**2) + (self.gradient**2).sum())
        self.signal = float((self.gradient**2).sum())

    def rows(self, sizes: tuple[int, ...], random: np.random.Generator) -> Floats:
        """Return each rank's mean gradient, [num_rows, dim]."""
        inputs = random.standard_normal((sum(sizes), len(self.scales))) * self.scales
        errors = inputs @ self.away - self.noise * random.standard_normal(sum(sizes))
        each = inputs * errors[:, None]
        ends = np.cumsum(sizes)
        return np.stack([part.mean(axis=0) for part in np.split(each, ends[:-1])])


def measure(
    task: Regression,
    sizes: tuple[int, ...],
    *,
    num_steps: int,
    seed: int = 0,
    spoil: Spoil = lambda rows, _: rows,
) -> list[PairSums]:
    random = np.random.default_rng(seed)
    intervals = []
    for _ in range(num_steps // 10):
        sums = PairSums.of(len(sizes))
        for _ in range(10):
            rows = spoil(task.rows(sizes, random), random)
            sums.add(rows @ rows.T, np.array(sizes, np.float64))
        intervals.append(sums.finite())
    return intervals


@pytest.mark.parametrize("sizes", [SIZES, (200, 40, 12, 4), (64, 64)])
def test_estimates_are_of_single_samples_whatever_the_sizes(sizes: tuple[int, ...]) -> None:
    task = Regression()
    found = estimate_pairs(measure(task, sizes, num_steps=2000))
    assert found is not None
    assert found.num_steps == 2000
    assert found.variance == pytest.approx(task.trace, rel=0.05)
    assert found.signal == pytest.approx(task.signal, rel=0.05)
    assert found.scale == pytest.approx(task.trace / task.signal, rel=0.07)


@pytest.mark.long
def test_errors_are_calibrated() -> None:
    task, trials = Regression(), 200
    inside = np.zeros(3)
    for seed in range(trials):
        found = estimate_pairs(measure(task, SIZES, num_steps=400, seed=seed))
        assert found is not None
        inside += [
            abs(found.variance - task.trace) <= 1.96 * found.variance_error,
            abs(found.signal - task.signal) <= 1.96 * found.signal_error,
            abs(found.scale - task.trace / task.signal) <= 1.96 * found.scale_error,
        ]
    assert ((inside / trials >= 0.90) & (inside / trials <= 0.99)).all(), inside / trials


def test_sums_over_pairs_are_those_of_squared_lengths() -> None:
    rows, sizes = np.random.default_rng(3).standard_normal((4, 9)), np.array(SIZES, np.float64)
    sums = PairSums.of(4)
    sums.add(rows @ rows.T, sizes)
    share = sizes / sizes.sum()
    mean_squared, squared_mean = share @ (rows**2).sum(axis=1), ((share @ rows) ** 2).sum()
    pairs = np.triu_indices(4, 1)
    assert sums.apart[pairs].sum() / sums.sizes[pairs].sum() == pytest.approx(
        sizes.sum() / 3 * (mean_squared - squared_mean)
    )


def flipped(rows: Floats, random: np.random.Generator) -> Floats:
    return np.vstack([-10 * rows[:1], rows[1:]])


def backwards(rows: Floats, random: np.random.Generator) -> Floats:
    return np.vstack([-rows[:1], rows[1:]])


def not_finite(rows: Floats, random: np.random.Generator) -> Floats:
    wrong = np.full_like(rows[:1], np.nan) if random.random() < 0.3 else rows[:1]
    return np.vstack([wrong, rows[1:]])


def huge_now_and_then(rows: Floats, random: np.random.Generator) -> Floats:
    return np.vstack([rows[:1] * (1e15 if random.random() < 0.01 else 1.0), rows[1:]])


def copied(rows: Floats, random: np.random.Generator) -> Floats:
    return np.vstack([rows[1:2], rows[1:]])


def silent(rows: Floats, random: np.random.Generator) -> Floats:
    return np.vstack([0 * rows[:1], rows[1:]])


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "spoil", [flipped, backwards, not_finite, huge_now_and_then, copied, silent]
)
@pytest.mark.parametrize("sizes", [(32,) * 8, (64, 64, 48, 32, 24, 16, 16, 8)])
def test_one_wrong_row_of_eight_hardly_moves_estimates(
    spoil: Spoil, sizes: tuple[int, ...]
) -> None:
    task = Regression()
    found = estimate_pairs(measure(task, sizes, num_steps=2000, spoil=spoil))
    assert found is not None
    assert found.variance == pytest.approx(task.trace, rel=0.15)
    assert found.signal == pytest.approx(task.signal, rel=0.15)


def test_too_few_intervals_say_nothing() -> None:
    assert estimate([10] * 4, [1.0] * 4, [1.0] * 4) is None
    assert estimate([10] * 5, [1.0, np.nan, 1.0, 1.0, 1.0], [1.0] * 5) is None
    assert estimate_pairs([]) is None


# In training: parameters stay where they are, so that the truth is known.

SAMPLES, INPUTS = 400, 6


def samples() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, INPUTS, generator=random, dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True) + 2 * torch.randn(SAMPLES, 1, generator=random)


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    ).double()


def gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def truth() -> tuple[float, float]:
    """Return ``tr(S)`` and ``|G|^2`` of drawing with replacement."""
    model, (x, y) = network(), samples()
    rows = []
    for one, other in zip(x, y, strict=True):
        model.zero_grad()
        torch.nn.functional.mse_loss(model(one), other).backward()
        rows.append(torch.cat([gradient(p).flatten() for p in model.parameters()]))
    gradients = torch.stack(rows)
    mean = gradients.mean(dim=0)
    return float(((gradients - mean) ** 2).sum(dim=1).mean()), float(mean.dot(mean))


def train(
    ends: LocalTransport,
    model: torch.nn.Module,
    *,
    sizes: list[int],
    rule: loft.Rule,
    front: str = "optimizer",
    num_steps: int,
    passes: int = 1,
    momentum: float = 0.0,
    spoils: bool = False,
    **options: Any,
) -> GradientNoise:
    (x, y), model = samples(), copy.deepcopy(model)  # ranks are threads, which share torch's seed
    balancer = loft.Balancer(sum(sizes), sizes, transport=ends)
    named = list(model.named_parameters())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    hook: Any = None
    common = {"rule": rule, "transport": ends, "worker_momentum": momentum, **options}
    if front == "hook":
        hook = loft.ddp_hook(balancer=balancer, named_parameters=named, **common)
    else:
        optimizer = loft.DistributedOptimizer(
            optimizer, named, balancer=balancer, backward_passes_per_step=passes, **common
        )
    random = torch.Generator().manual_seed(ends.rank)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(passes):
            size = balancer.local_batch_size
            batch = torch.randint(SAMPLES, (size or balancer.min_batch,), generator=random)
            with balancer.step(len(batch)):
                loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
                (loss * (-10 if spoils and ends.rank == 1 else 1)).backward()
        if hook is not None:
            parameters = [p for _, p in reversed(named)]
            given = {p: gradient(p).flatten() for p in parameters}
            for parameter, mean in backward(hook, [parameters[:2], parameters[2:]], given).items():
                parameter.grad = mean.view_as(parameter)
        optimizer.step()
    found = balancer.noise
    assert found is not None
    assert "gradient noise scale" in balancer.explain()
    return found


CASES: dict[str, dict[str, Any]] = {
    "mean": {"rule": loft.Mean()},
    "reproducible mean": {"rule": loft.Mean(reproducible=True)},
    "trimmed mean": {"rule": loft.TrimmedMean(1)},
    "robust": {"rule": loft.Robust(1)},
    "hook": {"rule": loft.TrimmedMean(1), "front": "hook"},
    "hook, mean": {"rule": loft.Mean(), "front": "hook"},
    "two passes": {"rule": loft.TrimmedMean(1), "passes": 2},
    "two passes, mean": {"rule": loft.Mean(), "passes": 2},
    "averages": {"rule": loft.Robust(1), "momentum": 0.9},
    "averages, mean": {"rule": loft.Mean(), "momentum": 0.9},
    "averages, hook": {"rule": loft.Robust(1), "momentum": 0.9, "front": "hook"},
    "absent rank": {"rule": loft.TrimmedMean(1), "sizes": [24, 12, 12, 0]},
    "absent rank, mean": {"rule": loft.Mean(), "sizes": [24, 12, 12, 0]},
    "16 bits": {"rule": loft.TrimmedMean(1), "compression": loft.Compression.fp16},
    "wrong row": {"rule": loft.TrimmedMean(1), "spoils": True, "sizes": [12] * 8},
    "quarantine": {
        "rule": loft.TrimmedMean(1),
        "spoils": True,
        "quarantine": True,
        "sizes": [12] * 8,
    },
}


_QUICK = ("mean", "trimmed mean", "averages", "hook, mean")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("case", "num_steps"),
    [
        *((case, 200) for case in _QUICK),
        *(pytest.param(case, 400, marks=pytest.mark.long) for case in CASES),
    ],
)
def test_ranks_measure_the_noise_of_what_they_train(case: str, num_steps: int) -> None:
    options: dict[str, Any] = {"sizes": [24, 24, 12, 4], "num_steps": num_steps} | CASES[case]
    model = network()
    found = run_ranks(
        len(options["sizes"]), lambda ends: train(ends, model, **options), timeout_s=300
    )
    assert all(each == found[0] for each in found)
    variance, signal = truth()
    assert found[0].variance_error < 0.1 * variance
    assert abs(found[0].variance - variance) < 4 * found[0].variance_error
    assert abs(found[0].signal - signal) < 4 * found[0].signal_error
    assert found[0].signal_error < 0.15 * signal * (600 / num_steps) ** 0.5


@pytest.mark.long
def test_estimates_hold_for_a_network_on_the_digits() -> None:
    torch.manual_seed(0)
    data = load_digits()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    rows = []
    for image, label in zip(data.images, data.labels, strict=True):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(image[None]), label[None]).backward()
        rows.append(torch.cat([gradient(p).flatten() for p in model.parameters()]))
    gradients = torch.stack(rows)  # [1437, 4810]
    mean = gradients.mean(dim=0)
    variance = float(((gradients - mean) ** 2).sum(dim=1).mean())
    random, intervals = np.random.default_rng(0), []
    for _ in range(200):
        sums = PairSums.of(len(SIZES))
        for _ in range(10):
            drawn = torch.from_numpy(random.integers(len(gradients), size=sum(SIZES)))
            parts = [gradients[each].mean(dim=0) for each in drawn.split(list(SIZES))]
            step = torch.stack(parts).double().numpy()
            sums.add(step @ step.T, np.array(SIZES, np.float64))
        intervals.append(sums.finite())
    found = estimate_pairs(intervals)
    assert found is not None
    assert found.variance == pytest.approx(variance, rel=0.05)
    assert found.signal == pytest.approx(float(mean.dot(mean)), rel=0.05)


def test_the_log_the_report_and_the_page_say_what_noise_means(tmp_path: Path) -> None:
    model = network()
    options: dict[str, Any] = {"sizes": [24, 24, 12, 4], "num_steps": 60, "rule": loft.Mean()}

    def work(ends: LocalTransport) -> GradientNoise:
        folder: dict[str, Any] = {"log_dir": tmp_path} if ends.rank == 0 else {}
        return train(ends, model, **options, **folder)

    run_ranks(4, work)
    (path,) = tmp_path.iterdir()
    entries = read_run_log(path)
    (line,) = [entry for entry in entries if entry["kind"] == "noise"]
    assert line["step"] == 50
    assert line["scale"] == pytest.approx(line["variance"] / line["signal"])
    assert "with 64 a step, a sample brings" in render_text(entries)
    page = render_page(entries, title="run")
    assert "Noise of gradients, in samples" in page
    assert "gradient noise scale" in page
