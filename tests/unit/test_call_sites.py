"""Where a thread waits, as seen from another one, in an engine that is made up."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from loft_hvd._native import require_extension
from loft_hvd.failures.call_sites import (
    CallSite,
    CallSiteWatch,
    StandWatch,
    engine_call,
    locals_of,
    stack_of,
)
from loft_hvd.transport import waits

# Its wait is a call of C, as Horovod's is: the innermost frame is the engine's own.
ENGINE = """
def synchronize(handle):
    arrive()
    wait(True, 10.0)

def allreduce(tensor, name=None, process_set=None):
    return forward(7)

def forward(handle):
    return synchronize(handle)
"""
OWN = """
def step(call):
    call()
"""
SOME, ALL = SimpleNamespace(process_set_id=3), SimpleNamespace(process_set_id=0)


def module(name: str, text: str, **names: object) -> Any:
    """Return a module of that name, whose code is a text."""
    scope: dict[str, Any] = {"__name__": name, **names}
    exec(compile(text, f"/site-packages/{name}.py", "exec"), scope)
    return SimpleNamespace(**scope)


class Waiter:
    """A thread that waits in C until it has been looked at."""

    def __init__(self) -> None:
        self._arrived, self._over = threading.Semaphore(0), threading.Lock()
        self._over.acquire()
        self.names = {"arrive": self._arrived.release, "wait": self._over.acquire}

    def look(self, call: Callable[[], object], clock: Callable[[], float]) -> list[CallSite]:
        """Look twice at a thread that is in a call."""
        thread = threading.Thread(target=call)
        thread.start()
        assert self._arrived.acquire(timeout=10.0)
        watch = CallSiteWatch(clock)
        found = [watch.look(thread.ident or 0) for _ in range(2)]
        self._over.release()
        thread.join(10.0)
        return found


@pytest.fixture
def waiter() -> Waiter:
    return Waiter()


def look(waiter: Waiter, call: Callable[[], object]) -> CallSite:
    seconds = iter((5.0, 8.5))
    first, second = waiter.look(call, lambda: next(seconds))
    assert (first.call_s, second.call_s) == (0.0, 3.5 if second.call else 0.0)
    return second


@pytest.mark.parametrize("name", ["horovod.torch.mpi_ops", "torch.distributed.distributed_c10d"])
def test_a_scripts_own_call_of_the_engine_is_found_with_its_line(name: str, waiter: Waiter) -> None:
    engine = module(name, ENGINE, **waiter.names)

    def average_metric() -> None:
        engine.allreduce(0, name="train loss")

    site = look(waiter, average_metric)
    assert site.call == "allreduce 'train loss'"
    assert site.line.startswith("test_call_sites.py:")
    assert site.line.endswith(" in average_metric")
    assert CallSite.decode(site.encode()) == site


def test_an_operation_over_some_ranks_only_is_not_judged(waiter: Waiter) -> None:
    engine = module("horovod.torch.mpi_ops", ENGINE, **waiter.names)
    assert look(waiter, lambda: engine.allreduce(0, "x", SOME)).call == ""


def test_an_operation_over_the_set_of_all_ranks_is(waiter: Waiter) -> None:
    engine = module("horovod.torch.mpi_ops", ENGINE, **waiter.names)
    assert look(waiter, lambda: engine.allreduce(0, None, ALL)).call == "allreduce"


def test_a_wait_of_our_own_is_not_outside_but_has_the_scripts_line(waiter: Waiter) -> None:
    engine = module("horovod.torch.mpi_ops", ENGINE, **waiter.names)
    own = module("loft_hvd.transport.base", OWN)

    def train() -> None:
        own.step(engine.allreduce.__get__(0))

    site = look(waiter, train)
    assert site.call == ""
    assert site.line.endswith(" in train")


def test_a_thread_that_computes_or_has_ended_waits_nowhere(waiter: Waiter) -> None:
    script = module("__main__", ENGINE, **waiter.names)
    assert look(waiter, lambda: script.allreduce(0)).call == ""
    assert CallSiteWatch().look(-1) == CallSite()


def test_the_engines_function_that_the_main_thread_hangs_in_is_found_whoever_called_it() -> None:
    """As Horovod's optimizer does below ``loft.attach``."""
    is_over, found = threading.Lock(), []
    is_over.acquire()

    def watch() -> None:
        for _ in range(500):  # 5 s at most
            if call := engine_call():
                found.append(call)
                break
            threading.Event().wait(0.01)
        is_over.release()

    thread = threading.Thread(target=watch)
    names = {"arrive": thread.start, "wait": is_over.acquire}
    engine = module("horovod.torch.mpi_ops", ENGINE, **names)
    module("loft_hvd.optimizer.attach", OWN).step(lambda: engine.allreduce(0))
    thread.join(10.0)
    assert found == ["synchronize"]
    assert engine_call() == ""


