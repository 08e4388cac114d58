"""The wrapped optimizer: groups, closures, scalers and parameters that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
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


def test_a_script_that_waits_clips_and_steps_is_not_warned() -> None:
    found = model()
    optimizer = wrap(torch.optim.SGD(found.parameters(), lr=0.1))
    for _ in range(3):
        found(torch.ones(2, 3)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
