"""Read samples that three peers keep while their servers end, freeze and are cut off.

    python -m tests.faults.store_owners --samples 10000

One rank reads all samples through its store, in random order. Meanwhile the server of one peer is
killed and started again, that of another is stopped and goes on, the link to the third is cut and
healed, and the reader's own disk is full (as root, on a file system of a megabyte). Each sample
must come exactly once, with the right bytes, and no batch may take longer than ``LIMIT_S``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import loft_hvd as loft
from loft_hvd.store.peers import Address, Peers
from loft_hvd.transport.local import LocalTransport, run_ranks

__all__ = ["LIMIT_S", "Found", "read_under_faults"]

LIMIT_S = 20.0
_NUM_PEERS, _BATCH, _VALUES = 3, 50, 256
_TIMEOUT_S = 1.0


@dataclass
class Found:
    """What the reader has seen."""

    counts: dict[str, int] = field(default_factory=dict)  # of its store
    slowest_s: float = 0.0  # of a batch
    wrong: list[str] = field(default_factory=list)
    had_full_disk: bool = False


class Source(Dataset[Any]):
    """Numbers that follow from the index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(index, index + _VALUES), index


class Cable:
    """A link to a server, which can be cut: nothing comes through, and nobody is told."""

    def __init__(self, address: Address) -> None:
        self._to = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.is_whole = threading.Event()
        self.is_whole.set()
        threading.Thread(target=self._accept, name="cable", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where to connect to reach the server."""
        return Address("127.0.0.1", self._listener.getsockname()[1])

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.is_whole.wait()
                far = socket.create_connection((self._to.host, self._to.port), timeout=LIMIT_S)
                far.settimeout(None)
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.is_whole.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Take the link away."""
        self.is_whole.set()
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a disk of a megabyte for as long as it is used; None where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "loft_hvd", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read_under_faults(num_samples: int, folder: Path, *, seed: int = 0) -> Found:
    """Read all samples while peers fail; ``folder`` is empty."""
    found = Found()
    together = threading.Barrier(_NUM_PEERS + 1)
    stores: dict[int, loft.SampleStore] = {}

    def rank(transport: LocalTransport) -> None:
        is_reader = transport.rank == 0
        with contextlib.ExitStack() as stack:
            disk = stack.enter_context(small_disk(folder / "disk")) if is_reader else None
            found.had_full_disk |= disk is not None
            store = loft.SampleStore(
                Source(num_samples),
                memory_bytes=0 if is_reader else 1 << 28,
                disk_bytes=0 if disk is None else 1 << 28,
                folder=disk,
                transport=transport,
                timeout_s=_TIMEOUT_S,
            )
            stores[transport.rank] = store
            if not is_reader:
                store.__getitems__(range(transport.rank - 1, num_samples, _NUM_PEERS))
            assert store._homes is not None
            store._homes.announce(store._shelf.held())
            together.wait(60)
            if is_reader:
                _read(store, stores, found, random.Random(seed))
            together.wait(600)
            store.close()

    run_ranks(_NUM_PEERS + 1, rank, timeout_s=900.0)
    return found


def _read(
    store: loft.SampleStore, stores: dict[int, loft.SampleStore], found: Found, rng: random.Random
) -> None:
    """Read every sample once, and let something fail from time to time."""
    peers = store._peers
    assert peers is not None
    owner = peers._owners[3]
    cable = Cable(owner.address)
    owner.address = cable.address
    # Without the key nobody sends anything.
    addresses = [each.address for each in peers._owners]
    stranger = Peers(addresses, bytes(32), timeout_s=_TIMEOUT_S)
    if stranger.fetch({1: [0], 2: [1], 3: [2]}):
        found.wrong.append("a stranger without the key has got samples")
    faults: dict[int, Callable[[], object]] = {
        10: lambda: _process(stores[1]).kill(),
        25: lambda: stores[1]._keep_serving(),
        40: lambda: _process(stores[2]).send_signal(signal.SIGSTOP),
        55: lambda: _process(stores[2]).send_signal(signal.SIGCONT),
        65: cable.is_whole.clear,
        80: cable.is_whole.set,
    }
    order = rng.sample(range(len(store)), len(store))
    seen: list[int] = []
    before = dict(store.counters)
    try:
        for begin in range(0, len(order), _BATCH):
            while faults and 100 * begin >= min(faults) * len(order):
                faults.pop(min(faults))()
            batch, began = order[begin : begin + _BATCH], time.monotonic()
            for x, index in store.__getitems__(batch):
                seen.append(index)
                if not torch.equal(x, torch.arange(index, index + _VALUES)):
                    found.wrong.append(f"sample {index} has other bytes")
            found.slowest_s = max(found.slowest_s, time.monotonic() - began)
    finally:
        cable.close()
    if sorted(seen) != list(range(len(store))):
        found.wrong.append(f"{len(seen)} samples came, {len(set(seen))} different ones")
    if found.slowest_s > LIMIT_S:
        found.wrong.append(f"a batch took {found.slowest_s:.1f} s")
    found.counts = {name: store.counters[name] - before[name] for name in before}
    if sum(found.counts[name] for name in ("own", "peer", "source")) != len(store):
        found.wrong.append(f"counted {found.counts}")


def _process(store: loft.SampleStore) -> subprocess.Popen[bytes]:
    assert store._server is not None
    return store._server.process


def main() -> None:
    """Read under faults, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = read_under_faults(options.samples, Path(folder), seed=options.seed)
    disk = "with a full disk" if found.had_full_disk else "no root: without a full disk"
    print(f"{found.counts}, slowest batch {found.slowest_s:.1f} s, {disk}")
    print(f"{len(found.wrong)} faults", *found.wrong[:10], sep="\n")
    sys.stdout.flush()
    os._exit(bool(found.wrong))  # gRPC's clients take their time to go


if __name__ == "__main__":
    main()
