"""The wrapped optimizer: groups, closures, scalers and parameters that come and go."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import (
    AggregationError,
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    PlanError,
    UsageError,
)
from loft_hvd.optimizer.wrapper import OptimizerProxy
from loft_hvd.runlog import read_run_log
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.alone import model, wrap


def test_a_parameter_that_thaws_is_not_left_to_each_rank() -> None:
    def work(transport: LocalTransport) -> None:
        found = model()
        found.first.weight.requires_grad_(False)
        optimizer = wrap(torch.optim.SGD(found.parameters(), lr=0.1), transport=transport)
        found.first.weight.requires_grad_(True)
        found(torch.ones(2, 3)).sum().backward()
        with pytest.raises(UsageError, match=r"shape \[4, 3\], has a gradient, but was frozen"):
            optimizer.step()

    run_ranks(2, work)


def test_a_group_is_added_whole_or_not_at_all() -> None:
    def work(transport: LocalTransport) -> tuple[float, float]:
        found = model()
        names = found.named_parameters()
        optimizer = wrap(
            torch.optim.SGD(found.parameters(), lr=0.1), named_parameters=names, transport=transport
        )
        with pytest.raises(ArgumentTypeError, match="is not a rule"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "rule": 3})
        assert len(optimizer.param_groups) == 1
        late = torch.nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [late]})
        (found(torch.ones(2, 3)).sum() + float(transport.rank) * late.sum()).backward()
        optimizer.step()
        return float(late.detach()), float(found.first.weight.detach().sum())

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0] == pytest.approx(1.0 - 0.1 * 0.5)


def test_the_run_log_tells_of_the_rule_that_a_group_brings(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> None:
        optimizer = wrap(transport=transport, log_dir=tmp_path)
        for rule in (None, "median", "median"):  # no rule of its own, a new one, a known one
            group = {"params": [torch.nn.Parameter(torch.ones(1))]}
            optimizer.add_param_group(group | ({} if rule is None else {"rule": rule}))

    run_ranks(2, work)
    (path,) = tmp_path.iterdir()
    lines = [entry for entry in read_run_log(path) if entry["kind"] == "rules"]
    assert [line["rules"] for line in lines] == [["mean"], ["mean", "median"]]


def test_a_closure_may_be_evaluated_twice_in_a_step() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    def work(transport: LocalTransport) -> float:
        found = model()
        optimizer = wrap(Twice(found.parameters(), lr=0.1), transport=transport)

        def closure() -> float:
            optimizer.zero_grad()
            loss = found(torch.full((2, 3), 1.0 + transport.rank)).sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        return float(found.first.weight.detach().sum())

    assert len(set(run_ranks(2, work))) == 1


def test_a_grad_scaler_reaches_a_fused_optimizer() -> None:
    values = []
    for is_wrapped in (False, True):
        found = model()
        inner = torch.optim.AdamW(found.parameters(), lr=0.1, fused=True)
        optimizer: Any = wrap(inner) if is_wrapped else inner
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
        for step in range(12):
            optimizer.zero_grad()
            loss = found(torch.full((2, 3), 1e12 if step == 3 else 1.0)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        values.append(torch.cat([parameter.detach().flatten() for parameter in found.parameters()]))
    assert bool(values[0].isfinite().all())
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)


def test_parameters_are_not_added_while_a_step_is_under_way() -> None:
    def work(transport: LocalTransport) -> list[float]:
        parameter, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        sgd = torch.optim.SGD([parameter], lr=1.0)
        optimizer = loft.DistributedOptimizer(sgd, [("p", parameter)], transport=transport)
        (4 * parameter).sum().backward()
        with pytest.raises(UsageError, match="between steps"):
            optimizer.add_param_group({"params": [late]})
        optimizer.step()
        optimizer.add_param_group({"params": [late]})
        optimizer.zero_grad()
        (2 * parameter + 3 * late).sum().backward()
        optimizer.step()
        return [*parameter.tolist(), *late.tolist()]

    assert run_ranks(2, work) == [[-6.0, -3.0]] * 2


class _Picky(torch.optim.SGD):
    """Looks at a state only once torch has put it in place, as Adam does."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch's own
        if any(group["lr"] == "fast" for group in self.param_groups):
            raise KeyError("lr")


