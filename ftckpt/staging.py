"""Staging that outlives the process: a pool of blocks in a file, and a snapshot that says what is where.

When a fence returns, every chunk of a ``Kept`` snapshot is either in a durable pack or raw in the
staging file, and a note in the tier says which is which. So a save whose process is killed in the
middle of the next optimizer step can be finished by whoever reads the note. The kernel keeps the
pages of a shared mapping when a process dies; a machine that dies takes them with it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ftckpt import layout
from ftckpt.clock import Clock
from ftckpt.errors import SaveFailed, StoreError, first_line
from ftckpt.events import Event, Events
from ftckpt.layout import Writer
from ftckpt.leaf import Holding
from ftckpt.manifest import (
    BoxRecord,
    ChunkRecord,
    LeafRecord,
    PackRef,
    Position,
    ReplicaDigest,
    StagedSpan,
    Staging,
    encode,
)
from ftckpt.plan.assign import ChunkTask
from ftckpt.snapshot import Bytes, Fence, Live, Seen, StagingPool
from ftckpt.store.api import Buffer, ObjectStore

BATCH_BYTES = 4 << 20
_FIRST_EXTENT_BYTES = 1 << 20
_LARGEST_EXTENT_BYTES = 64 << 20
_ALIGN_BYTES = 64


class StagingFile:
    """Host memory that is a file. Blocks are never given back to the file; the pool reuses them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._extents: list[tuple[int, Bytes]] = []
        self._size = 0
        self._used = 0

    def allocate(self, size: int) -> Bytes | None:
        """A new block of ``size`` bytes; ``None`` when the file system has no room for it."""
        with self._lock:
            full = not self._extents or self._used + size > self._extents[-1][1].size
            if full and not self._extend(size):
                return None
            memory = self._extents[-1][1]
            block = memory[self._used : self._used + size]
            self._used += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
            return block

    def offset_of(self, block: Bytes) -> int:
        """Where in the file a block begins."""
        address = _address(block)
        for offset, memory in self._extents:
            inside = address - _address(memory)
            if 0 <= inside < memory.size:
                return offset + inside
        raise AssertionError("a block of another file")

    def _extend(self, size: int) -> bool:
        least = min(max(self._size, _FIRST_EXTENT_BYTES), _LARGEST_EXTENT_BYTES)
        grain = mmap.ALLOCATIONGRANULARITY
        extent_bytes = -(-max(size, least) // grain) * grain
        try:  # without it a full file system would show as SIGBUS, in the middle of a copy
            os.posix_fallocate(self._fd, self._size, extent_bytes)
        except OSError:
            return False
        mapped = mmap.mmap(self._fd, extent_bytes, mmap.MAP_SHARED, offset=self._size)
        self._extents.append((self._size, np.frombuffer(mapped, np.uint8)))
        self._size += extent_bytes
        self._used = 0
        return True

    def close(self) -> None:
        """Remove the file. Its blocks stay usable, and nobody else finds them any more."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _address(block: Bytes) -> int:
    return int(block.__array_interface__["data"][0])


class Kept:
    """A live snapshot that can be finished without this process, from the first fence on.

    ``note`` is what whoever finishes it must know besides the chunks. The trainer's thread fences;
    ``written``, ``durable`` and ``close`` come from the threads of the save engine.
    """

    def __init__(
        self,
        inner: Live,
        note: Staging,
        near: ObjectStore,
        me: Writer,
        pool: StagingPool,
        file: StagingFile,
        clock: Clock,
        events: Events,
    ) -> None:
        self._inner = inner
        self._note = note
        self._near = near
        self._pool, self._file = pool, file
        self._clock = clock
        self._events = events
        self._at = Position(note.partial.step, note.partial.attempt)
        self._key = layout.staged_key(self._at, me)
        self._changed = threading.Condition()
        self._chunks: dict[int, ChunkRecord] = {}
        self._packs: dict[int, PackRef] = {}
        self._in_pack: dict[int, list[int]] = {}
        self._places: dict[int, tuple[int, bytes]] = {}
        self._extra: list[Bytes] = []
        self._named: frozenset[int] = frozenset()
        self._noted = self._closed = self._hopeless = False

    @property
    def holdings(self) -> Sequence[Holding]:
        return self._inner.holdings

    @property
    def tasks(self) -> Sequence[ChunkTask]:
        return self._inner.tasks

    def read(self, number: int) -> Buffer:
        return self._inner.read(number)

    def release(self, number: int) -> None:
        """Not yet: its memory may go when its pack is durable."""

    def seen(self, number: int) -> Seen | None:
        return self._inner.seen(number)

    def replicas(self) -> tuple[ReplicaDigest, ...]:
        return self._inner.replicas()

    def written(self, number: int, chunk: ChunkRecord) -> None:
        with self._changed:
            self._chunks[number] = chunk
            if chunk.pack in self._packs:
                self._let_go(number)
            else:
                self._in_pack.setdefault(chunk.pack, []).append(number)

    def durable(self, pack: int, ref: PackRef) -> None:
        with self._changed:
            self._packs[pack] = ref
            for number in self._in_pack.pop(pack, ()):
                self._let_go(number)
            self._changed.notify_all()

    def _let_go(self, number: int) -> None:
        if number not in self._named:
            self._inner.release(number)

    @property
    def is_live(self) -> bool:
        """Whether a fence has to do anything: copy what is live, or say what is where."""
        return not (self._noted or self._closed or self._hopeless or self._inner.given_up)

    reads_frozen = False
    """A fence keeps that as well: its memory goes with the process."""

    def fence(self, deadline_s: float, *, frozen_too: bool = True) -> Fence:
        """Stage what still lives in live memory, keep what is not durable, and leave the note. On return
        memory may change and the process may die, which needs ``frozen_too`` whatever it says.

        Beyond the pool's budget it waits like ``Live.fence``. If only the note cannot be made by the
        deadline, the save goes on without it, saying so.
        """
        begun_s = self._clock.now_s()
        done = self._inner.fence(deadline_s)
        kept_bytes = 0
        trouble = ""
        if not self._inner.given_up:
            try:
                kept_bytes = self._keep(begun_s + deadline_s)
                self._leave_note()
            except (SaveFailed, StoreError) as error:
                trouble = first_line(error)
        if trouble:
            self._hopeless = True
            told = {"step": self._at.step, "why": f"a kill of this process would lose the step: {trouble}"}
            self._events(Event("save.warning", {"what": "staging", **told}))
        return Fence(done.staged_bytes + kept_bytes, self._clock.now_s() - begun_s)

    def _keep(self, end_s: float) -> int:
        """Find or make a place in the file for every chunk that is in no durable pack."""
        copied_bytes = number = 0
        while True:
            with self._changed:
                batch, after = self._batch(number)
                need_bytes = sum(self._size(one) for one in batch)
                block = self._pool.take(need_bytes) if batch else None
                if block is not None:
                    self._extra.append(block)
                    self._fill(block, batch)
                    copied_bytes += need_bytes
                if block is not None or not batch:
                    number = after
                    if self._closed or number == len(self.tasks):
                        return copied_bytes
                    continue
                left_s = end_s - self._clock.now_s()
                if left_s <= 0:
                    raise SaveFailed(
                        f"SaveFailed: {need_bytes} more bytes must be staged than staging_bytes, or the tier, allows"
                    )
                self._changed.wait(min(left_s, 0.05))

    def _batch(self, first: int) -> tuple[list[int], int]:
        """From task ``first`` on, some chunks that have no place yet, and the task after them. Those that a
        fence staged have one where they are.
        """
        batch: list[int] = []
        seen_bytes, number = 0, first
        while number < len(self.tasks) and seen_bytes < BATCH_BYTES:
            if self._size(number) and number not in self._places and not self._is_durable(number):
                held = self._inner.held(number)
                if isinstance(held, np.ndarray):
                    digest = xxhash.xxh3_128_digest(held[: self._size(number)].data)
                    self._places[number] = (self._file.offset_of(held), digest)
                else:
                    batch.append(number)
                seen_bytes += self._size(number)
            number += 1
        return batch, number

    def _fill(self, block: Bytes, batch: Sequence[int]) -> None:
        start, first = 0, self._file.offset_of(block)
        for number in batch:
            part = block[start : start + self._size(number)]
            held = self._inner.held(number)
            if held is None:
                self._inner.copy(number, part)
            else:
                np.copyto(part, np.frombuffer(held, np.uint8))
            self._places[number] = (first + start, xxhash.xxh3_128_digest(part.data))
            start += part.size

    def _size(self, number: int) -> int:
        task = self.tasks[number]
        return (task.stop - task.start) * self.holdings[task.holding].leaf.itemsize_bytes

    def _is_durable(self, number: int) -> bool:
        chunk = self._chunks.get(number)
        return chunk is not None and chunk.pack in self._packs

    def _leave_note(self) -> None:
        with self._changed:
            if self._closed:
                return
            note = self._filled_note()
            self._near.create(self._key, encode(note))
            self._noted = True

    def _filled_note(self) -> Staging:
        """The note as things stand; from now on nothing moves that it names."""
        packs: list[PackRef] = []
        numbers: dict[int, int] = {}

        def moved(chunk: ChunkRecord) -> ChunkRecord:
            if chunk.pack not in numbers:
                numbers[chunk.pack] = len(packs)
                packs.append(self._packs[chunk.pack])
            base = moved(chunk.base) if chunk.base is not None else None
            return msgspec.structs.replace(chunk, pack=numbers[chunk.pack], base=base)

        tasks: dict[int, list[int]] = {}
        for number, task in enumerate(self.tasks):
            tasks.setdefault(task.holding, []).append(number)
        leaves: list[LeafRecord] = []
        spans: list[StagedSpan] = []
        named: set[int] = set()
        for holding in sorted(tasks, key=lambda h: self.holdings[h].leaf.name):
            chunks = []
            for number in tasks[holding]:
                task = self.tasks[number]
                if self._is_durable(number):
                    chunks.append(moved(self._chunks[number]))
                elif task.start < task.stop:
                    at, raw = self._places[number]
                    spans.append(StagedSpan(len(leaves), task.start, task.stop, at, raw))
                    named.add(number)
            leaf, box = self.holdings[holding].leaf, self.holdings[holding].box
            record = BoxRecord(box.offset, box.extent, tuple(chunks))
            leaves.append(LeafRecord(leaf.name, leaf.kind, leaf.dtype, leaf.shape, leaf.owner, (record,)))
        self._named = frozenset(named)
        partial = msgspec.structs.replace(
            self._note.partial, packs=tuple(packs), leaves=tuple(leaves), replicas=self._inner.digests
        )
        return msgspec.structs.replace(self._note, partial=partial, spans=tuple(spans))

    def close(self) -> None:
        """The save has ended: the note goes before anything it names."""
        with self._changed:
            self._closed = True
            if self._noted:
                with suppress(StoreError):  # what it names then changes, and no digest matches any more
                    self._near.delete([self._key])
            self._inner.close()
            blocks, self._extra = self._extra, []
            self._changed.notify_all()
        for block in blocks:
            self._pool.put(block)
