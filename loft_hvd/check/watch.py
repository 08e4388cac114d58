"""Runs a script as one rank and notes what it calls: ``python -m loft_hvd.check.watch ...``.

Functions are replaced before the script imports them, so the script stays as it is. Each note has
the line of the script; what libraries call among themselves is none of its business.

The ranks end together: the first that reaches the limit, or fails, puts a file into a folder that
all look at, and each goes once all have written their notes. A rank that waits in a collective for
ever is no hindrance: a thread writes for it.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler

import loft_hvd
from loft_hvd.balance.balancer import Balancer
from loft_hvd.check.notes import (
    STEP,
    BalancerNote,
    Call,
    ErrorNote,
    LoaderNote,
    Notes,
    OptimizerNote,
    Round,
)
from loft_hvd.data.loader import DataLoader as LoftLoader
from loft_hvd.data.sampler import BatchSampler
from loft_hvd.errors import LoftError
from loft_hvd.metrics import Metric
from loft_hvd.optimizer.wrapper import OptimizerWrapper
from loft_hvd.transport.horovod import horovod_if_initialized, horovod_module

__all__ = ["main"]

# fmt: off
_COLLECTIVES = (  # of horovod.torch
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "allgather",
    "allgather_async", "grouped_allgather", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "barrier", "join",
    "broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "allgather_object",
)
# fmt: on
_OF_LOFT = ("allreduce", "allreduce_async", "average")
_MOST_CALLS = 50_000  # noted: more than a minute of short steps has
_MOST_FRAMES = 12  # of a call
_LOOK_S = 0.1
_LEAVE_S = 15.0  # longest wait for the notes of other ranks
_START_S = 300.0  # longest start: until the script first trains or talks to other ranks
_LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        sysconfig.get_paths()["stdlib"],
        Path(loft_hvd.__file__).parent,
    )
)


@functools.cache
def _is_script(file: str) -> bool:
    """Say whether a file is the script's, or one of its own modules."""
    return not file.startswith("<") and not str(Path(file).resolve()).startswith(_LIBRARIES)


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the script from a frame on."""
    while frame is not None and not _is_script(frame.f_code.co_filename):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _stack(frame: FrameType | None) -> list[str]:
    """Return the lines of the script from a frame on, the innermost first."""
    found: list[str] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        if _is_script(frame.f_code.co_filename):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _is_direct(frame: FrameType | None) -> bool:
    """Say whether the script itself makes a call, and no library for it."""
    return frame is not None and _is_script(frame.f_code.co_filename)


class Watch:
    """The notes of this rank, and what writes them."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.notes = Notes(rank=-1)
        self.is_begun = threading.Event()  # it has trained, or talked to other ranks
        self._folder = folder
        self._lock = threading.Lock()
        self._num_backward = self._num_rounds = 0
        self._open_rounds: list[Round] = []  # iterations that have not ended
        self._step_backward = -1  # backward passes before the newest step
        self._known: dict[int, tuple[Optimizer, str, bool]] = {}  # by id: itself, line, noted
        self._balancers: list[tuple[Balancer, BalancerNote]] = []
        self.notes.says_set_epoch = "set_epoch" in script.read_text(errors="replace")

    # What is replaced.

    def install(self) -> None:
        """Replace what is watched; before the script imports anything."""
        hvd = horovod_module()
        for name in _COLLECTIVES:
            if hasattr(hvd, name):
                setattr(hvd, name, self._collective(f"hvd.{name}", getattr(hvd, name)))
        for name in _OF_LOFT:
            setattr(loft_hvd, name, self._collective(f"loft.{name}", getattr(loft_hvd, name)))
        _replace(Metric, "avg", property(self._collective("Metric.avg", vars(Metric)["avg"].fget)))
        hvd.DistributedOptimizer = self._maker(hvd.DistributedOptimizer)
        _replace(loft_hvd, "DistributedOptimizer", self._maker(loft_hvd.DistributedOptimizer))
        register_optimizer_step_pre_hook(self._before_step)
        for kind, name, around in (
            (OptimizerWrapper, "reduce_and_step", self._step),
            (torch.Tensor, "backward", self._backward),
            (Balancer, "__init__", self._balancer_made),
            (Balancer, "step", self._balancer_step),
            (DataLoader, "__init__", self._loader_made),
            (DataLoader, "__iter__", self._loader_begun),
            (LoftLoader, "__init__", self._loader_made),
            (LoftLoader, "__iter__", self._loader_begun),
            (LoftLoader, "set_epoch", self._epoch_set),
            (BatchSampler, "set_epoch", self._epoch_set),
            (DistributedSampler, "set_epoch", self._epoch_set),
        ):
            _replace(kind, name, around(vars(kind)[name]))

    def _collective(self, what: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if not _is_direct(frame):
                return function(*args, **kwargs)
            note = Call(
                what,
                _stack(frame),
                is_mean_of_one=_is_mean_of_one(what, args, kwargs),
                # Horovod matches what runs beside the script by name, in any order.
                is_ordered="_async" not in what or kwargs.get("name") is None,
            )
            self._add(note)
            result = function(*args, **kwargs)
            note.is_done = True
            return result

        return call

    def _add(self, call: Call) -> None:
        call.round = self._num_rounds
        with self._lock:
            if len(self.notes.calls) < _MOST_CALLS:
                self.notes.calls.append(call)
        self.is_begun.set()

    def _maker(self, function: Any) -> Any:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
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
                note.is_done = True
            return result

        return step

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note a step of Horovod's optimizer, before it reduces; ours is replaced itself."""
        if not isinstance(optimizer, OptimizerWrapper):
            self._note_step(optimizer, sys._getframe(1))

    def _note_step(self, optimizer: Any, frame: FrameType | None) -> Call | None:
        if id(optimizer) not in self._known:
            return None
        made, place, is_noted = self._known[id(optimizer)]
        if not is_noted:
            self._known[id(optimizer)] = made, place, True
            self.notes.optimizers.append(_describe(optimizer, place))
        # Horovod's class steps through that of the user: one step, told of twice.
        if self._num_backward == self._step_backward and not isinstance(
            optimizer, OptimizerWrapper
        ):
            return None
        self._step_backward = self._num_backward
        note = Call(STEP, _stack(frame))
        self._add(note)
        self.notes.num_steps += 1
        return note

    def _backward(self, function: Any) -> Any:
        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._num_backward += 1
            for each in self._open_rounds:
                each.is_trained = True
            return function(*args, **kwargs)

        return backward

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

        return init

    def _loader_begun(self, function: Any) -> Any:
        @functools.wraps(function)
        def begin(loader: Any) -> Iterator[Any]:
            note = getattr(loader, "_loft_check", None)
            batches = function(loader)
            return batches if note is None else self._count(batches, note, _epoch_of(loader))

        return begin

    def _count(self, batches: Iterator[Any], note: LoaderNote, epoch: int | None) -> Iterator[Any]:
        """Yield batches, and note how many there were, and whether they were trained on."""
        this = Round(epoch)
        self._num_rounds += 1
        note.rounds.append(this)
        self._open_rounds.append(this)
        try:
            for batch in batches:
                this.num_batches += 1
                yield batch
        finally:
            self._open_rounds.remove(this)

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
            self.notes.ended = ended
            if error is not None:
                self.notes.error = _describe_error(error)
            hvd = horovod_if_initialized()
            self.notes.rank = -1 if hvd is None else hvd.rank()
            for balancer, note in self._balancers:
                note.sizes = list(balancer.history[-1].sizes)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(asdict(self.notes)), encoding="utf-8")
            part.replace(path)

    def end_others(self) -> None:
        """Ask all ranks to write their notes and to end."""
        (self._folder / "stop").touch()

    def wait_for_all(self, num_ranks: int) -> bool:
        """Wait until every rank has written its notes; say whether all did."""
        ends = time.monotonic() + _LEAVE_S
        while time.monotonic() < ends:
            if len(list(self._folder.glob("*.json"))) >= num_ranks:
                return True
            time.sleep(_LOOK_S)
        return False

    def run_out(self, seconds: float, num_ranks: int) -> None:
        """End this rank after so many seconds of work, or when another one asks; on a thread."""
        latest = time.monotonic() + _START_S
        while time.monotonic() < latest and not (self._folder / "stop").exists():
            if self.is_begun.wait(_LOOK_S):
                break
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not (self._folder / "stop").exists():
            time.sleep(_LOOK_S)
        self.end_others()
        self.write("stopped")
        self.wait_for_all(num_ranks)
        os._exit(0)


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _is_mean_of_one(what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call averages a single number over ranks."""
    if not what.startswith("hvd.allreduce"):
        return False
    tensor = args[0] if args else kwargs.get("tensor")
    hvd = horovod_module()
    average = args[1] if len(args) > 1 else kwargs.get("average")
    operation = kwargs.get("op")
    is_mean = operation == hvd.Average if operation is not None else average in (None, True)
    return isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and bool(is_mean)


def _describe(optimizer: Any, place: str) -> OptimizerNote:
    digest = 0
    options: dict[str, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest = zlib.crc32(values.numpy().tobytes(), digest)
        options |= {
            f"{name} of group {number}": repr(value)
            for name, value in group.items()
            if isinstance(value, bool | int | float | str | tuple)
        }
    return OptimizerNote(place, digest, options)


def _describe_loader(loader: Any, place: str) -> LoaderNote:
    if isinstance(loader, LoftLoader):
        return LoaderNote("loft", place, shuffles=bool(loader._batches.settings.shuffle))
    is_ours = isinstance(loader.batch_sampler, BatchSampler)
    sampler = loader.batch_sampler if is_ours else loader.sampler
    has_epochs = hasattr(sampler, "set_epoch") and bool(getattr(sampler, "shuffle", True))
    return LoaderNote("loft" if is_ours else "torch", place, loader.batch_size, has_epochs)


def _epoch_of(loader: Any) -> int | None:
    for each in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        batches = getattr(each, "_batches", None)  # of ours
        epoch = getattr(each if batches is None else batches, "epoch", None)
        if isinstance(epoch, int):
            return epoch
    return None


def _describe_error(error: BaseException) -> ErrorNote:
    frames = [
        entry for entry in traceback.extract_tb(error.__traceback__) if _is_script(entry.filename)
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return ErrorNote(type(error).__name__, str(error), place, isinstance(error, LoftError))


def main(argv: list[str]) -> None:
    """Be a rank of the script: FOLDER SECONDS NUM_RANKS SCRIPT ARGUMENTS."""
    folder, seconds, num_ranks, script, *arguments = argv
    watch = Watch(Path(folder), Path(script))
    watch.install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    limits = (float(seconds), int(num_ranks))
    threading.Thread(target=watch.run_out, args=limits, name="check", daemon=True).start()
    run: Callable[..., Any] = runpy.run_path
    try:
        run(script, run_name="__main__")
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            traceback.print_exc()
            watch.write("error", error)
            watch.end_others()
            watch.wait_for_all(int(num_ranks))
            os._exit(1)
    watch.write("done")
    if not watch.wait_for_all(int(num_ranks)):  # the others wait for what this rank left out
        watch.end_others()
        watch.wait_for_all(int(num_ranks))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
