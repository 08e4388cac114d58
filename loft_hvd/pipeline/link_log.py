"""What links lose, in the run log: every half a minute a line on those of rank 0.

Rank 0 writes the log, and knows what it has sent to each other rank and what came from it as the
owner of a shard. Links between two other ranks are not in it: that would take a collective. Where
one of those has no deadline its owner warns (``transport/datagram.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from loft_hvd.runlog import MOST_ROWS, RunLog
from loft_hvd.transport.base import Transport
from loft_hvd.transport.datagram import LinkLosses, LossTolerant
from loft_hvd.transport.lanes import datagram_ports

__all__ = ["LinkLog"]

_FIRST_S, _EVERY_S = 5.0, 30.0  # choices: soon enough to be seen, and as often as times are


class LinkLog:
    """The links of one world's loss-tolerant gather; rank 0 writes of them.

    Args:
        transport: the ranks.
        gather: how rows travel.
        log: the run log.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        transport: Transport,
        gather: LossTolerant,
        log: RunLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._gather = gather
        self._log = log
        self._clock = clock
        self._before: dict[int, LinkLosses] = {}  # by peer
        self._since, self._began_at = log.step, clock()
        self._due = self._began_at + _FIRST_S

    def step_ended(self) -> None:
        """Write a line if it is time to; costs a look at the clock in between."""
        if self._log.path is None or (now := self._clock()) < self._due:
            return
        self._due = now + _EVERY_S
        ports = datagram_ports(self._transport.can.world, self._gather)
        if not ports:
            return
        links = ports[0].links()
        news = [
            link.since(self._before[link.peer]) if link.peer in self._before else link
            for link in links
        ]
        # Of many those that lose most, in the order of ranks.
        most = sorted(news, key=lambda each: (not each.waits, -_loss(each), each.peer))
        shown = sorted(most[:MOST_ROWS], key=lambda each: each.peer)
        self._log.write(
            "links",
            since=self._since,
            seconds=now - self._began_at,
            rank=self._transport.rank,
            num_links=len(news),
            links=[asdict(each) for each in shown],
        )
        self._before = {link.peer: link for link in links}
        self._since, self._began_at = self._log.step, now


def _loss(link: LinkLosses) -> float:
    return max(link.lost_share, link.filled_share)
