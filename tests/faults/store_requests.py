"""A store's server, fed with requests of all kinds: strangers', damaged, abandoned and honest ones.

    python -m tests.faults.store_requests --cases 100000

A case ends in the right samples, in a clear refusal, or, for what is no request at all, in a closed
connection. Anything else is a fault. So is a server that has ended or started anew, one that has
grown by more than 8 MB since its first cases, and one whose key can be read from outside.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from unittest.mock import patch

import pyarrow as pa
from pyarrow import flight

from loft_hvd.store.peers import MOST_SAMPLES, Peers, Server, sign_ticket
from loft_hvd.store.shelf import Shelf
from tests.support.processes import arguments_of, own_bytes, where_shown

__all__ = ["Found", "fuzz_server", "grown_bytes"]

NUM_SAMPLES = 2000
MOST_GROWN_BYTES = 8e6  # answers under way take 4 MB; a leak of 100 B a case shows in 100,000
_NUM_LOOKS = 100  # at the server's memory
# What the server frees goes back at once. By Arrow's and glibc's defaults it is kept for later, and
# memory goes up and down by 50 MB, which no number of looks tells from a leak.
_GIVES_BACK = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
_KEY = bytes(range(1, 33))
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_REFUSALS = ("ticket", "do_get alone", "ask again")
_LIMIT_S = 20.0


@dataclass
class Found:
    """What came of the cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # number of the case, and what was wrong
    grown_bytes: float = 0.0  # of the server's own memory, since the first tenth of the cases


def value(sample: int) -> bytes:
    """Return the bytes of a sample: some are tiny, some are 100 kB."""
    return sample.to_bytes(4, "little") * (1 + sample % 7 * 4000)


class Requests:
    """Sends cases to one server, each drawn from a generator of its own."""

    def __init__(self, server: Server) -> None:
        self._host, self._port = server.address()
        self._client = flight.FlightClient(f"grpc://{self._host}:{self._port}")
        self._options = flight.FlightCallOptions(timeout=_LIMIT_S)
        self._sockets: list[socket.socket] = []
        self.kinds: tuple[Callable[[random.Random], str], ...] = (
            self.honest, self.foolish, self.changed, self.noise, self.other_call, self.raw_bytes,
            self.abandoned,
        )  # fmt: skip

    def send(self, rng: random.Random) -> tuple[str, str]:
        """Send a case of any kind; returns what came of it, and what was wrong with that."""
        kind, fault = rng.choice(self.kinds), ""
        try:
            outcome = kind(rng)
            if outcome == "taken":
                fault = f"{kind.__name__} was answered"
        except (pa.ArrowException, OSError) as error:
            outcome = type(error).__name__
            if kind == self.honest or not any(word in str(error) for word in _REFUSALS):
                fault = f"{kind.__name__}: {error}"
        except AssertionError:
            outcome, fault = "wrong", f"{kind.__name__}: wrong samples"
        return f"{kind.__name__}: {outcome}", fault

    def _get(self, ticket: bytes) -> dict[int, bytes]:
        table = self._client.do_get(flight.Ticket(ticket), self._options).read_all()
        samples, values = table.column(0).to_pylist(), table.column(2).to_pylist()
        return dict(zip(samples, values, strict=True))

    def honest(self, rng: random.Random) -> str:
        """Ask for what there is; half of it is kept."""
        wanted = rng.sample(range(NUM_SAMPLES), rng.randint(1, 20))
        found = self._get(sign_ticket(_KEY, 0, wanted))
        assert found == {each: value(each) for each in wanted if each % 2 == 0}
        return "answered"

    def foolish(self, rng: random.Random) -> str:
        """Ask, with the key, for what there is not."""
        samples = rng.choice(
            [
                [],
                [-rng.randint(1, 2**62)],
                [0, NUM_SAMPLES + rng.randrange(2**60)],
                [1] * (MOST_SAMPLES + rng.randint(1, 1000)),
            ]
        )
        self._get(sign_ticket(_KEY, 0, samples))
        return "taken"

    def changed(self, rng: random.Random) -> str:
        """Change a good ticket: a bit, its length, its key or its owner."""
        key = _KEY if rng.random() < 0.9 else rng.randbytes(32)
        owner = 0 if rng.random() < 0.9 else rng.randint(1, 9)
        good = sign_ticket(_KEY, 0, [rng.randrange(NUM_SAMPLES)])
        ticket = bytearray(sign_ticket(key, owner, [rng.randrange(NUM_SAMPLES)]))
        ticket[rng.randrange(len(ticket))] ^= 1 << rng.randrange(8)
        self._get(bytes(ticket[: rng.randint(1, len(ticket))]) + good * rng.randint(0, 2))
        return "taken"

    def noise(self, rng: random.Random) -> str:
        """Send any bytes for a ticket: a few, mostly, and up to a megabyte."""
        self._get(rng.randbytes(int(2 ** rng.uniform(0, 12 if rng.random() < 0.95 else 20))))
        return "taken"

    def other_call(self, rng: random.Random) -> str:
        """Make another call of the protocol."""
        options, client = self._options, self._client
        where = flight.FlightDescriptor.for_path(rng.randbytes(8).hex())
        calls: tuple[Callable[[], object], ...] = (
            lambda: list(client.list_flights(options=options)),
            lambda: list(client.list_actions(options=options)),
            lambda: list(client.do_action(flight.Action("x", rng.randbytes(99)), options)),
            lambda: client.get_flight_info(where, options),
            lambda: client.get_schema(where, options),
        )
        rng.choice(calls)()
        return "taken"

    def raw_bytes(self, rng: random.Random) -> str:
        """Connect, send bytes that are no request, and stay a while or go."""
        connection = socket.create_connection((self._host, self._port), timeout=_LIMIT_S)
        words = rng.randbytes(rng.randint(0, 200))
        if rng.random() < 0.7:  # HTTP/2 frames: length, type, flags, stream, then whatever
            frame = rng.randint(0, 64).to_bytes(3, "big") + bytes([rng.randrange(12)]) + words
            words = _PREFACE[: rng.randint(0, len(_PREFACE))] + frame if words else _PREFACE
        with suppress(ConnectionError):
            connection.sendall(words)
        self._sockets.append(connection)
        if len(self._sockets) > 50:
            self.close()
        return "no request"

    def close(self) -> None:
        """Close the connections that are no requests."""
        for connection in self._sockets:
            connection.close()
        self._sockets.clear()

    def abandoned(self, rng: random.Random) -> str:
        """Ask for much, read some of it and go."""
        wanted = range(0, NUM_SAMPLES, 2)
        reader = self._client.do_get(flight.Ticket(sign_ticket(_KEY, 0, wanted)), self._options)
        for _ in range(rng.randint(0, 2)):
            reader.read_chunk()
        reader.cancel()
        return "abandoned"


