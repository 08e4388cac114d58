"""A data set that changes while its samples are kept: what is old is found, and read no more."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.plans import FakePlans
from tests.support.worlds import elastic_job

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
from loft_hvd.store import checks
from loft_hvd.store.samples import decode_sample
from loft_hvd.store.shelf import Shelf

NUM_SAMPLES = 400
NEW = 1000.0  # what is added to the label of a sample that has changed
# By these, and by type and length, a folder is known to be of the same data set.
LOOKED_AT = {place * NUM_SAMPLES // 16 for place in range(16)}


class Labels(Dataset[Any]):
    """Samples with labels, of which some may be mended."""

    def __init__(self, changed: Iterable[int] = ()) -> None:
        self.changed = set(changed)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.full((3,), float(index)), index + NEW * (index in self.changed)


def some(share: float, seed: int = 0) -> list[int]:
    """Return samples to change, of those that a folder is not known by."""
    others = [index for index in range(NUM_SAMPLES) if index not in LOOKED_AT]
    return random.Random(seed).sample(others, round(share * NUM_SAMPLES))


@dataclass
class Epoch:
    """What a rank read in an epoch, and what was old of it."""

    seen: list[int] = field(default_factory=list)
    num_old: int = 0
    num_old_once_found: int = 0  # of them, those in batches that began when this rank knew
    generation: int = 0  # of the rank's shelf at its end
    counts: dict[str, int] = field(default_factory=dict)


def trained(
    store: loft.SampleStore, source: Labels, sizes: Sequence[int], num_epochs: int
) -> Iterator[Epoch]:
    plans = FakePlans(sizes, rank=store.rank)
    loader = loft.DataLoader(store, plans, seed=3)
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        read, before = Epoch(), dict(store.counters)
        batches = iter(loader)
        while True:
            is_known = store._shelf.generation > 0
            batch = next(batches, None)
            if batch is None:
                break
            plans.next_step += 1
            numbers, labels = batch[0][:, 0].long().tolist(), batch[1].tolist()
            right = [number + NEW * (number in source.changed) for number in numbers]
            num_old = sum(label != each for label, each in zip(labels, right, strict=True))
            read.seen += numbers
            read.num_old += num_old
            read.num_old_once_found += num_old * is_known
        read.generation = store._shelf.generation
        read.counts = {name: count - before[name] for name, count in store.counters.items()}
        yield read


def fill(folder: Path, sizes: Sequence[int], **options: Any) -> None:
    """Keep all samples, as they are at first, in a folder of each rank."""
    barrier = threading.Barrier(len(sizes))

    def rank(transport: LocalTransport) -> None:
        store = store_in(folder, Labels(), transport, **options)
        list(trained(store, Labels(), sizes, 1))
        barrier.wait(60)
        store.close()

    run_ranks(len(sizes), rank)


def store_in(
    folder: Path, source: Dataset[Any], transport: Any = None, **options: Any
) -> loft.SampleStore:
    return loft.SampleStore(
        source,
        memory_bytes=0,
        disk_bytes=1 << 20,
        folder=folder,
        transport=LocalWorld(1).transport(0) if transport is None else transport,
        **options,
    )


@pytest.mark.parametrize("sizes", [(20,), (12, 8)], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_change_is_found_in_the_first_epoch_and_nothing_old_is_read_from_then_on(
    tmp_path: Path, sizes: Sequence[int], share: float, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, sizes)
    source, barrier = Labels(some(share)), threading.Barrier(len(sizes))

    def rank(transport: LocalTransport, num_epochs: int) -> list[Epoch]:
        store = store_in(tmp_path, source, transport)
        assert store.num_kept > 0
        found = []
        for each in trained(store, source, sizes, num_epochs):
            barrier.wait(60)
            found.append(each)
        store.close()
        return found

    by_rank = run_ranks(len(sizes), lambda transport: rank(transport, 3), timeout_s=120.0)
    for epoch in range(3):
        read = [each[epoch] for each in by_rank]
        assert sorted(number for each in read for number in each.seen) == list(range(NUM_SAMPLES))
        assert [each.generation for each in read] == [1] * len(sizes)  # within the first epoch
        assert [each.num_old_once_found for each in read] == [0] * len(sizes)
        assert epoch == 0 or [each.num_old for each in read] == [0] * len(sizes)
    assert sum(each[2].counts["source"] for each in by_rank) == 0  # all are kept anew
    assert caplog.text.count("of the data set is not what it was when it was kept") >= 1
    # A later run finds none of the old ones, which are as long as the new.
    by_rank = run_ranks(len(sizes), lambda transport: rank(transport, 1))
    assert [each[0].num_old for each in by_rank] == [0] * len(sizes)
    assert [each[0].generation for each in by_rank] == [0] * len(sizes)
    assert sum(each[0].counts["source"] for each in by_rank) == 0


def test_a_change_of_few_samples_is_found_by_one_of_the_next_runs(tmp_path: Path) -> None:
    """4 of 400, of which 300 are looked at: each run misses them once in 256 times."""
    fill(tmp_path, (20,))
    source = Labels(some(0.01))
    for _ in range(4):
        store = store_in(tmp_path, source)
        (read,) = trained(store, source, (20,), 1)
        assert read.num_old <= 4
        assert read.num_old_once_found == 0
        store.close()
        if read.generation:
            return
    pytest.fail("missed by four runs, as one set of runs in 4 thousand million would")


@pytest.mark.parametrize("num_kept", [100, 400, 3000, 50_000, 1_281_167])
def test_a_change_of_five_percent_is_missed_less_than_once_in_a_million(num_kept: int) -> None:
    """By the arithmetic at the head of the file; the cost is 300 reads, of all ranks together."""
    shelf = Shelf(num_kept, memory_bytes=0)
    shelf.is_of_earlier_run[:] = True
    found = checks.Checks(lambda numbers: [], shelf, rank=0)
    numbers = range(num_kept)
    num_changed = round(0.05 * num_kept)
    assert (1 - found._old_rate) ** num_changed < 1e-6
    num_looked_at = len(found.chosen(numbers))
    assert abs(num_looked_at - min(300, num_kept)) <= 6 * 300**0.5  # 6 sigma at most
    # A sample is looked at as one of an earlier run once; then it is one like all others.
    most = min(0.01 * num_kept, 300)
    assert len(found.chosen(numbers)) <= most + 6 * most**0.5 + 6


def test_a_change_while_a_run_goes_on_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MOST_SHARE", 1.0)  # a run of one epoch, not of hundred
    source, barrier = Labels(), threading.Barrier(2)

    def rank(transport: LocalTransport) -> list[Epoch]:
        store = loft.SampleStore(source, memory_bytes=1 << 20, transport=transport)
        found = []
        for each in trained(store, source, (12, 8), 4):
            found.append(each)
            if barrier.wait(60) == 0 and len(source.changed) == 0:
                source.changed = set(some(0.1))
            barrier.wait(60)
        store.close()
        return found

    for first, second, *later in run_ranks(2, rank, timeout_s=120.0):
        assert (first.generation, second.generation) == (0, 1)
        assert second.num_old_once_found == 0
        assert [each.num_old for each in later] == [0, 0]
        assert later[-1].counts["source"] == 0


def test_a_rank_that_is_not_reached_hears_of_it_when_the_next_epoch_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, (12, 8))
    source, barrier = Labels(some(0.5)), threading.Barrier(2)

    def rank(transport: LocalTransport) -> list[Epoch]:
        store = store_in(tmp_path, source, transport, timeout_s=0.5)
        if transport.rank == 1:
            store._checks.chosen = lambda numbers: []  # type: ignore[method-assign]
            assert store._server is not None
            store._server.process.kill()
            store._server.process.wait()
        barrier.wait(60)
        found = []
        for each in trained(store, source, (12, 8), 2):
            barrier.wait(60)
            found.append(each)
        store.close()
        return found

    first, second = run_ranks(2, rank, timeout_s=120.0)
    assert "rank 1 was not told that the data set has changed" in caplog.text
    assert [first[0].generation, second[0].generation] == [1, 0]
    assert "the data set has changed: what rank 1 keeps is thrown away" in caplog.text
    for each in (first[1], second[1]):
        assert each.generation == 1
        assert each.num_old == 0


@pytest.mark.parametrize("is_told", [True, False])
def test_the_other_ranks_are_told_at_once_and_asked_for_nothing_until_all_know(
    tmp_path: Path, is_told: bool
) -> None:
    """Rank 0 alone looks; where its notice is lost, rank 1 still has what is old."""
    fill(tmp_path, (12, 8))
    source, barrier = Labels(some(0.5)), threading.Barrier(2)
    right = [number + NEW * (number in source.changed) for number in range(NUM_SAMPLES)]

    def rank(transport: LocalTransport) -> None:
        store = store_in(tmp_path, source, transport)
        assert store._peers is not None
        if not is_told:
            store._peers.tell_changed = lambda *_, **__: None  # type: ignore[method-assign]
        if transport.rank == 1:
            store._checks.chosen = lambda numbers: []  # type: ignore[method-assign]
        else:
            mine = np.flatnonzero(store._shelf.held()).tolist()
            for number in mine:
                store.__getitems__([number])
            store._shelf.end_checks()  # what rank 1 sent would be found out, too
            labels = [float(label) for _, label in store.__getitems__(range(NUM_SAMPLES))]
            assert labels == right
            assert store.counters["peer"] == 0
        barrier.wait(60)
        if transport.rank == 1:
            assert store._shelf.generation == int(is_told)
            labels = [float(label) for _, label in store.__getitems__(range(NUM_SAMPLES))]
            assert (labels == right) == is_told
        barrier.wait(60)
        store.close()

    run_ranks(2, rank, timeout_s=120.0)


class Drawn(Labels):
    """A data set that augments at random; ``share`` of its reads are others."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self._share, self._random = share, random.Random(7)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        is_flipped = self._random.random() < self._share / 2
        noise = self._random.random() if self._share == 1.0 else 0.5
        return torch.full((3,), float(index)), index + is_flipped * noise


