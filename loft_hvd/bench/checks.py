"""Before anything is timed: every contestant against the definition, on rows made to break it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.reference import reference, window
from loft_hvd.bench.contestants import (
    Contestant,
    Place,
    called_level,
    contestants,
    pass_calls,
    rules_of,
)
from loft_hvd.errors import AggregationError

__all__ = ["check_contestants", "check_rules", "check_threads", "hard_rows"]

_NUMEL = 4099  # vectors of every width, and a rest
_POISON = -3e33  # what no result is: outputs hold it before a call


def hard_rows(rows: int) -> Tensor:
    """Return float32 [rows, 4099] with ties, zeros of both signs, NaN, infinities and 1e30.

    From three rows on the last one is all NaN, infinite or 1e30, which one wrong row may be. In a
    stretch more rows are so than any rule tolerates.
    """
    random = np.random.default_rng(rows)
    values = random.standard_normal((rows, _NUMEL)).astype(np.float32)
    values[:, 1000:2000] = np.round(2 * values[:, 1000:2000]) / 2  # ties and zeros of both signs
    values[:, 2000:2100] = values[0, 2000:2100]  # all alike
    if rows >= 3:  # fewer tolerate none
        values[-1, ::3], values[-1, 1::3], values[-1, 2::3] = np.nan, np.inf, 1e30
    special = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0], np.float32)
    values[:, 3000:3200] = random.choice(special, (rows, 200))
    return torch.from_numpy(values)


def check_rules(rows: int, *, device: torch.device | None = None) -> None:
    """Compare every rule, as ``aggregate`` runs it on a device, with its definition.

    Raises:
        AggregationError: a result differs in a bit.
    """
    pool = hard_rows(rows)
    gradients = pool.to(device or "cpu")
    for name, rule in rules_of(rows).items():
        out = torch.full((_NUMEL,), _POISON, device=gradients.device)
        aggregate(gradients, rule, out=out)
        _compare(name, rows, out.cpu(), _wanted(Contestant(name, rule, rows), pool))


def check_contestants(module: Any, rows: int, levels: Sequence[str]) -> None:
    """Compare every contestant of a row count with the definition, at every level, and the passes.

    Args:
        module: the extension.
        rows: row count.
        levels: instruction sets. The first one's bits are compared with the definition's, in the
            precision of the kernels; every other one's with the first one's.

    Raises:
        AggregationError: a result differs in a bit, or a row's diagnosis is wrong.
    """
    pool = hard_rows(rows)
    total = torch.zeros(_NUMEL)
    for row in pool:
        total += row
    kept: dict[str, tuple[Tensor, object]] = {}
    for level in levels:
        place = Place(module, pool, torch.empty(_NUMEL), level)
        for name, call in pass_calls(place).items():
            place.out.fill_(_POISON)
            call()
            _compare(f"{name}, {level},", rows, place.out, total)
        for contestant in contestants(rows, is_called=level == called_level(module)):
            found = _run(contestant, place)
            name = f"{contestant.name}, {level},"
            if contestant.name in kept:
                first, first_diagnosis = kept[contestant.name]
                _compare(name, rows, found[0], first)
                if found[1] != first_diagnosis:
                    raise AggregationError(f"bench kernels: {name} of {rows} rows diagnoses others")
                continue
            _compare(name, rows, found[0], _wanted(contestant, pool))
            if contestant.every:
                _check_diagnosis(name, contestant, pool, found[1])
            kept[contestant.name] = found


def check_threads(one: Place, many: Place) -> None:
    """Compare what all contestants give by one thread and by several, bit by bit.

    Args:
        one: a place with one thread.
        many: the same rows, result and level with more; with enough bytes a thread, which the
            rows of ``check_contestants`` are too few for.

    Raises:
        AggregationError: a result differs.
    """
    rows = len(one.pool)
    pairs = [(name, call, pass_calls(many)[name]) for name, call in pass_calls(one).items()]
    for contestant in contestants(rows, is_called=False):
        pairs.append((contestant.name, contestant.call(one), contestant.call(many)))
    for name, call, other in pairs:
        one.out.fill_(_POISON)
        call()
        wanted = one.out.clone()
        many.out.fill_(_POISON)
        other()
        if not torch.equal(wanted.view(torch.int32), many.out.view(torch.int32)):
            raise AggregationError(
                f"bench kernels: {name} of {rows} rows differs with {many.threads} threads"
            )


def _run(contestant: Contestant, place: Place) -> tuple[Tensor, object]:
    """Return the result on poisoned output, and the diagnosis or None."""
    place.out.fill_(_POISON)
    found = contestant.call(place)()
    result = contestant.values(place.out[None])[0].clone()
    return result, found if contestant.every else None


def _wanted(contestant: Contestant, pool: Tensor) -> Tensor:
    """Return what the definition gives in the kernels' precision, as the contestant's dtype."""
    values = contestant.values(pool).float().numpy()
    wanted = reference(
        values, contestant.rule, weights=contestant.weights, precision=np.dtype(np.float32)
    )
    return torch.from_numpy(wanted).to(contestant.dtype)


def _compare(name: str, rows: int, found: Tensor, wanted: Tensor) -> None:
    """Raise unless every value is the same, zeros in their sign too; NaN is NaN."""
    is_number = (found == wanted) & (found.signbit() == wanted.signbit())
    is_same = is_number | (found.isnan() & wanted.isnan())
    if not bool(is_same.all()):
        at = int((~is_same).nonzero()[0])
        raise AggregationError(
            f"bench kernels: {name} of {rows} rows differs from its definition in "
            f"{int((~is_same).sum())} of {len(is_same)} coordinates, the first of them {at}: "
            f"{float(found[at]):g} instead of {float(wanted[at]):g}"
        )


def _check_diagnosis(name: str, contestant: Contestant, pool: Tensor, diagnosis: Any) -> None:
    """Raise unless the counts of each row are those of the definition's window."""
    values = contestant.values(pool).numpy()
    low, high = window(values, contestant.rule, precision=np.dtype(np.float32))
    is_nan = np.isnan(values)  # above +inf
    is_below = (values < low) | (~is_nan & np.isnan(low))
    is_above = (values > high) | (is_nan & ~np.isnan(high))
    wanted = (
        values.shape[1],
        (is_below | is_above).sum(axis=1).tolist(),
        (~np.isfinite(values)).sum(axis=1).tolist(),
    )
    seen, outside, non_finite, _ = diagnosis
    if (seen, list(outside), list(non_finite)) != wanted:
        raise AggregationError(
            f"bench kernels: {name} of {pool.shape[0]} rows finds (coordinates, outside, not "
            f"finite) = {(seen, outside, non_finite)}; by its definition it is {wanted}"
        )
