"""Prefetch by plan: a process beside each rank that brings what the next batches need from peers.

A sampler draws some steps ahead, and tells which samples this rank will compute. The fetcher asks
their keepers, all at once, batch after batch, and lays what comes into a ring of bounded size: the
stage. Whoever reads a batch takes its samples from there. The fetcher is a process of its own with
a low priority: it takes no interpreter lock from training, and gRPC's threads never meet a
``fork``.

Of each sample the stage has one word that all processes of the rank see::

    0       nothing: it is read as without the stage
    ASKED   a keeper was asked, and room is there: a reader may wait for it
    FAILED  its keeper did not send it: a reader need not ask again
    TAKEN   a reader was faster, and reads it as without the stage
    else    its first unit plus 1

Room comes before asking. So whoever waits for a sample waits for its keeper alone, never for room,
and few bytes lie outside the ring. Nobody locks: a reader copies a sample, then looks whether its
word is still the same, as room is used again only after the word has changed. All of this saves
time and decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loft_hvd.store.peers import Address, Peers, Received, program
from loft_hvd.store.shelf import Shelf, checksum, close_all, map_bytes, share_bytes

__all__ = ["Fetcher", "Stage", "Staged"]

_logger = logging.getLogger(__name__)
_UNIT = 64  # bytes; as the shelf's
_RECORD = struct.Struct("<IIQQd")  # magic, length, sample, checksum, seconds that fetching it took
_MAGIC = 0x4745464C
_ASKED, _TAKEN, _FAILED = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD
_ITERATION = struct.Struct("<I")  # before the samples of a message
_MOST_IN_MESSAGE = 8192  # samples; bound from the socket's 200 kB
_ASK_BYTES = 4 << 20  # a choice: within 5 s even over 10 Mb/s
_NICENESS = 10  # a choice: half of a core that training wants too goes to training, and more
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3  # choices: a sample takes about as long to come
_LOOK_S = 0.01  # a choice: how often a fetcher looks whether there is room


class Staged(NamedTuple):
    """A sample that was fetched ahead."""

    data: bytes
    digest: int
    seconds: float  # its part of the time that fetching took


class Stage:
    """Samples that were fetched ahead, as all processes of a rank see them.

    Args:
        num_samples: samples of the data set.
        num_bytes: of the ring.
    """

    def __init__(self, num_samples: int, num_bytes: int) -> None:
        self.num_samples, self.num_units = num_samples, num_bytes // _UNIT
        self._map(
            [
                share_bytes("loft_hvd staged", 4 * num_samples + 8),
                share_bytes("loft_hvd stage", self.num_units * _UNIT),
            ]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Describe the stage for a process of this rank that was not forked."""
        names = [f"/proc/{os.getpid()}/fd/{each}" for each in self.descriptors]
        return {"num_samples": self.num_samples, "num_units": self.num_units, "names": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.num_samples, self.num_units = state["num_samples"], state["num_units"]
        self._map([os.open(name, os.O_RDWR) for name in state["names"]])

    @classmethod
    def attached(cls, num_samples: int, num_units: int, descriptors: list[int]) -> Stage:
        """Return a stage that another process made, from its open files."""
        stage = cls.__new__(cls)
        stage.num_samples, stage.num_units = num_samples, num_units
        stage._map(descriptors)
        return stage

    def _map(self, descriptors: list[int]) -> None:
        self.descriptors = descriptors
        table = map_bytes(descriptors[0], 4 * self.num_samples + 8)
        self.index = table[: 4 * self.num_samples].view(np.uint32)
        self._numbers = table[4 * self.num_samples :].view(np.uint32)  # [lost, iteration]
        self.view = map_bytes(descriptors[1], self.num_units * _UNIT).data
        weakref.finalize(self, close_all, descriptors)

    @property
    def is_lost(self) -> bool:
        """Whether somebody has waited for the fetcher in vain."""
        return bool(self._numbers[0])

    @is_lost.setter
    def is_lost(self, value: bool) -> None:
        self._numbers[0] = value

    @property
    def iteration(self) -> int:
        """How many iterations have begun since the first."""
        return int(self._numbers[1])

    def begin(self) -> None:
        """Begin an iteration: of the one before nothing is here or on its way.

        The training calls it before anybody reads. The fetcher sees the new number, so nobody has
        to hear of it: a message could be lost.
        """
        self._numbers[1] += 1
        self.index[:] = 0
        self.is_lost = False

    def take(
        self, samples: Sequence[int], *, timeout_s: float
    ) -> tuple[dict[int, Staged], list[int]]:
        """Take samples off the stage, and wait for those that are on their way.

        Returns what there is, and those that their keepers did not send: they need not be asked
        again. ``timeout_s`` is the longest wait in which none of the samples comes.
        """
        found: dict[int, Staged] = {}
        failed: list[int] = []
        until, pause = time.monotonic() + timeout_s, _SHORTEST_SLEEP_S
        asked = self._take_here(samples, found, failed)
        while asked:
            # In the order in which they come: what is taken makes room for the rest.
            late = self._take_here(asked, found, failed)
            if len(late) < len(asked):
                until, pause = time.monotonic() + timeout_s, _SHORTEST_SLEEP_S
            elif self.is_lost or time.monotonic() > until:
                self.index[late] = 0  # a fetcher that comes after all leaves them out
                self._warn_of_loss(timeout_s)
                break
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP_S)
            asked = late
        return found, failed

    def _take_here(
        self, samples: Sequence[int], found: dict[int, Staged], failed: list[int]
    ) -> list[int]:
        """Take those that are not on their way; returns those that are."""
        asked = []
        for sample in samples:
            word = int(self.index[sample])
            if word == _ASKED:
                asked.append(sample)
                continue
            staged = self._copy(word, sample) if word < _FAILED and word else None
            # A fetcher that has not come so far shall leave it out.
            self.index[sample] = 0 if word not in (0, _TAKEN) else _TAKEN
            if staged is not None:
                found[sample] = staged
            elif word == _FAILED:
                failed.append(sample)
        return asked

    def _warn_of_loss(self, timeout_s: float) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        _logger.warning(
            "samples that were to be fetched ahead have not come within %g s: until the next "
            "iteration batches are fetched when they are due",
            timeout_s,
        )

    def _copy(self, word: int, sample: int) -> Staged | None:
        begin = (word - 1) * _UNIT
        if begin + _RECORD.size > len(self.view):
            return None
        magic, length, number, digest, seconds = _RECORD.unpack_from(self.view, begin)
        begin += _RECORD.size
        data = bytes(self.view[begin : begin + length])
        # First the copy, then the look: a head that was half overwritten can have the old number
        # and the new checksum.
        if int(self.index[sample]) != word:
            return None
        if magic != _MAGIC or number != sample or checksum(data) != digest:
            return None
        return Staged(data, digest, seconds)


