"""Wire formats: what is rounded, and what a user's own does, on ranks that are threads."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.wrapped import give_gradients, make_parameters, reduce_bucket, wrap


@pytest.mark.parametrize(
    "rule", [loft.Mean(), loft.Mean(reproducible=True), loft.Median()], ids=str
)
def test_sixteen_bits_are_half_the_bytes(rule: loft.Rule) -> None:
    def work(end: LocalTransport) -> list[int]:
        numel = 3 * 16 * 100
        return [
            reduce_bucket(end, rule, numel=numel, wire=wire)[2].sent_bytes
            for wire in loft.Compression
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
        params = make_parameters([(64, 2)])
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
        params = make_parameters([(8,)])
        optimizer = wrap(params, transport, compression=loft.Compression.fp16)
        give_gradients(params, value=40_000.0)
        optimizer.synchronize()
        return float(params[0].grad[0])  # type: ignore[index]  # it has one

    assert run_ranks(4, work) == [40_000.0] * 4


def test_what_float16_cannot_hold_becomes_infinite_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: LocalTransport) -> list[float]:
        params = make_parameters([(8,), (4,)])
        optimizer = wrap(params, transport, rule=loft.Median(), compression=loft.Compression.fp16)
        for _ in range(3):
            params[0].grad = params[1].grad = None
            give_gradients(params[:1], value=1e5 if transport.rank == 0 else 1.0)
            give_gradients(params[1:], value=float("inf"))
            optimizer.synchronize()
        return [float(p.grad[0]) for p in params]  # type: ignore[index]  # all have one

    with caplog.at_level(logging.WARNING):
        results = run_ranks(3, work)
    assert results == [[1.0, float("inf")]] * 3  # one infinite row of three is an outlier
    (record,) = caplog.records
    assert "'p0': 8 gradient values are beyond what torch.float16 holds" in record.getMessage()


def test_bfloat16_has_the_range_of_float32() -> None:
    def work(transport: LocalTransport) -> float:
        params = make_parameters([(8,)])
        optimizer = wrap(params, transport, compression=loft.Compression.bf16)
        give_gradients(params, value=2.0**100)
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
        params = make_parameters([(33,)])
        optimizer = wrap(params, transport, rule=rule, compression=Halves)
        for _ in range(2):
            give_gradients(params, value=float(transport.rank + 1))
            optimizer.synchronize()
            found = float(params[0].grad[0])  # type: ignore[index]  # it has one
            optimizer.zero_grad()
        return found

    assert run_ranks(3, work) == [2.0] * 3


@pytest.mark.parametrize(("rule", "num_times"), [(loft.Mean(), 1), (loft.Median(), 2)], ids=str)
def test_what_a_users_format_reads_stays_until_the_reading_thread_is_through(
    rule: loft.Rule, num_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU another thread's stream may still read a tensor that is dropped."""
    read: list[Tensor] = []
    kept: list[object] = []

    class Noted(Halves):
        @staticmethod
        def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
            read.append(tensor)
            return Halves.decompress(tensor, ctx)

    monkeypatch.setattr("loft_hvd.pipeline.ring.used_here", lambda *values: kept.extend(values))
    run_ranks(3, lambda end: reduce_bucket(end, rule, num_times=1, wire=Noted))
    assert len(read) == 3 * num_times
    assert {id(tensor) for tensor in read} <= {id(value) for value in kept}
