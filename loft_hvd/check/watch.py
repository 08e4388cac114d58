"""Runs a script as one rank and notes what it calls: ``python -m loft_hvd.check.watch ...``.

Functions are replaced before the script imports them, so the script stays as it is. Each note has
the line of the script; what libraries call among themselves is none of its business.

The ranks end together: the first that reaches the limit, or fails, or sees that all stand still,
puts a file into a folder that all look at, and each goes once all have written their notes. A rank
that waits in a collective for ever is no hindrance: a thread writes for it. One that is through
stays until the others are: they may test, or save.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import io
import itertools
import json
import os
import runpy
import site
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler

import loft_hvd
from loft_hvd.balance.balancer import Balancer
from loft_hvd.balance.meetings import unweighed_meeting
from loft_hvd.check.notes import (
    CALLS,
    DRAFT,
    STANDSTILL_S,
    STEP,
    BalancerNote,
    Call,
    ErrorNote,
    LoaderNote,
    LossNote,
    Notes,
    OptimizerNote,
    Round,
    WaitNote,
)
from loft_hvd.config import config
from loft_hvd.data.loader import DataLoader as LoftLoader
from loft_hvd.data.sampler import BatchSampler
from loft_hvd.data.stream import StreamLoader
from loft_hvd.errors import LoftError
from loft_hvd.failures.call_sites import stack_of
from loft_hvd.metrics import Metric
from loft_hvd.optimizer.wrapper import OptimizerWrapper
from loft_hvd.transport.horovod import horovod_if_initialized, horovod_module
from loft_hvd.transport.waits import watch_backward

__all__ = ["main"]

# fmt: off
_COLLECTIVES = (  # of horovod.torch
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "sparse_allreduce_async", "allgather", "allgather_async", "grouped_allgather",
    "grouped_allgather_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "alltoall", "alltoall_async", "reducescatter", "reducescatter_async", "grouped_reducescatter",
    "grouped_reducescatter_async", "barrier", "join", "broadcast_parameters",
    "broadcast_optimizer_state", "broadcast_object", "allgather_object", "add_process_set",
    "remove_process_set",
)
# fmt: on
_OF_LOFT = ("allreduce", "allreduce_async", "average")
# fmt: off
_OF_TORCH = (  # torch.distributed
    "all_reduce", "reduce", "broadcast", "barrier", "monitored_barrier", "all_gather",
    "all_gather_into_tensor", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list",
)
# fmt: on
_MOST_CALLS = 50_000  # noted: more than a minute of short steps has
_MOST_FRAMES = 12  # of a call
_LOOK_S = 0.1
_LEAVE_S = 15.0  # longest wait for the notes of other ranks
_START_S = 300.0  # longest start: until the first backward pass
_DRAFT_S = 1.0  # between two drafts of what is noted
_FLUSH_S = 5.0  # longest for what the script has written and not flushed


def _folder_of(path: str | Path) -> str:
    return str(Path(path).resolve()) + os.sep


_LOFT = Path(loft_hvd.__file__).parent
_LIBRARIES = tuple(
    _folder_of(path)
    for path in (
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        sysconfig.get_paths()["stdlib"],
        str(_LOFT),
        str(Path(torch.__file__).parents[1]),  # packages of the user's, of the system's
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_DATA = _folder_of(_LOFT / "data")
# Who waits in a file of theirs waits for other ranks, or for data and arithmetic; the first that
# fits. In files of others, such as threading's, it is as in those that call them.
_WAITS = (
    (_folder_of(_LOFT / "check"), None),
    (_DATA, False),
    (_folder_of(_LOFT / "store"), False),
    (_folder_of(_LOFT / "aggregation"), False),
    (_folder_of(_LOFT), True),
    (_folder_of(Path(torch.__file__).parent / "utils" / "data"), False),
    (_folder_of(Path(torch.__file__).parent / "distributed"), True),
)
_AUTOGRAD = _folder_of(Path(torch.__file__).parent / "autograd")
_BUSY_S = 2.0  # of CPU time, that a backward pass which waits does not use up while it stands


@functools.cache
def _is_script(file: str) -> bool:
    """Say whether a file is the script's, or one of its own modules."""
    return not file.startswith("<") and not str(Path(file).resolve()).startswith(_LIBRARIES)


