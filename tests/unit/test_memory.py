"""Full memory: told from other errors, turned into caps, and found before training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.limits import Device, RankLimits
from loft_hvd.balance.memory import (
    MemoryWatch,
    cap_after,
    is_out_of_memory,
    largest_that_fits,
    logged_caps,
)
from loft_hvd.balance.plan import StepSizes
from loft_hvd.errors import ArgumentError, PeerError, PlanError, UsageError
from loft_hvd.failures.causes import describe_failure, tell_failure
from loft_hvd.runlog import RunLog
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks


def caused(error: Exception, *, by: Exception) -> Exception:
    error.__context__ = by
    by.__context__ = error  # a circle, as handlers that raise each other's errors make
    return error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (MemoryError("emulated"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("HIP out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (PeerError("rank 2 has ended: it was killed, or it ran out of memory"), False),
        (type("HorovodInternalError", (RuntimeError,), {})("peer: out of memory"), False),
        (torch.distributed.DistBackendError("NCCL: rank 1 is out of memory"), False),
        (caused(RuntimeError("step failed: out of memory"), by=PeerError("rank 2")), False),
        (caused(MemoryError("while the error was printed"), by=PeerError("rank 2")), False),
        (caused(RuntimeError("CUDA out of memory"), by=KeyError("x")), True),
    ],
)
def test_full_memory_is_told_from_other_errors(error: Exception, is_full: bool) -> None:
    assert is_out_of_memory(error) is is_full


@pytest.mark.parametrize(
    ("size", "done", "grain", "cap"),
    [(96, 64, 1, 64), (96, 60, 8, 56), (96, 0, 1, 48), (96, 96, 1, 72), (3, 3, 8, 2), (1, 0, 1, 1)],
)
def test_the_cap_after_full_memory_is_below_what_failed(
    size: int, done: int, grain: int, cap: int
) -> None:
    assert cap_after(size, largest_done=done, grain=grain) == cap


DEVICES = (Device("a", 0, "CPU", False), Device("a", 1, "CPU", False), Device("b", 0, "CPU", False))


def watch(rank: int, batches: BatchQueue, log: RunLog) -> MemoryWatch:
    limits = RankLimits(DEVICES, (None, None, None), 1, None, {})
    return MemoryWatch(LocalWorld(3).transport(rank), limits, batches, log)


def test_only_an_error_during_a_batch_is_blamed_on_its_size(tmp_path: Path) -> None:
    batches, error = BatchQueue(), MemoryError("full")
    mine = watch(0, batches, RunLog(tmp_path))
    batches.begin(StepSizes(0, 0, (16, 8, 8)))
    batches.take()
    batches.step_ended()
    assert mine.describe_failure(error) is None  # an evaluation, say
    batches.begin(StepSizes(1, 1, (24, 4, 4)))
    assert mine.describe_failure(ValueError("full")) is None
    note = mine.describe_failure(error)
    assert note is not None
    assert note.num_samples == 24
    assert "rank 0 ran out of memory with a batch of 24 samples (step 1, plan 1" in note.text
    assert mine.describe_failure(error) is note
    assert logged_caps(tmp_path) == {"a/0": 16}  # the largest batch that it has finished


def test_an_honest_survivor_is_not_told_to_be_out_of_memory(tmp_path: Path) -> None:
    batches = BatchQueue()
    mine = watch(0, batches, RunLog(tmp_path))
    batches.begin(StepSizes(1, 1, (16, 16, 16)))
    batches.take()
    error = PeerError("rank 2 has ended without a word: it was killed, or it ran out of memory")
    assert mine.describe_failure(error) is None
    assert logged_caps(tmp_path) == {}


def test_rank_0_hears_of_other_ranks_and_later_lines_count(tmp_path: Path) -> None:
    batches, log = BatchQueue(), RunLog(tmp_path)
    rank_0, rank_1 = watch(0, batches, log), watch(1, batches, RunLog(None))
    for num_samples in (40.0, 20.0, float("inf"), float("nan"), -3.0):
        tell_failure(2, num_samples)
    tell_failure(7, 8.0)  # no such rank
    assert rank_0.caps == {"b/0": 10}
    assert rank_1.caps == {}
    assert logged_caps(tmp_path) == {"b/0": 10}
    text = describe_failure("rank 1 (here)", KeyError("x")).text
    assert text == "rank 1 (here) has failed: KeyError: 'x'"


def test_caps_are_read_from_whole_lines_of_all_logs(tmp_path: Path) -> None:
    line = {"kind": "cap", "step": 1, "device": "a/0", "cap": 5}
    (tmp_path / "loft-1.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line)[:30])
    (tmp_path / "loft-2.jsonl").write_text(json.dumps(line | {"cap": "many"}) + "\n")
    assert logged_caps(tmp_path) == {"a/0": 5}


@pytest.mark.parametrize("grain", [1, 3, 8])
@pytest.mark.parametrize("limit", [1, 7, 8, 64, 100])
def test_the_search_finds_the_largest_batch_with_few_tries(limit: int, grain: int) -> None:
    most = max(limit // grain, 1) * grain
    for holds in range(limit + 10):
        tried: list[int] = []

        def fits(size: int, holds: int = holds, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= holds

        found = largest_that_fits(fits, limit=limit, grain=grain)
        assert found == min(holds // grain * grain, most)
        assert max(tried) <= max(2 * holds, grain)
        assert len(tried) <= 2 * math.log2(most / grain) + 2


def probe(transport: LocalTransport, holds: list[int], **options: Any) -> list[Any]:
    balancer = loft.Balancer(96, "loft", transport=transport)

    def step(num_samples: int) -> None:
        if holds[transport.rank] < 0:
            raise ValueError("a mistake in the script")
        if num_samples > holds[transport.rank]:
            raise MemoryError(f"{num_samples} samples do not fit")

    caps = balancer.probe(step, **options)
    return [caps, balancer.limits.caps, balancer.plan.sizes]


def test_probing_limits_every_rank_by_its_own_memory() -> None:
    caps = (20, 92, 50)
    found = run_ranks(3, lambda end: probe(end, [20, 1000, 50], headroom=0.0))
    assert found == [[caps, caps, (20, 38, 38)]] * 3


def test_headroom_is_left_where_memory_was_full() -> None:
    found = run_ranks(3, lambda end: probe(end, [40, 1000, 50]))
    assert found[0][0] == (36, 92, 45)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("holds", "error", "message"),
    [
        ([96, 0, 96], PlanError, "rank 1 cannot compute even 1 samples"),
        ([96, -1, 96], (PeerError, ValueError), r"failed on ranks \[1\]|a mistake"),
        ([20, 20, 20], PlanError, "backward_passes_per_step=2"),
    ],
)
def test_probing_fails_on_every_rank_alike(holds: list[int], error: Any, message: str) -> None:
    def work(transport: LocalTransport) -> bool:
        with pytest.raises(error, match=message):
            probe(transport, holds, headroom=0.0)
        return True

    assert run_ranks(3, work) == [True] * 3


def test_probing_comes_before_the_optimizer_and_before_training() -> None:
    balancer = loft.Balancer(8, transport=LocalWorld(1).transport(0))
    with pytest.raises(ArgumentError, match=r"headroom=1\.0"):
        balancer.probe(lambda n: None, headroom=1.0)
    balancer.require(min_ranks=1, num_passes=1)
    with pytest.raises(UsageError, match="before DistributedOptimizer"):
        balancer.probe(lambda n: None)
