"""Gradients that are hard on rules, and comparison by bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.diagnostics import Diagnostics
from loft_hvd.aggregation.fallback import BLOCK
from loft_hvd.aggregation.reference import reference, window
from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import RULES, Mean, Median, Rule

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# What docs/rules.md promises for every NaN of a result, as stored bits.
CANONICAL_NAN = {
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8000000000000,
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
}

_SPECIAL: tuple[float, ...] = (
    float("nan"),
    -float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    3e38,
    -3e38,
)
_SPECIAL += (6e4, -6e4, 1e-42, 1e-7, 1.0, 1.0)


def hard_gradients(rows: int, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Return [rows, numel] with NaN, infinities, zeros of both signs, huge values and ties."""
    source = np.random.default_rng(seed)
    values = source.standard_normal((rows, numel))
    picks = source.random((rows, numel))
    for place, special in enumerate(_SPECIAL):
        values[(picks > 0.02 * place) & (picks < 0.02 * (place + 1))] = special
    return torch.from_numpy(values).to(dtype)


def rules_for(rows: int) -> list[Rule]:
    """Return every kind of rule that ``rows`` rows allow, with few and with most f."""
    rules: list[Rule] = [Mean(), Median(), Median("lower"), Median("upper")]
    trimming = [name for name, kind in RULES.items() if kind not in (Mean, Median)]
    for f in sorted({0, 1, (rows - 1) // 4, (rows - 1) // 2}):
        if 2 * f < rows:
            rules += [parse_rule(f"{name}:f={f}") for name in trimming]
    return rules


def expected(
    gradients: Tensor, rule: Rule, *, weights: list[int] | None = None, present: Any = None
) -> Tensor:
    """Return the reference's result in the kernels' arithmetic, rounded to the dtype.

    NumPy leaves open which NaN comes out of ``inf - inf``; here every NaN is the canonical one.
    """
    precision = np.float64 if gradients.dtype == torch.float64 else np.float32
    wide = gradients.double() if gradients.dtype == torch.float64 else gradients.float()
    result = reference(wide.numpy(), rule, weights=weights, present=present, precision=precision)
    rounded = torch.from_numpy(result).to(gradients.dtype)
    rounded = bits(rounded).masked_fill(rounded.isnan(), CANONICAL_NAN[rounded.dtype])
    return rounded.view(gradients.dtype)


def as_found(
    gradients: Tensor, result: Tensor, rule: Rule, weights: list[int] | None = None, every: int = 1
) -> Diagnostics:
    """Count by the definition what ``Diagnostics`` says that it counts, in one block of ``every``.

    All rows are present; rules that see rows have no window.
    """
    blocks = range(0, gradients.shape[1], BLOCK * every)
    looked_at = torch.cat([torch.arange(at, at + BLOCK) for at in blocks] or [torch.arange(0)])
    looked_at = looked_at[looked_at < gradients.shape[1]]
    rows, out = gradients[:, looked_at].double().numpy(), result[looked_at].double().numpy()
    precision = np.float64 if gradients.dtype == torch.float64 else np.float32
    low, high = np.full_like(out, -np.inf), np.full_like(out, np.nan)
    if not rule.sees_rows:
        low, high = window(rows, rule, weights=weights, precision=precision)
    is_nan = np.isnan(rows)
    with np.errstate(all="ignore"):
        above = (rows > high) | (is_nan & ~np.isnan(high))
        below = (rows < low) | (np.isnan(low) & ~is_nan)
        distance = rows - out
        squared = np.where(np.isfinite(distance), distance**2, 0).sum(axis=1)
    return Diagnostics(
        (rows.shape[1],) * len(rows),
        tuple((above | below).sum(axis=1).tolist()),
        tuple((~np.isfinite(rows)).sum(axis=1).tolist()),
        tuple(squared.tolist()),
        *((0.0,) * len(rows),) * 3,  # by rules that see rows only
    )


def bits(values: Tensor | npt.NDArray[Any]) -> Tensor:
    """Return the stored bits as integers, so that equality is bit for bit."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.contiguous().view(width)


def assert_same_bits(actual: Tensor | npt.NDArray[Any], wanted: Tensor) -> None:
    """Fail with the first coordinates whose stored bits differ, those of NaN included."""
    has, should = bits(actual), bits(wanted)
    places = (has != should).nonzero().flatten()[:3].tolist()
    assert not places, [
        (i, float(actual[i]), hex(has[i]), float(wanted[i]), hex(should[i])) for i in places
    ]