@pytest.mark.parametrize("share", [1.0, 0.99], ids=["any value", "a coin's flip"])
def test_a_data_set_that_is_another_at_each_read_is_kept_and_named_once(
    share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks, "_MOST_SHARE", 1.0)
    store = loft.SampleStore(
        Drawn(share), memory_bytes=1 << 20, transport=LocalWorld(1).transport(0)
    )
    seen = [[float(store[number][1]) for number in range(NUM_SAMPLES)] for _ in range(4)]
    assert seen[0] == seen[1] == seen[3]  # nothing was thrown away
    assert caplog.text.count("gives other bytes each time") == 1
    assert 0 < store.counters["checked"] < 10
    assert store.counters["source"] == NUM_SAMPLES
    store.close()


def test_what_cannot_be_read_again_is_served_as_it_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, (20,))
    source = Labels()
    store = store_in(tmp_path, source)
    source.changed = None  # type: ignore[assignment]  # each read is a TypeError now
    assert [float(store[number][1]) for number in range(NUM_SAMPLES)] == list(range(NUM_SAMPLES))
    assert caplog.text.count("cannot be read from the data set again (TypeError") == 1
    assert store.counters["checked"] == 1
    store.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_processes_throw_away_together(tmp_path: Path, num_workers: int) -> None:
    fill(tmp_path, (20,))
    source = Labels(some(0.5))
    store = store_in(tmp_path, source)
    loader = torch.utils.data.DataLoader(store, batch_size=10, num_workers=num_workers)
    for epoch in range(2):
        found = [label for _, labels in loader for label in labels.tolist()]
        assert epoch == 0 or found == [source[number][1] for number in range(NUM_SAMPLES)]
    assert store._shelf.generation == 1
    store.close()


