"""The durable schema, format 1: every record that ftckpt writes, and how its bytes are sealed.

Small records are JSON, fragments and stagings are msgpack; both are msgspec structs, so decoding validates.
Unknown fields are ignored; a change of meaning is a new major format. Every record ends with a line
that holds the digest of all bytes before it, so a record proves its own bytes.

Digests are xxh3-128 (32 hex digits in JSON, 16 bytes in msgpack): they find damage, not malice.
Spans and boxes count elements; sizes and offsets in packs count bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import add, gt
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import xxhash

from ftckpt.births import let_go
from ftckpt.boxes import Box
from ftckpt.codec import CODECS, DELTA, MAX_CHAIN
from ftckpt.errors import RecordCorrupt, UnknownFormat
from ftckpt.leaf import ITEMSIZE_BYTES, Kind, LeafSpec

FORMAT = 1
SCALE = 1 << 32
"""Fractions of a leaf's first dimension are stored as integers of this many parts."""

ANY, WHOLE, CUT, OWN = range(4)
"""Sorts of leaves, for ``LeafRange.of``: whatever it be; one that every holder has all of; one of which some
fragment holds a part; one rank's own.
"""

MAX_STEP = 10**12 - 1
MAX_ATTEMPT = 10**6 - 1
MAX_RECORD_BYTES = 1 << 30
MAX_CHUNK_BYTES = 1 << 30
MAX_LEAF_BYTES = (1 << 63) - 1
MAX_VALUE_BYTES = (1 << 32) + 5
"""Of a packed value; no more can be packed."""

MAX_NDIM = 64
_MARK = b"\nxxh3-128:"
_TRAILER_BYTES = len(_MARK) + 32 + 1

Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
Attempt = Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPT)]
Guarantee = Literal["E1", "E2", "E3", "E4"]
Sort = Annotated[int, msgspec.Meta(ge=0, le=3)]
PinKind = Literal["start", "tip", "agent", "reader"]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A step of an attempt: what one save fills. Ordered by step, then attempt."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step {self.step} of attempt {self.attempt}"


class Ref(msgspec.Struct, frozen=True):
    """A commit, and the digest of its record."""

    step: Step
    attempt: Attempt
    digest: str

    @property
    def at(self) -> Position:
        return Position(self.step, self.attempt)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: this prefix holds a run, in this format. Written once."""

    format: int
    run: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """``attempts/<n>``: someone means to begin attempt n. Whoever's nonce is in it has it."""

    attempt: Attempt
    nonce: str
    host: str
    pid: int
    command: tuple[str, ...]
    cwd: str
    groups: int
    nproc: int
    settings: dict[str, str] = {}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """``starts/<n>``: attempt n begins, from ``parent`` (``None``: from nothing).

    ``log_end`` is the last step of the parent lineage's rollout log that is to be replayed.
    """

    attempt: Attempt
    nonce: str
    parent: Ref | None
    log_end: Step | None = None
    groups: int
    nproc: int
    versions: dict[str, str] = {}


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Elements ``start`` up to ``stop`` of one box, row-major, and where their bytes are.

    ``raw`` and ``stored`` are digests of the bytes before and after the codec. ``base`` is ``None`` but
    for the delta codec: the record of the same span of the same box in an earlier commit, which this
    chunk builds on and which may itself have a base. Its ``pack`` is a number in the same fragment's
    packs, so that reading one commit never needs another.
    """

    start: int
    stop: int
    raw: bytes
    stored: bytes
    codec: int
    pack: int
    offset: int
    size: int
    base: ChunkRecord | None = None

    @property
    def chain(self) -> tuple[ChunkRecord, ...]:
        """The chunks that this one builds on, nearest first; the last of them is whole."""
        found, base = [], self.base
        while base is not None:
            found.append(base)
            base = base.base
        return tuple(found)


class BoxRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a leaf that its writer held, and those of its chunks that it vouches for."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, self.extent)


class LeafRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A leaf, as one writer saw it."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    owner: str
    boxes: tuple[BoxRecord, ...]

    @property
    def spec(self) -> LeafSpec:
        return LeafSpec(self.name, self.kind, self.dtype, self.shape, self.owner)


class PackRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pack's key, its size in bytes, and the digest of all its bytes, those included that nothing
    needs any more.
    """

    key: str
    size: int
    digest: bytes = b""


