"""Bytes that somebody made on purpose: refused by name, in bounded memory, with nothing half done.

Here is what was thought of, and what `make fuzz` found; that looks for more.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
import xxhash
import zstandard

import ftckpt
from ftckpt import codec
from ftckpt.contents import contents
from ftckpt.errors import CorruptError, FtckptError, MembershipError, NotEnoughMemory, RestoreIncomplete
from ftckpt.manifest import BoxRecord, ChunkRecord, Fragment, LeafRecord, PackRef, decode, encode
from ftckpt.memory import available_bytes, require_memory
from ftckpt.restoring import restore_into
from ftckpt.run import Run
from ftckpt.values import pack, unpack
from tests.core.records import seal
from tests.fuzz import run_of, targets
from tests.fuzz.run_of import Live, Objects, memory_of, newest, with_fragment, with_value
from tests.fuzz.targets import every_target, framed_heal

CALM_BYTES = 64 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def run() -> Objects:
    return run_of.make_run()


@pytest.fixture(scope="module")
def other_run() -> Objects:
    return run_of.make_run(seed=1)


def refusal(objects: Objects) -> FtckptError:
    """The error of a restore, which left the live state alone, or names what it had begun with."""
    live = Live()
    before = live.bits()
    tracemalloc.start()
    try:
        with memory_of(objects) as sim, pytest.raises(FtckptError) as caught:
            restore_into(sim.store, Run(sim.store).latest(), live.state, subset=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = caught.value
    if isinstance(error, RestoreIncomplete):
        assert error.facts["components"]
    else:
        assert live.bits() == before and live.loads == 0
    assert peak_bytes < CALM_BYTES
    return error


def test_the_run_that_is_broken_here_is_whole(run):
    assert run_of.read_everything(run, lambda call: not targets.refused(call))


def test_the_run_that_is_broken_here_has_a_tensor_of_several_chunks_with_reuse_and_a_delta(run):
    _, commit = newest(run)
    made = decode(Fragment, run[commit.fragments[0].key], commit.fragments[0].key)
    (rewards,) = (leaf for leaf in made.leaves if leaf.name == "buffer.rewards")
    packs = [made.packs[chunk.pack].key for chunk in rewards.boxes[0].chunks]

    assert [chunk.codec == codec.DELTA for chunk in rewards.boxes[0].chunks] == [True, False, False]
    assert [f"{commit.step:012d}" in key for key in packs] == [True, False, True]


# --- objects in the wrong place -------------------------------------------------------------------


def needed(run: Objects) -> list[str]:
    _, commit = newest(run)
    return [key for key in run if f"{commit.step:012d}" in key or key == "run.json"]


def test_every_object_that_is_gone_is_named(run):
    for key in needed(run):
        error = None
        broken = {k: body for k, body in run.items() if k != key}
        if key.startswith("commits"):
            continue  # a commit that is not there was never made
        error = refusal(broken)
        assert key == "run.json" or key in str(error)


@pytest.mark.parametrize("folder", ["packs/", "fragments/", "commits/"])
def test_two_objects_that_changed_places_are_refused(run, folder):
    one, other = [key for key in run if key.startswith(folder)][:2]

    error = refusal({**run, one: run[other], other: run[one]})

    assert isinstance(error, (CorruptError, RestoreIncomplete))


@pytest.mark.parametrize("folder", ["packs/", "fragments/"])
def test_objects_of_another_run_are_refused(run, other_run, folder):
    broken = dict(run)
    for key, theirs in zip(sorted(run), sorted(other_run), strict=True):
        if key.startswith(folder):
            broken[key] = other_run[theirs]

    assert isinstance(refusal(broken), (CorruptError, RestoreIncomplete))


def test_a_whole_step_of_another_run_is_named_by_verify(run, other_run):
    """Every digest in it is right; only its parent is not the commit that is here."""
    _, commit = newest(run)
    foreign = {key: body for key, body in other_run.items() if f"{commit.step:012d}" in key}

    with memory_of({**run, **foreign}) as sim:
        problems = Run(sim.store).verify()

    assert any("goes on from another" in problem.error.message for problem in problems)


# --- records that are sealed well -----------------------------------------------------------------


def first_chunk(fragment: Fragment, **wrong: Any) -> Fragment:
    number, leaf = next((n, leaf) for n, leaf in enumerate(fragment.leaves) if leaf.kind == "tensor")
    box = leaf.boxes[0]
    chunk = msgspec.structs.replace(box.chunks[0], **wrong)
    box = msgspec.structs.replace(box, chunks=(chunk, *box.chunks[1:]))
    leaf = msgspec.structs.replace(leaf, boxes=(box,))
    return msgspec.structs.replace(
        fragment, leaves=(*fragment.leaves[:number], leaf, *fragment.leaves[number + 1 :])
    )


def first_pack(fragment: Fragment, **wrong: Any) -> Fragment:
    return msgspec.structs.replace(
        fragment, packs=(msgspec.structs.replace(fragment.packs[0], **wrong), *fragment.packs[1:])
    )


CRAFTED: dict[str, Callable[[Fragment], Fragment]] = {
    "an offset before the pack": lambda f: first_chunk(f, offset=-1),
    "an offset beyond all packs": lambda f: first_chunk(f, offset=1 << 62),
    "a size of an exabyte": lambda f: first_chunk(f, size=1 << 60),
    "a chunk of an exabyte": lambda f: first_chunk(f, stop=1 << 60),
    "a pack that is not listed": lambda f: first_chunk(f, pack=99),
    "an unknown codec": lambda f: first_chunk(f, codec=99),
    "another codec than it was": lambda f: first_chunk(f, codec=codec.ZSTD),
    "a delta without a base": lambda f: first_chunk(f, codec=codec.DELTA),
    "a chunk of other digests": lambda f: first_chunk(f, raw=bytes(16), stored=bytes(16)),
    "a pack above the run": lambda f: first_pack(f, key="packs/../../../etc/passwd"),
    "a pack at the root": lambda f: first_pack(f, key="/etc/passwd"),
    "a hidden pack": lambda f: first_pack(f, key="packs/.ftckpt-life-agent"),
    "a pack with a line feed": lambda f: first_pack(f, key="packs/a\nb"),
    "a pack of a very long name": lambda f: first_pack(f, key="packs/" + "a" * 3000),
    "a pack that is a commit": lambda f: first_pack(f, key="commits/000000000001-000001"),
    "a pack of negative size": lambda f: first_pack(f, size=-1),
    "a pack of an exabyte": lambda f: first_pack(f, size=1 << 60),
    "a fragment of another step": lambda f: msgspec.structs.replace(f, step=0),
    "a fragment of another attempt": lambda f: msgspec.structs.replace(f, attempt=2),
    "a fragment that failed": lambda f: msgspec.structs.replace(f, failure="x"),
    "leaves that are gone": lambda f: msgspec.structs.replace(f, leaves=f.leaves[:1]),
    "leaves twice, and different": lambda f: msgspec.structs.replace(
        f, leaves=(*f.leaves, msgspec.structs.replace(f.leaves[-1], owner="g9.9"))
    ),
}


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_fragment_under_right_digests_is_refused(run, how):
    refusal(with_fragment(run, lambda fragment, _: encode(CRAFTED[how](fragment))))


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,
        b"\x81\xa1x" * 100_000,
        b"\x81\xa6leaves\xdd\xff\xff\xff\xff",
        b"\x81\xa6format\x01" + b"\xc1",
        b"",
    ],
    ids=["deep arrays", "deep maps", "lengths that lie", "cut", "nothing"],
)
def test_a_crafted_body_of_a_fragment_is_refused(run, body):
    refusal(with_fragment(run, lambda _fragment, _: seal(body)))


def test_a_codec_of_a_later_version_can_still_be_shown(run):
    """Found by reading: ``show`` looked its name up in a table that does not have it."""
    made = with_fragment(run, lambda fragment, _: encode(first_chunk(fragment, codec=99)))

    with memory_of(made) as sim:
        parts = Run(sim.store).inventory()

    assert any("codec 99" in part.written for part in parts.values())


# --- bombs ----------------------------------------------------------------------------------------


def test_a_frame_that_declares_more_than_its_chunk_is_refused_before_it_is_decoded():
    bomb = zstandard.compress(bytes(256 << 20))
    assert len(bomb) < 1 << 16
    for number in (codec.ZSTD, codec.PLANES):
        stored = bomb if number == codec.ZSTD else bytes([1, 1]) + len(bomb).to_bytes(4, "little") + bomb
        tracemalloc.start()
        try:
            with pytest.raises(CorruptError, match="declares"):
                codec.decode(stored, number, 4096)
            assert tracemalloc.get_traced_memory()[1] < CALM_BYTES
        finally:
            tracemalloc.stop()


def of_nothing(name: str, kind: Any, gibibytes: int, pack_number: int) -> LeafRecord:
    """A leaf of zeros, a gibibyte a chunk, all of which are the same twenty bytes of a pack."""
    stored = bytes([1]) + bytes([2]) + (1).to_bytes(4, "little") + b"\0"
    chunk = ChunkRecord(
        0, GIB, bytes(16), xxhash.xxh3_128_digest(stored), codec.PLANES, pack_number, 0, len(stored)
    )
    chunks = tuple(
        msgspec.structs.replace(chunk, start=n * GIB, stop=(n + 1) * GIB) for n in range(gibibytes)
    )
    size = gibibytes * GIB
    return LeafRecord(name, kind, "uint8", (size,), "", (BoxRecord((0,), (size,), chunks),))


def with_zeros(run: Objects, kind: str, leaves: int, gibibytes: int) -> Objects:
    def craft(fragment: Fragment, made: Objects) -> bytes:
        key = fragment.packs[0].key[:-6] + "000099"
        made[key] = bytes([1, 2, 1, 0, 0, 0, 0])
        packs = (*fragment.packs, PackRef(key, 7, xxhash.xxh3_128_digest(made[key])))
        bombs = tuple(
            of_nothing(f"bomb{number}", kind, gibibytes, len(packs) - 1) for number in range(leaves)
        )
        return encode(msgspec.structs.replace(fragment, packs=packs, leaves=(*fragment.leaves, *bombs)))

    return with_fragment(run, craft)


def test_values_of_terabytes_of_zeros_are_refused_before_memory_is_taken(run):
    with memory_of(with_zeros(run, "value", 2000, 4)) as sim, pytest.raises(NotEnoughMemory) as caught:
        found = contents(sim.store, Run(sim.store).latest())
        found.packed(found.values)  # as of a state that has them all

    assert isinstance(caught.value, MemoryError)
    assert caught.value.needed_bytes > 2000 * 4 * GIB


def test_a_tensor_of_a_terabyte_of_zeros_is_refused_before_memory_is_taken(run):
    with (
        memory_of(with_zeros(run, "tensor", 1, 1024)) as sim,
        pytest.raises(NotEnoughMemory, match="shape"),
    ):
        Run(sim.store).tensor("bomb0")


def test_memory_is_measured_where_a_container_has_less_than_its_machine(tmp_path: Path):
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert available_bytes(tmp_path) == 4 << 20
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {
        "memory.max": "max",
        "memory.current": "1000",
        "memory.stat": "inactive_file 500",
    }.items():
        (group / name).write_text(text)
    assert available_bytes(tmp_path) == 4 << 20
    (group / "memory.max").write_text("3000\n")
    assert available_bytes(tmp_path) == 2500

    require_memory(1 << 40, "x", lambda: None)
    require_memory(1 << 20, "x", lambda: 0)
    with pytest.raises(NotEnoughMemory, match="nothing was changed"):
        require_memory(1 << 40, "x", lambda: 1 << 39)


def test_memory_is_asked_for_once_for_all_that_a_step_brings(tmp_path, monkeypatch):
    """Four tensors of 20 MiB, each of which would fit."""
    with ftckpt.Session(tmp_path / "run", {"d": {str(n): torch.zeros(5 << 20) for n in range(4)}}):
        pass
    asked = partial(require_memory, available=lambda: 70 << 20)
    monkeypatch.setattr("ftckpt.capture.restoring.require_memory", asked)
    live: dict[str, Any] = {}

    with pytest.raises(NotEnoughMemory, match="nothing was changed"):
        ftckpt.restore(tmp_path / "run", {"d": live})

    assert live == {}


# --- plain values ---------------------------------------------------------------------------------

TREES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no record at all": ("actor", lambda _: [1, 2]),
    "a record without a kind": ("actor", lambda tree: {"tree": tree["tree"]}),
    "a record with a kind alone": ("buffer", lambda tree: {"kind": tree["kind"], "x": 1}),
    "a module that is a list": ("actor", lambda tree: {**tree, "tree": [1]}),
    "a module of numbers": ("actor", lambda tree: {**tree, "tree": dict.fromkeys(tree["tree"], 5)}),
    "an optimizer without groups": ("optim", lambda tree: {**tree, "tree": {"state": {}, "other": {}}}),
    "groups that are numbers": (
        "optim",
        lambda tree: {**tree, "tree": {**tree["tree"], "param_groups": [7]}},
    ),
    "groups without parameters": (
        "optim",
        lambda tree: {**tree, "tree": {**tree["tree"], "param_groups": [{}]}},
    ),
    "state that is a list": ("optim", lambda tree: {**tree, "tree": {**tree["tree"], "state": []}}),
    "another kind": ("cursor", lambda tree: {**tree, "kind": "module"}),
}


@pytest.mark.parametrize("how", TREES)
def test_a_crafted_structure_of_plain_values_is_refused(run, how):
    component, craft = TREES[how]
    body = pack(craft(unpack(run_of.packed_values(run)[component])), leaf="crafted")

    refusal(with_value(run, component, body))


def test_an_object_that_does_not_take_its_state_is_named(run):
    tree = unpack(run_of.packed_values(run)["cursor"])
    body = pack({**tree, "tree": {"loads": {}}}, leaf="crafted")

    error = refusal(with_value(run, "cursor", body))

    assert isinstance(error, RestoreIncomplete) and "cursor" in error.facts["components"]


# --- between processes ----------------------------------------------------------------------------

HEADERS: dict[str, Any] = {
    "negative extents": {"shape": [-2, -3]},
    "an extent of nothing and of everything": {"shape": [0, 1 << 62]},
    "thousands of dimensions": {"shape": [1] * 5000, "size_bytes": 4},
    "terabytes": {"shape": [1 << 38], "size_bytes": 1 << 40},
    "another type": {"dtype": "quint8"},
    "another digest": {"digest": "0" * 32},
}


@pytest.mark.parametrize("how", HEADERS)
def test_a_peer_that_announces_what_cannot_be_is_refused(how):
    with pytest.raises(MembershipError):
        framed_heal(lambda leaf: {**leaf, **HEADERS[how]})


@pytest.mark.parametrize(
    "head", [b"\x91" * 10_000, b"\x81\xa1x" * 10_000, b"\xdd\xff\xff\xff\xff", b"\xa1\xff", b""]
)
def test_a_peer_whose_header_does_not_decode_is_refused(head):
    with pytest.raises(MembershipError):
        framed_heal(head=head)


def test_terabytes_that_never_come_take_little_memory():
    tracemalloc.start()
    try:
        with pytest.raises(MembershipError):
            framed_heal(lambda leaf: {**leaf, "shape": [1 << 38], "size_bytes": 1 << 40}, length=1 << 41)
        assert tracemalloc.get_traced_memory()[1] < 2 * CALM_BYTES
    finally:
        tracemalloc.stop()


# --- everything else ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(every_target()))
def test_a_little_fuzzing_finds_no_violation(name):
    """The first inputs of `make fuzz`; a violation it finds becomes a line above."""
    target = every_target()[name]()
    few = 12 if name.startswith("runs") else 80

    decoded = [target.check(seed) for seed in target.seeds]
    tried = [target.check(target.craft(Random(number))[: target.most]) for number in range(few)]

    assert any(decoded) and not all(tried)
