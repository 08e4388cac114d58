"""What is put on the shelf is there for all processes, within its budgets, and whole."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pickle
import random
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import loft_hvd.store.shelf as shelf_module
from loft_hvd.errors import DataError
from loft_hvd.store.shelf import Shelf, checksum

DATA = bytes(range(100))  # takes two units of 64 bytes, with its record


def test_what_was_added_is_read() -> None:
    shelf = Shelf(10, memory_bytes=1000)
    assert shelf.read(3) is None
    assert shelf.add(3, DATA)
    kept = shelf.read(3)
    assert kept is not None
    assert bytes(kept[0]) == DATA
    assert shelf.held().tolist() == [index == 3 for index in range(10)]


def test_nothing_is_kept_beyond_the_budgets(tmp_path: Path) -> None:
    shelf = Shelf(10, memory_bytes=300, disk_bytes=330, path=tmp_path / "kept")
    kept = [shelf.add(index, DATA) for index in range(10)]
    # 330 bytes of disk hold two records of 128 beside the file's first 64; 300 of memory hold two.
    assert kept == [True] * 4 + [False] * 6
    assert shelf.bytes_kept == (256, 320)
    assert (tmp_path / "kept").stat().st_size <= 330
    assert all(bytes(shelf.read(index)[0]) == DATA for index in range(4))  # type: ignore[index]
    assert shelf.num_kept == 4


def test_a_forked_process_reads_and_adds() -> None:
    shelf = Shelf(10, memory_bytes=10_000)
    shelf.add(1, b"parent")
    pid = os.fork()
    if pid == 0:
        found = shelf.read(1)
        shelf.add(2, b"child")
        shelf.count(own=3)
        os._exit(0 if found is not None and bytes(found[0]) == b"parent" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    found = shelf.read(2)
    assert found is not None
    assert bytes(found[0]) == b"child"
    assert shelf.counters["own"] == 3


def test_a_process_that_is_stopped_with_the_lock_in_hand_costs_counts_and_no_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(10, memory_bytes=1000)
    monkeypatch.setattr("loft_hvd.store.shelf._LOCK_S", 0.05)
    held, ends = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with shelf._locked():
            os.write(held[1], b"x")
            os.read(ends[0], 1)
        os._exit(0)
    os.read(held[0], 1)
    try:
        for _ in range(3):
            shelf.count(own=1)
    finally:
        os.write(ends[1], b"x")
        os.waitpid(pid, 0)
    assert caplog.text.count("until it lets go nothing is counted") == 1
    shelf.count(own=2)
    assert shelf.counters["own"] == 2


def test_a_pickled_shelf_is_the_same_one() -> None:
    shelf = Shelf(10, memory_bytes=10_000)
    other = pickle.loads(pickle.dumps(shelf))
    other.add(5, b"there")
    found = shelf.read(5)
    assert found is not None
    assert bytes(found[0]) == b"there"


def test_processes_that_add_at_once_lose_nothing() -> None:
    shelf = Shelf(400, memory_bytes=400 * 128)
    pids = []
    for process in range(4):
        pid = os.fork()
        if pid == 0:
            for index in range(process * 50, process * 50 + 200):
                shelf.add(index % 400, bytes([index % 251]) * 90)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for index in range(350):
        found = shelf.read(index)
        assert found is not None
        assert bytes(found[0]) == bytes([index % 251]) * 90
    assert shelf.num_kept == 350
    assert shelf.bytes_kept == (350 * 128, 0)


def test_a_later_run_finds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kept"
    first = Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path, identity=7)
    for index in (4, 8):
        first.add(index, DATA)
    first.close()
    again = Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path, identity=7)
    assert again.held().nonzero()[0].tolist() == [4, 8]
    assert bytes(again.read(8)[0]) == DATA  # type: ignore[index]
    assert again.add(1, DATA)
    again.close()
    other = Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path, identity=8)
    assert not other.held().any()


def test_a_smaller_budget_still_reads_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    first = Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path)
    for index in range(5):
        first.add(index, DATA)
    first.close()
    again = Shelf(10, memory_bytes=0, disk_bytes=200, path=path)
    assert again.num_kept == 5
    assert not again.add(9, DATA)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_costs_samples_and_no_wrong_byte(tmp_path: Path, seed: int) -> None:
    path, draw = tmp_path / "kept", random.Random(seed)
    first = Shelf(50, memory_bytes=0, disk_bytes=10_000, path=path)
    for index in range(50):
        first.add(index, bytes([index]) * 60)
    first.close()
    content = bytearray(path.read_bytes())
    for _ in range(5):
        content[draw.randrange(64, len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    again = Shelf(50, memory_bytes=0, disk_bytes=10_000, path=path)
    kept = [again.read(index) for index in range(50)]
    assert all(each is None or bytes(each[0]) == bytes([i]) * 60 for i, each in enumerate(kept))
    assert sum(each is not None for each in kept) > 0


def test_a_sample_that_was_damaged_on_disk_is_whole_again_in_later_runs(tmp_path: Path) -> None:
    path = tmp_path / "kept"

    def shelf() -> Shelf:
        return Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path)

    first = shelf()
    for index in (3, 4):
        first.add(index, DATA)
    first.close()
    content = bytearray(path.read_bytes())
    content[content.index(DATA) + 50] ^= 1  # in the bytes of sample 3
    path.write_bytes(content)
    second = shelf()
    assert second.read(3) is None
    assert second.add(3, DATA)
    taken = second.bytes_kept
    second.close()
    third = shelf()
    assert bytes(third.read(3)[0]) == DATA  # type: ignore[index]
    assert bytes(third.read(4)[0]) == DATA  # type: ignore[index]
    assert third.counters["corrupt"] == 0
    assert third.num_kept == 2
    assert third.bytes_kept == taken == (0, 64 + 3 * 128)  # the damaged record stays


def test_a_full_disk_is_said_once_and_what_is_kept_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write, room, tried = tmp_path / "kept", os.pwrite, [150], list[int]()

    def put(descriptor: int, data: bytes, offset: int) -> int:
        tried.append(descriptor)
        if descriptor != disk:
            return write(descriptor, data, offset)
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: room[0]], offset)  # what still goes on the disk
        room[0] -= written
        return written

    shelf = Shelf(10, memory_bytes=10_000, disk_bytes=10_000, path=path)
    disk = shelf.descriptors[3]
    monkeypatch.setattr(os, "pwrite", put)
    assert shelf.add(0, DATA)  # with its head 124 bytes
    assert shelf.bytes_kept == (0, 64 + 128)
    tried.clear()
    assert shelf.add(1, DATA)  # in memory
    assert tried.count(disk) == 2  # what went on the disk, and the call that failed
    assert shelf.add(2, DATA)
    assert tried.count(disk) == 2
    assert shelf.bytes_kept == (256, 64 + 128)
    assert all(shelf.read(index) is not None for index in range(3))
    assert len([each for each in caplog.messages if "is full" in each]) == 1
    shelf.close()
    again = Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path)  # a part of 1 is in the file
    assert again.held().nonzero()[0].tolist() == [0]


def test_memory_that_is_refused_is_said_and_what_is_kept_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(10, memory_bytes=10_000)
    assert shelf.add(0, DATA)

    def refused(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "pwrite", refused)
    assert not shelf.add(1, DATA)
    assert shelf.is_full
    assert not shelf.add(2, DATA)
    assert shelf.read(0) is not None
    assert len([each for each in caplog.messages if "Cannot allocate memory" in each]) == 1


def given_bytes(shelf: Shelf, at_least: int = 0) -> int:
    """Wait until the kernel has given so many bytes to a shelf's memory; return how many it has."""
    until = time.monotonic() + 30
    while (given := 512 * os.fstat(shelf.descriptors[2]).st_blocks) < at_least:
        assert time.monotonic() < until
        time.sleep(0.001)
    return given


