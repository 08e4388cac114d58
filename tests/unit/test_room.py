"""Caps foretold from memory: two sizes tell what fits, and nobody goes there at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance import limits, room
from loft_hvd.balance.plan import Sizes
from loft_hvd.balance.room import MemoryUse, Room
from loft_hvd.transport import waits
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.clock import Clock


@dataclass
class Device:
    """A device whose memory a batch takes ``fixed + per_sample * x`` bytes of."""

    fixed: int
    per_sample: int
    total: int
    peak: int = 0

    def compute(self, num_samples: int) -> None:
        """Raise as a full device does, or have room."""
        needed = self.fixed + self.per_sample * num_samples
        if needed > self.total:
            raise torch.OutOfMemoryError(f"{num_samples} samples")
        self.peak = max(self.peak, needed)

    def read(self) -> MemoryUse:
        return MemoryUse(self.peak, self.total)


@pytest.mark.parametrize("grain", [1, 8])
@pytest.mark.parametrize("fixed", [0, 300, 4000, 9000])
@pytest.mark.parametrize("per_sample", [1, 7, 60])
def test_sizes_approach_what_fits_by_halves_and_never_exceed_it(
    fixed: int, per_sample: int, grain: int
) -> None:
    device = Device(fixed, per_sample, total=20_000)
    told = Room(device.read)
    assert told.most(grain=grain) is None
    size = 8
    tried: list[int] = []
    for _ in range(30):
        device.compute(size)
        told.computed(size)
        most = told.most(grain=grain)
        assert most is not None
        fits = ((0.9 if tried else 1.0) * device.total - fixed) / per_sample
        assert most <= max(fits, size)
        assert most - size <= max((fits - size) / 2 + grain, 0), "half-way at most"
        tried.append(size := most)
    wanted = int((0.9 * device.total - fixed) / per_sample) // grain * grain
    assert size == max(wanted, 8)


def test_one_size_is_not_enough_to_know_what_each_sample_takes() -> None:
    device = Device(fixed=9000, per_sample=10, total=20_000)
    told = Room(device.read)
    device.compute(100)
    told.computed(100)
    assert told.most(grain=1) == 150  # as if all of the 10,000 bytes were of samples: 200 fit
    device.compute(150)
    told.computed(150)
    assert told.most(grain=1) == 150 + (900 - 150) // 2


def test_smaller_batches_and_devices_that_tell_nothing_change_nothing() -> None:
    device = Device(fixed=0, per_sample=10, total=20_000)
    told = Room(device.read)
    device.compute(100)
    told.computed(100)
    before = told.most(grain=1)
    told.computed(20)
    assert told.most(grain=1) == before
    silent = Room(lambda: None)
    silent.computed(100)
    assert silent.most(grain=1) is None


# Rank 0's memory holds 120 samples in a pass, or 60, fewer than its equal share.
MEMORY = [(4000, (11_200, 11_300)), (400, (4000, 16_000))]


@pytest.mark.parametrize(("fixed", "memory"), MEMORY)
@pytest.mark.parametrize("splits", [False, True])
def test_a_fast_rank_with_little_memory_never_runs_out_of_it(
    splits: bool, fixed: int, memory: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is four times as fast."""
    devices = [Device(fixed, per_sample=60, total=size) for size in memory]
    told = limits.own_device()
    here = threading.local()
    monkeypatch.setattr(limits, "own_device", lambda: (told[0], "GPU", True, memory[here.rank]))
    monkeypatch.setattr(room, "device_memory", lambda: devices[here.rank].read())

    def work(transport: LocalTransport) -> tuple[list[Sizes], int]:
        here.rank = transport.rank
        clock = Clock()
        balancer = loft.Balancer(
            128, micro_batches=splits, interval=8, grain=4, transport=transport, clock=clock
        )
        data = TensorDataset(torch.zeros(128 * 40, 1))
        loader = loft.DataLoader(data, balancer)
        sizes, largest = [], 0
        for epoch in range(4):
            loader.set_epoch(epoch)
            for batch in loader:
                taken = balancer.take_step()
                for (x,) in batch if splits else [batch]:
                    devices[transport.rank].compute(len(x))
                    largest = max(largest, len(x))
                seconds = (1e-3, 4e-3)[transport.rank] * taken.sizes[transport.rank]
                clock.now += seconds
                balancer.gradient_arrived(blocked_s=0.0)
                balancer.computing_ended()
                everyones = Channel(transport, "times").allgather_rows(torch.tensor([seconds]))
                waited_s = float(everyones.max()) - seconds
                clock.now += waited_s
                waits.add(waited_s)
                balancer.step_ended()
                sizes.append(taken.sizes)
        return sizes, largest

    (sizes, largest), (others, _) = run_ranks(2, work)
    assert sizes == others
    fits = int((0.9 * memory[0] - fixed) / 60) // 4 * 4
    assert sizes[0][0] <= largest <= fits
    assert sizes[-1][0] >= fits  # the best are 102 and 26
    assert splits == (sizes[-1][0] > largest), "in micro-batches"