@functools.cache
def _waits(file: str) -> bool | None:
    """Say whether code of a file waits for other ranks; None where that is its caller's."""
    path = str(Path(file).resolve())
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and path.startswith(_folder_of(Path(str(horovod.__file__)).parents[1])):
        return True
    if path.startswith(_AUTOGRAD) and config().is_torchrun:
        return True  # DDP waits within the backward pass; ``look`` tells it from one that computes
    return next((waits for folder, waits in _WAITS if path.startswith(folder)), None)


def _waiting_lines(stack: Sequence[FrameType]) -> Sequence[FrameType]:
    """Return a stack from the script's line on that waits for other ranks; () if none does."""
    waits: bool | None = None
    for depth, frame in enumerate(stack):
        if _is_script(frame.f_code.co_filename):
            return stack[depth:] if waits else ()
        if waits is None:
            # hvd.init() takes as long as the slowest rank's imports.
            waits = _waits(frame.f_code.co_filename) and frame.f_code.co_name != "init"
    return ()


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Go through a frame of this thread's own and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_called_from(frame: FrameType | None, is_it: Callable[[FrameType], bool]) -> bool:
    """Say whether one of a frame's callers, or itself, is it."""
    return any(map(is_it, _callers(frame)))


def _is_of_data(frame: FrameType) -> bool:
    return str(Path(frame.f_code.co_filename).resolve()).startswith(_DATA)


