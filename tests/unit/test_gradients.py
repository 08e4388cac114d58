"""Gradients on their way into a bucket: scaled once, wherever they live."""

from __future__ import annotations

import pytest
import torch

from loft_hvd.pipeline.buckets import ParameterSpec, lay_out
from loft_hvd.pipeline.gradients import Gradients

_SHAPES = ((3, 2), (5,), (4,))


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("at_home", [(), (1,), (0, 1, 2)])
def test_pack_scales_every_gradient_once(scale: float, at_home: tuple[int, ...]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in _SHAPES]
    parameters.append(torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)))
    specs = [ParameterSpec(str(i), tuple(p.shape), p.dtype) for i, p in enumerate(parameters)]
    (bucket,) = lay_out(specs, bucket_bytes=1 << 20)
    values = torch.full((bucket.numel,), float("nan"))
    wanted = torch.empty_like(values)
    for slot in bucket.slots:
        parameter = parameters[slot.parameter]
        grad = torch.randn(slot.shape).to(parameter.dtype)
        span = slice(slot.offset, slot.offset + slot.numel)
        wanted[span] = grad.float().view(-1) * scale
        if slot.parameter in at_home:
            values[span] = grad.view(-1)
            grad = values[span].view(slot.shape)
        parameter.grad = grad
    Gradients(parameters).pack(bucket, values, scale=scale)
    torch.testing.assert_close(values, wanted, rtol=0, atol=0)


def test_a_missing_gradient_counts_as_zeros() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    (bucket,) = lay_out(
        [ParameterSpec(str(i), tuple(p.shape), p.dtype) for i, p in enumerate(parameters)],
        bucket_bytes=1 << 20,
    )
    values = torch.full((bucket.numel,), float("nan"))
    parameters[0].grad = torch.ones(3)
    Gradients(parameters).pack(bucket, values, scale=2.0)
    by_parameter = {s.parameter: values[s.offset : s.offset + s.numel] for s in bucket.slots}
    assert by_parameter[0].tolist() == [2.0] * 3 and by_parameter[1].tolist() == [0.0] * 2
