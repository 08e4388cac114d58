"""What keeps a silent rank silent: a look at its process, by this rank or one of that host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from loft_hvd.transport.heartbeat.diagnosis import Diagnosis, Place
from loft_hvd.transport.heartbeat.links import Line, Link, process_state

__all__ = ["SilentRanks"]

_logger = logging.getLogger(__name__)
_FROZEN = "T"


class SilentRanks:
    """Looks at processes of ranks that are not heard; used by the heartbeat's thread alone.

    Args:
        diagnosis: knows who is silent, and learns what was seen.
        links: to all other ranks on rank 0, to rank 0 elsewhere.
        places: where those ranks run.
        own_place: where this rank runs.
        kill: ends a process of this host.
        dooms: says whether a rank is to be ended if it is frozen.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        links: Mapping[int, Link],
        places: Mapping[int, Place],
        own_place: Place,
        *,
        kill: Callable[[int], None],
        dooms: Callable[[int], bool],
    ) -> None:
        self._diagnosis = diagnosis
        self._links = links
        self._places = dict(places)
        self._place = own_place
        self._kill = kill
        self._dooms = dooms

    def look(self) -> None:
        """Look at the processes of silent ranks, or ask a rank of their host to."""
        for rank in self._diagnosis.suspects():
            place = self._places[rank]
            if place.host_key == self._place.host_key:
                self.saw(rank, process_state(place.pid, place.start))
                continue
            for other, link in self._links.items():
                is_near = self._places[other].host_key == place.host_key
                if is_near and not self._diagnosis.is_silent(other):
                    kill = int(self._dooms(rank))
                    link.send(Line("look", rank, 0.0, f"{place.pid}|{place.start}|{kill}"))
                    break
        for warning in self._diagnosis.held():
            _logger.warning("%s", warning)

    def look_for_rank_0(self, rank: int, pid: int, start: int, kill: int) -> None:
        """Look at a process of this host and tell rank 0; end it if rank 0 says so.

        Args:
            rank: whose process it is.
            pid: its process id.
            start: when it started, in the kernel's ticks.
            kill: 1 to end it if it is frozen, else 0.
        """
        state = process_state(pid, start)
        self._links[0].send(Line("state", rank, 0.0, state))
        if kill and state == _FROZEN:
            self._kill(pid)

    def saw(self, rank: int, state: str) -> None:
        """Take the state of a rank's process, and end it here if it is frozen and doomed."""
        if self._diagnosis.is_silent(rank):
            self._diagnosis.saw(rank, state)
            place = self._places[rank]
            is_near = place.host_key == self._place.host_key
            if state == _FROZEN and is_near and self._dooms(rank):
                self._kill(place.pid)
