"""Samples from other ranks: a small server beside each rank, and the calls to those of others.

One Arrow Flight ``do_get`` asks one owner for many samples: its ticket holds their numbers, the
answer is a stream of record batches (sample, checksum, bytes). Nothing that arrives is unpickled.

The server is a process of its own, which maps the rank's shelf and only reads it: it takes no
interpreter lock from the training, and gRPC's threads never meet a ``fork``. gRPC in a process is
broken by a fork, so clients are made where they are used: in each loader process.

Where the data set has changed a rank tells the others, by a ticket of another kind: a *notice*.

A ticket is signed with a key that only the job's ranks have, and the key itself never travels on
these connections. Whoever sees a ticket can ask the same owner for the same samples again, no more.
An answer proves that its sender has the key and has read this ticket: where a server has ended or
starts anew, another program of its machine may get its port. The proof covers the call, not the
samples: who can change those on the network can change the gradients, too.
``gate.py`` has what bounds a server, whoever calls.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loft_hvd.data.arrow import flight, pa
from loft_hvd.errors import DataError
from loft_hvd.store.gate import Gate, limit_connections, watch_memory
from loft_hvd.store.shelf import Shelf, checksum

__all__ = ["Address", "Peers", "Received", "Server", "answer_proof", "listening", "open_ticket"]
__all__ += ["program", "sign_notice", "sign_ticket"]

_logger = logging.getLogger(__name__)
MOST_SAMPLES = 1 << 16  # of one call; a choice: no batch of a rank has more
_MAC_BYTES = 32  # SHA-256
_NONCE_BYTES = 16  # a choice: no two tickets are alike, so no proof is right twice
# A part of an answer, which is one record batch, ends here. A choice: several are on their way at
# once, and a message costs as much as some samples of 110 kB. By benchmarks.store_rates parts of
# 1 MiB had 47 to 51 % of a bare ``do_get``, of 2 MiB 51 to 57 %; of 4 MiB no more, on loopback and
# on a link of 1 Gb/s.
_BATCH_BYTES = 2 << 20
# Or here, a choice: while a part waits for room each of its samples takes 300 bytes of the server.
_BATCH_SAMPLES = 1024
# Or once it has this share of the samples asked for, so that the reader checks and decodes them
# while the server reads and sends the rest. Choices: 16 samples of 110 kB as 2/3 and 1/3 had
# 56.6 % of a bare ``do_get``, as halves 52.9, as one part 52.4 (medians of 7 runs by turns, single
# ones 47 to 63). A first part below half a MiB would bring less than a message costs.
_FIRST_SHARE = 2 / 3
_LEAST_SPLIT_BYTES = 512 << 10
_START_S = 60.0  # a choice: a server starts in a second, on a crowded machine in ten
# Choices: how long a server that starts anew waits for its port, and how often it asks. Its own
# connections are gone by then, but a program of the machine may have got it for one of its own.
_BIND_S, _BIND_AGAIN_S = 60.0, 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 120.0  # choices: until an owner that failed is asked again
_SCHEMA = pa.schema(
    [("sample", pa.int64()), ("checksum", pa.uint64()), ("bytes", pa.large_binary())]
)


class Address(NamedTuple):
    """Where a rank's server listens."""

    host: str
    port: int


class Received(NamedTuple):
    """A sample that a peer sent."""

    data: memoryview
    digest: int
    value: Any = None  # what ``decode`` made of the bytes


_Decode = Callable[[memoryview], Any]


def sign_ticket(key: bytes, owner: int, samples: Sequence[int]) -> bytes:
    """Return a new ticket for some samples of one owner: signature, nonce, numbers of samples."""
    asked = secrets.token_bytes(_NONCE_BYTES) + np.asarray(samples, "<i8").tobytes()
    return _signature(key, owner, asked) + asked


def _signature(key: bytes, owner: int, asked: bytes) -> bytes:
    return hmac.digest(key, b"ticket" + owner.to_bytes(8, "little") + asked, hashlib.sha256)


def sign_notice(key: bytes, owner: int, generation: int) -> bytes:
    """Return the notice to an owner that what it kept before a generation is old.

    Whoever repeats one changes nothing: it is of that generation.
    """
    said = secrets.token_bytes(_NONCE_BYTES) + generation.to_bytes(8, "little")
    return _notice_signature(key, owner, said) + said


def _notice_signature(key: bytes, owner: int, said: bytes) -> bytes:
    return hmac.digest(key, b"notice" + owner.to_bytes(8, "little") + said, hashlib.sha256)


