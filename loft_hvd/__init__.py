"""Train with Horovod across unequal machines and unreliable workers.

Every rank gets the batch it can finish in time, and a few wrong gradients cannot spoil the update.
"""

from loft_hvd import attacks, elastic
from loft_hvd.accelerated import AcceleratorLink, PreparedLoader, accelerator_link
from loft_hvd.aggregation.aggregate import (
    aggregate,
    mean,
    mean_around_median,
    median,
    phocas,
    trimmed_mean,
)
from loft_hvd.aggregation.diagnostics import Diagnostics, diagnose
from loft_hvd.aggregation.row_rules import (
    ARC,
    CAF,
    NNM,
    Bucketing,
    Bulyan,
    CentredClipping,
    Clip,
    GeometricMedian,
    MinimumDiameter,
    MultiKrum,
    PrincipalAxis,
    Robust,
)
from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import (
    Custom,
    Mean,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
)
from loft_hvd.aggregation.states import aggregate_states, diagnose_states
from loft_hvd.balance.balancer import Balancer
from loft_hvd.balance.loft import Loft
from loft_hvd.balance.policies import Replay
from loft_hvd.data.blocks import BlockShuffle
from loft_hvd.data.loader import DataLoader
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import BatchSampler
from loft_hvd.data.shards import ParquetShards, TarShards
from loft_hvd.data.stream import StreamLoader
from loft_hvd.errors import LoftError
from loft_hvd.lightning import LoftCallback, lightning_callback
from loft_hvd.metrics import Metric, average
from loft_hvd.optimizer.attach import attach
from loft_hvd.optimizer.ddp import ddp_hook
from loft_hvd.optimizer.distributed import DistributedOptimizer
from loft_hvd.optimizer.fsdp import fsdp_hook
from loft_hvd.optimizer.watching import watch
from loft_hvd.pipeline.allreduce import Handle, allreduce, allreduce_async
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine
from loft_hvd.pipeline.wire import Compression
from loft_hvd.report.export import ScalarFeed
from loft_hvd.store.store import SampleStore
from loft_hvd.trainer import TrainerLink, trainer_callback
from loft_hvd.transport.datagram import LossTolerant

__version__ = "0.1.0"

__all__ = [
    "ARC",
    "CAF",
    "NNM",
    "AcceleratorLink",
    "Balancer",
    "BatchSampler",
    "BlockShuffle",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "Clip",
    "Compression",
    "Custom",
    "DataLoader",
    "Diagnostics",
    "DistributedOptimizer",
    "GeometricMedian",
    "Handle",
    "Loft",
    "LoftCallback",
    "LoftError",
    "LossTolerant",
    "Mean",
    "MeanAroundMedian",
    "Median",
    "Metric",
    "MinimumDiameter",
    "MultiKrum",
    "ParquetShards",
    "Phocas",
    "Placement",
    "PreparedLoader",
    "PrincipalAxis",
    "Quarantine",
    "Replay",
    "Robust",
    "Rule",
    "SampleStore",
    "ScalarFeed",
    "StreamLoader",
    "Suspicion",
    "TarShards",
    "TrainerLink",
    "TrimmedMean",
    "accelerator_link",
    "aggregate",
    "aggregate_states",
    "allreduce",
    "allreduce_async",
    "attach",
    "attacks",
    "average",
    "ddp_hook",
    "diagnose",
    "diagnose_states",
    "elastic",
    "fsdp_hook",
    "lightning_callback",
    "mean",
    "mean_around_median",
    "median",
    "parse_rule",
    "phocas",
    "trainer_callback",
    "trimmed_mean",
    "watch",
]
