"""Live memory that a snapshot reads while the trainer goes on: of the host, or of a CUDA device.

A source copies a byte range of one contiguous tensor into host memory that the caller owns, and has
returned only when those bytes are there. Whether the memory is still what it was is the snapshot's
business.

On a device a copy runs on a stream of its own, after everything that the trainer's stream had been
given when the source was made, and through a small pinned ring: never through a pinned copy of the
state, and never on the trainer's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ftckpt.capture import copy_bytes

Bytes = npt.NDArray[np.uint8]
PIECE_BYTES = 4 << 20
"""How much is hashed, or copied off a device, at a time."""


class Source(Protocol):
    """One contiguous tensor's memory. Called from several threads."""

    @property
    def size_bytes(self) -> int: ...

    def copy(self, start: int, stop: int, into: Bytes) -> None:
        """Put bytes ``start`` to ``stop`` at the beginning of ``into``. Blocks until they are there."""
        ...


def pieces(source: Source) -> Iterator[memoryview]:
    """All bytes of a source, a bounded part at a time; each is valid until the next is asked for."""
    into = np.empty(min(PIECE_BYTES, source.size_bytes), np.uint8)
    for start in range(0, source.size_bytes, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, source.size_bytes)
        source.copy(start, stop, into)
        yield into[: stop - start].data


class HostMemory(msgspec.Struct, frozen=True, gc=False):
    """A contiguous CPU tensor's bytes."""

    data: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return self.data.numel() * self.data.itemsize

    def copy(self, start: int, stop: int, into: Bytes) -> None:
        copy_bytes(self.data, start, stop, into)


class PinnedRing:
    """A few pinned host buffers and one side stream for one device. Whoever copies takes a buffer, or
    waits for one.
    """

    def __init__(self, device: torch.device, *, buffers: int = 4, buffer_bytes: int = PIECE_BYTES) -> None:
        self.buffer_bytes = buffer_bytes
        self.stream: Any = torch.cuda.Stream(device)
        self._free = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(buffers)]
        self._changed = threading.Condition()

    @contextmanager
    def buffer(self) -> Iterator[torch.Tensor]:
        """One of the buffers, for the caller alone."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            taken = self._free.pop()
        try:
            yield taken
        finally:
            with self._changed:
                self._free.append(taken)
                self._changed.notify()


class Rings:
    """The ring of each device, made when the first tensor of that device is seen."""

    def __init__(self, make: Callable[[torch.device], PinnedRing] = PinnedRing) -> None:
        self._make = make
        self._rings: dict[torch.device, PinnedRing] = {}

    def of(self, device: torch.device) -> PinnedRing:
        """The ring of a device."""
        if device not in self._rings:
            self._rings[device] = self._make(device)
        return self._rings[device]


class DeviceMemory:
    """A contiguous CUDA tensor's bytes, as they are once ``produced`` has happened: an event on the
    trainer's stream.
    """

    def __init__(self, data: torch.Tensor, ring: PinnedRing, produced: Any) -> None:
        self._bytes = data.detach().reshape(-1).view(torch.uint8)
        self._ring = ring
        self._produced = produced

    @property
    def size_bytes(self) -> int:
        return self._bytes.numel()

    def copy(self, start: int, stop: int, into: Bytes) -> None:
        ring = self._ring
        for begin in range(start, stop, ring.buffer_bytes):
            end = min(begin + ring.buffer_bytes, stop)
            with ring.buffer() as pinned, torch.cuda.stream(ring.stream):
                ring.stream.wait_event(self._produced)
                pinned[: end - begin].copy_(self._bytes[begin:end], non_blocking=True)
                ring.stream.record_event().synchronize()
                into[begin - start : end - start] = pinned[: end - begin].numpy()


class Sources:
    """The sources of one snapshot: what was given to each device's current stream before the first
    tensor of that device was seen is waited for.
    """

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._produced: dict[torch.device, Any] = {}

    def of(self, data: torch.Tensor) -> Source | None:
        """How a tensor's memory is read later; ``None`` where that cannot be done: it is not contiguous,
        or lies on a device of another kind.
        """
        if not data.is_contiguous():
            return None
        match data.device.type:
            case "cpu":
                return HostMemory(data)
            case "cuda":
                if data.device not in self._produced:
                    self._produced[data.device] = torch.cuda.current_stream(data.device).record_event()
                return DeviceMemory(data, self._rings.of(data.device), self._produced[data.device])
            case _:
                return None
