"""States and files from outside as plain JSON values: one codec that lets nothing else in.

What has a state, or is read from a file, is a dataclass. ``encode`` turns the dataclass into dicts,
lists, numbers, strings and None; ``decode`` reads them back by the types of its fields, which say
all there is to check. A field's type is bool, int, float, str, ``X | None``, ``list[X]``,
``dict[str, X]``, a tuple, an array ``npt.NDArray[...]``, Any, or another dataclass; ``Annotated``
adds a ``Shape``, a range (``Within``), a place in a list (``Index``) or a ``Size``. What a type
cannot say a ``__post_init__`` does. So an object that has come out of ``decode`` is one that the
package could have made, and a load is all or nothing: decode first, then let the new take the place
of the old.

``parse_json`` is where text becomes values. ``printable`` is for text on its way to a terminal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import reprlib
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import numpy as np

from loft_hvd.errors import ArgumentError

__all__ = [
    "MAX_LINE_BYTES",
    "Count",
    "Index",
    "Shape",
    "Size",
    "Within",
    "decode",
    "encode",
    "parse_json",
    "printable",
]

T = TypeVar("T")

# One line of a log holds 400 bytes a rank: this is for 5,000. As values a text takes up to 35 times
# its length, in empty lists: 70 MB.
MAX_LINE_BYTES = 2 * 1024 * 1024
_LARGEST = 1e30  # in an array: beyond what anything here measures, and its square is finite
_LARGEST_INT = 2**53  # beyond it JSON's numbers are not exact elsewhere, and int64 sums may wrap
_FINITE = sys.float_info.max
_UNPRINTED = re.compile(r"[^\n\t\x20-\x7e]")


class Shape:
    """The length of each dimension of a list, tuple or array: a number, or a name.

    A name stands for one number in all fields of an object and of the objects inside it.
    """

    def __init__(self, *dims: int | str) -> None:
        self.dims = dims


class Size:
    """Numbers that names of a ``Shape`` stand for inside an object."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes


@dataclasses.dataclass(frozen=True)
class Within:
    """The range of a number, or of all numbers of an array; NaN is in none."""

    least: float
    most: float = _LARGEST_INT

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


@dataclasses.dataclass(frozen=True)
class Index:
    """A place in a list of a named length, such as a rank."""

    dim: str


Count = Annotated[int, Within(0)]
_KINDS: dict[type[np.generic], set[type]] = {  # of an array's values, by its dtype
    np.bool_: {bool},
    np.int64: {int},
    np.float64: {int, float, type(None)},
}
_RANGES = {int: Within(-_LARGEST_INT), float: Within(-_FINITE, _FINITE)}  # where none is given


def encode(state: object) -> dict[str, Any]:
    """Return a dataclass as a dict that strict JSON can hold.

    JSON knows no NaN: it becomes None, and ``decode`` makes it NaN again where a float is due.
    """
    return {item.name: _plain(getattr(state, item.name)) for item in _fields(state)}


def decode(
    kind: type[T],
    state: object,
    *,
    what: str,
    sizes: Mapping[str, int] | None = None,
    is_open: bool = False,
    call: str = "load_state_dict",
    advice: str = "give what state_dict of this version returned, whole",
) -> T:
    """Make the dataclass that ``encode`` was given, all of it or nothing.

    A field with a default may be missing.

    Args:
        kind: the dataclass.
        state: what ``encode`` returned; anything else is refused.
        what: whose state it is, for the error.
        sizes: numbers that names of a ``Shape`` stand for; others are free.
        is_open: pass over keys that are not known, as another version may write.
        call: what was asked, for the error; and ``advice``, its way out.

    Raises:
        ArgumentError: a field is missing, not known, or not what its type says; names it.
    """
    reader = _FieldReader(is_open, call, advice)
    made: T = reader.read(kind, state, what, dict(sizes or {}))
    return made


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(kind) if item.init]


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


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


