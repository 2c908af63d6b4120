"""Plain values as bytes: tagged MessagePack, the value half of format 1. No pickle, ever.

Knows how Python's, NumPy's and torch's plain values look as bytes. Refuses to know classes: a value
of any other type is refused by the full name of its leaf, because what cannot be written faithfully
cannot be read faithfully either.

The bytes
---------
One MessagePack object. These are themselves: nil, bool, integers of -2^63 … 2^64-1, float 64, str
(UTF-8), bin (bytes), array (a Python *list*). MessagePack maps and float 32 are never written and
always refused. Everything else is an *extension* whose type says what it is and whose payload is:

==  ============  ==============================================================================
1   int           two's complement, little endian: an integer beyond 64 bits
2   tuple         array of the items
3   dict          array of key, value, key, value, … in the dict's order; keys are any values here
4   OrderedDict   as 3
5   Counter       as 3
6   set           array of the items, ordered by their own bytes
7   frozenset     as 6
8   deque         array of the longest length allowed (nil: any) and an array of the items
9   complex       real and imaginary part, two little-endian float 64
10  range         array of start, stop, step
11  slice         array of start, stop, step
16  NumPy dtype   str: its ``dtype.str``, such as ``<f4`` (kinds b i u f c m M S U; no long double)
17  NumPy scalar  array of its ``dtype.str`` and its bytes (bin); text without a length: ``<U``, ``|S``
18  NumPy array   array of its ``dtype.str``, its shape (array) and its elements row-major (bin)
32  torch.dtype   str: its name without ``torch.``
33  torch.Size    array of the extents
34  torch.device  str
35  TensorRef     str: the name of the leaf whose tensor stands here
==  ============  ==============================================================================

A payload is again one MessagePack object, an array or a str as stated, except of 1 and 9. Containers nest
at most 100 deep (a deque counts as two). A reader refuses trailing bytes, unknown extension types, lengths
beyond the input, two equal keys in a dict, and keys that cannot be hashed.

Not kept: sharing (one list in two places becomes two), memory order and strides of arrays, NaN
identity. Kept: types, order of dicts, every bit of floats.
"""

from __future__ import annotations

import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import msgspec
import numpy as np

from ftckpt.errors import RecordCorrupt, UnsupportedValue

MAX_DEPTH = 100

_INT, _TUPLE, _DICT, _ORDERED, _COUNTER, _SET, _FROZENSET, _DEQUE, _COMPLEX, _RANGE, _SLICE = range(1, 12)
_NP_DTYPE, _NP_SCALAR, _NP_ARRAY = 16, 17, 18
_TORCH_DTYPE, _TORCH_SIZE, _TORCH_DEVICE, _TENSOR = 32, 33, 34, 35

_DICTS: dict[type, int] = {dict: _DICT, OrderedDict: _ORDERED, Counter: _COUNTER}
_SETS: dict[type, int] = {set: _SET, frozenset: _FROZENSET}
_BULK = frozenset({int, float, bool, type(None), bytes})


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in a value where a tensor stood; ``name`` is the leaf that holds its bytes."""

    name: str


def pack(value: object, *, leaf: str) -> bytes:
    """The bytes of a value; equal values of equal types give equal bytes.

    Raises:
        UnsupportedValue: something inside has no form here. Fact ``leaf``: its full name, which
            starts with the ``leaf`` given.
    """
    return msgspec.msgpack.encode(_lower(value, leaf, 0, set()))


def check(value: object, *, leaf: str) -> None:
    """Refuse what ``pack`` would refuse, without the bytes of arrays."""
    if type(value) is np.ndarray:
        _plain_dtype(value.dtype, leaf)
    else:
        _lower(value, leaf, 0, set())


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The value that ``pack`` was given. Costs at most a constant times ``len(data)`` of memory.

    Raises:
        RecordCorrupt: not one whole value of this format.
    """
    reader = _Reader(memoryview(data).cast("B") if len(data) else memoryview(b""))
    value = reader.value(0)
    if reader.at != len(reader.data):
        _corrupt(f"{len(reader.data) - reader.at} bytes follow its end", reader.at)
    return value


def path_part(key: object) -> str:
    """One part of a leaf's name for a key of a container, injective over all keys.

    A ``str`` is itself with ``. @ % /`` and control characters as ``%XX``; the empty one is ``%e``.
    Other keys begin with a tag that no string gives: ``%i0``, ``%f1%2E5``, ``%bTrue``, ``%n``, and
    ``%x`` with the packed bytes in hex.
    """
    if type(key) is str:
        if not key:
            return "%e"
        if key.isascii() and (key.isidentifier() or key.isalnum()):
            return key
        return "".join(f"%{ord(c):02X}" if c in ".@%/\x7f" or c < " " else c for c in key)
    if key is None:
        return "%n"
    if type(key) is bool:
        return f"%b{key}"
    if type(key) is int:
        return f"%i{key}"
    if type(key) is float:
        return "%f" + repr(key).replace(".", "%2E")
    return "%x" + pack(key, leaf=f"(key of type {type(key).__qualname__})").hex()