def read_notice(ticket: bytes, key: bytes, owner: int) -> int | None:
    """Return the generation that a notice names; None where it is none of this job."""
    signature, said = ticket[:_MAC_BYTES], ticket[_MAC_BYTES:]
    if len(said) != _NONCE_BYTES + 8:
        return None
    if not hmac.compare_digest(signature, _notice_signature(key, owner, said)):
        return None
    return int.from_bytes(said[_NONCE_BYTES:], "little")


def answer_proof(key: bytes, ticket: bytes) -> bytes:
    """Return what shows that the answer to a ticket comes from who has the key."""
    return hmac.digest(key, b"answer" + ticket, hashlib.sha256)


def open_ticket(ticket: bytes, key: bytes, owner: int, num_samples: int) -> list[int]:
    """Return the samples that a ticket asks for.

    Raises:
        DataError: it is not of this job, or asks for what there is not.
    """
    if len(ticket) > _MAC_BYTES + _NONCE_BYTES + 8 * MOST_SAMPLES:  # not worth a signature
        raise DataError(f"a ticket asks for 1 to {MOST_SAMPLES} samples; it has {len(ticket)} B")
    signature, asked = ticket[:_MAC_BYTES], ticket[_MAC_BYTES:]
    # In constant time: how long it takes must not tell how much of a signature was right.
    if not hmac.compare_digest(signature, _signature(key, owner, asked)):
        raise DataError("this ticket is not signed with the key of the job")
    numbers = asked[_NONCE_BYTES:]
    if len(numbers) % 8 or not 0 < len(numbers) // 8 <= MOST_SAMPLES:
        raise DataError(f"a ticket asks for 1 to {MOST_SAMPLES} samples; it has {len(numbers)} B")
    samples = np.frombuffer(numbers, "<i8")
    if samples.min() < 0 or samples.max() >= num_samples:
        raise DataError(f"a ticket asks for a sample outside 0 to {num_samples - 1}")
    found: list[int] = samples.tolist()
    return found


_Kept = tuple[int, memoryview, int]  # sample, bytes, checksum


def kept_parts(shelf: Shelf, samples: Sequence[int]) -> Iterator[tuple[list[_Kept], int]]:
    """Yield the parts of an answer: those of the samples that are kept, and their bytes in all.

    Samples above 2 MiB are checked here. Of others only the head is read: their bytes are checked
    when there is room for a copy.
    """
    part: list[_Kept] = []
    size = 0
    num_first = _FIRST_SHARE * len(samples)
    for sample in samples:
        found = shelf.find(sample)
        # A length is not checked yet: one that is damaged must not ask for more than a part's room.
        if found is not None and len(found[0]) > _BATCH_BYTES:
            found = shelf.read(sample)
        if found is None:
            continue
        part.append((sample, *found))
        size += len(found[0])
        is_first_done = len(part) >= num_first and size >= _LEAST_SPLIT_BYTES
        if is_first_done or size >= _BATCH_BYTES or len(part) >= _BATCH_SAMPLES:
            yield part, size
            part, size = [], 0
    if part:
        yield part, size


def _undamaged(shelf: Shelf, part: Iterable[_Kept]) -> Iterator[_Kept]:
    """Yield what has its checksum."""
    for kept in part:
        sample, data, digest = kept
        if checksum(data) == digest:
            yield kept
        else:
            # The shelf drops it, unless it holds another by now: one that was read again.
            shelf.read(sample)


def _record_batch(found: Iterable[_Kept], size: int) -> Any:
    """Return samples of up to ``size`` bytes in all as Flight sends them."""
    # One sample after the other is checked and copied: between the two it stays in the cache. Of
    # Arrow's memory, which is used again: new pages cost more than the copy does.
    joined = pa.allocate_buffer(size)
    view, ends = memoryview(joined).cast("B"), [0]
    numbers, digests = [], []
    for sample, data, digest in found:
        end = ends[-1] + len(data)
        view[ends[-1] : end] = data
        numbers.append(sample)
        digests.append(digest)
        ends.append(end)
    column = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(numbers), [None, pa.py_buffer(np.array(ends, np.int64)), joined]
    )
    arrays = [pa.array(numbers, pa.int64()), pa.array(digests, pa.uint64()), column]
    return pa.record_batch(arrays, schema=_SCHEMA)


# The server, in its own process.