def test_ranks_of_an_elastic_job_look_for_themselves(tmp_path: Path) -> None:
    fill(tmp_path, (20,))
    source = Labels(some(0.5))
    with elastic_job():
        store = store_in(tmp_path, source)
    for _ in range(2):
        labels = [float(store[number][1]) for number in range(NUM_SAMPLES)]
    assert labels == [source[number][1] for number in range(NUM_SAMPLES)]
    store.close()


def test_what_is_written_over_while_it_is_read_is_read_from_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has found a change, between this one's look at the index and its copy."""
    fill(tmp_path, (20,))
    source = Labels()
    store = store_in(tmp_path, source)
    store._shelf.end_checks()
    source.changed = set(range(NUM_SAMPLES))

    def late(data: Any) -> Any:
        value = decode_sample(data)
        store._shelf.empty(1)
        return value

    monkeypatch.setattr("loft_hvd.store.store.decode_sample", late)
    assert [float(label) for _, label in store.__getitems__([3, 5])] == [3 + NEW, 5 + NEW]
    assert {name: store.counters[name] for name in ("own", "source")} == {"own": 0, "source": 2}
    store.close()


# The shelf.


def test_an_empty_shelf_takes_what_was_read_after(tmp_path: Path) -> None:
    shelf = Shelf(8, memory_bytes=1024, disk_bytes=1024, path=tmp_path / "f", identity=1)
    for number in range(8):
        shelf.add(number, bytes([number]) * 100)
    full = shelf.bytes_kept
    assert shelf.empty(1)
    assert not shelf.empty(1)  # somebody has done so: a notice that is repeated changes nothing
    assert not shelf.held().any()
    assert not shelf.add(3, b"old" * 30, generation=0)
    for number in range(8):
        assert shelf.add(number, bytes([number + 100]) * 100, generation=1)
    assert shelf.bytes_kept == full
    for number in range(8):
        kept = shelf.read(number)
        assert kept is not None
        assert bytes(kept[0]) == bytes([number + 100]) * 100
    shelf.close()