def joined(path: str, key: object) -> str:
    """The name of what stands under ``key`` in the container called ``path``."""
    return f"{path}.{path_part(key)}"


def refuse(value: object, leaf: str, why: str = "") -> NoReturn:
    """Raise the error for a value that has no form in format 1."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UnsupportedValue(
        f"cannot save {leaf}: {why or 'a value of type ' + kind + ' has no form in the checkpoint format'}\n"
        "  nothing was written; earlier commits are untouched\n"
        "  convert it to tensors, numbers, strings, lists or dicts, or give its owner "
        "state_dict()/load_state_dict()",
        leaf=leaf,
        type=kind,
    )


# --- writing -------------------------------------------------------------------------------------


def _lower(value: Any, leaf: str, depth: int, inside: set[int]) -> Any:
    """The same value in terms that msgspec writes as the table above says.

    ``inside`` holds the ids of the containers that this value stands in, to see cycles.
    """
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is bytes:
        return value
    if kind is int:
        return _lower_int(value)
    if kind is str:
        return _utf8(value, leaf)
    if kind in _CONTAINERS or _is_torch(value, "Size"):
        if id(value) in inside:
            refuse(value, leaf, "it contains itself")
        depth += 2 if kind is deque else 1  # a deque's payload is an array in an array
        if depth > MAX_DEPTH:
            refuse(value, leaf, f"containers nest more than {MAX_DEPTH} deep")
        inside.add(id(value))
        lowered = _lower_container(value, leaf, depth, inside)
        inside.discard(id(value))
        return lowered
    if kind is complex:
        return _ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    if kind is range or kind is slice:
        ends = [_lower(v, leaf, depth, inside) for v in (value.start, value.stop, value.step)]
        return _ext(_RANGE if kind is range else _SLICE, _encode(ends))
    if kind is TensorRef:
        return _ext(_TENSOR, _encode(_utf8(value.name, leaf)))
    return _lower_array(value, leaf)


def _lower_int(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return _ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _lower_container(value: Any, leaf: str, depth: int, inside: set[int]) -> Any:
    kind = type(value)
    if kind in _DICTS:
        flat: list[Any] = []
        for key, item in value.items():
            if type(key) is str and key.isascii():  # the common cases, without a name in case of an error
                item_kind = type(item)
                if item_kind is TensorRef and item.name.isascii():
                    flat += (key, _ext(_TENSOR, _encode(item.name)))
                    continue
                if item is None or item_kind is bool or item_kind is float:
                    flat += (key, item)
                    continue
            name = joined(leaf, key) if _is_simple_key(key) else f"{leaf}.(key {key!r:.60})"
            flat += (_lower(key, name, depth, inside), _lower(item, name, depth, inside))
        return _ext(_DICTS[kind], _encode(flat))
    if kind in _SETS:
        members = sorted(_encode(_lower(item, f"{leaf}.(member)", depth, inside)) for item in value)
        return _ext(_SETS[kind], _encode([msgspec.Raw(member) for member in members]))
    items = _lower_items(value, leaf, depth, inside)
    if kind is list:
        return items
    if kind is deque:
        return _ext(_DEQUE, _encode([value.maxlen, items]))
    return _ext(_TUPLE if kind is tuple else _TORCH_SIZE, _encode(items))


def _lower_items(items: Collection[Any], leaf: str, depth: int, inside: set[int]) -> list[Any]:
    kinds = set(map(type, items))
    if kinds <= _BULK and (int not in kinds or _within_64_bits(items)):  # the common case, at C speed
        return list(items)
    return [_lower(item, f"{leaf}.{i}", depth, inside) for i, item in enumerate(items)]


def _within_64_bits(items: Iterable[Any]) -> bool:
    return all(-(1 << 63) <= item < 1 << 64 for item in items if type(item) is int)


def _lower_array(value: Any, leaf: str) -> Any:
    if type(value) is np.ndarray:
        shape = list(value.shape)
        return _ext(_NP_ARRAY, _encode([_plain_dtype(value.dtype, leaf), shape, value.tobytes()]))
    if type(value) is np.str_:
        return _ext(_NP_SCALAR, _encode(["<U", value.encode("utf-32-le", "surrogatepass")]))
    if type(value) is np.bytes_:
        return _ext(_NP_SCALAR, _encode(["|S", bytes(value)]))
    if isinstance(value, np.generic) and type(value) is value.dtype.type:
        return _ext(_NP_SCALAR, _encode([_plain_dtype(value.dtype, leaf), np.asarray(value).tobytes()]))
    if isinstance(value, np.dtype):
        return _ext(_NP_DTYPE, _encode(_plain_dtype(value, leaf)))
    if _is_torch(value, "dtype"):
        return _ext(_TORCH_DTYPE, _encode(str(value).removeprefix("torch.")))
    if _is_torch(value, "device"):
        return _ext(_TORCH_DEVICE, _encode(str(value)))
    refuse(value, leaf)


def _plain_dtype(dtype: np.dtype[Any], leaf: str) -> str:
    """Its name, if an array of it can be read anywhere: no objects, records or long doubles."""
    plain = dtype.kind in "biufcmMSU" and not (dtype.kind in "fc" and dtype.char in "gG")
    if not plain or dtype.metadata:
        refuse(dtype, leaf, f"a NumPy array of dtype {dtype} has no form in the checkpoint format")
    return dtype.str


def _utf8(text: str, leaf: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(text, leaf.encode(errors="backslashreplace").decode(), "the text holds a lone surrogate")
    return text


def _is_simple_key(key: object) -> bool:
    return key is None or type(key) in (str, int, float, bool)


def _is_torch(value: object, name: str) -> bool:
    """Whether it is of that class of torch; a value cannot be if nobody has imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is getattr(torch, name, None)


