"""Worker momentum: averages over time, what they weigh, and whom they leave out."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension, require_extension
from loft_hvd.aggregation.reference import reference
from loft_hvd.config import Config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError
from loft_hvd.pipeline import momentum as worker_momentum
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.momentum import Average, Blend, WorkerMomentum, absorb
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.alone import ALONE
from tests.support.passes import Sizes
from tests.support.worlds import Moving

B = 0.9
SHAPES = [(3, 5), (7,), (), (0,)]


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def gradient_at(values: Tensor, *, step: int, batch: int, rank: int) -> Tensor:
    """Return a gradient that depends on the parameter, as a real one does."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * batch + rank)
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    return 0.3 * values.detach() + noise.to(values.dtype)


def backward(params: list[torch.nn.Parameter], grads: list[Tensor]) -> None:
    torch.autograd.backward([p.view_as(p) for p in params], grads)


def wrap(params: list[torch.nn.Parameter], transport: Any, **options: Any) -> Any:
    named = [(f"p{at}", p) for at, p in enumerate(params)]
    options = {"worker_momentum": B, "bucket_bytes": 60} | options
    sgd = torch.optim.SGD(params, lr=options.pop("lr", 0.05))
    return loft.DistributedOptimizer(sgd, named, transport=transport, **options)


# Rank 1 has no samples now and then, and every size changes; the total stays.
PLANS = [(5, 2, 1), (4, 0, 4), (1, 1, 6), (8, 0, 0), (3, 3, 2)]


def torch_momentum(dtype: torch.dtype, *, steps: int, passes: int) -> list[torch.nn.Parameter]:
    """Train with torch's momentum and the exactly weighted mean of all ranks' gradients."""
    params = parameters(dtype)
    sgd = torch.optim.SGD(params, lr=0.005, momentum=B)
    for step in range(steps):
        for p in params:
            p.grad = torch.zeros_like(p)
            for batch in range(passes):
                sizes = PLANS[(step * passes + batch) % len(PLANS)]
                for rank, size in enumerate(sizes):
                    grad = gradient_at(p, step=step, batch=batch, rank=rank)
                    p.grad += grad * (size / sum(sizes))
        sgd.step()
    return params


