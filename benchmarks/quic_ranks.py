"""Means over ranks by QUIC, to compare with: rows in datagrams that may be lost, results not.

By aioquic, whose congestion control is cubic (RFC 9221 datagrams count in it, and are not sent
again). Each rank owns a shard; what is missing of a row becomes the mean of the rows that came.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
import struct
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aioquic.asyncio import QuicConnectionProtocol, connect, serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import DatagramFrameReceived, QuicEvent, StreamDataReceived
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["QuicRanks"]

Floats = npt.NDArray[np.float32]

_PORT = 47_700
_HEADER = struct.Struct("<BIII")  # kind, rank, operation, block
_HELLO, _BLOCK, _END, _RESULT = range(4)
_BLOCK_NUMEL = 270  # a packet of aioquic's has 1,200 bytes
_WAIT_S = 180.0


class _Operation:
    """An all-reduce as far as it has come here, perhaps before this rank has begun it."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int, bytes]] = []  # rank, block, values
        self.rows_sent: set[int] = set()
        self.results: dict[int, bytes] = {}
        self.changed = asyncio.Event()


class _End(QuicConnectionProtocol):
    """One end of a connection to a rank."""

    def __init__(self, *arguments: Any, ranks: QuicRanks, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks
        self._streams: dict[int, bytearray] = defaultdict(bytearray)

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, DatagramFrameReceived):
            self._ranks.came(self, event.data)
        elif isinstance(event, StreamDataReceived):
            self._streams[event.stream_id] += event.data
            if event.end_stream:
                self._ranks.came(self, bytes(self._streams.pop(event.stream_id)))

    def say(self, message: bytes) -> None:
        stream = self._quic.get_next_available_stream_id(is_unidirectional=True)
        self._quic.send_stream_data(stream, message, end_stream=True)

    @property
    def has_datagrams(self) -> bool:
        return bool(self._quic._datagrams_pending)  # there is no public word for it

    def throw(self, message: bytes) -> None:
        self._quic.send_datagram_frame(message)


class QuicRanks:
    """Connections between all ranks, one a pair, and a thread that serves them.

    Args:
        rank: this one.
        addresses: of all ranks, by rank.
    """

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self.rank, self.world_size = rank, len(addresses)
        self._addresses = addresses
        self._peers: dict[int, _End] = {}
        self._operations: dict[int, _Operation] = defaultdict(_Operation)
        self._contexts: list[Any] = []
        self._number = 0
        self._loop = asyncio.new_event_loop()
        self._is_connected = asyncio.Event()
        threading.Thread(target=self._loop.run_forever, name="quic", daemon=True).start()
        self._wait(self._open())

    def _wait(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_WAIT_S)

    async def _open(self) -> None:
        def make(*arguments: Any, **options: Any) -> _End:
            return _End(*arguments, ranks=self, **options)

        common: dict[str, Any] = {
            "alpn_protocols": ["ranks"],
            "congestion_control_algorithm": "cubic",
            "max_data": 2**30,
            "max_stream_data": 2**28,
            "max_datagram_frame_size": 65_536,
            "idle_timeout": 600.0,
        }
        listens = QuicConfiguration(is_client=False, **common)
        _certify(listens)
        await serve("0.0.0.0", _PORT, configuration=listens, create_protocol=make)
        calls = QuicConfiguration(is_client=True, verify_mode=ssl.CERT_NONE, **common)
        for peer in range(self.rank):
            for _ in range(50):  # it may not listen yet
                context = connect(
                    self._addresses[peer], _PORT, configuration=calls, create_protocol=make
                )
                try:
                    end: Any = await asyncio.wait_for(context.__aenter__(), 5.0)
                    self._contexts.append(context)  # with it the connection would go
                    break
                except (ConnectionError, asyncio.TimeoutError):
                    await asyncio.sleep(0.2)
            else:
                raise ConnectionError(f"rank {peer} at {self._addresses[peer]} does not answer")
            end.say(_HEADER.pack(_HELLO, self.rank, 0, 0))
            end.transmit()
            self._met(peer, end)
        if self.world_size > 1:
            await asyncio.wait_for(self._is_connected.wait(), 60.0)

    def _met(self, peer: int, end: _End) -> None:
        self._peers[peer] = end
        if len(self._peers) == self.world_size - 1:
            self._is_connected.set()

    def came(self, end: _End, message: bytes) -> None:
        """Take a message in, on the loop's thread."""
        kind, rank, number, block = _HEADER.unpack_from(message)
        if kind == _HELLO:
            self._met(rank, end)
            return
        operation, values = self._operations[number], message[_HEADER.size :]
        if kind == _BLOCK:
            operation.blocks.append((rank, block, values))
        elif kind == _END:
            operation.rows_sent.add(rank)
        else:
            operation.results[rank] = values
        operation.changed.set()

    def mean(self, values: Floats) -> Floats:
        """Return the mean over ranks of values, [numel], the same on all."""
        found: Floats = self._wait(self._mean(values))
        return found

    async def _mean(self, values: Floats) -> Floats:
        self._number += 1
        number, operation = self._number, self._operations[self._number]
        shards = np.array_split(values, self.world_size)
        for shift in range(1, self.world_size):
            peer = (self.rank + shift) % self.world_size
            end, shard = self._peers[peer], shards[peer]
            for block, first in enumerate(range(0, len(shard), _BLOCK_NUMEL)):
                part = shard[first : first + _BLOCK_NUMEL].tobytes()
                end.throw(_HEADER.pack(_BLOCK, self.rank, number, block) + part)
            end.transmit()
        for end in self._peers.values():
            while end.has_datagrams:  # which a short stream would overtake
                await asyncio.sleep(0.001)
            end.say(_HEADER.pack(_END, self.rank, number, 0))
            end.transmit()
        while len(operation.rows_sent) < self.world_size - 1:
            await self._changed(operation)
        own = shards[self.rank]
        rows = np.full((self.world_size, len(own)), np.nan, np.float32)
        rows[self.rank] = own
        for rank, block, part in operation.blocks:
            first = block * _BLOCK_NUMEL
            rows[rank, first : first + _BLOCK_NUMEL] = np.frombuffer(part, np.float32)
        result = np.nanmean(rows, axis=0).astype(np.float32)
        for end in self._peers.values():
            end.say(_HEADER.pack(_RESULT, self.rank, number, 0) + result.tobytes())
            end.transmit()
        while len(operation.results) < self.world_size - 1:
            await self._changed(operation)
        parts = {rank: np.frombuffer(part, np.float32) for rank, part in operation.results.items()}
        parts[self.rank] = result
        del self._operations[number]
        return np.concatenate([parts[rank] for rank in range(self.world_size)])

    async def _changed(self, operation: _Operation) -> None:
        operation.changed.clear()
        await operation.changed.wait()


def _certify(configuration: QuicConfiguration) -> None:
    """Give a server a certificate that it has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rank")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    with tempfile.TemporaryDirectory() as folder:
        chain, private = Path(folder, "chain.pem"), Path(folder, "key.pem")
        chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        configuration.load_cert_chain(chain, private)
