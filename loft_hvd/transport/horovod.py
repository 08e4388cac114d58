"""Horovod as the engine: imported here, and only when it is used.

What is not public of it comes from ``horovod_private.py``, the only other file that imports it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from loft_hvd.config import config, has_dynamic_process_sets
from loft_hvd.errors import (
    ArgumentError,
    ArgumentTypeError,
    LoftError,
    MissingDependencyError,
    TransportTimeoutError,
    UsageError,
)
from loft_hvd.failures.causes import is_of_engine
from loft_hvd.failures.heartbeat import Heartbeat
from loft_hvd.failures.watched import heartbeat_of, open_heartbeat, watched
from loft_hvd.transport.base import Abilities, Channel, Work
from loft_hvd.transport.device import DeviceGroup, group_beside
from loft_hvd.transport.horovod_private import (
    allgather_of,
    alltoall_of,
    calls_at_shutdown,
    check_version,
    count_others,
    hosts_updated_error,
    meter_waits,
    operations,
    process_sets_of,
    starting,
    table_question,
)
from loft_hvd.transport.mesh import Mesh, open_mesh

__all__ = [
    "ElasticNotices",
    "HorovodTransport",
    "horovod_if_initialized",
    "horovod_module",
    "is_member",
    "own_process_set",
    "reduce_op_name",
    "restore_process_set",
]

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_ALL_RANKS = "horovod.0"  # 0 is the number of Horovod's global process set
_SHOWN_SETS = 8  # a choice: an error names no more of them
_ASK_S = 0.1  # a choice: Horovod answers in microseconds, unless it waits for a rank
# All-gathers whose results have so many bytes or more are not fused. Time of two that are ready at
# once, over that of two fused: of 4, 8, 16 and 25 MiB on 4 ranks of MPI 1.04, 0.94, 0.80 and 0.74,
# on 2 ranks 0.79, 0.69, 0.80 and 0.70; in a second job 0.56 to 0.81, and 0.98 for 4 MiB on 4 ranks.
# Of 1, 4 and 16 MiB on 4 ranks of Gloo 1.28, 0.97 and 0.83 (2 cores, 2026-11-26).
_UNFUSED_BYTES = 8 * 2**20
_COUNTED_BYTES = 2**31 - 1  # bound from MPI, which counts values, here of a byte, in 31 bits
_MOVABLE = (torch.uint8, torch.int8, torch.int16, torch.float16)  # as which any may be shown
_SUMMABLE = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)


@functools.cache
def horovod_module() -> Any:
    """Import and return ``horovod.torch``."""
    try:
        hvd = importlib.import_module("horovod.torch")
        version = importlib.import_module("horovod").__version__
    except ImportError as error:
        raise MissingDependencyError(
            f"horovod.torch cannot be imported ({error}); `make setup` builds Horovod for the "
            "installed torch, and `loft-hvd doctor` says what is there"
        ) from error
    check_version(version)
    return hvd


def horovod_if_initialized() -> Any | None:
    """Return ``horovod.torch`` if a script has imported and initialised it, else None."""
    # Asked of a script that may not use Horovod: importing it loads its library, and MPI.
    if "horovod.torch" not in sys.modules:
        return None
    hvd = horovod_module()
    return hvd if hvd.is_initialized() else None


class ElasticNotices:
    """The launcher's notices that hosts have come or gone, as ``hvd.elastic`` keeps them."""

    def __init__(self) -> None:
        self._error = hosts_updated_error()
        self._last = 0
        self._messages: queue.Queue[tuple[int, int]] = queue.Queue()

    def put(self, timestamp: int, update: int) -> None:
        """Take a notice; from any thread."""
        self._messages.put((timestamp, update))

    def clear(self) -> None:
        """Forget notices of an older world."""
        self._messages = queue.Queue()

    def check(self, broadcast_object: Callable[[Any], Any]) -> None:
        """Raise ``HostsUpdatedInterrupt`` on every rank when rank 0 has a new notice.

        Ranks always agree on the state afterwards: where only some skip that, as Horovod lets
        them when hosts have only gone, the rest wait for ever (horovod#3494).
        """
        newest, changes = self._last, 0
        while not self._messages.empty():
            timestamp, update = self._messages.get()
            if timestamp > newest:
                newest = timestamp
                changes |= update
        # Rank 0's count, so that every rank raises at the same commit, whichever notices came here.
        last, self._last, changes = broadcast_object((self._last, newest, changes))
        if self._last > last:
            raise self._error(False)


