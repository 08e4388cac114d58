"""A training run on ranks that are threads, with a clock of its own and a live balancer."""

from __future__ import annotations

from typing import Any

import loft_hvd as loft
from loft_hvd.transport import waits
from loft_hvd.transport.local import LocalTransport
from tests.support.clock import Clock

__all__ = ["Run"]

SECONDS = (1e-2, 3e-2)  # a sample, on each of two ranks


class Run:
    """One rank of a training run in which rank 1 takes three times as long a sample."""

    def __init__(
        self, transport: LocalTransport, state: dict[str, Any] | None = None, **given: Any
    ) -> None:
        self.clock = Clock()
        settings: dict[str, Any] = {"policy": "loft", "interval": 20} | given
        self.balancer = loft.Balancer(64, transport=transport, clock=self.clock, **settings)
        if state is not None:
            self.balancer.load_state_dict(state)
        self.sizes: list[tuple[int, ...]] = []  # of each step trained

    def compute(self, num_samples: int) -> None:
        """Take the batch that was begun through an optimizer's step."""
        balancer, clock = self.balancer, self.clock
        taken = balancer.take_step()
        assert num_samples == taken.sizes[balancer.rank]
        seconds = [size * each for size, each in zip(taken.sizes, SECONDS, strict=True)]
        clock.now += seconds[balancer.rank]
        balancer.gradient_arrived(blocked_s=0.0)
        balancer.computing_ended()
        waited_s = max(seconds) - seconds[balancer.rank]
        clock.now += waited_s
        waits.add(waited_s)
        balancer.step_ended()
        self.sizes.append(taken.sizes)

    def step(self, num_samples: int | None = None) -> None:
        """Train on a batch of a loader that is not loft's."""
        num_samples = num_samples or self.balancer.local_batch_size
        with self.balancer.step(num_samples):
            self.compute(num_samples)
