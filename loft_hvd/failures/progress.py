"""How far ranks have come: what each tells of itself, and whether they block each other.

``Progress`` is what a rank tells, as text on the wire. ``ProgressMeter`` keeps this rank's own.
Pure: no sockets, no threads but a lock, the clock is given.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote

from loft_hvd.failures.call_sites import CallSite, CallSiteWatch

__all__ = [
    "Progress",
    "ProgressMeter",
    "blocked_by",
    "find_stall",
    "key_of",
    "keys_awaited",
    "signature_of",
]

_IN_PART = "*"  # begins the names of operations over some of the ranks only
_LEAST_WAIT_S = 1e-3  # a wait that has only begun: the wire has three decimals, and 0 means none
_MOST_NAMES = 8192  # a choice: 1 MB of counts, however many names a script makes up
_NAME_CHARS = 200  # a choice: longer names are cut, and told apart by their key
_SOME = -1  # a count: it was forgotten how often
_ALL = "*"  # stands for: all counts follow, of other names there is none
_MOST_ASKED = 512  # a choice: 5 kB of keys a beat at most
_OLDEST = 32  # operations of a rank that are looked at; a choice: it waits for one of those


def key_of(name: str) -> str:
    """Return the short key under which a name's operations are counted."""
    return f"{zlib.crc32(name.encode(errors='replace')):x}"


def _short(name: str) -> str:
    """Return a name as it travels: of bounded length, and equal for equal names."""
    name = name.encode(errors="backslashreplace").decode()  # lone surrogates cannot travel
    return name if len(name) <= _NAME_CHARS else f"{name[:_NAME_CHARS]}~{key_of(name)}"


