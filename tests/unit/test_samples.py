"""Samples survive the way into bytes and back, and broken bytes are refused, never run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from loft_hvd.errors import ArgumentTypeError, DataError
from loft_hvd.store.samples import decode_sample, encode_sample

SAMPLES: list[Any] = [
    7,
    -(1 << 63),
    1 << 70,
    2.5,
    float("-inf"),
    True,
    None,
    "über",
    "\ud800",
    b"\0\1",
    (),
    [],
    {},
    (torch.arange(6, dtype=torch.uint8).view(2, 3), 4),
    {"x": [1, (2.0, "y")], "image": torch.randn(3, 5)},
    torch.zeros(0, 3),
    torch.tensor(3.0, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.randn(4, 6)[:, ::2],
    np.arange(5, dtype=np.int16),
    np.float32(0.5),
    np.array([], dtype=np.uint8),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
]


def same(one: Any, other: Any) -> bool:
    """Say whether two samples are equal in type, structure and value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("sample", SAMPLES, ids=repr)
def test_a_sample_comes_back_equal(sample: Any) -> None:
    assert same(decode_sample(encode_sample(sample)), sample)


def test_an_image_comes_back_equal() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    back = decode_sample(encode_sample((image.fromarray(pixels), 3)))
    assert back[1] == 3
    np.testing.assert_array_equal(np.asarray(back[0]), pixels)


def test_values_are_copies_that_a_script_may_change() -> None:
    data = encode_sample(torch.zeros(4))
    decode_sample(data).add_(1)
    assert torch.equal(decode_sample(data), torch.zeros(4))


class Odd:
    """A class of a user's own."""


@pytest.mark.parametrize(
    ("sample", "place"),
    [
        (Odd(), "sample is"),
        ((1, [Odd()]), r"sample\[1\]\[0\] is"),
        ({"x": {1: 2}}, r"sample\[x\] is"),
        (torch.zeros(2, device="meta"), "sample is"),
        (np.array([Odd()]), "sample is"),
        (torch.nn.Parameter(torch.zeros(2)), "sample is"),
    ],
    ids=["object", "nested", "keys", "meta", "array of objects", "subclass"],
)
def test_what_cannot_be_kept_is_refused_by_place(sample: Any, place: str) -> None:
    with pytest.raises(ArgumentTypeError, match=place):
        encode_sample(sample)


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_deep_nesting_is_refused() -> None:
    assert decode_sample(encode_sample(nest(16))) == nest(16)
    with pytest.raises(ArgumentTypeError, match="deep"):
        encode_sample(nest(17))


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(changed)


def reorder(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[at:] + data[:at]


@pytest.mark.parametrize("change", [cut, flip, reorder])
def test_changed_bytes_are_a_sample_or_a_data_error(
    change: Callable[[bytes, random.Random], bytes],
) -> None:
    draw = random.Random(4)
    originals = [encode_sample(sample) for sample in SAMPLES]
    refused = 0
    for _ in range(3000):
        try:
            decode_sample(change(draw.choice(originals), draw))
        except DataError:
            refused += 1
    assert refused > 300
