"""What a script does with an optimizer, it does with a wrapped one, on several ranks."""

from __future__ import annotations

import inspect
import io
import warnings
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn.functional as F

import loft_hvd as loft
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError, UsageError
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference

RULES = [loft.Mean(), loft.Median()]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's own batch."""
    x, y = make_data(8 * hvd.size()).tensors
    return x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]


def backward(model: torch.nn.Module) -> None:
    x, y = batch()
    F.mse_loss(model(x), y).backward()


def grads_of(model: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all gradients, [numel]."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def own_grads() -> torch.Tensor:
    """Return this rank's own gradients of ``make_model()``, [numel].

    Of a model without an optimizer of ours: in a wrapped one the result may take their place as
    soon as ``backward`` has ended.
    """
    twin = make_model()
    backward(twin)
    return grads_of(twin)


def wrapped(model: torch.nn.Module, kind: str = "sgd", rule: loft.Rule | None = None) -> Any:
    return loft.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()), model.named_parameters(), rule=rule
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_mean_equals_horovods_own_and_ranks_stay_equal(rule: loft.Rule, kind: str) -> None:
    model, theirs = make_model(), make_model()
    ours = wrapped(model, kind, rule)
    horovods = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](theirs.parameters()), theirs.named_parameters()
    )
    for net, optimizer in ((model, ours), (theirs, horovods)):
        for _ in range(10):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()
    if isinstance(rule, loft.Mean):
        assert max_difference(model, theirs) <= 1e-6
    weights = torch.cat([value.detach().flatten() for value in model.parameters()])
    everyone = hvd.allgather(weights.view(torch.int32).view(1, -1))
    assert bool((everyone == everyone[0]).all())


def test_scheduler_drives_the_learning_rate_without_a_warning() -> None:
    model = make_model()
    optimizer = wrapped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4)


