"""Handwritten digits as large images, spread over hosts: each has its share on its own disk.

What another host has is read from that host over the link between them, sample by sample, as from
any remote data set. For that every host serves the file of its share: a request is the number of a
record, in eight bytes, the answer is the record. A host is known by its number: 2 is ``host2``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import socketserver
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

__all__ = [
    "RECORD_BYTES",
    "Digits",
    "Holders",
    "SpreadDigits",
    "enlarge",
    "load_digits",
    "opened",
    "spread",
]

_NUM_TEST = 360
_SIDE = 166  # pixels: 110 kB of float32, as much as an ImageNet photograph
RECORD_BYTES = 4 * _SIDE * _SIDE
_REQUEST = struct.Struct("<q")
_PORT = 7077
_ANSWER_S = 5.0  # longest wait for bytes of an answer: a host that died sends none

Holders = npt.NDArray[np.bool_]  # which hosts have which samples, [num_samples, num_hosts]


@dataclass(frozen=True)
class Digits:
    """Some of scikit-learn's 1,797 handwritten digits."""

    images: Tensor  # [num_samples, 8, 8], float32 in [0, 1]
    labels: Tensor  # [num_samples], int64


def load_digits() -> tuple[Digits, Digits]:
    """Read the digits that ship inside scikit-learn; returns those to train on and to test with."""
    values, classes = sklearn.datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(values, dtype=torch.float32).div(16).view(-1, 8, 8)[order]
    labels = torch.tensor(classes)[order]
    train = Digits(images[_NUM_TEST:], labels[_NUM_TEST:])
    return train, Digits(images[:_NUM_TEST], labels[:_NUM_TEST])


def enlarge(images: Tensor) -> Tensor:
    """Turn digits [num_samples, 8, 8] into what is stored, [num_samples, 1, 166, 166]."""
    return F.interpolate(images.unsqueeze(1), size=(_SIDE, _SIDE), mode="bilinear")


def spread(num_samples: int, shares: Sequence[float], *, copies: int = 1) -> Holders:
    """Choose which hosts have which samples, at random and the same on every host.

    Args:
        num_samples: samples of the data set.
        shares: of all samples that each host has first, adding up to 1, [num_hosts].
        copies: hosts that have a sample: the first, and those that follow it.
    """
    ends = np.round(np.cumsum(shares) * num_samples)
    places = np.random.default_rng(0).permutation(num_samples)
    first = np.searchsorted(ends, places, side="right")
    holders = np.zeros((num_samples, len(shares)), bool)
    for more in range(copies):
        holders[np.arange(num_samples), (first + more) % len(shares)] = True
    return holders


class _Server(socketserver.ThreadingTCPServer):
    """Serves the records of a file."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(("", _PORT), _Answers)
        self.path = path


class _Answers(socketserver.BaseRequestHandler):
    """Answers what comes over one connection, until it ends."""

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        link: socket.socket = self.request
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.server.path.open("rb") as file, contextlib.suppress(ConnectionError):
            while request := link.recv(_REQUEST.size, socket.MSG_WAITALL):
                (place,) = _REQUEST.unpack(request)
                link.sendfile(file, place * RECORD_BYTES, RECORD_BYTES)


class SpreadDigits(Dataset[tuple[Tensor, int]]):
    """The enlarged digits: the own share from the own disk, the rest from hosts that have it.

    Labels are known everywhere, as those of an index are. A host that does not answer is not asked
    again.

    Args:
        digits: where the labels come from; images are read.
        holders: which hosts have which samples.
        host: this one.
        path: of this host's file.
    """

    def __init__(self, digits: Digits, holders: Holders, *, host: int, path: Path) -> None:
        self._labels: list[int] = digits.labels.tolist()
        self._holders, self._host = holders, host
        self._places = np.cumsum(holders, axis=0) - 1  # of a sample in each host's file
        self._file = os.open(path, os.O_RDONLY)
        self._links: dict[tuple[int, int], socket.socket] = {}  # by process and host
        self._lost: set[int] = set()

    @property
    def num_held(self) -> int:
        """Samples that this host has."""
        return int(self._holders[:, self._host].sum())

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = bytearray(RECORD_BYTES)
        if self._holders[index, self._host]:
            os.preadv(self._file, [record], int(self._places[index, self._host]) * RECORD_BYTES)
        else:
            self._fetch(index, record)
        image = torch.frombuffer(record, dtype=torch.float32).view(1, _SIDE, _SIDE)
        return image, self._labels[index]

    def _fetch(self, index: int, record: bytearray) -> None:
        """Fill ``record`` with a sample from one of its hosts: which one is asked first varies."""
        hosts = np.flatnonzero(self._holders[index]).tolist()
        first = index % len(hosts)
        for host in hosts[first:] + hosts[:first]:
            if host in self._lost:
                continue
            try:
                self._ask(host, int(self._places[index, host]), record)
            except OSError:
                self._lost.add(host)
            else:
                return
        raise OSError(f"sample {index}: none of the hosts {hosts} that have it answers")

    def _ask(self, host: int, place: int, record: bytearray) -> None:
        # Loader processes are forked: each has connections of its own.
        key = os.getpid(), host
        if key not in self._links:
            link = socket.create_connection((f"host{host}", _PORT), timeout=_ANSWER_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links[key] = link
        link, left = self._links[key], memoryview(record)
        link.sendall(_REQUEST.pack(place))
        while left:
            num_bytes = link.recv_into(left)
            if not num_bytes:
                raise ConnectionError(f"host{host} has ended the connection")
            left = left[num_bytes:]


@contextlib.contextmanager
def opened(digits: Digits, holders: Holders) -> Iterator[SpreadDigits]:
    """Write this host's share to its disk, serve it while the block runs, and return the data set.

    Enter it before ``hvd.init()``: it forks, and once all ranks have met every host serves.
    """
    host = int(socket.gethostname().removeprefix("host"))
    path = Path(os.environ["TESTBED_LOCAL"]) / "share"
    with path.open("wb") as file:
        for part in torch.from_numpy(np.flatnonzero(holders[:, host])).split(64):
            file.write(enlarge(digits.images[part]).numpy().tobytes())
    server = _Server(path)
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.socket.close()  # the process has its own
    try:
        yield SpreadDigits(digits, holders, host=host, path=path)
    finally:
        process.terminate()
        process.join(_ANSWER_S)
