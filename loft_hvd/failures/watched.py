"""Operations and waits under the eyes of a heartbeat; opens one for each world of processes."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from loft_hvd.config import KEEPALIVE_OPTIONS, config
from loft_hvd.errors import TransportError
from loft_hvd.failures.actions import HeartbeatSettings, ProcessControl
from loft_hvd.failures.connections import ReadClock
from loft_hvd.failures.diagnosis import Diagnosis, DiagnosisLimits
from loft_hvd.failures.guards import LauncherGuard, ProcessGuard
from loft_hvd.failures.handshake import open_links
from loft_hvd.failures.heartbeat import Heartbeat
from loft_hvd.failures.process import ProcessExit, own_process
from loft_hvd.transport.base import Channel, Transport, Work

__all__ = ["close_heartbeats", "heartbeat_of", "open_heartbeat", "watched"]

_logger = logging.getLogger(__name__)
_OPEN_S = 10.0  # a choice: ranks that are not there by then are behind a firewall
_PATIENT_MPIRUN = (
    "; mpirun itself, which runs on a host without this rank, waits for a lost host for minutes: "
    f"end it by hand, or start it with {KEEPALIVE_OPTIONS} and it notices in seconds"
)
_LAST_S = 3.0  # a choice: a guard acts after ranks that might, which look once a second


class _WatchedWork:
    """An operation that also ends when ranks cannot go on."""

    def __init__(self, work: Work, name: str, heartbeat: Heartbeat) -> None:
        self._work = work
        self.watch = heartbeat
        self._is_posted = True
        self._releasing = threading.RLock()
        self._began_at = heartbeat.meter.now()
        self._operation = heartbeat.meter.posted(name, _question_to(weakref.ref(self)))

    def done(self) -> bool:
        if self._work.done():
            self._end()
            return True
        return self.watch.final_verdict() is not None

    def finish(self) -> None:
        is_done = self._work.done()
        with self._releasing:  # whoever asks from now on must not touch it
            self._end()
        if not is_done and (verdict := self.watch.final_verdict()) is not None:
            self.watch.heard()
            raise verdict.error()
        try:
            self._work.finish()
            self.watch.meter.moved(self._operation[0], self._began_at)
        except Exception as error:
            self.watch.explain(error)
            verdict = self.watch.final_verdict(at_once=True)
            # Horovod's own error stays, but for a mismatch: trying again cannot mend a script.
            if verdict is not None and (isinstance(error, TransportError) or verdict.is_mismatch):
                raise verdict.error() from error
            raise

    def is_over(self) -> bool:
        """Say whether the engine is done with it; for the heartbeat's thread."""
        with self._releasing:
            try:
                return not self._is_posted or self._work.done()
            except Exception:  # as when Horovod forgets handles; the heartbeat has to go on
                return False

    def _end(self) -> None:
        if self._is_posted:
            self._is_posted = False
            self.watch.meter.ended(self._operation)


def _question_to(work: weakref.ref[_WatchedWork]) -> Callable[[], bool]:
    """Return what asks whether a work is over, keeping no tensors: False if it was given up."""

    def ask() -> bool:
        return (alive := work()) is not None and alive.is_over()

    return ask


@functools.cache
def _heartbeats() -> dict[str, Heartbeat]:
    """Return the heartbeats of this process, by the name of their world."""
    return {}


def heartbeat_of(world: str) -> Heartbeat | None:
    """Return the heartbeat that was opened for a world of ranks."""
    return _heartbeats().get(world)


def watched(work: Work, name: str, heartbeat: Heartbeat | None) -> Work:
    """Return an operation that also ends when the heartbeat finds that ranks cannot go on."""
    return work if heartbeat is None else _WatchedWork(work, name, heartbeat)


def close_heartbeats() -> None:
    """Close every heartbeat of this process, before its world ends."""
    for heartbeat in _heartbeats().values():
        heartbeat.close()
    _heartbeats().clear()


def open_heartbeat(
    transport: Transport,
    world: str,
    *,
    engine_is_down: Callable[[], bool],
    num_others: Callable[[], int] = lambda: -1,
) -> Heartbeat | None:
    """Open the heartbeat of two ranks or more, unless it is open; every rank calls it alike.

    ``world`` names these ranks in this process; the rest is as in ``Heartbeat``. Returns None where
    a rank has turned heartbeats off, or cannot reach rank 0.
    """
    # Ranks may differ in what they want, have open and can reach: each step is agreed on, so that
    # all of them go on to the next, or none.
    settings = config()
    known = _heartbeats().get(world)
    wants = int(settings.heartbeat_s > 0)
    row = torch.tensor([wants, int(known is not None and not known.is_closed)])
    channel = Channel(transport, f"loft.heartbeat.{world}", settings.timeout_s)
    rows = channel.sub("wants").allgather_rows(row)
    wanted, is_open = rows.all(dim=0).tolist()
    if wanted and is_open:
        return known
    if known is not None:
        known.close()
        del _heartbeats()[world]
    if not wanted:
        return None
    links = open_links(replace(channel, timeout_s=_OPEN_S))
    num_links = transport.world_size - 1 if transport.rank == 0 else 1
    reached = torch.tensor([int(len(links.made) == num_links)])
    try:
        rows = channel.sub("reached").allgather_rows(reached)
    except BaseException:
        links.close()
        raise
    if not bool(rows.all()):
        links.close()
        if transport.rank == 0:
            away = [rank for rank, row in enumerate(rows.flatten().tolist()) if rank and not row]
            _logger.warning(
                "heartbeat off: ranks %s cannot reach rank 0 by TCP; a rank that stops is found "
                "only after LOFT_HVD_TIMEOUT_S=%g s. LOFT_HVD_HEARTBEAT_S=0 does so unasked",
                away,
                settings.timeout_s,
            )
        return None
    own = own_process()
    limits = DiagnosisLimits(silent_s=settings.heartbeat_timeout_s, held_s=settings.timeout_s)
    is_alone = settings.is_elastic and transport.local_size == 1
    processes = {rank: new.process for rank, new in links.made.items()}
    launcher = LauncherGuard(own, limit_s=2 * settings.leave_s) if settings.is_mpirun else None
    is_patient = settings.is_mpirun_patient and not (launcher and launcher.finds_launcher)
    hint = _PATIENT_MPIRUN if is_patient else ""
    clock = ReadClock()
    diagnosis = Diagnosis(
        transport.rank,
        processes,
        world_size=transport.world_size,
        limits=limits,
        own=own,
        hint=hint,
        ranks_at=links.ranks_at,
        clock=clock,
    )
    _heartbeats()[world] = heartbeat = Heartbeat(
        {rank: new.link for rank, new in links.made.items()},
        diagnosis,
        maker=links.maker,
        clock=clock,
        settings=HeartbeatSettings(
            period_s=settings.heartbeat_s,
            leave_s=settings.leave_s,
            is_elastic=settings.is_elastic,
        ),
        control=ProcessControl(
            own,
            # An elastic process is never left: the launcher's new world needs it.
            exit=ProcessExit(leave_s=None if settings.is_elastic else settings.leave_s),
            guard=ProcessGuard(transport.rank, own, limit_s=limits.suspect_s + _LAST_S)
            if is_alone
            else None,
            launcher=launcher,
        ),
        engine_is_down=engine_is_down,
        num_others=num_others,
    )
    return heartbeat