def test_clipping_sees_the_reduced_gradients() -> None:
    model = make_model()
    optimizer = wrapped(model)
    backward(model)
    optimizer.synchronize()
    before = grads_of(model)
    assert bool((hvd.allgather(before.view(1, -1)) == before).all())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=float(before.norm()) / 2)
    weights = [p.detach().clone() for p in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    assert float(norm) == pytest.approx(float(before.norm()))
    moved = torch.cat([(p - w).flatten() for p, w in zip(model.parameters(), weights, strict=True)])
    assert float(moved.detach().norm()) < 0.05 * 1.95 * float(before.norm())


def test_step_after_synchronize_without_skip_warns_and_does_not_reduce_twice() -> None:
    model = make_model()
    optimizer = wrapped(model)
    backward(model)
    optimizer.synchronize()
    grads = grads_of(model)
    horovods = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after"
    with pytest.warns(UserWarning, match=horovods):
        optimizer.step()
    assert torch.equal(grads_of(model), grads)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_reduced_as_horovods_are(kind: Any, as_dense: bool) -> None:
    tables = [torch.nn.Embedding(10, 3, sparse=True) for _ in range(2)]
    optimizers = []
    for table, wrapper in zip(tables, (loft, hvd), strict=True):
        torch.nn.init.ones_(table.weight)
        inner = kind(list(table.parameters()), lr=0.1)
        optimizers.append(wrapper.DistributedOptimizer(inner, sparse_as_dense=as_dense))
    hvd.broadcast_optimizer_state(optimizers[0], root_rank=0)  # Horovod's own would count a step
    for step in range(3):
        rows = torch.tensor([step, hvd.rank(), 5, 5])
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            (table(rows) ** 2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=0, atol=1e-6)


def unequal_sizes() -> list[int]:
    """Return sizes of 8 samples a rank: 1 on the last, the rest of it on rank 0."""
    sizes = [8] * hvd.size()
    if hvd.size() > 1:
        sizes[0], sizes[-1] = 15, 1
    return sizes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": hvd.Compression.fp16},
        {"backward_passes_per_step": 2},
        {"op": hvd.Sum, "groups": 2},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
def test_wrapping_horovods_optimizer_is_the_direct_form(
    options: dict[str, Any], rule: loft.Rule
) -> None:
    if not isinstance(rule, loft.Mean) and {"op", "gradient_predivide_factor"} & options.keys():
        pytest.skip("a robust rule takes no sum and no predivide factor")
    sizes = unequal_sizes()
    x, y = make_data(sum(sizes)).tensors
    begin = sum(sizes[: hvd.rank()])
    mine = slice(begin, begin + sizes[hvd.rank()])
    num_passes = options.get("backward_passes_per_step", 1)

    def train(*, is_wrapping: bool) -> torch.nn.Module:
        model = make_model()
        balancer = loft.Balancer(sum(sizes), sizes)
        inner = OPTIMIZERS["sgd"](model.parameters())
        if is_wrapping:
            horovods = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
            before = type(horovods)
            optimizer = loft.DistributedOptimizer(horovods, rule=rule, balancer=balancer)
            assert (before is torch.optim.SGD, type(horovods)) == (False, torch.optim.SGD)
        else:
            optimizer = loft.DistributedOptimizer(
                inner, model.named_parameters(), rule=rule, balancer=balancer, **options
            )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(num_passes):
                with balancer.step(sizes[hvd.rank()]):
                    F.mse_loss(model(x[mine]), y[mine]).backward()
            if is_wrapping:
                assert not horovods._handles  # one reduction a step: Horovod's has not begun
            optimizer.step()
        return model

    # Horovod may add up in another order where it fuses other tensors together.
    assert max_difference(train(is_wrapping=True), train(is_wrapping=False)) <= 1e-6


@pytest.mark.skipif("hvd.size() == 1", reason="one rank alone takes any f")
def test_a_wrap_that_is_refused_leaves_horovods_optimizer_as_it_was() -> None:
    model, theirs = make_model(), make_model()
    horovods, same = [
        hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), net.named_parameters())
        for net in (model, theirs)
    ]
    kind, nodes, delays = type(horovods), len(horovods._grad_accs), dict(horovods._allreduce_delay)
    with pytest.raises(AggregationError, match="2\\*f < rows"):
        loft.DistributedOptimizer(horovods, rule=loft.TrimmedMean(f=hvd.size()))
    assert type(horovods) is kind
    assert (len(horovods._grad_accs), horovods._allreduce_delay) == (nodes, delays)
    for net, optimizer in ((model, horovods), (theirs, same)):
        backward(net)
        optimizer.step()
    assert max_difference(model, theirs) <= 1e-6


def test_wrapping_keeps_the_process_set() -> None:
    everyone = hvd.ProcessSet(range(hvd.size()))
    everyone.process_set_id = 0  # as Horovod numbers it
    model = make_model()
    sgd = OPTIMIZERS["sgd"](model.parameters())
    horovods = hvd.DistributedOptimizer(sgd, process_set=everyone)
    assert loft.DistributedOptimizer(horovods).world_size == hvd.size()


def test_the_reverse_order_is_an_error_with_the_edit() -> None:
    model = make_model()
    ours = wrapped(model)
    with pytest.raises(
        ArgumentTypeError, match=r"turn them round: loft\.DistributedOptimizer\(hvd"
    ):
        hvd.DistributedOptimizer(ours, named_parameters=model.named_parameters())


def test_arguments_are_horovods_own_in_its_order() -> None:
    theirs = list(inspect.signature(hvd.DistributedOptimizer).parameters)
    ours = inspect.signature(loft.DistributedOptimizer).parameters
    assert list(ours)[: len(theirs)] == theirs
    positional = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == theirs