def _ext(code: int, payload: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, payload)


_encode: Callable[[Any], bytes] = msgspec.msgpack.encode
_CONTAINERS: frozenset[type] = frozenset({*_DICTS, *_SETS, list, tuple, deque})


# --- reading -------------------------------------------------------------------------------------


class _Reader:
    """Reads one MessagePack object and trusts no length: every byte it asks for must be there.

    Our own, because a general decoder allocates what an array header claims and turns timestamps
    and maps into values that were never written.
    """

    __slots__ = ("at", "data")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self.data):
            _corrupt(f"{count} bytes are announced, {len(self.data) - self.at} are left", self.at)
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int) -> Any:
        first = self.number("B")
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first & 0xE0 == 0xA0:
            return self.text(first & 0x1F)
        if first & 0xF0 == 0x90:
            return self.items(first & 0x0F, depth)
        if first in _FIXED:
            return _FIXED[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        if first in _SIZED:
            form, what = _SIZED[first]
            count = self.number(form)
            if what == "bin":
                return bytes(self.take(count))
            if what == "str":
                return self.text(count)
            if what == "array":
                return self.items(count, depth)
            return self.extension(count, depth)
        if first not in _FIXEXT:
            _corrupt(f"byte 0x{first:02x} begins nothing that is ever written", self.at - 1)
        return self.extension(_FIXEXT[first], depth)

    def text(self, count: int) -> str:
        at = self.at
        try:
            return str(self.take(count), "utf-8")
        except UnicodeDecodeError as error:
            _corrupt("a text is not UTF-8", at, error)

    def items(self, count: int, depth: int) -> list[Any]:
        if depth >= MAX_DEPTH + 2:  # the payload of an array holds an array, its shape
            _corrupt(f"it nests more than {MAX_DEPTH} deep", self.at)
        if count > len(self.data) - self.at:  # an item is a byte at least
            _corrupt(f"{count} items are announced, {len(self.data) - self.at} bytes are left", self.at)
        return [self.value(depth + 1) for _ in range(count)]

    def extension(self, count: int, depth: int) -> Any:
        code = self.number("b")
        at = self.at
        payload = self.take(count)
        build = _BUILD.get(code)
        if build is None:
            _corrupt(f"extension type {code} is unknown", at)
        if code in (_INT, _COMPLEX):
            inner: Any = payload
        else:
            if count and (payload[0] in _FIXEXT or 0xC7 <= payload[0] <= 0xC9):
                _corrupt(f"extension type {code} holds an extension", at)
            reader = _Reader(payload)
            inner = reader.value(depth)
            if reader.at != len(payload):
                _corrupt(f"extension type {code} holds more than one value", at)
        try:
            return build(inner)
        except RecordCorrupt:
            raise
        except _NO_SUCH_VALUE as error:
            _corrupt(f"extension type {code} holds no such value ({error})", at, error)


_NO_SUCH_VALUE = (
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RuntimeError,
    Warning,  # a process may have made errors of them
)
_FIXED: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"} | {
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_SIZED = {
    0xC4: (">B", "bin"),
    0xC5: (">H", "bin"),
    0xC6: (">I", "bin"),
    0xC7: (">B", "ext"),
    0xC8: (">H", "ext"),
    0xC9: (">I", "ext"),
    0xD9: (">B", "str"),
    0xDA: (">H", "str"),
    0xDB: (">I", "str"),
    0xDC: (">H", "array"),
    0xDD: (">I", "array"),
}
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def _corrupt(what: str, at: int, cause: BaseException | None = None) -> NoReturn:
    raise RecordCorrupt(
        f"a packed value does not decode: {what} (at byte {at})\n"
        "  nothing was taken from it; another step may be intact",
        found=what,
        offset_bytes=at,
    ) from cause


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, {type(value).__name__} found")
    return value


def _build_int(payload: memoryview) -> int:
    value = int.from_bytes(payload, "little", signed=True)
    if -(1 << 63) <= value < 1 << 64:
        raise ValueError("a small integer in the long form")
    return value


def _build_complex(payload: memoryview) -> complex:
    if len(payload) != 16:
        raise ValueError(f"{len(payload)} bytes")
    return complex(*struct.unpack("<dd", payload))


def _build_dict(into: Any, flat: Any) -> Any:
    if len(_of(list, flat)) % 2:
        raise ValueError("a key without a value")
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        if key in into:
            raise ValueError(f"key {key!r:.60} twice")
        into[key] = value
    return into


def _build_set(kind: type, items: Any) -> Any:
    built = kind(_of(list, items))
    if len(built) != len(items):
        raise ValueError("a member twice")
    return built


def _build_deque(parts: Any) -> deque[Any]:
    longest, items = _of(list, parts)
    if longest is not None and len(_of(list, items)) > _of(int, longest):
        raise ValueError("more items than it may hold")
    return deque(_of(list, items), longest)


def _build_range(parts: Any) -> range:
    start, stop, step = (_of(int, part) for part in _of(list, parts))
    return range(start, stop, step)


def _build_slice(parts: Any) -> slice:
    start, stop, step = _of(list, parts)
    return slice(start, stop, step)


_PLAIN_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,10}(\[[0-9]{0,10}[A-Za-z]{1,7}\])?")
"""What NumPy is asked about at all: it takes text for dtypes that was never the name of one."""