def two_steps() -> Any:
    yield
    yield


def test_a_thread_stands_while_it_is_seen_in_one_instruction_of_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls = 100.0, [two_steps(), two_steps()]
    watch = StandWatch(lambda: now)

    def seconds_in(call: Any) -> float:
        stack = [] if call is None else [call.gi_frame]
        monkeypatch.setattr("loft_hvd.failures.call_sites.stack_of", lambda thread, most: stack)
        return watch.look(7)

    for call in calls:  # the second one stands at the same instruction
        next(call)
        assert seconds_in(call) == 0.0
        now += 3.0
        assert seconds_in(call) == 3.0
    next(call)
    assert seconds_in(call) == 0.0
    assert seconds_in(None) == math.inf


# Collections begin in the thread that looks, and their destructors let the main thread run, which
# starts threads.
COLLECTIONS = """
import gc, sys, threading, time
from loft_hvd.failures.call_sites import engine_call

class Garbage:
    def __init__(self):
        self.own = self
    def __del__(self):
        global num_gone
        num_gone += 1
        time.sleep(0.0005)

class Plain:
    pass

def look():
    while True:
        engine_call()
        Plain()

def spin():
    for _ in range(20):
        pass

sys.setswitchinterval(1e-5)
gc.collect()
gc.set_threshold(8)
threading.Thread(target=look, daemon=True).start()
for _ in range(60):
    num_gone = 0
    gc.disable()
    made = [Garbage() for _ in range(10)]
    del made
    gc.enable()
    until = time.monotonic() + 1.0
    while num_gone == 0 and time.monotonic() < until:
        spin()
    while num_gone < 10 and time.monotonic() < until:
        threading.Thread(target=int).start()
print(gc.isenabled(), flush=True)
import os
os._exit(0)
"""


def test_looking_while_garbage_is_collected_and_threads_start_does_not_hang() -> None:
    run = [sys.executable, "-c", COLLECTIONS]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


class CollectionsCounted:
    """How many collections begin while nearly every new object begins one."""

    def __init__(self) -> None:
        self.begun = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> CollectionsCounted:
        gc.callbacks.append(self._note)
        gc.set_threshold(1)
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._before)
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        self.begun += phase == "start"


def deeper(depth: int, call: Callable[[], object]) -> object:
    handle = call() if depth == 0 else deeper(depth - 1, call)
    return handle


def test_no_collection_begins_amid_a_look_at_another_threads_frames() -> None:
    """A destructor in it would let that thread go on, and leave the frames that are read."""
    native, arrived, over = require_extension(), threading.Event(), threading.Lock()
    over.acquire()

    def wait() -> bool:
        arrived.set()
        return over.acquire(timeout=10.0)

    thread = threading.Thread(target=deeper, args=(50, wait))
    thread.start()
    assert arrived.wait(10.0)
    with CollectionsCounted() as collections:
        stack = native.stack_of(thread.ident, 100)
        outermost = next(each for each in reversed(stack) if each.f_code is deeper.__code__)
        found = native.locals_of(outermost, ["depth", "call", "handle"])
    begun = collections.begun  # beside the look; 28 where f_back and f_locals are asked
    over.release()
    thread.join(10.0)
    assert found == {"depth": 50, "call": wait}  # the third is not set yet
    assert sum(frame.f_code is deeper.__code__ for frame in stack) == 51
    assert begun <= 5


def test_variables_of_a_module_stay_as_they_are() -> None:
    scope: dict[str, Any] = {"look": lambda: locals_of(sys._getframe(1), "name"), "name": "kept"}
    exec("found = look()", scope)
    assert scope["name"] == "kept"
    assert scope["found"] == {}


class Big:
    """What a script lets go of."""


def test_a_look_keeps_no_variable_of_the_script_alive() -> None:
    big = Big()
    gone = weakref.ref(big)
    assert locals_of(sys._getframe(), "gone", "none") == {"gone": gone}
    del big
    assert gone() is None


def test_a_wait_of_the_engines_that_is_timed_for_us_is_the_engines() -> None:
    module: Any = SimpleNamespace(wait=lambda: found.append(stack_of(threading.get_ident())))
    found: list[list[FrameType]] = []
    waits.meter(module, "wait")
    module.wait()
    names = [frame.f_globals["__name__"] for frame in found[0]]
    assert names[1:3] == [__name__] * 2  # behind stack_of itself: the call, and who has made it
    assert waits.__name__ not in names