def fuzz_server(num_cases: int, *, seed: int = 0) -> Found:
    """Start a server, send it cases and look at what it answers and takes."""
    found = Found()
    shelf = Shelf(NUM_SAMPLES, memory_bytes=128 << 20)
    for sample in range(0, NUM_SAMPLES, 2):
        assert shelf.add(sample, value(sample))
    with patch.dict(os.environ, _GIVES_BACK):
        server = Server(shelf, host="127.0.0.1", key=_KEY, owner=0)
    requests = Requests(server)
    started_with = arguments_of(server.process.pid)
    try:
        looks: list[int] = []  # bytes; the samples lie in files, and do not count
        for number in range(num_cases):
            if server.process.poll() is not None:
                break
            if number % max(num_cases // _NUM_LOOKS, 1) == 0:
                looks.append(own_bytes(server.process.pid))
            rng = random.Random(f"store requests {seed} {number}")
            outcome, fault = requests.send(rng)
            found.outcomes[outcome] += 1
            if fault:
                found.faults.append(f"{number}: {fault}")
        found.grown_bytes = grown_bytes(looks)
        if found.grown_bytes > MOST_GROWN_BYTES:
            found.faults.append(f"{found.grown_bytes / 1e6:.0f} MB more than after a tenth")
        peers = Peers([server.address()], _KEY, timeout_s=_LIMIT_S)
        if len(peers.fetch({0: list(range(NUM_SAMPLES))})) != NUM_SAMPLES // 2:
            found.faults.append("afterwards the server does not send what it keeps")
        if server.process.poll() is not None:
            found.faults.append(f"the server ended with {server.process.returncode}")
        else:
            if arguments_of(server.process.pid) != started_with:
                found.faults.append("the server has started anew, so its growth says nothing")
            shown = where_shown(_KEY, server.process.pid)
            found.faults += [f"the key is in the server's /proc/.../{place}" for place in shown]
    finally:
        requests.close()
        server.close()
    return found


def grown_bytes(looks: Sequence[int]) -> float:
    """Return by how much memory has grown since the first tenth of the looks at it.

    It is that of the straight line through all of them, as single ones go up and down. In the first
    tenth threads, connections and buffers are made.
    """
    late = looks[len(looks) // 10 :]
    if len(late) < 2:
        return 0.0
    slope, _ = statistics.linear_regression(range(len(late)), late)
    return slope * (len(late) - 1)


def main() -> None:
    """Run the cases, and say what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    found = fuzz_server(options.cases, seed=options.seed)
    for outcome, count in sorted(found.outcomes.items()):
        print(f"{count:8} {outcome}")
    print(
        f"{len(found.faults)} faults, the server grew by {found.grown_bytes / 1e6:.1f} MB, "
        f"{time.monotonic() - began:.0f} s"
    )
    for fault in found.faults[:10]:
        print(fault)
    sys.stdout.flush()
    os._exit(bool(found.faults))  # gRPC's clients take their time to go


if __name__ == "__main__":
    main()
