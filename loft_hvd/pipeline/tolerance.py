"""What a loss-tolerant gather may lose under a rule, and which rules it is for."""

from __future__ import annotations

from collections.abc import Sequence

from loft_hvd.aggregation.rules import Custom, Mean, Rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression, Wire
from loft_hvd.transport.base import LossLimits
from loft_hvd.transport.datagram import LossTolerant

__all__ = ["Spans", "check_gather", "loss_limits"]

Spans = tuple[tuple[int, int], ...]
"""Parts of some values, each (begin, end)."""


def check_gather(
    gather: LossTolerant | None,
    rules: Sequence[Rule],
    num_rows: int,
    *,
    what: str,
    wire: Wire = Compression.none,
    audit: float = 0.0,
) -> None:
    """Raise unless rows of these rules may travel so.

    Args:
        gather: what was asked for.
        rules: that aggregate the rows.
        num_rows: of ranks, or of groups.
        what: was asked, for errors.
        wire: the format in which values travel.
        audit: audits of shard owners a step.

    Raises:
        ArgumentTypeError: it is no ``LossTolerant``.
        ArgumentError: a rule needs all rows, or another option what they are exactly.
    """
    if gather is None:
        return
    if not isinstance(gather, LossTolerant):
        raise ArgumentTypeError(
            f"{what}: gather={gather!r} is of type {type(gather).__name__}; give "
            "loft.LossTolerant(), or leave it away"
        )
    if gather.reliable or num_rows == 1:
        return
    if audit > 0:
        raise ArgumentError(
            f"{what}: audit={audit:g} does not go with gather=LossTolerant(): an auditor gets rows "
            "again, without the blocks that were lost, and would find another result; use "
            "LossTolerant(reliable=True), or leave audit= away"
        )
    if not isinstance(wire, Compression):
        raise ArgumentError(
            f"{what}: compression={wire!r} does not go with gather=LossTolerant(): what your "
            "format makes of values cannot be filled in where a part of it is lost; use "
            "Compression.none, .fp16 or .bf16, or LossTolerant(reliable=True)"
        )
    for rule in rules:
        if isinstance(rule, Custom) or (isinstance(rule, Mean) and rule.reproducible):
            raise ArgumentError(
                f"{what}: {rule} does not go with gather=LossTolerant(): nobody knows what stands "
                "for a part of a row that was lost, and means would differ from run to run; use "
                "another rule, or LossTolerant(reliable=True)"
            )
        if not isinstance(rule, Mean) and num_rows < rule.min_rows + 1:
            raise ArgumentError(
                f"{what}: {rule} needs {rule.min_rows} rows at each value and there are "
                f"{num_rows}, so none may be lost, and gather=LossTolerant() gains nothing; use a "
                f"smaller f, {rule.min_rows + 1} ranks or more, or LossTolerant(reliable=True)"
            )


def loss_limits(
    rule: Rule, num_rows: int, weights: PassWeights | None, *, own: int, critical: Spans = ()
) -> LossLimits:
    """Return what may be missing of the rows of a rule, of which this rank has ``own``."""
    present = (True,) * num_rows if weights is None else weights.present
    num_present = sum(present)
    if isinstance(rule, Mean):  # filled from those that have travelled, of which one must be there
        most = num_present - present[own] - 1
    else:  # a median takes any number of rows, but of few of them one wrong row is half
        most = num_present - max(rule.min_rows, num_present // 2 + 1 if rule.counts_weight else 1)
    return LossLimits(max(0, most), present, critical)
