"""The device lane, without a GPU: on Gloo, bit for bit what the CPU's lanes give."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.transport import lanes
from loft_hvd.transport.base import Abilities, Channel
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.device import DeviceGroup, DeviceLane, _store_of
from loft_hvd.transport.lanes import Needs, choose_lane
from loft_hvd.transport.local import LocalTransport, run_ranks
from loft_hvd.transport.mesh import open_mesh
from tests.support.ddp_buckets import backward
from tests.support.passes import Sizes
from tests.support.worlds import environment

pytestmark = pytest.mark.skipif(extension() is None, reason="the extension is not built")

RULES: list[tuple[loft.Rule, str]] = [
    (loft.Mean(reproducible=True), "shard"),
    (loft.Median(), "shard"),
    (loft.TrimmedMean(1), "shard"),
    (loft.Phocas(1), "shard"),
    (loft.MeanAroundMedian(1), "shard"),
    (loft.Custom(lambda rows: rows.mean(dim=0)), "shard"),
    (loft.Robust(1), "shard"),
    (loft.Robust(1), "model"),
    (loft.MultiKrum(1), "model"),
]

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# Three ranks with every dtype and every number of ranks with float32; the others are long.
WORLDS = [
    pytest.param(n, dtype, marks=() if n == 3 or dtype == torch.float32 else pytest.mark.long)
    for n in (1, 3, 5)
    for dtype in DTYPES
]


class WithGroup(LocalTransport):
    """One rank's end of a world that has a process group beside it."""

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end._world, end.rank)

        def open_group(channel: Channel, device: torch.device) -> DeviceGroup:
            mesh = open_mesh(channel, interface="lo")
            assert mesh is not None
            return DeviceGroup(mesh.group, device, mesh.close)

        self.can = Abilities(world=(end._world, end.rank), open_group=open_group)


def grads_of(rank: int, step: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Any]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


SHAPES = [(300, 7), (64,), (41,)]


def by_optimizer(
    end: LocalTransport, rule: loft.Rule, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Return what three steps of an optimizer reduce, of two backward passes each."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(params, lr=1.0),
        rule=rule,
        transport=end,
        backward_passes_per_step=2,
        bucket_bytes=4000,
        **options,
    )
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for at in range(2):
            grads = grads_of(end.rank, 2 * step + at, SHAPES, dtype)
            torch.autograd.backward([p.view_as(p) for p in params], grads)
        optimizer.synchronize()
        found += [p.grad.clone() for p in params if p.grad is not None]
        with optimizer.skip_synchronize():
            optimizer.step()
    return found


