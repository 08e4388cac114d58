"""States as plain JSON values: one codec for every ``state_dict`` of the package.

What has a state keeps it in a dataclass. ``encode`` turns the dataclass into dicts, lists, numbers,
strings and None; ``decode`` reads them back by the types of its fields, which say all there is to
check. A field's type is bool, int, float, str, ``X | None``, ``list[X]``, ``dict[str, X]``, a
tuple, an array ``npt.NDArray[...]``, Any, or another dataclass.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from loft_hvd.errors import ArgumentError

__all__ = ["decode", "encode"]

T = TypeVar("T")


def encode(state: object) -> dict[str, Any]:
    """Return a dataclass as a dict that strict JSON can hold.

    JSON knows no NaN: it becomes None, and ``decode`` makes it NaN again where a float is due.
    """
    return {item.name: _plain(getattr(state, item.name)) for item in _fields(state)}


def decode(kind: type[T], state: object, *, what: str) -> T:
    """Make the dataclass that ``encode`` was given, all of it or nothing.

    A field with a default may be missing. ``what`` says whose state it is, for the ArgumentError
    that names a field which is missing, not known or of another type.
    """
    made: T = _read(kind, state, what)
    return made


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(kind) if item.init]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _read(kind: Any, value: Any, where: str) -> Any:
    """Read one value of a type; ``where`` is the way to it, such as ``Loft.fitter.rows[3]``."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, where)
    if origin in (typing.Union, types.UnionType):  # X | None is the only union that a state has
        (other,) = (each for each in inner if each is not type(None))
        return None if value is None else _read(other, value, where)
    if origin is np.ndarray:
        return _read_array(typing.get_args(inner[1])[0], value, where)
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _read(inner[1], each, f"{where}[{key!r}]") for key, each in value.items()}
    if origin in (list, tuple) and isinstance(value, list | tuple):
        is_uniform = origin is list or inner[1:] == (...,)
        kinds = [inner[0]] * len(value) if is_uniform else list(inner)
        if len(kinds) != len(value):
            raise _refusal(where, f"{len(kinds)} values", value)
        return origin(
            _read(each, item, f"{where}[{at}]")
            for at, (each, item) in enumerate(zip(kinds, value, strict=True))
        )
    if kind is float and value is None:
        return math.nan
    # To Python True is a number and 1 a float; to a state only the second holds.
    takes = {float: (int, float)}.get(kind, (kind if origin is None else origin,))
    if not isinstance(value, takes) or (isinstance(value, bool) and kind is not bool):
        raise _refusal(where, getattr(kind, "__name__", str(kind)), value)
    return float(value) if kind is float else value


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _refusal(where, "a dict", value)
    items, hints = _fields(kind), typing.get_type_hints(kind)
    needed = {
        item.name for item in items if item.default is item.default_factory is dataclasses.MISSING
    }
    missing, unknown = needed - set(value), set(value) - {item.name for item in items}
    if missing or unknown:
        raise _refusal(
            where, f"keys {[item.name for item in items]}", sorted(str(key) for key in value)
        )
    return kind(
        **{name: _read(hints[name], each, f"{where}.{name}") for name, each in value.items()}
    )


def _read_array(dtype: type[np.generic], value: Any, where: str) -> Any:
    """Read nested lists of one shape; only float arrays take None, for NaN."""
    try:
        array = np.array(value, dtype=np.float64 if issubclass(dtype, np.floating) else None)
        if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"{array.dtype} is not {dtype.__name__}")
        return array.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refusal(where, f"nested lists of {dtype.__name__}", value) from error


def _refusal(where: str, wanted: str, value: object) -> ArgumentError:
    return ArgumentError(
        f"load_state_dict: {where} needs {wanted}, but got {reprlib.repr(value)}; give what "
        "state_dict of this version returned, whole"
    )