@dataclasses.dataclass(frozen=True)
class _FieldReader:
    """Reads values by their types; ``where`` is the way to one, as ``Loft.fitter.rows[3]``.

    It goes as deep as the types do, however deep the values are. ``sizes`` are what names of shapes
    stand for so far: an object knows those around it, and keeps what it adds to itself.
    """

    is_open: bool
    call: str
    advice: str

    def read(self, kind: Any, value: Any, where: str, sizes: dict[str, int]) -> Any:
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            return self._read_limited(inner[0], inner[1:], value, where, sizes)
        if kind is Any:
            return value
        if dataclasses.is_dataclass(kind):
            return self._read_fields(kind, value, where, dict(sizes))
        if origin in (typing.Union, types.UnionType):  # X | None is the only union there is
            (other,) = (each for each in inner if each is not type(None))
            return None if value is None else self.read(other, value, where, sizes)
        if origin is np.ndarray:
            return self._read_array(typing.get_args(inner[1])[0], value, where)
        if origin is dict and isinstance(value, Mapping):
            return {
                str(key): self.read(inner[1], each, f"{where}[{_show(key)}]", sizes)
                for key, each in value.items()
            }
        if origin in (list, tuple) and isinstance(value, list | tuple):
            return self._read_items(origin, inner, value, where, sizes)
        made = self._read_one(kind if origin is None else origin, value, where)
        return self._in_range(kind, made, [], where) if kind in _RANGES else made

    def _read_one(self, kind: Any, value: Any, where: str) -> Any:
        if kind is float and value is None:
            return math.nan
        # To Python True is a number and 1 a float; to a state only the second holds.
        takes = {float: (int, float)}.get(kind, (kind,))
        if not isinstance(value, takes) or (isinstance(value, bool) and kind is not bool):
            raise self.refusal(where, getattr(kind, "__name__", str(kind)), value)
        return value

    def _read_limited(
        self, kind: Any, limits: tuple[Any, ...], value: Any, where: str, sizes: dict[str, int]
    ) -> Any:
        for limit in limits:
            if isinstance(limit, Size):
                sizes = sizes | limit.sizes
        ranges = [limit for limit in limits if isinstance(limit, Within)]
        if kind in _RANGES:
            made = self._in_range(kind, self._read_one(kind, value, where), ranges, where)
        else:
            made = self.read(kind, value, where, sizes)
        for limit in limits:
            if isinstance(limit, Shape):
                made = self._fit_shape(limit, made, where, sizes)
            elif isinstance(limit, Index) and not 0 <= made < sizes.get(limit.dim, _LARGEST_INT):
                raise self.refusal(where, f"an index below {sizes.get(limit.dim)}", value)
        if isinstance(made, np.ndarray):
            for limit in ranges:
                if not ((made >= limit.least) & (made <= limit.most)).all():
                    raise self.refusal(where, f"numbers {limit}", value)
        return made

    def _in_range(self, kind: Any, value: Any, ranges: list[Within], where: str) -> Any:
        """Return a number that is in a range of its own or, without one, in that of its type."""
        for limit in ranges or [_RANGES[kind]]:
            is_unknown = isinstance(value, float) and math.isnan(value) and not ranges
            if not (is_unknown or limit.least <= value <= limit.most):
                raise self.refusal(where, f"{kind.__name__} {limit}", value)
        return float(value) if kind is float else value

    def _fit_shape(self, shape: Shape, made: Any, where: str, sizes: dict[str, int]) -> Any:
        got = made.shape if isinstance(made, np.ndarray) else (len(made),)
        wanted = [sizes.get(dim) if isinstance(dim, str) else dim for dim in shape.dims]
        if isinstance(made, np.ndarray) and not made.size and wanted[0] in (None, 0):
            # An empty list has lost the lengths that follow the first.
            got = (0, *(length or 0 for length in wanted[1:]))
            made = made.reshape(got)
        fits = len(got) == len(wanted)
        for dim, length, number in zip(shape.dims, wanted, got, strict=False):
            # A name may come twice in one shape: [num_terms, num_terms].
            length = sizes.setdefault(dim, number) if isinstance(dim, str) else length
            fits = fits and length == number
        if not fits:
            named = ", ".join(
                f"{dim}={sizes[dim]}" if isinstance(dim, str) and dim in sizes else str(dim)
                for dim in shape.dims
            )
            raise self.refusal(where, f"shape [{named}]", f"shape {list(got)}")
        return made

    def _read_items(
        self, origin: Any, inner: tuple[Any, ...], value: Any, where: str, sizes: dict[str, int]
    ) -> Any:
        is_uniform = origin is list or inner[1:] == (...,)
        kinds = [inner[0]] * len(value) if is_uniform else list(inner)
        if len(kinds) != len(value):
            raise self.refusal(where, f"{len(kinds)} values", value)
        return origin(
            self.read(each, item, f"{where}[{at}]", sizes)
            for at, (each, item) in enumerate(zip(kinds, value, strict=True))
        )

    def _read_fields(self, kind: Any, value: Any, where: str, sizes: dict[str, int]) -> Any:
        if not isinstance(value, Mapping):
            raise self.refusal(where, "a dict", value)
        items, hints = _fields(kind), _hints(kind)
        names = [item.name for item in items]
        needed = {
            item.name
            for item in items
            if item.default is item.default_factory is dataclasses.MISSING
        }
        unknown = set() if self.is_open else set(value) - set(names)
        if needed - set(value) or unknown:
            missing, odd = sorted(needed - set(value)), sorted(map(str, unknown))
            told = f"{missing} are missing" if missing else f"{_show(odd)} are none of them"
            raise ArgumentError(
                f"{self.call}: {where} needs keys {names}, but got "
                f"{_show(sorted(map(str, value)))}: {told}; {self.advice}"
            )
        # In the order of the fields: those before give the names of shapes their numbers.
        made = {
            name: self.read(hints[name], value[name], f"{where}.{name}", sizes)
            for name in names
            if name in value
        }
        try:
            return kind(**made)
        except ArgumentError as error:  # its own __post_init__ knows more than types can say
            raise type(error)(f"{self.call}: {where}: {error}; {self.advice}") from error

    def _read_array(self, dtype: type[np.generic], value: Any, where: str) -> Any:
        """Read nested lists of one shape; only float arrays take None, for NaN."""
        read = None
        try:
            array = np.array(value, dtype=object)
            if set(map(type, array.flat)) <= _KINDS[dtype]:
                read = array.astype(dtype)  # None becomes NaN
        except (TypeError, ValueError, OverflowError, RuntimeError):  # too deep, or too many digits
            pass
        if read is None or (dtype is not np.bool_ and (np.abs(read) > _LARGEST).any()):
            raise self.refusal(where, f"nested lists of {dtype.__name__}", value)
        return read

    def refusal(self, where: str, wanted: str, value: object) -> ArgumentError:
        return ArgumentError(
            f"{self.call}: {where} needs {wanted}, but got {_show(value)}; {self.advice}"
        )


def _show(value: object) -> str:
    """Return a short form of any value, however deep or large it is."""
    try:
        return reprlib.repr(value)
    except Exception:  # such as a number of too many digits
        return f"a value of type {type(value).__name__}"


# Text from outside.


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; a ValueError too where it is too long or too deep."""
    if len(text) > MAX_LINE_BYTES:
        raise ValueError(f"{len(text)} characters are more than {MAX_LINE_BYTES}")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("values are nested too deep") from error


def printable(text: str) -> str:
    """Return text that a terminal shows and does not obey: what is not printable is escaped.

    Line ends and tabs stay. Half a surrogate pair, which no file can hold, is escaped too.
    """
    return _UNPRINTED.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return character if character.isprintable() else ascii(character)[1:-1]
