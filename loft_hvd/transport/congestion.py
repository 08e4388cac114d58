"""Which congestion control the connections between ranks have: by how long and lossy each is.

Cubic, which most kernels take, halves what it sends for each lost packet, and needs many round
trips to come back: with 50 ms and 1 % loss an all-reduce of 6 MB takes ten times what BBR needs. On
short links BBR gains nothing, and where many send to one through shallow queues it loses. So each
rank looks at its own connections as its kernel knows them (``TCP_INFO``), and takes BBR for those
that need it. The sender alone decides; the other end is not asked.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import Channel
from loft_hvd.transport.tcp import (
    HostLink,
    TcpState,
    control_of,
    host_links,
    set_control,
    tcp_state,
)

__all__ = ["CongestionControl", "has_bbr", "links_between"]

_logger = logging.getLogger(__name__)
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_BBR = b"bbr"
_LOOK_S = 5.0  # a choice: between two looks at the connections, which take 10 us each
# From which round trip on a link is long, and from which it counts as lossy at which share of
# packets sent again. Measured (all-reduces of 6 MB at 100 Mb/s): BBR takes 1.1 times cubic's time
# at 1 ms without loss, 0.9 with 1 %, 0.3 at 10 ms with 1 %; 1.4 at 1 ms where queues of 8 kB
# overflow. What lies between are choices.
_LONG_S, _LOSSY_S, _LOSSY_SHARE = 5e-3, 2e-3, 0.005
# Connections that a process tells the others of: Horovod's and ours were 5 to each of 3 ranks.
_MOST_A_RANK, _MOST_OTHERS = 8, 64
_FEWEST_TRIPS = 20  # packets, of which the quickest says how long a link is: the first may be slow
_FEWEST_SENT = 1000  # packets, before their losses say something


@dataclass(frozen=True)
class LinkQuality:
    """How long a connection is, and how lossy."""

    round_trip_s: float  # the least that was seen
    num_sent: int
    num_sent_again: int

    @property
    def needs_bbr(self) -> bool:
        """Whether it is long, or loses packets on a way that is not short."""
        lost = self.num_sent_again / max(1, self.num_sent)
        is_lossy = self.num_sent >= _FEWEST_SENT and lost >= _LOSSY_SHARE
        is_long = self.num_sent >= _FEWEST_TRIPS and self.round_trip_s >= _LONG_S
        return is_long or (is_lossy and self.round_trip_s >= _LOSSY_S)

    def __str__(self) -> str:
        lost = self.num_sent_again / max(1, self.num_sent)
        return f"{1e3 * self.round_trip_s:.1f} ms there and back, {lost:.1%} sent again"


def links_between(channel: Channel) -> list[HostLink]:
    """Return this process's connections to processes of other ranks; every rank calls it alike.

    A connection is one of ours if its other end is in another rank's process, which all tell each
    other.
    """
    links = list(host_links())
    room = _MOST_A_RANK * channel.world_size + _MOST_OTHERS
    told = torch.zeros(room, dtype=torch.int64)
    own = [digest(f"{each.local} to {each.peer}") for each in links][:room]
    told[: len(own)] = torch.tensor(own, dtype=torch.int64)
    rows = channel.allgather_rows(told).tolist()
    others = {each for rank, row in enumerate(rows) if rank != channel.rank for each in row}
    return [each for each in links if digest(f"{each.peer} to {each.local}") in others]


def has_bbr() -> bool:
    """Say whether this host's kernel has BBR at hand."""
    with suppress(OSError):
        return _BBR.decode() in _AVAILABLE.read_text(encoding="ascii").split()
    return False


class CongestionControl:
    """The connections between this rank and others, looked at now and then.

    ``wish`` is ``LOFT_HVD_LINKS``: "auto", "bbr" for all of them, or what looks at none.
    """

    def __init__(
        self,
        connections: Sequence[HostLink],
        *,
        rank: int,
        wish: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_linux = sys.platform == "linux"
        self._undecided = list(connections) if is_linux and wish in ("auto", "bbr") else []
        self._rank = rank
        self._takes_all = wish == "bbr"
        self._clock = clock
        self._due = 0.0
        self._looking = threading.Lock()
        self.is_refused = False  # by the kernel, where a connection needs it
        self._taken: list[tuple[HostLink, LinkQuality]] = []  # in this look

    def look(self) -> None:
        """Take BBR where it is due; costs nothing between two looks, and never waits."""
        if not self._undecided or self._clock() < self._due:
            return
        if not self._looking.acquire(blocking=False):
            return
        try:
            self._due = self._clock() + _LOOK_S
            self._taken = []
            left = [each for each in self._undecided if not self._is_decided(each)]
            self._undecided = [] if self.is_refused else left  # the kernel is the same for all
            if self._taken:
                peers = sorted({link.peer_address for link, _ in self._taken})
                longest = max((quality for _, quality in self._taken), key=_round_trip)
                _logger.info(
                    "rank %d: BBR on %d connections to %s (up to %s)",
                    self._rank,
                    len(self._taken),
                    ", ".join(peers),
                    longest,
                )
        finally:
            self._looking.release()

    def _is_decided(self, connection: HostLink) -> bool:
        if self.is_refused:
            return True
        try:
            if not connection.is_there() or control_of(connection.descriptor) == _BBR:
                return True
            quality = _quality_of(tcp_state(connection.descriptor))
            if not (self._takes_all or quality.needs_bbr):
                return False
            try:
                set_control(connection.descriptor, _BBR)
            except OSError as error:
                self._warn(connection, quality, error)
                return True
        except OSError:  # it is closed
            return True
        self._taken.append((connection, quality))
        return True

    def _warn(self, connection: HostLink, quality: LinkQuality, error: OSError) -> None:
        _logger.warning(
            "rank %d: the link to %s (%s) shall have BBR, which is up to ten times as fast on "
            "links that are long or lose packets, and this host's kernel refuses it (%s): "
            "`modprobe tcp_bbr` on the host suffices. LOFT_HVD_LINKS=off does without",
            self._rank,
            connection.peer_address,
            quality,
            error.strerror or error,
        )
        self.is_refused = True


def _round_trip(quality: LinkQuality) -> float:
    return quality.round_trip_s


def _quality_of(state: TcpState) -> LinkQuality:
    return LinkQuality(state.round_trip_s, state.num_sent, state.num_sent_again)