def can_clear() -> bool:
    """Whether the kernel knows the call."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return shelf_module._advise(begin, mmap.PAGESIZE, shelf_module._POPULATE_WRITE) == 0


@pytest.mark.skipif(not can_clear(), reason="a kernel without MADV_POPULATE_WRITE")
def test_memory_is_cleared_while_samples_are_read_and_what_is_there_stays() -> None:
    shelf, data = Shelf(100, memory_bytes=512_000), bytes(range(256)) * 250
    assert shelf.add(0, data)  # of 64,064 bytes with its head
    with shelf.clearing(4):
        assert given_bytes(shelf, at_least=320_000) < 512_000
    assert all(shelf.add(index, data) for index in range(1, 6))
    with shelf.clearing(4):  # for which the budget has no room
        given_bytes(shelf, at_least=505_000)
    assert os.fstat(shelf.descriptors[2]).st_size == 512_000
    kept = [shelf.read(index) for index in range(6)]
    assert all(each is not None and bytes(each[0]) == data for each in kept)


class Cleared:
    """Notes what would be cleared, in bytes, in place of ``_clear``."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def __call__(self, is_over: threading.Event, memory: npt.NDArray[np.uint8]) -> None:
        self.num_bytes.append(memory.nbytes)


def test_no_more_is_cleared_than_samples_have_taken_on_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleared = Cleared()
    monkeypatch.setattr(shelf_module, "_clear", cleared)
    shelf = Shelf(100, memory_bytes=100_000)
    with shelf.clearing(4):  # how long samples are is not known yet
        pass
    shelf.add(0, bytes(40))  # 64 bytes with its head, then 19,200
    shelf.add(1, bytes(19_176))
    for num_samples in (4, 0, 50):
        with shelf.clearing(num_samples):
            pass
    assert cleared.num_bytes == [4 * 9632, 100_000 // 64 * 64 - 19_264]


def test_no_memory_is_cleared_for_what_goes_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = Cleared()
    monkeypatch.setattr(shelf_module, "_clear", cleared)
    shelf = Shelf(10, memory_bytes=1000, disk_bytes=200, path=tmp_path / "kept")
    assert shelf.add(0, DATA)
    with shelf.clearing(2):
        pass
    assert cleared.num_bytes == []
    assert shelf.add(1, DATA)  # in memory: the disk is full
    with shelf.clearing(2):
        pass
    assert cleared.num_bytes == [256]


@pytest.mark.parametrize(("result", "most"), [(0, 2), (-1, 1)])
def test_clearing_ends_with_the_reading_or_where_the_kernel_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, result: int, most: int
) -> None:
    is_over, calls = threading.Event(), []

    def advise(begin: int, num_bytes: int, advice: int) -> int:
        calls.append(num_bytes)
        if len(calls) == 2:
            is_over.set()
        return result

    monkeypatch.setattr(shelf_module, "_advise", advise)
    shelf_module._clear(is_over, np.zeros(4 << 20, np.uint8))  # 16 calls
    assert calls == [1 << 18] * most


