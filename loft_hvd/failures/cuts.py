"""Which host does not reach which other: what both ends of a connection show, and what follows.

A kernel sends again what is not acknowledged, after 0.2 s at the least and then after twice as long
each time. If nothing of host A reaches host B any more, A's acknowledgements do not either, so both
ends of a connection send in vain. What arrives tells which way is cut::

                            at A's end                     at B's end
    A has sent something    unanswered                     nothing arrives
    B has sent something    it arrives, again and again    unanswered

``EndWatch`` looks at this process's connections now and then, ranks tell each other what it saw,
and ``find_cuts`` draws the conclusion, which needs both ends, or one at which something arrives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from loft_hvd.transport.tcp import HostLink, TcpState, host_links, probe, tcp_state

__all__ = ["ConnectionEnd", "Cut", "EndWatch", "decode_ends", "encode_ends", "find_cuts"]

_MOST_ENDS = 90  # a choice: of up to 130 characters each, which a message has room for
# In a row and in vain: of a link that loses a tenth of its packets one in ten thousand. A choice.
_FEWEST_TRIES = 4
# What a look sees may have happened so long before it: bound from beats, between two of them. And
# so far apart may be the ways of two ranks' words, by which their clocks are compared: a choice.
_BEFORE_S, _APART_S = 1.0, 0.5


@dataclass(frozen=True)
class ConnectionEnd:
    """What is seen at one end of a connection; times by the clock of who holds this."""

    local: str  # address and port of this end: "10.0.0.1 40000"
    peer: str  # and of the other
    first_at: float  # the first look
    last_at: float  # and the last
    # Since which look data wait for an acknowledgement, though they were sent again, and none has
    # come for any; infinite where none wait.
    unanswered_at: float = math.inf
    tries: int = 0  # how often they were sent again
    tried_at: float = -math.inf  # the last look that saw it done since the one before
    arrived_at: float = -math.inf  # the last look that saw something arrive, if only again

    @property
    def peer_address(self) -> str:
        """The other host's address."""
        return self.peer.split()[0]

    @property
    def unanswered_s(self) -> float:
        """For how many seconds data have been sent in vain; 0 where they were not."""
        return max(0.0, self.last_at - self.unanswered_at)

    def hears_since(self, at: float) -> bool:
        """Say whether something has arrived since a time by the clock of another end's rank."""
        return self.arrived_at - _BEFORE_S > at + _APART_S

    def has_watched(self, other: ConnectionEnd) -> bool:
        """Say whether it was looked at while the other end sent something again."""
        is_before_last = other.tried_at + _APART_S < self.last_at
        return self.first_at + _APART_S < other.tried_at - _BEFORE_S and is_before_last


def encode_ends(ends: Iterable[ConnectionEnd], now: float) -> str:
    """Return ends as text, those that send in vain for the longest first."""
    first = sorted(ends, key=lambda end: end.unanswered_s, reverse=True)[:_MOST_ENDS]
    texts = []
    for end in first:
        times = end.first_at, end.last_at, end.unanswered_at, end.tried_at, end.arrived_at
        ago = ",".join(f"{now - at:.2f}" for at in times)  # by no clock
        texts.append(f"{end.local},{end.peer},{end.tries},{ago}")
    return "|".join(texts)


def decode_ends(text: str, now: float) -> list[ConnectionEnd]:
    """Return the ends that a text tells, but those that do not parse."""
    ends = []
    for item in text.split("|")[:_MOST_ENDS]:
        parts = item.split(",")
        with suppress(ValueError):
            local, peer, tries, *ago = parts
            first, last, unanswered, tried, arrived = (now - float(each) for each in ago)
            if local and peer and math.isfinite(last):
                end = ConnectionEnd(
                    local, peer, first, last, unanswered, int(tries), tried, arrived
                )
                ends.append(end)
    return ends


