"""Attacks: what Byzantine workers send, as functions of the honest gradients that they know.

In a live job an attacker knows its own row, or, where attackers collude, every honest row
(``trial.attach``); in a test whatever the test gives. ``LabelFlip`` alone works on data: its worker
computes right gradients of wrong labels.

Papers: ALIE, Baruch et al., NeurIPS 2019 (arXiv 1902.06156); IPM, Xie et al., UAI 2019 (arXiv
1903.03936); mimic, Karimireddy et al., ICLR 2022 (arXiv 2006.09365); Min-Max and Min-Sum,
Shejwalkar and Houmansadr, NDSS 2021.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loft_hvd.errors import ArgumentError

__all__ = [
    "ALIE",
    "IPM",
    "Attack",
    "Drift",
    "Gaussian",
    "HugeValue",
    "LabelFlip",
    "Mimic",
    "MinMax",
    "MinSum",
    "NaN",
    "Scaled",
    "SignFlip",
    "Zero",
]


class Attack(Protocol):
    """Makes the rows that Byzantine workers send."""

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        """Return wrong gradients.

        Args:
            honest: the honest rows that the attacker knows, [num_honest, numel], num_honest >= 1.
            num_rows: Byzantine workers.

        Returns:
            Their rows, [num_rows, numel], dtype and device of ``honest``.
        """


# Byzantine workers may collude: all of them send one row.
def _repeat(row: Tensor, num_rows: int) -> Tensor:
    return row.unsqueeze(0).repeat(num_rows, 1)


def _mean_and_deviation(honest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation, divided by the rows' number, of each coordinate."""
    mean = honest.mean(dim=0)
    return mean, (honest - mean).square().mean(dim=0).sqrt()


@dataclass(frozen=True)
class SignFlip:
    """Send the honest mean turned round, ``scale`` times as long."""

    scale: float = 1.0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        return _repeat(honest.mean(dim=0).mul(-self.scale), num_rows)


@dataclass(frozen=True)
class Scaled:
    """Send the honest mean, ``factor`` times as long."""

    factor: float = 100.0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        return _repeat(honest.mean(dim=0).mul(self.factor), num_rows)


@dataclass(frozen=True)
class Gaussian:
    """Send noise of standard deviation ``sigma``, the same in every run.

    Each step, bucket and rank has noise of its own, drawn from the honest values.
    """

    sigma: float = 1.0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        # Seeded by what is attacked: noise is new in each step, bucket and rank, and the same again
        # in a second run.
        told = zlib.crc32(honest.detach().double().cpu().numpy().tobytes())
        generator = torch.Generator().manual_seed(told)
        noise = torch.randn(num_rows, honest.shape[1], generator=generator, dtype=torch.float64)
        return noise.mul(self.sigma).to(honest)


@dataclass(frozen=True)
class Zero:
    """Send zeros."""

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        return honest.new_zeros(num_rows, honest.shape[1])


@dataclass(frozen=True)
class NaN:
    """Send NaN in every coordinate."""

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        return honest.new_full((num_rows, honest.shape[1]), float("nan"))


@dataclass(frozen=True)
class HugeValue:
    """Send the honest mean with its first coordinate replaced by ``value``."""

    value: float = 1e30  # its square overflows float32, so that norms and distances do as well

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        rows = _repeat(honest.mean(dim=0), num_rows)
        rows[:, :1] = self.value  # of an empty bucket nothing
        return rows


@dataclass(frozen=True)
class ALIE:
    """A little is enough: send the honest mean less ``z`` standard deviations of each coordinate.

    Where ``z`` is about 1 these rows lie nearer to the mean than honest ones do, and pull all to
    one side. A negative ``z`` pulls to the other. The deviation is that of the rows given (divided
    by their number); of one row it is 0, so alone an attacker sends what it should.
    """

    z: float = 1.0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        mean, deviation = _mean_and_deviation(honest)
        return _repeat(mean - self.z * deviation, num_rows)


@dataclass(frozen=True)
class IPM:
    """Inner product manipulation: send the honest mean turned round and ``eps`` times as long.

    A small ``eps`` hides among rows that differ much; ``SignFlip`` is the loud end.
    """

    eps: float = 0.1

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        return _repeat(honest.mean(dim=0).mul(-self.eps), num_rows)