@pytest.mark.parametrize(
    ("dtype", "tolerance", "passes", "reproducible"),
    [
        (torch.float64, 1e-12, 1, False),
        (torch.float64, 1e-12, 2, True),
        (torch.float32, 1e-6, 1, True),
        (torch.float32, 1e-6, 2, False),
    ],
    ids=str,
)
def test_mean_of_averages_is_torchs_momentum_of_the_weighted_mean(
    dtype: torch.dtype,
    tolerance: float,
    passes: int,
    reproducible: bool,
) -> None:
    num_steps, resumed_at = 40, 25

    def work(transport: LocalTransport) -> list[torch.nn.Parameter]:
        params = parameters(dtype)

        def make(params: list[torch.nn.Parameter], from_step: int) -> Any:
            plans = [PLANS[at % len(PLANS)] for at in range(from_step * passes, num_steps * passes)]
            return wrap(
                params,
                transport,
                rule=loft.Mean(reproducible=reproducible),
                balancer=Sizes(plans),
                backward_passes_per_step=passes,
            )

        optimizer = make(params, 0)
        for step in range(num_steps):
            if step == resumed_at:
                # A new process: new parameters, and a state of this rank's own from a file.
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                params = [torch.nn.Parameter(p.detach().clone()) for p in params]
                optimizer = make(params, step)
                optimizer.load_state_dict(state)
            # torch's buffer is so many times the average.
            optimizer.param_groups[0]["lr"] = 0.005 * (1 - B ** (step + 1)) / (1 - B)
            for batch in range(passes):
                size = PLANS[(step * passes + batch) % len(PLANS)][transport.rank]
                wrong = 1.0 if size else float("nan")  # what an idle rank computes is not read
                backward(
                    params,
                    [
                        gradient_at(p, step=step, batch=batch, rank=transport.rank) * wrong
                        for p in params
                    ],
                )
            optimizer.step()
            optimizer.zero_grad()
        return params

    expected = torch_momentum(dtype, steps=num_steps, passes=passes)
    for params in run_ranks(3, work):
        for got, wanted in zip(params, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


def test_a_world_of_one_has_momentum_too() -> None:
    params, expected = parameters(), parameters()
    optimizer = wrap(params, ALONE, rule=loft.TrimmedMean(f=1))
    sgd = torch.optim.SGD(expected, lr=0.005, momentum=B)
    for step in range(30):
        optimizer.param_groups[0]["lr"] = 0.005 * (1 - B ** (step + 1)) / (1 - B)
        backward(params, [gradient_at(p, step=step, batch=0, rank=0) for p in params])
        optimizer.step()
        optimizer.zero_grad()
        for p in expected:
            p.grad = gradient_at(p, step=step, batch=0, rank=0)
        sgd.step()
    for got, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def written_out(
    plans: Sequence[tuple[int, ...]], *, beta: float, passes: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield each step's averages, [num_ranks, 33], and what they weigh; 0 for those left out."""
    num_ranks, zeros = len(plans[0]), torch.zeros(33)
    sums = torch.zeros(num_ranks, 33, dtype=torch.float64)
    weights = [0.0] * num_ranks
    for step in range(len(plans) // passes):
        sizes = plans[step * passes : (step + 1) * passes]
        samples = [sum(counts) for counts in zip(*sizes, strict=True)]
        for rank in range(num_ranks):
            weights[rank] = beta * weights[rank] + samples[rank]
            sums[rank] *= beta
            real = [batch for batch in range(passes) if sizes[batch][rank]]
            for batch in real:  # passes add up, and one without samples counts as the others
                grad = gradient_at(zeros, step=step, batch=batch, rank=rank)
                sums[rank] += samples[rank] * passes / len(real) * grad
        mean = sum(weights) / num_ranks
        there = [w > 0 and (x > 0 or 4 * w >= mean) for w, x in zip(weights, samples, strict=True)]
        averages = torch.stack([sums[r] / (weights[r] or 1.0) for r in range(num_ranks)])
        yield averages, [round(w / mean * 512) * ok for w, ok in zip(weights, there, strict=True)]


def capped(whole: list[int]) -> list[int]:
    """Return weights in proportion to these, none above twice the mean of those above 0."""
    cap = 2 * sum(whole) / sum(weight > 0 for weight in whole)
    return [round(min(weight, cap) * 1000) for weight in whole]


def reduced_by_step(
    transport: LocalTransport,
    plans: Sequence[tuple[int, ...]],
    *,
    passes: int = 1,
    resumed_at: int | None = None,
    **options: Any,
) -> list[Tensor]:
    """Return the gradient of 33 values after each step."""

    def make(p: torch.nn.Parameter, from_step: int) -> Any:
        sizes = Sizes(plans[from_step * passes :], global_batch_size=max(map(sum, plans)))
        passed = {"balancer": sizes, "backward_passes_per_step": passes}
        return wrap([p], transport, **options, **passed)

    p = torch.nn.Parameter(torch.zeros(33))
    optimizer = make(p, 0)
    found = []
    for step in range(len(plans) // passes):
        if step == resumed_at:  # by a new process
            state = copy.deepcopy(optimizer.state_dict())
            p = torch.nn.Parameter(p.detach().clone())
            optimizer = make(p, step)
            optimizer.load_state_dict(state)
        for batch in range(passes):
            wrong = 1.0 if plans[step * passes + batch][transport.rank] else float("nan")
            grad = gradient_at(p, step=step, batch=batch, rank=transport.rank)
            backward([p], [grad * wrong])  # what an idle rank computes is not read
        optimizer.synchronize()
        assert p.grad is not None
        found.append(p.grad.clone())
        optimizer.zero_grad()
    return found


def assert_steps_are(found: list[list[Tensor]], expected: list[Tensor]) -> None:
    for by_rank in found:
        for step, (got, wanted) in enumerate(zip(by_rank, expected, strict=True)):
            torch.testing.assert_close(
                got.double(), wanted, rtol=1e-5, atol=1e-5, msg=f"step {step}: {got} {wanted}"
            )


@pytest.mark.parametrize("passes", [1, 2])
def test_a_robust_rule_sees_averages_that_weigh_what_they_are_of(passes: int) -> None:
    plans = [(40, 8, 8, 8, 0), (40, 8, 8, 8, 4), (0, 30, 8, 8, 4), (40, 8, 8, 8, 4)] * passes
    rule = loft.TrimmedMean(f=1)
    expected = [
        torch.from_numpy(reference(averages.numpy(), rule, weights=capped(whole)))
        for averages, whole in written_out(plans, beta=B, passes=passes)
    ]
    found = run_ranks(5, lambda end: reduced_by_step(end, plans, passes=passes, rule=rule))
    assert_steps_are(found, expected)


@pytest.mark.parametrize("resumed_at", [3, 4])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_robust_rule_goes_on_exactly_when_an_epoch_ends_with_a_short_step(
    passes: int, resumed_at: int
) -> None:
    plans = [(400, 80, 80, 80)] * 3 * passes + [(2, 1, 1, 0)] * passes
    plans += [(400, 80, 80, 80)] * 3 * passes

    def work(transport: LocalTransport) -> list[list[Tensor]]:
        rule = loft.TrimmedMean(f=1)
        return [
            reduced_by_step(transport, plans, passes=passes, resumed_at=at, rule=rule)
            for at in (None, resumed_at)
        ]

    for whole, resumed in run_ranks(4, work):
        for step, (one, other) in enumerate(zip(whole, resumed, strict=True)):
            assert torch.equal(one, other), f"step {step}"


def test_groups_of_ranks_average_averages_that_have_not_faded() -> None:
    groups = [[0, 1], [2, 3], [4, 5]]
    plans = [(8, 8, 8, 4, 8, 6), (8, 0, 8, 4, 2, 6), (8, 0, 8, 4, 8, 6), (8, 0, 8, 4, 8, 6)]
    rule, expected, are_in = loft.TrimmedMean(f=1), [], []
    for averages, whole in written_out(plans, beta=0.5, passes=1):
        weights = torch.tensor(whole, dtype=torch.float64)
        means = torch.stack(
            [(weights[g] @ averages[g]) / weights[g].sum() for g in groups]
        )  # [num_groups, 33]
        sums = [sum(whole[rank] for rank in group) for group in groups]
        expected.append(torch.from_numpy(reference(means.numpy(), rule, weights=capped(sums))))
        are_in.append(whole[1] > 0)
    assert are_in == [True, True, False, False]  # rank 1, below a quarter of the mean
    options: dict[str, Any] = {"rule": rule, "over": groups, "worker_momentum": 0.5}
    assert_steps_are(run_ranks(6, lambda end: reduced_by_step(end, plans, **options)), expected)


def test_a_rank_without_samples_is_absent_once_its_average_has_faded() -> None:
    momentum = WorkerMomentum(0.5)
    momentum.join(Channel(LocalWorld(1).transport(0), "loft", 1.0), most_samples=16)
    momentum._weights = (8.0, 8.0, 8.0)
    seen = []
    for _ in range(4):
        ages = momentum.average_weights((8, 0, 8))
        weighed = ages.weigh(PassWeights(None, (True, False, True), 1.0))
        seen.append((ages.weights[1], weighed.present[1]))
        momentum.step_ended(ages)
    # The mean is 28/3, 30/3, 31/3 and so on: a quarter of it is about 2.5.
    assert seen == [(4.0, True), (2.0, False), (1.0, False), (0.5, False)]


def joined(transport: LocalTransport, claims: tuple[float, ...]) -> WorkerMomentum:
    """Begin a world of 20 samples a step in which each rank claims what its averages weigh."""
    momentum = WorkerMomentum(0.5)
    momentum._own = claims[transport.rank]
    momentum.join(Channel(transport, "loft", 30.0), most_samples=20)
    return momentum


def test_no_rank_counts_more_than_the_plan_allows_whatever_it_claims() -> None:
    def work(transport: LocalTransport) -> list[tuple[int, ...] | None]:
        momentum = joined(transport, (16.0, 8.0, 4.0, 1e15))
        found = []
        for counts in [(8, 4, 4, 4), (2, 1, 1, 1)]:
            ages = momentum.average_weights(counts)
            found.append(ages.weigh(PassWeights(None, (True,) * 4, 1.0)).counts)
            momentum.step_ended(ages)
        return found

    # Steps have 20 samples at most, so no average weighs more than 40: rank 3's is taken for that.
    weighing = [(16, 8, 6, 24), (10, 5, 4, 13)]
    expected = [tuple(round(w / (sum(each) / 4) * 512) for w in each) for each in weighing]
    assert run_ranks(4, work) == [expected] * 4


def test_a_claim_fades_as_the_largest_honest_weight_does() -> None:
    def work(transport: LocalTransport) -> list[int]:
        found = []
        for claim in (40.0, 1e12):
            momentum, num_steps = joined(transport, (8.0, 8.0, 8.0, claim)), 0
            is_there = True
            while is_there:
                ages = momentum.average_weights((7, 7, 6, 0))
                is_there = ages.weigh(PassWeights(None, (True,) * 3 + (False,), 1.0)).present[3]
                momentum.step_ended(ages)
                num_steps += 1
            found.append(num_steps)
        return found

    # 40 fades to 20, 10, 5 and 2.5. By then the others weigh 13.6, 13.6 and 11.8: the mean is 10.4.
    assert run_ranks(4, work) == [[4, 4]] * 4


@pytest.mark.parametrize("claim", [float("nan"), float("inf"), -1.0, 2.0**54, 1.7e308])
def test_ranks_that_claim_what_no_average_weighs_are_named_on_every_rank(claim: float) -> None:
    def work(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError, match=r"ranks \[1, 2\] tell that their averages weigh"):
            joined(transport, (8.0, claim, claim))

    run_ranks(3, work)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bad_steps", [(0,), (1, 2), (0, 1, 3)], ids=str)
def test_a_gradient_that_is_not_finite_is_sent_and_counts_as_no_samples(
    bad: float, bad_steps: tuple[int, ...]
) -> None:
    average = None
    total = weight = 0.0
    for step, (count, value) in enumerate([(2, 1.0), (5, -2.0), (1, 4.0), (3, 0.5), (4, 8.0)]):
        is_bad = step in bad_steps
        target = torch.empty(2, dtype=torch.float64)
        grad = torch.tensor([bad if is_bad else value, value], dtype=torch.float64)
        average = absorb(average, grad, target, Blend(B, count, gain=count))
        total, weight = B * total, B * weight
        if is_bad:
            assert not bool(target[0].isfinite())
            continue
        total, weight = total + count * value, weight + count
        assert average is not None
        assert float(average.weight) == pytest.approx(weight)
        assert target.tolist() == average.values.tolist() == pytest.approx([total / weight] * 2)


def test_averages_begin_with_the_first_finite_gradient_of_a_grad_scaler() -> None:
    def work(transport: LocalTransport) -> list[float]:
        p = torch.nn.Parameter(torch.zeros(4))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21)
        optimizer = wrap([p], transport, rule=loft.Median(), scaler=scaler)
        found = []
        for _ in range(12):
            scaler.scale(p.half().float().sum()).backward()  # infinite in float16 from 2**16 on
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            assert p.grad is not None
            found.append(float(p.grad[0]))
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return found

    for found in run_ranks(3, work):
        assert found[:6] == [float("inf")] * 6
        assert found[6:] == pytest.approx([1.0] * 6)


def levels() -> list[str]:
    module = extension()
    return [] if module is None else list(module.isa_levels())


def absorbed(average: Average | None, grad: Tensor, target: Tensor | None = None) -> Average:
    """Let one sample's gradient into an average."""
    target = torch.empty_like(grad) if target is None else target
    average = absorb(average, grad, target, Blend(B, 1, gain=1.0))
    assert average is not None
    return average


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [1, 15, 33, 600_001])
def test_the_kernel_does_what_plain_torch_does(
    numel: int, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, num_calls = require_extension(), 0

    class Counting:
        @staticmethod
        def absorb_cpu(*arguments: Any) -> bool:
            nonlocal num_calls
            num_calls += 1
            return bool(module.absorb_cpu(*arguments))

    generator = torch.Generator().manual_seed(numel)
    normal = [torch.randn(numel + 1, dtype=dtype, generator=generator)[1:] for _ in range(4)]
    has_nan, large = torch.ones(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    has_nan[-1] = float("nan")
    large[0] = torch.finfo(dtype).max / 2  # overflows when it is multiplied
    grads = [normal[0], has_nan, normal[1], None, normal[2], large, normal[3]]
    gains = [1.0, 3.0, 4.0, 9.0, 11.0, 99.0, 16.0]
    found = []
    for by_kernel in (False, True):
        monkeypatch.setattr(
            worker_momentum, "extension", lambda on=by_kernel: Counting if on else None
        )
        monkeypatch.setattr(worker_momentum, "config", lambda: Config(isa=level))
        monkeypatch.setattr(worker_momentum, "num_threads", lambda: 3)
        average, states = None, []
        for step, grad in enumerate(grads):
            own = None if grad is None else grad.clone()
            target = own if own is not None and step % 2 == 0 else torch.full_like(large, 7.0)
            blend = Blend(B, 1 + step, gain=gains[step], scale=1.0 if step < 3 else 0.75)
            average = absorb(average, own, target, blend)
            assert average is not None
            states.append((target, average.values.clone(), average.weight.clone()))
            if by_kernel and grad is not None and step < 1:
                assert torch.equal(target, grad)  # the first one counts whole
        found.append(states)
    assert num_calls == len(grads)
    for step, (torchs, kernels) in enumerate(zip(*found, strict=True)):
        assert bool(kernels[0].isfinite().all()) == (step not in (1, 5))
        # A sum of two products loses up to a rounding of the larger one.
        for torchs_own, kernels_own in zip(torchs[:2], kernels[:2], strict=True):
            torch.testing.assert_close(
                kernels_own, torchs_own, rtol=0, atol=16 * torch.finfo(dtype).eps, equal_nan=True
            )
        assert torch.equal(kernels[2], torchs[2])


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_averages_have_the_same_bits_at_every_level(
    dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_momentum, "config", lambda: Config(isa=level))
    generator = torch.Generator().manual_seed(3)
    average, values, weight = None, np.zeros(1003, str(dtype).removeprefix("torch.")), 0.0
    for _ in range(4):
        grad = torch.randn(1003, dtype=dtype, generator=generator)
        average = absorb(average, grad, torch.empty_like(grad), Blend(B, 3, gain=2.0))
        assert average is not None
        kept, weight = B * weight, B * weight + 3
        by, keep = (values.dtype.type(each) for each in (1 / weight * 2.0, kept / weight))
        values = grad.numpy() * by + values * keep
        assert average.values.numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("at", [0, 15, 16, 700, -2, -1])
def test_one_value_that_is_not_finite_keeps_all_of_an_average(at: int) -> None:
    average = absorbed(None, torch.ones(1003))
    grad = torch.full((1003,), 2.0)
    grad[at] = float("inf")
    average = absorbed(average, grad)
    assert average.values.tolist() == [1.0] * 1003
    assert float(average.weight) == B


def test_an_average_of_another_size_raises() -> None:
    average = absorbed(None, torch.ones(8))
    for numel in (7, 9):
        with pytest.raises(RuntimeError, match="size"):
            absorbed(average, torch.ones(numel))


def test_a_gradient_that_negates_its_memory_keeps_its_sign() -> None:
    target = torch.empty(4)
    average = absorbed(None, torch._neg_view(torch.ones(4)), target)
    assert target.tolist() == average.values.tolist() == [-1.0] * 4


def test_a_backward_pass_that_saved_what_the_kernel_writes_raises() -> None:
    target = torch.ones(4)
    saved = torch.ones(4, requires_grad=True) * target
    absorbed(None, torch.ones(4), target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_gradients_of_other_layouts_go_into_averages_by_their_places() -> None:
    grad = torch.arange(12.0).view(3, 4).t()  # [4, 3], its values not in order of rows
    target = torch.empty(4, 3)
    average = absorbed(None, grad, target)
    assert torch.equal(target, grad)
    assert torch.equal(average.values, grad)


def test_one_nan_is_gone_in_the_next_step() -> None:
    def work(transport: LocalTransport) -> list[float]:
        p = torch.nn.Parameter(torch.zeros(4))
        optimizer = wrap([p], transport, rule=loft.Mean())
        found = []
        for step in range(3):
            is_bad = step == 1 and transport.rank == 1
            backward([p], [torch.full((4,), float("nan") if is_bad else 2.0 + transport.rank)])
            optimizer.synchronize()
            assert p.grad is not None
            found.append(float(p.grad[0]))
            optimizer.zero_grad()
        return found

    for first, second, third in run_ranks(2, work):
        assert first == pytest.approx(2.5)
        assert second != second
        assert third == pytest.approx(2.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_averages_of_narrow_gradients_are_kept_in_float32(dtype: torch.dtype) -> None:
    grads = [torch.tensor([1.0 + step / 64]).to(dtype) for step in range(20)]
    average, wanted = None, torch.zeros(1, dtype=torch.float64)
    weight = 0.0
    for grad in grads:
        weight = B * weight + 1
        target = torch.empty(1, dtype=dtype)
        average = absorb(average, grad, target, Blend(B, 1, gain=1.0))
        wanted += (grad.double() - wanted) / weight
        assert average is not None
        assert average.values.dtype == torch.float32
        assert target.dtype == dtype
        torch.testing.assert_close(average.values.double(), wanted, rtol=1e-6, atol=0)


class Scaler:
    """A loss scale that changes, as a GradScaler's."""

    value = 1.0

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs * self.value


def test_averages_are_kept_without_the_loss_scale_and_sent_with_it() -> None:
    def work(transport: LocalTransport) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for scales in ([1.0] * 4, [1024.0, 2048.0, 0.5, 65536.0]):
            p, scaler = torch.nn.Parameter(torch.zeros(5)), Scaler()
            sent: list[Tensor] = []
            optimizer = wrap([p], transport, rule=loft.Median(), scaler=scaler)

            def note(_: Bucket, values: Tensor, sent: list[Tensor] = sent) -> None:
                sent.append(values.clone())

            optimizer.register_outgoing_hook(note)
            for step, scale in enumerate(scales):
                scaler.value = scale
                grad = gradient_at(p, step=step, batch=0, rank=transport.rank)
                backward([p], [grad * scale])
                optimizer.synchronize()
                assert p.grad is not None
                found.append(p.grad / scale)
                found.append(sent[-1] / scale)
                optimizer.zero_grad()
        return found[:8], found[8:]

    for plain, scaled in run_ranks(3, work):
        for one, other in zip(plain, scaled, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_a_frozen_parameter_waits_and_one_without_a_gradient_fades() -> None:
    def work(transport: LocalTransport) -> list[list[float]]:
        frozen, unused, used = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
        optimizer = wrap([frozen, unused, used], transport, rule=loft.Median())
        found = []
        for step in range(4):
            frozen.requires_grad_(step not in (1, 2))
            loss = 3 * used.sum()
            if step in (0, 3):
                loss = loss + 2 * frozen.sum() + 5 * unused.sum()
            loss.backward()
            optimizer.synchronize()
            found.append([float(p.grad) for p in (frozen, unused, used)])  # type: ignore[arg-type] # all have one
            optimizer.zero_grad()
        return found

    kept = [1.0, 0.9 / 1.9, 0.81 / 2.71, (0.729 + 1) / 3.439]
    for found in run_ranks(3, work):
        assert [each[0] for each in found] == pytest.approx([2.0, 0.0, 0.0, 2.0])
        assert [each[1] for each in found] == pytest.approx([5 * part for part in kept])
        assert [each[2] for each in found] == pytest.approx([3.0] * 4)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("rule", [loft.Median(), loft.Mean()], ids=str)
def test_a_parameter_that_is_frozen_stays_where_it_is(rule: Any, set_to_none: bool) -> None:
    def work(transport: LocalTransport) -> list[float]:
        frozen, used = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        optimizer = wrap([frozen, used], transport, rule=rule, lr=1.0)
        found = []
        for step in range(9):
            frozen.requires_grad_(step < 3 or step == 8)
            loss = used.sum() + frozen.sum() if frozen.requires_grad else used.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            found.append(float(frozen.detach()))
        return found

    for found in run_ranks(3, work):
        assert found == pytest.approx([-1.0, -2.0] + [-3.0] * 6 + [-4.0])


def test_a_group_that_is_added_late_begins_with_its_first_gradient() -> None:
    def work(transport: LocalTransport) -> list[float]:
        early, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        optimizer = wrap([early], transport, rule=loft.Median())
        for _ in range(3):
            (4 * early).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.add_param_group({"params": [late], "rule": "trimmed_mean:f=1"})
        for factor in (6, 12):
            (4 * early + factor * late).sum().backward()
            optimizer.step()
            found = [float(p.grad) for p in (early, late)]  # type: ignore[arg-type] # both have one
            optimizer.zero_grad()
        return found

    for found in run_ranks(3, work):
        assert found == pytest.approx([4.0, (0.9 * 6 + 12) / 1.9])


def test_averages_belong_to_parameters_when_buckets_change() -> None:
    # Two buckets of the first step become others in the order of arrival in the second.
    def work(transport: LocalTransport) -> list[list[float]]:
        params = [torch.nn.Parameter(torch.zeros(9)) for _ in range(5)]
        optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=80)
        found = []
        for step in range(3):
            total = sum(((at + 1.0) * (step + 1)) * p.sum() for at, p in enumerate(params))
            assert isinstance(total, Tensor)
            total.backward()
            optimizer.synchronize()
            found.append([float(p.grad[0]) for p in params])  # type: ignore[index] # all have one
            optimizer.zero_grad()
        return found

    means = [1.0, (0.9 + 2) / 1.9, (0.81 + 1.8 + 3) / 2.71]
    for found in run_ranks(3, work):
        for step, mean in enumerate(means):
            assert found[step] == pytest.approx([(at + 1) * mean for at in range(5)])


def test_zeroed_gradients_live_in_their_buckets_with_momentum() -> None:
    def work(transport: LocalTransport) -> list[float]:
        p = torch.nn.Parameter(torch.zeros(9))
        optimizer = wrap([p], transport, rule=loft.Median())
        found = []
        for step in range(3):
            ((step + 1.0) * p).sum().backward()
            optimizer.synchronize()
            assert p.grad is not None
            found.append(float(p.grad[3]))
            optimizer.zero_grad(set_to_none=False)
        return found

    for found in run_ranks(2, work):
        assert found == pytest.approx([1.0, (0.9 + 2) / 1.9, (0.81 + 1.8 + 3) / 2.71])


def test_a_worker_in_quarantine_goes_on_with_its_average() -> None:
    def work(transport: LocalTransport) -> tuple[float, float]:
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = wrap(
            [p],
            transport,
            rule=loft.TrimmedMean(f=1),
            diagnostics=loft.Suspicion(every=1, interval=1, patience=2),
            quarantine=loft.Quarantine(probation=4),
        )
        attack = loft.attacks.attach(optimizer, loft.attacks.NaN(), ranks=[3])
        sent = []
        optimizer.register_outgoing_hook(lambda _, values: sent.append(float(values[0])))
        was_held = False
        for step in range(60):
            held = optimizer.report().workers[3].in_quarantine_until is not None
            if held and not was_held:
                attack.remove()
            was_held = was_held or held
            (float(step) * p).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if was_held and not held:
                return sent[-1], step
        raise AssertionError("rank 3 was never held and let in again")

    results = run_ranks(4, work)
    assert len({sent for sent, _ in results}) == 1  # rank 3's too: it has absorbed all the same


# What an optimizer may be.


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, **options)


@pytest.mark.parametrize(
    ("options", "lr"),
    [
        ({"momentum": 0.9}, "lr=1 "),
        ({"momentum": 0.9, "nesterov": True}, "lr=1 "),
        ({"momentum": 0.75}, "lr=0.4 "),
        ({"momentum": 0.9, "dampening": 0.5}, "lr=0.5 "),
    ],
)
def test_momentum_on_top_of_momentum_is_refused_with_the_lr_to_use(
    options: dict[str, Any], lr: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"momentum=0 with {lr}in place of 0.1"):
        loft.DistributedOptimizer(sgd(**options), worker_momentum=0.9, transport=ALONE)


def test_robust_comes_with_momentum_unless_told_otherwise() -> None:
    robust = loft.Robust(f=0)
    assert (
        "worker_momentum"
        in loft.DistributedOptimizer(sgd(), rule=robust, transport=ALONE).state_dict()
    )
    with pytest.raises(ArgumentError, match=r"worker_momentum=0\.9 would count it twice"):
        loft.DistributedOptimizer(sgd(momentum=0.9), rule=robust, transport=ALONE)
    told = loft.DistributedOptimizer(
        sgd(momentum=0.9), rule=robust, transport=ALONE, worker_momentum=0.0
    )
    assert "worker_momentum" not in told.state_dict()
    plain = loft.DistributedOptimizer(sgd(momentum=0.9), rule=loft.Median(), transport=ALONE)
    assert "worker_momentum" not in plain.state_dict()


def test_a_group_with_momentum_is_not_added() -> None:
    optimizer = loft.DistributedOptimizer(sgd(), worker_momentum=0.9, transport=ALONE)
    with pytest.raises(ArgumentError, match=r"parameter group 1 has momentum=0\.5"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "momentum": 0.5})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("own", [0.0, 0.9])
def test_a_group_whose_rule_takes_another_worker_momentum_is_not_added(own: float) -> None:
    def robust() -> dict[str, Any]:
        return {"params": [torch.nn.Parameter(torch.zeros(1))], "rule": loft.Robust(0)}

    rule = loft.TrimmedMean(0)
    made = loft.DistributedOptimizer(sgd(momentum=own), rule=rule, transport=ALONE)
    with pytest.raises(ArgumentError, match=r"is 0\.9, unless given, .* made with 0; say it when"):
        made.add_param_group(robust())
    assert len(made.param_groups) == 1
    for given in (0.0, 0.9 - own):
        told = loft.DistributedOptimizer(
            sgd(momentum=own), rule=rule, transport=ALONE, worker_momentum=given
        )
        told.add_param_group(robust())
        assert len(told.param_groups) == 2


def test_a_scheduler_that_brings_momentum_is_refused_in_the_first_step() -> None:
    optimizer = loft.DistributedOptimizer(sgd(), worker_momentum=0.9, transport=ALONE)
    (parameter,) = optimizer.param_groups[0]["params"]
    options: dict[str, Any] = {"max_lr": 1.0, "total_steps": 10}
    torch.optim.lr_scheduler.OneCycleLR(optimizer, **options)
    parameter.sum().backward()
    with pytest.raises(ArgumentError, match=r"momentum=0\.95 since .* cycle_momentum=False"):
        optimizer.step()
    assert not parameter.any()
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.95


def test_a_scheduler_that_leaves_momentum_alone_is_taken() -> None:
    optimizer = loft.DistributedOptimizer(sgd(), worker_momentum=0.9, transport=ALONE)
    (parameter,) = optimizer.param_groups[0]["params"]
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
    parameter.sum().backward()
    optimizer.step()
    assert bool(parameter.all())


def test_a_state_with_momentum_is_not_loaded() -> None:
    optimizer = loft.DistributedOptimizer(sgd(), worker_momentum=0.9, transport=ALONE)
    with pytest.raises(ArgumentError, match=r"momentum=0\.9, and worker_momentum=0\.9 would count"):
        optimizer.load_state_dict(sgd(momentum=0.9).state_dict())
    assert optimizer.param_groups[0]["momentum"] == 0


def test_adam_is_advised_to_leave_its_first_moment_out(caplog: Any) -> None:
    def adam(beta: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], betas=(beta, 0.99))

    loft.DistributedOptimizer(adam(0.0), worker_momentum=0.9, transport=ALONE)
    assert not caplog.records
    loft.DistributedOptimizer(adam(0.9), worker_momentum=0.9, transport=ALONE)
    assert "use betas=(0.0, 0.99)" in caplog.text
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], betas=(0.0, 0.99))  # torch takes it


@pytest.mark.parametrize("how", ["scheduler", "loaded", "group"])
def test_a_first_moment_that_adam_gets_later_is_said_once(how: str, caplog: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    adam = torch.optim.Adam([parameter], betas=(0.0, 0.99))
    optimizer = loft.DistributedOptimizer(adam, worker_momentum=0.9, transport=ALONE)
    later = torch.nn.Parameter(torch.zeros(3))
    if how == "scheduler":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    elif how == "loaded":
        optimizer.load_state_dict(torch.optim.Adam([torch.zeros(3)]).state_dict())
    else:
        optimizer.add_param_group({"params": [later], "betas": (0.9, 0.99)})
    for _ in range(2):
        (parameter.sum() + later.sum()).backward()
        optimizer.step()
    said = [
        record.message for record in caplog.records if "averages gradients by" in record.message
    ]
    assert len(said) == 1
    assert f"parameter group {int(how == 'group')} averages gradients by betas=(0.9" in said[0]
    assert "cycle_momentum=False" in said[0]


@pytest.mark.parametrize("wrong", [1.0, -0.1, float("nan"), float("inf")])
def test_a_momentum_outside_its_limits_is_refused(wrong: float) -> None:
    with pytest.raises(ArgumentError, match="must be >= 0 and < 1"):
        loft.DistributedOptimizer(sgd(), worker_momentum=wrong, transport=ALONE)


@pytest.mark.parametrize("options", [{"worker_momentum": "0.9"}, {"scaler": 2.0}])
def test_what_is_no_momentum_and_no_scaler_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"must be a number|give the torch\.amp"):
        loft.DistributedOptimizer(sgd(), transport=ALONE, **options)


# What is saved.


def trained(transport: Any, *, steps: int = 3) -> Any:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = wrap([p], transport, rule=loft.Median(), lr=0.0)
    for step in range(steps):
        train(optimizer, float(step + transport.rank))
    return optimizer


def train(optimizer: Any, value: float) -> float:
    (p,) = optimizer.param_groups[0]["params"]
    (value * p).sum().backward()
    optimizer.step()
    reduced = float(p.grad[0])
    optimizer.zero_grad()
    return reduced


@pytest.mark.parametrize("whose", ["own", "rank 0's", "only rank 0 its own"])
def test_averages_go_on_on_every_rank_or_on_none(whose: str) -> None:
    def work(transport: LocalTransport, states: list[Any]) -> float:
        optimizer = trained(transport, steps=0)
        if whose == "own":
            optimizer.load_state_dict(states[transport.rank])
        elif whose == "rank 0's" or transport.rank == 0:
            optimizer.load_state_dict(states[0])
        return train(optimizer, 10.0)

    states = run_ranks(3, lambda end: copy.deepcopy(trained(end).state_dict()))
    # Of ranks 0, 1 and 2 the middle one's average of 1, 2, 3, and then 10.
    went_on = (0.729 * 1 + 0.81 * 2 + 0.9 * 3 + 10) / 3.439
    expected = went_on if whose == "own" else 10.0
    assert run_ranks(3, lambda end: work(end, states)) == pytest.approx([expected] * 3)


def test_a_state_of_another_world_begins_anew() -> None:
    states = run_ranks(3, lambda end: copy.deepcopy(trained(end).state_dict()))

    def work(transport: LocalTransport) -> float:
        optimizer = trained(transport, steps=0)
        optimizer.load_state_dict(states[transport.rank])
        return train(optimizer, 10.0)

    assert run_ranks(2, work) == pytest.approx([10.0] * 2)


def test_a_process_that_has_made_steps_keeps_its_averages() -> None:
    optimizer = trained(ALONE)
    optimizer.load_state_dict(copy.deepcopy(trained(ALONE, steps=0).state_dict()))
    assert train(optimizer, 10.0) == pytest.approx((0 + 0.81 * 1 + 0.9 * 2 + 10) / 3.439)


def test_a_state_with_averages_loads_into_an_optimizer_without() -> None:
    state = trained(ALONE).state_dict()
    sgd().load_state_dict(state)
    wrap([torch.nn.Parameter(torch.zeros(2))], ALONE, worker_momentum=0.0).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {"process": None},
        {"rank": "0"},
        {"world_size": True},
        {"weight": float("nan")},
        {"weight": -1.0},
        {"weight": 2.0**54},
        pytest.param({"weight": 10**400}, id="a weight that no float holds"),
        {"weight": None},
        {"averages": None},
        {"averages": {"p0": 3}},
        {"averages": {"p0": torch.zeros(3)}},
        {"averages": {"p0": torch.zeros(2, dtype=torch.float64)}},
        {"averages": {"p0": torch.full((2,), float("nan"))}},
        {"averages": {"other": torch.zeros(2)}},
        {"average_weights": None},
        {"average_weights": {}},
        {"average_weights": {"p0": torch.tensor(1.0)}},
        {"average_weights": {"p0": torch.ones(1, dtype=torch.float64)}},
        {"average_weights": {"p0": torch.tensor(-1.0, dtype=torch.float64)}},
        {"average_weights": {"p0": torch.tensor(2.0**54, dtype=torch.float64)}},
        {"average_weights": {"p0": torch.tensor(float("inf"), dtype=torch.float64)}},
    ],
    ids=str,
)
def test_averages_that_cannot_have_been_saved_change_nothing(wrong: Any) -> None:
    optimizer = trained(ALONE, steps=0)
    state = copy.deepcopy(trained(ALONE).state_dict())
    own = state["worker_momentum"]
    state["worker_momentum"] = own | wrong if isinstance(wrong, dict) else wrong
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ArgumentError, match=r"'worker_momentum' cannot be taken: .* begin anew"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert train(optimizer, 10.0) == pytest.approx(10.0)


