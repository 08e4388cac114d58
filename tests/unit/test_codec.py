"""A state survives JSON, and a wrong one is refused by the name of its field."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loft_hvd.codec import decode, encode
from loft_hvd.errors import ArgumentError


@dataclass(frozen=True)
class Inner:
    """A part of a state."""

    sizes: tuple[int, ...]
    pair: tuple[str, float] = ("", 0.0)


@dataclass
class State:
    """One field of every kind."""

    count: int
    seconds: float
    is_on: bool
    name: str
    best: float | None
    inner: Inner | None
    parts: list[Inner]
    rows: dict[str, list[float]]
    times: npt.NDArray[np.float64]
    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    free: Any = None
    derived: int = field(init=False, default=7)


def _state() -> State:
    return State(
        count=3,
        seconds=math.nan,
        is_on=True,
        name="a",
        best=None,
        inner=Inner((2, 3), ("x", 0.5)),
        parts=[Inner(()), Inner((1,))],
        rows={"here": [1.0, 2.5], "there": []},
        times=np.array([[0.1, np.nan], [1e-300, 3.0]]),
        ids=np.array([1, -(2**40)]),
        mask=np.array([True, False]),
        free={"any": ["thing"]},
    )


def _through_json(state: object) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(encode(state), allow_nan=False))
    return plain


def test_state_survives_strict_json() -> None:
    state = _state()
    back = decode(State, _through_json(state), what="State")
    assert encode(back) == encode(state)
    assert math.isnan(back.seconds)
    assert back.inner == state.inner
    assert back.times.dtype == np.float64
    np.testing.assert_array_equal(back.times, state.times)
    assert back.ids.dtype == np.int64
    assert back.mask.dtype == np.bool_


def test_numpy_numbers_become_plain_ones() -> None:
    plain = encode(Inner(tuple(np.array([4, 5])), ("", np.float64(0.5))))
    assert [type(size) for size in plain["sizes"]] == [int, int]
    assert type(plain["pair"][1]) is float


def test_field_with_a_default_may_be_missing() -> None:
    assert decode(Inner, {"sizes": [1]}, what="Inner") == Inner((1,))


def test_whole_number_is_a_float_too() -> None:
    assert type(decode(Inner, {"sizes": [], "pair": ["", 2]}, what="Inner").pair[1]) is float


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("count", "3", "State.count needs int"),
        ("count", True, "State.count needs int"),
        ("count", 3.0, "State.count needs int"),
        ("count", None, "State.count needs int"),
        ("seconds", "fast", "State.seconds needs float"),
        ("is_on", 1, "State.is_on needs bool"),
        ("inner", [1], "State.inner needs a dict"),
        ("inner", {"sizes": [1.5]}, r"State.inner.sizes\[0\] needs int"),
        ("inner", {"sizes": [1], "pair": [""]}, "State.inner.pair needs 2 values"),
        ("parts", [{"sizes": 1}], r"State.parts\[0\].sizes needs tuple"),
        ("rows", {"here": [None, "x"]}, r"State.rows\['here'\]\[1\] needs float"),
        ("times", [[1.0], [1.0, 2.0]], "State.times needs nested lists of float64"),
        ("times", "abc", "State.times needs nested lists of float64"),
        ("ids", [1.5], "State.ids needs nested lists of int64"),
        ("ids", [None], "State.ids needs nested lists of int64"),
        ("mask", [2], "State.mask needs nested lists of bool"),
    ],
)
def test_wrong_value_is_refused_by_the_name_of_its_field(
    name: str, value: object, where: str
) -> None:
    plain = _through_json(_state()) | {name: value}
    with pytest.raises(ArgumentError, match=f"{where}.*but got.*give what state_dict"):
        decode(State, plain, what="State")


@pytest.mark.parametrize("plain", [{}, {"sizes": [1], "other": 2}, {"other": 2}, None, [1]])
def test_missing_and_unknown_keys_are_refused(plain: object) -> None:
    with pytest.raises(ArgumentError, match="Inner needs"):
        decode(Inner, plain, what="Inner")
