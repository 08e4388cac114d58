"""The engine's thread, layout, buffers and wire formats, on ranks that are threads."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.errors import LoftError, TransportError
from loft_hvd.pipeline.buckets import Bucket, ParameterSpec, lay_out
from loft_hvd.pipeline.engine import Engine
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks
from tests.support.recording import RecordingTransport
from tests.support.wrapped import engine_of

SHAPES = [(40,), (3, 5), (), (64, 2)]


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def wrap(params: list[torch.nn.Parameter], transport: LocalTransport, **options: Any) -> Any:
    named = [(f"p{at}", p) for at, p in enumerate(params)]
    sgd = torch.optim.SGD(params, lr=1.0)
    return loft.DistributedOptimizer(sgd, named, transport=transport, **options)


def backward(params: list[torch.nn.Parameter], value: float = 1.0) -> None:
    torch.autograd.backward(
        [p.view_as(p) for p in params], [torch.full_like(p, value) for p in params]
    )


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
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=100)
        transport.names.clear()
        transport.gate.clear()
        backward(params)  # every operation hangs, and yet it ends
        assert transport.names == []
        transport.gate.set()
        optimizer.synchronize()
        return transport.names

    for names in run_ranks(2, work):
        assert sum(name.endswith(".a2a") for name in names) == 3


def test_buckets_go_out_by_index_whatever_the_order_of_gradients() -> None:
    def work(end: LocalTransport) -> list[str]:
        transport = RecordingTransport(end)
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=100)
        transport.names.clear()
        for p in params if end.rank else reversed(params):
            backward([p])
        optimizer.synchronize()
        return [name for name in transport.names if name.endswith(".a2a")]

    for names in run_ranks(3, work):
        assert [name.split(".")[-2] for name in names] == ["b00", "b01", "b02"]


def test_a_new_world_ends_the_thread_of_the_one_before() -> None:
    before = set(progress_threads())
    meet = threading.Barrier(2, timeout=20)

    def work(transport: LocalTransport) -> tuple[Any, int]:
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        backward(params)
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
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        backward(params)
        optimizer.step()
        return len(set(progress_threads()) - before)

    assert max(run_ranks(2, work)) > 0
    gc.collect()
    wait_until(lambda: not set(progress_threads()) - before)


def test_an_optimizer_that_never_steps_has_no_thread() -> None:
    before = len(progress_threads())
    run_ranks(2, lambda transport: wrap(parameters(), transport))
    assert len(progress_threads()) <= before


# Errors.


def raise_in_hook(bucket: Bucket, values: Tensor) -> None:
    raise KeyError("a mistake of the script's")


def test_an_error_in_the_thread_is_raised_by_step_as_it_is_and_says_where() -> None:
    def work(transport: LocalTransport) -> str:
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        optimizer.register_outgoing_hook(raise_in_hook)
        backward(params)
        with pytest.raises(KeyError) as caught:
            optimizer.step()
        with pytest.raises(LoftError, match=r"has failed before.*restart from a checkpoint"):
            optimizer.synchronize()
        return " ".join(getattr(caught.value, "__notes__", ["bucket 0 (p3 .. p0) in pack"]))

    for note in run_ranks(2, work):
        assert "bucket 0 (p3 .. p0) in pack" in note


def test_an_error_in_the_thread_is_raised_in_the_next_backward_pass() -> None:
    def work(transport: LocalTransport) -> str:
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=100)
        backward(params[3:])
        engine = engine_of(optimizer)
        wait_until(lambda: engine.has_failed)
        with pytest.raises(TransportError) as caught:
            backward(params[:3])
        return str(caught.value)

    # Operation 0 compares the ranks' options.
    first, second = run_ranks(2, work, faults=Faults(fail={0: 1}))
    assert "bucket 0 (p3) in all-to-all: rank 0: its operation 1" in first
    assert "bucket 0 (p3) in all-gather: rank 0 has failed" in second


# Layout.


def test_the_layout_is_the_order_in_which_rank_0s_gradients_came() -> None:
    order = [2, 0, 3, 1]

    def work(transport: LocalTransport) -> tuple[list[list[str]], list[Tensor]]:
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=300)
        for step in range(3):
            for at in order if transport.rank == 0 else reversed(range(4)):
                backward([params[at]], value=float(transport.rank + step))
            optimizer.synchronize()
            grads = [p.grad.clone() for p in params]  # type: ignore[union-attr]  # all have one
            optimizer.zero_grad()
        buckets = engine_of(optimizer).buckets
        return [[slot.name for slot in bucket.slots] for bucket in buckets], grads

    for layout, grads in run_ranks(3, work):
        assert layout == [["p2", "p0"], ["p3"], ["p1"]] or layout == [["p2", "p0", "p1"], ["p3"]]
        for grad in grads:
            assert bool((grad == 3.0).all())  # the median of 2, 3 and 4


def test_a_gradient_that_rank_0_lacks_goes_last() -> None:
    def work(transport: LocalTransport) -> list[str]:
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Mean())
        backward(params[:3] if transport.rank == 0 else params)
        optimizer.synchronize()
        assert float(params[3].grad[0, 0]) == 0.5  # type: ignore[index]  # it has one
        return [slot.name for bucket in engine_of(optimizer).buckets for slot in bucket.slots]

    assert run_ranks(2, work) == [["p2", "p1", "p0", "p3"]] * 2


def test_gradients_live_in_their_bucket() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        places = []
        for step in range(4):
            backward(params, value=float(step))
            optimizer.step()
            engine = engine_of(optimizer)
            begin = engine.values(0).data_ptr()
            end = begin + engine.values(0).nbytes
            places.append([p.grad.data_ptr() for p in params])  # type: ignore[union-attr]
            assert all(begin <= place < end for place in places[-1])
            assert all(bool((p.grad == step).all()) for p in params)  # type: ignore[union-attr]
            optimizer.zero_grad(set_to_none=step == 2)
        assert places[1] == places[2] == places[3]

    run_ranks(2, work)


def test_transposed_parameters_and_their_gradients_keep_their_values() -> None:
    def work(transport: LocalTransport) -> Tensor:
        param = torch.nn.Parameter(torch.zeros(3, 4).t())
        optimizer = wrap([param], transport, rule=loft.Median())
        grad = torch.arange(12.0).view(4, 3)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            torch.autograd.backward([param.view_as(param)], [grad])
            optimizer.synchronize()
        assert param.grad is not None
        return param.grad

    for grad in run_ranks(2, work):
        assert torch.equal(grad, torch.arange(12.0).view(4, 3))


# Parts, memory, wire formats.


def exchange(
    end: LocalTransport, rule: loft.Rule, *, numel: int = 5003, num_times: int = 2, **options: Any
) -> tuple[Tensor, Engine, RecordingTransport]:
    """Reduce one bucket of seeded values a few times with an engine of its own."""
    transport = RecordingTransport(end)
    buckets = lay_out([ParameterSpec("w", (numel,), torch.float32)], bucket_bytes=1 << 30)

    def pack(bucket: Bucket, values: Tensor) -> PassWeights | None:
        generator = torch.Generator().manual_seed(end.rank)
        values.copy_(torch.randn(numel, generator=generator))
        return None

    engine = Engine(Channel(transport, "loft", 30.0), buckets, [rule], pack=pack, **options)
    for _ in range(num_times):
        engine.start(0)
        engine.finish()
    engine.close()
    return engine.values(0).clone(), engine, transport


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("wire", loft.Compression)
def test_parts_do_not_change_a_bit(wire: loft.Compression, world_size: int) -> None:
    rule = loft.TrimmedMean(f=(world_size - 1) // 2)

    def work(end: LocalTransport) -> None:
        whole, _, transport = exchange(end, rule, wire=wire)
        assert len(set(transport.names)) == 2
        for part_bytes in (2500, 10_000):
            parts, engine, transport = exchange(end, rule, wire=wire, part_bytes=part_bytes)
            assert len(set(transport.names)) == 2 * engine.reductions[0].num_parts > 2
            assert torch.equal(parts, whole)

    run_ranks(world_size, work)


def middle_row(rows: Tensor) -> Tensor:
    return rows[1]


def test_a_custom_rule_sees_its_shard_whole() -> None:
    def work(end: LocalTransport) -> None:
        _, engine, _ = exchange(end, loft.Custom(middle_row), part_bytes=1000)
        assert engine.reductions[0].num_parts == 1

    run_ranks(3, work)


@pytest.mark.parametrize("part_bytes", [1 << 30, 100_000])
@pytest.mark.parametrize("wire", loft.Compression)
@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
def test_a_bucket_has_at_most_two_more_of_its_size(
    rule: loft.Rule, wire: loft.Compression, part_bytes: int
) -> None:
    def work(end: LocalTransport) -> None:
        _, engine, _ = exchange(end, rule, numel=250_000, wire=wire, part_bytes=part_bytes)
        held = engine.memory_bytes()
        assert 4 * 250_000 <= held <= 3 * 4 * 250_000
        # What docs/allreduce.md says, for buckets and rows that are padded to whole shards.
        padded = engine.values(0).untyped_storage().nbytes()
        if rule == loft.Mean() and wire is loft.Compression.none:
            assert held == padded
        else:
            sent = 0 if wire is loft.Compression.none else padded // 2
            rows = sent or padded
            assert held == padded + sent + rows + rows // 3

    run_ranks(3, work)


@pytest.mark.parametrize(
    "rule", [loft.Mean(), loft.Mean(reproducible=True), loft.Median()], ids=str
)
def test_sixteen_bits_are_half_the_bytes(rule: loft.Rule) -> None:
    def work(end: LocalTransport) -> list[int]:
        numel = 3 * 16 * 100
        return [
            exchange(end, rule, numel=numel, wire=wire)[2].sent_bytes for wire in loft.Compression
        ]

    for plain, fp16, bf16 in run_ranks(3, work):
        assert plain == 2 * 2 * (2 * 4 * 3 * 16 * 100 // 3)  # twice 2 (n-1)/n of the bytes
        assert fp16 == bf16 == plain // 2


@pytest.mark.parametrize(("wire", "error"), [("none", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("rule", [loft.Mean(), loft.TrimmedMean(f=1)], ids=str)
def test_a_wire_format_rounds_rows_and_result_only(
    rule: loft.Rule, wire: str, error: float
) -> None:
    format_ = loft.Compression(wire)

    def work(transport: LocalTransport) -> Tensor:
        params = parameters([(64, 2)])
        optimizer = wrap(params, transport, rule=rule, compression=format_)
        generator = torch.Generator().manual_seed(transport.rank)
        grad = torch.randn((64, 2), generator=generator)
        torch.autograd.backward([params[0].view_as(params[0])], [grad])
        optimizer.synchronize()
        return params[0].grad  # type: ignore[return-value]  # it has one

    rows = [torch.randn(64, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    dtype = format_.dtype or torch.float32
    sent = torch.stack([row.to(dtype).float().flatten() for row in rows])
    expected = loft.aggregate(sent, rule).to(dtype).float().view(64, 2)
    for grad in run_ranks(3, work):
        torch.testing.assert_close(grad, expected, rtol=error, atol=error)
        if isinstance(rule, loft.TrimmedMean):
            assert torch.equal(grad, expected)


def test_sums_of_sixteen_bit_values_do_not_overflow() -> None:
    def work(transport: LocalTransport) -> float:
        params = parameters([(8,)])
        optimizer = wrap(params, transport, compression=loft.Compression.fp16)
        backward(params, value=40_000.0)
        optimizer.synchronize()
        return float(params[0].grad[0])  # type: ignore[index]  # it has one

    assert run_ranks(4, work) == [40_000.0] * 4


def test_what_float16_cannot_hold_becomes_infinite_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: LocalTransport) -> list[float]:
        params = parameters([(8,), (4,)])
        optimizer = wrap(params, transport, rule=loft.Median(), compression=loft.Compression.fp16)
        for _ in range(3):
            params[0].grad = params[1].grad = None
            backward(params[:1], value=1e5 if transport.rank == 0 else 1.0)
            backward(params[1:], value=float("inf"))
            optimizer.synchronize()
        return [float(p.grad[0]) for p in params]  # type: ignore[index]  # all have one

    with caplog.at_level(logging.WARNING):
        results = run_ranks(3, work)
    assert results == [[1.0, float("inf")]] * 3  # one infinite row of three is an outlier
    (record,) = caplog.records
    assert "'p0': 8 gradient values are beyond what torch.float16 holds" in record.getMessage()


def test_bfloat16_has_the_range_of_float32() -> None:
    def work(transport: LocalTransport) -> float:
        params = parameters([(8,)])
        optimizer = wrap(params, transport, compression=loft.Compression.bf16)
        backward(params, value=2.0**100)
        optimizer.synchronize()
        return float(params[0].grad[0])  # type: ignore[index]  # it has one

    assert run_ranks(2, work) == [2.0**100] * 2


class Halves:
    """A user's own wire format: half precision of half the value."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return (tensor / 2).half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx) * 2


@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
def test_an_object_with_compress_and_decompress_is_a_wire_format(rule: loft.Rule) -> None:
    def work(transport: LocalTransport) -> float:
        params = parameters([(33,)])
        optimizer = wrap(params, transport, rule=rule, compression=Halves)
        for _ in range(2):
            backward(params, value=float(transport.rank + 1))
            optimizer.synchronize()
            found = float(params[0].grad[0])  # type: ignore[index]  # it has one
            optimizer.zero_grad()
        return found

    assert run_ranks(3, work) == [2.0] * 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_thousand_steps_do_not_grow() -> None:
    import resource
    import tracemalloc

    def steps(transport: LocalTransport) -> tuple[int, int]:
        params = parameters([(20_000,), (30_000,)])
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=100_000)
        for number in range(1000):
            if number == 100 and transport.rank == 0:
                tracemalloc.start()
            backward(params)
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