def test_averages_take_what_sgds_momentum_would() -> None:
    p = torch.nn.Parameter(torch.zeros(1000, 7))
    optimizer = wrap([p], ALONE)
    p.sum().backward()
    optimizer.step()
    assert optimizer._momentum.memory_bytes() == p.nbytes + 8  # and what it weighs
    assert optimizer.state_dict()["worker_momentum"]["averages"]["p0"].shape == p.shape
    assert not optimizer.state  # and the optimizer keeps nothing


def test_averages_stay_with_processes_that_remain_and_who_joins_begins_small() -> None:
    def make(transport: LocalTransport) -> tuple[Moving, Any]:
        moving = Moving(transport)
        return moving, wrap([torch.nn.Parameter(torch.zeros(2))], moving, lr=0.0)

    def begin(transport: LocalTransport) -> tuple[Moving, Any]:
        moving, optimizer = make(transport)
        for _ in range(3):
            train(optimizer, transport.rank + 1.0)
        return moving, optimizer

    def go_on(transport: LocalTransport) -> float:
        # Rank 2 becomes rank 0, rank 0 becomes rank 1, and a new process is rank 2.
        if transport.rank == 2:
            optimizer = make(transport)[1]
        else:
            moving, optimizer = before[(2, 0)[transport.rank]]
            moving.end = transport
            optimizer.begin_world()
        return train(optimizer, 10.0 * (transport.rank + 1))

    before = run_ranks(3, begin)
    kept = 0.9 * (1 + 0.9 + 0.81)  # of what 3 steps weigh
    total = (kept * 3 + 10) + (kept * 1 + 20) + 30
    wanted = total / (2 * (kept + 1) + 1)
    assert run_ranks(3, go_on) == pytest.approx([wanted] * 3)