class ReplicaDigest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Digest of a replicated leaf's dtype and shape, and of all bytes of its box, as this writer holds them."""

    leaf: str
    offset: tuple[int, ...]
    digest: bytes


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """``fragments/<n>/<step>/<writer>``: what one writer wrote, or that it could not.

    ``members`` is the digest of the sorted incarnations of all groups in the quorum; ``writers`` is
    how many fragments the whole quorum writes. ``packs`` names every pack that any chunk here lies
    in, reused ones included. A fragment with a ``failure`` holds nothing else.
    """

    format: int
    attempt: Attempt
    step: Step
    writer: str
    quorum: int
    members: str
    parent: Ref | None
    failure: str = ""
    packs: tuple[PackRef, ...] = ()
    leaves: tuple[LeafRecord, ...] = ()
    replicas: tuple[ReplicaDigest, ...] = ()
    guarantee: Guarantee = "E4"
    why: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class LeafRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Leaves ``first`` to ``last`` by name; of each, at most the part ``low`` to ``high`` (in
    1/2**32) of its first dimension. A reader skips fragments whose ranges cannot hold what it wants.

    ``of``: of which leaves it speaks: ``ANY``, or, where the commit lists leaves, of one of the other sorts.
    """

    first: str
    last: str
    low: int
    high: int
    of: Sort = 0


class FragmentRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A fragment by key, with the size and digest of its record, and what it may hold."""

    key: str
    size: int
    digest: str
    ranges: tuple[LeafRange, ...]


class LeafGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Leaves of all ranks that agree in all but their name. ``cut``: some fragment holds a box of them that
    is not the whole leaf.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    cut: bool
    names: tuple[str, ...]


class OwnRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is one rank's own: the ``owner``, its value leaves without ``@owner``, and the numbers of all
    fragments that hold a leaf of it.
    """

    owner: str
    values: tuple[str, ...]
    fragments: tuple[int, ...]


class ComponentSummary(msgspec.Struct, frozen=True, array_like=True):
    """For people: how many leaves and raw bytes a component has, and how many of them were reused."""

    leaves: int
    raw_bytes: int
    stored_bytes: int
    reused_bytes: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """``commits/<step>-<n>``: the step is readable; or, with ``aborted`` set, it never will be.

    Its bytes hold no clock and no committer. ``state`` is the digest of the content, whoever wrote
    which part of it: two commits of one step with equal ``state`` are the same step. ``left_out`` says,
    for people, what the step does not hold; empty: whoever wrote it did not say.

    ``leaves`` and ``own`` list every leaf, so that a reader asks for no fragment but those that hold what it
    wants. Both empty: the fragments say it.
    """

    format: int
    attempt: Attempt
    step: Step
    aborted: str = ""
    parent: Ref | None = None
    state: str = ""
    fragments: tuple[FragmentRef, ...] = ()
    quorums: tuple[int, ...] = ()
    components: dict[str, ComponentSummary] = {}
    guarantee: Guarantee = "E4"
    why: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    leaves: tuple[LeafGroup, ...] = ()
    own: tuple[OwnRecord, ...] = ()

    @property
    def at(self) -> Position:
        return Position(self.step, self.attempt)


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """``collected/<step>-<n>``: the commit is no longer readable."""

    step: Step
    attempt: Attempt
    intent: str


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """``pins/<id>``: do not collect this commit. ``kind`` start, tip and agent pins do not expire.

    ``by_attempt`` is the attempt that holds it; an agent holds it until step ``by_step`` of that
    attempt is settled.
    """

    pin: str
    step: Step
    attempt: Attempt
    kind: PinKind
    holder: str
    by_attempt: int = 0
    by_step: int = 0


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """``gc/<id>``: what a collector is about to delete."""

    intent: str
    victims: tuple[tuple[Step, Attempt], ...]


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """``saves/<n>/<step>/<writer>``, in a tier only: a save has begun there, and the far store has not
    settled its step yet.

    ``writers`` are all who write the step. ``shared``: all of them do it in this tier, so the step
    is settled here first. ``keep_last`` and ``keep_every`` are what the far store is to retain.
    """

    format: int
    attempt: Attempt
    step: Step
    writer: str
    quorum: int
    members: str
    writers: tuple[str, ...]
    parent: Ref | None
    shared: bool = True
    keep_last: int | None = None
    keep_every: int | None = None


class StagedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Elements ``start`` up to ``stop`` of the one box of leaf number ``leaf`` lie raw in the writer's
    staging file from byte ``at`` on.
    """

    leaf: int
    start: int
    stop: int
    at: int
    raw: bytes


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """``staged/<n>/<step>/<writer>``, in a tier only: what a writer's share consists of, while its
    fragment is not there: in durable packs (``partial``, which names no parent) and in its staging file.
    """

    format: int
    partial: Fragment
    spans: tuple[StagedSpan, ...]
    writers: tuple[str, ...]
    shared: bool = True
    keep_last: int | None = None
    keep_every: int | None = None


