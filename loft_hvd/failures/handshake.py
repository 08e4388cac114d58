"""How ranks come to their links: they call rank 0, both prove who they are, strangers are kept out.

Rank 0 listens on the interface that the engine uses, for as long as ranks may have to come back.
Every rank proves itself with a key of its own, which rank 0 has sent it through the engine, and
rank 0 proves itself to it; neither a key nor anything that serves twice travels here::

    rank r: hello      r, nonce of r
    rank 0: challenge  nonce of 0, HMAC(key of r, "rank 0", both nonces)
    rank r: proof      HMAC(key of r, "rank r", both nonces, where it runs), where it runs
    rank 0: welcome    where it runs

Strangers are few at a time, have little time and few, short lines, and give way to who speaks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from loft_hvd.config import config
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.process import RankProcess, own_process
from loft_hvd.transport.addresses import listening_addresses, own_addresses
from loft_hvd.transport.base import Channel

__all__ = [
    "Caller",
    "LinkMaker",
    "Listener",
    "NewLink",
    "OpenedLinks",
    "StrangerLimits",
    "open_links",
]

_logger = logging.getLogger(__name__)

_MAX_ADDRESSES = 16  # bound from the header's fixed length: more interfaces go unused
_MAX_OPENING_LINE = 512  # bytes; bound from a proof: two numbers, a digest and a host's name
_SECRET_BYTES = 32  # bound from SHA-256: a key of its length
_CALL_S = 2.0  # a choice: an address behind a firewall must not use up the time of the next
# For an answer, twice as long each time that none came, as others may stand before this rank: bound
# from the longest queue of the kernel's, 4,096, of which rank 0 lets in some 400 a second.
_MOST_ANSWER_S = 16.0
_AGAIN_S = 0.5  # a choice: between two calls, where the first is refused at once
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class NewLink:
    """A link to a rank that has proven itself."""

    rank: int
    link: Link
    process: RankProcess  # where it runs, by its own word
    messages: list[Message]  # that have come already


class LinkMaker(Protocol):
    """How a rank comes to its links: rank 0 has a ``Listener``, the others a ``Caller``."""

    def fileno(self) -> int:
        """For selectors."""

    def poll(self) -> list[NewLink]:
        """Go on with what has come or is due, without waiting; returns the links made."""

    def due_s(self) -> float:
        """Return in how many seconds ``poll`` has something to do though nothing has come."""

    def close(self) -> None:
        """Close it; can be called again."""


# What both sides compute.


def _digest(key: bytes, *words: str) -> str:
    return hmac.new(key, " ".join(words).encode(errors="replace"), hashlib.sha256).hexdigest()


def _key_of(secret: bytes, rank: int) -> bytes:
    """Return the key of a rank; rank 0 alone knows the secret that they all follow from."""
    return hmac.new(secret, f"loft_hvd heartbeat rank {rank}".encode(), hashlib.sha256).digest()


def _is_equal(one: str, other: str) -> bool:
    # In constant time: how long it takes must not tell a stranger how much of it was right.
    return hmac.compare_digest(one.encode(), other.encode())


def _describe(process: RankProcess) -> str:
    return f"{process.host_key} {process.pid} {process.start} {process.host[:100]}"


def _parse_process(text: str) -> RankProcess | None:
    parts = text.split(" ", 3)
    try:
        return RankProcess(int(parts[0]), int(parts[1]), int(parts[2]), parts[3][:100])
    except (ValueError, IndexError):
        return None


# Rank 0.


@dataclass(frozen=True)
class StrangerLimits:
    """What those who have not proven themselves can use up, all choices."""

    strangers: int = 64  # connections at a time: a quarter of the fewest descriptors in use, 256
    hello_s: float = 2.0  # until a connection must have proven itself
    pause_s: float = 0.25  # until the next try, when this process has no descriptor left
    # These hold in training. A connection with all it says takes 120 us of CPU beside ranks that
    # compute (10,000 of them, 2 cores of an AMD EPYC, 2026-11-24), so 400 a second are let in.
    core_share: float = 0.05  # for new connections and strangers: a rest follows each burst
    num_burst: int = 16  # at each address; meanwhile other threads wait for the interpreter


@dataclass
class _Stranger:
    link: Link
    until: float  # when its time is over
    rank: int = 0  # that it says it is, or 0 as long as it has said nothing of use
    nonces: tuple[str, str] = ("", "")  # its own and ours


class Listener:
    """Rank 0's end: it listens for the others, at the beginning and when their links were lost.

    Args:
        keys: each rank's key; no other rank is let in.
        own: where rank 0 runs.
        addresses: this host's IPv4 addresses to listen on, each on a port of the kernel's choice.
    """

    def __init__(
        self,
        keys: Mapping[int, bytes],
        own: RankProcess,
        addresses: Sequence[str],
        *,
        limits: StrangerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._keys = dict(keys)
        self._own = own
        self._limits = StrangerLimits() if limits is None else limits
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._spent_s = 0.0  # of CPU in training, since the last burst
        self._strangers: dict[object, _Stranger] = {}  # by link, the oldest first
        self._paused_until: float | None = None
        self.is_opening = True  # whether nothing else is to be done here than to let ranks in
        self._selector = selectors.EpollSelector()
        self._servers = []
        for address in addresses:
            try:
                server = socket.create_server((address, 0), backlog=socket.SOMAXCONN)
            except OSError:
                self.close()  # on the addresses before
                raise
            server.setblocking(False)
            self._servers.append(server)
            self._selector.register(server, selectors.EVENT_READ)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens, as (address, port)."""
        return [server.getsockname() for server in self._servers]

    @property
    def num_strangers(self) -> int:
        """How many connections have not proven themselves yet."""
        return len(self._strangers)

    def fileno(self) -> int:
        """For selectors."""
        return self._selector.fileno()

    def due_s(self) -> float:
        """See ``LinkMaker``."""
        ends = [stranger.until for stranger in self._strangers.values()][:1]
        if self._paused_until is not None:
            ends.append(self._paused_until)
        return max(0.0, min(ends) - self._clock()) if ends else float("inf")

    def poll(self) -> list[NewLink]:
        """See ``LinkMaker``."""
        began = self._cpu_clock()
        if self._paused_until is not None and self._clock() >= self._paused_until:
            self._paused_until = None
            try:
                for server in self._servers:
                    self._selector.register(server, selectors.EVENT_READ)
            except OSError:  # the kernel may still watch no more
                self._pause(self._limits.pause_s)
        made, has_accepted = [], False
        events = self._selector.select(0)
        for key, _ in events:
            if isinstance(key.fileobj, socket.socket):
                made += self._accept(key.fileobj)
                has_accepted = True
            elif (stranger := self._strangers.get(key.fileobj)) is not None:  # not sent away above
                made += self._hear(stranger)
        now = self._clock()
        expired = [each for each in self._strangers.values() if each.until <= now]
        for stranger in expired:
            self._dismiss(stranger)
        if (events or expired) and not self.is_opening:  # a look at nothing is not their doing
            self._spent_s += self._cpu_clock() - began
            if has_accepted:
                self._rest()
        return made

    def close(self) -> None:
        """See ``LinkMaker``."""
        for stranger in list(self._strangers.values()):
            self._dismiss(stranger)
        for server in self._servers:
            server.close()
        self._selector.close()

    def _accept(self, server: socket.socket) -> list[NewLink]:
        made: list[NewLink] = []
        for _ in range(self._limits.strangers if self.is_opening else self._limits.num_burst):
            if self._paused_until is not None:
                break
            try:
                connection, _ = server.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._make_room()
                return made  # nobody is there any more, or no descriptor is left
            link = Link(connection, max_line=_MAX_OPENING_LINE)
            try:
                self._selector.register(link, selectors.EVENT_READ)
            except OSError:  # the kernel has no memory left to watch it, or may watch no more
                link.reset()
                self._make_room()
                return made
            stranger = _Stranger(link, self._clock() + self._limits.hello_s)
            self._strangers[link] = stranger
            made += self._hear(stranger)  # a rank has spoken by now, and is not sent away below
            if len(self._strangers) > self._limits.strangers:
                self._dismiss(self._least())
        return made

    def _least(self) -> _Stranger:
        """Return who has to go for another: the oldest that has said nothing, else the oldest."""
        everyone = self._strangers.values()
        return next((each for each in everyone if not each.rank), next(iter(everyone)))

    def _make_room(self) -> None:
        """Give back what strangers hold, and listen again a little later."""
        for stranger in list(self._strangers.values()):
            self._dismiss(stranger)
        self._pause(self._limits.pause_s)

    def _rest(self) -> None:
        """Let nobody in until what was spent is the share of a core that it may be."""
        if self._paused_until is None:
            self._pause(self._spent_s / self._limits.core_share - self._spent_s)
            self._spent_s = 0.0

    def _pause(self, seconds: float) -> None:
        """Listen again later; who connects meanwhile waits in the kernel's queue."""
        self._paused_until = self._clock() + seconds
        for server in self._servers:  # else its selector would never rest
            with contextlib.suppress(KeyError):  # the kernel has refused to watch it
                self._selector.unregister(server)

    def _dismiss(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.link]
        self._selector.unregister(stranger.link)
        stranger.link.reset()

    def _hear(self, stranger: _Stranger) -> list[NewLink]:
        """Take what a stranger says; one that says anything else than it should is sent away."""
        link, messages = stranger.link, stranger.link.receive()
        while messages:
            message = messages.pop(0)
            key = self._keys.get(message.rank)
            if key is not None and message.kind == "hello" and not stranger.rank:
                nonces = message.text[:_MAX_OPENING_LINE], secrets.token_hex(16)
                stranger.rank, stranger.nonces = message.rank, nonces
                answer = f"{nonces[1]} {_digest(key, 'rank 0', *nonces)}"
                link.send(Message("challenge", 0, 0.0, answer))
            elif key is not None and message.kind == "proof" and message.rank == stranger.rank:
                digest, _, text = message.text.partition(" ")
                right = _digest(key, f"rank {message.rank}", *stranger.nonces, text)
                process = _parse_process(text)
                if not _is_equal(digest, right) or process is None:
                    break
                del self._strangers[link]
                self._selector.unregister(link)
                link.trust()
                link.send(Message("welcome", 0, 0.0, _describe(self._own)))
                return [NewLink(message.rank, link, process, messages)]
            else:
                break
        else:
            if not link.is_closed:
                return []
        self._dismiss(stranger)
        return []