class _OnlyGet(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Refuses all other calls before anything is read of them."""

    def start_call(self, info: Any, headers: Any) -> None:
        if info.method != flight.FlightMethod.DO_GET:
            raise flight.FlightUnauthenticatedError("a store's server answers do_get alone")


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, location: str, shelf: Shelf, gate: Gate, key: bytes, owner: int) -> None:
        super().__init__(location, middleware={"only get": _OnlyGet()})
        self._shelf, self._gate, self._key, self._owner = shelf, gate, key, owner

    def do_get(self, context: Any, ticket: Any) -> Any:
        proof = pa.py_buffer(answer_proof(self._key, ticket.ticket))
        generation = read_notice(ticket.ticket, self._key, self._owner)
        if generation is not None:
            if self._shelf.empty(generation):
                _logger.warning(
                    "rank %d was told that the data set has changed: what it keeps is thrown away",
                    self._owner,
                )
            return flight.GeneratorStream(_SCHEMA, iter([(_record_batch([], 0), proof)]))
        try:
            samples = open_ticket(ticket.ticket, self._key, self._owner, self._shelf.num_samples)
        except DataError as error:
            raise flight.FlightUnauthenticatedError(str(error)) from error
        answer = self._answer(samples, proof)
        # Before the stream begins: else its head travels alone, and wakes a peer that still waits.
        first = list(islice(answer, 1))
        return flight.GeneratorStream(_SCHEMA, chain(first, answer))

    def _answer(self, samples: Sequence[int], proof: Any) -> Iterator[tuple[Any, Any]]:
        generation = self._shelf.generation
        try:
            with self._gate.call():
                for part, size in kept_parts(self._shelf, samples):
                    with self._gate.room(size):
                        batch = _record_batch(_undamaged(self._shelf, part), size)
                        if self._shelf.generation != generation:
                            return  # what is old is kept no longer
                        yield batch, proof
        except DataError as error:
            raise flight.FlightUnavailableError(str(error)) from error


def serve() -> None:
    """Serve the shelf whose state is in the first line of standard input, until that ends.

    A server that was started anew finds the state in a file without a name, whose descriptor is its
    argument, and listens where it did before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training's to answer
    if len(sys.argv) > 1:
        with open(int(sys.argv[1]), "rb") as file:
            given = json.loads(file.read())
    else:
        given = json.loads(sys.stdin.buffer.readline())
    shelf, gate = Shelf.attached(given["shelf"], given["descriptors"]), Gate()
    location = f"grpc://{given['host']}:{given.get('port', 0)}"
    make = partial(
        _FlightServer, location, shelf, gate, bytes.fromhex(given["key"]), given["owner"]
    )
    # Peers know the port of one that starts anew; before that any port will do.
    server = listening(make, location, limit_s=_BIND_S if "port" in given else 0.0)
    limit_connections()
    watch_memory(gate, lambda num_bytes: _start_anew(given | {"port": server.port}, num_bytes))
    if "port" not in given:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
    sys.stdin.buffer.read()  # ends when the parent, and each process it forked, has let go of it
    os._exit(0)  # gRPC's own way down waits for calls that go on


def listening(make: Callable[[], Any], location: str, *, limit_s: float) -> Any:
    """Make a server, again and again while its port is taken; a DataError at the limit."""
    ends = time.monotonic() + limit_s
    while True:
        try:
            return make()
        except pa.ArrowException as error:
            if time.monotonic() >= ends:
                raise DataError(
                    f"the store's server cannot listen on {location} ({error}), and has tried for "
                    f"{limit_s:g} s: another program has the port, or the address is none of this "
                    "machine; peers take no sample from a program without the job's key, and read "
                    "this rank's samples from the source"
                ) from error
        time.sleep(_BIND_AGAIN_S)


def _start_anew(given: dict[str, Any], num_bytes: int) -> None:
    """Become a fresh server in the same process: only that gives back what gRPC has taken."""
    _logger.warning(
        "the store's server of rank %d takes %d MB and starts anew: something sends it large "
        "requests that are not of this job",
        given["owner"], num_bytes >> 20,
    )  # fmt: skip
    state = os.memfd_create("loft_hvd server", 0)
    os.write(state, json.dumps(given).encode())
    os.lseek(state, 0, os.SEEK_SET)
    for descriptor in given["descriptors"]:
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [*program(), str(state)])


# The package without its own imports, which would take torch: a quarter of the memory, and 0.2 s of
# CPU in place of 2.5 (measured by /usr/bin/time).
_CODE = """\
import sys, types
package = types.ModuleType("loft_hvd")
package.__path__ = [{path!r}]
sys.modules["loft_hvd"] = package
from loft_hvd.store.peers import serve
serve()
"""


