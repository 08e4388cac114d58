"""Attacks that know the rule: of a family's strengths they send the one that moves it most.

Strongest is the strength whose aggregate lies farthest from the honest mean, found by calling the
very rule on the honest rows and the attacker's. ByzFL's optimal ALIE and IPM have the same aim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.compute import aggregate_rows
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.attacks.attack import ALIE, IPM, Attack
from loft_hvd.errors import ArgumentError
from loft_hvd.pipeline.buckets import shard_numel

__all__ = ["OptimisedALIE", "OptimisedIPM", "aggregate_in_shards"]


def aggregate_in_shards(rows: Tensor, rule: Rule, *, shards: int) -> Tensor:
    """Aggregate rows as ``shards`` ranks do, each its own slice of the coordinates.

    Args:
        rows: one row a worker, all equal in weight, contiguous, [num_rows, numel], on the CPU.
        rule: fits so many rows.
        shards: ranks, >= 1; 1 for the whole rows at once.

    Returns:
        [numel], the bits of ``aggregate`` on each slice; of the rule's ``over_model`` on one.
    """
    numel = rows.shape[1]
    if shards == 1:
        rule = rule.over_model
    if isinstance(rule, Custom):
        slices = rows.split(shard_numel(numel, shards) if shards > 1 else max(numel, 1), dim=1)
        return torch.cat([aggregate(part, rule) for part in slices])
    rule.check(len(rows))
    out = torch.empty_like(rows[0])
    # Of a coordinate-wise rule every slicing has the same bits. Straight to the kernels: reading
    # arguments takes `aggregate` as long as some thousand coordinates.
    step = shard_numel(numel, shards) if shards > 1 and rule.sees_rows else max(numel, 1)
    for begin in range(0, numel, step):
        span = slice(begin, begin + step)
        aggregate_rows(list(rows[:, span].unbind()), rule, weights=None, out=out[span])
    return out


@dataclass(frozen=True)
class _Optimised:
    """A family of attacks by strength, against a rule.

    Attributes:
        rule: what the attackers' rows go through; all rows weigh the same. Its f is not looked at:
            as many attackers send as the call says.
        shards: into how many slices of coordinates ranks cut a row before the rule sees it: in
            training the number of ranks, 1 for a rule over whole rows.
    """

    family: ClassVar[Callable[[float], Attack]]
    strengths: ClassVar[tuple[float, ...]]  # what is tried

    rule: Rule
    shards: int = 1

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ArgumentError(f"{type(self).__name__}: shards={self.shards} must be >= 1")

    def __call__(self, honest: Tensor, *, num_rows: int) -> Tensor:
        return self.strongest(honest, num_rows=num_rows)(honest, num_rows=num_rows)

    def strongest(self, honest: Tensor, *, num_rows: int) -> Attack:
        """Return the attack of the family that moves the rule most; the first of equal ones."""
        centre = honest.mean(dim=0)
        rows = torch.cat([honest, honest.new_empty(num_rows, honest.shape[1])])
        best, farthest = type(self).family(self.strengths[0]), -1.0
        for strength in self.strengths if honest.shape[1] else ():
            attack = type(self).family(strength)
            rows[len(honest) :] = attack(honest, num_rows=num_rows)
            away = aggregate_in_shards(rows, self.rule, shards=self.shards) - centre
            moved = float(away.norm())
            # No number is the farthest there is: the rule has let a NaN or an infinity through.
            moved = float("inf") if moved != moved else moved
            if moved > farthest:
                best, farthest = attack, moved
        return best


@dataclass(frozen=True)
class OptimisedALIE(_Optimised):
    """``ALIE`` of the ``z``, of either sign, that moves the rule most."""

    family = ALIE
    strengths = (-3.0, -2.2, -1.5, -1.0, -0.7, -0.3, 0.3, 0.7, 1.0, 1.5, 2.2, 3.0)


@dataclass(frozen=True)
class OptimisedIPM(_Optimised):
    """``IPM`` of the ``eps`` that moves the rule most."""

    family = IPM
    strengths = (0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 4.5, 7.0, 10.0)
