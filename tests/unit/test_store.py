"""The store: each sample once an epoch and right, from the nearest who keeps it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError
from loft_hvd.simulate.scenario import RankTraits, Scenario
from loft_hvd.simulate.simulation import simulate
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.plans import FakePlans
from tests.support.worlds import elastic_job

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
NUM_SAMPLES = 600
RECORD = 128  # bytes on the shelf of a sample below


class Source(Dataset[Any]):
    """A data set that counts its reads."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples
        self.num_reads = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.num_reads += 1
        return torch.full((3,), float(index)), index


class Broken(Source):
    """A source that must not be asked."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise AssertionError(f"sample {index} was read from the source")


def alone(dataset: Dataset[Any] | None = None, **budgets: Any) -> loft.SampleStore:
    """Return the store of a world of one."""
    options = {"memory_bytes": 1 << 20} | budgets
    source = Source() if dataset is None else dataset
    return loft.SampleStore(source, transport=LocalWorld(1).transport(0), **options)


def test_a_sample_is_read_from_the_source_once() -> None:
    source = Source()
    store = alone(source)
    source.num_reads = 0
    for _ in range(3):
        for index in (5, 7, -1):
            x, y = store[index]
            assert y == index % NUM_SAMPLES
            assert torch.equal(x, torch.full((3,), float(y)))
    assert source.num_reads == 3 + store.counters["checked"]
    assert store.counters["own"] == 6
    assert store.counters["source"] == 3
    assert store.num_kept == 3


def test_a_batch_keeps_its_order_and_its_repeats() -> None:
    batch = alone().__getitems__([4, 2, 4, 9])
    assert [y for _, y in batch] == [4, 2, 4, 9]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_ordinary_loader_reads_through_it(num_workers: int) -> None:
    store = alone()
    loader = torch.utils.data.DataLoader(store, batch_size=50, num_workers=num_workers)
    for _ in range(2):
        seen = [y for _, ys in loader for y in ys.tolist()]
        assert seen == list(range(NUM_SAMPLES))
    assert store.counters["source"] == NUM_SAMPLES
    assert store.counters["own"] == NUM_SAMPLES


def test_every_rank_hears_what_all_have_read_in_the_epoch_before() -> None:
    def work(transport: LocalTransport) -> dict[int, list[Mapping[str, int]]]:
        plans = FakePlans((30, 10), rank=transport.rank)
        store = loft.SampleStore(Source(), memory_bytes=1 << 20, transport=transport)
        loader = loft.DataLoader(store, plans, seed=3)
        own = []
        for epoch in (4, 5, 6):
            loader.set_epoch(epoch)
            before = dict(store.counters)
            for _ in loader:
                plans.next_step += 1
            own.append({name: store.counters[name] - before[name] for name in before})
        store.close()
        assert list(plans.reads) == [0, 4, 5]
        assert plans.reads[0] == []  # nothing was read before the first epoch
        for epoch, counts in ((4, own[0]), (5, own[1])):
            mine = plans.reads[epoch][transport.rank]
            for name in ("own", "peer", "source", "own_bytes", "peer_bytes"):
                assert mine[name] == counts[name]
        return plans.reads

    first, second = run_ranks(2, work)
    assert first == second
    for reads in (first[4], first[5]):  # each sample once
        assert sum(each[name] for each in reads for name in ("own", "peer", "source")) == 600
    assert [each["source"] for each in first[4]] == [450, 150]
    assert all(each["source_bytes"] > each["source"] for each in first[4])
    assert sum(each["source"] for each in first[5]) == 0


def test_what_a_peer_sends_that_is_no_sample_is_read_from_the_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = threading.Barrier(2)

    def rank(transport: LocalTransport) -> tuple[list[int], dict[str, int]]:
        store = loft.SampleStore(
            Source(), memory_bytes=1 << 20, transport=transport, timeout_s=20.0
        )
        if transport.rank == 0:
            store.__getitems__([4])
            store._shelf.add(5, b"no sample")  # its checksum is right
        store._shelf.keepers[4:6] = 0
        done.wait(60)
        found = [store[number][1] for number in (4, 5)] if transport.rank == 1 else []
        done.wait(60)
        counts = dict(store.counters)
        store.close()
        return found, counts

    _, (found, counts) = run_ranks(2, rank)
    assert found == [4, 5]
    assert (counts["peer"], counts["source"]) == (1, 1)
    assert "rank 0 does not send its samples (a sample of 9 bytes" in caplog.text


class _Epoch:
    """What one rank read in one epoch."""

    def __init__(self, store: loft.SampleStore) -> None:
        self._store, self._before = store, dict(store.counters)
        self.seen: list[int] = []

    def count(self, name: str) -> int:
        return self._store.counters[name] - self._before[name]


def epochs(
    transport: LocalTransport, store: loft.SampleStore, sizes: Sequence[int], num_epochs: int
) -> Iterator[_Epoch]:
    """Train on the store; the barrier of a step is left out, as its gradients would be one."""
    plans = FakePlans(sizes, rank=transport.rank)
    loader = loft.DataLoader(store, plans, seed=3)
    for epoch in range(num_epochs):
        read = _Epoch(store)
        loader.set_epoch(epoch)
        for x, y in loader:
            assert torch.equal(x, y[:, None].expand(-1, 3).float())
            read.seen += y.tolist()
            plans.next_step += 1
        yield read


def test_every_epoch_has_every_sample_once_and_later_ones_ask_the_source_for_nothing() -> None:
    done = threading.Barrier(3)

    def rank(transport: LocalTransport) -> list[tuple[list[int], list[int]]]:
        store = loft.SampleStore(Source(), memory_bytes=NUM_SAMPLES * RECORD, transport=transport)
        found = [
            (read.seen, [read.count(name) for name in ("own", "peer", "source")])
            for read in epochs(transport, store, (50, 30, 20), 3)
        ]
        done.wait(30)  # a server ends when nobody needs it
        store.close()
        return found

    by_rank = run_ranks(3, rank)
    for epoch in range(3):
        assert sorted(s for each in by_rank for s in each[epoch][0]) == list(range(NUM_SAMPLES))
    totals = [[sum(each[epoch][1][i] for each in by_rank) for i in range(3)] for epoch in range(3)]
    assert totals[0] == [0, 0, NUM_SAMPLES]
    own, peer, source = totals[1]
    assert source == 0
    assert peer > 0
    assert own + peer == NUM_SAMPLES
    assert own >= 0.9 * NUM_SAMPLES


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_costs_time_and_no_sample(
    how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    done, fault = threading.Barrier(3), threading.Barrier(3)

    def rank(transport: LocalTransport) -> list[list[int]]:
        store = loft.SampleStore(
            Source(),
            memory_bytes=NUM_SAMPLES * RECORD,
            transport=transport,
            timeout_s=0.5,
        )
        found = []
        for epoch, read in enumerate(epochs(transport, store, (50, 30, 20), 3)):
            found.append(read.seen)
            fault.wait(30)
            if epoch == 0 and transport.rank == 1:
                assert store._server is not None
                os.kill(store._server.process.pid, how)
            fault.wait(30)
        done.wait(30)
        store.close()
        return found

    by_rank = run_ranks(3, rank)
    for epoch in range(3):
        assert sorted(s for each in by_rank for s in each[epoch]) == list(range(NUM_SAMPLES))
    assert "rank 1 does not send its samples" in caplog.text


def test_a_later_run_reads_from_the_folder(tmp_path: Path) -> None:
    def rank(transport: LocalTransport, dataset: Dataset[Any]) -> tuple[list[int], int]:
        store = loft.SampleStore(
            dataset, memory_bytes=0, disk_bytes=1 << 20, folder=tmp_path, transport=transport
        )
        (read,) = epochs(transport, store, (60, 40), 1)
        barrier.wait(30)
        store.close()
        return read.seen, read.count("source")

    barrier = threading.Barrier(2)
    first = run_ranks(2, lambda transport: rank(transport, Source()))
    again = run_ranks(2, lambda transport: rank(transport, Source()))
    assert sum(count for _, count in first) == NUM_SAMPLES
    assert sum(count for _, count in again) == 0
    assert sorted(first[0][0] + first[1][0]) == sorted(again[0][0] + again[1][0])


def test_a_job_begun_again_has_its_folder_at_hand(tmp_path: Path) -> None:
    """After three epochs a later run reads at least 90 % of its first from the own disks."""
    barrier = threading.Barrier(3)

    def rank(transport: LocalTransport, num_epochs: int) -> list[list[int]]:
        store = loft.SampleStore(
            Source(),
            memory_bytes=0,
            disk_bytes=NUM_SAMPLES * RECORD,
            folder=tmp_path,
            transport=transport,
        )
        names = ("own", "peer", "source")
        read = [
            [each.count(name) for name in names]
            for each in epochs(transport, store, (50, 30, 20), num_epochs)
        ]
        barrier.wait(60)
        store.close()
        return read

    run_ranks(3, lambda transport: rank(transport, 3))
    again = np.array(run_ranks(3, lambda transport: rank(transport, 1)))
    own, peer, source = again.sum(axis=(0, 1)).tolist()
    assert source == 0
    assert own + peer == NUM_SAMPLES
    assert own >= 0.9 * NUM_SAMPLES


def test_a_server_that_was_killed_serves_again_from_the_next_epoch_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done, fault = threading.Barrier(2), threading.Barrier(2)

    def rank(transport: LocalTransport) -> list[list[int]]:
        store = loft.SampleStore(Source(), memory_bytes=1 << 20, transport=transport, timeout_s=5.0)
        counts = []
        for epoch, read in enumerate(epochs(transport, store, (40, 20), 4)):
            counts.append([read.count(name) for name in ("own", "peer", "source")])
            fault.wait(60)
            if epoch == 1 and transport.rank == 1:
                assert store._server is not None
                store._server.process.kill()
                store._server.process.wait()
            if epoch == 2 and transport.rank == 0:
                _wait_for_answer(store, 1)
            fault.wait(60)
        done.wait(30)
        store.close()
        return counts

    found = np.array(run_ranks(2, rank, timeout_s=120.0)).sum(axis=0)  # [epoch, where from]
    assert "server of rank 1 has ended (-9): it is started again" in caplog.text
    assert (found.sum(axis=1) == NUM_SAMPLES).all()
    _own, peer, source = found[3]
    assert peer > 0
    assert source == 0


def test_a_store_that_was_closed_stays_closed(caplog: pytest.LogCaptureFixture) -> None:
    def rank(transport: LocalTransport) -> list[int]:
        store = loft.SampleStore(Source(), memory_bytes=1 << 20, transport=transport, timeout_s=5.0)
        counts = []
        for read in epochs(transport, store, (20, 20), 3):
            counts.append(sum(read.count(name) for name in ("own", "peer", "source")))
            store.close()
        return counts

    assert np.array(run_ranks(2, rank, timeout_s=120.0)).sum(axis=0).tolist() == [NUM_SAMPLES] * 3
    assert "started again" not in caplog.text


def test_a_copy_that_the_placement_knows_is_no_hit_of_the_cache() -> None:
    store = alone()
    store.__getitems__([0, 1, 2, 3])
    # First kept here; by rank 1, with a copy here; by rank 1; by rank 1, with a copy at rank 1.
    store._shelf.keepers[:4] = [0, 1, 1, 1]
    store._shelf.copies[:4] = [0, 1, 0, 2]
    before = store.cache_hits
    store.__getitems__([0, 1, 2, 3])
    assert store.cache_hits - before == 2


def _wait_for_answer(store: loft.SampleStore, rank: int) -> None:
    """Ask a rank until it sends what it keeps."""
    assert store._peers is not None
    kept = np.flatnonzero(store._shelf.keepers == rank)[:1].tolist()
    ends = time.monotonic() + 50.0
    while time.monotonic() < ends:
        store._peers._owners[rank].asked_again_s = 0.0
        if store._peers.fetch({rank: kept}):
            return
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} does not answer")


def test_a_store_goes_with_its_last_user_and_leaves_nothing_to_the_garbage_collector() -> None:
    def rank(transport: LocalTransport) -> weakref.ref[loft.SampleStore]:
        store = loft.SampleStore(Source(), memory_bytes=1 << 20, transport=transport)
        for read in epochs(transport, store, (40, 20), 2):
            assert read.seen
        done.wait(30)
        store.close()
        return weakref.ref(store)

    done = threading.Barrier(2)
    gc.disable()
    try:
        assert [each() for each in run_ranks(2, rank)] == [None, None]
    finally:
        gc.enable()


def test_a_pickled_store_reads_what_is_kept() -> None:
    store = alone()
    assert store[3][1] == 3
    other = pickle.loads(pickle.dumps(store))
    other.dataset = Broken()
    assert other[3][1] == 3
    assert store.counters["own"] == 1


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"memory_bytes": -1}, ArgumentError, "memory_bytes=-1"),
        ({"memory_bytes": 1.5}, ArgumentTypeError, r"memory_bytes=1\.5"),
        ({"memory_bytes": 1, "disk_bytes": 5}, ArgumentError, "give both"),
        ({"memory_bytes": 1, "folder": "x"}, ArgumentError, "give both"),
    ],
)
def test_budgets_that_cannot_be_are_refused(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        alone(**given)


def test_a_stream_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ArgumentTypeError, match="map-style"):
        alone(Stream())


def test_ranks_with_other_lengths_are_refused() -> None:
    def rank(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError, match="number of samples differs on ranks"):
            loft.SampleStore(
                Source(10 + (transport.rank == 1)), memory_bytes=0, transport=transport
            )

    run_ranks(3, rank)


def test_a_sample_that_cannot_be_kept_says_where() -> None:
    class Odd(Source):
        def __getitem__(self, index: int) -> Any:
            return {"x": object()}

    with pytest.raises(ArgumentTypeError, match=r"sample\[x\] is of type object"):
        alone(Odd())[0]


def test_a_transform_is_applied_to_each_read_and_not_kept() -> None:
    draws = iter(range(100))
    store = alone(transform=lambda sample: (sample[1], next(draws)))
    assert store[5] == (5, 0)
    assert store[5] == (5, 1)
    assert store.__getitems__([7, 7]) == [(7, 2), (7, 3)]
    assert store.counters["source"] == 2


def test_a_wrapped_store_is_warned_of() -> None:
    subset = torch.utils.data.Subset(alone(), range(100))
    with pytest.warns(UserWarning, match="a SampleStore inside a Subset"):
        loft.DataLoader(subset, FakePlans([10]))


def test_a_rank_that_cannot_use_its_folder_ends_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank(transport: LocalTransport) -> None:
        folder = tmp_path / ("file" if transport.rank == 1 else "folder")
        with pytest.raises(ArgumentError, match="cannot be used"):
            loft.SampleStore(
                Source(), memory_bytes=0, disk_bytes=1000, folder=folder, transport=transport
            )

    run_ranks(2, rank)


def test_another_data_set_in_the_folder_is_not_taken_for_the_first(tmp_path: Path) -> None:
    options = {"memory_bytes": 0, "disk_bytes": 1 << 20, "folder": tmp_path}
    x = torch.zeros(100, 2)
    for labels in (torch.zeros(100), torch.arange(100)):  # the first samples are equal
        store = alone(torch.utils.data.TensorDataset(x, labels), **options)
        assert store[60][1] == labels[60]
        store.close()


def test_a_world_of_another_size_counts_on_no_keeper() -> None:
    def rank(transport: LocalTransport) -> int:
        store = loft.SampleStore(Source(), memory_bytes=1 << 20, transport=transport)
        for _ in epochs(transport, store, (60, 40), 1):
            pass
        plans = FakePlans([100])  # the other rank has gone
        seen = [y for _, ys in loft.DataLoader(store, plans) for y in ys.tolist()]
        store.close()
        return len(set(seen))

    assert run_ranks(2, rank) == [NUM_SAMPLES, NUM_SAMPLES]


class Unanswered(LocalTransport):
    """A rank that joins: the others train, and come to none of its collectives."""

    def _post(self, kind: str, name: str, *_: Any) -> NoReturn:
        raise AssertionError(f"{kind} {name}: nobody answers")


def test_ranks_of_an_elastic_job_keep_for_themselves_and_wait_for_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_rank = []
    for rank in range(2):
        transport = Unanswered(LocalWorld(2), rank)
        with elastic_job():
            store = loft.SampleStore(Source(), memory_bytes=1 << 20, transport=transport)
            by_rank.append(
                [
                    (read.seen, read.count("own"), read.count("source"))
                    for read in epochs(transport, store, (60, 40), 2)
                ]
            )
        store.close()
    for first, second in zip(*by_rank, strict=True):
        assert sorted(first[0] + second[0]) == list(range(NUM_SAMPLES))
    for (before, *counts_before), (after, *counts_after) in by_rank:
        num_again = len({*before} & {*after})
        assert counts_before == [0, len(before)]
        assert counts_after == [num_again, len(after) - num_again]
    assert caplog.text.count("peers are not asked") == 1


def test_a_folder_that_cannot_be_used_ends_one_rank_of_an_elastic_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    transport = Unanswered(LocalWorld(2), 1)
    with elastic_job(), pytest.raises(ArgumentError, match="cannot be used"):
        loft.SampleStore(
            Source(), memory_bytes=0, disk_bytes=1000, folder=tmp_path / "file", transport=transport
        )


def test_shared_sources_are_told_of_the_placement_in_use() -> None:
    plans = FakePlans([10])
    next(iter(loft.DataLoader(alone(), plans)))
    assert plans.source == (0,)


def test_what_a_placement_has_on_a_rank_is_not_kept_there_and_asked_of_nobody() -> None:
    done = threading.Barrier(3)
    given = loft.Placement.sharded(NUM_SAMPLES, 3)

    def rank(transport: LocalTransport) -> list[list[int]]:
        # Room for 130 samples of others: at these sizes the fast rank computes 100 of them.
        store = loft.SampleStore(Source(), memory_bytes=130 * RECORD, transport=transport)
        plans = FakePlans((30, 18, 12), rank=transport.rank)
        loader = loft.DataLoader(store, plans, seed=3, placement=given)
        found = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            before, theirs = dict(store.counters), 0
            for _, y in loader:
                plans.next_step += 1
                theirs += int((y // 200 != transport.rank).sum())
            counts = [store.counters[name] - before[name] for name in ("own", "peer", "source")]
            found.append([*counts, theirs])
        kept = np.flatnonzero(store._shelf.held())
        assert (kept // 200 != transport.rank).all()
        done.wait(60)
        store.close()
        return found

    first, _, third = np.array(run_ranks(3, rank)).sum(axis=0)
    assert first[:3].tolist() == [0, 0, NUM_SAMPLES]
    own, peer, _, theirs = third
    assert own >= 0.8 * theirs  # of what lies elsewhere, nearly all is kept here
    assert own + peer <= theirs


def test_the_nodes_of_ranks_reach_the_policy() -> None:
    done = threading.Barrier(4)

    def rank(transport: LocalTransport) -> list[tuple[int, ...]]:
        store = loft.SampleStore(Source(), memory_bytes=1 << 20, transport=transport)
        plans = FakePlans((20, 20, 10, 10), rank=transport.rank)
        loader = loft.DataLoader(store, plans, seed=3)
        told = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            for _ in loader:
                plans.next_step += 1
            told.append(plans.source)
        done.wait(30)
        store.close()
        return told

    for first, second in run_ranks(4, rank, ranks_per_node=2):
        assert first == (0, 0, 0, 0)  # all read from the data set
        assert second == (1, 1, 2, 2)  # all is kept: what comes from the other node shares its link


@pytest.mark.parametrize(
    ("sizes", "budgets"),
    [((20, 20, 20), (200, 200, 200)), ((40, 20, 10), (150, 150, 150)), ((40, 20, 10), (400,) * 3)],
    ids=["equal", "4:2:1", "copies"],
)
def test_the_simulator_counts_the_hits_of_a_store(
    sizes: Sequence[int], budgets: Sequence[int]
) -> None:
    num_samples = 10 * sum(sizes)  # the simulator leaves no last batch
    done = threading.Barrier(3)

    def rank(transport: LocalTransport) -> list[list[int]]:
        store = loft.SampleStore(
            Source(num_samples), memory_bytes=budgets[transport.rank] * RECORD, transport=transport
        )
        found = [
            [read.count(name) for name in ("own", "peer", "source")]
            for read in epochs(transport, store, sizes, 4)
        ]
        done.wait(60)
        store.close()
        return found

    by_rank = np.array(run_ranks(3, rank))  # [rank, epoch, where from]
    scenario = Scenario(
        "store",
        3,
        sum(sizes),
        seed=3,
        steps=40,
        interval=7,
        num_samples=num_samples,
        policies=(tuple(sizes),),
        store=True,
        sources={"nfs": 1e9},
        ranks=RankTraits(local_share=0.0, source="nfs", cache_samples=budgets),
    )
    local = simulate(scenario).runs[0].local.reshape(4, 10, 3).sum(axis=1)  # [epoch, rank]
    np.testing.assert_array_equal(by_rank[:, :, 0].T, local)
    assert by_rank.sum() == 4 * num_samples
