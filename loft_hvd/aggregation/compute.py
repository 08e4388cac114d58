"""Run a rule on rows that were already checked: the extension, or plain torch without it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loft_hvd._native import explain_missing, extension
from loft_hvd.aggregation import fallback
from loft_hvd.aggregation.inputs import Row
from loft_hvd.aggregation.rules import Rule

__all__ = ["aggregate_rows"]


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        f"{explain_missing()}. Until then rules run in plain torch, several times slower",
        RuntimeWarning,
        stacklevel=2,
    )


def aggregate_rows(
    rows: Sequence[Row], rule: Rule, *, weights: Sequence[int] | None, out: Row
) -> None:
    """Aggregate into ``out`` the rows that count.

    Args:
        rows: 1-D with unit stride, one dtype, one device, as ``Rows`` holds them; none absent.
        rule: any rule but ``Custom``, already checked against the rows.
        weights: a weight above 0 for each row, or None.
        out: like a row, overlapping none.
    """
    if out.shape[0] == 0:
        return
    if weights is not None:
        divisor = functools.reduce(math.gcd, weights)
        weights = [weight // divisor for weight in weights]
        if max(weights) == 1:
            weights = None  # equal weights: the same bits, faster
    if extension() is None:
        _warn_once()
    fallback.aggregate_rows(
        [_as_tensor(row) for row in rows], rule, weights=weights, out=_as_tensor(out)
    )


def _as_tensor(row: Row) -> Tensor:
    if isinstance(row, Tensor):
        return row
    return torch.from_numpy(row if row.flags.writeable else np.array(row))