def program() -> list[str]:
    """Return the command that runs ``serve`` in a process without torch."""
    path = str(Path(__file__).resolve().parents[1])
    return [sys.executable, "-c", _CODE.format(path=path)]


class Server:
    """This rank's server, and its process."""

    def __init__(
        self, shelf: Shelf, *, host: str, key: bytes, owner: int, port: int | None = None
    ) -> None:
        given: dict[str, Any] = {
            "shelf": shelf.description, "descriptors": shelf.descriptors,
            "host": host, "key": key.hex(), "owner": owner,
        }  # fmt: skip
        if port is not None:  # that of a server that has ended: peers know it
            given["port"] = port
        self._shelf, self._key, self._owner = shelf, key, owner
        self.process = subprocess.Popen(
            program(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=shelf.descriptors,
        )
        self._end = weakref.finalize(self, _end, self.process)
        assert self.process.stdin is not None
        # By a pipe: arguments and environment can be read by others on the machine.
        self.process.stdin.write(json.dumps(given).encode() + b"\n")
        self.process.stdin.flush()
        self._host = host
        self._port = port or 0

    def again(self) -> Server:
        """Start a server in place of this one, which has ended; it comes up by itself."""
        self.close()
        return Server(
            self._shelf, host=self._host, key=self._key, owner=self._owner, port=self._port
        )

    def address(self) -> Address:
        """Wait until the server listens; DataError where it does not."""
        if self._port:
            return Address(self._host, self._port)
        assert self.process.stdout is not None
        timer = threading.Timer(_START_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line.strip().isdigit():
            raise DataError(
                f"the store's server on {self._host} did not start within {_START_S:g} s (its "
                "error is above)"
            )
        self._port = int(line)
        return Address(self._host, self._port)

    def close(self) -> None:
        """End the process; can be called again."""
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The calls.


class _Owner:
    """What a process knows of one owner: its connection, and when it may be asked again."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.client: Any = None
        self.asked_again_s = 0.0
        self.pause_s = _FIRST_PAUSE_S


class Peers:
    """The servers of the other ranks, as one process calls them.

    Args:
        addresses: of the ranks, [world_size].
        key: of the job, 32 bytes.
        timeout_s: longest wait for the answer of one owner, in seconds.
    """

    _has_warned = False
    _grpc_pid = 0  # of the process of this tree in which gRPC began; forks of it must not use it

    def __init__(self, addresses: Sequence[Address], key: bytes, *, timeout_s: float) -> None:
        self._addresses, self._key, self._timeout_s = list(addresses), key, timeout_s
        self._inherited: Any = None
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._owners = [_Owner(address) for address in self._addresses]
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Describe the servers for a spawned process; it makes connections of its own."""
        return {
            "_addresses": self._addresses, "_key": self._key, "_timeout_s": self._timeout_s,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._inherited = None
        self._forget()

    def fetch(
        self, wanted: Mapping[int, Sequence[int]], decode: _Decode | None = None
    ) -> dict[int, Received]:
        """Ask owners at once for samples, ``{owner: samples}``; returns what came, by sample.

        What an owner does not keep, or cannot send in time, is not among it: nothing raises. An
        owner that fails is left alone for a while, and a warning names it.

        ``decode`` gets the bytes of each sample once they are checked, and returns its ``value``:
        what came last is still in the processor's cache, and more comes meanwhile. Where several
        owners are asked it is called on threads of their own. A DataError that it raises is the
        owner's fault, as a wrong checksum is.
        """
        if not self._may_call():
            return {}  # gRPC of a parent, copied by a fork, may wait for ever
        now = time.monotonic()
        asked = [
            (owner, samples[first : first + MOST_SAMPLES])
            for owner, samples in wanted.items()
            if self._owners[owner].asked_again_s <= now
            for first in range(0, len(samples), MOST_SAMPLES)
        ]
        if len(asked) == 1:
            return self._ask(*asked[0], decode)
        found: dict[int, Received] = {}
        if asked:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(8, thread_name_prefix="loft_hvd store")
            for ask in [self._pool.submit(self._ask, *each, decode) for each in asked]:
                found |= ask.result()
        return found

    def tell_changed(self, generation: int, *, rank: int) -> None:
        """Tell all owners but this rank that what they kept before a generation is old.

        It waits for their answers. Nothing raises: who cannot be told is named by a warning.
        """
        others = [each for each in range(len(self._addresses)) if each != rank]
        if not self._may_call() or not others:
            return
        with ThreadPoolExecutor(8, thread_name_prefix="loft_hvd notice") as pool:
            for other in others:
                pool.submit(self._tell, other, sign_notice(self._key, other, generation))

    def _tell(self, rank: int, notice: bytes) -> None:
        owner = self._owners[rank]
        try:
            proof = answer_proof(self._key, notice)
            answer = list(self._client(owner).do_get(flight.Ticket(notice), self._options()))
            if not any(_has_proof(each, proof) for each in answer):
                raise DataError("what answers there does not know the job's key")
        except (pa.ArrowException, OSError, DataError) as error:
            _logger.warning(
                "rank %d was not told that the data set has changed (%s): it reads what it keeps "
                "until the next epoch begins",
                rank, _first_line(error),
            )  # fmt: skip

    def _client(self, owner: _Owner) -> Any:
        if owner.client is None:
            host, port = owner.address
            owner.client = flight.FlightClient(f"grpc://{host}:{port}")
        return owner.client

    def _options(self) -> Any:
        return flight.FlightCallOptions(timeout=self._timeout_s)

    def _may_call(self) -> bool:
        if self._pid != os.getpid():
            # Never dropped: to end a connection that a fork has copied waits for ever.
            self._inherited = self._inherited, self._owners, self._pool
            self._forget()
        if Peers._grpc_pid == 0:
            Peers._grpc_pid = self._pid
        if Peers._grpc_pid == self._pid:
            return True
        if not Peers._has_warned:
            Peers._has_warned = True
            _logger.warning(
                "this process was forked from one that had read from peers; it reads from the "
                "source alone. Read stores in loader processes or in the training, not in both"
            )
        return False

    def _ask(
        self, rank: int, samples: Sequence[int], decode: _Decode | None
    ) -> dict[int, Received]:
        """Return what one owner sends, up to what it fails at."""
        found: dict[int, Received] = {}
        owner, wanted = self._owners[rank], set(samples)
        try:
            ticket = sign_ticket(self._key, rank, samples)
            proof = answer_proof(self._key, ticket)
            for chunk in self._client(owner).do_get(flight.Ticket(ticket), self._options()):
                if not _has_proof(chunk, proof):
                    raise DataError("what answers there does not know the job's key")
                found |= _taken(chunk.data, wanted, decode)
        except (pa.ArrowException, OSError, DataError) as error:
            self._leave_alone(rank, owner, error)
        else:
            owner.pause_s = _FIRST_PAUSE_S
        return found

    def _leave_alone(self, rank: int, owner: _Owner, error: Exception) -> None:
        owner.client = None
        owner.asked_again_s = time.monotonic() + owner.pause_s
        owner.pause_s = min(2 * owner.pause_s, _LONGEST_PAUSE_S)
        _logger.warning(
            "rank %d does not send its samples (%s): they are read from the source",
            rank, _first_line(error),
        )  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _has_proof(chunk: Any, proof: bytes) -> bool:
    return hmac.compare_digest(bytes(chunk.app_metadata or b""), proof)


def _taken(batch: Any, wanted: set[int], decode: _Decode | None) -> dict[int, Received]:
    """Return the samples of a record batch, which were asked for and are whole."""
    if batch.schema != _SCHEMA:
        raise DataError(f"an answer has the columns {batch.schema.names}")
    batch.validate(full=True)  # offsets that a peer sent are within its bytes
    found: dict[int, Received] = {}
    samples, digests = batch.column(0).to_pylist(), batch.column(1).to_pylist()
    for sample, digest, data in zip(samples, digests, _views(batch.column(2)), strict=True):
        if sample not in wanted or checksum(data) != digest:
            raise DataError(f"sample {sample} came damaged, or was not asked for")
        wanted.discard(sample)
        found[sample] = Received(data, digest, decode(data) if decode else None)
    return found


def _views(column: Any) -> Iterator[memoryview]:
    """Yield the bytes of each value of a column, which is valid; Arrow's own scalars are copies."""
    _, offsets, values = column.buffers()
    if values is None or len(column) == 0:  # all values are empty, or there are none
        yield from [memoryview(b"")] * len(column)
        return
    # Values 2 and 3 of a column that begins at 2 lie between offsets 2, 3 and 4 of its buffer.
    ends = np.frombuffer(offsets, np.int64, len(column) + 1, 8 * column.offset)
    data = memoryview(values).cast("B")
    for begin, end in pairwise(ends.tolist()):
        yield data[begin:end]
