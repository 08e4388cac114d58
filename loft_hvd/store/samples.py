"""Samples as bytes and back, without pickle: what is kept on a shelf and sent to a peer.

A sample is numbers, text, bytes, tensors, arrays or PIL images, in any nesting of tuples, lists and
dicts. Its bytes are a head, which describes the nesting, and the values behind one another::

    (tensor [2, 3] uint8, 7)   head   ["(", ["t", "uint8", [2, 3]], ["i"]]
                               body   6 bytes, padded to 8; then 8 bytes of int64

Numbers are in the body, so samples of one shape share one head, and a head is read once.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loft_hvd.errors import ArgumentTypeError, DataError

__all__ = ["decode_sample", "encode_sample"]

_ALIGN = 8  # bound from float64 and int64, the widest values
_MAX_DEPTH = 16  # a choice: data sets nest two or three deep
_MAX_HEAD_BYTES = 1 << 20  # a choice: a dict of 20,000 entries
_HEAD = struct.Struct("<I")
_TENSORS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    )
}  # fmt: skip
_ARRAYS = "?bBhHiIlLqQefdFDMm"  # kinds of NumPy whose values are plain bytes
# Modes that their pixels describe in full; a palette is not among the pixels of "P".
_PIL_MODES = {"1", "L", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "LA"}


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGN


class _Writer:
    """The head and the body of one sample, while they grow."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.path: list[str] = []

    def put(self, data: Any, num_bytes: int) -> None:
        self.parts += [data, bytes(_padding(num_bytes))]

    def write(self, value: Any) -> list[Any]:
        """Return the head of ``value`` and put its values into the body."""
        if len(self.path) > _MAX_DEPTH:
            raise self._refusal(value, f"it is nested more than {_MAX_DEPTH} deep")
        kind = type(value)  # exactly these types: a subclass would come back as its base
        if kind is Tensor:
            return self._tensor(value)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value)
        if kind in (tuple, list):
            head: list[Any] = ["(" if kind is tuple else "["]
            return head + [self._inside(str(i), each) for i, each in enumerate(value)]
        if kind is dict:
            if not all(type(key) is str for key in value):
                raise self._refusal(value, "its keys are not all text")
            return [
                "{", list(value), [self._inside(key, each) for key, each in value.items()],
            ]  # fmt: skip
        return self._scalar(value)

    def _inside(self, name: str, value: Any) -> list[Any]:
        self.path.append(name)
        head = self.write(value)
        self.path.pop()
        return head

    def _scalar(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind is int and -(1 << 63) <= value < 1 << 63:
            self.put(struct.pack("<q", value), 8)
            return ["i"]
        if kind is float:
            self.put(struct.pack("<d", value), 8)
            return ["f"]
        if value is None or kind in (bool, int):
            return ["j", value]
        if kind is str:
            value, name = value.encode("utf-8", "surrogatepass"), "u"
        elif kind in (bytes, bytearray):
            name = "b"
        elif kind.__module__.startswith("PIL.") and hasattr(value, "tobytes"):
            return self._image(value)
        else:
            raise self._refusal(
                value, "the store takes numbers, text, bytes, tensors, arrays and PIL images"
            )
        self.put(value, len(value))
        return [name, len(value)]

    def _tensor(self, value: Tensor) -> list[Any]:
        name = str(value.dtype).removeprefix("torch.")
        if value.device.type != "cpu" or value.layout != torch.strided or name not in _TENSORS:
            raise self._refusal(value, f"a {value.dtype} tensor on {value.device} is not kept")
        flat = value.detach().contiguous().view(-1)
        self.put(flat.view(torch.uint8).numpy().data, flat.nbytes)
        return ["t", name, list(value.shape)]

    def _array(self, value: Any) -> list[Any]:
        array = np.asarray(value)
        if array.dtype.char not in _ARRAYS:
            raise self._refusal(value, f"an array of dtype {array.dtype} is not kept")
        shape, array = list(array.shape), np.ascontiguousarray(array)
        self.put(array.reshape(-1).view(np.uint8).data, array.nbytes)
        return ["a" if type(value) is np.ndarray else "s", array.dtype.str, shape]

    def _image(self, value: Any) -> list[Any]:
        if value.mode not in _PIL_MODES:
            raise self._refusal(value, f"a PIL image of mode {value.mode} is not kept")
        data = value.tobytes()
        self.put(data, len(data))
        return ["p", value.mode, list(value.size), len(data)]

    def _refusal(self, value: Any, why: str) -> ArgumentTypeError:
        place = "".join(f"[{name}]" for name in self.path)
        return ArgumentTypeError(
            f"sample{place} is of type {type(value).__qualname__}: {why}; return plain values from "
            "__getitem__ and build the object after the store"
        )


def encode_sample(sample: Any) -> bytes:
    """Return a sample as bytes.

    Args:
        sample: numbers, text, bytes, None, CPU tensors, NumPy arrays and PIL images, in tuples,
            lists and dicts with text keys.

    Raises:
        ArgumentTypeError: a part of it is of another type; names the part.
    """
    writer = _Writer()
    head = json.dumps(writer.write(sample), separators=(",", ":")).encode()
    if len(head) > _MAX_HEAD_BYTES:
        raise ArgumentTypeError(
            f"a sample's structure takes {len(head)} bytes, more than {_MAX_HEAD_BYTES}; put its "
            "many values into an array"
        )
    start = _HEAD.pack(len(head)) + head
    return b"".join([start, bytes(_padding(len(start))), *writer.parts])


class _SampleReader:
    """A body, read from front to back."""

    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.position = 0

    def take(self, num_bytes: int) -> memoryview:
        begin, end = self.position, self.position + num_bytes
        if end > len(self.body):
            raise DataError(f"a sample has {len(self.body)} bytes, its head needs {end}")
        self.position = end + _padding(num_bytes)
        return self.body[begin:end]


_Read = Callable[[_SampleReader], Any]


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise DataError(f"a sample's head has the size {value!r}")
    return value


def _shape(value: Any) -> tuple[list[int], int]:
    if not isinstance(value, list) or len(value) > 64:
        raise DataError(f"a sample's head has the shape {value!r}")
    sizes, numel = [_size(each) for each in value], 1
    for size in sizes:
        numel *= size
    if numel > 1 << 40:
        raise DataError(f"a sample's head has the shape {value!r}")
    return sizes, numel


def _build(head: Any, depth: int = 0) -> _Read:  # noqa: C901 - one branch for each kind of value
    """Return the function that reads what ``head`` describes."""
    if not isinstance(head, list) or not head or depth > _MAX_DEPTH + 1:
        raise DataError("a sample's head is broken")
    kind, rest = head[0], head[1:]
    if kind in ("(", "["):
        parts = [_build(each, depth + 1) for each in rest]
        make = tuple if kind == "(" else list
        return lambda reader: make([part(reader) for part in parts])
    if kind == "{":
        keys, values = rest
        reads = [_build(each, depth + 1) for each in values]
        if len(keys) != len(reads) or not all(type(key) is str for key in keys):
            raise DataError("a sample's head is broken")
        return lambda reader: {key: read(reader) for key, read in zip(keys, reads, strict=True)}
    if kind == "i":
        return lambda reader: struct.unpack("<q", reader.take(8))[0]
    if kind == "f":
        return lambda reader: struct.unpack("<d", reader.take(8))[0]
    if kind == "j":
        (constant,) = rest
        return lambda reader: constant
    if kind == "u":
        size = _size(rest[0])
        return lambda reader: bytes(reader.take(size)).decode("utf-8", "surrogatepass")
    if kind == "b":
        size = _size(rest[0])
        return lambda reader: bytes(reader.take(size))
    if kind == "t":
        return _tensor_reader(_TENSORS[rest[0]], *_shape(rest[1]))
    if kind in ("a", "s"):
        return _array_reader(str(rest[0]), *_shape(rest[1]), is_scalar=kind == "s")
    if kind == "p":
        return _image_reader(*rest)
    raise DataError(f"a sample's head has an unknown part {kind!r}")


def _tensor_reader(dtype: torch.dtype, shape: list[int], numel: int) -> _Read:
    num_bytes = numel * dtype.itemsize

    def read(reader: _SampleReader) -> Tensor:
        # A copy: the script may change a sample in place, and what is kept must stay.
        copied = bytearray(reader.take(num_bytes))
        if not copied:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(copied, dtype=dtype).view(shape)

    return read


def _array_reader(name: str, shape: list[int], numel: int, *, is_scalar: bool) -> _Read:
    dtype = np.dtype(name)
    if dtype.char not in _ARRAYS:
        raise DataError(f"a sample's head has the dtype {name!r}")

    def read(reader: _SampleReader) -> Any:
        taken = reader.take(numel * dtype.itemsize)
        array = np.frombuffer(bytearray(taken), dtype).reshape(shape)
        return array[()] if is_scalar else array

    return read


def _image_reader(mode: Any, size: Any, num_bytes: Any) -> _Read:
    (width, height), _ = _shape(size)
    length = _size(num_bytes)
    if mode not in _PIL_MODES:
        raise DataError(f"a sample's head has the image mode {mode!r}")

    def read(reader: _SampleReader) -> Any:
        from PIL import Image  # only where a data set gave one, so it is installed

        return Image.frombytes(mode, (width, height), bytes(reader.take(length)))

    return read


@functools.lru_cache(maxsize=1024)  # a choice: texts of different lengths have different heads
def _reader_of(head: bytes) -> _Read:
    try:
        return _build(json.loads(head))
    except DataError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise DataError(f"a sample's head is broken: {error!r}") from error


def decode_sample(data: bytes | memoryview) -> Any:
    """Return the sample that ``encode_sample`` turned into ``data``; its values are copies.

    Raises:
        DataError: ``data`` is not a whole sample. Nothing in it is ever run.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise DataError(f"a sample has {len(view)} bytes, fewer than its head")
    (length,) = _HEAD.unpack(view[: _HEAD.size])
    begin = _HEAD.size + length
    begin += _padding(begin)
    if length > _MAX_HEAD_BYTES or begin > len(view):
        raise DataError(f"a sample of {len(view)} bytes has a head of {length}")
    head = bytes(view[_HEAD.size : _HEAD.size + length])
    try:
        return _reader_of(head)(_SampleReader(view[begin:]))
    except DataError:
        raise
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise DataError(f"a sample's bytes do not fit its head: {error!r}") from error
