"""The policies by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from loft_hvd.balance.loft import Loft
from loft_hvd.balance.policies import Fixed, LbBspCpu, LbBspGpu, Policy, Uniform
from loft_hvd.errors import ArgumentError

__all__ = ["POLICIES", "make_policy"]

POLICIES = (
    "loft",
    "uniform",
    "report",
    "lbbsp-cpu",
    "lbbsp-cpu:last",
    "lbbsp-cpu:ema",
    "lbbsp-cpu:busy",
    "lbbsp-gpu",
)


def make_policy(policy: str | Sequence[int] | Policy, *, dead_band: float = 0.03) -> Policy:
    """Return the policy that a name, or a list of every rank's samples, stands for.

    Raises:
        ArgumentError: no policy has that name.
    """
    if isinstance(policy, str):
        return _named_policy(policy, dead_band)
    if isinstance(policy, Sequence):
        return Fixed([int(size) for size in policy])
    return policy


def _named_policy(name: str, dead_band: float) -> Policy:
    base, _, kind = name.partition(":")
    if name not in POLICIES:
        raise ArgumentError(
            f"policy={name!r} is not known; it takes {', '.join(map(repr, POLICIES))}, or a list "
            "with every rank's samples, such as [96, 96, 48, 16]"
        )
    if base in ("loft", "report"):
        return Loft(dead_band=dead_band, acts=base == "loft")
    if base == "uniform":
        return Uniform()
    if base == "lbbsp-gpu":
        return LbBspGpu()
    predictor: Literal["last", "ema", "narx"] = "narx"
    if kind in ("last", "ema"):
        predictor = "last" if kind == "last" else "ema"
    return LbBspCpu(predictor, clock="busy" if kind == "busy" else "compute")
