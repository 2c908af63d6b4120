"""The snapshot of a save: the bytes of this rank's chunks, as they were when ``save`` was called.

Whoever streams asks a ``Snapshot`` for one chunk at a time and does not care when it was copied.
``Staged`` copied everything before ``save`` returned. ``Live`` copied only what can change at any
moment; the rest is read from live memory while the trainer goes on, until a *fence*, called before
anything mutates it, stages what has not been read yet, and only that.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from ftckpt.births import let_go
from ftckpt.capture import LiveLeaf, as_bytes_view
from ftckpt.clock import Clock
from ftckpt.colocation import HostBudget, Unshared
from ftckpt.errors import SaveFailed, first_line
from ftckpt.leaf import Holding
from ftckpt.manifest import ChunkRecord, PackRef, ReplicaDigest
from ftckpt.plan.assign import ChunkTask
from ftckpt.sources import Rings, Source, Sources, pieces
from ftckpt.store.api import Buffer

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Seen:
    """The memory of a frozen leaf when it was registered. While it is equal, what it held is there still, as
    far as memory tells and nothing was said to change it: then there is another ``era``. Keeps nothing alive;
    a storage that is gone is equal to no later one.
    """

    era: int
    storage: StorageWeakRef
    start: int
    size_bytes: int
    address: int
    version: int


class Snapshot(Protocol):
    """Bytes of chunks that nothing can change any more."""

    @property
    def holdings(self) -> Sequence[Holding]:
        """What the task's ``holding`` numbers mean."""
        ...

    @property
    def tasks(self) -> Sequence[ChunkTask]:
        """The chunks of this rank, in leaf order."""
        ...

    def read(self, number: int) -> Buffer:
        """The raw bytes of task ``number``, which is asked for once. Empty tasks give no bytes.

        Raises:
            SaveFailed: the snapshot was given up, or its memory went away under it.
        """
        ...

    def release(self, number: int) -> None:
        """Task ``number`` is not read again, or never; its memory may go."""
        ...

    def seen(self, number: int) -> Seen | None:
        """What tells whether a later save need not read this chunk again; ``None``: it must be read."""
        ...

    def written(self, number: int, chunk: ChunkRecord) -> None:
        """Task ``number`` became this chunk; its pack may still be on its way."""
        ...

    def durable(self, pack: int, ref: PackRef) -> None:
        """The pack that chunks call number ``pack`` is durable."""
        ...

    def replicas(self) -> tuple[ReplicaDigest, ...]:
        """Digests of what other ranks hold too, as far as they could still be taken."""
        ...

    def close(self) -> None:
        """The save has ended: live memory is not looked at any more."""
        ...


def host_bytes(data: torch.Tensor | bytes) -> memoryview:
    """The raw bytes of a local part, row-major; aliases live memory when it is contiguous on the host."""
    if isinstance(data, bytes):
        return memoryview(data)
    return as_bytes_view(data.cpu().contiguous())


# --- the pool ------------------------------------------------------------------------------------


def _memory(size: int) -> Bytes | None:
    return np.empty(size, np.uint8)


_SMALLEST_BLOCK_BYTES = 64 << 10