@pytest.mark.parametrize("name", ["Adasum", "Min"])
def test_an_op_that_is_not_offered_is_refused_by_name(name: str) -> None:
    sgd = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=f"op=hvd.{name} is not"):
        loft.DistributedOptimizer(sgd, op=getattr(hvd, name))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_dict_round_trip_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    straight, resumed = make_model(), make_model()
    one, two = wrapped(straight, kind), wrapped(resumed, kind)
    for step in range(6):
        for net, optimizer in ((straight, one), (resumed, two)):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()
        if step == 2:
            file = io.BytesIO()
            torch.save({"model": resumed.state_dict(), "optimizer": two.state_dict()}, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            resumed = make_model()
            resumed.load_state_dict(state["model"])
            two = wrapped(resumed, kind)
            two.load_state_dict(state["optimizer"])
    assert max_difference(straight, resumed) == 0.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_broadcast_optimizer_state_neither_moves_nor_hangs(kind: str) -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = wrapped(model, kind)
    if hvd.rank() == 0:  # rank 0 has trained already: a late joiner has an empty state
        plain = OPTIMIZERS[kind](model.parameters())
        backward(make_model())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        plain.step()
        optimizer.load_state_dict(plain.state_dict())
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    states = [value for entry in optimizer.state.values() for value in entry.values()]
    flat = torch.cat([torch.as_tensor(value, dtype=torch.float32).flatten() for value in states])
    assert float(flat.abs().sum()) > 0
    assert bool((hvd.allgather(flat.view(1, -1)) == flat).all())


def test_fresh_state_starts_as_an_unwrapped_optimizer_does() -> None:
    model, alone = make_model(), make_model()
    optimizer, plain = wrapped(model, "adamw"), OPTIMIZERS["adamw"](alone.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x, y = make_data(16).tensors
    for net, stepper in ((model, optimizer), (alone, plain)):
        stepper.zero_grad()
        F.mse_loss(net(x), y).backward()
        stepper.step()
    assert max_difference(model, alone) <= 1e-6


def test_step_hooks_fire_once_a_step() -> None:
    model = make_model()
    optimizer = wrapped(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert calls == ["pre", "post"] * 2


def test_zero_grad_while_gradients_are_on_the_wire_is_refused() -> None:
    if hvd.size() == 1:
        pytest.skip("nothing is on the wire in a world of one")
    model = make_model()
    optimizer = wrapped(model)
    backward(model)
    with pytest.raises(UsageError, match="on the wire"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


def test_too_many_backward_passes_are_refused() -> None:
    model = make_model()
    optimizer = wrapped(model)
    backward(model)
    with pytest.raises(UsageError, match="backward_passes_per_step=1"):
        backward(model)
    if hvd.size() == 1:
        optimizer.step()
        return
    # The second pass has been added to what is on its way.
    with pytest.raises(UsageError, match="was changed between"):
        optimizer.step()
    optimizer._world._reducer.engine.finish()  # so that no rank leaves while another reads


@pytest.mark.skipif("hvd.size() == 1", reason="a world of one is the identity")
def test_parameters_without_a_gradient_stay_as_they_are_unless_a_rank_has_one() -> None:
    model = make_model()
    unused, extra = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), unused, extra], lr=0.5, weight_decay=1.0),
        [*model.named_parameters(), ("unused", unused), ("extra", extra)],
    )
    backward(model)
    if hvd.rank() == 1:
        (hvd.size() * extra).sum().backward()
    optimizer.step()
    assert unused.grad is None
    assert unused.tolist() == [1.0] * 3
    assert extra.tolist() == [1.0 - 0.5 * (1.0 + 1.0)] * 3


def test_closure_is_reduced() -> None:
    model, theirs = make_model(), make_model()
    with_closure, without = wrapped(model), wrapped(theirs)

    def closure() -> float:
        with_closure.zero_grad()
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.item()

    for _ in range(3):
        assert with_closure.step(closure) > 0
        without.zero_grad()
        backward(theirs)
        without.step()
    assert max_difference(model, theirs) == 0.0


