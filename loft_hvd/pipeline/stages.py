"""One bucket's way over the wire, as a small state machine that never blocks.

``SumReduction`` is the engine's own all-reduce. ``ShardReduction`` runs a rule on shard owners:

    ALL_TO_ALL  shard j of every rank travels to rank j
    ALL_GATHER  rank j has applied the rule to its rows, and its result travels to every rank
    DONE        the bucket holds the result, with the same bits on every rank

Both send 2 (n-1)/n of the bucket's bytes per rank, which is a ring all-reduce's traffic.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Rule
from loft_hvd.pipeline.buckets import shard_numel
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Transport, Work

__all__ = ["Compressor", "Reduction", "ShardReduction", "Stage", "SumReduction"]


class Compressor(Protocol):
    """A wire format: Horovod's ``Compression.none``, ``Compression.fp16`` or a user's own."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, of the same numel, and what ``decompress`` needs."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Undo ``compress`` on any number of values."""
        ...


class Stage(enum.Enum):
    """Where a bucket is."""

    IDLE = "idle"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    DONE = "done"


class Reduction(Protocol):
    """What the engine drives: one bucket, again and again."""

    stage: Stage

    @property
    def bucket(self) -> Tensor:
        """The flat values: this rank's before ``start``, the aggregated ones when DONE, [numel]."""
        ...

    def start(self, weights: PassWeights | None) -> None:
        """Put the bucket on the wire."""
        ...

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the bucket is DONE."""
        ...

    def memory_bytes(self) -> int:
        """Bytes of the buffers held, the bucket itself included."""
        ...


class SumReduction:
    """The engine's all-reduce (sum) of one bucket.

    Args:
        transport: the ranks.
        numel: values of the bucket.
        dtype: dtype of the bucket.
        device: where it lives.
        name: name of the operation, equal on every rank.
        compression: wire format, or None for the bucket's own dtype.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        numel: int,
        dtype: torch.dtype,
        device: str,
        name: str,
        compression: Compressor | None = None,
    ) -> None:
        self.stage = Stage.IDLE
        self._bucket = torch.zeros(numel, dtype=dtype, device=device)
        self._transport = transport
        self._name = name
        self._compression = compression
        self._wire = self._bucket
        self._context: Any = None
        self._work: Work | None = None

    @property
    def bucket(self) -> Tensor:
        """See ``Reduction.bucket``."""
        return self._bucket

    def start(self, weights: PassWeights | None) -> None:
        """Sum the bucket over ranks; its values are already scaled by the rank's share."""
        if self._compression is not None:
            wire, self._context = self._compression.compress(self._bucket)
            self._wire = wire.contiguous()
        self._work = self._transport.allreduce(self._wire, name=self._name)
        self.stage = Stage.ALL_REDUCE

    def advance(self) -> bool:
        """See ``Reduction.advance``."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.finish()
            if self._compression is not None:
                self._bucket.copy_(self._compression.decompress(self._wire, self._context))
            self.stage = Stage.DONE
        return self.stage is Stage.DONE

    def memory_bytes(self) -> int:
        """See ``Reduction.memory_bytes``."""
        return self._bucket.nbytes + (self._wire.nbytes if self._wire is not self._bucket else 0)


class ShardReduction:
    """A rule over one bucket, applied by shard owners.

    Args:
        transport: the ranks.
        numel: values of the bucket.
        dtype: dtype of the bucket.
        device: where it lives.
        rule: what rank j applies to everybody's shard j.
        name: stem of the operations' names, equal on every rank.
        compression: wire format, or None for the bucket's own dtype.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        numel: int,
        dtype: torch.dtype,
        device: str,
        rule: Rule,
        name: str,
        compression: Compressor | None = None,
    ) -> None:
        world_size = transport.world_size
        shard = shard_numel(numel, world_size)
        self.stage = Stage.IDLE
        self._transport = transport
        self._rule = rule
        self._name = name
        self._compression = compression
        self._numel = numel
        self._padded = torch.zeros(world_size * shard, dtype=dtype, device=device)
        self._rows = torch.zeros(world_size, shard, dtype=dtype, device=device)
        self._reduced = torch.zeros(shard, dtype=dtype, device=device)
        self._wire: Tensor | None = None
        self._context: Any = None
        self._weights: PassWeights | None = None
        self._work: Work | None = None

    @property
    def bucket(self) -> Tensor:
        """See ``Reduction.bucket``."""
        return self._padded[: self._numel]

    def start(self, weights: PassWeights | None) -> None:
        """Send every rank its shard of this rank's row."""
        self._weights = weights
        if self._numel == 0:
            self.stage = Stage.DONE
            return
        send, recv = self._padded, self._rows.view(-1)
        if self._compression is not None:
            wire, self._context = self._compression.compress(self._padded)
            send = wire.contiguous()
            recv = self._wire = torch.empty_like(send)
        self._work = self._transport.alltoall(send, recv, name=f"{self._name}.a2a")
        self.stage = Stage.ALL_TO_ALL

    def advance(self) -> bool:
        """See ``Reduction.advance``."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.finish()
            if self.stage is Stage.ALL_TO_ALL:
                self._aggregate()
                self._gather()
            else:
                if self._wire is not None and self._compression is not None:
                    self._padded.copy_(self._compression.decompress(self._wire, self._context))
                self.stage = Stage.DONE
        return self.stage is Stage.DONE

    def _aggregate(self) -> None:
        rows = self._rows  # [world_size, shard]
        if self._wire is not None and self._compression is not None:
            rows.view(-1).copy_(self._compression.decompress(self._wire, self._context))
        weights = self._weights
        aggregate(
            rows,
            self._rule,
            weights=None if weights is None else weights.weights,
            present=None if weights is None else weights.present,
            out=self._reduced,
        )

    def _gather(self) -> None:
        send, recv = self._reduced, self._padded
        if self._compression is not None and self._wire is not None:
            wire, self._context = self._compression.compress(self._reduced)
            send, recv = wire.contiguous(), self._wire
        self._work = self._transport.allgather(send, recv, name=f"{self._name}.ag")
        self.stage = Stage.ALL_GATHER

    def memory_bytes(self) -> int:
        """See ``Reduction.memory_bytes``."""
        held = (self._padded, self._rows, self._reduced, self._wire)
        return sum(tensor.nbytes for tensor in held if tensor is not None)
