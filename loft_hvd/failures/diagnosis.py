"""What a rank concludes about the others from their heartbeats: who is silent, gone or astray.

A rank gives three signs of life: its beats; the pulse, which a thread of its process sends whoever
holds the interpreter; and operations over all ranks that end, which no rank can be missing from.
Nobody is judged by the loss of one sign alone: a link may be lost while the job goes on.

Pure: no sockets, no threads, the clock is given. ``observer.py`` feeds it, ``actions.py`` acts on
what it finds.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loft_hvd.errors import LoftError, MismatchError, PeerError
from loft_hvd.failures.cuts import ConnectionEnd, find_cuts
from loft_hvd.failures.process import (
    ENDED,
    FROZEN,
    STILL_ENDS_S,
    UNKNOWN,
    RankProcess,
)
from loft_hvd.failures.progress import (
    Progress,
    blocked_by,
    find_stall,
    keys_awaited,
    signature_of,
)

__all__ = ["Diagnosis", "DiagnosisLimits", "Verdict"]

_TOGETHER_S = 0.25  # between the ends of ranks that die at one moment; a choice
_MOST_WAYS, _MOST_ASKED = 4, 16  # choices: what an error shows; addresses asked about
_SAME_STEPS = "every rank must take the same number of steps"
_BY_ERROR = "an error of the engine, or of a wait, has ended it"


@dataclass(frozen=True)
class Verdict:
    """Why ranks cannot go on."""

    rank: int  # the rank at fault
    text: str  # what happened to it, naming it
    is_mismatch: bool = False  # whether ranks disagree, instead of one having failed
    is_unseen: bool = False  # whether nobody could look at its process: its host may be gone
    is_held: bool = False  # whether its process runs, and its interpreter does not
    is_cut: bool = False  # whether nothing of its host reaches another's: all ranks live

    def error(self) -> LoftError:
        """Return what a waiting rank raises."""
        return MismatchError(self.text) if self.is_mismatch else PeerError(self.text)


@dataclass(frozen=True)
class DiagnosisLimits:
    """After how many seconds what is concluded."""

    # Silence after which a peer's process is looked at. Bound from the beats: three are missing.
    suspect_s: float = 3.0
    # Silence that ends the job where nobody can look at the process. A choice, of the user's.
    silent_s: float = 10.0
    # The same where the engine has failed. A choice: a rank that is killed fails it in less.
    failed_s: float = 5.0
    # Without a beat of a rank that runs, while others wait: the longest wait. The user's choice.
    held_s: float = 300.0
    # How long all ranks wait for different operations before it is a mismatch. A choice.
    stall_s: float = 5.0
    # How long that must stay as it is. Bound from the beats: more than two, so all have told it.
    confirm_s: float = 2.5

    @property
    def cut_s(self) -> float:
        """For how long a kernel sends in vain until the way is cut, as far as it was seen.

        Half of ``silent_s``, a choice: ranks are heard, and both ends say so.
        """
        return self.silent_s / 2


@dataclass
class _Peer:
    process: RankProcess
    heard_at: float  # its last beat
    alive_at: float  # its last beat or pulse
    progress: Progress = field(default_factory=Progress)
    state: str = UNKNOWN  # as seen since it was heard last
    lost_at: float | None = None  # since when there is no connection to it
    has_left: bool = False  # has said good-bye or failed
    was_ended: bool = False  # has said good-bye as an error had ended it
    told_at: float | None = None  # when it said that it is told to end
    is_warned: bool = False  # that something there holds the interpreter, or of the lost link


class Diagnosis:
    """What one rank knows of the peers that it has a link to.

    Args:
        rank: this rank.
        processes: where peers run, by rank: all others on rank 0, rank 0 elsewhere.
        world_size: number of ranks; by default those peers and this one.
        limits: when what is concluded.
        own: where this rank runs; None where that is not known.
        hint: what the launcher does when a host is gone, for the verdict of that.
        ranks_at: a rank at each address of the hosts.
    """

    def __init__(
        self,
        rank: int,
        processes: Mapping[int, RankProcess],
        *,
        world_size: int | None = None,
        limits: DiagnosisLimits | None = None,
        own: RankProcess | None = None,
        hint: str = "",
        ranks_at: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._hint, self._own = hint, own
        self._ranks_at = dict(ranks_at or {})
        # What ranks have told of their ends of connections, this one's too, and when.
        self._told_ends: dict[int, tuple[float, list[ConnectionEnd]]] = {}
        self.limits = DiagnosisLimits() if limits is None else limits
        self._clock = clock
        self._sees_all = world_size in (None, len(processes) + 1)
        self._stalled: dict[int, frozenset[tuple[str, int]]] | None = None
        self._stalled_at = clock()
        self._moved_at = -math.inf  # when an operation over all ranks has ended
        self._alive_since = -math.inf  # when the latest of those had begun
        self._has_engine_failed = False
        self._told_at: float | None = None  # when this rank was told to end
        self._last_stuck_s = 0.0  # how long this rank had waited when it last looked
        self._peers = {
            peer: _Peer(process, clock(), clock()) for peer, process in processes.items()
        }

    # What is heard.

    def heard(self, rank: int, progress: Progress) -> None:
        """Note a heartbeat."""
        self.pulsed(rank)
        peer = self._peers[rank]
        peer.heard_at, peer.progress = self._clock(), progress
        peer.state, peer.is_warned = UNKNOWN, False
        if peer.told_at is not None and peer.heard_at - peer.told_at > STILL_ENDS_S:
            peer.told_at = None  # its script has prevented its end

    def pulsed(self, rank: int) -> None:
        """Note that a peer's process runs."""
        self._peers[rank].alive_at = self._clock()

    def is_missed(self, rank: int) -> bool:
        """Say whether a warning has said that a peer is not heard."""
        return self._peers[rank].is_warned

    def moved(self, seconds_ago: float, began_s_ago: float | None = None) -> None:
        """Note when an operation over all ranks has ended here, and when it had begun.

        Each of them has lived since it began. It may have ended long before this rank took it up.
        """
        now = self._clock()
        self._moved_at = max(self._moved_at, now - seconds_ago)
        began_s_ago = seconds_ago if began_s_ago is None else began_s_ago
        self._alive_since = max(self._alive_since, now - began_s_ago)

    def left(self, rank: int, *, by_error: bool = False) -> None:
        """Note that a peer has said good-bye; ``by_error`` if the engine's or a wait's ended it."""
        self._peers[rank].has_left, self._peers[rank].was_ended = True, by_error

    def lost(self, rank: int) -> None:
        """Note the end of a peer's connection."""
        peer = self._peers[rank]
        if peer.lost_at is None:
            peer.lost_at = self._clock()

    def found(self, rank: int) -> None:
        """Note a new connection to a peer."""
        self._peers[rank].lost_at, self._peers[rank].state = None, UNKNOWN
        self.pulsed(rank)

    def engine_failed(self) -> None:
        """Note that the engine has given up operations, here or on a peer; from any thread."""
        self._has_engine_failed = True

    def told(self, rank: int | None = None) -> None:
        """Note that a peer is told to end by SIGTERM, and will in a moment; None: this rank."""
        if rank is None:
            self._told_at = self._clock()
        elif self._peers[rank].told_at is None:
            self._peers[rank].told_at = self._clock()

    def is_over(self) -> bool:
        """Say whether ranks are told to end, so that one may have ended before."""
        told = (peer.told_at for peer in self._peers.values() if not peer.has_left)
        return self._is_ending() or any(at is not None for at in told)

    def _is_ending(self) -> bool:
        """Say whether this rank is told to end, and has not prevented it."""
        return self._told_at is not None and self._clock() - self._told_at <= STILL_ENDS_S

    def saw(self, rank: int, state: str) -> None:
        """Note the state letter of a peer's process, as ``/proc`` shows it."""
        if state != UNKNOWN:
            self._peers[rank].state = state

    def told_ends(self, rank: int, ends: Sequence[ConnectionEnd]) -> None:
        """Note what a rank, perhaps this one, has seen at its ends of connections, by our clock."""
        self._told_ends[rank] = self._clock(), list(ends)

    def restarted(self) -> None:
        """Note that this rank itself was out for a while: silence until now means nothing."""
        for peer in self._peers.values():
            peer.heard_at = peer.alive_at = self._clock()

    # What follows.

    def process(self, rank: int) -> RankProcess:
        """Return where a peer runs."""
        return self._peers[rank].process

    def left_ranks(self) -> list[int]:
        """Return the peers that have ended."""
        return [rank for rank, peer in sorted(self._peers.items()) if peer.has_left]

    def is_silent(self, rank: int) -> bool:
        """Say whether a peer gives no sign of life, so that its process should be looked at."""
        peer = self._peers[rank]
        if peer.has_left:
            return False
        if peer.state in ENDED or (peer.lost_at is not None and peer.lost_at > self._alive_since):
            return True
        return self._clock() - max(peer.alive_at, self._moved_at) >= self.limits.suspect_s

    def is_held(self, rank: int) -> bool:
        """Say whether a peer's process runs, but nothing of Python's has run there for too long."""
        peer = self._peers[rank]
        if peer.has_left or self._clock() - peer.heard_at < self.limits.held_s:
            return False
        is_pulsing = self._clock() - peer.alive_at < self.limits.suspect_s
        return is_pulsing or peer.state not in (UNKNOWN, FROZEN, *ENDED)

    def misses_link(self, rank: int) -> bool:
        """Say whether the link to a peer is lost, or so silent that it may be."""
        peer = self._peers[rank]
        quiet_s = self._clock() - peer.alive_at
        return not peer.has_left and (peer.lost_at is not None or quiet_s >= self.limits.suspect_s)

    def suspects(self) -> list[int]:
        """Return the silent peers, whose processes should be looked at."""
        return [rank for rank in self._peers if self.is_silent(rank)]

    def judge(self, own: Progress) -> Verdict | None:
        """Return why ranks cannot go on, or None when they can, as far as this rank knows."""
        self.moved(own.moved_s, own.began_s)
        if not self._has_engine_failed:
            self._last_stuck_s = own.stuck_s
        # Of a rank that is not heard the last progress is old; it is judged by its process instead.
        fresh_at = self._clock() - self.limits.suspect_s
        live = {
            rank: peer.progress
            for rank, peer in self._peers.items()
            if not peer.has_left and peer.lost_at is None and peer.heard_at > fresh_at
        }
        live[self.rank] = own
        suspects = sorted(self.suspects(), key=self._whose_silence_began, reverse=True)
        newest_at = max((self._peers[rank].alive_at for rank in suspects), default=0.0)
        # Who ended first: a launcher ends the rest, by SIGTERM. But not a link that was lost long
        # before.
        is_open = False  # whether a link ended of which nothing more is known yet
        for rank in sorted(suspects, key=functools.partial(self._whose_link_ended, newest_at)):
            peer = self._peers[rank]
            if is_open and peer.told_at is not None:
                continue  # perhaps for that end
            if (verdict := self._judge_seen(rank)) is not None:
                return self._with_the_rest(verdict)
            is_unclear = peer.lost_at is not None and peer.state == UNKNOWN
            is_open = is_open or (is_unclear and peer.told_at is None)
        if (verdict := self._judge_cut(live)) is not None:
            return verdict
        for rank in suspects:
            if (verdict := self._judge_unseen(rank, live)) is not None:
                return verdict
        for rank in sorted(self._peers):
            if (verdict := self._judge_held(rank, live)) is not None:
                return verdict
        if (verdict := self._judge_left(live)) is not None:
            return verdict
        sees_all = self.rank == 0 and len(live) == len(self._peers) + 1
        return self._judge_stall(live) if sees_all else None

    def _whose_silence_began(self, rank: int) -> tuple[float, int]:
        """Order ranks by when they were heard last: who stopped a job fell silent as it stopped."""
        return self._peers[rank].alive_at, -rank

    def _whose_link_ended(self, newest_at: float, rank: int) -> tuple[bool, bool, float, bool]:
        """Order ranks by when their links ended.

        Those that fell silent long before others are last. Before them are those that were told to
        end, where this rank read of that and of the end at one moment: others may have been first.
        """
        peer = self._peers[rank]
        is_old = newest_at - peer.alive_at >= self.limits.suspect_s
        lost_at = math.inf if peer.lost_at is None else peer.lost_at
        is_late = peer.told_at is not None and lost_at - peer.told_at < _TOGETHER_S
        return is_old, is_late, lost_at, peer.told_at is None

    def _judge_seen(self, rank: int) -> Verdict | None:
        """Judge a silent rank by what is known of its process."""
        peer = self._peers[rank]
        who = f"rank {rank} ({peer.process})"
        if peer.state == FROZEN:  # awaited or not: others may wait in calls that are not ours
            silent_s = self._clock() - peer.alive_at
            return Verdict(
                rank,
                f"{who} is frozen: its process is stopped (SIGSTOP) and has been silent for "
                f"{silent_s:.0f} s",
            )
        has_lost_it = peer.lost_at is not None and peer.lost_at > self._alive_since
        # Its link and the engine, each by itself: a link alone may have been reset on its way.
        has_ended = peer.state in ENDED or (has_lost_it and self._has_engine_failed)
        if not has_ended or self._is_told_with(peer):
            return None
        if peer.told_at is not None:
            return Verdict(
                rank,
                f"{who} has ended: it was told to by SIGTERM, which launchers, schedulers and "
                "users send",
            )
        return Verdict(
            rank,
            f"{who} has ended without a word: it was killed, it crashed, or it ran out of memory",
        )

    def _is_told_with(self, peer: _Peer) -> bool:
        """Say whether a peer ends as this rank does, by a launcher that tells all.

        Who is at fault is told long before, as it ends before others are told. Of who has not said
        that it is told, as nothing of Python's may run there, the end tells: it comes late.
        """
        if self._told_at is None or not self._is_ending():
            return False
        if peer.told_at is not None:
            return self._told_at - peer.told_at < _TOGETHER_S
        ended_at = self._clock() if peer.lost_at is None else peer.lost_at
        return ended_at - self._told_at >= _TOGETHER_S

    def _with_the_rest(self, verdict: Verdict) -> Verdict:
        """Name also the ranks that have died at the same moment, as a host without memory kills.

        Their links may end a little later. The verdict does not wait for that: a launcher ends the
        other ranks within tenths of a second, this one too.
        """
        first = self._peers[verdict.rank]
        texts = [verdict.text]
        for rank, peer in self._peers.items():
            is_alike = (peer.told_at is None) == (first.told_at is None)
            if rank == verdict.rank or first.lost_at is None or peer.has_left or not is_alike:
                continue
            # Who ends later may have been ended by the first one's death, as by a launcher.
            lost_at = self._clock() if peer.lost_at is None else peer.lost_at
            is_together = abs(lost_at - first.lost_at) <= _TOGETHER_S
            if is_together and peer.state in ENDED and (other := self._judge_seen(rank)):
                texts.append(other.text)
        return replace(verdict, text="; ".join(texts))

    def _stalled_s(self, live: Mapping[int, Progress]) -> float:
        """Return for how long ranks have waited while no operation over all of them has ended."""
        waited_s = max(progress.stuck_s for progress in live.values())
        if self._has_engine_failed:  # that has ended this rank's own wait
            waited_s = max(waited_s, self._last_stuck_s)
        return min(waited_s, self._clock() - self._moved_at)

    def _judge_held(self, rank: int, live: Mapping[int, Progress]) -> Verdict | None:
        """Judge a rank that lives and does not beat, once others have waited as long as they may.

        Waits in operations of ours end by themselves then. Those in the engine's own have no limit.
        """
        if not self.is_held(rank) or self._stalled_s(live) < self.limits.held_s:
            return None
        peer = self._peers[rank]
        unheard_s = self._clock() - peer.heard_at
        return Verdict(
            rank,
            f"rank {rank} ({peer.process}) runs, but its Python interpreter has not for "
            f"{unheard_s:.0f} s, while others wait: a call of a library holds the interpreter's "
            "lock, or waits with it for what does not come (py-spy dump shows which); where it may "
            "take that long, raise LOFT_HVD_TIMEOUT_S",
            is_held=True,
        )

    def _judge_unseen(self, rank: int, live: Mapping[int, Progress]) -> Verdict | None:
        """Judge a silent rank whose process nobody can look at, while others wait in vain."""
        peer = self._peers[rank]
        stalled_s = self._stalled_s(live)
        silent_s = self._clock() - peer.alive_at
        # The engine may be less patient: it fails, for want of an answer, while the rank is silent.
        least_s = self.limits.failed_s if self._has_engine_failed else self.limits.silent_s
        if peer.state != UNKNOWN or min(silent_s, stalled_s) < min(least_s, self.limits.silent_s):
            return None
        # That it is silent says nothing then. What is left is that every other rank has come to
        # what they all wait for.
        if self._was_lost(peer) and not self._is_only_missing(live):
            return None
        if (away := self._cut_off_from()) > 1:  # not of one only: that may be the one at fault
            return Verdict(
                self.rank,
                f"rank {self.rank} ({self._own}) is cut off: none of the other {away} hosts has "
                f"been heard for {silent_s:.0f} s; the link of its host is down, or theirs all are"
                f"{self._hint}",
                is_unseen=True,
            )
        mine = ", or that of this host is" if self.rank else ""  # which hears of rank 0 only
        ended = "" if peer.lost_at is None else "its connection has ended, and it "
        return Verdict(
            rank,
            f"rank {rank} ({peer.process}) has been silent for {silent_s:.0f} s: {ended}"
            f"its host or link is down{mine}, or it is "
            "frozen; where a script holds the interpreter for that long, raise "
            f"LOFT_HVD_HEARTBEAT_TIMEOUT_S{self._hint}",
            is_unseen=True,
        )

    def _judge_cut(self, live: Mapping[int, Progress]) -> Verdict | None:
        """Find hosts that do not reach others, while ranks wait in vain."""
        if self._stalled_s(live) < self.limits.cut_s:
            return None
        lost = {rank for rank, peer in self._peers.items() if self._was_lost(peer)}
        known = {self.rank, *self._peers} - lost  # of others there are the heartbeat's ends only
        cuts = [
            cut
            for cut in find_cuts(
                self._fresh_ends(),
                ranks_at=self._ranks_at,
                silent=self.suspects(),
                least_s=self.limits.cut_s,
            )
            if {cut.sender, cut.receiver} <= known
        ]
        if not cuts:
            return None
        ways = list(dict.fromkeys((self._host(c.sender), self._host(c.receiver)) for c in cuts))
        texts = [f"{sender} does not reach {receiver}" for sender, receiver in ways[:_MOST_WAYS]]
        texts += [f"{len(ways) - _MOST_WAYS} more ways are cut"] * (len(ways) > _MOST_WAYS)
        first = cuts[0]
        return Verdict(
            first.sender,
            f"{', '.join(texts)}: what {self._who(first.sender)} sends to "
            f"{self._who(first.receiver)} has not arrived for {self._stalled_s(live):.0f} s, "
            "though its kernel sends it again; look at routes, firewalls and cables on that way",
            is_cut=True,
        )

    def _fresh_ends(self) -> dict[int, list[ConnectionEnd]]:
        fresh_at = self._clock() - self.limits.suspect_s
        return {rank: ends for rank, (at, ends) in self._told_ends.items() if at > fresh_at}

    def _host(self, rank: int) -> str:
        process = self._own if rank == self.rank else self._peers[rank].process
        return f"rank {rank}'s host" if process is None else process.host

    def _who(self, rank: int) -> str:
        process = self._own if rank == self.rank else self._peers[rank].process
        return f"rank {rank}" if process is None else f"rank {rank} ({process})"

    def _was_lost(self, peer: _Peer) -> bool:
        """Say whether a peer's link was lost before, while operations still ended."""
        return self._moved_at - peer.alive_at >= self.limits.suspect_s

    def _cut_off_from(self) -> int:
        """Return of how many other hosts nothing is heard, if of none and since one moment."""
        if self._own is None:
            return 0
        away = [
            peer
            for peer in self._peers.values()
            if not peer.has_left and peer.process.host_key != self._own.host_key
        ]
        last = [peer.alive_at for peer in away]
        is_silent = all(self._clock() - at >= self.limits.suspect_s for at in last)
        if not last or not is_silent or max(last) - min(last) >= self.limits.suspect_s:
            return 0
        return len({peer.process.host_key for peer in away})

    def _is_only_missing(self, live: Mapping[int, Progress]) -> bool:
        """Say whether all ranks but one are heard, and each has long waited for that one only."""
        if not self._sees_all or len(live) < len(self._peers):
            return False
        for rank, progress in live.items():
            others = {other: each for other, each in live.items() if other != rank}
            if progress.waited_s < self.limits.silent_s or not progress.in_flight:
                return False
            if any(blocked_by(operation, others) for operation in progress.in_flight):
                return False
        return True

    def _judge_left(self, live: Mapping[int, Progress]) -> Verdict | None:
        """Find a rank that has ended before it started what another one waits for."""
        waited_s = max(progress.waited_s for progress in live.values())
        gone = {
            rank: peer.progress
            for rank, peer in self._peers.items()
            # Another rank is behind such an error, and is found first if anybody sees it.
            if peer.has_left and (waited_s >= self.limits.silent_s or not peer.was_ended)
        }
        for progress in live.values():
            if progress.waited_s < self.limits.stall_s:
                continue
            for operation in progress.in_flight:
                for rank in blocked_by(operation, gone):
                    was_ended = self._peers[rank].was_ended
                    why = _BY_ERROR if was_ended else _SAME_STEPS
                    return Verdict(
                        rank,
                        f"rank {rank} ({self._peers[rank].process}) has ended its script while "
                        f"others wait for it in {operation[0]!r}; {why}",
                    )
        return None

    def _judge_stall(self, live: Mapping[int, Progress]) -> Verdict | None:
        """Find ranks that all wait, for operations that others lack, and have done so for long.

        Rank 0 alone says so, to all: another rank sees rank 0 and itself, so it cannot tell which
        of the two is astray, and its end would take the engine from ranks that still compare.
        """
        waits = find_stall(live, waited_s=self.limits.stall_s)
        # Beats of different ranks are of different moments: believe only what stays the same.
        signature = {rank: signature_of(each) for rank, each in live.items()}
        if waits is None or signature != self._stalled:
            self._stalled = None if waits is None else signature
            self._stalled_at = self._clock()
        if waits is None or self._clock() - self._stalled_at < self.limits.confirm_s:
            return None
        outside = [rank for rank in waits if live[rank].is_outside]
        if outside:
            return self._tell_apart(waits, outside, live)
        names = list(waits.values())  # by ascending rank, so a tie is the lowest rank's
        common = max(names, key=lambda name: (names.count(name), -names.index(name)))
        odd = [rank for rank, name in waits.items() if name != common] or list(waits)[1:]
        rest = [rank for rank in waits if rank not in odd]
        return Verdict(
            odd[0],
            f"ranks take other steps: ranks {odd} wait for {waits[odd[0]]!r}{live[odd[0]].site} "
            f"while ranks {rest} wait for {common!r}{live[rest[0]].site}; use optimizers, steps "
            "and collectives in the same order on every rank",
            is_mismatch=True,
        )

    def _tell_apart(
        self, waits: Mapping[int, str], outside: Sequence[int], live: Mapping[int, Progress]
    ) -> Verdict:
        """Return the verdict on ranks that wait outside of our operations, the rest inside."""
        inside = [rank for rank in waits if rank not in outside]
        away, here = outside[0], inside[0]
        return Verdict(
            away,
            f"ranks take other steps: ranks {inside} wait for {waits[here]!r}{live[here].site} "
            f"while ranks {outside} wait outside of loft_hvd, in the engine's {waits[away]}"
            f"{live[away].site}; every rank must come to both equally often. With unequal "
            "batches ranks may have unequal numbers of sub-batches: where a metric is averaged "
            "over ranks in each, use loft.Metric in its place, whose update() waits for nobody, "
            "and read its avg on every rank, not on rank 0 alone",
            is_mismatch=True,
        )

    def late_for(self, rank: int, own: Progress) -> list[int]:
        """Return the ranks that have not started what a rank has in flight, and so are awaited."""
        every = {peer: known.progress for peer, known in self._peers.items()} | {self.rank: own}
        in_flight = every.pop(rank).in_flight
        return sorted({late for operation in in_flight for late in blocked_by(operation, every)})

    def asked_for(self, own: Progress) -> list[str]:
        """Return the keys of what ranks wait for, to ask every rank whether it has started them."""
        return keys_awaited([own, *(peer.progress for peer in self._peers.values())])

    def asks_about(self) -> list[str]:
        """Return the hosts' addresses to ask every rank about, as something is sent in vain."""
        ends = [end for each in self._fresh_ends().values() for end in each if end.unanswered_s]
        ends.sort(key=lambda end: end.unanswered_s, reverse=True)
        addresses = (each.split()[0] for end in ends for each in (end.local, end.peer))
        return [each for each in dict.fromkeys(addresses) if each in self._ranks_at][:_MOST_ASKED]

    def warnings(self) -> list[str]:
        """Return a warning for each peer that lives but is not heard for long, once each."""
        warnings = []
        for rank, peer in self._peers.items():
            unheard_s = self._clock() - peer.heard_at
            if peer.has_left or peer.is_warned or unheard_s < self.limits.silent_s:
                continue
            who = f"rank {rank} ({peer.process})"
            is_seen = self.is_silent(rank) and peer.state not in (UNKNOWN, FROZEN, *ENDED)
            if is_seen or not self.misses_link(rank):
                peer.is_warned = True
                warnings.append(
                    f"{who} runs, but has been silent for {unheard_s:.0f} s: something there "
                    "holds the Python interpreter"
                )
            elif not self.is_silent(rank):
                peer.is_warned = True
                warnings.append(
                    f"the heartbeat's link to {who} is lost: nothing has come for "
                    f"{unheard_s:.0f} s, though collectives go on; training goes on too, and the "
                    "link is tried again. If that rank stops now, it may be named late or not"
                )
        return warnings