def test_parameter_groups_may_have_rules_of_their_own() -> None:
    model = make_model()
    first, last = model[0], model[2]  # type: ignore[index]  # a Sequential
    groups = [{"params": first.parameters(), "rule": "median"}, {"params": last.parameters()}]
    optimizer = loft.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model.named_parameters())
    twin = make_model()
    backward(twin)
    local = {name: p.grad.flatten() for name, p in twin.named_parameters()}  # type: ignore[union-attr]
    backward(model)
    optimizer.synchronize()
    for name, parameter in model.named_parameters():
        rows = hvd.allgather(local[name].view(1, -1), name=f"rows.{name}")
        expected = loft.median(rows) if name.startswith("0") else rows.mean(dim=0)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.flatten(), expected)
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_fp16_on_the_wire_is_close_and_equal_on_every_rank(rule: loft.Rule) -> None:
    model = make_model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.Compression.fp16,
        rule=rule,
    )
    backward(model)
    optimizer.step()
    reduced = grads_of(model)
    rows = hvd.allgather(own_grads().view(1, -1))
    expected = loft.aggregate(rows, rule)
    torch.testing.assert_close(reduced, expected, rtol=2e-3, atol=1e-4)
    assert bool((hvd.allgather(reduced.view(1, -1)) == reduced).all())


def test_no_warning_in_a_plain_loop() -> None:
    model = make_model()
    optimizer = wrapped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()


ATTACKS = [
    loft.attacks.SignFlip(scale=10),
    loft.attacks.Scaled(factor=1e4),
    loft.attacks.Gaussian(sigma=1e3),
    loft.attacks.Zero(),
    loft.attacks.NaN(),
    loft.attacks.HugeValue(),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_trimmed_mean_keeps_an_attacked_job_within_the_honest_range(
    attack: loft.attacks.Attack,
) -> None:
    if hvd.size() < 3:
        pytest.skip("a rule with f=1 needs three ranks")
    model = make_model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        rule=loft.TrimmedMean(f=1),
    )
    loft.attacks.attach(optimizer, attack, ranks=[1])
    backward(model)
    optimizer.step()
    reduced = grads_of(model)
    rows = hvd.allgather(own_grads().view(1, -1))
    honest = rows[[rank for rank in range(hvd.size()) if rank != 1]]
    assert bool((reduced >= honest.amin(dim=0)).all())
    assert bool((reduced <= honest.amax(dim=0)).all())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_twins_have_names_of_their_own(rule: loft.Rule) -> None:
    """Two models of one kind, no names given, both on their way at once, and a later one."""
    expected = loft.allreduce(own_grads(), rule, name="twins")
    for _ in range(2):  # a second training while the first one's optimizers are still there
        models = make_model(), make_model()
        optimizers = [
            loft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=rule)
            for model in models
        ]
        for _ in range(2):
            for model in models:
                model.zero_grad()
                backward(model)
            for optimizer in reversed(optimizers):
                optimizer.synchronize()
            for model in models:
                torch.testing.assert_close(grads_of(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif("hvd.size() == 1", reason="nobody else reads the same")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ranks_on_the_same_data_are_named_and_who_sent_nan_into_a_mean(rule: loft.Rule) -> None:
    model, pair = make_model(), [0, hvd.size() - 1]
    optimizer = wrapped(model, "sgd", rule)
    reader = 0 if hvd.rank() in pair else hvd.rank()
    for step in range(1, 31):
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(1000 * step + reader)
        x, y = torch.randn(4, 6, generator=random), torch.randn(4, 2, generator=random)
        loss = F.mse_loss(model(x), y)
        (loss * (torch.nan if (hvd.rank(), step) == (pair[1], 30) else 1.0)).backward()
        optimizer.step()
    report = optimizer.report()
    assert [list(group.ranks) for group in report.same_data] == [pair]
    lost = [(each.step, each.ranks, each.parameter[:2]) for each in report.not_finite]
    assert lost == ([(30, (pair[1],), "2.")] if isinstance(rule, loft.Mean) else [])