class Elastic:
    """An optimizer that commits and goes back as ``loft.elastic.State`` has it do."""

    def __init__(self, transport: LocalTransport, *, loaded: Any = None) -> None:
        self.moving = Moving(transport)
        self.optimizer = wrap([torch.nn.Parameter(torch.zeros(2))], self.moving, lr=0.0)
        if loaded is not None:
            self.optimizer.load_state_dict(loaded)
        self.commit()

    def commit(self) -> None:
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    def fail(self) -> None:
        """Let a gradient into the averages, in a step that does not end, and go back."""
        (p,) = self.optimizer._options.named().values()
        self.optimizer._momentum.send(p, torch.full((2,), 1e6), torch.zeros(2), Blend(B, 1, 1.0))
        self.optimizer.load_state_dict(copy.deepcopy(self.saved))

    def go_on(self, transport: LocalTransport) -> None:
        self.moving.end = transport
        self.optimizer.begin_world()
        self.commit()


def without_rank_0(before: list[Elastic], value: float) -> list[float]:
    """Return what a step of the others reduces in a world of their own; it is committed."""

    def go_on(transport: LocalTransport) -> float:
        rank = before[transport.rank + 1]
        rank.go_on(transport)
        return train(rank.optimizer, value)

    return run_ranks(len(before) - 1, go_on)


