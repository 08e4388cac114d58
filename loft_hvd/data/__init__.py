"""The data room: who holds which sample, who computes it, and how it reaches the training loop."""

from __future__ import annotations

from loft_hvd.data.blocks import BlockShuffle
from loft_hvd.data.loader import DataLoader
from loft_hvd.data.placement import Placement, Source
from loft_hvd.data.sampler import BatchSampler, PlanSource
from loft_hvd.data.shards import ParquetShards, TarShards
from loft_hvd.data.stream import StreamLoader

__all__ = [
    "BatchSampler",
    "BlockShuffle",
    "DataLoader",
    "ParquetShards",
    "Placement",
    "PlanSource",
    "Source",
    "StreamLoader",
    "TarShards",
]
