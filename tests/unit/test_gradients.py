"""Gradients on their way into a bucket: scaled once, wherever they live."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch

from loft_hvd.errors import UsageError
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
    assert by_parameter[0].tolist() == [2.0] * 3
    assert by_parameter[1].tolist() == [0.0] * 2


def test_a_taken_gradient_lives_in_the_bucket_and_is_scaled_once() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    (bucket,) = lay_out(
        [ParameterSpec(str(i), tuple(p.shape), p.dtype) for i, p in enumerate(parameters)],
        bucket_bytes=1 << 20,
    )
    values = torch.full((bucket.numel,), float("nan"))
    slots = {slot.parameter: slot for slot in bucket.slots}
    gradients = Gradients(parameters)
    for step in (1, 2):  # in the second step gradients have stayed in the bucket
        for number, parameter in enumerate(parameters):
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, number + 1.0)
            else:
                parameter.grad.fill_(number + 1.0)
        gradients.take(slots[0], values, scale=0.5)
        parameter = parameters[0]
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == values[slots[0].offset :].data_ptr()
        gradients.pack(bucket, values, scale=0.5)
        assert values[slots[0].offset :][:3].tolist() == [0.5] * 3, step
        assert values[slots[1].offset :][:2].tolist() == [1.0] * 2, step
        gradients.hand_out(bucket, values)
        gradients.begin_step()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_gradient_replaced_after_it_was_taken_counts_or_is_refused(scale: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    (bucket,) = lay_out([ParameterSpec("p", (3,), parameter.dtype)], bucket_bytes=1 << 20)
    values = torch.zeros(bucket.numel)
    gradients = Gradients([parameter])
    parameter.grad = torch.ones(3)
    gradients.take(bucket.slots[0], values, scale=scale)
    parameter.grad = parameter.grad.clone()
    if scale == 1.0:
        gradients.pack(bucket, values, scale=scale)
        assert values[:3].tolist() == [1.0] * 3
    else:
        with pytest.raises(UsageError, match=r"'p' was replaced .*synchronize\(\)"):
            gradients.pack(bucket, values, scale=scale)


def test_a_parameter_of_two_optimizers_is_scaled_once_by_each() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    (bucket,) = lay_out([ParameterSpec("p", (3,), parameter.dtype)], bucket_bytes=1 << 20)
    both = [Gradients([parameter]) for _ in range(2)]
    parameter.grad = torch.ones(3)
    for gradients in both:
        gradients.take(bucket.slots[0], torch.zeros(3), scale=0.5)
    for gradients in both:
        values = torch.zeros(3)
        gradients.pack(bucket, values, scale=0.5)
        assert values.tolist() == [0.5] * 3
    both.pop().release()
    values = torch.zeros(3)
    both[0].take(bucket.slots[0], values, scale=0.5)
    assert parameter.grad.data_ptr() == values.data_ptr()


def _moved(grad: torch.Tensor) -> torch.Tensor:
    grad.data = grad.data.clone()  # the same object, elsewhere
    return grad


@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        _moved,
        lambda grad: torch.zeros(3, 2),
        lambda grad: grad.detach().view(2, 3).t(),  # in its place, with other strides
        lambda grad: grad.detach().requires_grad_(),
        lambda grad: None,
    ],
    ids=["clone", "data", "zeros", "strides", "requires_grad", "none"],
)
def test_results_are_handed_out_whatever_has_become_of_the_gradient(
    change: Callable[[torch.Tensor], torch.Tensor | None],
) -> None:
    shapes = ((3, 2), (4,), (0,))
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    specs = [ParameterSpec(str(i), tuple(p.shape), p.dtype) for i, p in enumerate(parameters)]
    (bucket,) = lay_out(specs, bucket_bytes=1 << 20)
    values = torch.zeros(bucket.numel)
    gradients = Gradients(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for slot in bucket.slots:
        gradients.take(slot, values, scale=1.0)
    stayed = [parameter.grad for parameter in parameters[1:]]
    parameters[0].grad = change(cast(torch.Tensor, parameters[0].grad))
    values.copy_(torch.arange(float(bucket.numel)))
    gradients.hand_out(bucket, values)
    for slot in bucket.slots:
        grad = parameters[slot.parameter].grad
        assert grad is not None
        assert not grad.requires_grad
        wanted = values[slot.offset : slot.offset + slot.numel].view(slot.shape)
        assert torch.equal(grad, wanted)
        assert grad.data_ptr() == wanted.data_ptr()
    assert all(p.grad is grad for p, grad in zip(parameters[1:], stayed, strict=True))