def _build_np_dtype(name: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] | None = np.dtype(name) if _PLAIN_DTYPE.fullmatch(_of(str, name)) else None
    if dtype is None or dtype.str != name or dtype.char in "gG":
        raise ValueError(f"dtype {name!r:.60}")
    return dtype


def _build_np_scalar(parts: Any) -> Any:
    name, raw = _of(list, parts)
    if name == "<U":
        return np.str_(_of(bytes, raw).decode("utf-32-le", "surrogatepass"))
    if name == "|S":
        return np.bytes_(_of(bytes, raw))
    return _elements(name, [], raw)[()]


def _build_np_array(parts: Any) -> Any:
    name, shape, raw = _of(list, parts)
    return _elements(name, _of(list, shape), raw)


def _elements(name: Any, shape: list[Any], raw: Any) -> np.ndarray[Any, Any]:
    dtype = _build_np_dtype(name)
    if any(_of(int, n) < 0 for n in shape) or len(shape) > 64:
        raise ValueError(f"shape {shape!r:.60}")
    if len(_of(bytes, raw)) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for shape {shape!r:.60} of {dtype}")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype)
    if raw:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return array


def _build_torch_dtype(name: Any) -> Any:
    import torch

    dtype = vars(torch).get(_of(str, name))  # its __getattr__ would import things
    if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
        raise ValueError(f"dtype {name!r:.60}")
    return dtype


def _build_torch_size(items: Any) -> Any:
    import torch

    if any(not -(1 << 63) <= _of(int, n) < 1 << 63 for n in _of(list, items)):
        raise ValueError("an extent beyond 64 bits")
    return torch.Size(items)


def _build_torch_device(name: Any) -> Any:
    import torch

    return torch.device(_of(str, name))


_BUILD: dict[int, Callable[[Any], Any]] = {
    _INT: _build_int,
    _TUPLE: lambda items: tuple(_of(list, items)),
    _DICT: lambda flat: _build_dict({}, flat),
    _ORDERED: lambda flat: _build_dict(OrderedDict(), flat),
    _COUNTER: lambda flat: _build_dict(Counter(), flat),
    _SET: lambda items: _build_set(set, items),
    _FROZENSET: lambda items: _build_set(frozenset, items),
    _DEQUE: _build_deque,
    _COMPLEX: _build_complex,
    _RANGE: _build_range,
    _SLICE: _build_slice,
    _NP_DTYPE: _build_np_dtype,
    _NP_SCALAR: _build_np_scalar,
    _NP_ARRAY: _build_np_array,
    _TORCH_DTYPE: _build_torch_dtype,
    _TORCH_SIZE: _build_torch_size,
    _TORCH_DEVICE: _build_torch_device,
    _TENSOR: lambda name: TensorRef(_of(str, name)),
}