Record = RunRecord | Claim | Start | Fragment | Commit | Tombstone | Pin | Intent | Saving | Staging
R = TypeVar("R", RunRecord, Claim, Start, Fragment, Commit, Tombstone, Pin, Intent, Saving, Staging)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def encode(record: Record) -> bytes:
    """The record's bytes, sealed. The same record gives the same bytes."""
    if isinstance(record, Fragment):
        body = msgspec.msgpack.encode(_leaf_by_leaf(record))
    elif isinstance(record, Staging):
        partial = _leaf_by_leaf(record.partial)
        body = msgspec.msgpack.encode(msgspec.structs.replace(record, partial=partial))
    else:
        body = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=0)
    return body + _MARK + digest_of(body).encode() + b"\n"


def _leaf_by_leaf(fragment: Fragment) -> Fragment:
    """The same to the encoder, its leaves encoded already, one by one: a call into C keeps the interpreter
    from everybody else, and over all leaves of a large share that is many milliseconds.
    """
    pack = msgspec.msgpack.Encoder().encode
    packed: Any = tuple([msgspec.Raw(pack(leaf)) for leaf in fragment.leaves])
    return msgspec.structs.replace(fragment, leaves=packed)


class _Shell(Fragment, frozen=True, kw_only=True):
    """A fragment whose leaves are still to be decoded."""

    leaves: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]


def _decode_leaf_by_leaf(body: bytes) -> Fragment:
    """As one call would decode it, for the same reason."""
    shell = msgspec.msgpack.decode(body, type=_Shell)
    unpack = msgspec.msgpack.Decoder(LeafRecord).decode
    told = {name: getattr(shell, name) for name in Fragment.__struct_fields__}
    return Fragment(**{**told, "leaves": tuple([unpack(leaf) for leaf in shell.leaves])})


def decode(kind: type[R], data: bytes | memoryview, key: str) -> R:
    """The record in ``data``, which was read from ``key``.

    Raises:
        RecordCorrupt: the digest does not match, the bytes do not decode, or a value is out of bounds.
        UnknownFormat: a newer major format.
    """
    data = bytes(data)
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if not trailer.startswith(_MARK) or len(data) > MAX_RECORD_BYTES:
        raise RecordCorrupt(
            f"RecordCorrupt: {key} does not end with its digest ({len(data)} bytes)\n"
            "  it is cut, extended, or not a record of ftckpt",
            key=key,
        )
    found = digest_of(body)
    if trailer != _MARK + found.encode() + b"\n":
        raise RecordCorrupt(
            f"RecordCorrupt: {key} does not match its own digest\n"
            f"  its bytes give xxh3-128 {found}; it states {trailer[len(_MARK) : -1].decode(errors='replace')}",
            key=key,
            found=found,
        )
    try:
        coder: Any = msgspec.msgpack if kind in _MSGPACK else msgspec.json
        plain: type = kind
        record: Any
        try:
            record = _decode_leaf_by_leaf(body) if plain is Fragment else coder.decode(body, type=kind)
        except msgspec.ValidationError:
            _check_format(coder.decode(body, type=_Version).format, key)
            coder.decode(body, type=kind)  # says where it is
            raise
        _check_format(getattr(record, "format", FORMAT), key)
        if isinstance(record, Fragment):
            _check_fragment(record, key)
        elif isinstance(record, Staging):
            _check_fragment(record.partial, key)
            _check_staging(record, key)
        elif isinstance(record, Commit):
            _check_commit(record, key)
        return record  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordCorrupt(f"RecordCorrupt: {key} does not decode\n  {error}", key=key) from error


def let_go_of(fragments: list[Fragment]) -> None:
    """Free fragments that nobody else holds, leaf by leaf; the list is empty then."""
    leaves = [leaf for fragment in fragments for leaf in fragment.leaves]
    fragments.clear()
    let_go(leaves)