class EndWatch:
    """Looks at this process's connections to other hosts; costs nothing between two looks."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        links: Callable[[], Iterable[HostLink]] = host_links,
        state_of: Callable[[int], TcpState] = tcp_state,
        probe: Callable[..., bool] = probe,
    ) -> None:
        self._clock = clock
        self._links, self._state_of, self._probe = links, state_of, probe
        self._seen: dict[HostLink, tuple[TcpState, ConnectionEnd]] = {}
        self._probed: set[HostLink] = set()

    def look(self, asked: Collection[str] = ()) -> list[ConnectionEnd]:
        """Return the ends that send in vain, and those of connections to some addresses.

        Where nothing is under way to those addresses their hosts are asked whether they are there:
        by their kernels, so that processes need not answer.
        """
        seen, told = {}, []
        for link in self._links():
            with suppress(OSError):  # closed meanwhile
                state, end = self._look_at(link)
                seen[link] = state, end
                is_asked = link.peer_address in asked
                if is_asked and self._probe(link.descriptor, is_on=True):
                    self._probed.add(link)
                elif not is_asked and link in self._probed:
                    self._probe(link.descriptor, is_on=False)
                    self._probed.discard(link)
                if is_asked or end.tries:
                    told.append(end)
        self._seen = seen
        self._probed &= seen.keys()
        return told

    def forget(self) -> None:
        """Let what was seen be of the past: the next look is a first one."""
        if self._probed:
            self.look()
        self._seen.clear()

    def _look_at(self, link: HostLink) -> tuple[TcpState, ConnectionEnd]:
        now, state = self._clock(), self._state_of(link.descriptor)
        fresh = ConnectionEnd(link.local, link.peer, now, now)
        tries = state.tries if state.is_established and state.is_waiting else 0
        before, end = self._seen.get(link, (state, replace(fresh, tries=tries)))
        if state.num_arrived != before.num_arrived:
            end = replace(end, arrived_at=now)
        if not tries or state.num_acked != before.num_acked:
            end = replace(end, unanswered_at=math.inf)
        elif end.unanswered_at == math.inf:
            end = replace(end, unanswered_at=now)
        if tries > end.tries:
            end = replace(end, tried_at=now)
        return state, replace(end, last_at=now, tries=tries)


@dataclass(frozen=True)
class Cut:
    """That nothing of one rank's host reaches another's, by ranks."""

    sender: int
    receiver: int


def find_cuts(
    told: Mapping[int, Sequence[ConnectionEnd]],
    *,
    ranks_at: Mapping[str, int],
    silent: Collection[int],
    least_s: float,
) -> list[Cut]:
    """Return the cuts that follow from what ranks see at their ends of connections.

    Args:
        told: what each rank has seen, by rank; all by one clock.
        ranks_at: a rank at each address.
        silent: the ranks that are not heard, of which nothing can have been told.
        least_s: for how long data must have been sent in vain.
    """
    ends = {(end.local, end.peer): (rank, end) for rank, each in told.items() for end in each}
    cuts = set()
    for rank, end in ends.values():
        if end.unanswered_s < least_s or end.tries < _FEWEST_TRIES:
            continue
        since = end.unanswered_at
        other, far = ends.get((end.peer, end.local), (ranks_at.get(end.peer_address), None))
        if other is None or other == rank:
            continue
        if end.hears_since(since):  # and yet no acknowledgement comes: so nothing arrives there
            cuts.add(Cut(rank, other))
        elif far is not None:
            if far.hears_since(since):  # it is acknowledged, as by every kernel
                cuts.add(Cut(other, rank))
            elif far.has_watched(end):
                cuts.add(Cut(rank, other))
        # Of a rank that nobody hears: its host is up if others hear that, and has sent as much.
        elif other in silent and any(
            each.hears_since(since)
            for third, each in ends.values()
            if third != rank and each.peer_address == end.peer_address
        ):
            cuts.add(Cut(other, rank))
    return sorted(cuts, key=lambda cut: (cut.sender, cut.receiver))
