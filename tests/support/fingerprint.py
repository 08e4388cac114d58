"""A short training whose result must have the same bits on every transport."""

from __future__ import annotations

import hashlib

import torch

import loft_hvd as loft
from loft_hvd.transport.base import Transport

__all__ = ["RULES", "fingerprint", "train"]

RULES = ("mean", "median", "trimmed_mean", "phocas", "robust")  # all on shard owners


def _rule(name: str, world_size: int) -> loft.Rule:
    most = (world_size - 1) // 2
    return {
        "median": loft.Median(),
        "mean": loft.Mean(reproducible=True),
        "trimmed_mean": loft.TrimmedMean(f=most),
        "phocas": loft.Phocas(f=most),
        "robust": loft.Robust(f=most),
    }[name]


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
        transport=transport,
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
