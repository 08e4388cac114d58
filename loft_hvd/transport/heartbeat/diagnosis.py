"""What a rank concludes about the others from their heartbeats: who is silent, gone or astray.

Pure: no sockets, no threads, the clock is given. ``heartbeat.py`` feeds it and acts on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loft_hvd.errors import LoftError, MismatchError, PeerError
from loft_hvd.transport.heartbeat.progress import Progress, blocked_by, find_stall

__all__ = ["Diagnosis", "HeartbeatSettings", "Limits", "Place", "Verdict"]

_STOPPED = "T"
_GONE = ("X", "Z")
_UNKNOWN = "?"


@dataclass(frozen=True)
class Place:
    """Where a rank's process runs.

    Attributes:
        host_key: equal for processes that can see each other in /proc.
        pid: process id on that host.
        start: when the process started, in the kernel's ticks; tells it from a later one.
        host: the host's name, for messages.
    """

    host_key: int
    pid: int
    start: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Verdict:
    """Why ranks cannot go on.

    Attributes:
        rank: the rank at fault.
        text: what happened to it, naming it.
        is_mismatch: whether ranks disagree, instead of one having failed.
    """

    rank: int
    text: str
    is_mismatch: bool = False

    def error(self) -> LoftError:
        """Return what a waiting rank raises."""
        return MismatchError(self.text) if self.is_mismatch else PeerError(self.text)


@dataclass(frozen=True)
class Limits:
    """After how many seconds what is concluded.

    Attributes:
        suspect_s: silence after which a peer's process is looked at.
        silent_s: silence that ends the job where nobody can look at the process.
        stall_s: how long all ranks wait for different operations before it is a mismatch.
        confirm_s: how long that must stay as it is; more than two beats.
    """

    suspect_s: float = 3.0
    silent_s: float = 10.0
    stall_s: float = 5.0
    confirm_s: float = 2.5


@dataclass(frozen=True)
class HeartbeatSettings:
    """How a heartbeat beats and acts.

    Attributes:
        period_s: seconds between two beats.
        grace_s: seconds until a verdict ends waits, so that an engine's own error, or one that all
            ranks find by themselves, goes before it.
        leave_s: seconds after an error until a process that hangs is left.
        is_elastic: whether Horovod runs elastically.
        limits: after how many seconds what is concluded.
        owns_process: whether uncaught errors are reported and a hanging process is left.
    """

    period_s: float = 1.0
    grace_s: float = 0.5
    leave_s: float = 5.0
    is_elastic: bool = False
    limits: Limits = field(default_factory=Limits)
    owns_process: bool = True


@dataclass
class _Peer:
    place: Place
    heard_at: float
    progress: Progress = field(default_factory=Progress)
    state: str = _UNKNOWN
    has_left: bool = False
    is_warned: bool = False


class Diagnosis:
    """What one rank knows of the peers that it has a link to.

    Args:
        rank: this rank.
        places: where each peer runs, by rank.
        limits: after how many seconds what is concluded.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        rank: int,
        places: Mapping[int, Place],
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._limits = Limits() if limits is None else limits
        self._clock = clock
        self._stalled: dict[int, frozenset[tuple[str, int]]] | None = None
        self._stalled_at = clock()
        self._peers = {peer: _Peer(place, clock()) for peer, place in places.items()}

    # What is heard.

    def heard(self, rank: int, progress: Progress) -> None:
        """Note a heartbeat."""
        peer = self._peers[rank]
        peer.heard_at, peer.progress = self._clock(), progress
        peer.state, peer.is_warned = _UNKNOWN, False

    def left(self, rank: int) -> None:
        """Note that a peer has said good-bye."""
        self._peers[rank].has_left = True

    def closed(self, rank: int) -> Verdict | None:
        """Note the end of a peer's connection; a verdict unless it had said good-bye."""
        peer = self._peers[rank]
        if peer.has_left:
            return None
        peer.has_left = True
        return Verdict(
            rank,
            f"rank {rank} ({peer.place}) has ended without a word: it was killed, it crashed, or "
            "it ran out of memory",
        )

    def saw(self, rank: int, state: str) -> None:
        """Note the state letter of a silent peer's process, as ``/proc`` shows it."""
        self._peers[rank].state = state

    def restarted(self) -> None:
        """Note that this rank itself was out for a while: silence until now means nothing."""
        for peer in self._peers.values():
            peer.heard_at = self._clock()

    # What follows.

    def place(self, rank: int) -> Place:
        """Return where a peer runs."""
        return self._peers[rank].place

    def left_ranks(self) -> list[int]:
        """Return the peers that have ended."""
        return [rank for rank, peer in sorted(self._peers.items()) if peer.has_left]

    def is_silent(self, rank: int) -> bool:
        """Say whether a peer has been silent for long enough to be looked at."""
        peer = self._peers[rank]
        return not peer.has_left and self._clock() - peer.heard_at >= self._limits.suspect_s

    def suspects(self) -> list[int]:
        """Return the silent peers, whose processes should be looked at."""
        return [rank for rank in self._peers if self.is_silent(rank)]

    def judge(self, own: Progress) -> Verdict | None:
        """Return why ranks cannot go on, or None when they can, as far as this rank knows.

        Args:
            own: this rank's progress.
        """
        live = {
            rank: peer.progress
            for rank, peer in self._peers.items()
            if not peer.has_left and not self.is_silent(rank)
        }
        live[self._rank] = own
        waited_s = max(progress.waited_s for progress in live.values())
        for rank in self.suspects():
            if (verdict := self._judge_silent(rank, is_awaited=waited_s > 0)) is not None:
                return verdict
        if (verdict := self._judge_left(live)) is not None:
            return verdict
        sees_all = self._rank == 0 and len(live) == len(self._peers) + 1
        return self._judge_stall(live) if sees_all else None

    def _judge_silent(self, rank: int, *, is_awaited: bool) -> Verdict | None:
        peer = self._peers[rank]
        silent_s = self._clock() - peer.heard_at
        who = f"rank {rank} ({peer.place})"
        if peer.state == _STOPPED:  # awaited or not: others may wait in calls that are not ours
            return Verdict(
                rank,
                f"{who} is frozen: its process is stopped (SIGSTOP) and has been silent for "
                f"{silent_s:.0f} s",
            )
        if peer.state in _GONE:
            return Verdict(rank, f"{who} is gone: its process has ended")
        if peer.state == _UNKNOWN and is_awaited and silent_s >= self._limits.silent_s:
            return Verdict(
                rank,
                f"{who} has been silent for {silent_s:.0f} s: its host or link is down, or it is "
                "frozen; where a script holds the interpreter for that long, raise "
                "LOFT_HVD_HEARTBEAT_TIMEOUT_S",
            )
        return None

    def _judge_left(self, live: Mapping[int, Progress]) -> Verdict | None:
        """Find a rank that has ended before it started what another one waits for."""
        gone = {rank: peer.progress for rank, peer in self._peers.items() if peer.has_left}
        for progress in live.values():
            if progress.waited_s < self._limits.stall_s:
                continue
            for operation in sorted(progress.in_flight):
                for rank in blocked_by(operation, gone):
                    return Verdict(
                        rank,
                        f"rank {rank} ({self._peers[rank].place}) has ended its script while "
                        f"others wait for it in {operation[0]!r}; every rank must take the same "
                        "number of steps",
                    )
        return None

    def _judge_stall(self, live: Mapping[int, Progress]) -> Verdict | None:
        """Find ranks that all wait, for operations that others lack, and have done so for long.

        Rank 0 alone says so, to all: another rank sees rank 0 and itself, so it cannot tell which
        of the two is astray, and its end would take the engine from ranks that still compare.
        """
        waits = find_stall(live, waited_s=self._limits.stall_s)
        signature = {rank: progress.in_flight for rank, progress in live.items()}
        if waits is None or signature != self._stalled:
            self._stalled = None if waits is None else signature
            self._stalled_at = self._clock()
        if waits is None or self._clock() - self._stalled_at < self._limits.confirm_s:
            return None
        names = list(waits.values())
        common = max(names, key=lambda name: (names.count(name), -names.index(name)))
        odd = [rank for rank, name in waits.items() if name != common] or list(waits)[1:]
        rest = [rank for rank in waits if rank not in odd]
        return Verdict(
            odd[0],
            f"ranks take other steps: ranks {odd} wait for {waits[odd[0]]!r} while ranks {rest} "
            f"wait for {common!r}; use optimizers, steps and collectives in the same order on "
            "every rank",
            is_mismatch=True,
        )

    def late_for(self, rank: int, own: Progress) -> list[int]:
        """Return the ranks that have not started what a rank has in flight, and so are awaited.

        Args:
            rank: a peer, or this rank.
            own: this rank's progress.
        """
        every = {peer: known.progress for peer, known in self._peers.items()} | {self._rank: own}
        in_flight = every.pop(rank).in_flight
        return sorted({late for operation in in_flight for late in blocked_by(operation, every)})

    def held(self) -> list[str]:
        """Return a warning for each peer that runs but has been silent for long, once each."""
        warnings = []
        for rank in self.suspects():
            peer = self._peers[rank]
            silent_s = self._clock() - peer.heard_at
            is_held = peer.state not in (_UNKNOWN, _STOPPED, *_GONE)
            if is_held and silent_s >= self._limits.silent_s and not peer.is_warned:
                peer.is_warned = True
                warnings.append(
                    f"rank {rank} ({peer.place}) runs, but has been silent for {silent_s:.0f} s: "
                    "something there holds the Python interpreter"
                )
        return warnings
