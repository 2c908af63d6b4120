"""Plain values as JSON, bit for bit, alike for Python's and torch's own and for those of the independent
reader, so that both can be compared with what ``expected.json`` says.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

_DICTS = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


def describe(value: Any) -> Any:
    """What it is, with its types, in terms of JSON."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is list:
        return [describe(item) for item in value]
    if kind is tuple:
        return {"tuple": [describe(item) for item in value]}
    if kind in _DICTS:
        return {_DICTS[kind]: [[describe(k), describe(v)] for k, v in value.items()]}
    if kind in (set, frozenset):
        return {kind.__name__: sorted((describe(item) for item in value), key=canonical)}
    if kind is deque:
        return {"deque": [value.maxlen, [describe(item) for item in value]]}
    if kind in (range, slice):
        return {kind.__name__: [describe(part) for part in (value.start, value.stop, value.step)]}
    return _describe_array(value, f"{kind.__module__}.{kind.__name__}")


def _describe_array(value: Any, kind: str) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    if isinstance(value, np.generic):
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, np.dtype):
        return {"numpy.dtype": value.str}
    if kind == "torch.dtype":
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if kind == "torch.device":
        return {"torch.device": str(value)}
    name = kind.rpartition(".")[2]
    if name in ("TorchDtype", "TorchDevice", "TensorRef"):
        return {{"TorchDtype": "torch.dtype", "TorchDevice": "torch.device"}.get(name, "tensor"): value.name}
    if name in ("Size", "TorchSize"):
        return {"torch.Size": list(value.extents if name == "TorchSize" else value)}
    raise AssertionError(kind)


def canonical(description: Any) -> str:
    return json.dumps(description, sort_keys=True)


def in_one_line(dtype: str, shape: Sequence[int], raw: bytes) -> str:
    """A tensor: element type, shape and a digest of its bytes."""
    return f"{dtype} {list(shape)} {sha256(raw)[:32]}"


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()
