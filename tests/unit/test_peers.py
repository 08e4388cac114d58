"""Peers send what they keep to those who have the job's key, and to nobody else."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")

import pyarrow as pa
from pyarrow import flight

from loft_hvd.errors import DataError
from loft_hvd.store import peers as peers_module
from loft_hvd.store.gate import Gate
from loft_hvd.store.peers import (
    Address,
    Peers,
    Received,
    Server,
    _record_batch,
    _undamaged,
    _views,
    answer_proof,
    kept_parts,
    listening,
    open_ticket,
    program,
    sign_notice,
    sign_ticket,
)
from loft_hvd.store.shelf import Shelf, checksum

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
NUM_SAMPLES = 100


def value(sample: int) -> bytes:
    return bytes([sample]) * (10 + sample)


@pytest.fixture
def server() -> Iterator[Server]:
    shelf = Shelf(NUM_SAMPLES, memory_bytes=1 << 20)
    for sample in range(0, NUM_SAMPLES, 2):
        shelf.add(sample, value(sample))
    server = Server(shelf, host="127.0.0.1", key=KEY, owner=0)
    yield server
    server.close()


def test_a_peer_sends_what_it_keeps(server: Server) -> None:
    peers = Peers([server.address()], KEY, timeout_s=10.0)
    found = peers.fetch({0: list(range(50))})
    assert sorted(found) == list(range(0, 50, 2))
    assert all(bytes(each.data) == value(sample) for sample, each in found.items())


def test_a_server_takes_no_torch() -> None:
    python, option, code = program()
    code = code.replace("\nserve()", "\nprint('torch' in sys.modules)")
    done = subprocess.run([python, option, code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_server_that_starts_anew_waits_for_its_port() -> None:
    shelf = Shelf(4, memory_bytes=1 << 20)
    shelf.add(2, value(2))
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # by another program
        host, port = taken.getsockname()
        state = {
            "shelf": shelf.description,
            "descriptors": shelf.descriptors,
            "host": host,
            "port": port,
            "key": KEY.hex(),
            "owner": 0,
        }
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(state).encode())
            file.seek(0)
            process = subprocess.Popen(
                [*program(), str(file.fileno())],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[file.fileno(), *shelf.descriptors],
            )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stderr is not None
        # What gRPC says of it; newer ones say why.
        while b"Failed to add port" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        taken.close()
        found: dict[int, Received] = {}
        until = time.monotonic() + 30
        while not found and time.monotonic() < until:
            found = Peers([Address(host, port)], KEY, timeout_s=1.0).fetch({0: [2]})
        assert [bytes(each.data) for each in found.values()] == [value(2)]


def test_a_port_that_stays_taken_is_an_error_at_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        location = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        tried: list[str] = []

        def make() -> object:
            tried.append(location)
            return flight.FlightServerBase(location)

        with pytest.raises(DataError, match=rf"listen on {location}.*has tried for 0\.3 s"):
            listening(make, location, limit_s=0.3)
    assert len(tried) > 1


def test_many_samples_come_in_several_batches() -> None:
    shelf = Shelf(300, memory_bytes=300 * 110_000)
    for sample in range(300):
        shelf.add(sample, bytes([sample % 256]) * 100_000)  # 30 MB: many record batches
    server = Server(shelf, host="127.0.0.1", key=KEY, owner=0)
    found = Peers([server.address()], KEY, timeout_s=20.0).fetch({0: list(range(300))})
    server.close()
    assert len(found) == 300
    assert all(bytes(each.data) == bytes([s % 256]) * 100_000 for s, each in found.items())


def test_an_answer_comes_by_parts_and_what_came_before_a_fault_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Shelf(40, memory_bytes=40 * 410_000)
    for sample in range(40):
        shelf.add(sample, bytes([sample]) * 400_000)  # 16 MB: several record batches
    server = Server(shelf, host="127.0.0.1", key=KEY, owner=0)
    peers = Peers([server.address()], KEY, timeout_s=20.0)
    # Killed as soon as the first sample has come.
    found = peers.fetch({0: range(40)}, lambda _: os.kill(server.process.pid, signal.SIGKILL))
    server.close()
    assert 0 < len(found) < 40
    assert all(bytes(each.data) == bytes([s]) * 400_000 for s, each in found.items())
    assert "rank 0 does not send its samples" in caplog.text


def test_samples_that_are_damaged_or_empty_leave_the_others_whole() -> None:
    shelf = Shelf(5, memory_bytes=1 << 20)
    for sample, data in enumerate([b"", value(1), value(2), value(3), b""]):
        shelf.add(sample, data)
    kept = shelf.read(1)
    assert kept is not None
    kept[0][0] ^= 1  # its bytes
    begin = (int(shelf._index[3]) - 1) * 64
    shelf._views[0][begin] ^= 1  # its head
    server = Server(shelf, host="127.0.0.1", key=KEY, owner=0)
    peers = Peers([server.address()], KEY, timeout_s=10.0)
    damaged = peers.fetch({0: [1, 3]})  # an answer whose only part has no sample
    found = peers.fetch({0: range(5)})
    empty = peers.fetch({0: [0, 4]})
    server.close()
    assert damaged == {}
    assert {sample: bytes(each.data) for sample, each in found.items()} == {
        0: b"",
        2: value(2),
        4: b"",
    }
    assert {sample: bytes(each.data) for sample, each in empty.items()} == {0: b"", 4: b""}
    assert shelf.held().tolist() == [True, False, True, False, True]
    assert shelf.counters["corrupt"] == 2


def test_a_damaged_length_asks_for_no_room() -> None:
    """Usual lengths are checked when there is room; 4 MB that never were must ask for none."""
    shelf = Shelf(3, memory_bytes=8 << 20)
    for sample in range(3):
        shelf.add(sample, value(sample))
    begin = (int(shelf._index[1]) - 1) * 64
    struct.pack_into("<I", shelf._views[0], begin + 4, 4 << 20)  # its length
    found = shelf.find(1)
    assert found is not None
    assert len(found[0]) == 4 << 20
    ((part, size),) = kept_parts(shelf, range(3))
    assert [sample for sample, *_ in part] == [0, 2]
    assert size == len(value(0)) + len(value(2))
    assert not shelf.held()[1]


def test_a_sample_that_was_kept_again_meanwhile_stays() -> None:
    shelf = Shelf(3, memory_bytes=1 << 20)
    for sample in range(3):
        shelf.add(sample, value(sample))
    ((part, _),) = kept_parts(shelf, range(3))
    part[0][1][0] ^= 1
    part[1][1][0] ^= 1
    assert shelf.read(1) is None
    assert shelf.add(1, value(1))
    assert [sample for sample, *_ in _undamaged(shelf, part)] == [2]
    assert shelf.held().tolist() == [False, True, True]
    assert shelf.counters["corrupt"] == 2


def test_a_length_that_is_damaged_while_a_part_waits_changes_nothing() -> None:
    shelf = Shelf(3, memory_bytes=1 << 20)
    for sample in range(3):
        shelf.add(sample, value(sample))
    ((part, size),) = kept_parts(shelf, range(3))
    begin = (int(shelf._index[1]) - 1) * 64
    struct.pack_into("<I", shelf._views[0], begin + 4, 1000)
    batch = _record_batch(_undamaged(shelf, part), size)
    assert batch.column(2).to_pylist() == [value(0), value(1), value(2)]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([110_000] * 16, [11, 5]),  # two thirds of them
        ([10] + [110_000] * 15, [11, 5]),
        ([110_000] * 6, [5, 1]),  # 512 KiB
        ([110_000] * 4, [4]),
        ([110_000] * 60, [20, 20, 20]),  # 2 MiB
        ([10] * 2500, [1024, 1024, 452]),
        ([110_000, None] * 8, [8]),  # two thirds of what was asked for, not of what is kept
        ([None] * 3, []),
        ([], []),
    ],
)
def test_an_answer_comes_in_parts(sizes: list[int | None], parts: list[int]) -> None:
    shelf = Shelf(len(sizes) + 1, memory_bytes=8 << 20)
    kept = [(sample, size) for sample, size in enumerate(sizes) if size is not None]
    for sample, size in kept:
        assert shelf.add(sample, bytes([sample % 256]) * size)
    found = list(kept_parts(shelf, range(len(sizes))))
    assert [len(part) for part, _ in found] == parts
    assert [(each[0], len(each[1])) for part, _ in found for each in part] == kept
    assert [size for _, size in found] == [sum(len(each[1]) for each in part) for part, _ in found]


@pytest.mark.parametrize("num_owners", [1, 2])
def test_what_is_decoded_comes_with_its_sample(num_owners: int) -> None:
    shelf = Shelf(NUM_SAMPLES, memory_bytes=1 << 20)
    for sample in range(NUM_SAMPLES):
        shelf.add(sample, value(sample))
    with ExitStack() as stack:
        addresses = []
        for owner in range(num_owners):
            server = Server(shelf, host="127.0.0.1", key=KEY, owner=owner)
            stack.callback(server.close)
            addresses.append(server.address())
        peers = Peers(addresses, KEY, timeout_s=10.0)
        found = peers.fetch({owner: [2 + owner] for owner in range(num_owners)}, len)
    values = {sample: each.value for sample, each in found.items()}
    assert values == {2 + owner: 12 + owner for owner in range(num_owners)}


@pytest.mark.parametrize("num_owners", [1, 2])
def test_what_cannot_be_decoded_is_its_owners_fault(
    num_owners: int, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(data: memoryview) -> None:
        raise DataError("it is no sample")

    # The server is rank 0's, and refuses tickets for rank 1.
    peers = Peers([server.address()] * num_owners, KEY, timeout_s=10.0)
    wanted = {owner: [2 + owner] for owner in range(num_owners)}
    assert peers.fetch(wanted, refuse) == {}
    assert "rank 0 does not send its samples (it is no sample)" in caplog.text


def test_views_of_a_column_are_its_values_and_no_copies() -> None:
    column = pa.array([b"ab", b"", b"cde", b"f"], pa.large_binary()).slice(1, 2)
    assert [bytes(view) for view in _views(column)] == [b"", b"cde"]
    assert [bytes(view) for view in _views(pa.array([b"", b""], pa.large_binary()))] == [b"", b""]
    assert list(_views(pa.array([], pa.large_binary()))) == []


def test_nothing_is_sent_without_the_key(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    stranger = Peers([server.address()], OTHER_KEY, timeout_s=10.0)
    assert stranger.fetch({0: [2, 4]}) == {}
    assert "not signed" in caplog.text
    host, port = server.address()
    client = flight.FlightClient(f"grpc://{host}:{port}")
    for ticket in (b"", b"x" * 31, b"x" * 40, sign_ticket(KEY, 1, [2])):
        with pytest.raises(flight.FlightUnauthenticatedError):
            client.do_get(flight.Ticket(ticket)).read_all()
    for call in (
        lambda: list(client.list_flights()),
        lambda: list(client.do_action(flight.Action("x", b""))),
        lambda: client.get_flight_info(flight.FlightDescriptor.for_path("x")),
    ):
        with pytest.raises(Exception, match="answers do_get alone"):
            call()


class Impostor(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """A program on a server's port: it sends bytes of its own with the right checksum."""

    def __init__(self, proof_of: Callable[[bytes], bytes]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.proof_of, self.num_calls = proof_of, 0

    def do_get(self, context: Any, ticket: Any) -> Any:
        self.num_calls += 1
        batch = _record_batch([(2, memoryview(b"bad"), checksum(b"bad"))], 3)
        proof = pa.py_buffer(self.proof_of(ticket.ticket))
        return flight.GeneratorStream(batch.schema, [(batch, proof)])


@pytest.mark.parametrize(
    "proof_of",
    [
        lambda ticket: b"",
        lambda ticket: answer_proof(OTHER_KEY, ticket),
        lambda ticket: answer_proof(KEY, sign_ticket(KEY, 0, [2])),  # of another call for the same
    ],
    ids=["none", "other key", "other call"],
)
def test_nothing_is_taken_from_a_program_that_cannot_prove_the_key(
    proof_of: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with Impostor(proof_of) as impostor:
        peers = Peers([Address("127.0.0.1", impostor.port)], KEY, timeout_s=5.0)
        assert peers.fetch({0: [2]}) == {}
        assert impostor.num_calls == 1
    assert "rank 0 does not send its samples (what answers there does not know" in caplog.text


def test_what_comes_with_the_proof_of_its_call_is_taken() -> None:
    with Impostor(lambda ticket: answer_proof(KEY, ticket)) as owner:
        found = Peers([Address("127.0.0.1", owner.port)], KEY, timeout_s=5.0).fetch({0: [2]})
    assert [bytes(each.data) for each in found.values()] == [b"bad"]


def test_an_owner_that_ends_is_left_alone_and_named_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers([Address("127.0.0.1", 1), server.address()], KEY, timeout_s=5.0)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    for _ in range(5):
        assert peers.fetch({1: [2]}) == {}
    assert len([each for each in caplog.messages if "rank 1 does not send" in each]) == 1


def freeze(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    for task in Path(f"/proc/{pid}/task").iterdir():
        # 12 (python3) T 1 ...: the state follows the name
        while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until
            time.sleep(0.001)


def test_an_owner_that_is_frozen_costs_one_limit(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers([server.address()], KEY, timeout_s=0.5)
    assert len(peers.fetch({0: [2]})) == 1
    freeze(server.process.pid)
    start = time.monotonic()
    assert peers.fetch({0: [4]}) == {}
    assert peers.fetch({0: [6]}) == {}
    assert time.monotonic() - start < 5.0
    os.kill(server.process.pid, signal.SIGCONT)


_FORKS = """
import os, sys
from loft_hvd.store.peers import Address, Peers
peers = Peers([Address("127.0.0.1", int(sys.argv[1]))], bytes(range(32)), timeout_s=10.0)
pids = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(len(peers.fetch({0: [2, 4]})))
    pids.append(pid)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [2, 2, 2]
assert len(peers.fetch({0: [2, 4]})) == 2
pid = os.fork()
if pid == 0:
    other = Peers([Address("127.0.0.1", int(sys.argv[1]))], bytes(range(32)), timeout_s=10.0)
    os._exit(10 + len(peers.fetch({0: [2, 4]})) + len(other.fetch({0: [2, 4]})))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10  # gRPC began before this fork
"""


def test_forked_processes_ask_by_connections_of_their_own(server: Server) -> None:
    port = str(server.address().port)  # a process of its own: here gRPC has begun
    run = [sys.executable, "-c", _FORKS, port]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was forked from one that had read from peers") == 1


def test_tickets_hold_what_was_signed() -> None:
    assert open_ticket(sign_ticket(KEY, 3, [1, 5]), KEY, 3, NUM_SAMPLES) == [1, 5]
    for samples in ([], [-1], [NUM_SAMPLES], [1] * ((1 << 16) + 1)):
        with pytest.raises(DataError, match="ticket asks"):
            open_ticket(sign_ticket(KEY, 3, samples), KEY, 3, NUM_SAMPLES)


def test_a_notice_empties_a_shelf_once_and_a_repeated_one_changes_nothing(server: Server) -> None:
    shelf = server._shelf
    peers = Peers([server.address(), server.address()], KEY, timeout_s=10.0)
    peers.tell_changed(1, rank=1)  # rank 0 alone is another one
    assert shelf.generation == 1
    assert not shelf.held().any()
    assert peers.fetch({0: [2, 4]}) == {}
    assert shelf.add(2, value(3), generation=1)
    client = flight.FlightClient(f"grpc://127.0.0.1:{server.address().port}")
    for generation in (0, 1):
        assert list(client.do_get(flight.Ticket(sign_notice(KEY, 0, generation))))
    assert bytes(peers.fetch({0: [2]})[2].data) == value(3)


def test_an_owner_that_hears_of_a_change_while_it_sends_is_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(NUM_SAMPLES, memory_bytes=1 << 20)
    shelf.add(2, value(2))

    def changed_meanwhile(shelf: Shelf, part: Any) -> Any:
        found = list(_undamaged(shelf, part))
        if shelf.empty(1):
            shelf.add(2, value(3), generation=1)
        return found

    monkeypatch.setattr(peers_module, "_undamaged", changed_meanwhile)
    with peers_module._FlightServer("grpc://127.0.0.1:0", shelf, Gate(), KEY, 0) as here:
        peers = Peers([Address("127.0.0.1", here.port)], KEY, timeout_s=10.0)
        assert peers.fetch({0: [2]}) == {}
        assert bytes(peers.fetch({0: [2]})[2].data) == value(3)
    assert not caplog.records


def test_notices_of_strangers_and_of_others_are_refused(server: Server) -> None:
    client = flight.FlightClient(f"grpc://127.0.0.1:{server.address().port}")
    changed = bytearray(sign_notice(KEY, 0, 1))
    changed[-1] ^= 1
    asked = sign_ticket(KEY, 0, [2])  # as long as a notice
    assert len(asked) == len(changed)
    for notice in (sign_notice(OTHER_KEY, 0, 1), sign_notice(KEY, 1, 1), bytes(changed)):
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_get(flight.Ticket(notice)))
    assert len(list(client.do_get(flight.Ticket(asked)))) == 1
    assert server._shelf.generation == 0
    with pytest.raises(DataError, match="is not signed"):
        open_ticket(sign_notice(KEY, 0, 1), KEY, 0, NUM_SAMPLES)


def test_a_rank_that_cannot_be_told_is_named(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers([server.address(), server.address()], OTHER_KEY, timeout_s=10.0)
    peers.tell_changed(1, rank=0)
    assert "rank 1 was not told that the data set has changed" in caplog.text
    assert server._shelf.generation == 0


def test_changed_tickets_are_refused() -> None:
    draw = random.Random(8)
    for _ in range(20_000):
        ticket = bytearray(sign_ticket(KEY, 0, [draw.randrange(100) for _ in range(3)]))
        ticket[draw.randrange(len(ticket))] ^= 1 << draw.randrange(8)
        with pytest.raises(DataError):
            open_ticket(bytes(ticket[: draw.randint(0, len(ticket))]), KEY, 0, NUM_SAMPLES)


def test_the_key_is_in_no_argument_and_no_environment(server: Server) -> None:
    server.address()
    for name in ("cmdline", "environ"):
        with open(f"/proc/{server.process.pid}/{name}", "rb") as file:
            text = file.read()
        assert KEY not in text
        assert KEY.hex().encode() not in text


def test_the_server_ends_with_its_owner(server: Server) -> None:
    server.address()
    server.close()
    assert server.process.returncode is not None
    server.close()


def test_concurrent_calls_share_a_connection(server: Server) -> None:
    peers = Peers([server.address()], KEY, timeout_s=10.0)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(len(peers.fetch({0: list(range(100))}))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert counts == [50] * 6
