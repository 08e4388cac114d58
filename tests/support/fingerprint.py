"""A short training whose result must have the same bits on every transport."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import loft_hvd as loft
from loft_hvd.transport.base import Transport

__all__ = ["RULES", "fingerprint", "train"]

# All on shard owners.
RULES = ("mean", "median", "trimmed_mean", "phocas", "robust", "robust model", "robust audited")
_OPTIONS: dict[str, dict[str, Any]] = {
    "robust": {"scope": "shard"},
    "robust model": {"scope": "model"},
    "robust audited": {"scope": "model", "audit": 1.0},
}


def _rule(name: str, world_size: int) -> loft.Rule:
    most = (world_size - 1) // 2
    return {
        "median": loft.Median(),
        "mean": loft.Mean(reproducible=True),
        "trimmed_mean": loft.TrimmedMean(f=most),
        "phocas": loft.Phocas(f=most),
        "robust": loft.Robust(f=most),
    }[name.split()[0]]


def train(transport: Transport, rule: str, *, num_steps: int, seed: int = 0) -> torch.Tensor:
    """Return the parameters after some steps on seeded gradients, flat.

    Args:
        transport: the ranks.
        rule: one of ``RULES``, with the largest f that fits.
        num_steps: optimizer steps.
        seed: of the gradients, each rank's its own.
    """
    shapes = [(7, 5), (13,), (), (40, 3)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        [(f"p{at}", parameter) for at, parameter in enumerate(parameters)],
        rule=_rule(rule, transport.world_size),
        bucket_bytes=256,
        worker_momentum=0.0,  # SGD has it
        transport=transport,
        **_OPTIONS.get(rule, {}),
    )
    generator = torch.Generator().manual_seed(1000 * seed + transport.rank)
    for _ in range(num_steps):
        optimizer.zero_grad()
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        torch.autograd.backward([p.view_as(p) for p in parameters], grads)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])


def fingerprint(values: torch.Tensor) -> str:
    """Return a digest of the bits of some values."""
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]