class StagingPool:
    """Host memory for staged chunks: kept and reused, so that its pages have been touched.

    ``budget_bytes`` bounds what is handed out at a time; ``None`` does not. ``touch`` makes the
    budget's pages ready beforehand, which halves the time of a first fence. ``allocate`` makes a new
    block, or says that there is no room for one. ``shared`` is asked for every block, and holds those
    too that are kept for reuse; while ``lean`` is set none are. With ``keeps`` memory cannot be let go
    of before ``close``, so blocks are always kept.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        allocate: Callable[[int], Bytes | None] = _memory,
        shared: HostBudget | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._keeps = keeps
        self.budget_bytes = budget_bytes
        self.lean = False
        self._allocate = allocate
        self._shared = shared or Unshared()
        self._free: dict[int, list[Bytes]] = {}
        self._sizes: list[int] = []
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What is handed out now."""
        return self._used_bytes

    def touch(self, block_bytes: int) -> None:
        """Fill the pool with touched blocks, up to the budget. Takes about 0.2 s a GiB."""
        for _ in range((self.budget_bytes or 0) // block_bytes):
            with self._lock:
                block = self._new(block_bytes)
            if block is None:
                return
            block.fill(0)
            self._give(block)

    def take(self, size: int) -> Bytes | None:
        """A block of at least ``size`` bytes, or ``None`` when the budget, or the room, is used up.

        Raises ``SaveFailed`` when the shared budget raises, as ``put``, ``clear`` and ``touch`` do too.
        """
        with self._lock:
            if self.budget_bytes is not None and self._used_bytes + size > self.budget_bytes:
                return None
            block = self._find(size, 2 * max(size, _SMALLEST_BLOCK_BYTES))
            if block is None:
                block = self._new(size)
            if block is None:
                block = self._find(size, None)
            if block is None and self._free:
                self._drop_free()  # none of them is large enough
                block = self._new(size)
            self._used_bytes += 0 if block is None else block.size
            return block

    def _find(self, size: int, most: int | None) -> Bytes | None:
        """The smallest free block of at least ``size`` bytes, and at most ``most``."""
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes) or (most is not None and self._sizes[at] > most):
            return None
        blocks = self._free[self._sizes[at]]
        block = blocks.pop()
        if not blocks:
            del self._free[self._sizes.pop(at)]
        return block

    def put(self, block: Bytes) -> None:
        """Give a block back."""
        with self._lock:
            self._used_bytes -= block.size
        self._give(block)

    def _give(self, block: Bytes) -> None:
        with self._lock:
            if block.size not in self._free:
                insort(self._sizes, block.size)
            self._free.setdefault(block.size, []).append(block)
            if self.lean:
                self._drop_free()

    def clear(self) -> int:
        """Let go of all blocks that are not handed out; how many bytes those were."""
        with self._lock:
            return self._drop_free()

    def close(self) -> None:
        """The last of its blocks was put back."""
        self._keeps = False
        self.clear()

    def _new(self, size: int) -> Bytes | None:
        if not self._reserve(size):
            return None
        block = self._allocate(size)
        got_bytes = size if block is None else block.size
        if block is not None and (got_bytes == size or self._reserve(got_bytes - size)):
            return block
        self._return(size)
        return None

    def _reserve(self, size: int) -> bool:
        try:
            return self._shared.take(size)
        except Exception as error:
            raise _budget_failed(f"take({size})", error) from error

    def _return(self, size: int) -> None:
        try:
            self._shared.give(size)
        except Exception as error:
            raise _budget_failed(f"give({size})", error) from error

    def _drop_free(self) -> int:
        if self._keeps:
            return 0
        freed_bytes = sum(size * len(blocks) for size, blocks in self._free.items())
        self._free.clear()
        self._sizes.clear()
        self._return(freed_bytes)
        return freed_bytes


def _budget_failed(call: str, error: Exception) -> SaveFailed:
    return SaveFailed(
        f"SaveFailed: the budget that staging memory is taken from raised {type(error).__name__} "
        f"in {call}: {first_line(error)}\n"
        "  nothing of this step will be readable; earlier commits are intact and training goes on\n"
        "  mend the object that was given as budget=",
        error=type(error).__name__,
    )


# --- staged --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Staged:
    """Every chunk copied before the trainer went on."""

    holdings: tuple[Holding, ...]
    tasks: tuple[ChunkTask, ...]
    chunks: list[Buffer]
    digests: tuple[ReplicaDigest, ...] = ()

    def read(self, number: int) -> Buffer:
        return self.chunks[number]

    def release(self, number: int) -> None:
        self.chunks[number] = b""

    def seen(self, number: int) -> None:
        """Everything was copied already."""

    def written(self, number: int, chunk: ChunkRecord) -> None:
        """Of no interest: nobody finishes what this process does not."""

    def durable(self, pack: int, ref: PackRef) -> None:
        """Of no interest."""

    def replicas(self) -> tuple[ReplicaDigest, ...]:
        return self.digests

    def close(self) -> None:
        self.chunks.clear()


def stage(
    leaves: Sequence[LiveLeaf],
    tasks: Sequence[ChunkTask],
    budget_bytes: int | None = None,
    *,
    holders: int = 0,
) -> Staged:
    """Copy this rank's chunks into host memory. Blocks for as long as the copy takes.

    ``holders`` is the number of participating groups, if replicas are to be compared.

    Raises:
        SaveFailed: the copies need more than ``budget_bytes``. Nothing was copied.
    """
    holdings = tuple(leaf.holding for leaf in leaves)
    need_bytes = sum(_size_bytes(holdings, task) for task in tasks)
    if budget_bytes is not None and need_bytes > budget_bytes:
        raise _over_budget(need_bytes, budget_bytes)
    chunks: list[Buffer] = []
    last, view = -1, memoryview(b"")
    for task in tasks:
        if task.holding != last:
            last, view = task.holding, host_bytes(leaves[task.holding].data)
        part = _part(view, holdings, task)
        chunks.append(np.frombuffer(part, np.uint8).copy().data if len(part) else b"")
    digests = [_replica(leaf, [host_bytes(leaf.data)]) for leaf in leaves if _shared(leaf, holders)]
    return Staged(holdings, tuple(tasks), chunks, tuple(digests))


