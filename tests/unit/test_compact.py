"""Compact messages bring values back bit for bit, in few bytes, and believe nobody."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from loft_hvd._native import extension
from loft_hvd.config import Config
from loft_hvd.errors import TransportError
from loft_hvd.transport import compact
from tests.support.guarded import Guarded

pytestmark = pytest.mark.skipif(extension() is None, reason="the extension is not built")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
COUNTS = [0, 1, 511, 512, 513, 1024, 100_003]


def levels() -> list[str]:
    module = extension()
    return [] if module is None else list(module.isa_levels())


def normal(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


def half_zeros(count: int, dtype: torch.dtype) -> Tensor:
    return normal(count, dtype) * (torch.arange(count) % 2)


def far_apart(count: int, dtype: torch.dtype) -> Tensor:
    return torch.exp(9 * normal(count, torch.float32)).to(dtype)


def any_bits(count: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=drawn)
    return bits.to(BITS[dtype]).view(dtype)


def odd_ones(count: int, dtype: torch.dtype) -> Tensor:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-7, -65504.0])
    return odd.repeat(count // 7 + 1)[:count].to(dtype)


def alike(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), 1.5, dtype=dtype)


KINDS = [normal, half_zeros, far_apart, any_bits, odd_ones, alike]


def bits(values: Tensor) -> Tensor:
    return values.view(BITS[values.dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_bit_for_bit(dtype: torch.dtype, count: int, kind: Any) -> None:
    values = kind(count, dtype)
    message = compact.message_of(values)
    assert message.numel() <= 8 + values.nbytes + 4 * (count // 512)  # 4 bytes a block at most
    room = compact.room_for(values)
    room.fill_(255)
    room[: message.numel()] = message
    back = torch.full_like(values, 7.0)
    compact.read(room, back)
    assert torch.equal(bits(back), bits(values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_may_begin_anywhere(dtype: torch.dtype) -> None:
    values = normal(2001, dtype)[1:]
    back = torch.zeros(2001, dtype=dtype)[1:]
    compact.read(compact.message_of(values), back)
    assert torch.equal(back, values)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 0.855), (torch.float16, 0.895), (torch.bfloat16, 0.71)]
)
def test_normal_values_take_fewer_bytes(dtype: torch.dtype, share: float, scale: float) -> None:
    values = normal(512 * 1000, dtype)
    assert compact.message_of(values * scale).numel() < share * values.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_write_the_same_bytes(
    dtype: torch.dtype, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = kind(20_011, dtype)
    written = []
    for level in levels():
        monkeypatch.setattr(compact, "config", lambda level=level: Config(isa=level))
        message = compact.message_of(values)
        back = torch.empty_like(values)
        compact.read(message, back)
        assert torch.equal(bits(back), bits(values))
        written.append(message)
    assert written
    assert all(torch.equal(message, written[0]) for message in written)


def lengths_in(message: Tensor) -> Tensor:
    """Return a view of a message's first 8 bytes, its length."""
    return message[:8].view(torch.int64)


@pytest.mark.parametrize("length", [-1, 0, 7, 8, 100, 2**62])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_message_with_a_wrong_length_is_refused(dtype: torch.dtype, length: int) -> None:
    values = half_zeros(3 * 512 + 5, dtype)
    message = compact.message_of(values)
    lengths_in(message)[0] = length
    with pytest.raises(TransportError, match=rf"is no message of 1541 {dtype} values"):
        compact.read(message, torch.empty_like(values))


@pytest.mark.parametrize(
    ("at", "by"),
    [(8, 5), (11, 255), (10, 1)],
    ids=["an unknown width", "more exceptions than values", "others than there are"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_message_with_a_wrong_head_is_refused(dtype: torch.dtype, at: int, by: int) -> None:
    values = half_zeros(3 * 512 + 5, dtype)
    message = compact.message_of(values)
    message[at] ^= by
    with pytest.raises(TransportError, match="is no message of 1541"):
        compact.read(message, torch.empty_like(values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_message_that_was_cut_off_is_refused(dtype: torch.dtype) -> None:
    values = half_zeros(3 * 512 + 5, dtype)
    message = compact.message_of(values)
    short = message[: message.numel() // 2].clone()
    for length in (message.numel(), short.numel()):
        lengths_in(short)[0] = length
        with pytest.raises(TransportError, match="is no message of 1541"):
            compact.read(short, torch.empty_like(values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_peer_sends_is_read_or_refused_within_its_room(
    dtype: torch.dtype, seed: int
) -> None:
    """Rooms end where a page begins that nobody may read; values end so, too."""
    drawn = torch.Generator().manual_seed(seed)
    values = normal(1200, dtype)
    message = compact.message_of(values)
    held, taken = (Guarded(each.nbytes, at_end=True) for each in (message, values))
    room, back = held.tensor(torch.uint8), taken.tensor(dtype)
    num_refused = 0
    for _ in range(300):
        room.copy_(message)
        at = torch.randint(0, room.numel(), (3,), generator=drawn)
        room[at] = torch.randint(0, 256, (3,), generator=drawn).to(torch.uint8)
        room[[8, 10, 11]] = room[torch.randint(0, room.numel(), (3,), generator=drawn)]  # a head
        try:
            compact.read(room, back)
        except TransportError:
            num_refused += 1
    assert num_refused > 0


@pytest.mark.parametrize(
    "values", [torch.arange(2048.0)[::2], torch.ones(1).expand(1024), torch.ones(4, device="meta")]
)
def test_values_that_do_not_lie_in_a_row_are_refused(values: Tensor) -> None:
    with pytest.raises(TransportError, match=r"do not lie one after the other .* send values\.con"):
        compact.message_of(values)
    with pytest.raises(TransportError, match="do not lie one after the other"):
        compact.read(compact.message_of(torch.ones(values.numel())), values)


@pytest.mark.parametrize(
    ("dtype", "has_messages"),
    [
        (torch.float32, True),
        (torch.float16, True),
        (torch.bfloat16, True),
        (torch.float64, False),
        (torch.int64, False),
        (torch.uint8, False),
    ],
)
def test_floats_of_at_most_32_bits_have_messages(dtype: torch.dtype, has_messages: bool) -> None:
    assert compact.has_messages(dtype) == has_messages


def test_an_extension_without_these_kernels_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compact.is_available()
    for module in (None, object()):  # none, or one of an earlier version
        monkeypatch.setattr(compact, "extension", lambda module=module: module)
        assert not compact.is_available()