def by_hook(
    end: LocalTransport, rule: loft.Rule, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Return what three passes of a hook reduce, the second ones in other buckets."""

    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    hook = loft.ddp_hook(rule, transport=end, **options)
    found = []
    for step in range(3):
        layout = [params[:1], params[1:]] if step == 0 else [params[2:], params[1:2], params[:1]]
        grads = grads_of(end.rank, step, SHAPES, dtype)
        flat = {p: grad.view(-1) for p, grad in zip(params, grads, strict=True)}
        reduced = backward(hook, layout, flat)
        found += [reduced[p].clone() for p in params]
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize("front", [by_optimizer, by_hook], ids=["optimizer", "hook"])
@pytest.mark.parametrize(("world_size", "dtype"), WORLDS, ids=str)
@pytest.mark.parametrize(("rule", "scope"), RULES, ids=str)
def test_it_gives_the_bits_of_the_other_lanes(
    rule: loft.Rule, scope: str, world_size: int, dtype: torch.dtype, front: Any
) -> None:
    options = {"scope": scope, "worker_momentum": 0.0}

    def work(end: LocalTransport) -> list[Tensor]:
        return front(end, rule, dtype, **options)  # type: ignore[no-any-return]  # one of two

    plain = run_ranks(world_size, work)
    with environment(LOFT_HVD_LANE="device"):
        queued = run_ranks(world_size, lambda end: work(WithGroup(end)))
    for one, other in zip(plain, queued, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_and_four_ranks_and_what_travels_in_16_bits(world_size: int) -> None:
    def work(end: LocalTransport) -> list[Tensor]:
        return by_optimizer(end, loft.Median(), torch.float32, compression=loft.Compression.bf16)

    plain = run_ranks(world_size, work)
    with environment(LOFT_HVD_LANE="device"):
        queued = run_ranks(world_size, lambda end: work(WithGroup(end)))
    for one, other in zip(plain, queued, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rule", [loft.Mean(reproducible=True), loft.TrimmedMean(1)], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_weights_absent_ranks_and_averages_too(rule: loft.Rule, beta: float) -> None:
    sizes = [(5, 2, 1, 4), (4, 0, 4, 4), (2, 4, 2, 0), (1, 1, 0, 2), (3, 3, 3, 3), (9, 1, 1, 1)]

    def work(end: LocalTransport) -> list[Tensor]:
        planned: Any = Sizes(list(sizes))
        return by_optimizer(
            end, rule, torch.float32, balancer=planned, worker_momentum=beta, diagnostics=True
        )

    plain = run_ranks(4, work)
    with environment(LOFT_HVD_LANE="device"):
        queued = run_ranks(4, lambda end: work(WithGroup(end)))
    for one, other in zip(plain, queued, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_its_own_sum_is_the_mean_to_rounding() -> None:
    def work(end: LocalTransport) -> list[Tensor]:
        return by_hook(end, loft.Mean(), torch.float32)

    plain = run_ranks(3, work)
    with environment(LOFT_HVD_LANE="device"):
        queued = run_ranks(3, lambda end: work(WithGroup(end)))
    for one, other in zip(plain, queued, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_conforms(world_size: int) -> None:
    def work(end: LocalTransport) -> None:
        lane = choose_lane(Channel(WithGroup(end), "test"), Needs("cpu"))
        assert isinstance(lane, DeviceLane)
        for name, check in CHECKS.items():
            if "order" not in name:  # of names: here all ranks begin in one order
                check(lane)

    with environment(LOFT_HVD_LANE="device"):
        run_ranks(world_size, work)


@pytest.mark.parametrize("named", ["shared-memory", "mesh"])
def test_values_on_a_gpu_take_no_lane_of_the_cpu_that_is_named(named: str) -> None:
    def work(end: LocalTransport) -> list[str]:
        with_mesh = WithGroup(end)
        with_mesh.can = replace(
            with_mesh.can, open_mesh=lambda channel: open_mesh(channel, interface="lo")
        )
        channel = Channel(with_mesh, "test")
        return [choose_lane(channel, Needs(device)).name for device in ("cpu", "cuda:0")]

    with environment(LOFT_HVD_LANE=named):
        for on_cpu, on_gpu in run_ranks(2, work):
            assert on_cpu != on_gpu == "the engine's own"


def test_a_named_lane_that_is_not_taken_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(end: LocalTransport) -> None:
        for _ in range(2):
            choose_lane(Channel(WithGroup(end), "test"), Needs("cpu"))

    lanes._warn_once.cache_clear()
    with environment(LOFT_HVD_LANE="peer-memory"):
        run_ranks(2, work)
    lanes._warn_once.cache_clear()
    (record,) = caplog.records
    assert "LOFT_HVD_LANE=peer-memory: values on a cpu device cannot" in record.getMessage()


def test_ranks_meet_in_a_store_on_rank_0s_host() -> None:
    def work(end: LocalTransport) -> str:
        channel = Channel(end, "test", 20.0)
        store, reason = _store_of(channel)
        assert not reason
        store.set(f"of {end.rank}", str(end.rank))
        got = str(store.get(f"of {1 - end.rank}").decode())
        channel.allgather_rows(torch.zeros(1))  # rank 0's store ends with its last reference
        return got

    assert run_ranks(2, work) == ["1", "0"]


def test_where_rank_0_opens_no_store_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no port is left")

    monkeypatch.setattr(dist, "TCPStore", refuse)

    def work(end: LocalTransport) -> tuple[Any, str]:
        return _store_of(Channel(end, "test", 20.0))

    began = time.monotonic()
    first, second = run_ranks(2, work)
    assert time.monotonic() - began < 10
    assert first == (None, "no store at 127.0.0.1: no port is left")
    assert second == (None, "")


def test_what_may_begin_in_any_order_takes_another_lane() -> None:
    def work(end: LocalTransport) -> str:
        return choose_lane(Channel(WithGroup(end), "test"), Needs("cpu", is_named=True)).name

    with environment(LOFT_HVD_LANE="device"):
        assert run_ranks(2, work) == ["the engine's own"] * 2