@pytest.mark.parametrize("steps_since", [0, 2])
@pytest.mark.parametrize("steps", [0, 3])
def test_what_came_into_averages_since_the_commit_is_gone_after_each_loss(
    steps: int, steps_since: int
) -> None:
    def begin(transport: LocalTransport) -> Elastic:
        rank = Elastic(transport)
        for _ in range(steps):
            train(rank.optimizer, transport.rank + 1.0)
        rank.commit()
        for _ in range(steps_since):
            train(rank.optimizer, 1e3)
        rank.fail()
        return rank

    before = run_ranks(4, begin)
    kept = 0.9 * (1 + 0.9 + 0.81) if steps else 0.0
    held = [kept * rank + 10 for rank in (2, 3, 4)]
    assert without_rank_0(before, 10.0) == pytest.approx([sum(held) / (3 * (kept + 1))] * 3)
    # The next rank is lost before anything was committed in this world.
    for rank in before[1:]:
        rank.fail()
    held = [kept * rank + 20 for rank in (3, 4)]
    assert without_rank_0(before[1:], 20.0) == pytest.approx([sum(held) / (2 * (kept + 1))] * 2)


@pytest.mark.parametrize("whose", ["own", "rank 0's"])
def test_a_resumed_job_goes_back_to_what_its_first_step_began_with(whose: str) -> None:
    states = run_ranks(2, lambda transport: trained(transport).state_dict())

    def begin(transport: LocalTransport) -> tuple[Elastic, float]:
        rank = Elastic(transport, loaded=states[transport.rank if whose == "own" else 0])
        first = train(rank.optimizer, 10.0)
        train(rank.optimizer, 1e3)
        rank.fail()
        return rank, first

    def go_on(transport: LocalTransport) -> float:
        rank = before[transport.rank][0]
        rank.go_on(transport)
        return train(rank.optimizer, 10.0)

    before = run_ranks(2, begin)
    firsts = [first for _, first in before]
    assert (firsts[0] == pytest.approx(10.0)) == (whose != "own")  # rank 0's are left out
    assert run_ranks(2, go_on) == pytest.approx(firsts)


