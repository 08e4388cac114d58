"""What a global batch is worth: how far a step goes with it, by the noise of gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GradientNoise"]


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
