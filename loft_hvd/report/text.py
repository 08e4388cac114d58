"""A run log in plain text: its plans, and which rank was slow and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loft_hvd.balance.explain import RankTimes, describe
from loft_hvd.errors import DataError

__all__ = ["render_text"]


def render_text(entries: Sequence[dict[str, Any]]) -> str:
    """Say what a run log holds.

    Args:
        entries: what ``read_run_log`` returned.

    Raises:
        DataError: a line lacks one of its fields.
    """
    lines = []
    last: dict[str, dict[str, Any]] = {}
    try:
        for entry in entries:
            kind = entry["kind"]
            last[kind] = entry
            if kind == "run":
                lines.append(
                    f"{entry['world_size']} ranks, global_batch_size="
                    f"{entry['global_batch_size']}, policy {entry['policy']}"
                )
            elif kind == "plan":
                lines.append(
                    f"plan {entry['plan_id']} from step {entry['first_step']}: "
                    f"sizes {entry['sizes']}"
                )
        if "times" in last:
            lines.append(f"times up to step {last['times']['step']}:")
            lines.append(describe([RankTimes(**rank) for rank in last["times"]["ranks"]]))
        else:
            lines.append("no times yet")
        if "explain" in last:
            lines.append(last["explain"]["text"])
        if "full" in last:
            lines.append(f"the log was full at step {last['full']['step']}")
    except (KeyError, TypeError) as error:
        raise DataError(
            f"report: a {kind!r} line lacks or has too many fields ({error})"
        ) from error
    return "\n".join(lines)
