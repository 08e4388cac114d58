"""Ranks whose world changes under them, as in an elastic job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.config import config
from loft_hvd.transport.local import LocalTransport

__all__ = ["Moving", "Paired", "elastic_job", "environment"]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Give this process other variables inside, as a launcher would."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        config.cache_clear()
        try:
            yield
        finally:
            config.cache_clear()


def elastic_job() -> AbstractContextManager[None]:
    """Let this be an elastic job inside, whose waits are short."""
    return environment(HOROVOD_ELASTIC="1", LOFT_HVD_TIMEOUT_S="10")


class Moving:
    """A transport that can be moved to another world, as Horovod's is when it is elastic."""

    def __init__(self, end: LocalTransport) -> None:
        self.end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)

    def subset(self, parts: Sequence[tuple[int, ...]]) -> LocalTransport:
        return self.end.subset(parts)


class Paired:
    """What one rank of a job holds that trims a gradient at each end, of ranks or of nodes."""

    def __init__(
        self, end: LocalTransport, over: Any = "nodes", balancer: loft.Balancer | None = None
    ) -> None:
        self.moving = Moving(end)
        self.weight = torch.nn.Parameter(torch.zeros(5))
        if balancer is None:
            balancer = loft.Balancer(120, policy="uniform", transport=self.moving)
        self.balancer = balancer
        self.optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=1.0),
            [("weight", self.weight)],
            rule=loft.TrimmedMean(f=1),
            over=over,
            balancer=self.balancer,
            transport=self.moving,
        )

    def begin_world(self, end: LocalTransport) -> None:
        """Go to another world, as ``loft.elastic.State`` does."""
        self.moving.end = end
        with torch.no_grad():  # the state that all ranks take from rank 0
            self.weight.zero_()
        self.balancer.begin_world()
        self.optimizer.begin_world()

    def gradient(self, value: float) -> float:
        """Train a step with this gradient of this rank's, and return the reduced one."""
        self.optimizer.zero_grad()
        with self.balancer.step(self.balancer.local_batch_size):
            (self.weight * value).sum().backward()
            self.optimizer.step()
        assert self.weight.grad is not None
        return float(self.weight.grad[3])
