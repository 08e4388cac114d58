"""Sparse gradients under a mean: the rows that ranks have touched travel, and nothing else.

As with Horovod, every rank's rows go to every rank, which adds them up. Each rank receives
``n * m`` rows with their indices, where ``m`` is the most that any of the n ranks has touched: few
beside a large table, more than the table when ranks touch most of it; ``sparse_as_dense=True`` is
the way out there. A rank's own rows are added up before they travel.

Who has a sparse gradient is known once there is one. So ranks agree on it in the first step, whose
gradients travel dense; one that is dense or missing everywhere in that step stays so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loft_hvd.transport.base import Channel

__all__ = ["agree_on_sparse", "as_sparse", "sum_sparse"]


def agree_on_sparse(channel: Channel, sparse_dims: Sequence[int]) -> tuple[int, ...]:
    """Return the sparse dimensions of each parameter's gradient; every rank calls it alike.

    Args:
        channel: the ranks.
        sparse_dims: of each gradient as this rank has seen it, 0 for dense or none.

    Returns:
        The most that any rank has seen, [num_parameters].
    """
    rows = channel.sub("sparse").allgather_rows(torch.tensor(sparse_dims, dtype=torch.int64))
    return tuple(rows.amax(dim=0).tolist())


def as_sparse(gradient: Tensor | None, like: Tensor, sparse_dim: int) -> Tensor:
    """Return a gradient of ``like``'s shape as a sparse one, each index once; None is empty."""
    if gradient is None:
        indices = torch.zeros(sparse_dim, 0, dtype=torch.int64, device=like.device)
        values = like.new_zeros(0, *like.shape[sparse_dim:])
        gradient = torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=True)
    elif gradient.layout == torch.strided:
        gradient = gradient.to_sparse(sparse_dim)
    elif gradient.sparse_dim() != sparse_dim:  # rare: of two layers that share a parameter
        gradient = gradient.to_dense().to_sparse(sparse_dim)
    return gradient.coalesce()


def sum_sparse(channel: Channel, gradients: Sequence[Tensor], *, name: str) -> list[Tensor]:
    """Add sparse gradients up over ranks; every rank calls it alike.

    Args:
        channel: the ranks; it waits for them.
        gradients: of some parameters, from ``as_sparse``; alike on every rank but for which indices
            each has.
        name: stem of the operations' names.

    Returns:
        The sums, sparse, each index once.
    """
    channel = channel.sub(name)
    own = torch.tensor([gradient._nnz() for gradient in gradients])
    counts = channel.sub("counts").allgather_rows(own)  # [world_size, len(gradients)]
    received, works = [], []
    for at, gradient in enumerate(gradients):
        most = int(counts[:, at].max())
        pair = gradient.indices().t(), gradient.values()  # [nnz, sparse_dim], [nnz, ...]
        parts = []
        for part, values in zip(("indices", "values"), pair, strict=True):
            # An all-gather is of equal rows: a rank that has fewer pads them.
            sent = values.new_zeros(most, *values.shape[1:])
            sent[: len(values)] = values
            rows = sent.new_empty(channel.world_size, *sent.shape)
            if most:
                work = channel.transport.allgather(
                    sent.view(-1), rows.view(-1), name=f"{channel.name}.{at:02d}.{part}"
                )
                works.append((work, sent))  # which must live until it is done
            parts.append(rows)
        received.append(parts)
    for work, _ in works:
        channel.wait(work, what=f"sparse gradients {channel.name!r}")
    return [
        _join(gradient, indices, values, counts[:, at].tolist())
        for at, (gradient, (indices, values)) in enumerate(zip(gradients, received, strict=True))
    ]


def _join(gradient: Tensor, indices: Tensor, values: Tensor, counts: list[int]) -> Tensor:
    """Return the sum of ranks' rows, of which each rank's first ``counts`` are real."""
    taken = [
        torch.cat([rows[:n] for rows, n in zip(part, counts, strict=True)])
        for part in (indices, values)
    ]
    # Indices come from other ranks: one out of range is an error here, not a wild write.
    joined = torch.sparse_coo_tensor(taken[0].t(), taken[1], gradient.shape, check_invariants=True)
    return joined.coalesce()
