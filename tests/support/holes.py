"""Rows of which blocks did not come."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.filling import Holes
from loft_hvd.aggregation.reference import filled
from loft_hvd.aggregation.rules import Mean, Rule
from tests.support.gradients import CANONICAL_NAN, bits


def draw_holes(
    shape: tuple[int, int],
    *,
    block_numel: int,
    shares: float | npt.ArrayLike,
    own: int,
    least: int,
    seed: int | np.random.Generator,
) -> Holes:
    """Draw which blocks of rows of ``shape`` did not come, of each row so large a share.

    The own row has them all. Of every block ``least`` rows came, beside rows drawn by chance.
    """
    source = np.random.default_rng(seed)
    num_rows, numel = shape
    num_blocks = -(-numel // block_numel)
    wanted = np.broadcast_to(np.asarray(shares, np.float64), (num_rows,)).copy()
    wanted[own] = 0.0
    missing = source.random((num_rows, num_blocks)) < wanted[:, None]
    order = source.random((num_rows, num_blocks))
    order[own] = -1.0
    missing[np.argsort(order, axis=0)[:least], np.arange(num_blocks)] = False
    return Holes(torch.from_numpy(missing.astype(np.uint8)), block_numel)


def is_filled(holes: Holes, numel: int) -> Tensor:
    """Return which values of rows lie in a hole, [num_rows, numel]."""
    return holes.missing.bool().repeat_interleave(holes.block_numel, dim=1)[:, :numel]


def least_rows(rule: Rule) -> int:
    """Return how many rows of a block must come, the own one among them."""
    return 2 if isinstance(rule, Mean) else rule.min_rows


def expected_filled(
    gradients: Tensor,
    holes: Holes,
    rule: Rule,
    *,
    own: int,
    weights: list[int] | None = None,
    present: list[bool] | None = None,
) -> Tensor:
    """Return rows filled by the definition, in the kernels' arithmetic; what came has its bits."""
    dtype = gradients.dtype
    precision = np.float64 if dtype == torch.float64 else np.float32
    wide = (gradients.double() if dtype == torch.float64 else gradients.float()).numpy()
    values = filled(
        wide,
        holes.missing.numpy(),
        holes.block_numel,
        rule,
        own=own,
        weights=weights,
        present=present,
        precision=precision,
    )
    made = torch.from_numpy(values).to(dtype)
    made = bits(made).masked_fill(made.isnan(), CANONICAL_NAN[dtype]).view(dtype)
    counts = torch.ones(len(gradients), dtype=torch.bool)
    if weights is not None:
        counts &= torch.tensor(weights) > 0
    if present is not None:
        counts &= torch.tensor(present)
    is_made = is_filled(holes, gradients.shape[1]) & counts[:, None]
    return torch.where(is_made, made, gradients)