def test_a_thread_that_cannot_start_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> None:
        raise RuntimeError("can't start new thread")

    shelf = Shelf(10, memory_bytes=1000)
    assert shelf.add(0, DATA)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with shelf.clearing(1):
            pass
    assert shelf.add(1, DATA)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "replace"])
def test_a_file_that_cannot_be_begun_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "kept"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(DataError, match="No space left"):
            Shelf(10, memory_bytes=0, disk_bytes=1000, path=path)
    assert list(tmp_path.glob("kept.*")) == []
    assert not any(each.startswith(str(path)) for each in open_paths())
    assert Shelf(10, memory_bytes=0, disk_bytes=1000, path=path).add(1, DATA)


def open_paths() -> list[str]:
    """Return what the descriptors of this process lead to."""
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [os.readlink(each) for each in links if each.is_symlink()]  # that of listdir is gone


def test_a_file_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    shelf = Shelf(10, memory_bytes=0, disk_bytes=1000, path=path)
    monkeypatch.setattr("loft_hvd.store.shelf._LOCK_S", 0.0)
    with pytest.raises(DataError, match="another process uses it"):
        Shelf(10, memory_bytes=0, disk_bytes=1000, path=path)
    assert shelf.num_kept == 0


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="disk_bytes=0"):
        Shelf(10, memory_bytes=0, disk_bytes=1000, path=tmp_path / "file" / "kept")


