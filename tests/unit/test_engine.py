"""The engine's thread and its errors, on ranks that are threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.config import config
from loft_hvd.errors import LoftError, TransportError
from loft_hvd.pipeline.buckets import Bucket, ParameterSpec, lay_out
from loft_hvd.pipeline.engine import Engine
from loft_hvd.pipeline.flights import ProgressThread
from loft_hvd.transport.base import Channel, Work
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks
from tests.support.recording import RecordingTransport
from tests.support.streams import FakeStream, FakeStreams
from tests.support.worlds import environment
from tests.support.wrapped import give_gradients, make_parameters, make_reducer, wrap


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(".progress")]


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until, "it does not come to it"
        time.sleep(0.001)


# The thread.


def test_a_backward_pass_queues_buckets_and_never_waits_for_the_wire() -> None:
    def work(end: LocalTransport) -> list[str]:
        transport = RecordingTransport(end)
        params = make_parameters()
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=100)
        transport.names.clear()
        transport.gate.clear()
        give_gradients(params)  # every operation hangs, and yet it ends
        assert transport.names == []
        transport.gate.set()
        optimizer.synchronize()
        return transport.names

    for names in run_ranks(2, work):
        assert sum(name.endswith(".a2a") for name in names) == 3


class Refusing(RecordingTransport):
    """A transport whose all-to-alls end by their own limit, a little after a step's."""

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Any:
        time.sleep(config().timeout_s + 0.1)
        raise TransportError("no answer from the engine")


def test_a_start_that_ends_by_the_same_limit_says_why() -> None:
    def work(end: LocalTransport) -> None:
        params = make_parameters()
        optimizer = wrap(params, Refusing(end), rule=loft.Median(), bucket_bytes=100)
        give_gradients(params)
        wait_until(optimizer._world._reducer.engine._flights._turn.locked)
        with pytest.raises(TransportError, match="no answer from the engine"):
            optimizer.synchronize()

    with environment(LOFT_HVD_TIMEOUT_S="0.5"):
        run_ranks(2, work)


class Held:
    """An operation that is not done before it is let go."""

    watch = None

    def __init__(self, work: Work, may_end: threading.Event) -> None:
        self._work = work
        self._may_end = may_end

    def done(self) -> bool:
        return self._may_end.is_set() and self._work.done()

    def finish(self) -> None:
        self._work.finish()


class Holding(RecordingTransport):
    """A recording transport whose all-to-alls are done while ``may_end`` is set."""

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end)
        self.may_end = threading.Event()

    def alltoall(self, *args: Any, **options: Any) -> Any:
        return Held(super().alltoall(*args, **options), self.may_end)


def test_what_is_done_meanwhile_is_done_once_a_step_with_all_buckets_on_the_wire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ProgressThread, "wake", lambda _: None)  # so ``finish`` starts them all
    specs = [ParameterSpec(name, (50,), torch.float32) for name in "vw"]
    buckets = lay_out(specs, bucket_bytes=200)

    def work(end: LocalTransport) -> list[int]:
        transport = Holding(end)
        engine = Engine(
            Channel(transport, "loft", 30.0), buckets, [loft.Median()], pack=lambda *_: None
        )
        num_started = []

        def meanwhile() -> None:
            num_started.append(sum(name.endswith(".a2a") for name in transport.names))
            transport.may_end.set()

        for _ in range(2):
            transport.may_end.clear()
            for index in range(len(buckets)):
                engine.start(index)
            engine.finish(meanwhile=meanwhile)
        engine.close()
        return num_started

    assert len(buckets) == 2
    assert run_ranks(3, work) == [[2, 4]] * 3


def test_an_error_of_what_is_done_meanwhile_is_raised_and_ends_the_exchange() -> None:
    buckets = lay_out([ParameterSpec("w", (50,), torch.float32)], bucket_bytes=1 << 20)

    def meanwhile() -> None:
        raise KeyError("a mistake")

    def work(end: LocalTransport) -> None:
        transport = Holding(end)
        engine = Engine(
            Channel(transport, "loft", 30.0), buckets, [loft.Median()], pack=lambda *_: None
        )
        engine.start(0)
        with pytest.raises(KeyError, match="a mistake"):
            engine.finish(meanwhile=meanwhile)
        with pytest.raises(LoftError, match="has failed before"):
            engine.finish()
        engine.close()

    run_ranks(3, work)


