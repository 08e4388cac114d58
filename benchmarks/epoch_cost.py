"""What an epoch's order, assignment and homes cost a rank: CPU seconds and memory.

    python -m benchmarks.epoch_cost --samples 20000000 --ranks 8 --batch 2048

It plays rank 0 of a job whose ranks keep all samples between them, from one epoch into the next.
The parts are timed by CPU time, so other work on the machine matters little. The peak is that of
the second epoch beyond what is there when it begins: who keeps what, and where samples are. Linux.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from loft_hvd.balance.keeping import ReadCosts
from loft_hvd.balance.plan import Plan, Sizes, equal_sizes
from loft_hvd.data.draws import Draw, EpochSettings, draw_epoch
from loft_hvd.data.placement import HomeSet, Placement
from loft_hvd.store.homes import KeptHomes
from loft_hvd.store.keepers import with_keepers
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalWorld

__all__ = ["measure"]


class _View:
    """Equal sizes for ever."""

    rank, min_batch, min_ranks, splits = 0, 1, 1, False

    def __init__(self, world_size: int, global_batch_size: int) -> None:
        self.world_size, self.global_batch_size = world_size, global_batch_size
        self._plan = Plan(0, 0, equal_sizes(global_batch_size, world_size))

    def plan_at(self, step: int) -> Plan:
        return self._plan

    def count_micro(self, sizes: Sizes) -> Sizes:
        return ()


class _Told(Channel):
    """A channel on which all ranks say what this one says: they keep as much, equally."""

    def __init__(self, world_size: int) -> None:
        super().__init__(LocalWorld(1).transport(0), "cost")
        self._ranks = world_size

    @property
    def world_size(self) -> int:
        return self._ranks

    def allgather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return row.expand(self._ranks, -1)


def _memory_mb(what: str) -> float:
    """Return what the kernel says of this process, such as VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(what))


def measure(num_samples: int, world_size: int, global_batch_size: int) -> dict[str, float]:
    """Return CPU seconds of each part of the second epoch, and the peak above the start, in MB."""
    parts: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        parts[name] = parts.get(name, 0.0) + time.process_time() - began

    before_mb = 0.0
    view = _View(world_size, global_batch_size)
    base = Placement(np.zeros(num_samples, np.int32), (HomeSet(shared=("source",)),))
    settings = EpochSettings(base, True, 0, False, False)
    first, second = np.full(num_samples, -1, np.int16), np.zeros(num_samples, np.int16)
    homes = KeptHomes(first, second, _Told(world_size))
    kept = np.ones(num_samples, bool)
    placement, step = base, 0
    for epoch in range(2):
        parts.clear()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before_mb = _memory_mb("VmRSS")
        with timed("placement"):
            prepared = placement.at(world_size)
        with timed("order"):
            order = settings.order(epoch)
        with timed("draws"):
            draws: Iterator[Draw] = draw_epoch(
                order, prepared, view, first_step=step, position=0, drop_last=False
            )
            for draw in draws:
                homes.note(draw)
                step += 1
        with timed("settle"):
            homes.settle(first_step=step, held=kept)
            homes.choose(ReadCosts())
        with timed("placement"):
            placement = with_keepers(base, homes.keepers)
        del prepared
    parts["total"] = sum(parts.values())
    return {
        **{name: round(value, 2) for name, value in parts.items()},
        "peak_mb": round(_memory_mb("VmHWM") - before_mb),
    }


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=20_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2048, help="samples of a step, of all ranks")
    options = parser.parse_args()
    found = measure(options.samples, options.ranks, options.batch)
    sys.stdout.write(json.dumps({**vars(options), **found}) + "\n")


if __name__ == "__main__":
    main()