@pytest.mark.parametrize("num_new", [0, 1, 3])
def test_a_later_run_does_not_find_what_was_thrown_away(tmp_path: Path, num_new: int) -> None:
    """Records are of one length: behind the new ones stand old ones, whole."""
    options: dict[str, Any] = {
        "memory_bytes": 0, "disk_bytes": 1 << 16, "path": tmp_path / "f", "identity": 1,
    }  # fmt: skip
    shelf = Shelf(8, **options)
    for number in range(8):
        shelf.add(number, bytes([number]) * 100)
    shelf.empty(1)
    for number in range(num_new):
        shelf.add(number, bytes([number + 100]) * 100, generation=1)
    shelf.close()
    assert np.flatnonzero(Shelf(8, **options).held()).tolist() == list(range(num_new))


def test_a_file_that_cannot_be_emptied_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(8, memory_bytes=1024, disk_bytes=1024, path=tmp_path / "f", identity=1)
    shelf.add(3, b"old" * 30)

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.pwrite", fails)
    assert shelf.empty(1)
    assert "cannot be emptied ([Errno 5] Input/output error): it is removed" in caplog.text
    assert not (tmp_path / "f").exists()
    monkeypatch.undo()
    assert shelf.add(3, b"new" * 30, generation=1)
    assert shelf.bytes_kept[0] > 0  # in memory


# The version.


def test_a_folder_of_another_version_is_emptied_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, (12, 8), version="2024-05")

    def rank(transport: LocalTransport, version: Any) -> int:
        store = store_in(tmp_path, Labels(), transport, version=version)
        num_kept = store.num_kept
        store.close()
        return num_kept

    kept = run_ranks(2, lambda transport: rank(transport, "2024-05"))
    assert sum(kept) >= NUM_SAMPLES
    assert "thrown away" not in caplog.text
    assert run_ranks(2, lambda transport: rank(transport, 2025)) == [0, 0]
    for name in ("rank0", "rank1"):
        assert (
            f"{name}.samples are thrown away: they were kept with another version=" in caplog.text
        )
    caplog.clear()
    assert run_ranks(2, lambda transport: rank(transport, "2025")) == [0, 0]
    assert "thrown away" not in caplog.text  # 2025 and "2025" are one version


def test_a_folder_of_another_data_set_is_said_to_be_emptied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, (20,))
    store = store_in(tmp_path, Labels(LOOKED_AT))
    assert store.num_kept == 0
    assert "are thrown away: they were kept of another data set" in caplog.text
    store.close()


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"version": ["1"]}, ArgumentTypeError, r"version=\['1'\] must be a text or a number"),
        ({"version": b"1"}, ArgumentTypeError, "must be a text or a number"),
        ({"version": 1, "folder": None, "disk_bytes": 0}, ArgumentError, "give both, or neither"),
    ],
)
def test_versions_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], kind: type, match: str
) -> None:
    given: dict[str, Any] = {"memory_bytes": 0, "disk_bytes": 1 << 20, "folder": tmp_path}
    given |= options
    with pytest.raises(kind, match=match):
        loft.SampleStore(Labels(), transport=LocalWorld(1).transport(0), **given)


def test_ranks_with_other_versions_are_refused(tmp_path: Path) -> None:
    def rank(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError, match="version"):
            store_in(tmp_path, Labels(), transport, version=transport.rank)

    run_ranks(2, rank)