def _units(num_bytes: int) -> int:
    """Return the units of a record whose sample has so many bytes."""
    return -(-(_RECORD.size + num_bytes) // _UNIT)


class Ring:
    """Where records lie on a stage: written by the fetcher alone, oldest first."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._records: deque[tuple[int, int, int]] = deque()  # first unit, units, sample
        self._tail = 0  # the unit after the newest record

    def add(self, sample: int, received: Received, seconds: float) -> bool:
        """Lay a sample on the stage; says whether there was room."""
        units = _units(len(received.data))
        unit = self._room(units)
        if unit is None:
            return False
        view, begin = self._stage.view, unit * _UNIT
        body = begin + _RECORD.size
        view[body : body + len(received.data)] = received.data
        _RECORD.pack_into(view, begin, _MAGIC, len(received.data), sample, received.digest, seconds)
        self._stage.index[sample] = unit + 1
        self._records.append((unit, units, sample))
        self._tail = unit + units
        return True

    def holds(self, num_bytes: int) -> bool:
        """Whether a sample of so many bytes fits once the ring is empty."""
        return _units(num_bytes) <= self._stage.num_units

    def num_fitting(self, num_bytes: int) -> int:
        """Return how many samples of up to so many bytes fit, whatever the size of each."""
        self._drop_taken()
        units, size = _units(num_bytes), self._stage.num_units
        if not self._records:
            return size // units
        # As ``_room``: up to the end and then before the oldest, or only up to the oldest.
        oldest = self._records[0][0]
        if self._tail > oldest:
            return (size - self._tail) // units + max(oldest - 1, 0) // units
        return max(oldest - self._tail - 1, 0) // units

    def _room(self, units: int) -> int | None:
        """Return the first unit of so many free ones; None where there are none."""
        self._drop_taken()
        size = self._stage.num_units
        if not self._records:
            return 0 if units <= size else None
        oldest = self._records[0][0]
        if self._tail > oldest:
            if self._tail + units <= size:
                return self._tail
            return 0 if units < oldest else None  # never quite full: tail == oldest is empty
        return self._tail if self._tail + units < oldest else None

    def _drop_taken(self) -> None:
        while self._records and not self._is_there(self._records[0]):
            self._records.popleft()

    def _is_there(self, record: tuple[int, int, int]) -> bool:
        unit, _, sample = record
        return int(self._stage.index[sample]) == unit + 1

    def drop_passed(self) -> None:
        """Drop what nobody took although later samples were taken."""
        taken = [place for place, each in enumerate(self._records) if not self._is_there(each)]
        for _ in range(taken[-1] + 1 if taken else 0):
            self._drop_oldest()

    def clear(self) -> None:
        """Drop all."""
        while self._records:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        record = self._records.popleft()
        if self._is_there(record):
            self._stage.index[record[2]] = 0


# The fetcher, in its own process.


class _Walk:
    """Walks the batches to come, in order, and brings their samples within the ring's size."""

    def __init__(self, told: socket.socket, stage: Stage, shelf: Shelf, peers: Peers) -> None:
        self._told, self._stage, self._shelf, self._peers = told, stage, shelf, peers
        self._ring = Ring(stage)
        self._batches: deque[list[tuple[int, int]]] = deque()  # samples and owners, to be asked
        self._iteration = stage.iteration
        self._largest = 0  # bytes of the largest sample so far

    def run(self) -> None:
        """Go on until the training closes its end of the socket."""
        wait_s: float | None = None
        while self._listen(wait_s):
            self._catch_up()
            wait_s = None
            if self._batches:
                wait_s = 0.0 if self._bring() else _LOOK_S

    def _listen(self, wait_s: float | None) -> bool:
        """Take in what was told since; False once there is nobody to tell.

        It waits so long for the first message; None is for ever.
        """
        while True:
            self._told.settimeout(wait_s)
            try:
                message = self._told.recv(1 << 18)
            except (BlockingIOError, TimeoutError):
                return True
            if not message:
                return False
            wait_s = 0.0
            self._catch_up()
            if _ITERATION.unpack_from(message)[0] != self._iteration:
                continue
            # [num_samples] of 8 bytes, then their owners, of 2 bytes each
            num, first = len(message) // 10, _ITERATION.size
            samples = np.frombuffer(message, "<i8", num, first).tolist()
            owners = np.frombuffer(message, "<i2", num, first + 8 * num).tolist()
            self._batches.append(list(zip(samples, owners, strict=True)))

    def _catch_up(self) -> None:
        """Drop what belongs to an iteration that is over."""
        if self._iteration != self._stage.iteration:
            self._iteration = self._stage.iteration
            self._batches.clear()
            self._ring.clear()

    def _bring(self) -> bool:
        """Bring what surely fits of the next batch; False where there is no room.

        An ask never has samples of two batches: within one the order does not matter, as a reader
        takes a batch at once.
        """
        if not self._ring.holds(self._largest):
            self._batches.clear()
            return True
        index = self._stage.index
        words = [int(index[sample]) for sample, _ in self._batches[0]]
        due = [
            each
            for each, word in zip(self._batches[0], words, strict=True)
            if word == 0 and not self._shelf.has(each[0])
        ]
        num = self._num_to_ask()
        if due and num == 0:
            if _TAKEN in words:  # readers have come to what could not be asked for
                self._ring.drop_passed()
            return False
        self._batches[0] = due[num:]
        if not due[num:]:
            self._batches.popleft()
        if due:
            self._ask(due[:num])
        return True

    def _num_to_ask(self) -> int:
        """Return how many samples an ask may have: one, until the size of one is known."""
        if self._largest == 0:
            return min(1, self._ring.num_fitting(0))
        most = max(_ASK_BYTES // self._largest, 1)
        return min(most, self._ring.num_fitting(self._largest))

    def _ask(self, due: Sequence[tuple[int, int]]) -> None:
        """Ask for samples, and lay each owner's answer on the stage when it comes."""
        index = self._stage.index
        wanted: dict[int, list[int]] = {}
        for sample, owner in due:
            index[sample] = _ASKED
            wanted.setdefault(owner, []).append(sample)
        since = time.monotonic()
        for found in self._peers.answers(wanted):
            now = time.monotonic()
            for sample, received in found.items():
                self._lay(sample, received, (now - since) / len(found))
            since = now if found else since
        for sample, _ in due:
            if index[sample] == _ASKED:
                index[sample] = _FAILED

    def _lay(self, sample: int, received: Received, seconds: float) -> None:
        """Lay a sample on the stage, unless nobody waits for it any more."""
        size = len(received.data)
        if size > self._largest:
            self._largest = size
            if not self._ring.holds(size):
                _logger.warning(
                    "sample %d has %d bytes, more than prefetch_bytes hold: nothing is fetched "
                    "ahead from now on; give at least two batches' samples of one rank",
                    sample, size,
                )  # fmt: skip
        # There is room, unless it is larger than all before: then it is read when it is due.
        if self._stage.index[sample] == _ASKED and not self._ring.add(sample, received, seconds):
            self._stage.index[sample] = 0


def walk() -> None:
    """Fetch ahead as the first line of standard input says, until the socket there ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training's to answer
    os.nice(_NICENESS)
    given = json.loads(sys.stdin.buffer.readline())
    shelf = Shelf.attached(given["shelf"], given["shelf_descriptors"])
    stage = Stage.attached(shelf.num_samples, given["num_units"], given["stage_descriptors"])
    addresses = [Address(*each) for each in given["addresses"]]
    peers = Peers(addresses, bytes.fromhex(given["key"]), timeout_s=given["timeout_s"])
    _Walk(socket.socket(fileno=given["socket"]), stage, shelf, peers).run()
    os._exit(0)  # gRPC's own way down waits for calls that go on


class Fetcher:
    """This rank's fetcher, and its process.

    Args:
        stage: where samples are laid.
        shelf: of this rank; what it keeps needs no fetching.
        addresses: of the ranks' servers, [world_size].
        key: of the job, 32 bytes.
        timeout_s: longest wait for the answer of one owner, in seconds.
    """

    def __init__(
        self,
        stage: Stage,
        shelf: Shelf,
        *,
        addresses: Sequence[Address],
        key: bytes,
        timeout_s: float,
    ) -> None:
        self._stage = stage
        # Messages arrive whole or not at all, so that what does not fit can be left out.
        self._tells, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._tells.setblocking(False)
        descriptors = [*shelf.descriptors, *stage.descriptors, told.fileno()]
        given = {
            "shelf": shelf.description, "shelf_descriptors": shelf.descriptors,
            "num_units": stage.num_units, "stage_descriptors": stage.descriptors,
            "socket": told.fileno(), "addresses": addresses, "key": key.hex(),
            "timeout_s": timeout_s,
        }  # fmt: skip
        try:
            with told:
                self.process = subprocess.Popen(
                    program("fetcher", "walk"), stdin=subprocess.PIPE, pass_fds=descriptors
                )
        except OSError:
            self._tells.close()
            raise
        self._end = weakref.finalize(self, _end, self.process, self._tells)
        assert self.process.stdin is not None
        try:
            # By a pipe: arguments and environment can be read by others on the machine.
            with self.process.stdin as pipe:
                pipe.write(json.dumps(given).encode() + b"\n")
        except OSError:
            self.close()
            raise

    def begin(self) -> bool:
        """Drop what was fetched for another iteration; False where the process has ended."""
        self._stage.begin()
        return self.process.poll() is None

    def expect(self, samples: npt.NDArray[np.int64], owners: npt.NDArray[np.int16]) -> None:
        """Say which samples the next batch needs from which ranks, each [num_samples].

        Never waits: where the fetcher is far behind it is not told, and the batch is fetched when
        it is due.
        """
        for first in range(0, len(samples), _MOST_IN_MESSAGE):
            part = slice(first, first + _MOST_IN_MESSAGE)
            numbers, ranks = samples[part].astype("<i8"), owners[part].astype("<i2")
            message = _ITERATION.pack(self._stage.iteration) + numbers.tobytes() + ranks.tobytes()
            with contextlib.suppress(OSError):  # it is full, or the fetcher has ended
                self._tells.send(message)

    def close(self) -> None:
        """End the process; can be called again. Nobody waits for it any more."""
        self._stage.is_lost = True
        self._end()


def _end(process: subprocess.Popen[bytes], tells: socket.socket) -> None:
    tells.close()
    process.kill()  # it holds nothing that anybody needs, and may have just begun to start
    process.wait()
