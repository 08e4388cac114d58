"""Random damage to values and texts, as by a disk, another version or a stranger."""

from __future__ import annotations

import copy
import random
from typing import Any

__all__ = ["damaged_bytes", "damaged_text", "damaged_value"]


def _deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# Made anew each time: what is damaged next must not be shared.
_HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    5.7,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    2**31,
    2**53 + 1,
    -(2**63),
    2**64,
    10**12,
    10**400,
    "",
    "a",
    "\ud800",
    "\x1b]0;gone\x07\x1b[2J",
    "\u202e|\r\n\0",
    "9" * 400,
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    {"": None},
    {"kind": {}},
)


def _hostile(rng: random.Random) -> Any:
    if rng.random() < 0.03:
        return _deep(rng.choice([3, 60, 200]))
    if rng.random() < 0.03:
        return rng.choice([[0] * 3000, "x" * 100_000, [[1.0, 2.0] for _ in range(500)]])
    if rng.random() < 0.1:
        return rng.randrange(-5, 300)
    return copy.deepcopy(rng.choice(_HOSTILE))


def _places(value: Any, found: list[tuple[Any, Any]], depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every container and key of a value, to depth 12."""
    keys = value if isinstance(value, dict) else range(len(value)) if _is_list(value) else ()
    for key in keys:
        found.append((value, key))
        if depth < 12:
            _places(value[key], found, depth + 1)
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def damaged_value(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one to four places damaged."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = _places(value, [])
        if not places or rng.random() < 0.01:
            return _hostile(rng)
        holder, key = rng.choice(places)
        _damage(holder, key, rng)
    return value


def _damage(holder: Any, key: Any, rng: random.Random) -> None:
    old, kind = holder[key], rng.randrange(9)
    if kind == 0:
        del holder[key]
    elif kind == 1 and type(old) in (int, float) and abs(old) < 1e15:
        holder[key] = rng.choice([-old, old + 1, old - 1, old * 1000, old * 0.3])
    elif kind == 2 and _is_list(old):
        old.extend(copy.deepcopy(old[: rng.randrange(4)]) or [_hostile(rng)])
    elif kind == 3 and _is_list(old) and old:
        del old[rng.randrange(len(old)) :]
    elif kind == 4 and _is_list(holder):
        rng.shuffle(holder)
    elif kind == 5 and isinstance(holder, dict):
        holder[rng.choice(["", "plans", "step", "kind", "\ud800", 3])] = _hostile(rng)
    elif kind == 6 and isinstance(holder, dict):
        other = rng.choice(list(holder))
        holder[key], holder[other] = holder[other], old
    else:
        holder[key] = _hostile(rng)


def damaged_text(text: bytes, rng: random.Random) -> bytes:
    """Return a text with one to four of its stretches damaged."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(text) + 1)
        until = min(len(text), at + rng.choice([0, 1, 1, 4, 40, 4000]))
        filling = rng.choice(
            [
                b"",
                bytes([rng.randrange(256)]),
                b"\n",
                b"\x1b[2J",
                b'"',
                b"9" * 5000,
                b"[" * rng.choice([10, 2000, 100_000]),
                b'{"a":' * 2000,
                b"\\ud800",
                b"NaN",
                b"1e999",
                b"-1",
                b"\xff\xfe",
                text[at : at + 200],
            ]
        )
        text = text[:at] + filling + text[until:]
    return text


# What a number may become: large, negative or cut off in binary formats with 7 bits a byte.
_NUMBERS = (
    b"\0", b"\xff", b"\x7f", b"\x80", b"\x80\x80\x80\x80\x08", b"\xff\xff\xff\xff\x0f",
    b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x80\x80\x80\x80\x80\x20",
)  # fmt: skip


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a binary file's bytes with one to six places written over, most with a number."""
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        at = rng.randrange(len(data))
        value = rng.choice([*_NUMBERS, *(bytes([rng.randrange(256)]) for _ in range(6))])
        until = at + rng.choice([len(value), len(value), 1, 0])
        data = data[:at] + value + data[until:]
    return data