def _broadcasts_state(frame: FrameType) -> bool:
    """Say whether a frame is Horovod's that sets an optimizer's state up, by a step of its own."""
    code = frame.f_code
    return code.co_name == "broadcast_optimizer_state" and not _is_script(code.co_filename)


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the script from a frame on."""
    return next(iter(_lines(_callers(frame))), "?")


def _lines(stack: Iterable[FrameType]) -> list[str]:
    """Return the lines of the script in a stack, the innermost first."""
    own = (frame for frame in stack if _is_script(frame.f_code.co_filename))
    return [
        f"{frame.f_code.co_filename}:{frame.f_lineno}"
        for frame in itertools.islice(own, _MOST_FRAMES)
    ]


def _is_direct(frame: FrameType | None) -> bool:
    """Say whether the script itself makes a call, and no library for it."""
    return frame is not None and _is_script(frame.f_code.co_filename)


@dataclass
class _OpenRound:
    """A round, and how it has been trained so far."""

    note: Round
    kind: str  # of its loader
    began: int  # trained batches of all loaders before it
    num_trained: int = 0  # trained batches in which one of its own was new


class _CountedBatches:
    """The iterator of a loader, which tells of each batch."""

    def __init__(self, batches: Iterator[Any], came: Callable[[], None]) -> None:
        self._batches = batches
        self._came = came

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._came()
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's have a length, ours have none

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not there yet, while being copied
            raise AttributeError(name)
        return getattr(self._batches, name)


class ScriptWatch:
    """The notes of this rank, and what writes them."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.notes = Notes(rank=-1)
        self.is_begun = threading.Event()  # it has trained
        self._folder = folder
        self._lock = threading.RLock()  # a signal handler of the script's may call, too
        self._num_rounds = self._num_trained = 0
        self._new: list[_OpenRound] = []  # those with a batch since the last backward pass
        self._newest_kind = ""  # of the loader that the newest batch is of
        self._known: dict[int, tuple[Optimizer, str, bool]] = {}  # by id: itself, line, noted
        self._stepped: dict[int, int] = {}  # by id: backward passes before the newest step
        self._open_steps: dict[int, Call] = {}  # by id
        self._watched: set[type] = {LoftLoader, BatchSampler, DistributedSampler}  # set_epoch of
        self._balancers: list[tuple[Balancer, BalancerNote]] = []
        self._places: set[tuple[str, str]] = set()  # of calls so far, with what they are
        self._drafted = 0.0  # when
        self._num_signs = 0  # of work
        self._standing: tuple[object, ...] = ()  # where it waits, and signs by then
        self._since = 0.0
        self._wait: WaitNote | None = None
        self.notes.says_set_epoch = "set_epoch" in script.read_text(errors="replace")
        self.notes.is_torchrun = self._is_torchrun = config().is_torchrun
        self.notes.ignores_copies = config().copies == "ignore"

    # What is replaced.

    def install(self) -> None:
        """Replace what is watched; before the script imports anything."""
        if self._is_torchrun:
            self._install_torch()
        else:
            self._install_horovod()
        for name in _OF_LOFT:
            _replace(loft_hvd, name, self._collective(f"loft.{name}", getattr(loft_hvd, name)))
        _replace(Metric, "avg", property(self._collective("Metric.avg", vars(Metric)["avg"].fget)))
        _replace(loft_hvd, "DistributedOptimizer", self._maker(loft_hvd.DistributedOptimizer))
        watch_backward(self._met_in_backward)
        for name in ("cross_entropy", "nll_loss"):  # what modules and models call, too
            function = getattr(torch.nn.functional, name)
            _replace(torch.nn.functional, name, self._loss(function))
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for kind, name, around in (
            (OptimizerWrapper, "reduce_and_step", self._step),
            (torch.Tensor, "backward", self._backward),
            (Balancer, "__init__", self._balancer_made),
            (Balancer, "step", self._balancer_step),
            (Balancer, "count", self._counts),
            (Balancer, "count_scaled", self._counts),
            (DataLoader, "__init__", self._loader_made),
            (DataLoader, "__iter__", self._loader_begun),
            (LoftLoader, "__init__", self._loader_made),
            (LoftLoader, "__iter__", self._loader_begun),
            (StreamLoader, "__init__", self._loader_made),
            (StreamLoader, "__iter__", self._loader_begun),
            (LoftLoader, "set_epoch", self._epoch_set),
            (BatchSampler, "set_epoch", self._epoch_set),
            (DistributedSampler, "set_epoch", self._epoch_set),
        ):
            _replace(kind, name, around(vars(kind)[name]))

    def _install_horovod(self) -> None:
        hvd = horovod_module()
        for name in _COLLECTIVES:
            if hasattr(hvd, name):
                _replace(hvd, name, self._collective(f"hvd.{name}", getattr(hvd, name)))
        _replace(hvd, "DistributedOptimizer", self._maker(hvd.DistributedOptimizer))

    def _install_torch(self) -> None:
        for name in _OF_TORCH:
            _replace(dist, name, self._collective(f"dist.{name}", getattr(dist, name)))
        for kind in (DistributedDataParallel, fsdp.FullyShardedDataParallel):
            _replace(kind, "__init__", self._reducer(vars(kind)["__init__"]))
        _replace(fsdp, "fully_shard", self._reducer(fsdp.fully_shard))

    def _reducer(self, function: Any) -> Any:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            self.notes.has_reducer = True
            return function(*args, **kwargs)

        return make

    def _collective(self, what: str, function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if not _is_direct(frame):
                return function(*args, **kwargs)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the call says so itself
                return function(*args, **kwargs)
            name, tensor = given.get("name"), given.get("tensor")
            note = Call(
                what,
                _lines(_callers(frame)),
                name=None if name is None else str(name),
                members=_members(given.get("process_set")) or _members_of_group(given.get("group")),
                num_values=tensor.numel() if isinstance(tensor, torch.Tensor) else 0,
                # A loop over torch's loader gives all ranks batches of one size.
                is_mean_of_one=self._newest_kind != "torch" and _is_mean_of_one(what, given),
                # Horovod matches what runs beside the script by name, in any order.
                is_ordered="_async" not in what or name is None,
            )
            self._add(note)
            result = function(*args, **kwargs)
            self._finish(note)
            return result

        return call

    def _add(self, call: Call) -> None:
        call.round = self._num_rounds
        with self._lock:
            is_noted = len(self.notes.calls) < _MOST_CALLS
            if is_noted:
                self.notes.calls.append(call)
        self._num_signs += 1
        # Now: at the end hvd.shutdown() may have been called, or an elastic job have other ranks.
        if self.notes.rank < 0 and (rank := _rank()) is not None:
            self.notes.rank = rank
        if self._is_torchrun and is_noted:
            self._draft_call(call)

    # Gloo ends a process, at once, in which collectives of two kinds meet: then these are read.

    def _draft_call(self, call: Call) -> None:
        with (self._folder / f"{os.getpid()}{CALLS}").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(asdict(call))}\n")
        if (call.what, call.place) not in self._places:
            self._places.add((call.what, call.place))
            self._draft()

    def _draft(self) -> None:
        """Write all notes but calls, in case that this is the last chance."""
        part = self._folder / f"{os.getpid()}.part-draft"
        part.write_text(json.dumps(asdict(replace(self.notes, calls=[], ended="crashed"))))
        part.replace(self._folder / f"{os.getpid()}{DRAFT}")

    def _finish(self, call: Call) -> None:
        call.is_done = True
        self._num_signs += 1

    def _maker(self, function: Any) -> Any:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            self.notes.has_reducer = True
            # Ours around Horovod's: it is the outer one that steps.
            self._known.pop(id(args[0] if args else kwargs.get("optimizer")), None)
            frame = sys._getframe(1)
            if _is_direct(frame):
                self._known[id(made)] = made, _place(frame), False
            return made

        return make

    def _step(self, function: Any) -> Any:
        @functools.wraps(function)  # with what torch has noted on it
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            note = self._note_step(optimizer, sys._getframe(1))
            result = function(optimizer, *args, **kwargs)
            if note is not None:
                self._finish(note)
            return result

        return step

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note a step of Horovod's optimizer, before it reduces; ours is replaced itself."""
        if isinstance(optimizer, OptimizerWrapper):
            return
        note = self._note_step(optimizer, sys._getframe(1))
        if note is not None:
            self._open_steps[id(optimizer)] = note

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        note = self._open_steps.pop(id(optimizer), None)
        if note is not None:
            self._finish(note)

    def _note_step(self, optimizer: Any, frame: FrameType | None) -> Call | None:
        key, is_ours = id(optimizer), isinstance(optimizer, OptimizerWrapper)
        # Horovod's class steps through that of the user: one step, told of twice.
        if self._stepped.get(key) == self.notes.num_backward and not is_ours:
            return None
        if _is_called_from(frame, _broadcasts_state):
            return None
        if self._is_torchrun and self.notes.has_reducer and self.notes.num_backward:
            # The model reduces, in its backward pass; the step is where ranks must be alike.
            self._known.setdefault(key, (optimizer, _place(frame), False))
        if key not in self._known:
            if self.notes.num_backward:
                self._stepped[key] = self.notes.num_backward
                self.notes.num_plain_steps += 1
            return None
        self._stepped[key] = self.notes.num_backward
        made, place, is_noted = self._known[key]
        if not is_noted:
            self._known[key] = made, place, True
            self.notes.optimizers.append(_describe(optimizer, place))
        note = Call(STEP, _lines(_callers(frame)), members=_members_of(optimizer))
        self._add(note)
        self.is_begun.set()
        self.notes.num_steps += 1
        return note

    def _backward(self, function: Any) -> Any:
        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self.notes.num_backward:
                self.notes.first_backward = _place(sys._getframe(1))
            self.notes.num_backward += 1
            self._num_signs += 1
            self._mark_trained()
            self.is_begun.set()
            return function(*args, **kwargs)

        return backward

    def _loss(self, function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def loss(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            frame = next(
                (
                    each
                    for each in _callers(sys._getframe(1))
                    if _is_script(each.f_code.co_filename)
                ),
                None,
            )
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if frame is not None and torch.is_grad_enabled() and self._balancers:
                self._note_loss(given.arguments, _place(frame))
            return result

        return loss

    def _note_loss(self, given: Mapping[str, Any], place: str) -> None:
        """Note over how many labels a loss is a mean, and of how many samples."""
        balancer, labels = self._balancers[-1][0], given["target"]
        num_samples = balancer.forward_sizes().sizes[balancer.rank]
        # Of evaluations, and of dummy batches, nothing counts.
        is_mean = given["reduction"] == "mean" and not labels.is_floating_point()
        if not is_mean or num_samples == 0:
            return
        seen = int((labels != given["ignore_index"]).sum()), num_samples
        for note in self.notes.losses:
            if note.place == place:
                each = note.thinnest, note.fullest, seen
                note.thinnest = min(each, key=lambda pair: pair[0] / pair[1])
                note.fullest = max(each, key=lambda pair: pair[0] / pair[1])
                return
        self.notes.losses.append(LossNote(place, seen, seen))

    def _counts(self, function: Any) -> Any:
        @functools.wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            self.notes.says_counts = True
            return function(*args, **kwargs)

        return count

    def _met_in_backward(self, frame: FrameType) -> None:
        if not self.notes.met_backward:
            self.notes.met_backward = unweighed_meeting(frame) or ""

    def _mark_trained(self) -> None:
        """Mark the rounds that the batches of this backward pass are of.

        That of the newest batch is one. Another with a new batch may be trained beside it, or be
        an evaluation's that is kept open and asked for a batch now and then.
        """
        if not self._new:
            return
        self._num_trained += 1
        for each in self._new:
            each.num_trained += 1
            is_usual = 4 * each.num_trained > 3 * (self._num_trained - each.began)
            if each is self._new[-1] or (each.num_trained > 1 and is_usual):
                each.note.is_trained = True
        self._new = []

    def _balancer_made(self, function: Any) -> Any:
        @functools.wraps(function)
        def init(balancer: Balancer, *args: Any, **kwargs: Any) -> None:
            function(balancer, *args, **kwargs)
            policy = balancer._options.policy
            note = BalancerNote(_place(sys._getframe(1)), policy.name, policy.is_adaptive)
            self.notes.balancers.append(note)
            self._balancers.append((balancer, note))

        return init

    def _balancer_step(self, function: Any) -> Any:
        @functools.wraps(function)
        def step(balancer: Balancer, *args: Any, **kwargs: Any) -> Any:
            for each, note in self._balancers:
                note.has_steps = note.has_steps or each is balancer
            return function(balancer, *args, **kwargs)

        return step

    def _loader_made(self, function: Any) -> Any:
        @functools.wraps(function)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            function(loader, *args, **kwargs)
            frame = sys._getframe(1)
            if _is_direct(frame):
                note = _describe_loader(loader, _place(frame))
                self.notes.loaders.append(note)
                object.__setattr__(loader, "_loft_check", note)
                self._watch_epochs(_sampler_of(loader))

        return init

    def _watch_epochs(self, sampler: Any) -> None:
        """Watch ``set_epoch`` of a sampler of the script's own class."""
        for kind in type(sampler).__mro__:
            if "set_epoch" in vars(kind) and kind not in self._watched:
                self._watched.add(kind)
                _replace(kind, "set_epoch", self._epoch_set(vars(kind)["set_epoch"]))

    def _loader_begun(self, function: Any) -> Any:
        @functools.wraps(function)
        def begin(loader: Any) -> Iterator[Any]:
            note = getattr(loader, "_loft_check", None)
            batches: Iterator[Any] = function(loader)
            frame = sys._getframe(1)
            # The source of a StreamLoader gives what the plan takes.
            if note is None or _is_called_from(frame, _is_of_data):
                return batches
            this = Round(_epoch_of(loader), begun=_lines(_callers(frame)))
            note.rounds.append(this)
            self._num_rounds += 1
            opened = _OpenRound(this, note.kind, self._num_trained)
            return _CountedBatches(batches, functools.partial(self._batch_came, opened))

        return begin

    def _batch_came(self, this: _OpenRound) -> None:
        this.note.num_batches += 1
        self._num_signs += 1
        self._newest_kind = this.kind
        self._new = [each for each in self._new if each is not this]
        self._new.append(this)

    def _epoch_set(self, function: Any) -> Any:
        @functools.wraps(function)
        def set_epoch(sampler: Any, *args: Any, **kwargs: Any) -> Any:
            self.notes.says_set_epoch = True
            return function(sampler, *args, **kwargs)

        return set_epoch

    # How it ends.

    def write(self, ended: str, error: BaseException | None = None) -> None:
        """Write the notes, once: what comes later is a consequence."""
        with self._lock:
            path = self._folder / f"{os.getpid()}.json"
            if path.exists():
                return
            # So is an error after all were asked to end: the one who asked has told why.
            if error is not None and self._is_to_stop():
                ended, error = "stopped", None
            self.notes.ended = ended
            if error is not None:
                self.notes.error = _describe_error(error)
            rank = _rank()
            if self.notes.rank < 0:
                self.notes.rank = config().rank if rank is None else rank
            self.notes.wait = self._wait if ended == "stopped" else None
            # Beside Horovod it may reduce what is not seen; DeepSpeed's engine does.
            if not self._is_torchrun and dist.is_available() and dist.is_initialized():
                self.notes.has_reducer = True
            self.notes.has_reducer |= "deepspeed" in sys.modules
            for balancer, note in self._balancers:
                note.sizes = list(balancer.history[-1].sizes)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(asdict(self.notes)), encoding="utf-8")
            part.replace(path)

    def end_others(self) -> None:
        """Ask all ranks to write their notes and to end."""
        (self._folder / "stop").touch()

    def _is_to_stop(self) -> bool:
        return (self._folder / "stop").exists()

    def _have_all_written(self, num_ranks: int) -> bool:
        return len(list(self._folder.glob("*.json"))) >= num_ranks

    def wait_for_all(self, num_ranks: int) -> None:
        """Wait until every rank has written its notes, or until it should have."""
        ends = time.monotonic() + _LEAVE_S
        while time.monotonic() < ends and not self._have_all_written(num_ranks):
            time.sleep(_LOOK_S)

    def look(self, stack: Sequence[FrameType], now: float) -> float:
        """Return for how long the script, whose stack this is, has waited for others."""
        waiting = _waiting_lines(stack)
        # A loop comes back to its line: then there are signs of work.
        busy = int(time.process_time() / _BUSY_S) if self._is_torchrun else 0
        standing = (id(waiting[0]), waiting[0].f_lasti, self._num_signs, busy) if waiting else ()
        if not standing or standing != self._standing:
            self._since = now
        self._standing = standing
        self._wait = WaitNote(_lines(waiting), now - self._since) if standing else None
        return now - self._since

    def _tell_standing(self, stood_s: float) -> None:
        """Tell the other ranks whether this one stands still."""
        sign = self._folder / f"{os.getpid()}.stands"
        if stood_s >= STANDSTILL_S:
            sign.touch()
        else:
            sign.unlink(missing_ok=True)

    def _do_all_stand(self, num_ranks: int) -> bool:
        stands = len(list(self._folder.glob("*.stands")))
        return stands > 0 and stands + len(list(self._folder.glob("*.json"))) >= num_ranks

    def run_out(self, seconds: float, num_ranks: int) -> None:
        """End this rank after so many seconds of work, or when another one asks; on a thread."""
        main = threading.main_thread().ident or 0
        ends, is_begun = time.monotonic() + _START_S, False
        while not self._is_to_stop():
            now = time.monotonic()
            if self.is_begun.is_set() and not is_begun:
                ends, is_begun = now + seconds, True
            stood_s = self.look(stack_of(main), now)
            # One that has begun to stand is looked at until it is known whether it goes on.
            if now >= ends and not 0.0 < stood_s < STANDSTILL_S:
                break
            if not self._folder.exists():  # nobody reads the notes any more
                _leave(1)
            self._tell_standing(stood_s)
            if self._is_torchrun and self.is_begun.is_set() and now > self._drafted + _DRAFT_S:
                self._drafted = now
                self._draft()
            if self._do_all_stand(num_ranks) or self._have_all_written(num_ranks):
                break
            time.sleep(_LOOK_S)
        if self._folder.exists():
            self.end_others()
            self.write("stopped")
            self.wait_for_all(num_ranks)
        _leave(0)


def _leave(code: int) -> None:
    """End the process, with what it has written: a collective may hang the main thread for ever."""
    flush = threading.Thread(target=_flush, name="check flush", daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    os._exit(code)


def _flush() -> None:
    """Write what open files hold: those of Python, then those of C."""
    # A thread that is half through making a tuple may die of a SystemError where somebody else has
    # come to refer to it: this process ends, and nobody is told of it any more.
    sys.excepthook = threading.excepthook = _say_nothing
    tracked = gc.get_objects()  # noqa: TID251 - no other list has all files
    files = [each for each in tracked if issubclass(type(each), io.IOBase)]
    for file in [sys.stdout, sys.stderr, *files]:
        try:
            if not file.closed and file.writable():
                file.flush()
        except (OSError, ValueError, AttributeError):  # gone, detached, or half made
            continue
    ctypes.CDLL(None).fflush(None)


def _say_nothing(*_: object) -> None:
    """In place of a traceback."""


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _is_mean_of_one(what: str, given: Mapping[str, Any]) -> bool:
    """Say whether a call averages a number over ranks, such as a loss: no vector, no flag."""
    tensor, operation = given.get("tensor"), given.get("op")
    if not isinstance(tensor, torch.Tensor):
        return False
    if what == "dist.all_reduce":
        is_mean = operation == dist.ReduceOp.AVG
    elif not what.startswith("hvd.allreduce"):
        return False
    elif operation is None:
        is_mean = given.get("average") in (None, True)
    else:
        is_mean = operation == horovod_module().Average
    return tensor.ndim == 0 and tensor.is_floating_point() and is_mean


def _members(process_set: Any) -> list[int] | None:
    """Return the ranks of a process set; None for all."""
    if process_set is None or getattr(process_set, "process_set_id", None) == 0:
        return None
    ranks = getattr(process_set, "ranks", None)
    return None if ranks is None else list(ranks)


def _members_of_group(group: Any) -> list[int] | None:
    """Return the ranks of a process group; None for all."""
    if group is None or group is dist.group.WORLD or not dist.is_initialized():
        return None
    return sorted(dist.get_process_group_ranks(group))


def _rank() -> int | None:
    """Return this rank where ranks are connected."""
    if (hvd := horovod_if_initialized()) is not None:
        return int(hvd.rank())
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def _members_of(optimizer: Any) -> list[int] | None:
    options = vars(optimizer).get("_options", optimizer)  # of ours; Horovod's keeps it itself
    return _members(getattr(options, "process_set", None))


def _describe(optimizer: Any, place: str) -> OptimizerNote:
    digest = 0
    options: dict[str, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):  # each rank has a part of its own
                continue
            values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest = zlib.crc32(values.numpy().tobytes(), digest)
        options |= {
            f"{name} of group {number}": repr(value)
            for name, value in group.items()
            if isinstance(value, bool | int | float | str | tuple)
        }
    return OptimizerNote(place, digest, options, _members_of(optimizer))


def _describe_loader(loader: Any, place: str) -> LoaderNote:
    is_ours = isinstance(loader, LoftLoader | StreamLoader)
    kind = "loft" if is_ours or isinstance(loader.batch_sampler, BatchSampler) else "torch"
    batch_size = None if is_ours else getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return LoaderNote(kind, place, batch_size, _shuffles(_sampler_of(loader)))


def _sampler_of(loader: Any) -> Any:
    """Return what a loader asks for its order: the first that takes epochs, or None."""
    if isinstance(loader, LoftLoader | StreamLoader):
        return loader if isinstance(loader, LoftLoader) else None
    batches = loader.batch_sampler
    each = batches, getattr(batches, "sampler", None), loader.sampler
    return next((sampler for sampler in each if hasattr(sampler, "set_epoch")), None)


def _shuffles(sampler: Any) -> bool:
    """Say whether a sampler has another order in each epoch."""
    if isinstance(sampler, LoftLoader | BatchSampler):
        return bool(sampler._batches.settings.shuffle)
    return sampler is not None and bool(getattr(sampler, "shuffle", True))


def _epoch_of(loader: Any) -> int | None:
    sampler = _sampler_of(loader)
    is_ours = isinstance(sampler, LoftLoader | BatchSampler)
    epoch = getattr(sampler._batches if is_ours else sampler, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _describe_error(error: BaseException) -> ErrorNote:
    frames = [
        entry for entry in traceback.extract_tb(error.__traceback__) if _is_script(entry.filename)
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return ErrorNote(type(error).__name__, str(error), place, isinstance(error, LoftError))


def main(argv: list[str]) -> None:
    """Be a rank of the script: FOLDER SECONDS NUM_RANKS SCRIPT ARGUMENTS."""
    folder, seconds, num_ranks, script, *arguments = argv
    watch = ScriptWatch(Path(folder), Path(script))
    watch.install()
    sys.argv = [script, *arguments]
    # As for `python SCRIPT`: its folder in place of the one that `python -m` has put there.
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        del sys.path[0]
    sys.path.insert(0, str(Path(script).resolve().parent))
    limits = (float(seconds), int(num_ranks))
    ends = threading.Thread(target=watch.run_out, args=limits, name="check", daemon=True)
    ends.start()
    run: Callable[..., Any] = runpy.run_path
    # Kept to the end: what the script leaves behind may wait for ever where it is freed, as DDP on
    # Gloo, whose thread wants the interpreter's lock while that waits for the thread. An error has
    # it in its frames.
    left: list[object] = []
    try:
        left.append(run(script, run_name="__main__"))
    except BaseException as error:
        left.append(error)
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            traceback.print_exc()
            watch.write("error", error)
            watch.end_others()
            watch.wait_for_all(int(num_ranks))
            _leave(1)
    watch.write("done")
    ends.join()  # with the process: once all are done, or their time is up


if __name__ == "__main__":
    main(sys.argv[1:])