def is_what_is_left_of(damaged: bytes, whole: bytes) -> bool:
    """Whether a damaged record was this one, which decodes: its body, or its seal, is the same still.
    Either proves the other half.
    """
    body_bytes = len(whole) - _TRAILER_BYTES
    return damaged[:body_bytes] == whole[:body_bytes] or damaged.endswith(whole[-_TRAILER_BYTES:])


_MSGPACK: tuple[type, ...] = (Fragment, Staging)


class _Version(msgspec.Struct):
    format: int = FORMAT


def _check_format(version: int, key: str) -> None:
    if version != FORMAT:
        raise UnknownFormat(
            f"UnknownFormat: {key} is format {version}; this ftckpt reads format {FORMAT}\n"
            "  nothing was changed; read it with a newer ftckpt",
            key=key,
            found=version,
        )


def _check_commit(commit: Commit, key: str) -> None:
    """A commit of a large job names many thousands; they are looked at all together."""
    _check_listed(commit, key)
    folder, refs = f"fragments/{commit.attempt:06d}/{commit.step:012d}/", commit.fragments
    keys = "\n".join([ref.key for ref in refs]) + "\n"
    outside = [ref for ref in refs if not 0 <= ref.size <= MAX_RECORD_BYTES or not ref.key.startswith(folder)]
    plain = keys.count("/") == folder.count("/") * len(refs) and "/." not in keys and "/\n" not in keys
    sound = plain and not outside
    if sound or not refs:
        return
    for ref in refs:
        own = ref.key.startswith(folder) and _is_below(ref.key, "fragments")
        if not own or not 0 <= ref.size <= MAX_RECORD_BYTES:
            raise RecordCorrupt(
                f"RecordCorrupt: {key} names a fragment that cannot be: {ref.key!r}, {ref.size} bytes",
                key=key,
            )


def _check_listed(commit: Commit, key: str) -> None:
    for group in commit.leaves:
        if not _leaf_fits(group.kind, group.dtype, group.shape):
            raise RecordCorrupt(
                f"RecordCorrupt: {key} lists leaves of kind {group.kind!r}, dtype {group.dtype!r} and shape "
                f"{group.shape}: {', '.join(map(repr, group.names[:8]))}",
                key=key,
            )
    named = {number for own in commit.own for number in own.fragments}
    if named and not 0 <= min(named) <= max(named) < len(commit.fragments):
        raise RecordCorrupt(
            f"RecordCorrupt: {key} says that fragments {min(named)} to {max(named)} of {len(commit.fragments)} hold "
            "leaves of single ranks",
            key=key,
        )