def _over_budget(need_bytes: int, budget_bytes: int | None) -> SaveFailed:
    limit = (
        "no more host memory may be used"
        if budget_bytes is None
        else f"the staging budget is {budget_bytes} bytes"
    )
    return SaveFailed(
        f"SaveFailed: {need_bytes} bytes must be staged; {limit}\n"
        "  training goes on and earlier commits are intact; raise staging_bytes, or save on more ranks",
        need_bytes=need_bytes,
        budget_bytes=budget_bytes,
    )


def _size_bytes(holdings: Sequence[Holding], task: ChunkTask) -> int:
    return (task.stop - task.start) * holdings[task.holding].leaf.itemsize_bytes


def _part(view: memoryview, holdings: Sequence[Holding], task: ChunkTask) -> memoryview:
    itemsize = holdings[task.holding].leaf.itemsize_bytes
    return view[task.start * itemsize : task.stop * itemsize]


def _view(block: Bytes | Buffer) -> memoryview:
    return block.data if isinstance(block, np.ndarray) else memoryview(block)


def _shared(leaf: LiveLeaf, holders: int) -> bool:
    """Whether others hold this very part. An empty part is nobody's to compare."""
    return (
        leaf.holding.box.numel > 0
        and holders > 0
        and len(leaf.holding.ranks) * (holders if leaf.holding.every_group else 1) > 1
    )


def _replica(leaf: LiveLeaf, parts: Iterable[Buffer]) -> ReplicaDigest:
    spec, box = leaf.holding.leaf, leaf.holding.box
    digest = xxhash.xxh3_128(f"{spec.kind} {spec.dtype} {spec.shape} {box.extent}".encode())
    for part in parts:
        digest.update(part)
    return ReplicaDigest(spec.name, box.offset, digest.digest())


# --- live ----------------------------------------------------------------------------------------


class _State(Enum):
    LIVE = "live"
    FROZEN = "in live memory that nothing changes"
    READING = "being copied from live memory"
    STAGED = "staged"
    DONE = "read"


@dataclass(frozen=True, slots=True)
class Fence:
    """What one fence did: bytes staged, seconds until the mutation could go on."""

    staged_bytes: int
    seconds: float


class _Memory(msgspec.Struct, frozen=True, gc=False):
    """Where a live leaf's bytes were when it was registered."""

    data: torch.Tensor
    storage: torch.UntypedStorage
    size_bytes: int
    address: int
    version: int

    def trouble(self) -> str:
        """What happened to it since; empty: nothing that shows. (Fused optimizers write without
        raising the version: those are what fences are for.)
        """
        now_bytes = self.storage.nbytes()
        if now_bytes != self.size_bytes:
            return f"was resized from {self.size_bytes} to {now_bytes} bytes"
        if self.storage.data_ptr() != self.address:
            return "was moved to other memory"
        if self.data._version != self.version:  # noqa: SLF001
            return "was written without an optimizer step or load_state_dict"
        return ""


