"""Plain data as bytes and back, without pickle: reading it runs no code, whoever has sent it.

Plain are None, bool, int, float, complex, range, str and bytes; tuple, list, dict, set and frozenset of what is plain;
torch.dtype, torch.device and torch.Size; tensors on the CPU that are values alone: strided, contiguous, without
gradients or attributes; and, where nothing may be pickled, the classes of unisono in records.py. All of these exactly:
a subclass (a named tuple, an enum, NumPy's float64) is not plain.

What is read equals what was written as a pickled copy would: types, -0.0, nan, the order of a dict. What a container
holds twice is one object there too. Cycles and more than `_DEPTH` levels are not plain.

A value is a letter and what that letter needs; counts and lengths are 8 bytes. A count can never exceed the bytes that
are left, so that what is allocated is in proportion to what was received.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.signatures.records import RECORDS
from unisono.errors import CommError

_DEPTH = 64
_MOST = 100  # elements in containers, where the value may be pickled: more take milliseconds
_DIMS = 64  # of a tensor
_INT64 = range(-(2**63), 2**63)
_DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPE_OF = {name: getattr(torch, name) for name in _DTYPES if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in _DTYPE_OF.items()}


class NotPlainError(Exception):
    """A value is not plain data; the message has which part of it."""


def encoded(value: Any, or_pickled: bool = False) -> bytes:
    """The value as bytes. NotPlainError if it is not plain data.

    or_pickled: otherwise it is pickled. So is then what has many elements, which pickle writes faster. Without, tensors
    arrive contiguous."""
    writer = _Writer(or_pickled)
    writer.write(value, 0)
    return b"".join(writer.parts)


def is_plain(value: Any) -> bool:
    """Where ranks have values of the same form: whether all of them may ask for data, instead of objects."""
    try:
        encoded(value)
    except NotPlainError:
        return False
    return True


def decoded(data: bytes, start: int, what: str) -> Any:
    """The value whose bytes begin at `start`. CommError, about `what`, unless they are those of one value."""
    return _Reader(data, start, what).whole()


# ---- writing ---------------------------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, or_pickled: bool) -> None:
        self.parts: list[bytes | memoryview] = []
        self._or_pickled = or_pickled
        self._left = _MOST if or_pickled else math.inf
        self._numbers: dict[int, int] = {}  # of containers and tensors that are complete, by id
        self._open: set[int] = set()

    def write(self, value: Any, depth: int) -> None:
        kind = type(value)
        write = _WRITERS.get(kind)
        if write is not None:
            write(self, value, depth)
        elif RECORDS.get(kind.__name__) is kind and not self._or_pickled:  # else the reader may not have imported it
            self.write_record(value, depth)
        else:
            raise NotPlainError(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def write_none(self, value: None, depth: int) -> None:
        self.parts.append(b"N")

    def write_bool(self, value: bool, depth: int) -> None:
        self.parts.append(b"T" if value else b"F")

    def write_int(self, value: int, depth: int) -> None:
        if value in _INT64:
            self.parts.append(struct.pack("<cq", b"i", value))
        else:
            self.sized(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def write_float(self, value: float, depth: int) -> None:
        self.parts.append(struct.pack("<cd", b"f", value))

    def write_complex(self, value: complex, depth: int) -> None:
        self.parts.append(struct.pack("<cdd", b"c", value.real, value.imag))

    def write_str(self, value: str, depth: int) -> None:
        self.sized(b"s", value.encode("utf-8", "surrogatepass"))

    def write_bytes(self, value: bytes, depth: int) -> None:
        self.sized(b"b", value)

    def write_dtype(self, value: torch.dtype, depth: int) -> None:
        if value not in _NAME_OF:
            raise NotPlainError(f"{value}")
        self.sized(b"y", _NAME_OF[value].encode())

    def write_device(self, value: torch.device, depth: int) -> None:
        self.sized(b"v", f"{value}".encode())

    def write_tuple(self, value: tuple[Any, ...], depth: int) -> None:
        self.elements(b"t", value, depth)

    def write_size(self, value: torch.Size, depth: int) -> None:
        self.elements(b"z", value, depth)

    def write_range(self, value: range, depth: int) -> None:
        self.elements(b"n", (value.start, value.stop, value.step), depth)

    def write_frozenset(self, value: frozenset[Any], depth: int) -> None:
        self.elements(b"r", value, depth)

    def write_list(self, value: list[Any], depth: int) -> None:
        self.mutable(b"l", value, value, depth)

    def write_set(self, value: set[Any], depth: int) -> None:
        self.mutable(b"e", value, value, depth)

    def write_dict(self, value: dict[Any, Any], depth: int) -> None:
        self.mutable(b"d", value, [each for item in value.items() for each in item], depth)

    def write_tensor(self, value: torch.Tensor, depth: int) -> None:
        if self._is_known(value):
            return
        if value.layout != torch.strided or value.device.type != "cpu" or value.dtype not in _NAME_OF:
            raise NotPlainError(f"a tensor of {value.dtype} on {value.device} ({value.layout})")
        if value.requires_grad or value.is_conj() or value.is_neg() or value.__dict__:
            raise NotPlainError("a tensor that is more than its values")
        if value.dim() > _DIMS:
            raise NotPlainError(f"a tensor of more than {_DIMS} dims")
        if self._or_pickled and not value.is_contiguous():
            raise NotPlainError("a tensor that is not contiguous")
        flat = value.clone(memory_format=torch.contiguous_format).reshape(-1)  # of one element, too, any stride may be
        content = flat.view(torch.uint8).numpy().data
        self.sized(b"a", _NAME_OF[value.dtype].encode())
        self.elements(b"t", tuple(value.shape), depth)
        self.parts += struct.pack("<Q", len(content)), content
        self._numbers[id(value)] = len(self._numbers)

    def write_record(self, value: Any, depth: int) -> None:
        kind = type(value)
        is_tuple = isinstance(value, tuple)
        fields = value if is_tuple else [getattr(value, each.name) for each in dataclasses.fields(value)]
        self.sized(b"o", kind.__name__.encode())
        self.elements(b"t", fields, depth)

    def mutable(self, letter: bytes, value: Any, elements: Any, depth: int) -> None:
        if self._is_known(value):
            return
        if id(value) in self._open:
            raise NotPlainError("a container that contains itself")
        self._open.add(id(value))
        self.elements(letter, elements, depth)
        self._open.remove(id(value))
        self._numbers[id(value)] = len(self._numbers)

    def _is_known(self, value: Any) -> bool:
        number = self._numbers.get(id(value))
        if number is not None:
            self.parts.append(struct.pack("<cQ", b"@", number))
        return number is not None

    def elements(self, letter: bytes, elements: Any, depth: int) -> None:
        self._left -= len(elements)
        if depth == _DEPTH or self._left < 0:
            raise NotPlainError(f"more than {_DEPTH} levels" if depth == _DEPTH else "many elements")
        self.parts.append(struct.pack("<cQ", letter, len(elements)))
        for each in elements:
            self.write(each, depth + 1)

    def sized(self, letter: bytes, content: bytes) -> None:
        self.parts += struct.pack("<cQ", letter, len(content)), content


_WRITERS: dict[type, Callable[[_Writer, Any, int], None]] = {
    type(None): _Writer.write_none,
    bool: _Writer.write_bool,
    int: _Writer.write_int,
    float: _Writer.write_float,
    complex: _Writer.write_complex,
    str: _Writer.write_str,
    bytes: _Writer.write_bytes,
    torch.dtype: _Writer.write_dtype,
    torch.device: _Writer.write_device,
    tuple: _Writer.write_tuple,
    torch.Size: _Writer.write_size,
    frozenset: _Writer.write_frozenset,
    range: _Writer.write_range,
    list: _Writer.write_list,
    set: _Writer.write_set,
    dict: _Writer.write_dict,
    torch.Tensor: _Writer.write_tensor,
}


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, data: bytes, start: int, what: str) -> None:
        self._data = data
        self._at = start
        self._what = what
        self._made: list[Any] = []  # containers and tensors that are complete

    def whole(self) -> Any:
        value = self.value(0)
        if self._at != len(self._data):
            raise self.malformed("more bytes follow the value")
        return value

    def malformed(self, why: str) -> CommError:
        return CommError(
            f"{self._what} is no plain data: {why}, at byte {self._at} of {len(self._data)}; expected what a rank with "
            "the same version of unisono sends, so look for what else sends to this job's ports"
        )

    def value(self, depth: int) -> Any:
        letter = self.take(1)
        read = _READERS.get(letter)
        if read is None:
            raise self.malformed(f"no value begins with {letter!r}")
        if depth > _DEPTH:
            raise self.malformed(f"more than {_DEPTH} levels")
        return read(self, depth)

    def take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise self.malformed(f"{length} bytes are announced and {len(self._data) - self._at} left")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def number(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def sized(self) -> bytes:
        return self.take(self.number())

    def elements(self, depth: int) -> list[Any]:
        count = self.number()
        if count > len(self._data) - self._at:
            raise self.malformed(f"{count} elements are announced and {len(self._data) - self._at} bytes left")
        return [self.value(depth + 1) for _ in range(count)]

    def kept(self, value: Any) -> Any:
        self._made.append(value)
        return value

    def read_int64(self, depth: int) -> int:
        return int.from_bytes(self.take(8), "little", signed=True)

    def read_integer(self, depth: int) -> int:
        return int.from_bytes(self.sized(), "little", signed=True)

    def read_real(self, depth: int) -> float:
        value: float = struct.unpack("<d", self.take(8))[0]
        return value

    def read_complex(self, depth: int) -> complex:
        return complex(*struct.unpack("<dd", self.take(16)))

    def read_text(self, depth: int) -> str:
        try:
            return self.sized().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.malformed("text that is not UTF-8") from None

    def read_dtype(self, depth: int) -> torch.dtype:
        name = self.sized()[:50].decode("ascii", "replace")
        if name not in _DTYPE_OF:
            raise self.malformed(f"no dtype is called {name!r}")
        found: torch.dtype = _DTYPE_OF[name]
        return found

    def read_device(self, depth: int) -> torch.device:
        name = self.sized()[:50].decode("ascii", "replace")
        try:
            return torch.device(name)
        except (RuntimeError, ValueError):
            raise self.malformed(f"no device is called {name!r}") from None

    def read_size(self, depth: int) -> torch.Size:
        sizes = self.elements(depth)
        if not all(type(each) is int and each in _INT64 for each in sizes):
            raise self.malformed("a torch.Size of what are no sizes")
        return torch.Size(sizes)

    def hashable(self, make: Callable[[], Any], count: int) -> Any:
        try:
            made = make()
        except TypeError:
            raise self.malformed("a set or dict with what cannot be hashed") from None
        if len(made) != count:
            raise self.malformed("a set or dict with equal elements")
        return made

    def read_set(self, depth: int) -> set[Any]:
        elements = self.elements(depth)
        found: set[Any] = self.kept(self.hashable(lambda: set(elements), len(elements)))
        return found

    def read_frozenset(self, depth: int) -> frozenset[Any]:
        elements = self.elements(depth)
        found: frozenset[Any] = self.hashable(lambda: frozenset(elements), len(elements))
        return found

    def read_dict(self, depth: int) -> dict[Any, Any]:
        """Its keys and values in turn."""
        both = self.elements(depth)
        if len(both) % 2:
            raise self.malformed("a dict with a key that has no value")
        keys, values = both[::2], both[1::2]
        found: dict[Any, Any] = self.kept(self.hashable(lambda: dict(zip(keys, values, strict=True)), len(keys)))
        return found

    def read_tensor(self, depth: int) -> torch.Tensor:
        dtype, shape, length = self.read_dtype(depth), self.value(depth), self.number()
        if not isinstance(shape, tuple) or not all(type(each) is int and each in _INT64 for each in shape):
            raise self.malformed("a tensor whose shape is no shape")
        if len(shape) > _DIMS or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != length:
            raise self.malformed("a tensor whose shape is not that of its content")
        content = self.take(length)
        if dtype == torch.bool and content.strip(b"\0\1"):
            raise self.malformed("a tensor of bool with other values")
        try:
            made = torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError, OverflowError):  # no elements, and dims that are too large together
            raise self.malformed("a tensor whose shape is too large") from None
        if content:
            made.view(-1).view(torch.uint8).numpy().data[:] = content
        self.kept(made)
        return made

    def read_range(self, depth: int) -> range:
        try:
            return range(*self.elements(depth))
        except (TypeError, ValueError):
            raise self.malformed("a range of what are no bounds") from None

    def read_record(self, depth: int) -> Any:
        name, fields = self.sized()[:50].decode("ascii", "replace"), self.value(depth)
        if name not in RECORDS or not isinstance(fields, tuple):
            raise self.malformed(f"no record is called {name!r}")
        try:
            return RECORDS[name](*fields)
        except (TypeError, ValueError, AttributeError) as error:
            raise self.malformed(f"{name} cannot be made of its fields ({error})") from None

    def read_again(self, depth: int) -> Any:
        number = self.number()
        if number >= len(self._made):
            raise self.malformed("a reference to what has not been read yet")
        return self._made[number]


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda reader, depth: None,
    b"T": lambda reader, depth: True,
    b"F": lambda reader, depth: False,
    b"i": _Reader.read_int64,
    b"I": _Reader.read_integer,
    b"f": _Reader.read_real,
    b"c": _Reader.read_complex,
    b"s": _Reader.read_text,
    b"b": lambda reader, depth: reader.sized(),
    b"y": _Reader.read_dtype,
    b"v": _Reader.read_device,
    b"t": lambda reader, depth: tuple(reader.elements(depth)),
    b"z": _Reader.read_size,
    b"r": _Reader.read_frozenset,
    b"l": lambda reader, depth: reader.kept(reader.elements(depth)),
    b"e": _Reader.read_set,
    b"d": _Reader.read_dict,
    b"a": _Reader.read_tensor,
    b"n": _Reader.read_range,
    b"o": _Reader.read_record,
    b"@": _Reader.read_again,
}
