"""How fast a job runs, by the published models: parameter servers and a ring.

``ps``: a worker does ``1 / (tau + 2 gamma g / (b F))`` samples a second, with ``tau`` seconds a
sample, ``gamma`` workers a server, ``g`` bytes of the model and ``F`` samples of all workers, after
PD-ORS (arXiv 2108.02917). ``ring``: a step takes ``(g (w-1)/w) (2/b + 1/R) + t_f M + t_b + lat``,
with ``w`` workers of ``M`` samples each, reduction at ``R`` bytes a second, ``t_f`` forward seconds
a sample and ``t_b`` backward seconds, after GADGET (INFOCOM 2022). In both ``b`` is the bandwidth
inside a machine if all workers are on one, else that of the slowest link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ParameterServers", "Ring"]


@dataclass(frozen=True)
class ParameterServers:
    """A job with parameter servers."""

    sample_s: float
    model_bytes: float
    global_batch_size: float
    workers_per_server: float = 1.0

    def samples_per_s(self, workers: int, bytes_per_s: float) -> float:
        """Return what all workers do in a second."""
        sent_s = 2.0 * self.workers_per_server * self.model_bytes
        sent_s /= bytes_per_s * self.global_batch_size
        return workers / (self.sample_s + sent_s)


@dataclass(frozen=True)
class Ring:
    """A job on a ring."""

    forward_s: float  # a sample
    backward_s: float  # a step
    model_bytes: float
    latency_s: float = 0.0
    reduced_bytes_per_s: float = math.inf

    def step_s(self, workers: int, batch: float, bytes_per_s: float) -> float:
        """Return what a step of ``batch`` samples a worker takes."""
        sent = self.model_bytes * (workers - 1) / workers
        exchange_s = sent * (2.0 / bytes_per_s + 1.0 / self.reduced_bytes_per_s)
        return exchange_s + self.forward_s * batch + self.backward_s + self.latency_s