def test_buckets_go_out_by_index_whatever_the_order_of_gradients() -> None:
    def work(end: LocalTransport) -> list[str]:
        transport = RecordingTransport(end)
        params = make_parameters()
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=100)
        transport.names.clear()
        for p in params if end.rank else reversed(params):
            give_gradients([p])
        optimizer.synchronize()
        return [name for name in transport.names if name.endswith(".a2a")]

    for names in run_ranks(3, work):
        assert [name.split(".")[-2] for name in names] == ["b00", "b01", "b02"]


def test_a_new_world_ends_the_thread_of_the_one_before() -> None:
    before = set(progress_threads())
    meet = threading.Barrier(2, timeout=20)

    def work(transport: LocalTransport) -> tuple[Any, int]:
        params = make_parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        give_gradients(params)
        optimizer.step()
        meet.wait()
        num_running = len(set(progress_threads()) - before)
        meet.wait()
        optimizer.begin_world()
        return optimizer, num_running

    assert [num_running for _, num_running in run_ranks(2, work)] == [2, 2]
    assert not set(progress_threads()) - before


def test_a_dropped_optimizer_ends_its_thread() -> None:
    before = set(progress_threads())

    def work(transport: LocalTransport) -> int:
        params = make_parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        give_gradients(params)
        optimizer.step()
        return len(set(progress_threads()) - before)

    assert max(run_ranks(2, work)) > 0
    gc.collect()
    wait_until(lambda: not set(progress_threads()) - before)


def test_an_optimizer_that_never_steps_has_no_thread() -> None:
    before = len(progress_threads())
    run_ranks(2, lambda transport: wrap(make_parameters(), transport))
    assert len(progress_threads()) <= before


# Streams of a GPU.


def is_open(engine: Engine) -> bool:
    return engine._flights._open == engine._members


def test_a_bucket_is_packed_after_what_every_stream_has_put_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd runs each hook on the stream that the parameter was used on in the forward pass."""
    streams = FakeStreams(monkeypatch)
    before: list[frozenset[str]] = []

    def work(transport: LocalTransport) -> None:
        params = make_parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        optimizer.register_outgoing_hook(lambda *_: before.append(streams.current.before))
        for number, param in enumerate(params):
            streams.current = FakeStream()
            streams.current.queue(f"gradient {number}")
            give_gradients([param])
        optimizer.synchronize()

    run_ranks(2, work)
    assert before == [{f"gradient {number}" for number in range(4)}] * 2


def test_whoever_moves_a_bucket_on_follows_those_who_did_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = FakeStreams(monkeypatch)
    engines: dict[int, Engine] = {}

    class Noting(LocalTransport):
        def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Any:
            streams.current.queue("all-gather")
            followed.append("pack" in streams.current.before)
            return super().allgather(send, recv, name=name)

    followed: list[bool] = []
    buckets = lay_out([ParameterSpec("w", (50,), torch.float32)], bucket_bytes=1 << 20)

    def work(end: LocalTransport) -> frozenset[str]:
        def pack(bucket: Bucket, values: Tensor) -> None:
            followed.append("gradient" in streams.current.before)
            streams.current.queue("pack")

        channel = Channel(Noting(end._world, end.rank), "loft", 30.0)
        engines[end.rank] = engine = Engine(channel, buckets, [loft.Median()], pack=pack)
        if end.rank == 1:  # the other one's thread has packed, and its user waits by now
            wait_until(lambda: 0 in engines and is_open(engines[0]))
            wait_until(lambda: engines[0]._flights._num_awaiting > 0)
        streams.current.queue("gradient")  # by hand: no hook has told of it
        engine.start(0)
        if end.rank == 0:
            wait_until(lambda: is_open(engine))
        engine.finish()
        engine.close()
        return streams.current.before

    assert run_ranks(2, work)[0] >= {"pack", "all-gather"}
    assert followed == [True] * 4


def test_who_finds_all_done_follows_who_did_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a script on a stream of its own would read results before they are there."""
    streams = FakeStreams(monkeypatch)
    buckets = lay_out([ParameterSpec("w", (50,), torch.float32)], bucket_bytes=1 << 20)

    def work(end: LocalTransport) -> frozenset[str]:
        def pack(bucket: Bucket, values: Tensor) -> None:
            streams.current.queue("pack")

        engine = Engine(Channel(end, "loft", 30.0), buckets, [loft.Median()], pack=pack)
        engine.start(0)
        wait_until(lambda: engine._members[0].has_arrived)  # by its thread
        engine.finish()
        engine.close()
        return streams.current.before

    assert all("pack" in before for before in run_ranks(2, work))


# Errors.


