"""Files of other tools: any size, written part by part, read in parts, and proven once written.

A run's objects are created once, whole, and never again. What other tools keep is larger than memory and is
overwritten when somebody asks for it. A file appears under its name whole or not at all; before
``writing`` returns it was read back, and is byte for byte what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import xxhash

from ftckpt.errors import ObjectDamaged, ObjectNotFound, StoreError
from ftckpt.store.api import Buffer, ByteRange, ObjectStore, Stream
from ftckpt.store.keys import view

SMALL_BYTES = 256 << 10
"""Up to here writes are gathered: some libraries write a few bytes at a time."""

WINDOW_BYTES = 8 << 20
"""What is read back at a time."""


class Out:
    """A file that is being written: what torch and others take for one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._small = bytearray()

    def write(self, data: Buffer) -> int:
        flat = view(data)
        self._digest.update(flat)
        self._size += len(flat)
        if len(flat) < SMALL_BYTES:
            self._small += flat
        if len(flat) >= SMALL_BYTES or len(self._small) >= SMALL_BYTES:
            self.pass_on()
        if len(flat) >= SMALL_BYTES:
            self._stream.write(flat)
        return len(flat)

    def pass_on(self) -> None:
        """Hand over what was too little to bother the store with."""
        if self._small:
            self._stream.write(bytes(self._small))
            self._small.clear()

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing is durable before all of it is."""

    def close(self) -> None:
        """Whoever opened it closes it."""

    @property
    def digest(self) -> bytes:
        return self._digest.digest()


class Files:
    """All files at an address. ``store`` reads them."""

    def __init__(self, store: ObjectStore, stream: Callable[[str], Stream]) -> None:
        self.store = store
        self._stream = stream

    @property
    def uri(self) -> str:
        """The address, without credentials."""
        return self.store.uri

    def sizes(self) -> dict[str, int]:
        """Every file that is there, with its bytes."""
        return {info.key: info.size_bytes for info in self.store.scan("")}

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of a file; raises ``StoreError`` if it has fewer."""
        return view(self.store.read(name, ByteRange(start, stop))) if stop > start else memoryview(b"")

    def text(self, name: str, limit_bytes: int) -> bytes:
        """All of a small file. Raises ``ObjectDamaged`` if it is larger than any of its kind."""
        size_bytes = self.store.size(name)
        if size_bytes > limit_bytes:
            raise ObjectDamaged(
                f"ObjectDamaged: {name} in {self.uri} has {size_bytes} bytes; no file of its kind has more "
                f"than {limit_bytes}\n  nothing was changed",
                key=name,
            )
        return bytes(self.read(name, 0, size_bytes))

    def maybe(self, name: str, limit_bytes: int) -> bytes | None:
        """All of a small file, or ``None`` where there is none."""
        try:
            return self.text(name, limit_bytes)
        except ObjectNotFound:
            return None

    def delete(self, names: list[str]) -> None:
        """Remove files; absent ones are fine."""
        self.store.delete(names)

    @contextmanager
    def writing(self, name: str) -> Iterator[Out]:
        """A file to write. On leaving it is there, durable and proven; on an error it never was.

        Raises:
            ObjectDamaged: the store holds other bytes than it was given. They were removed.
        """
        stream = self._stream(name)
        out = Out(stream)
        try:
            yield out
            out.pass_on()
        except BaseException:
            with suppress(StoreError):  # what brought us here says more
                stream.abort()
            raise
        stream.close()
        self._prove(name, out)

    def put(self, name: str, body: Buffer) -> None:
        """A small file, as ``writing``."""
        with self.writing(name) as out:
            out.write(body)

    def copy(self, source: Files, name: str, size_bytes: int) -> None:
        """A file of that many bytes from another place, a part at a time."""
        with self.writing(name) as out:
            for start in range(0, size_bytes, WINDOW_BYTES):
                out.write(source.read(name, start, min(start + WINDOW_BYTES, size_bytes)))

    def _prove(self, name: str, out: Out) -> None:
        size_bytes, digest = self.store.size(name), xxhash.xxh3_128()
        if size_bytes == out.tell():
            for start in range(0, size_bytes, WINDOW_BYTES):
                digest.update(self.read(name, start, min(start + WINDOW_BYTES, size_bytes)))
        if size_bytes != out.tell() or digest.digest() != out.digest:
            self.delete([name])
            raise ObjectDamaged(
                f"ObjectDamaged: {self.uri} does not hold {name} as it was written\n"
                f"  written: {out.tell()} bytes, xxh3-128 {out.digest.hex()}; read back: {size_bytes} bytes, "
                f"{digest.hexdigest()}\n  it was removed again; nothing takes what is there for whole",
                key=name,
            )

    def close(self) -> None:
        """Release sockets and threads."""
        self.store.close()