def _leaf_fits(kind: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a leaf of that kind can be so."""
    itemsize = ITEMSIZE_BYTES.get(dtype, 0)
    fits = itemsize and len(shape) <= MAX_NDIM and all(n >= 0 for n in shape)
    if not fits or prod(n or 1 for n in shape) * itemsize > MAX_LEAF_BYTES:
        return False
    return kind != "value" or (dtype == "uint8" and len(shape) == 1 and shape[0] <= MAX_VALUE_BYTES)


def _is_below(key: str, folder: str) -> bool:
    parts = key.split("/")
    return len(parts) > 1 and parts[0] == folder and all(part and not part.startswith(".") for part in parts)


def _check_fragment(fragment: Fragment, key: str) -> None:
    """Bounds that types do not state: no length or offset is trusted further down."""

    def bad(what: str) -> RecordCorrupt:
        return RecordCorrupt(f"RecordCorrupt: {key} {what}", key=key)

    for pack in fragment.packs:
        if pack.size < 0 or not _is_below(pack.key, "packs"):
            raise bad(f"names a pack that cannot be: {pack.key!r}, {pack.size} bytes")
    pack_sizes = [pack.size for pack in fragment.packs]
    shapes: set[tuple[str, str, tuple[int, ...]]] = set()
    boxes: dict[tuple[tuple[int, ...], ...], int] = {}  # those that were found good, and their elements
    for leaf in fragment.leaves:
        shape = leaf.shape
        itemsize = ITEMSIZE_BYTES.get(leaf.dtype, 0)
        if (leaf.kind, leaf.dtype, shape) not in shapes:
            if not _leaf_fits(leaf.kind, leaf.dtype, shape):
                packed = ", which is packed bytes," if leaf.kind == "value" else ""
                raise bad(f"gives {leaf.name!r}{packed} dtype {leaf.dtype!r} and shape {shape}")
            shapes.add((leaf.kind, leaf.dtype, shape))
        for record in leaf.boxes:
            offset, extent = record.offset, record.extent
            numel = boxes.get((shape, offset, extent), -1)
            if numel < 0:
                if len(offset) != len(extent) or min((*offset, *extent), default=0) < 0:
                    raise bad(f"gives {leaf.name!r} a box that cannot be: {offset} {extent}")
                if len(extent) != len(shape) or any(map(gt, map(add, offset, extent), shape)):
                    raise bad(f"gives {leaf.name!r} of shape {shape} a box outside of it: {record.box}")
                numel = boxes[shape, offset, extent] = prod(extent)
            for chunk in record.chunks:
                links = (chunk,) if chunk.base is None else (chunk, *chunk.chain)
                if len(links) > 1 + MAX_CHAIN:
                    raise bad(
                        f"gives {leaf.name!r} elements {chunk.start} to {chunk.stop} a chain of {len(links) - 1} "
                        f"bases; at most {MAX_CHAIN} are followed"
                    )
                for link in links:
                    within = (link.start, link.stop) == (chunk.start, chunk.stop)
                    if not (within and _chunk_fits(link, numel, itemsize, pack_sizes)):
                        raise bad(f"gives {leaf.name!r} a chunk that cannot be: {link}")


def _chunk_fits(chunk: ChunkRecord, numel: int, itemsize: int, pack_sizes: list[int]) -> bool:
    size, raw_bytes, offset, pack = (
        chunk.size,
        (chunk.stop - chunk.start) * itemsize,
        chunk.offset,
        chunk.pack,
    )
    return (
        0 <= chunk.start < chunk.stop <= numel
        and 0 < size <= raw_bytes <= MAX_CHUNK_BYTES
        and 0 <= pack < len(pack_sizes)
        and 0 <= offset <= pack_sizes[pack] - size
        and len(chunk.raw) == len(chunk.stored) == 16
        and _base_fits(chunk)
    )


def _check_staging(staging: Staging, key: str) -> None:
    leaves = staging.partial.leaves
    sound = all(len(leaf.boxes) == 1 for leaf in leaves) and all(
        0 <= span.leaf < len(leaves)
        and 0 <= span.start < span.stop <= leaves[span.leaf].boxes[0].box.numel
        and span.at >= 0
        and len(span.raw) == 16
        for span in staging.spans
    )
    if not sound:
        raise RecordCorrupt(f"RecordCorrupt: {key} speaks of staged bytes that cannot be", key=key)


def _base_fits(chunk: ChunkRecord) -> bool:
    """A delta has a base and other known codecs have none; what later codecs have is not known here."""
    if chunk.codec == DELTA:
        return chunk.base is not None
    return chunk.base is None or chunk.codec not in CODECS


def fraction(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The part of the first dimension that a box covers, in 1/``SCALE``, rounded outwards."""
    if not shape or not shape[0]:
        return 0, SCALE
    low, high = box.offset[0], box.offset[0] + box.extent[0]
    return low * SCALE // shape[0], -(-high * SCALE // shape[0])


def leaf_range(leaves: tuple[LeafRecord, ...]) -> tuple[LeafRange, ...]:
    """What a fragment holds, in as few ranges as say something: one per run of leaves that share
    a fraction, at most ``64``; beyond that one range over all.
    """
    ranges: list[LeafRange] = []
    first = last = ""
    least = most = 0
    for leaf in leaves:
        parts = [fraction(record.box, leaf.shape) for record in leaf.boxes]
        low, high = parts[0] if parts else (0, SCALE)
        for a, b in parts[1:]:
            low, high = min(low, a), max(high, b)
        if last and abs(least - low) <= SCALE >> 10 and abs(most - high) <= SCALE >> 10:
            last, least, most = leaf.name, min(least, low), max(most, high)
            continue
        if last:
            ranges.append(LeafRange(first, last, least, most))
        first, last, least, most = leaf.name, leaf.name, low, high
    if last:
        ranges.append(LeafRange(first, last, least, most))
    if len(ranges) > 64:
        return (
            LeafRange(
                ranges[0].first, ranges[-1].last, min(r.low for r in ranges), max(r.high for r in ranges)
            ),
        )
    return tuple(ranges)


def may_hold(ranges: tuple[LeafRange, ...], leaf: str, low: int = 0, high: int = SCALE) -> bool:
    """Whether a fragment with these ranges can hold any of that part of a leaf."""
    return any(r.first <= leaf <= r.last and r.low < high and low < r.high for r in ranges)