def test_a_closed_shelf_stays_readable_when_another_data_set_takes_its_place(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kept"
    first = Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path, identity=1)
    first.add(3, DATA)
    first.close()
    other = Shelf(10, memory_bytes=0, disk_bytes=10_000, path=path, identity=2)
    other.add(4, b"other")
    assert bytes(first.read(3)[0]) == DATA  # type: ignore[index]
    assert not first.add(5, DATA)
    assert not other.held()[3]
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_a_lock_that_is_held_for_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(10, memory_bytes=1000)
    monkeypatch.setattr("loft_hvd.store.shelf._LOCK_S", 0.0)
    held, said = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with shelf._locked():
            os.write(held[1], b"x")
            os.read(said[0], 1)
        os._exit(0)
    os.read(held[0], 1)
    with pytest.raises(BlockingIOError, match="held by another process"):
        shelf.add(1, DATA)
    os.write(said[1], b"x")
    os.waitpid(pid, 0)
    assert shelf.add(1, DATA)


def test_a_full_shelf_says_so() -> None:
    shelf = Shelf(10, memory_bytes=200)
    assert shelf.add(1, DATA)
    assert not shelf.is_full
    assert not shelf.add(2, DATA)
    assert shelf.is_full


def test_a_full_shelf_takes_no_smaller_sample_and_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(10, memory_bytes=200)
    assert shelf.add(1, DATA)
    assert not shelf.add(2, DATA)
    monkeypatch.setattr(shelf, "_locked", lambda: pytest.fail("nothing is to be written"))
    assert not shelf.add(3, b"")
    assert shelf.add(1, DATA)  # is there


def test_what_is_found_is_not_compared_yet() -> None:
    shelf = Shelf(10, memory_bytes=400)
    assert shelf.add(1, DATA)
    found = shelf.find(1)
    assert found is not None
    assert (bytes(found[0]), found[1]) == (DATA, checksum(DATA))
    found[0][0] ^= 1
    assert shelf.find(1) is not None
    assert shelf.find(2) is None
    assert shelf.counters["corrupt"] == 0
    assert shelf.read(1) is None
    assert not shelf.held()[1]
    assert shelf.counters["corrupt"] == 1


@pytest.mark.parametrize("is_kept_again", [True, False])
def test_a_sample_that_another_drops_while_it_is_read_is_dropped_once(
    is_kept_again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(10, memory_bytes=400)
    assert shelf.add(1, DATA)
    kept = shelf.read(1)
    assert kept is not None
    kept[0][0] ^= 1

    def drop_meanwhile(data: memoryview) -> int:
        monkeypatch.undo()
        assert shelf.read(1) is None
        if is_kept_again:
            assert shelf.add(1, DATA)
        return checksum(data)

    monkeypatch.setattr(shelf_module, "checksum", drop_meanwhile)
    assert shelf.read(1) is None
    assert shelf.held()[1] == is_kept_again
    assert shelf.counters["corrupt"] == 1
    assert caplog.text.count("sample 1 is damaged") == 1


def test_a_process_that_only_reads_names_the_half_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(10, memory_bytes=0, disk_bytes=4096, path=tmp_path / "kept")
    assert shelf.add(1, DATA)
    kept = shelf.read(1)
    assert kept is not None
    kept[0][0] ^= 1
    descriptors = [os.dup(each) for each in shelf.descriptors]
    assert Shelf.attached(shelf.description, descriptors).read(1) is None
    assert "sample 1 is damaged in the file on disk" in caplog.text


def test_a_record_of_another_sample_is_not_taken_for_one() -> None:
    shelf = Shelf(10, memory_bytes=1000)
    assert shelf.add(1, DATA)
    assert shelf.add(2, DATA[::-1])
    shelf._index[2] = shelf._index[1]
    assert shelf.read(2) is None
    assert shelf.counters["corrupt"] == 1
    assert shelf.read(1) is not None