@dataclass(frozen=True)
class _FarthestUnseen:
    """Send the honest mean, moved as far as a bound on distances allows, against ``along``.

    Attributes:
        along: against what: "deviation", that of each coordinate; "mean", the honest mean itself;
            "sign", the mean's signs. Which does most depends on the data.
    """

    along: str = "deviation"

    def __post_init__(self) -> None:
        if self.along not in _ALONG:
            raise ArgumentError(
                f"{type(self).__name__}: along={self.along!r} is unknown; it is one of "
                f"{', '.join(_ALONG)}"
            )

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        # In float64: squares of distances are compared.
        rows = honest.double()
        mean, deviation = _mean_and_deviation(rows)
        steps = {"deviation": deviation, "mean": mean, "sign": mean.sign()}
        direction = -steps[self.along]
        if not direction.any():  # alone, or with nothing to move against: it sends what it should
            return _repeat(mean.to(honest), num_rows)
        direction /= direction.norm()
        pairs = torch.stack([(rows - row).square().sum(dim=1) for row in rows])
        away = mean - rows
        # A row at mean + g direction is away_i^2 + 2 g ahead_i + g^2 from honest row i, squared.
        length = self._length(away.square().sum(dim=1), away @ direction, pairs)
        return _repeat((mean + length * direction).to(honest), num_rows)

    def _length(self, away: Tensor, ahead: Tensor, pairs: Tensor) -> float:
        """Return the greatest g that keeps the bound.

        Args:
            away: squared distances of honest rows from their mean, [num_honest].
            ahead: how far the mean lies beyond each row in the direction, [num_honest].
            pairs: squared distances of honest rows from each other, [num_honest, num_honest].
        """
        raise NotImplementedError


_ALONG = ("deviation", "mean", "sign")


@dataclass(frozen=True)
class MinMax(_FarthestUnseen):
    """Min-Max: no honest row is farther from the row sent than two honest rows are apart."""

    def _length(self, away: Tensor, ahead: Tensor, pairs: Tensor) -> float:
        # g^2 + 2 ahead g + away - most <= 0 for every row; the mean, g = 0, is near enough to all.
        spare = (pairs.max() - away).clamp_min(0.0)
        return float(((ahead.square() + spare).sqrt() - ahead).min())


@dataclass(frozen=True)
class MinSum(_FarthestUnseen):
    """Min-Sum: squared distances from honest rows add up to no more than an honest row's do."""

    def _length(self, away: Tensor, ahead: Tensor, pairs: Tensor) -> float:
        # Over all rows `ahead` adds up to nothing.
        spare = (pairs.sum(dim=1).max() - away.sum()).clamp_min(0.0)
        return float((spare / len(away)).sqrt())


@dataclass(frozen=True)
class Drift:
    """Send the honest mean, moved in one direction that stays the same from step to step.

    It is moved by ``scale`` times the root mean square of honest rows' distances from their mean,
    so that where ``scale`` is about 1 it stands out no more than honest rows do; alone an attacker
    sends what it should. The direction is drawn once for each number of coordinates.
    """

    scale: float = 1.0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        mean, deviation = _mean_and_deviation(honest)
        generator = torch.Generator().manual_seed(_DRIFT_SEED)
        direction = torch.randn(honest.shape[1], generator=generator, dtype=torch.float64)
        direction = (direction / direction.norm()).to(honest)
        return _repeat(mean + self.scale * deviation.norm() * direction, num_rows)


_DRIFT_SEED = 0  # of its direction, the same on every attacking rank


@dataclass(frozen=True)
class Mimic:
    """Send what one honest worker sends, so that it counts for several.

    On data that differ from worker to worker this biases every rule, and no row is wrong.

    Attributes:
        row: which of the honest rows, >= 0; counted again from the first where there are fewer.
    """

    row: int = 0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        return _repeat(honest[self.row % len(honest)], num_rows)


@dataclass(frozen=True)
class LabelFlip:
    """Wrong labels for an attacker's own data: class ``c`` of C becomes ``C - 1 - c``.

    Its gradients are then right ones of wrong data. No ``Attack``: give the labels to it before the
    loss.

    Attributes:
        num_classes: C, >= 2.
    """

    num_classes: int

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ArgumentError(f"LabelFlip: num_classes={self.num_classes} must be >= 2")

    def __call__(self, labels: Tensor) -> Tensor:
        """Return the wrong labels, shape, dtype and device of ``labels``, whole numbers."""
        return self.num_classes - 1 - labels
