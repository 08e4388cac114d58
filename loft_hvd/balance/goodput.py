"""What a global batch is worth: how far a step goes with it, by the noise of gradients. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["LR_RULES", "BatchWorth", "GradientNoise", "LrRule", "candidates", "efficiency", "weigh"]

_SIGMAS = 2.0  # standard errors that a sure gain is above nothing


@dataclass(frozen=True)
class GradientNoise:
    """How much gradients differ from sample to sample, as measured lately.

    ``G`` is the mean of all samples' gradients, ``S`` their covariance. Errors are standard ones.

    Attributes:
        signal: an unbiased estimate of ``|G|^2``; below 0 where noise hides it.
        variance: one of ``tr(S)``, of single samples.
        scale_error: of ``scale``, in samples; infinite where that is.
        num_steps: optimizer steps that it is of.
    """

    signal: float
    signal_error: float
    variance: float
    variance_error: float
    scale_error: float
    num_steps: int

    @property
    def scale(self) -> float:
        """The gradient noise scale ``tr(S) / |G|^2``, in samples (arXiv 1812.06162).

        A batch of so many samples has as much noise as signal. Infinite where noise hides it.
        """
        return self.variance / self.signal if self.signal > 0 else math.inf

    def of_passes(self, num_passes: int) -> GradientNoise:
        """Return it for global batches of one backward pass, where a step adds up several."""
        return replace(
            self,
            variance=self.variance / num_passes,
            variance_error=self.variance_error / num_passes,
            scale_error=self.scale_error / num_passes,
        )

    def describe(self, global_batch_size: int) -> str:
        """Say what it means for a global batch."""
        if not math.isfinite(self.scale):
            return f"gradients' noise hid their mean over {self.num_steps} steps: no scale is known"
        share = self.scale / (self.scale + global_batch_size)
        return (
            f"gradient noise scale: {self.scale:.3g} samples (+- {1.96 * self.scale_error:.2g}), "
            f"over {self.num_steps} steps; with {global_batch_size} a step, a sample brings "
            f"{share:.0%} of what it would bring in a small batch"
        )


@dataclass(frozen=True)
class BatchWorth:
    """What another global batch would bring."""

    global_batch_size: int
    share: float  # of the progress a second, more than now; below 0 where it is less
    error: float  # the standard error of ``share``

    @property
    def sure(self) -> float:
        """The share that is won surely; negative where nothing is."""
        return self.share - _SIGMAS * self.error


def efficiency(scale: float, global_batch_size: int, base: int) -> float:
    """Return what a sample brings in a global batch, over what it brings in the base one.

    ``(scale + base) / (scale + global_batch_size)`` by the noise scale, after Pollux (OSDI 2021).
    """
    if math.isinf(scale):
        return 1.0
    return (scale + base) / (scale + global_batch_size)


def weigh(
    noise: GradientNoise, now: int, then: int, *, now_s: float, then_s: float, error_s: float
) -> BatchWorth:
    """Say what global batch ``then`` would bring in place of ``now``.

    Progress a second is goodput: samples a second times ``efficiency``.

    Args:
        noise: of the gradients.
        now: samples of a step.
        then: likewise, with another global batch.
        now_s: seconds of a step.
        then_s: likewise, with the other one.
        error_s: the standard error of their difference.
    """
    ratio = then / now * now_s / then_s * efficiency(noise.scale, then, now)
    by_noise = 0.0
    if math.isfinite(noise.scale):
        by_noise = (1 / (noise.scale + now) - 1 / (noise.scale + then)) * noise.scale_error
    return BatchWorth(then, ratio - 1.0, ratio * math.hypot(error_s / then_s, by_noise))


def candidates(now: int, least: int, most: int) -> list[int]:
    """Return the global batches that may follow on ``now``: up to twice and half as many."""
    found = [round(now * 2**power) for power in (-1.0, -0.5, 0.5, 1.0)]
    within = dict.fromkeys(min(max(each, least), most) for each in found)
    return [each for each in within if each != now]


LrRule = Callable[[int, int, float], float]
"""``(global batch, the base one, noise scale)`` to the factor on the learning rate."""


def adascale(global_batch_size: int, base: int, scale: float) -> float:
    """Return how far a step of a large batch goes, in steps of the base one (arXiv 2007.05105).

    From the ratio of both where noise is all there is, to 1 where there is none.
    """
    if math.isinf(scale):
        return global_batch_size / base
    return (scale / base + 1) / (scale / global_batch_size + 1)


def linear(global_batch_size: int, base: int, scale: float) -> float:
    """Return the ratio of both global batches (arXiv 1706.02677)."""
    del scale
    return global_batch_size / base


def square_root(global_batch_size: int, base: int, scale: float) -> float:
    """Return the square root of their ratio, for optimizers like Adam (arXiv 2205.10287)."""
    del scale
    return math.sqrt(global_batch_size / base)


LR_RULES: dict[str, LrRule] = {"adascale": adascale, "linear": linear, "sqrt": square_root}
