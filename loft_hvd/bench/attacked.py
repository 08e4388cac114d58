"""Training under attack, simulated: many runs side by side, each rule on rows of real gradients.

A step of one run: every honest worker draws its batch and adds its gradient to its momentum; the
attackers make their rows of the honest ones; loft_hvd's own kernels aggregate; the model steps.
What is not there is what carries rows from rank to rank, which changes no value. Gradients of all
runs are computed together (one batched product instead of one a run); rules and attacks run by run.

Which ranks attack depends on the seed, as several rules break ties in favour of the lower rank; in
``ceil(workers / f)`` seeds every rank has attacked. A rule that draws, as some of ByzFL's do, draws
the same when an attack tries it and when it then aggregates: all ranks must draw alike, so
attackers know the draws.

Worker momentum is ``m = s / w`` with ``s = b s + g`` and ``w = b w + 1``: all workers draw equally
many samples. "SGD momentum" keeps one buffer behind the rule instead, as torch's optimizer does.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.compute import aggregate_rows
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.attacks import (
    ALIE,
    IPM,
    Attack,
    Drift,
    LabelFlip,
    Mimic,
    MinMax,
    MinSum,
    OptimisedALIE,
    OptimisedIPM,
    Scaled,
    SignFlip,
)
from loft_hvd.attacks.optimised import aggregate_in_shards
from loft_hvd.bench.defences import Defence
from loft_hvd.bench.skews import draw_batches
from loft_hvd.errors import ArgumentError, MissingDependencyError
from loft_hvd.pipeline.suspicion.spread import (
    COMPARED_AFTER,
    JUDGE_IN_SHARDS_BELOW,
    Spread,
    lasting_differences,
    looked_at,
)

__all__ = [
    "ATTACKS",
    "LEARNING_RATES",
    "MODELS",
    "NONE",
    "ODD_STEPS",
    "AttackTrial",
    "Setting",
    "train",
]

NONE, ODD_STEPS, _LABEL_FLIP = "none", "odd steps x10", "label flip"
ATTACKS = (
    NONE,
    "sign flip x10",
    "ALIE z=1",
    "optimised ALIE",
    "IPM 0.1",
    "optimised IPM",
    "mimic",
    "Min-Max",
    "Min-Sum",
    "drift",
    ODD_STEPS,
    _LABEL_FLIP,
)
_NUM_TEST = 360  # samples that are not trained on, as in examples/digits.py
_MOMENTUM = 0.9
_LAST_STEPS, _LOOK_EVERY = 50, 5  # accuracy is the mean of looks in the last steps


@dataclass(frozen=True)
class Setting:
    """What runs that are computed together have in common."""

    model: str  # one of MODELS
    num_workers: int
    f: int  # what the rules expect, and the attackers where there is an attack
    steps: int = 400
    global_batch: int = 256  # samples of all workers in a step; honest ones draw their part of it

    @property
    def batch(self) -> int:
        """Samples of one worker in a step."""
        return self.global_batch // self.num_workers


@dataclass(frozen=True)
class AttackTrial:
    """One run."""

    defence: Defence
    attack: str  # one of ATTACKS
    skew: str  # one of SKEWS
    seed: int  # of data, first weights, which ranks attack, and a rule's draws


class Images(NamedTuple):
    """What is learnt, as tensors."""

    images: Tensor  # [num_images, 1, 8, 8], to train on
    labels: Tensor  # [num_images]
    test_images: Tensor  # [360, 1, 8, 8]
    test_labels: Tensor  # [360]


def _split(images: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Images:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return Images(x[_NUM_TEST:], y[_NUM_TEST:], x[:_NUM_TEST], y[:_NUM_TEST])


def _datasets() -> Any:
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise MissingDependencyError(
            "the digits ship inside scikit-learn: pip install '.[demo]' in the checkout"
        ) from error


@functools.cache
def load_digits() -> Images:
    """Read the digits that ship inside scikit-learn, split as in examples/digits.py."""
    images, labels = _datasets().load_digits(return_X_y=True)
    return _split(images / 16, labels)  # 1,437 to train on


@functools.cache
def _make_twenty() -> Images:
    """Make points of 20 classes in 64 coordinates, of which 24 tell the class."""
    points, labels = _datasets().make_classification(
        n_samples=2360,
        n_features=64,
        n_informative=24,
        n_redundant=0,
        n_classes=20,
        n_clusters_per_class=1,
        class_sep=2.0,
        random_state=0,
    )
    return _split(points / points.std(), labels)  # 2,000 to train on


def _mlp(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes)
    )  # 4,810 values for 10 classes


def _cnn() -> nn.Module:
    """Return the network of examples/digits.py: 103,370 values."""
    model = nn.Sequential(
        *_convolution(1, 32),
        *_convolution(32, 64),
        *_convolution(64, 64),
        nn.MaxPool2d(2),
        *_convolution(64, 64),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )
    for values in model[-1].parameters():
        nn.init.zeros_(values)
    return model


def _convolution(before: int, after: int) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, 3, padding=1)
    weight, bias = layer.parameters()
    nn.init.kaiming_normal_(weight, nonlinearity="relu")
    nn.init.zeros_(bias)
    return [layer, nn.GroupNorm(8, after), nn.ReLU()]


# By model: the network, its learning rate, and what it learns.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "mlp20": functools.partial(_mlp, 20),
}
LEARNING_RATES = {"mlp": 0.5, "cnn": 0.1, "mlp20": 0.5}
_DATA = {"mlp": load_digits, "cnn": load_digits, "mlp20": _make_twenty}


class _Network:
    """A network on flat weights, for many sets of them at once."""

    def __init__(self, name: str) -> None:
        if name not in MODELS:
            raise ArgumentError(f"model {name!r} is unknown; the models are {', '.join(MODELS)}")
        self._make = MODELS[name]
        self._module = self._make()
        self._shapes = {key: value.shape for key, value in self._module.named_parameters()}
        # Batched products are one call for all runs; batched convolutions are slower than a loop.
        self._is_batched = name != "cnn"
        of_workers = vmap(grad(self._loss), in_dims=(None, 0, 0))
        self._batched = vmap(of_workers, in_dims=(0, 0, 0))

    def first_weights(self, seed: int) -> Tensor:
        """Return new weights, [numel]."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._make()
        return torch.cat([value.detach().flatten() for value in module.parameters()])

    def _unpack(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {
            key: part.view(shape)
            for (key, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def _logits(self, flat: Tensor, images: Tensor) -> Tensor:
        logits: Tensor = functional_call(self._module, self._unpack(flat), (images,))
        return logits

    def _loss(self, flat: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(flat, images), labels)

    def gradients(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Return every worker's gradient, [runs, workers, numel].

        Args:
            weights: [runs, numel].
            images: [runs, workers, batch, 1, 8, 8].
            labels: [runs, workers, batch].
        """
        if self._is_batched:
            found: Tensor = self._batched(weights, images, labels)
            return found
        rows = torch.empty(*labels.shape[:2], weights.shape[1])
        for run, flat in enumerate(weights):
            leaf = flat.clone().requires_grad_()
            for worker in range(labels.shape[1]):
                loss = self._loss(leaf, images[run, worker], labels[run, worker])
                rows[run, worker] = torch.autograd.grad(loss, leaf)[0]
        return rows

    def accuracies(self, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Return the share of images that each run names rightly, [runs]."""
        with torch.no_grad():
            right = [self._logits(flat, images).argmax(dim=1) == labels for flat in weights]
        return torch.stack(right).float().mean(dim=1)


class _OddSteps:
    """Honest in even steps, a ``SignFlip`` in odd ones: it preys on what a rule learns of the past.

    A rule that selected rows by the step before would take the odd steps' for honest.
    """

    def __init__(self, *, scale: float) -> None:
        self._honest, self._wrong = Scaled(1.0), SignFlip(scale)
        self._step = 0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        attack = self._wrong if self._step % 2 else self._honest
        self._step += 1
        return attack(honest, num_rows=num_rows)


def make_attack(name: str, rule: Rule, shards: int) -> Attack | None:
    """Return what makes the attackers' rows; None where they compute rows as honest workers do."""
    attacks: dict[str, Attack | None] = {
        NONE: None,
        _LABEL_FLIP: None,
        "sign flip x10": SignFlip(scale=10.0),
        "ALIE z=1": ALIE(z=1.0),
        "optimised ALIE": OptimisedALIE(rule, shards=shards),
        "IPM 0.1": IPM(eps=0.1),
        "optimised IPM": OptimisedIPM(rule, shards=shards),
        "mimic": Mimic(row=0),
        "Min-Max": MinMax(),
        "Min-Sum": MinSum(),
        "drift": Drift(),
        ODD_STEPS: _OddSteps(scale=10.0),
    }
    if name not in attacks:
        raise ArgumentError(f"attack {name!r} is unknown; the attacks are {', '.join(ATTACKS)}")
    return attacks[name]


def count_computing(attack: str, setting: Setting) -> int:
    """Return how many workers compute gradients: all, or the honest ones."""
    is_all = attack in (NONE, _LABEL_FLIP)
    return setting.num_workers if is_all else setting.num_workers - setting.f


def _batches(
    trial: AttackTrial, setting: Setting, labels: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """Return what each worker that computes draws, [steps, workers, batch]."""
    # Under attack honest workers hold all data among them; the attackers' labels are others.
    num_honest = setting.num_workers - (0 if trial.attack == NONE else setting.f)
    draw = functools.partial(draw_batches, labels=labels, batch=setting.batch, steps=setting.steps)
    honest = draw(trial.skew, num_workers=num_honest, seed=trial.seed)
    if trial.attack != _LABEL_FLIP:
        return honest
    wrong = draw("shuffled", num_workers=setting.f, seed=trial.seed + 1_000_000)
    return np.concatenate([honest, wrong], axis=1)


def train(trials: Sequence[AttackTrial], setting: Setting) -> list[float]:
    """Train every run and return its test accuracy, the mean over looks in the last 50 steps.

    Args:
        trials: runs in which equally many workers compute (``count_computing``).
        setting: what they have in common.

    Returns:
        Shares of the 360 test images, one a trial.

    Raises:
        ArgumentError: a model, attack or skew that does not exist.
        AggregationError: a rule does not fit so many workers.
        MissingDependencyError: no scikit-learn.
    """
    network, data = _Network(setting.model), _DATA[setting.model]()
    drawn = torch.from_numpy(
        np.stack([_batches(trial, setting, data.labels.numpy()) for trial in trials])
    )  # [runs, steps, workers, batch]
    weights = torch.stack([network.first_weights(trial.seed) for trial in trials])
    flip = LabelFlip(int(data.labels.max()) + 1)
    is_flipped = torch.tensor([trial.attack == _LABEL_FLIP for trial in trials])
    aggregators = [_Aggregator(trial, setting, weights.shape[1]) for trial in trials]
    at_worker = torch.tensor([not trial.defence.has_sgd_momentum for trial in trials])
    sums = torch.zeros(len(trials), drawn.shape[2], weights.shape[1])
    weight = 0.0
    velocity = torch.zeros_like(weights)
    looks = []
    for step in range(setting.steps):
        chosen = drawn[:, step]
        labels = data.labels[chosen]
        wrong = labels[is_flipped, setting.num_workers - setting.f :]
        labels[is_flipped, setting.num_workers - setting.f :] = flip(wrong)
        rows = network.gradients(weights, data.images[chosen], labels)
        sums.mul_(_MOMENTUM).add_(rows)
        weight = _MOMENTUM * weight + 1.0
        sent = torch.where(at_worker[:, None, None], sums / weight, rows)
        update = torch.stack(
            [each.aggregate(sent[run], gradients=rows[run]) for run, each in enumerate(aggregators)]
        )
        velocity.mul_(_MOMENTUM).add_(update, alpha=1.0 - _MOMENTUM)
        weights -= LEARNING_RATES[setting.model] * torch.where(at_worker[:, None], update, velocity)
        left = setting.steps - 1 - step
        if left < _LAST_STEPS and left % _LOOK_EVERY == 0:
            looks.append(network.accuracies(weights, data.test_images, data.test_labels))
    accuracies: list[float] = torch.stack(looks).mean(dim=0).tolist()
    return accuracies


def row_by_rank(setting: Setting, seed: int) -> list[int]:
    """Return which row each rank holds, of those of the honest and then of the attackers."""
    num_workers, f = setting.num_workers, setting.f
    # One order of ranks, of which each seed takes the next f: five seeds that each drew f of 8
    # would leave out 2 ranks, one of which may be rank 0.
    order = torch.randperm(num_workers, generator=torch.Generator().manual_seed(0)).tolist()
    attackers = [order[(seed * f + at) % num_workers] for at in range(f)]
    honest = torch.randperm(num_workers - f, generator=torch.Generator().manual_seed(seed))
    row_of = dict(zip(attackers, range(num_workers - f, num_workers), strict=True))
    others = [rank for rank in range(num_workers) if rank not in row_of]
    row_of |= dict(zip(others, honest.tolist(), strict=True))
    return [row_of[rank] for rank in range(num_workers)]


class _Aggregator:
    """A trial's attack and rule, and by what values the rule judges rows."""

    def __init__(self, trial: AttackTrial, setting: Setting, numel: int) -> None:
        self._inner, self._attack_name = trial.defence.rule(setting.f), trial.attack
        self._rule = self._inner
        if self._inner.sees_rows:  # coordinate-wise ones do not depend on their order
            self._rule = Custom(self._aggregate_by_rank, f=self._inner.f)
        self._f, self._num_workers = setting.f, setting.num_workers
        self._row_by_rank = row_by_rank(setting, trial.seed)
        # The seed of a step's draws; runs have fewer steps than that, so no two share one.
        self._draw = trial.seed * 1_000_000
        self._judge_in(trial.defence.shards(setting.num_workers))
        self._watch = _SpreadNotes(setting.num_workers, numel) if trial.defence.is_auto else None

    def _judge_in(self, shards: int) -> None:
        self.shards = shards
        self._applied = self._inner.over_model if shards == 1 else self._inner
        self._attack = make_attack(self._attack_name, self._rule, shards)

    def _aggregate_by_rank(self, rows: Tensor) -> Tensor:
        """Aggregate rows of the honest and then the attackers, as the ranks hold them."""
        by_rank = [rows[row] for row in self._row_by_rank]
        out = torch.empty_like(rows[0])
        if isinstance(self._inner, Custom):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._draw)
                aggregate(by_rank, self._inner, out=out)
        else:  # straight to the kernels: reading arguments again made runs twice as long
            self._applied.check(len(rows))
            aggregate_rows(by_rank, self._applied, weights=None, out=out)
        return out

    def aggregate(self, rows: Tensor, *, gradients: Tensor) -> Tensor:
        """Return the aggregate of what workers send and of the attackers' rows.

        Args:
            rows: of the workers that compute, [workers, numel].
            gradients: theirs in this step, of which ``rows`` may be averages over time.
        """
        self._draw += 1
        made = [] if self._attack is None else [self._attack(rows, num_rows=self._f)]
        result = aggregate_in_shards(torch.cat([rows, *made]), self._rule, shards=self.shards)
        if self._watch is not None:
            found = self._watch.step_reduced(torch.cat([gradients, *made]), result)
            if found is not None:
                self._watch = None
                if found.usual <= JUDGE_IN_SHARDS_BELOW:
                    self._judge_in(self._num_workers)
        return result


class _SpreadNotes:
    """What all workers' ``SpreadWatch`` would note, of one piece."""

    def __init__(self, num_workers: int, numel: int) -> None:
        self._places = looked_at(numel, numel)
        self._counts = np.zeros(num_workers)
        self._sums, self._squares = np.zeros((2, num_workers, len(self._places)))
        self._num_steps = 0

    def step_reduced(self, rows: Tensor, result: Tensor) -> Spread | None:
        apart = (rows[:, self._places].double() - result[self._places].double()).numpy()
        noted = np.isfinite(apart).all(axis=1)
        self._counts += noted
        self._sums[noted] += apart[noted]
        self._squares[noted] += apart[noted] ** 2
        self._num_steps += 1
        if self._num_steps < COMPARED_AFTER:
            return None
        return lasting_differences(self._counts, self._sums, self._squares)