def test_loaded_averages_go_on_in_a_world_that_begins_within_the_first_step() -> None:
    states = run_ranks(2, lambda transport: trained(transport).state_dict())

    def work(transport: LocalTransport, *, is_cut: bool) -> float:
        rank = Elastic(transport, loaded=states[transport.rank])
        if is_cut:
            momentum, named = rank.optimizer._momentum, rank.optimizer._options.named()
            momentum.join(Channel(transport, "first", 5.0), most_samples=2)
            momentum.send(named["p0"], torch.full((2,), 1e6), torch.zeros(2), Blend(B, 1, 1.0))
            rank.go_on(transport)
        return train(rank.optimizer, 10.0)

    whole = run_ranks(2, lambda transport: work(transport, is_cut=False))
    assert run_ranks(2, lambda transport: work(transport, is_cut=True)) == pytest.approx(whole)


def test_a_state_that_tells_no_process_is_taken() -> None:
    state = copy.deepcopy(trained(ALONE).state_dict())
    del state["worker_momentum"]["process"]
    optimizer = trained(ALONE, steps=0)
    optimizer.load_state_dict(state)
    assert train(optimizer, 10.0) == pytest.approx(train(trained(ALONE), 10.0))


def test_a_new_world_does_not_go_back_to_what_was_loaded_before_the_last_step() -> None:
    optimizer = trained(ALONE)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    after = train(optimizer, 10.0)
    optimizer.begin_world()
    kept = 0.9 * (1 + 0.9 + 0.81 + 0.729)
    assert train(optimizer, 0.0) == pytest.approx(after * kept / (kept + 1))