@pytest.mark.parametrize("wrong", [None, {}, {"state": {}, "param_groups": []}, {"lr": "fast"}])
def test_a_state_that_the_optimizer_cannot_take_changes_nothing(wrong: Any) -> None:
    optimizer = wrap(_Picky(model().parameters(), lr=0.1), transport=LocalWorld(1).transport(0))
    before = optimizer.state_dict()
    if wrong == {"lr": "fast"}:
        wrong = before | {"param_groups": [before["param_groups"][0] | wrong]}
    with pytest.raises(ArgumentError, match=r"_Picky cannot take this state .* same parameter"):
        optimizer.load_state_dict(wrong)
    assert optimizer.state_dict() == before
    optimizer.load_state_dict(before)


@pytest.mark.parametrize(
    ("does_backward", "says"),
    [(True, "uses its gradients"), (False, "finds no gradient at all")],
)
def test_a_step_without_a_backward_pass_warns_once(does_backward: bool, says: str) -> None:
    found = model()
    optimizer = wrap(torch.optim.SGD(found.parameters(), lr=0.1))
    if does_backward:
        found(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with pytest.warns(UserWarning, match=f"without a backward pass since .* {says}") as told:
        optimizer.step()
    assert [each.filename for each in told] == [__file__]
    optimizer.step()  # once: a second warning would be an error here


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_a_step_of_other_passes_than_asked_warns_once(
    num_passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work(transport: LocalTransport) -> None:
        found = model()
        optimizer = wrap(
            torch.optim.SGD(found.parameters(), lr=0.1),
            transport=transport,
            backward_passes_per_step=3,
        )
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(num_passes):
                found(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    run_ranks(2, work)
    says = f"a step ends after {num_passes} of backward_passes_per_step=3 backward passes"
    assert caplog.text.count(says) == (2 if num_passes < 3 else 0)  # once a rank
    assert caplog.text.count("use loft.Metric") == caplog.text.count(says)


class _Counting(torch.optim.SGD):
    """With state of its own beside torch's."""

    num_calls = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mode = "train"

    @property
    def is_training(self) -> bool:
        return self.mode == "train"

    def eval(self) -> None:
        self.mode = "eval"
        self.num_calls += 1


def test_it_is_an_optimizer_of_the_users_class_whose_attributes_are_the_users() -> None:
    inner = _Counting(model().parameters(), lr=0.1)
    optimizer = wrap(inner)
    assert isinstance(optimizer, _Counting)
    assert type(optimizer).__name__ == "_Counting"
    assert type(optimizer).num_calls == 0
    optimizer.eval()
    assert (inner.mode, inner.num_calls, optimizer.is_training) == ("eval", 1, False)
    assert optimizer.num_calls == 1
    assert "lr: 0.1" in repr(optimizer)


class _Schedule(torch.optim.SGD):
    """With an attribute, a property, and an attribute by a name of the wrapper's own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mode, self._warmup, self._momentum = "train", 0, 0.25

    @property
    def warmup(self) -> int:
        return self._warmup

    @warmup.setter
    def warmup(self, steps: int) -> None:
        self._warmup = steps


def test_what_is_set_on_the_wrapper_is_set_where_the_users_step_reads_it() -> None:
    inner = _Schedule(model().parameters(), lr=0.1)
    optimizer = wrap(inner)
    optimizer.mode, optimizer.warmup = "eval", 3
    assert (inner.mode, inner._warmup) == (optimizer.mode, optimizer.warmup) == ("eval", 3)
    del optimizer.mode
    assert not hasattr(inner, "mode")
    assert (inner._momentum, optimizer._momentum) == (0.25, None)  # a name that both have
    optimizer.note = "a script's own"
    assert not hasattr(inner, "note")


def test_a_schedulers_step_is_the_wrappers() -> None:
    inner = torch.optim.SGD(model().parameters(), lr=0.1)
    optimizer = wrap(inner)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    assert "step" in vars(optimizer)
    assert "step" not in vars(inner)


class _Freeing(torch.optim.SGD):
    """Owns memory that is freed once, and notes what is set on it."""

    num_freed = 0
    names: list[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        object.__setattr__(self, "names", [])
        super().__init__(*args, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        self.names.append(name)
        super().__setattr__(name, value)

    def __del__(self) -> None:
        _Freeing.num_freed += 1


def test_the_users_methods_of_python_run_on_the_users_optimizer_alone() -> None:
    inner = _Freeing(model().parameters(), lr=0.1)
    optimizer = wrap(inner)
    assert "_world" not in inner.names
    del optimizer
    gc.collect()
    assert _Freeing.num_freed == 0
    del inner
    gc.collect()
    assert _Freeing.num_freed == 1


def test_no_class_of_ours_is_among_torchs_optimizers() -> None:
    optimizer = wrap()
    kinds = torch.optim.Optimizer.__subclasses__()
    assert not [kind for kind in kinds if issubclass(kind, OptimizerProxy)]
    assert not [kind for kind in kinds if kind.__module__.startswith("loft_hvd")]
    assert type(optimizer) in torch.optim.SGD.__subclasses__()


def test_the_passes_of_a_step_may_change_between_steps() -> None:
    def work(transport: LocalTransport) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("w", weight)], transport=transport
        )
        seen = []
        for passes in (1, 3, 3, 2):
            if passes != optimizer.backward_passes_per_step:
                optimizer.set_backward_passes_per_step(passes)
            optimizer.zero_grad()
            for _ in range(passes):
                (weight * (1.0 + transport.rank)).sum().backward()
            with pytest.raises(
                UsageError, match=r"set_backward_passes_per_step\(\) was called after"
            ):
                optimizer.set_backward_passes_per_step(4)
            optimizer.step()
            seen.append(float(weight.detach()))
        with pytest.raises(ArgumentError, match="backward_passes_per_step=0 must be"):
            optimizer.set_backward_passes_per_step(0)
        return seen

    assert run_ranks(2, work) == [[-1.5, -6.0, -10.5, -13.5]] * 2


def test_num_groups_is_the_older_name_of_groups() -> None:
    def names_of(**groups: Any) -> list[list[str]]:
        def work(transport: LocalTransport) -> list[list[str]]:
            optimizer = wrap(transport=transport, **groups)
            return [[slot.name for slot in b.slots] for b in optimizer._world._reducer.buckets]

        return run_ranks(2, work)[0]

    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
        assert names_of(num_groups=2) == names_of(groups=2)
    with pytest.warns(DeprecationWarning, match="v0.23.0"):
        assert names_of(num_groups=4, groups=2) == names_of(groups=2)
    assert len(names_of(groups=2)) == 2


def test_a_script_that_waits_clips_and_steps_is_not_warned() -> None:
    found = model()
    optimizer = wrap(torch.optim.SGD(found.parameters(), lr=0.1))
    for _ in range(3):
        found(torch.ones(2, 3)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


def _clip(found: Any) -> None:
    torch.nn.utils.clip_grad_norm_(found.parameters(), 1e-3)


def _replace(found: Any) -> None:
    found.second.bias.grad = 0.5 * found.second.bias.grad


def _drop(found: Any) -> None:
    found.first.weight.grad = None


@pytest.mark.parametrize("change", [_clip, _replace, _drop])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_gradients_changed_while_ranks_exchange_them_are_refused(
    change: Callable[[Any], None], keeps: bool, num_passes: int
) -> None:
    """Also once they live in their buckets, which results change."""

    def work(transport: LocalTransport) -> float:
        found = model()
        sgd = torch.optim.SGD(found.parameters(), lr=0.1)
        named = found.named_parameters()
        optimizer: Any = loft.DistributedOptimizer(
            sgd, named, transport=transport, backward_passes_per_step=num_passes
        )
        for step in range(4):
            optimizer.zero_grad(set_to_none=not keeps)
            for _ in range(num_passes):
                found(torch.full((2, 3), 1.0 + transport.rank)).sum().backward()
            if step == 3:
                change(found)
                with pytest.raises(UsageError, match=r"parameter '\w+\.\w+' was changed between"):
                    optimizer.step()
            elif step == 2:  # as it is done
                optimizer.synchronize()
                change(found)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return float(found.first.weight.detach().sum())

    assert len(set(run_ranks(2, work))) == 1


def test_a_hook_changes_what_is_sent_where_it_comes_before_the_optimizer() -> None:
    def work(transport: LocalTransport, is_before: bool) -> float:
        weight = torch.nn.Parameter(torch.zeros(2))

        def halve(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        if is_before:
            weight.register_post_accumulate_grad_hook(halve)
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = loft.DistributedOptimizer(sgd, [("w", weight)], transport=transport)
        if not is_before:
            weight.register_post_accumulate_grad_hook(halve)
        (weight * (2.0 + 4.0 * transport.rank)).sum().backward()
        optimizer.step()
        return float(weight.detach()[0])

    assert run_ranks(2, lambda end: work(end, is_before=True)) == [-2.0] * 2
    with pytest.raises(UsageError, match=r"'w' was changed .* before the optimizer is made"):
        run_ranks(2, lambda end: work(end, is_before=False))


def test_alone_gradients_may_be_clipped_whenever() -> None:
    found = model()
    optimizer = wrap(torch.optim.SGD(found.parameters(), lr=1.0))
    before = found.first.weight.detach().clone()
    found(torch.ones(2, 3)).sum().backward()
    _clip(found)
    optimizer.step()
    assert 0 < float((found.first.weight.detach() - before).abs().max()) <= 1e-3


def test_a_group_whose_rule_needs_more_ranks_changes_nothing() -> None:
    def work(transport: LocalTransport) -> float:
        p = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([p], lr=1.0)
        optimizer = loft.DistributedOptimizer(inner, [("p", p)], transport=transport)
        late = torch.nn.Parameter(torch.zeros(1))
        with pytest.raises(AggregationError):
            optimizer.add_param_group({"params": [late], "rule": "trimmed_mean:f=1"})
        assert len(optimizer.param_groups) == 1
        ((1.0 + transport.rank) * p).sum().backward()
        optimizer.step()
        return float(p.detach())

    assert run_ranks(2, work) == [-1.5, -1.5]


def test_another_rule_on_one_rank_is_told_to_all_at_once() -> None:
    def work(transport: LocalTransport) -> None:
        p, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        inner = torch.optim.SGD([p], lr=1.0)
        optimizer = loft.DistributedOptimizer(inner, [("p", p)], transport=transport)
        rule = "mean" if transport.rank else "trimmed_mean:f=1"
        with pytest.raises(MismatchError):
            optimizer.add_param_group({"params": [late], "rule": rule})

    run_ranks(2, work)


def test_a_group_whose_rule_needs_more_samples_changes_nothing() -> None:
    sizes = [4, 4, 0]

    def work(transport: LocalTransport) -> float:
        p, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        balancer = loft.Balancer(8, sizes, transport=transport)
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("p", p)], balancer=balancer, transport=transport
        )
        with pytest.raises(PlanError):
            optimizer.add_param_group({"params": [late], "rule": "trimmed_mean:f=1"})
        with balancer.step(sizes[transport.rank] or balancer.min_batch):
            ((1.0 + transport.rank) * p).sum().backward()
            optimizer.step()
        return float(p.detach())

    assert run_ranks(3, work) == [-1.5] * 3


@pytest.mark.parametrize("change", ["passes", "group"])
def test_what_is_frozen_while_buckets_are_laid_out_is_reduced_as_it_thaws(change: str) -> None:
    def work(transport: LocalTransport) -> list[float]:
        weight, other, added = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight, other], lr=1.0),
            [("w", weight), ("o", other)],
            transport=transport,
        )
        weight.requires_grad_(False)
        if change == "passes":
            optimizer.set_backward_passes_per_step(2)
        else:
            optimizer.add_param_group({"params": [added]})
        assert not weight.requires_grad
        weight.requires_grad_(True)
        for _ in range(optimizer.backward_passes_per_step):
            ((weight + other + added) * (1.0 + transport.rank)).sum().backward()
        optimizer.step()
        return [float(weight.detach()), float(other.detach())]

    total = -3.0 if change == "passes" else -1.5
    assert run_ranks(2, work) == [[total] * 2] * 2


class Counts(torch.optim.SGD):
    """Keeps numbers that do not begin at 0, and are not called ``step``, here and in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = 3

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry["warmth"] = entry.get("warmth", 0.5) * 0.5
                parameter.data -= group["lr"] * entry["warmth"] / group["k"] * parameter.grad


KINDS: dict[str, Any] = {
    name: functools.partial(getattr(torch.optim, name), lr=0.01)
    for name in [
        "NAdam",
        "RAdam",
        "Adam",
        "AdamW",
        "Adamax",
        "Adadelta",
        "Adagrad",
        "ASGD",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
} | {
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "decay": functools.partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "counts": functools.partial(Counts, lr=0.01),
}


def as_horovods_broadcast(optimizer: Any) -> None:
    """Make up a state as ``hvd.broadcast_optimizer_state`` does where there is none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    super(optimizer.__class__, optimizer).step()
    assert len(optimizer.state_dict()["state"]) in (0, 2)  # what it then sends


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_broadcast_made_up_survives(kind: str) -> None:
    nets = [torch.nn.Linear(3, 2) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    plain = KINDS[kind](nets[0].parameters())
    wrapped: Any = loft.DistributedOptimizer(
        KINDS[kind](nets[1].parameters()), transport=LocalWorld(1).transport(0)
    )
    as_horovods_broadcast(wrapped)
    for step in range(4):
        for net, optimizer in zip(nets, (plain, wrapped), strict=True):
            optimizer.zero_grad()
            (net(torch.arange(3.0) + step) ** 2).sum().backward()
            optimizer.step()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["NAdam", "momentum", "counts"])
def test_what_a_trained_root_has_sent_stays(kind: str) -> None:
    nets = [torch.nn.Linear(3, 2) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    root = KINDS[kind](nets[0].parameters())
    late: Any = loft.DistributedOptimizer(
        KINDS[kind](nets[1].parameters()), transport=LocalWorld(1).transport(0)
    )

    def train(net: torch.nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        (net(torch.arange(3.0)) ** 2).sum().backward()
        optimizer.step()

    for _ in range(2):
        train(nets[0], root)
    as_horovods_broadcast(late)
    nets[1].load_state_dict(nets[0].state_dict())
    pairs = zip(root.param_groups[0]["params"], late.param_groups[0]["params"], strict=True)
    for one, other in pairs:
        for name, value in root.state[one].items():  # in place, or as numbers
            if isinstance(value, torch.Tensor):
                late.state[other][name].copy_(value)
            else:
                late.state[other][name] = value
    for name, value in root.param_groups[0].items():
        if name != "params":
            late.param_groups[0][name] = value
    for net, optimizer in zip(nets, (root, late), strict=True):
        train(net, optimizer)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["NAdam", "momentum"])
def test_ranks_that_made_a_state_up_or_loaded_it_go_on_alike(kind: str) -> None:
    """As in an elastic job that loses a rank before the first step, or goes back to before it."""

    def work(end: LocalTransport) -> list[torch.Tensor]:
        net = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.zeros_(net.bias)
        optimizer: Any = loft.DistributedOptimizer(KINDS[kind](net.parameters()), transport=end)
        as_horovods_broadcast(optimizer)
        if end.rank == 0:
            optimizer.load_state_dict(optimizer.state_dict())
        for step in range(3):
            optimizer.zero_grad()
            (net(torch.arange(3.0) + step) ** 2).sum().backward()
            optimizer.step()
        return [each.detach() for each in net.parameters()]

    one, other = run_ranks(2, work)  # ranks compare their copies after the first step
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_option_that_begins_with_the_made_up_step_goes_with_it() -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["t"] = group.get("t", 0) + 1
            return super().step(closure)

    wrapped: Any = loft.DistributedOptimizer(
        Late(torch.nn.Linear(3, 2).parameters(), lr=0.1), transport=LocalWorld(1).transport(0)
    )
    as_horovods_broadcast(wrapped)
    assert "t" not in wrapped.param_groups[0]


def test_a_second_optimizer_over_the_same_parameters_is_named_until_the_first_is_closed() -> None:
    def work(transport: LocalTransport, closes: bool) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))

        def make() -> Any:
            sgd = torch.optim.SGD([weight], lr=1.0)
            return loft.DistributedOptimizer(sgd, [("weight", weight)], transport=transport)

        kept: list[Any] = []
        for _ in range(3):
            if closes and kept:
                kept[-1].close()
            optimizer = make()
            kept.append(optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                (weight * float(transport.rank)).sum().backward()
                optimizer.step()
        with pytest.raises(UsageError, match="this optimizer is closed"):
            kept[0].step()
        return float(weight.detach())

    assert run_ranks(3, lambda end: work(end, closes=True)) == [-6.0] * 3
    with pytest.raises(UsageError, match=r"'weight' is in two optimizers.*call its close\(\)"):
        run_ranks(3, lambda end: work(end, closes=False))


def test_an_optimizer_is_not_closed_while_gradients_are_on_their_way() -> None:
    def work(transport: LocalTransport) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer: Any = loft.DistributedOptimizer(sgd, [("w", weight)], transport=transport)
        weight.sum().backward()
        with pytest.raises(UsageError, match=r"optimizer.close\(\) was called after"):
            optimizer.close()
        optimizer.step()
        optimizer.close()

    run_ranks(2, work)
