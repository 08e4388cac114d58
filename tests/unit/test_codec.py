"""A state survives JSON, and a wrong one is refused by the name of its field."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest

from loft_hvd.codec import (
    MAX_LINE_BYTES,
    Count,
    Index,
    Shape,
    Size,
    Within,
    decode,
    encode,
    parse_json,
    printable,
)
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


@dataclass
class Pair:
    """A matrix whose second length its holder gives."""

    rows: Annotated[npt.NDArray[np.float64], Shape("world_size", "num_terms")]
    square: Annotated[npt.NDArray[np.float64], Shape("num_terms", "num_terms")]


@dataclass
class Limited:
    """Every kind of limit."""

    speeds: Annotated[list[float], Shape("world_size")]
    pair: Annotated[Pair, Size(num_terms=2)]
    history: Annotated[npt.NDArray[np.int64], Shape("num_rows", "world_size"), Within(0)]
    ranks: list[Annotated[int, Index("world_size")]]
    steps: Count = 0
    share: Annotated[float, Within(0, 1)] = 0.5
    seed: Annotated[int, Within(0, math.inf)] = 0


def _limited() -> dict[str, Any]:
    pair = Pair(np.zeros((3, 2)), np.eye(2))
    state = Limited([1.0, 2.0, math.nan], pair, np.zeros((0, 3), int), [2, 0])
    return _through_json(state)


def test_limits_hold_for_what_was_encoded_and_empty_arrays_keep_their_shape() -> None:
    back = decode(Limited, _limited() | {"seed": 2**64}, what="L", sizes={"world_size": 3})
    assert back.history.shape == (0, 3)
    assert back.pair.square.shape == (2, 2)
    assert back.seed == 2**64


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("speeds", [1.0, 2.0], r"L.pair.rows needs shape \[world_size=2, .*but got .*\[3, 2\]"),
        ("pair", {"rows": [[1.0]] * 3, "square": [[1.0]]}, r"L.pair.rows needs shape"),
        ("pair", {"rows": [[1.0, 2.0]] * 3, "square": [[1.0, 2.0]]}, "L.pair.square needs shape"),
        ("history", [[1, 2]], r"L.history needs shape \[num_rows=1, world_size=3\]"),
        ("history", [[1, 2, -3]], "L.history needs numbers 0 to"),
        ("history", [[1, 2, 2**70]], "L.history needs nested lists of int64"),
        ("history", [[1, 2, True]], "L.history needs nested lists of int64"),
        ("ranks", [0, 3], r"L.ranks\[1\] needs an index below 3"),
        ("ranks", [-1], r"L.ranks\[0\] needs an index below 3"),
        ("steps", -1, "L.steps needs int 0 to"),
        ("steps", 10**400, "L.steps needs int 0 to"),
        ("share", 1.5, "L.share needs float 0 to 1"),
        ("share", None, "L.share needs float 0 to 1"),
        ("speeds", [1.0, 2.0, math.inf], r"L.speeds\[2\] needs float"),
    ],
)
def test_what_is_beyond_a_limit_is_refused(name: str, value: object, where: str) -> None:
    with pytest.raises(ArgumentError, match=where):
        decode(Limited, _limited() | {name: value}, what="L")


def test_what_nests_deep_or_has_many_digits_is_refused_too() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for wrong in (deep, 10**5000):
        for name in _limited().keys() - {"seed"}:
            with pytest.raises(ArgumentError, match=rf"L\.{name}.* needs"):
                decode(Limited, _limited() | {name: wrong}, what="L")


def test_an_open_state_may_hold_more() -> None:
    assert decode(Inner, {"sizes": [1], "newer": []}, what="I", is_open=True) == Inner((1,))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[" + "0," * MAX_LINE_BYTES + "0]"])
def test_text_that_is_no_json_too_deep_or_too_long_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_printed_text_holds_no_escapes_and_no_half_characters() -> None:
    assert printable("a\tb\n\u00e9 \x1b[2J\r\x9b\ud800\u202e") == (
        "a\tb\n\u00e9 \\x1b[2J\\r\\x9b\\ud800\\u202e"
    )