# The other ranks.


class Caller:
    """How a rank reaches rank 0: it calls its addresses, one after the other, until one answers.

    Args:
        addresses: rank 0's addresses and ports, one at least.
        rank: this rank.
        key: this rank's key.
        own: where this rank runs.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        rank: int,
        key: bytes,
        own: RankProcess,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = list(addresses)
        self._rank = rank
        self._key = key
        self._own = own
        self._clock = clock
        self._selector = selectors.EpollSelector()
        self._connecting: socket.socket | None = None
        self._link: Link | None = None
        self._nonce = ""
        self._is_known = False  # whether rank 0 has proven itself
        self._until = self._again_at = clock()
        self._answer_s = _CALL_S

    def fileno(self) -> int:
        """For selectors."""
        return self._selector.fileno()

    def due_s(self) -> float:
        """See ``LinkMaker``."""
        is_calling = self._connecting is not None or self._link is not None
        at = self._until if is_calling else self._again_at
        return max(0.0, at - self._clock())

    def poll(self) -> list[NewLink]:
        """See ``LinkMaker``; begins a call where none is under way."""
        now = self._clock()
        try:
            if self._connecting is None and self._link is None:
                if now >= self._again_at:
                    self._begin()
            elif now >= self._until:
                if self._link is not None:
                    self._answer_s = min(2 * self._answer_s, _MOST_ANSWER_S)
                self.hang_up()
            for key, _ in self._selector.select(0):
                if key.fileobj is self._connecting:
                    self._connected()
                elif self._link is not None:
                    return self._hear(self._link)
        except OSError:  # nobody is there, or no descriptor is left: later
            self.hang_up()
        return []

    def hang_up(self) -> None:
        """Give up the call that is under way, if one is."""
        for end in (self._connecting, self._link):
            if end is not None:
                with contextlib.suppress(KeyError):  # the kernel has refused to watch it
                    self._selector.unregister(end)
                end.close()
        self._connecting = self._link = None

    def close(self) -> None:
        """See ``LinkMaker``."""
        self.hang_up()
        self._selector.close()

    def _begin(self) -> None:
        now = self._clock()
        self._until, self._again_at = now + _CALL_S, now + _AGAIN_S
        address = self._addresses.pop(0)
        self._addresses.append(address)
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        self._connecting = connection
        self._selector.register(connection, selectors.EVENT_WRITE)
        code = connection.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, "cannot connect")

    def _connected(self) -> None:
        connection = self._connecting
        assert connection is not None
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, "cannot connect")
        self._selector.unregister(connection)
        self._connecting = None
        self._until = self._clock() + self._answer_s
        self._link = Link(connection, max_line=_MAX_OPENING_LINE)
        self._selector.register(self._link, selectors.EVENT_READ)
        self._nonce, self._is_known = secrets.token_hex(16), False
        self._link.send(Message("hello", self._rank, 0.0, self._nonce))

    def _hear(self, link: Link) -> list[NewLink]:
        messages = link.receive()
        while messages:
            message = messages.pop(0)
            if message.kind == "challenge" and not self._is_known:
                nonce, _, digest = message.text.partition(" ")
                if not _is_equal(digest, _digest(self._key, "rank 0", self._nonce, nonce)):
                    break  # not rank 0, or not of this job
                self._is_known = True
                link.trust()  # its first beat, which may be long, comes right behind its welcome
                text = _describe(self._own)
                proof = _digest(self._key, f"rank {self._rank}", self._nonce, nonce, text)
                link.send(Message("proof", self._rank, 0.0, f"{proof} {text}"))
            elif message.kind == "welcome" and self._is_known:
                if (process := _parse_process(message.text)) is None:
                    break
                self._selector.unregister(link)
                self._link, self._answer_s = None, _CALL_S
                return [NewLink(0, link, process, messages)]
            else:
                break
        else:
            if not link.is_closed:
                return []
        self.hang_up()
        return []


def _as_numbers(addresses: Sequence[str]) -> list[int]:
    return [int(ipaddress.IPv4Address(address)) for address in addresses]


def _as_addresses(numbers: Sequence[int]) -> list[str]:
    return [str(ipaddress.IPv4Address(number)) for number in numbers if 0 < number < 2**32]


# Opening.


@dataclass
class OpenedLinks:
    """What a rank has after the opening; ranks that could not be reached are missing."""

    maker: LinkMaker | None = None  # None: rank 0 listens nowhere
    made: dict[int, NewLink] = field(default_factory=dict)  # by rank
    ranks_at: dict[str, int] = field(default_factory=dict)  # a rank at each host's address

    def close(self) -> None:
        """Close everything."""
        for each in self.made.values():
            each.link.close()
        if self.maker is not None:
            self.maker.close()


def open_links(channel: Channel) -> OpenedLinks:
    """Connect every rank to rank 0; every rank calls it alike.

    The channel tells where ranks run and carries addresses and keys; its limit holds for that and
    for connecting.
    """
    links = OpenedLinks()
    try:
        _open(links, channel)
    except BaseException:
        links.close()
        raise
    return links


def _open(links: OpenedLinks, channel: Channel) -> None:
    """Fill the links of a rank, which are closed by the caller if that fails."""
    own = own_process()
    addresses = own_addresses()[:_MAX_ADDRESSES]
    row = torch.zeros(1 + _MAX_ADDRESSES, dtype=torch.int64)
    row[: 1 + len(addresses)] = torch.tensor([own.host_key, *_as_numbers(addresses)])
    rows: list[list[int]] = channel.sub("hosts").allgather_rows(row).tolist()
    for rank, (_, *numbers) in enumerate(rows):
        for address in _as_addresses(numbers):
            links.ranks_at.setdefault(address, rank)
    is_one_host = len({host_key for host_key, *_ in rows}) == 1
    # What rank 0 has for each rank: [(address, port).., the rank's key], for its eyes only.
    sent = torch.zeros(channel.world_size, 2 * _MAX_ADDRESSES + _SECRET_BYTES, dtype=torch.int64)
    received = torch.zeros_like(sent)
    until = time.monotonic() + channel.timeout_s
    if channel.rank == 0:
        secret = secrets.token_bytes(_SECRET_BYTES)
        keys = {rank: _key_of(secret, rank) for rank in range(1, channel.world_size)}
        name = config().interface
        listening = listening_addresses(
            addresses,
            _as_addresses(
                [number for key, *each in rows if key != own.host_key for number in each]
            ),
            is_one_host=is_one_host,
            of_interface=own_addresses(name) if name else (),
        )
        try:
            links.maker = listener = Listener(keys, own, listening[:_MAX_ADDRESSES])
        except OSError as error:  # the others are told no address, and all go on without
            _logger.warning("rank 0 cannot listen on %s: %s", listening, error)
            to_call = []
        else:
            to_call = listener.addresses
        for index, (address, port) in enumerate(to_call):
            sent[:, 2 * index : 2 * index + 2] = torch.tensor([*_as_numbers([address]), port])
        for rank, key in keys.items():
            sent[rank, 2 * _MAX_ADDRESSES :] = torch.tensor(list(key))
    # An all-to-all, in which every rank receives its own key only.
    keyed = channel.sub("keys")
    work = keyed.transport.alltoall(sent.view(-1), received.view(-1), name=keyed.name)
    keyed.wait(work, what="the heartbeat's keys")
    if channel.rank != 0:
        mine: list[int] = received[0].tolist()
        ports = mine[1 : 2 * _MAX_ADDRESSES : 2]  # as long as addresses, behind which are zeros
        to_call = list(zip(_as_addresses(mine[: 2 * _MAX_ADDRESSES : 2]), ports, strict=False))
        if to_call:  # with nowhere to call a caller would be due at once, for ever
            links.maker = Caller(to_call, channel.rank, bytes(mine[2 * _MAX_ADDRESSES :]), own)
    if links.maker is not None:
        _wait_for_links(
            links, links.maker, channel.world_size - 1 if channel.rank == 0 else 1, until
        )
    if isinstance(links.maker, Listener):
        links.maker.is_opening = False


def _wait_for_links(links: OpenedLinks, maker: LinkMaker, num_links: int, until: float) -> None:
    """Wait until there are so many links, or until the time is over."""
    with selectors.DefaultSelector() as selector:
        selector.register(maker, selectors.EVENT_READ)
        while len(links.made) < num_links and (left_s := until - time.monotonic()) > 0:
            selector.select(min(left_s, maker.due_s()))
            for new in maker.poll():
                if (old := links.made.get(new.rank)) is not None:
                    old.link.close()  # it did not hear its welcome in time
                links.made[new.rank] = new
