"""A fit in plain words."""

from __future__ import annotations

from typing import Any

import numpy as np

from loft_hvd.balance.fit import Fit

__all__ = ["describe_fit", "fit_record"]

_NAMES = {
    "fetch_fixed_s": "fetch: fixed",
    "local_s": "fetch: a local sample",
    "remote_s": "fetch: a remote sample",
    "shared_s": "fetch: the shared source",
    "compute_fixed_s": "compute: fixed",
    "compute_s": "compute: a sample",
}


def describe_fit(fit: Fit, *, acts: bool = True) -> list[str]:
    """Return a line a rank: what its time is made of, what hides what, and what is not known.

    Args:
        fit: the newest models.
        acts: whether sizes follow from it.
    """
    held = "; it is kept at its equal share" if acts else ""
    model, lines = fit.model, []
    for rank in range(model.world_size):
        if fit.is_poor[rank]:
            reason = "no usable times" if fit.num_rows[rank] == 0 else "times that fit no model"
            lines.append(f"rank {rank}: {reason}{held}")
            continue
        overlap = float(model.overlap[rank])
        hides = {0.0: "one after the other", 1.0: "fully overlapped"}.get(
            overlap, f"{overlap:.0%} overlapped"
        )
        per_local, per_remote = model.local_s[rank], model.remote_s[rank] + model.shared_s[rank]
        saturates = f", no cheaper below {fit.knee[rank]:.0f} samples" if fit.knee[rank] > 0 else ""
        line = (
            f"rank {rank}: fetch {1e3 * model.fetch_fixed_s[rank]:.2f} ms + "
            f"{1e3 * per_local:.3f} ms a local and {1e3 * per_remote:.3f} ms a remote sample; "
            f"compute {1e3 * max(model.compute_fixed_s[rank], 0.0):.2f} ms + "
            f"{1e3 * model.compute_s[rank]:.3f} ms a sample{saturates}; {hides}"
        )
        if np.isfinite(model.hits[rank]):
            line += f"; {model.hits[rank]:.0f} samples of a global batch are local"
        if fit.unclear[rank]:
            terms = ", ".join(_NAMES[name] for name in fit.unclear[rank])
            line += f"; cannot be told apart yet: {terms}"
        lines.append(line)
    return lines


def fit_record(fit: Fit) -> list[dict[str, Any]]:
    """Return what a fit says of each rank, JSON-able: terms in seconds, [world_size] entries."""
    model = fit.model
    terms = ("fetch_fixed_s", "local_s", "remote_s", "shared_s", "compute_fixed_s", "compute_s")
    return [
        {
            **{term: float(getattr(model, term)[rank]) for term in terms},
            "knee": float(fit.knee[rank]),
            "overlap": float(model.overlap[rank]),
            "hits": float(model.hits[rank]),
            "is_poor": bool(fit.is_poor[rank]),
            "unclear": list(fit.unclear[rank]),
        }
        for rank in range(model.world_size)
    ]