@dataclass(frozen=True)
class Progress:
    """How far a rank has come."""

    waited_s: float = 0.0  # seconds that it has been waiting for other ranks; 0: it does not wait
    # Operations in flight as (name, number), oldest first: the number-th of that name, from 1; 0
    # where that was forgotten. Names that begin with a star are of some ranks only.
    in_flight: tuple[tuple[str, int], ...] = ()
    # How many operations of each name it has started, by ``key_of(name)``; None: not known.
    counts: Mapping[str, int] | None = field(default=None, hash=False)
    knows_all: bool = True  # whether it has started none of the names that are not in counts
    # Seconds since an operation over all ranks has ended on it, and since the latest of those had
    # begun. Known of this rank only: they do not travel, as every rank sees the end of each.
    moved_s: float = math.inf
    began_s: float | None = None  # None: as moved_s
    site: CallSite = field(default_factory=CallSite)  # where its training thread is

    def encode(self, max_chars: int, *, asked: Sequence[str] = ()) -> str:
        """Return in_flight, counts and site as text: oldest operations, and what was asked first.

        The second "a|b" in flight, of two begun, is ``a%7Cb#2;*|c8bd9f4d=2;`` and the call site.
        """
        counts, site = self.counts or {}, self.site.encode()
        flying = _fill((f"{quote(name)}#{n}" for name, n in self.in_flight), max_chars // 2)
        room = max_chars - len(flying) - len(site) - 2
        counted = "|".join([_ALL, *(f"{key}={n}" for key, n in counts.items())])
        if len(counted) > room or not self.knows_all:
            # Then a count of 0 says that there is none. Newest first: those may be asked next.
            told = {key: counts.get(key, 0) for key in asked if self.knows_all or key in counts}
            told |= {key: counts[key] for key in reversed(list(counts))}
            counted = _fill((f"{key}={n}" for key, n in told.items()), room)
        return f"{flying};{counted};{site}"

    @classmethod
    def decode(cls, waited_s: float, text: str) -> Progress:
        """Return the progress that a text tells; nothing in flight where it does not parse."""
        flying, _, rest = text.partition(";")
        counted, separator, site = rest.partition(";")
        if not separator:
            return cls(waited_s)
        pairs = [item.partition("#") for item in flying.split("|") if item]
        items = [item for item in counted.split("|") if item]
        knows_all = _ALL in items[:1]
        totals = [item.partition("=") for item in items[knows_all:]]
        try:
            in_flight = tuple((unquote(name), int(number)) for name, _, number in pairs)
            counts = {key: int(count) for key, _, count in totals}
        except ValueError:
            return cls(waited_s)
        return cls(waited_s, in_flight, counts, knows_all, site=CallSite.decode(site))

    @property
    def is_outside(self) -> bool:
        """Whether it waits for other ranks in a call of the engine's that is not ours."""
        return self.waited_s == 0 and self.site.call != ""

    @property
    def stuck_s(self) -> float:
        """Seconds that it has been waiting, in an operation of ours or in the engine's own call."""
        return self.site.call_s if self.is_outside else self.waited_s

    def has_started(self, operation: tuple[str, int]) -> bool:
        """Say whether it has started an operation, or may have, as far as is known."""
        name, number = operation
        if self.counts is None or name.startswith(_IN_PART):  # who takes part is not known here
            return True
        count = self.counts.get(key_of(name), 0 if self.knows_all else _SOME)
        return count == _SOME or count >= max(number, 1)


def _fill(items: Iterable[str], max_chars: int) -> str:
    """Join the first items, as many as there is room for."""
    taken: list[str] = []
    for item in items:
        max_chars -= len(item) + 1
        if max_chars < 0:
            break
        taken.append(item)
    return "|".join(taken)


class ProgressMeter:
    """Keeps what this rank has on the wire and since when it waits; any thread may write.

    ``num_others`` says how many operations of the engine's the script itself has started, as in
    ``CallSite``.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_others: Callable[[], int] = lambda: -1,
    ) -> None:
        self._clock = clock
        self._num_others = num_others
        self._call_sites = CallSiteWatch(clock)
        self._thread = threading.get_ident()  # that trains: who made this, or waited last
        # Reentrant, as all locks that the script's thread takes: a signal handler of the script's
        # may reduce, too, in the midst of anything.
        self._lock = threading.RLock()
        # By name's key, started last at the end. Which names are forgotten may differ between
        # ranks, so from then on nobody says how often a new name was started.
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._has_forgotten = False
        self._in_flight: dict[tuple[str, int], Callable[[], bool]] = {}
        self._waits: dict[int, float] = {}
        self._tickets = itertools.count()
        self._moved_at = self._began_at = -math.inf

    def now(self) -> float:
        """Return the time by its clock, for ``moved``."""
        return self._clock()

    def posted(self, name: str, is_over: Callable[[], bool] = lambda: False) -> tuple[str, int]:
        """Note an operation that has been started; returns it, to be given to ``ended``.

        ``is_over`` says whether the engine is done with it, though nobody may have asked: what a
        rank starts now and takes up much later keeps no rank from going on.
        """
        name = _short(name)
        key = key_of(name)
        with self._lock:
            count = self._counts.pop(key, _SOME if self._has_forgotten else 0)  # then to the end
            count = self._counts[key] = count if count == _SOME else count + 1
            if len(self._counts) > _MOST_NAMES:
                self._counts.popitem(last=False)
                self._has_forgotten = True
            operation = name, max(count, 0)
            self._in_flight[operation] = is_over
        return operation

    def ended(self, operation: tuple[str, int]) -> None:
        """Note that it has ended, well or badly."""
        with self._lock:
            self._in_flight.pop(operation, None)

    def moved(self, name: str, began_at: float | None = None) -> None:
        """Note that an operation has ended well: who takes part has lived since it began."""
        if not name.startswith(_IN_PART):
            self._moved_at = self._clock()
            began_at = self._moved_at if began_at is None else began_at
            self._began_at = max(self._began_at, began_at)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that a thread waits for other ranks inside."""
        ticket = next(self._tickets)
        with self._lock:
            self._waits[ticket] = self._clock()
            self._thread = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[ticket]

    def progress(self) -> Progress:
        """Return how far this rank has come."""
        with self._lock:
            since = min(self._waits.values(), default=None)
            posted = list(self._in_flight.items())
            counts = dict(self._counts)
        # Outside of the lock: a work that is being released holds its own, and waits for this one
        # in ``ended``; who asks it here waits for its.
        in_flight = tuple(operation for operation, is_over in posted if not is_over())
        waited_s = 0.0 if since is None else max(self._clock() - since, _LEAST_WAIT_S)
        now = self._clock()
        moved_s, began_s = now - self._moved_at, now - self._began_at
        site = replace(self._call_sites.look(self._thread), num_others=self._num_others())
        knows_all = not self._has_forgotten
        return Progress(waited_s, in_flight, counts, knows_all, moved_s, began_s, site)


def blocked_by(operation: tuple[str, int], others: Mapping[int, Progress]) -> list[int]:
    """Return the ranks that have not started an operation yet, as far as is known.

    ``("sum", 3)`` is blocked by a rank that has started "sum" twice, whether or not it is still
    in flight there. Comparing names alone would miss a rank that is one step behind.
    """
    return [
        rank for rank, progress in sorted(others.items()) if not progress.has_started(operation)
    ]


def awaits_one(outside: Progress, inside: Iterable[Progress]) -> bool:
    """Say whether a rank in a call of the engine's is known to wait for one inside ours.

    That has started fewer such calls. Who has started as many has done its part: the call may be
    on a slow link, as a broadcast ends on some ranks before others.
    """
    return any(-1 < each.site.num_others < outside.site.num_others for each in inside)


def find_stall(ranks: Mapping[int, Progress], *, waited_s: float) -> dict[int, str] | None:
    """Find out whether no rank can go on: all wait, each for what others have not come to.

    An operation that all have started may still be on a slow link, so a rank with one of those
    can go on::

        rank 0 waits for a; has started a          nobody else has started a
        rank 1 waits for b; has started b          nobody else has started b: a stall
        rank 1 waits for b; has started a and b    a is on every rank: rank 0 can go on

    A rank may wait outside, in the script's own call of the engine. It cannot go on either where
    one of those that wait in operations of ours has not come to that call. Where all wait outside,
    or nobody counts such calls, nothing is known.

    Returns:
        What each rank waits for, by rank; None where some rank can go on, or has not been waiting
        for ``waited_s``.
    """
    waits: dict[int, str] = {}
    inside = [progress for progress in ranks.values() if not progress.is_outside]
    for rank, progress in sorted(ranks.items()):
        if progress.is_outside:
            if progress.site.call_s < waited_s or not awaits_one(progress, inside):
                return None
            waits[rank] = progress.site.call
            continue
        others = {other: each for other, each in ranks.items() if other != rank}
        if progress.waited_s < waited_s or not progress.in_flight:
            return None
        if not all(blocked_by(operation, others) for operation in progress.in_flight[:_OLDEST]):
            return None
        waits[rank] = min(progress.in_flight)[0]
    return waits


def signature_of(progress: Progress) -> frozenset[tuple[str, int]]:
    """Return what stays the same for as long as a rank cannot go on."""
    site = progress.site
    waits_for = [(site.call, 0)] if progress.is_outside else progress.in_flight
    return frozenset([*waits_for, ("", site.num_others)])


def keys_awaited(every: Iterable[Progress]) -> list[str]:
    """Return the keys of what ranks wait for, to ask every rank whether it has started them."""
    names = [name for each in every for name, _ in each.in_flight[:_OLDEST]]
    return [key_of(name) for name in dict.fromkeys(names)][:_MOST_ASKED]
