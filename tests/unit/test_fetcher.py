"""What is fetched ahead is what peers keep, within its budget, and decides nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")

from loft_hvd.store import fetcher
from loft_hvd.store.fetcher import Fetcher, Ring, Stage, Staged
from loft_hvd.store.peers import Address, Received, Server
from loft_hvd.store.shelf import Shelf, checksum

KEY = bytes(range(32))
NUM_SAMPLES = 1000


def value(sample: int) -> bytes:
    return sample.to_bytes(4, "little") * (1 + sample % 5 * 500)


def received(sample: int, num_bytes: int = 0) -> Received:
    data = bytes([sample % 256]) * num_bytes if num_bytes else value(sample)
    return Received(memoryview(data), checksum(data))


# The stage and its ring.


def test_a_sample_is_taken_once() -> None:
    stage = Stage(NUM_SAMPLES, 1 << 16)
    ring = Ring(stage)
    assert ring.add(7, received(7), 0.25)
    found, failed = stage.take([7, 8], timeout_s=0.0)
    assert (found[7].data, found[7].seconds, failed) == (value(7), 0.25, [])
    assert stage.take([7], timeout_s=0.0) == ({}, [])


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_holds_what_nobody_has_taken_whatever_the_sizes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stage = Stage(NUM_SAMPLES, 20_000)
    ring = Ring(stage)
    there: dict[int, bytes] = {}
    num_refused = 0
    for sample in rng.permutation(NUM_SAMPLES).tolist():
        each = received(sample, int(rng.integers(1, 3000)))
        if ring.add(sample, each, 0.0):
            there[sample] = bytes(each.data)
        else:
            num_refused += 1
            stage.index[sample] = 0
        for other in rng.permutation(list(there))[: rng.integers(0, 3)].tolist():
            found, _ = stage.take([other], timeout_s=0.0)
            assert found[other].data == there.pop(other)
    assert num_refused > 0  # the ring was full at times
    found, _ = stage.take(list(there), timeout_s=0.0)
    assert {sample: each.data for sample, each in found.items()} == there
    assert ring.num_fitting(32) == 20_000 // 64


@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_to_fit_fits_whatever_the_sizes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stage = Stage(NUM_SAMPLES, 20_000)
    ring = Ring(stage)
    there: list[int] = []
    samples = iter(range(NUM_SAMPLES))
    for _ in range(100):
        most = int(rng.integers(1, 3000))
        for sample in [next(samples) for _ in range(min(ring.num_fitting(most), 9))]:
            assert ring.add(sample, received(sample, int(rng.integers(1, most + 1))), 0.0), seed
            there.append(sample)
        num_read = int(rng.integers(0, 9))
        assert len(stage.take(there[:num_read], timeout_s=0.0)[0]) == len(there[:num_read])
        del there[:num_read]


def test_what_was_overwritten_is_noticed() -> None:
    stage = Stage(NUM_SAMPLES, 1 << 16)
    Ring(stage).add(3, received(3), 0.0)
    stage.view[60] ^= 1
    assert stage.take([3], timeout_s=0.0) == ({}, [])


def test_a_head_of_which_half_was_overwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(NUM_SAMPLES, 1 << 16)
    ring = Ring(stage)
    ring.add(3, received(3), 0.0)
    old = fetcher._RECORD

    class Slow:
        """Reads a head while the fetcher lays another sample over it, but for the number."""

        size = old.size

        def unpack_from(self, view: memoryview, begin: int) -> tuple[object, ...]:
            magic, _, number, _, seconds = old.unpack_from(view, begin)
            monkeypatch.setattr(fetcher, "_RECORD", old)
            ring.clear()
            ring.add(4, received(4), 0.0)
            _, length, _, digest, _ = old.unpack_from(view, begin)
            return magic, length, number, digest, seconds

    monkeypatch.setattr(fetcher, "_RECORD", Slow())
    assert stage.take([3], timeout_s=0.0) == ({}, [])
    assert stage.take([4], timeout_s=0.0)[0][4].data == value(4)


def test_several_readers_take_each_sample_once() -> None:
    stage = Stage(NUM_SAMPLES, 1 << 22)
    ring = Ring(stage)
    for sample in range(500):
        assert ring.add(sample, received(sample), 0.0)
    stage.index[500:600] = 0xFFFFFFFF  # on its way

    def read(first: int) -> dict[int, Staged]:
        return stage.take(range(first, 600, 4), timeout_s=20.0)[0]

    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read, first) for first in range(4)]
        for sample in range(500, 600):
            assert ring.add(sample, received(sample), 0.0)
        found = [each.result() for each in reads]
    assert [len(each) for each in found] == [150] * 4
    assert all(each[sample].data == value(sample) for each in found for sample in each)


def test_a_wait_begins_anew_with_each_sample_that_comes() -> None:
    stage = Stage(NUM_SAMPLES, 1 << 16)
    ring = Ring(stage)
    stage.index[:8] = 0xFFFFFFFF

    def lay() -> None:
        for sample in range(8):
            time.sleep(0.25)
            ring.add(sample, received(sample), 0.0)

    thread = threading.Thread(target=lay)
    thread.start()
    found, failed = stage.take(range(8), timeout_s=1.0)  # 2 s in all
    thread.join()
    assert (set(found), failed, stage.is_lost) == (set(range(8)), [], False)


def test_what_was_passed_over_makes_room() -> None:
    stage = Stage(NUM_SAMPLES, 64 * 40)
    ring = Ring(stage)
    for sample in (1, 2, 3):
        assert ring.add(sample, received(sample, 700), 0.0)
    assert not ring.add(4, received(4, 700), 0.0)
    stage.take([2], timeout_s=0.0)  # 1 is never read
    assert not ring.add(4, received(4, 700), 0.0)
    ring.drop_passed()
    assert ring.add(4, received(4, 700), 0.0)
    assert set(stage.take([1, 3, 4], timeout_s=0.0)[0]) == {3, 4}


# The process.


class World:
    """Two ranks that keep the even and the odd samples, and the fetcher of a third."""

    def __init__(self, num_bytes: int = 1 << 20, *, timeout_s: float = 5.0) -> None:
        self.servers = []
        for rank in range(2):
            shelf = Shelf(NUM_SAMPLES, memory_bytes=8 << 20)
            for sample in range(rank, NUM_SAMPLES, 2):
                assert shelf.add(sample, value(sample))
            self.servers.append(Server(shelf, host="127.0.0.1", key=KEY, owner=rank))
        self.stage, self.shelf = Stage(NUM_SAMPLES, num_bytes), Shelf(NUM_SAMPLES, memory_bytes=0)
        addresses = [each.address() for each in self.servers] + [Address("127.0.0.1", 1)]
        self.fetcher = Fetcher(
            self.stage, self.shelf, addresses=addresses, key=KEY, timeout_s=timeout_s
        )

    def expect(self, samples: Sequence[int]) -> None:
        numbers = np.array(samples, np.int64)
        self.fetcher.expect(numbers, (numbers % 2).astype(np.int16))

    def wait(self, samples: Sequence[int]) -> None:
        """Wait until the fetcher has asked for samples, or has them."""
        until = time.monotonic() + 30
        while not self.stage.index[list(samples)].all():
            assert time.monotonic() < until
            time.sleep(0.01)

    def close(self) -> None:
        self.fetcher.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_samples_come_ahead_from_all_keepers(world: World) -> None:
    wanted = list(range(100, 140))
    world.expect(wanted)
    world.wait(wanted)
    found, failed = world.stage.take(wanted, timeout_s=10.0)
    assert failed == []
    assert {sample: each.data for sample, each in found.items()} == {
        sample: value(sample) for sample in wanted
    }
    assert all(each.seconds > 0 for each in found.values())


def test_a_fetcher_walks_on_as_its_budget_is_read() -> None:
    world = World(300_000)  # of 40 samples a batch has 160 kB; there are 20 batches
    try:
        wanted = np.random.default_rng(1).permutation(NUM_SAMPLES)[:800].tolist()
        for first in range(0, 800, 40):
            world.expect(wanted[first : first + 40])
        for first in range(0, 800, 40):
            batch = wanted[first : first + 40]
            until = time.monotonic() + 30
            while not world.stage.index[batch].all():
                assert time.monotonic() < until
                time.sleep(0.002)
            found, failed = world.stage.take(batch, timeout_s=10.0)
            assert failed == []
            assert {each: found[each].data for each in found} == {s: value(s) for s in batch}
    finally:
        world.close()


def test_what_a_keeper_does_not_send_is_said_and_the_rest_comes() -> None:
    world = World(timeout_s=1.0)
    try:
        os.kill(world.servers[1].process.pid, signal.SIGKILL)
        world.servers[1].process.wait()
        wanted = list(range(20))
        world.expect(wanted)
        world.wait(wanted)
        found, failed = world.stage.take(wanted, timeout_s=20.0)
        assert sorted(found) == wanted[0::2]
        assert sorted(failed) == wanted[1::2]
    finally:
        world.close()


def test_what_comes_first_waits_for_no_slow_keeper() -> None:
    world = World(timeout_s=8.0)
    try:
        os.kill(world.servers[1].process.pid, signal.SIGSTOP)
        world.expect([500])  # the first ask is of one sample, whose size is not known
        world.wait([500])
        world.expect(range(20))
        world.wait(range(20))
        found, _ = world.stage.take(range(0, 20, 2), timeout_s=6.0)
        assert set(found) == set(range(0, 20, 2))
        assert world.stage.index[1] == 0xFFFFFFFF  # the other is still being waited for
    finally:
        os.kill(world.servers[1].process.pid, signal.SIGCONT)
        world.close()


class Walked:
    """A walk over batches, whose peers send samples of any size at once."""

    def __init__(self, num_bytes: int, batches: Sequence[Sequence[int]], *, size: int = 0) -> None:
        self.asked: list[list[int]] = []
        self.size = size
        self.stage = Stage(NUM_SAMPLES, num_bytes)
        shelf = Shelf(NUM_SAMPLES, memory_bytes=0)
        tells, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with told, tells:
            for batch in batches:
                owners = bytes(2 * len(batch))
                tells.send(bytes(4) + np.array(batch, "<i8").tobytes() + owners)
            walk = fetcher._Walk(told, self.stage, shelf, self)  # type: ignore[arg-type]  # as Peers
            assert walk._listen(0.0)
            while walk._batches and walk._bring():
                pass

    def answers(self, wanted: dict[int, list[int]]) -> Iterator[dict[int, Received]]:
        for samples in wanted.values():
            self.asked.append(samples)
            yield {each: received(each, self.size) for each in samples}


def test_a_sample_larger_than_the_ring_is_no_failure_of_its_keeper() -> None:
    walked = Walked(8000, [[0, 4, 9], [14, 19]])  # the first has 4 bytes, all others 8004
    assert walked.asked == [[0], [4, 9]]  # then no longer in vain
    found, failed = walked.stage.take([0, 4, 9, 14, 19], timeout_s=0.0)
    assert (set(found), failed) == ({0}, [])  # the rest is read from peers, as without a stage


def test_an_ask_is_bounded_and_has_samples_of_one_batch() -> None:
    walked = Walked(100_000_000, [list(range(30)), list(range(30, 60))], size=1_000_000)
    sizes = [len(each) for each in walked.asked]
    assert sizes == [1, *[4] * 7, 1, *[4] * 7, 2]  # 1 of unknown size, then 4 MiB
    assert len(walked.stage.take(range(60), timeout_s=0.0)[0]) == 60


def test_nothing_is_asked_for_that_has_no_room() -> None:
    walked = Walked(5_000_000, [list(range(30))], size=1_000_000)
    assert sum(map(len, walked.asked)) == 4
    assert walked.stage.take(range(30), timeout_s=0.0)[1] == []
    assert len(walked.asked) == 2


def test_a_fetcher_that_is_frozen_costs_one_limit(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.expect([2])
    world.wait([2])
    os.kill(world.fetcher.process.pid, signal.SIGSTOP)
    world.stage.index[4:8] = 0xFFFFFFFF  # as if it had asked for them
    began = time.monotonic()
    assert world.stage.take([4, 5], timeout_s=0.3) == ({}, [])  # their keepers may well have them
    assert world.stage.take([6, 7], timeout_s=10.0) == ({}, [])
    assert time.monotonic() - began < 5.0
    assert not world.stage.index[4:8].any()  # nobody waits for them again
    assert len([each for each in caplog.messages if "have not come" in each]) == 1
    for _ in range(3000):  # more than the socket holds: nobody waits
        world.expect(range(50))
    assert world.fetcher.begin()  # it does not hear of it, but sees it
    os.kill(world.fetcher.process.pid, signal.SIGCONT)
    until = time.monotonic() + 30
    while 500 not in world.stage.take([500], timeout_s=10.0)[0]:
        assert time.monotonic() < until
        world.stage.index[500] = 0
        world.expect([500])
        time.sleep(0.05)
    assert not world.stage.index[:50].any()  # of the iteration before nothing is fetched


def test_a_fetcher_that_was_killed_leaves_nothing_to_wait_for(world: World) -> None:
    world.expect([2])
    world.wait([2])
    world.fetcher.process.kill()
    world.fetcher.process.wait()
    world.stage.index[4:8] = 0xFFFFFFFF  # it had asked for them
    for _ in range(2):
        assert not world.fetcher.begin()
        world.fetcher.close()
        began = time.monotonic()
        assert world.stage.take([4, 5], timeout_s=30.0) == ({}, [])
        assert time.monotonic() - began < 10.0


def test_who_reads_after_the_end_does_not_wait(world: World) -> None:
    world.stage.index[4] = 0xFFFFFFFF
    world.fetcher.close()
    began = time.monotonic()
    assert world.stage.take([4], timeout_s=30.0) == ({}, [])
    assert time.monotonic() - began < 10.0


def test_a_new_iteration_drops_what_was_fetched_for_the_last(world: World) -> None:
    world.expect(range(10))
    world.wait(range(10))
    world.fetcher.begin()
    until = time.monotonic() + 30
    while world.stage.index.any():
        assert time.monotonic() < until
        time.sleep(0.01)
    world.expect([500])
    world.wait([500])
    assert world.stage.take([500], timeout_s=10.0)[0][500].data == value(500)


def test_the_fetcher_ends_with_its_owner(world: World) -> None:
    world.fetcher.close()
    assert world.fetcher.process.returncode is not None
    world.expect([1])  # says nothing to nobody
