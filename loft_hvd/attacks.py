"""Byzantine workers to order: wrong gradients for tests, and for trying a live job's defences.

An attack is a function of the honest gradients that a worker knows. In a live job that is its own
row (``attach``); in a test it may be every honest row.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.errors import ArgumentError

__all__ = ["Attack", "Gaussian", "HugeValue", "NaN", "Scaled", "SignFlip", "Zero", "attach"]


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
    """Send noise of standard deviation ``sigma``, the same in every run with the same ``seed``.

    Each step, bucket and rank has noise of its own, drawn from the seed and the honest values.
    """

    sigma: float = 1.0
    seed: int = 0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        # Seeded by what is attacked, too: noise is new in each step, bucket and rank, and the same
        # again in a second run.
        told = zlib.crc32(honest.detach().double().cpu().numpy().tobytes())
        generator = torch.Generator().manual_seed(self.seed << 32 | told)
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
    """Send the honest mean with one coordinate replaced by ``value``."""

    value: float = 1e30  # its square overflows float32, so that norms and distances do as well
    coordinate: int = 0

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        rows = _repeat(honest.mean(dim=0), num_rows)
        if honest.shape[1]:  # a bucket may be shorter than the coordinate, or empty
            rows[:, self.coordinate % honest.shape[1]] = self.value
        return rows


class AttackableOptimizer(Protocol):
    """What ``attach`` needs of an optimizer."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    # With each bucket, before it is sent, [numel].
    def register_outgoing_hook(self, hook: Callable[[Any, Tensor], None]) -> RemovableHandle: ...


def attach(
    optimizer: AttackableOptimizer, attack: Attack, *, ranks: Sequence[int]
) -> RemovableHandle:
    """Make some ranks of a running job Byzantine: they send what ``attack`` makes of their rows.

    Call it on every rank alike; in an elastic job once, before ``hvd.elastic.run``. The attacker
    sees its own gradients only.

    Args:
        optimizer: a ``loft_hvd.DistributedOptimizer``.
        attack: what the ranks send.
        ranks: the Byzantine ranks, each 0 <= rank < world_size; in later worlds of an elastic job
            whoever has these numbers.

    Returns:
        A handle whose ``remove()`` makes this rank honest again.

    Raises:
        ArgumentError: a rank that does not exist.
    """
    outside = [rank for rank in ranks if not 0 <= rank < optimizer.world_size]
    if outside:
        raise ArgumentError(
            f"attach: ranks {outside} do not exist; a world of {optimizer.world_size} has ranks "
            f"0 to {optimizer.world_size - 1}"
        )

    def send_wrong(_: Any, values: Tensor) -> None:
        # Asked each time: an elastic world may give this process another number.
        if optimizer.rank in ranks:
            values.copy_(attack(values.unsqueeze(0), num_rows=1)[0])  # of [1, numel]

    return optimizer.register_outgoing_hook(send_wrong)