class Live:
    """Streams from live memory until a fence. ``read`` may be called from several threads, ``fence``
    from any; a fence never waits for the store unless the pool's budget is used up.
    """

    def __init__(
        self,
        leaves: Sequence[LiveLeaf],
        tasks: Sequence[ChunkTask],
        pool: StagingPool,
        clock: Clock,
        *,
        holders: int = 0,
        verify: bool = False,
        rings: Rings | None = None,
        era: int = 0,
    ) -> None:
        self._era = era
        self.holdings = tuple(leaf.holding for leaf in leaves)
        self.tasks = tuple(tasks)
        self._leaves = leaves
        self._pool = pool
        self._clock = clock
        self._changed = threading.Condition()
        self._given_up = ""
        self._fenced = False
        self._new_sources = Sources(rings or Rings())
        self._sources: dict[int, Source] = {}
        self._memory: dict[int, _Memory] = {}
        self._state: list[_State] = []
        self._chunks: dict[int, Bytes | Buffer] = {}
        copied: tuple[int, memoryview] = (-1, memoryview(b""))
        self._trained = _trained(leaves)
        for number, task in enumerate(self.tasks):
            if self._streams(task.holding):
                self._state.append(_State.FROZEN if self._is_frozen(task.holding) else _State.LIVE)
                continue
            if copied[0] != task.holding:
                copied = (task.holding, host_bytes(leaves[task.holding].data))
            part = _part(copied[1], self.holdings, task)
            self._chunks[number] = np.frombuffer(part, np.uint8).copy().data if len(part) else b""
            self._state.append(_State.STAGED)
        self._shared = [n for n, leaf in enumerate(leaves) if _shared(leaf, holders)]
        self._digests = {
            n: _replica(leaves[n], [host_bytes(leaves[n].data)]) for n in self._shared if not self._streams(n)
        }
        self._first = (
            {n: xxhash.xxh3_128_digest(self._copy(n).data) for n, s in enumerate(self._state) if s in _UNREAD}
            if verify
            else {}
        )

    def _streams(self, holding: int) -> bool:
        """Whether a leaf can be read later: an optimizer owns it or it is frozen, and its memory has a
        ``Source``. Remembers where its memory is.
        """
        if holding in self._sources:
            return True
        leaf = self._leaves[holding]
        data = leaf.data
        if not (leaf.lazy or leaf.holding.frozen) or isinstance(data, bytes):
            return False
        source = self._new_sources.of(data)
        if source is None:
            return False
        storage = data.untyped_storage()
        self._sources[holding] = source
        self._memory[holding] = _Memory(data, storage, storage.nbytes(), storage.data_ptr(), data._version)  # noqa: SLF001
        return True

    def _is_frozen(self, holding: int) -> bool:
        """Whether a leaf is read later and nothing changes it meanwhile: not if an optimizer owns its memory."""
        found = self._memory.get(holding) if self.holdings[holding].frozen else None
        return found is not None and found.address not in self._trained

    def _copy(self, number: int, into: Bytes | None = None) -> Bytes:
        """Live bytes of a task, if its memory was what it had been both before and after the copy."""
        task = self.tasks[number]
        itemsize = self.holdings[task.holding].leaf.itemsize_bytes
        size = (task.stop - task.start) * itemsize
        into = np.empty(size, np.uint8) if into is None else into[:size]
        self._check_memory(task)
        self._sources[task.holding].copy(task.start * itemsize, task.stop * itemsize, into)
        self._check_memory(task)
        return into

    def _check_memory(self, task: ChunkTask) -> None:
        trouble = self._memory[task.holding].trouble()
        if trouble:
            name = self.holdings[task.holding].leaf.name
            raise SaveFailed(
                f"SaveFailed: the memory of {name} {trouble} while it was being saved\n"
                "  nothing of this step will be readable; earlier commits are intact\n"
                "  put whatever writes, moves or offloads it into `with session.mutating():`",
                leaf=name,
            )

    def read(self, number: int) -> Buffer:
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._state[number] is not _State.READING)
            if self._given_up:
                raise SaveFailed(self._given_up, stage="fence")
            if self._state[number] is _State.STAGED:
                self._state[number] = _State.DONE
                return _view(self._chunks[number])[: _size_bytes(self.holdings, self.tasks[number])]
            assert self._state[number] in _UNREAD, (number, self._state[number])
            self._state[number] = _State.READING
        try:
            copy = self._copy(number)
        finally:
            with self._changed:
                self._state[number] = _State.DONE
                self._changed.notify_all()
        if self._first and xxhash.xxh3_128_digest(copy.data) != self._first[number]:
            name = self.holdings[self.tasks[number].holding].leaf.name
            raise SaveFailed(
                f"SaveFailed: {name} changed between save() and the moment its bytes were read\n"
                "  nothing of this step will be readable; something wrote it without an optimizer step, "
                "load_state_dict or session.mutating()",
                leaf=name,
            )
        return copy.data

    def seen(self, number: int) -> Seen | None:
        holding = self.tasks[number].holding
        if self._first or not self._is_frozen(holding):  # who verifies trusts no memory
            return None
        found = self._memory[holding]
        storage, start = StorageWeakRef(found.storage), found.data.data_ptr()
        return Seen(self._era, storage, start, found.size_bytes, found.address, found.version)

    def release(self, number: int) -> None:
        with self._changed:
            if self._state[number] in _UNREAD:
                self._state[number] = _State.DONE
            block = self._chunks.pop(number, None)
            self._changed.notify_all()
        if isinstance(block, np.ndarray):
            self._pool.put(block)

    def written(self, number: int, chunk: ChunkRecord) -> None:
        """Of no interest: nobody finishes what this process does not."""

    def durable(self, pack: int, ref: PackRef) -> None:
        """Of no interest."""

    def held(self, number: int) -> Bytes | Buffer | None:
        """The copy of a task, a block of the pool if a fence made it, until it is released; ``None``: there
        is none, its bytes are in live memory or went away with it.
        """
        with self._changed:
            return self._chunks.get(number)

    def copy(self, number: int, into: Bytes) -> None:
        """Live bytes of a task, read or not; on the thread that may change them, before it does.

        Raises ``SaveFailed`` when that memory is not what it was.
        """
        self._copy(number, into)

    @property
    def digests(self) -> tuple[ReplicaDigest, ...]:
        """Replicas as far as they have been hashed."""
        return tuple(self._digests[number] for number in self._shared if number in self._digests)

    def replicas(self) -> tuple[ReplicaDigest, ...]:
        """Hashes live replicas until a fence; what has not been hashed by then is not compared."""
        for number in self._shared:
            if number in self._digests:
                continue
            with self._changed:
                if self._fenced or self._given_up:
                    break
                self._state.append(_State.READING)
            try:
                self._digests[number] = _replica(self._leaves[number], pieces(self._sources[number]))
            finally:
                with self._changed:
                    self._state.pop()
                    self._changed.notify_all()
        return self.digests

    def fence(self, deadline_s: float, *, frozen_too: bool = True) -> Fence:
        """Stage every chunk that still lives in live memory. On return that memory may change, that of
        frozen leaves only ``frozen_too``.

        Beyond the pool's budget it waits for the store to take chunks off, up to ``deadline_s``;
        then it gives the snapshot up, so that training can go on.
        """
        begun_s = self._clock.now_s()
        with self._changed:
            self._fenced = True
            unread = _UNREAD if frozen_too else (_State.LIVE,)
            todo = [n for n, state in enumerate(self._state) if state in unread and n < len(self.tasks)]
        staged_bytes = 0
        for number in todo:
            staged_bytes += self._stage_one(number, begun_s + deadline_s)
        with self._changed:
            self._changed.wait_for(lambda: _State.READING not in self._state)
        return Fence(staged_bytes, self._clock.now_s() - begun_s)

    def _stage_one(self, number: int, end_s: float) -> int:
        size = _size_bytes(self.holdings, self.tasks[number])
        block: Bytes | None = None
        while True:
            with self._changed:
                if self._state[number] not in _UNREAD or self._given_up:
                    break
                try:
                    block = self._pool.take(size)
                except MemoryError:
                    self._give_up(f"SaveFailed: there are no {size} bytes of memory for staging")
                    break
                except SaveFailed as error:
                    self._give_up(error.message)
                    break
                if block is not None:
                    self._state[number] = _State.READING
                    break
                left_s = end_s - self._clock.now_s()
                if left_s <= 0:
                    self._give_up(_over_budget(size, self._pool.budget_bytes).message)
                    break
                self._changed.wait(min(left_s, 0.05))
        if block is None:
            return 0
        trouble = ""
        try:
            self._copy(number, block)
        except Exception as error:  # the save ends with it, and training goes on
            trouble = str(error) or type(error).__name__
        with self._changed:
            if trouble:
                self._give_up(trouble)
            self._chunks[number] = block
            self._state[number] = _State.STAGED
            self._changed.notify_all()
        return size

    def _give_up(self, why: str) -> None:
        """With the lock held: nobody reads any more, and nothing waits."""
        self._given_up = self._given_up or why
        self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._given_up = self._given_up or "SaveFailed: the save has ended"
            blocks = [b for b in self._chunks.values() if isinstance(b, np.ndarray)]
            self._chunks.clear()
            self._changed.wait_for(lambda: _State.READING not in self._state)
            sources, self._sources = self._sources, {}
            memory, self._memory = self._memory, {}
            self._changed.notify_all()
        let_go(sources)
        let_go(memory)
        for block in blocks:
            self._pool.put(block)

    @property
    def given_up(self) -> bool:
        """Whether its chunks are not to be had any more."""
        return bool(self._given_up)

    @property
    def is_live(self) -> bool:
        """Whether anything is still to be read from live memory that an optimizer changes."""
        with self._changed:
            return not self._given_up and _State.LIVE in self._state

    @property
    def reads_frozen(self) -> bool:
        """Whether anything is still to be read from frozen leaves."""
        with self._changed:
            return not self._given_up and _State.FROZEN in self._state


_UNREAD = (_State.LIVE, _State.FROZEN)


def _trained(leaves: Sequence[LiveLeaf]) -> frozenset[int]:
    """Where the memory is that optimizers change. What is called frozen and lies there is not."""
    return frozenset(
        leaf.data.untyped_storage().data_ptr()
        for leaf in leaves
        if leaf.lazy and isinstance(leaf.data, torch.Tensor)
    )
