"""States of clients into one: what each entry becomes, who can be survived, and who is named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import loft_hvd as loft
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

_SAMPLES = [517, 200, 150, 80, 47, 6]  # of 1,000: shares 51.7, 20, 15, 8, 4.7 and 0.6 %
_NAMES = ["north", "south", "east", "west", "hill", "dale"]

# How far the result may be from the mean of right clients. Trimmed means, and what is winsorised,
# take something of right clients away as well: docs/federated.md has the figures.
_DEFEND: list[tuple[loft.Rule, float]] = [
    (loft.NNM(loft.TrimmedMean(f=1)), 1e-4),
    (loft.MultiKrum(f=1), 1e-4),
    (loft.CAF(f=1), 1e-4),
    (loft.MinimumDiameter(f=1), 1e-4),
    (loft.MeanAroundMedian(f=1), 0.05),
    (loft.Phocas(f=1), 0.05),
    (loft.Robust(f=1), 0.08),
    (loft.TrimmedMean(f=1), 0.16),
]
_COUNT_WEIGHT: list[loft.Rule] = [loft.Median(), loft.GeometricMedian(f=1)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def _train(start: dict[str, Tensor], client: int) -> dict[str, Tensor]:
    """Return the state after a client's epoch on data of its own."""
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(max(_SAMPLES[client], 12), 8, generator=generator) + 0.1 * client
    y = x[:, :3].argmax(1)
    model = _model()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for xs, ys in zip(x.split(12), y.split(12), strict=True):
        if len(xs) > 1:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xs), ys).backward()
            optimizer.step()
    return model.state_dict()


def _round() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    start = _model().state_dict()
    return start, [_train(start, client) for client in range(len(_SAMPLES))]


def _flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.reshape(-1).double() for v in state.values() if v.is_floating_point()])


def _changed(
    state: dict[str, Tensor], start: dict[str, Tensor], how: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    return {k: how(v, start[k]) if v.is_floating_point() else v for k, v in state.items()}


_ATTACKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "state": lambda value, start: 1000 * value,
    "update": lambda value, start: start + 1000 * (value - start),
    "nan": lambda value, start: torch.full_like(value, math.nan),
}


@pytest.mark.parametrize("attack", sorted(_ATTACKS))
@pytest.mark.parametrize(("rule", "most"), _DEFEND, ids=str)
def test_each_client_in_turn_is_survived_whatever_its_share(
    rule: loft.Rule, most: float, attack: str
) -> None:
    start, states = _round()
    for wrong in range(len(states)):
        sent = list(states)
        sent[wrong] = _changed(states[wrong], start, _ATTACKS[attack])
        result = _flat(loft.aggregate_states(sent, rule, weights=_SAMPLES))
        honest = [client for client in range(len(states)) if client != wrong]
        mean = loft.aggregate_states(
            [states[client] for client in honest],
            loft.Mean(),
            weights=[_SAMPLES[client] for client in honest],
        )
        error = (result - _flat(mean)).norm() / _flat(mean).norm()
        assert error <= most, f"client {wrong}"


@pytest.mark.parametrize("rule", _COUNT_WEIGHT, ids=str)
def test_shares_that_a_rule_cannot_defend_are_an_error_that_names_the_client(
    rule: loft.Rule,
) -> None:
    _, states = _round()
    with pytest.raises(AggregationError, match=r"client north holds 51\.7% of the weight"):
        loft.aggregate_states(states, rule, weights=_SAMPLES, names=_NAMES)
    loft.aggregate_states(states, rule)  # without weights all weigh the same
    loft.aggregate_states(states, rule, weights=[400, *_SAMPLES[1:]])  # less than half


def test_several_clients_are_named_where_several_may_be_wrong() -> None:
    states = [{"w": torch.ones(2)} for _ in range(5)]
    with pytest.raises(AggregationError, match=r"clients 1, 3 hold 60\.0% .* survives 1 wrong"):
        loft.aggregate_states(states, loft.GeometricMedian(f=2), weights=[1, 4, 1, 2, 2])


def test_rules_that_count_clients_take_any_weights() -> None:
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0])
    states = [{"w": row} for row in rows]
    result = loft.aggregate_states(states, loft.TrimmedMean(f=1), weights=[1, 1, 10**6, 1])
    assert result["w"].item() == pytest.approx((2 + 3e6) / (1e6 + 1))


@pytest.mark.parametrize("rule", [loft.TrimmedMean(f=1), loft.MultiKrum(f=1)], ids=str)
def test_entries_keep_dtype_shape_and_order(rule: loft.Rule) -> None:
    torch.manual_seed(0)
    states = [
        {
            "b": torch.randn(3, 2).to(torch.bfloat16),
            "a": torch.randn(2, 0),
            "scale": torch.randn((), dtype=torch.float64),
            "half": torch.randn(5).half(),
            "transposed": torch.randn(4, 3).T,
            "is_on": torch.tensor([True, False]),
            "index": torch.arange(3, dtype=torch.uint8),
        }
        for _ in range(5)
    ]
    before = [{key: value.clone() for key, value in state.items()} for state in states]
    result = loft.aggregate_states(states, rule)
    assert list(result) == list(states[0])
    for key, value in states[0].items():
        assert result[key].dtype == value.dtype
        assert result[key].shape == value.shape
        assert result[key].untyped_storage().nbytes() == value.numel() * value.itemsize, key
        for state, old in zip(states, before, strict=True):
            assert torch.equal(state[key], old[key])
            assert state[key].numel() == 0 or result[key].data_ptr() != state[key].data_ptr()