def reduce_op_name(op: Any) -> str:
    """Return "average" or "sum" for Horovod's reduce op, or None for its default."""
    if op is None or op in ("average", "sum"):
        return op or "average"
    hvd = horovod_module()
    if op == hvd.Average:
        return "average"
    if op == hvd.Sum:
        return "sum"
    if op == hvd.Adasum:
        raise ArgumentError(
            "op=hvd.Adasum is not offered: it combines ranks' updates after each has taken a step "
            "of its own, and here ranks combine gradients before the step; use hvd.Average, with "
            "rule= for wrong workers, or keep hvd.DistributedOptimizer for Adasum"
        )
    names = ("Min", "Max", "Product")
    name = next((f"hvd.{each}" for each in names if op == getattr(hvd, each, None)), repr(op))
    raise ArgumentError(
        f"op={name} is not supported; it takes hvd.Average or hvd.Sum (for anything sturdier "
        "than a sum, pass rule=)"
    )


def _wire_view(tensor: Tensor) -> Tensor:
    """Show a dtype that Horovod does not know as one of the same width that it does."""
    # Right for what is only moved; a sum of such bits would be nonsense (``_SUMMABLE``).
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _unfused(send: Tensor, recv: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Show what is gathered, if it is large, as a dtype that few others are shown as.

    Horovod fuses all-gathers of one dtype that are ready in one of its cycles: it copies the values
    of all into a buffer, and the results out of it. Names get different dtypes here where the sums
    of their numbers differ by 1 to 3, as those of neighbouring buckets and parts of a bucket do.
    """
    if not _UNFUSED_BYTES <= recv.nbytes <= _COUNTED_BYTES or send.element_size() == 1:
        return send, recv
    number = sum(int(digits) for digits in re.findall(r"[0-9]{1,9}", name))
    dtype = _MOVABLE[number % len(_MOVABLE)]
    return send.view(dtype), recv.view(dtype)


class _HorovodWork:
    """A Horovod handle."""

    watch = None

    def __init__(self, hvd: Any, handle: int) -> None:
        self._hvd = hvd
        self._handle = handle

    def done(self) -> bool:
        return bool(self._hvd.poll(self._handle))

    def finish(self) -> None:
        # Only of a done operation: on an unfinished one it spins on the interpreter's lock.
        self._hvd.synchronize(self._handle)


def _ask_aside(question: Callable[[], _T], name: str) -> Future[_T]:
    """Ask Horovod on a thread of its own, which ends with the answer, however late that comes."""
    answer: Future[_T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name=name, daemon=True).start()
    return answer


def _within_limit(question: Callable[[], _T], *, what: str, heartbeat: Heartbeat | None) -> _T:
    """Ask Horovod what it answers once its table of process sets is free.

    Where sets are "dynamic" its background thread holds the table over a collective in each of its
    cycles: for as long as a rank is frozen, or its host is gone. ``what`` begins an error.

    Raises:
        TransportTimeoutError: there was no answer in time.
        PeerError: the heartbeat knows which rank keeps this one waiting.
        MismatchError: the same, where ranks take other steps.
    """
    if not has_dynamic_process_sets():
        return question()
    answer = _ask_aside(question, "loft-ask")
    began, limit_s = time.monotonic(), config().timeout_s
    with suppress(FutureTimeoutError):
        return answer.result(min(_ASK_S, limit_s))
    with nullcontext() if heartbeat is None else heartbeat.waiting():
        while (left_s := limit_s - (time.monotonic() - began)) > 0:
            with suppress(FutureTimeoutError):
                return answer.result(min(_ASK_S, left_s))
            if heartbeat is not None and (verdict := heartbeat.final_verdict()) is not None:
                heartbeat.heard()
                raise verdict.error()
    raise TransportTimeoutError(
        f"{what}: no answer from Horovod within {limit_s:g} s; with dynamic process sets it waits "
        "for every rank, and one has stopped or is very slow. List all sets at the start, "
        "hvd.init(process_sets=[...]), or raise LOFT_HVD_TIMEOUT_S"
    )


class HorovodTransport:
    """The ranks of a Horovod process set, all of them by default; see ``Transport``.

    Args:
        process_set: a ``hvd.ProcessSet`` that includes this rank, or None for all ranks.
    """

    def __init__(self, process_set: Any | None = None) -> None:
        self._hvd = horovod_module()
        self._ops = operations()
        meter_waits(self._ops)
        if process_set is not None and config().is_elastic:
            _warn_of_sets_in_elastic_jobs()
        self._set = self._hvd.global_process_set if process_set is None else process_set
        # In elastic training a set keeps its number in a new world: heartbeats are closed before.
        self._world = f"horovod.{self._set.process_set_id}"
        self._no_splits = torch.empty(0, dtype=torch.int32)
        self._sum = functools.partial(self._hvd.allreduce_async_, op=self._hvd.Sum)
        self._wait_for_table = table_question(self._ops)
        self._answers: dict[Callable[[], Any], int] = {}  # of dynamic sets, which do not change

    @functools.cached_property
    def can(self) -> Abilities:
        """What these ranks can; see ``Transport``."""
        is_global = self._set.process_set_id == self._hvd.global_process_set.process_set_id
        # Elastic jobs recover by the errors of Horovod's own operations.
        if config().is_elastic or not is_global:
            return Abilities(
                follow=self._follow, open_heartbeat=self.open_heartbeat, explain=self.explain
            )
        is_gloo = self._hvd.gloo_enabled() and not self._hvd.mpi_enabled()
        # On one host loopback is as fast without: 0.98 of the time for 25 MB, links unlimited.
        pays = config().mesh == "on" or self.local_size < self.world_size
        return Abilities(
            world=("horovod", self.world_size, self.rank),
            at_end=lambda call: calls_at_shutdown().append(call),
            open_mesh=_open_mesh if is_gloo and pays else None,
            open_group=_open_group,
            follow=self._follow,
            open_heartbeat=self.open_heartbeat,
            explain=self.explain,
        )

    @property  # asked each time: in an elastic job the world changes
    def rank(self) -> int:
        return self._ask(self._set.rank)

    @property
    def world_size(self) -> int:
        return self._ask(self._set.size)

    def _ask(self, question: Callable[[], Any]) -> int:
        """Ask the process set; that it is gone means in an elastic job that its world is lost."""
        # Without waiting long: of all ranks Horovod tells without its table, and in an elastic job
        # Gloo's own limit ends what holds that.
        is_quick = self._world == _ALL_RANKS or config().is_elastic
        try:
            if is_quick or not has_dynamic_process_sets():
                return int(question())
            if question not in self._answers:  # once: it takes a thread, and each gradient asks
                what = f"asking for the ranks of {self._world}"
                answer = _within_limit(question, what=what, heartbeat=self.watch)
                self._answers[question] = int(answer)
            return self._answers[question]
        except LoftError:  # of the wait
            raise
        except ValueError as error:
            if config().is_elastic and "does not exist" in str(error):
                # ``hvd.elastic.run`` recovers from Horovod's own error, but not from a ValueError.
                lost: Exception = self._ops.HorovodInternalError(str(error))
                self._explain(lost)
                raise lost from error
            self._explain_call(error)
            raise

    def explain(self, error: Exception) -> None:
        """Let an error of Horovod's say which rank is behind it, as errors of waiting do.

        It may be any error of a script's: one that is not Horovod's own is left as it is.
        """
        if is_of_engine(error):
            self._explain(error)

    def _explain_call(self, error: Exception) -> None:
        """Explain an error of a call of Horovod's, unless that has only refused what it was given.

        With a ValueError its calls answer once it has shut down.
        """
        if is_of_engine(error) or (isinstance(error, ValueError) and self._is_down()):
            self._explain(error)

    def _explain(self, error: Exception) -> None:
        if self.watch is not None:
            self.watch.explain(error)

    @property
    def node(self) -> str:
        return socket.gethostname()

    @property
    def local_size(self) -> int:
        return int(self._hvd.local_size())

    @property
    def watch(self) -> Heartbeat | None:
        """The heartbeat of these ranks, or else of all; None where none was opened."""
        return heartbeat_of(self._world) or heartbeat_of(_ALL_RANKS)

    def open_heartbeat(self) -> None:
        """Open the heartbeat of these ranks, unless it is open; every one of them calls it."""
        if self.world_size > 1:
            open_heartbeat(
                self,
                self._world,
                engine_is_down=self._is_down,
                num_others=count_others(self._ops),
            )

    def _is_down(self) -> bool:
        """Say whether Horovod has shut down, so that its calls fail instead of waiting."""
        # Who asks waits for Horovod's table of process sets, which its background thread may hold
        # for as long as a rank is frozen. So a thread asks: that gets no answer where one waits.
        answer = _ask_aside(process_sets_of(self._ops), "loft-is-down")
        with suppress(FutureTimeoutError):
            # "not initialized": it has ended, and its table with it. (RuntimeError: a process set
            # came or went meanwhile.)
            return isinstance(answer.exception(_ASK_S), ValueError)
        return False

    def _start(self, name: str, call: Callable[..., int], *args: Any) -> Work:
        """Start an operation by a call of Horovod's, under the eyes of the heartbeat."""
        # The call waits for Horovod's table with the interpreter's lock in hand: where another
        # thread holds it while a rank is frozen, nothing of Python's would run here, nor would the
        # heartbeat, and nobody would be named. So this waits first, without that lock.
        if has_dynamic_process_sets():
            _within_limit(self._wait_for_table, what=f"starting {name!r}", heartbeat=self.watch)
        try:
            with starting():
                # And here, right before the call: from one thread to another takes so long that
                # Horovod may have begun its next cycle, and with it a wait. This costs a
                # microsecond.
                self._wait_for_table()
                handle = call(*args, name=name, process_set=self._set)
        except Exception as error:
            self._explain_call(error)
            raise
        return self._follow(_HorovodWork(self._hvd, handle), name)

    def _follow(self, work: Work, name: str) -> Work:
        """Put an operation under the eyes of the heartbeat."""
        if heartbeat_of(self._world) is None:
            name = f"*{name}"  # the heartbeat is of all ranks, the operation of some
        return watched(work, name, self.watch)

    def subset(self, parts: Sequence[tuple[int, ...]]) -> HorovodTransport:
        """Return the ranks of this rank's part, as a process set; every rank calls it alike."""
        # Ranks within this set become Horovod's own numbers, by which sets are made.
        ranks = self._set.ranks or range(self.world_size)
        own = [[ranks[rank] for rank in part] for part in parts]
        return HorovodTransport(own_process_set(self._hvd, self._ops, own, heartbeat=self.watch))

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        source, target = _wire_view(send), _wire_view(recv)
        splits = self._no_splits  # none: Horovod then cuts into equal shards
        num_ranks = self.world_size
        if skips_own:
            splits = torch.full((num_ranks,), send.numel() // (num_ranks - 1), dtype=torch.int32)
            splits[self.rank] = 0
        received = torch.empty(num_ranks, dtype=torch.int32)  # what came from whom: asked by nobody
        return self._start(name, alltoall_of(self._ops), source, splits, target, received)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        source, target = _wire_view(send), _wire_view(recv)
        if send.device.type == "cpu":
            source, target = _unfused(source, target, name)
        return self._start(name, allgather_of(self._ops), source, target)

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        if buffer.dtype not in _SUMMABLE:
            raise ArgumentTypeError(
                f"allreduce {name!r}: Horovod cannot sum {buffer.dtype}; it sums "
                f"{', '.join(str(dtype) for dtype in _SUMMABLE)}"
            )
        return self._start(name, self._sum, buffer)

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        ranks = self._set.ranks
        root = ranks[0] if ranks else 0  # Horovod counts roots by its own ranks
        return self._start(name, self._hvd.broadcast_async_, _wire_view(buffer), root)


def _open_mesh(channel: Channel) -> Mesh | None:
    return open_mesh(channel, interface=config().interface, compact_floats=config().compact)


def _open_group(channel: Channel, device: torch.device) -> DeviceGroup | None:
    """Make a process group of torch's beside Horovod, whatever Horovod was built with."""
    if device.type == "cpu":  # without a GPU: on a mesh's connections
        mesh = _open_mesh(channel)
        return None if mesh is None else DeviceGroup(mesh.group, device, mesh.close)
    return group_beside(channel, device)


@functools.cache
def _warn_of_sets_in_elastic_jobs() -> None:
    """Say once what a killed rank does to an elastic job with process sets."""
    _logger.warning(
        "elastic job with process sets (process_set=, over=): Horovod 0.28.1 recovers from ranks "
        "that raise and from hosts that come and go, but not from a rank that is killed: its own "
        "library then aborts the other ranks (gloo::IoException) and the job ends. Save checkpoints"
    )


@functools.cache
def _warn_of_dynamic_sets() -> None:
    """Say once what a frozen rank does to a job whose process sets are dynamic."""
    _logger.warning(
        'process sets are "dynamic": while a rank is frozen, Horovod 0.28.1 then stops the whole '
        "Python interpreter of every rank that calls hvd.allreduce or another collective of the "
        "script's own, so that no rank is named and the job hangs. List all sets at the start "
        "instead: hvd.init(process_sets=[...]) (docs/levels.md)"
    )


# Process sets: found where they exist, else made, and made again in a new world.


def is_member(process_set: Any | None) -> bool:
    """Say whether this rank belongs to a process set; to None, all ranks do."""
    return process_set is None or bool(process_set.included())


def own_process_set(
    hvd: Any, ops: Any, parts: Sequence[Sequence[int]], *, heartbeat: Heartbeat | None = None
) -> Any:
    """Return the process set of the part that this rank is in; every rank calls it alike.

    Sets that were given to ``hvd.init`` are used as they are; the others are added, all of them on
    every rank and in one order. ``parts`` are Horovod's ranks of each, ascending; ``hvd`` and
    ``ops`` are ``horovod.torch`` and its ``mpi_ops``; ``heartbeat`` is of all ranks.
    """
    # The same walk on every rank, also over sets that it is not in: adding one takes all of them.
    ask = process_sets_of(ops)
    sets = _within_limit(ask, what="over=: asking for process sets", heartbeat=heartbeat)
    known = {tuple(ranks): key for key, ranks in sets.items()}
    own = None
    for part in parts:
        process_set = hvd.ProcessSet(list(part))
        if tuple(part) in known:
            process_set.process_set_id = known[tuple(part)]
        else:
            if sum(map(len, parts)) < hvd.size():  # Horovod would wait for the rest for ever
                raise UsageError(
                    f"over= with process_set=: Horovod has no process set of ranks {list(part)}, "
                    "and adds one only together with ranks outside of process_set=, which take no "
                    "part here; before this, let every rank make all sets, of each group, of the "
                    "i-th ranks of all groups and that of process_set=, by hvd.add_process_set, or "
                    f"at the start: {_init_with(parts)}; in an elastic job give them to "
                    "loft.elastic.State(process_sets=[...])"
                )
            _add(hvd, process_set, parts, heartbeat)
        if hvd.rank() in part:
            own = process_set
    assert own is not None, parts
    return own


def _add(
    hvd: Any, process_set: Any, parts: Sequence[Sequence[int]], heartbeat: Heartbeat | None
) -> None:
    what = f"over=: adding the process set of ranks {process_set.ranks}"
    add = functools.partial(hvd.add_process_set, process_set)
    try:
        _within_limit(add, what=what, heartbeat=heartbeat)
    except LoftError:  # of the wait
        raise
    except ValueError as error:
        raise UsageError(
            f"over=: Horovod has no process set of ranks {process_set.ranks} and may not add one "
            f"now ({error}); list all sets at the start, of each group and of the i-th ranks of "
            f"all groups: {_init_with(parts)}. In an elastic job, or where a rank that freezes may "
            'stop the job without a name: hvd.init(process_sets="dynamic"), or '
            "HOROVOD_DYNAMIC_PROCESS_SETS=1"
        ) from error
    if hvd.rank() == 0 and not config().is_elastic:  # there sets follow the world
        _warn_of_dynamic_sets()


def _init_with(parts: Sequence[Sequence[int]]) -> str:
    sets = ", ".join(f"hvd.ProcessSet({list(part)})" for part in parts[:_SHOWN_SETS])
    sets += ", ..." if len(parts) > _SHOWN_SETS else ""
    return f"hvd.init(process_sets=[{sets}])"


def restore_process_set(hvd: Any, process_set: Any) -> None:
    """Make a ``hvd.ProcessSet`` again in a new world; every rank calls it, members or not."""
    if process_set.ranks and max(process_set.ranks) >= hvd.size():
        raise ArgumentError(
            f"the process set of ranks {process_set.ranks} does not fit the new world of "
            f"{hvd.size()} ranks; start with a --min-np that keeps its ranks"
        )
    process_set.process_set_id = None  # the old world's, should adding it fail
    if process_set.ranks == list(range(hvd.size())):
        process_set.process_set_id = hvd.global_process_set.process_set_id
    else:
        what = f"adding the process set of ranks {process_set.ranks}"
        add = functools.partial(hvd.add_process_set, process_set)
        _within_limit(add, what=what, heartbeat=None)  # which is opened after this