def freezing(transport: LocalTransport) -> tuple[Any, torch.nn.Parameter]:
    """Return an optimizer of two parameters, and the first, which is to be frozen."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return wrap(parameters, transport, lr=1.0), parameters[0]


def steps_of(optimizer: Any, values: list[float]) -> list[float]:
    """Return where the first parameter is after each step that it has a gradient in, if thawed."""
    found = []
    for value in values:
        each = [p for p in optimizer.param_groups[0]["params"] if p.requires_grad]
        sum(value * p.sum() for p in each).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(optimizer.param_groups[0]["params"][0].detach()[0]))
    return found


def test_what_is_saved_while_a_parameter_is_frozen_goes_on_as_it_thaws() -> None:
    def work(transport: LocalTransport, *, is_cut: bool) -> list[float]:
        optimizer, frozen = freezing(transport)
        steps_of(optimizer, [transport.rank + 1.0, 2.0, 3.0])
        frozen.requires_grad_(False)
        steps_of(optimizer, [4.0])
        if is_cut:
            state, at = copy.deepcopy(optimizer.state_dict()), frozen.detach().clone()
            optimizer, frozen = freezing(transport)
            frozen.requires_grad_(False).copy_(at)
            optimizer.load_state_dict(state)
        steps_of(optimizer, [5.0])  # a first step, of which it is no part
        if is_cut:
            assert set(optimizer.state_dict()["worker_momentum"]["averages"]) == {"p0", "p1"}
        frozen.requires_grad_(True)
        return steps_of(optimizer, [10.0, 20.0])

    whole = run_ranks(3, lambda transport: work(transport, is_cut=False))
    assert run_ranks(3, lambda transport: work(transport, is_cut=True)) == whole


def test_a_state_is_saved_and_taken_where_every_parameter_is_frozen() -> None:
    def work(transport: LocalTransport) -> list[float]:
        optimizer, frozen = freezing(transport)
        steps_of(optimizer, [1.0, 2.0])
        at = frozen.detach().clone()
        for p in optimizer.param_groups[0]["params"]:  # as a generator's step leaves its critic
            p.requires_grad_(False)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer, _ = freezing(transport)
        for p in optimizer.param_groups[0]["params"]:
            p.requires_grad_(False).copy_(at)
        optimizer.load_state_dict(state)
        for p in optimizer.param_groups[0]["params"]:
            p.requires_grad_(True)
        return steps_of(optimizer, [10.0])

    def uncut(transport: LocalTransport) -> list[float]:
        return steps_of(freezing(transport)[0], [1.0, 2.0, 10.0])[-1:]

    assert run_ranks(2, work) == run_ranks(2, uncut)


@pytest.mark.parametrize("num_frozen", [1, 2])
def test_a_job_that_loses_a_rank_while_parameters_are_frozen_goes_on_as_they_thaw(
    num_frozen: int,
) -> None:
    def freeze(optimizer: Any, is_frozen: bool) -> None:
        for p in optimizer.param_groups[0]["params"][:num_frozen]:
            p.requires_grad_(not is_frozen)

    def begin(transport: LocalTransport) -> tuple[Moving, Any]:
        moving = Moving(transport)
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = wrap(parameters, moving, lr=0.0)
        steps_of(optimizer, [transport.rank + 1.0] * 3)
        saved = copy.deepcopy(optimizer.state_dict())
        steps_of(optimizer, [1e3])
        freeze(optimizer, True)
        optimizer.load_state_dict(saved)
        return moving, optimizer

    def go_on(transport: LocalTransport) -> list[float]:
        moving, optimizer = before[transport.rank + 1]
        moving.end = transport
        optimizer.begin_world()
        assert [p.requires_grad for p in optimizer._world.parameters].count(False) == num_frozen
        freeze(optimizer, False)
        parameters = optimizer.param_groups[0]["params"]
        sum(10.0 * p.sum() for p in parameters).backward()
        optimizer.synchronize()
        return [float(p.grad[0]) for p in parameters]

    before = run_ranks(3, begin)
    kept = 0.9 * (1 + 0.9 + 0.81)  # of what 3 steps weigh; ranks 1 and 2 held 2 and 3
    held = (kept * 2 + 10 + kept * 3 + 10) / (2 * (kept + 1))
    for found in run_ranks(2, go_on):
        assert found == pytest.approx([held] * 2)