def test_a_turn_that_nobody_gives_back_keeps_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    """As where the user interrupts a wait right after it has taken the turn."""

    def work(transport: LocalTransport) -> bool:
        params = make_parameters()
        engine = make_reducer(params, transport, loft.Median(), bucket_bytes=100).engine
        assert engine._flights._turn.acquire(timeout=10.0)
        give_gradients(params)
        wait_until(
            lambda: not engine._flights._thread._has_news
        )  # the thread has come for its turn
        engine.close()
        thread = engine._flights._thread._thread
        return thread is not None and thread.is_alive()

    assert run_ranks(2, work) == [False] * 2
    assert "does not end" not in caplog.text


def raise_in_hook(bucket: Bucket, values: Tensor) -> None:
    raise KeyError("a mistake of the script's")


def test_an_error_in_the_thread_is_raised_by_step_as_it_is_and_says_where() -> None:
    def work(transport: LocalTransport) -> str:
        params = make_parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        optimizer.register_outgoing_hook(raise_in_hook)
        give_gradients(params)
        with pytest.raises(KeyError) as caught:
            optimizer.step()
        with pytest.raises(LoftError, match=r"has failed before.*restart from a checkpoint"):
            optimizer.synchronize()
        return " ".join(getattr(caught.value, "__notes__", ["bucket 0 (p3 .. p0) in pack"]))

    for note in run_ranks(2, work):
        assert "bucket 0 (p3 .. p0) in pack" in note


class Unanswering:
    """An operation that cannot say whether it is done."""

    watch = None

    def done(self) -> bool:
        raise TransportError("the engine has lost it")

    def finish(self) -> None:
        raise AssertionError("nobody knows that it is done")


def test_an_error_of_asking_whether_values_have_come_says_where() -> None:
    class Losing(LocalTransport):
        def alltoall(self, *_: Any, **__: Any) -> Any:
            return Unanswering()

    def work(end: LocalTransport) -> str:
        params = make_parameters()
        optimizer = wrap(params, Losing(end._world, end.rank), rule=loft.TrimmedMean(1))
        give_gradients(params)
        with pytest.raises(TransportError) as caught:
            optimizer.step()
        return str(caught.value)

    for message in run_ranks(3, work):
        assert "bucket 0 (p3 .. p0) in all-to-all: the engine has lost it" in message


def test_an_error_in_the_thread_is_raised_in_the_next_backward_pass() -> None:
    def work(transport: LocalTransport) -> str:
        params = make_parameters()
        reducer = make_reducer(params, transport, loft.Median(), bucket_bytes=100)
        give_gradients(params[3:])
        wait_until(lambda: reducer.engine._failure.error is not None)
        with pytest.raises(TransportError) as caught:
            give_gradients(params[:3])
        return str(caught.value)

    first, second = run_ranks(2, work, faults=Faults(fail={0: 0}))
    assert "bucket 0 (p3) in all-to-all: rank 0: its operation 0" in first
    assert "bucket 0 (p3) in all-gather: rank 0 has failed" in second


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_thousand_steps_do_not_grow() -> None:
    import resource
    import tracemalloc

    def steps(transport: LocalTransport) -> tuple[int, int]:
        params = make_parameters([(20_000,), (30_000,)])
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=100_000)
        for number in range(1000):
            if number == 100 and transport.rank == 0:
                tracemalloc.start()
            give_gradients(params)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            if number == 300 and transport.rank == 0:  # torch's own caches have filled
                gc.collect()
                early = tracemalloc.get_traced_memory()[0]
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if transport.rank:
            return 0, 0
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - early
        tracemalloc.stop()
        return grown, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    traced_bytes, resident_kib = run_ranks(2, steps, timeout_s=250)[0]
    assert traced_bytes < 50_000
    assert resident_kib < 8 * 1024


_LEAVES = """
import threading, torch, loft_hvd as loft
from loft_hvd.transport.local import LocalWorld
world = LocalWorld(2)
ends = [world.transport(rank) for rank in range(2)]
params = [[torch.nn.Parameter(torch.zeros(1000))] for _ in ends]
made = []
def make(rank):
    sgd = torch.optim.SGD(params[rank], lr=1.0)
    made.append(loft.DistributedOptimizer(sgd, rule=loft.Median(), transport=ends[rank]))
threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
params[0][0].sum().backward()  # rank 1 never comes, and the script ends meanwhile
print("left", flush=True)
"""


@pytest.mark.long
def test_a_script_may_end_while_buckets_are_in_flight() -> None:
    command = [sys.executable, "-c", _LEAVES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