def test_a_coordinate_rule_gives_the_bits_of_each_tensor_by_itself() -> None:
    torch.manual_seed(0)
    states = [{"a": torch.randn(40, 7), "b": torch.randn(9).bfloat16()} for _ in range(5)]
    result = loft.aggregate_states(states, loft.Phocas(f=2), weights=[5, 1, 2, 9, 3])
    for key in ("a", "b"):
        rows = torch.stack([state[key].reshape(-1) for state in states])
        wanted = loft.aggregate(rows, loft.Phocas(f=2), weights=[5, 1, 2, 9, 3])
        assert torch.equal(result[key].reshape(-1), wanted)


def test_a_rule_that_sees_rows_judges_a_client_by_its_whole_state() -> None:
    torch.manual_seed(0)
    states = [{"a": torch.randn(6), "b": torch.randn(6)} for _ in range(5)]
    states[3]["a"] += 100.0  # its "b" is as good as any
    result = loft.aggregate_states(states, loft.MultiKrum(f=1))
    kept = [state["b"] for client, state in enumerate(states) if client != 3]
    assert torch.allclose(result["b"], torch.stack(kept).mean(0))


def test_integers_are_voted_on_and_counters_take_the_lower_median() -> None:
    def state(code: int, count: int) -> dict[str, Tensor]:
        counter = torch.tensor(count)
        return {"code": torch.tensor([code, 7]), "norm.num_batches_tracked": counter}

    states = [state(3, 44), state(3, 17), state(9, 10**12), state(3, 1)]
    result = loft.aggregate_states(states, loft.TrimmedMean(f=1))
    assert result["code"].tolist() == [3, 7]
    assert result["norm.num_batches_tracked"].item() == 17


def test_integers_without_a_majority_are_an_error_that_says_who_holds_what() -> None:
    states = [{"code": torch.tensor([1, code])} for code in (3, 3, 9, 5)]
    message = r"value 1 of 'code' .* \(a: 3, b: 3, c: 9, d: 5\)"
    with pytest.raises(AggregationError, match=message):
        loft.aggregate_states(states, loft.Mean(), names="abcd")
    # A client of weight 0 has no vote.
    result = loft.aggregate_states(states, loft.Mean(), weights=[1, 1, 0, 1])
    assert result["code"].tolist() == [1, 3]


def test_diagnose_says_what_each_client_did() -> None:
    _, states = _round()
    states[2] = {key: value * 1000 for key, value in states[2].items()}
    rule = loft.TrimmedMean(f=1)
    result, found = loft.diagnose_states(states, rule)
    plain = loft.aggregate_states(states, rule)
    assert all(torch.equal(result[key], plain[key]) for key in plain)
    assert found.num_seen == (len(_flat(plain)),) * 6
    assert found.share_outside[2] == max(found.share_outside) > 0.9
    _, found = loft.diagnose_states(states, loft.MultiKrum(f=1))
    assert found.left_out[2] == found.num_seen[2]
    with pytest.raises(ArgumentError, match="every=0"):
        loft.diagnose_states(states, rule, every=0)


def test_a_state_unlike_most_is_named() -> None:
    states = [{"w": torch.ones(3)} for _ in range(4)]
    for odd, says in (
        ({"w": torch.ones(4)}, r"'w' is torch.float32 \[4\] on cpu .* client 0, but .* \[3\]"),
        ({"w": torch.ones(3).double()}, "torch.float64"),
        ({}, "'w' is missing in the state of client 0"),
        ({"w": torch.ones(3), "v": torch.ones(1)}, "'v' is .* but missing in most"),
    ):
        with pytest.raises(ArgumentError, match=says):
            loft.aggregate_states([odd, *states[1:]], loft.Median())


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ({"a": {"w": torch.ones(1)}}, r"give list\(states.values\(\)\)"),
        (7, "must be a list"),
        ([torch.ones(3)], "the state of client 0 is of type Tensor"),
        ([{"w": 1.0}], "'w' of client 0 is of type float"),
        ([{"w": torch.ones(1).to(torch.complex64)}], "complex64"),
        ([{"w": torch.ones(1).to_sparse()}], "sparse"),
        ([{"w": torch.ones(1).to(torch.float8_e5m2)}], "float8"),
    ],
)
def test_what_is_no_list_of_states_is_refused(states: object, says: str) -> None:
    with pytest.raises(ArgumentTypeError, match=says):
        loft.aggregate_states(states, loft.Mean())  # type: ignore[arg-type]  # that is the case


def test_limits_are_errors() -> None:
    states = [{"w": torch.ones(1)}] * 3
    with pytest.raises(AggregationError, match="there are no states"):
        loft.aggregate_states([], loft.Mean())
    with pytest.raises(ArgumentError, match="names has 2 values"):
        loft.aggregate_states(states, loft.Mean(), names=["a", "b"])
    with pytest.raises(AggregationError, match="at least 3 rows, but 2"):
        loft.aggregate_states(states, loft.TrimmedMean(f=1), weights=[1, 1, 0])
    with pytest.raises(AggregationError, match="0 count"):
        loft.aggregate_states(states, loft.Median(), weights=[0, 0, 0])
    result = loft.aggregate_states([{"n": torch.tensor(3)}] * 3, loft.MultiKrum(f=1))
    assert result["n"].item() == 3  # no floating-point entry at all
