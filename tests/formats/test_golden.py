"""The golden run is read by today's code and by the independent reader, and both find what was saved."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.attempts import look
from ftckpt.boxes import whole
from ftckpt.capture import as_bytes_view, place
from ftckpt.capture.tensors import fresh_tensor
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.manifest import Commit, Position
from ftckpt.plan.restore import Placement, index_chunks, plan_restore
from ftckpt.reader import fetch, leaf_specs, read_fragments, read_values
from ftckpt.store.api import ObjectStore
from ftckpt.store.local import LocalStore
from ftckpt.values import unpack
from tests.formats import independent_reader
from tests.formats.describe import canonical, describe, in_one_line, sha256
from tests.formats.golden_state import Golden, shortened
from tests.formats.independent_reader import At, Step

V1 = Path(__file__).parent / "golden" / "v1"
RUN = V1 / "run"
EXPECTED: dict[str, Any] = json.loads((V1 / "expected.json").read_text())
READABLE = [At(*at) for at in EXPECTED["readable"]]
every_step = pytest.mark.parametrize("at", READABLE, ids=lambda at: f"step {at.step} of {at.attempt}")


@pytest.fixture(scope="module")
def steps() -> dict[At, Step]:
    """Every readable step, as the independent reader reads it."""
    run = independent_reader.Run(RUN)
    return {at: run.read(at) for at in run.readable()}


def every_leaf(store: ObjectStore, commit: Commit) -> dict[str, bytes]:
    """The row-major bytes of every leaf, as a restore reads them."""
    fragments = read_fragments(store, commit)
    specs = [leaf for leaf in leaf_specs(fragments).values() if leaf.kind == "tensor"]
    tensors = [fresh_tensor(leaf.shape, leaf.dtype) for leaf in specs]

    def put(placement: Placement, raw: memoryview) -> None:
        leaf = specs[placement.want]
        piece = raw[placement.first_byte :][: placement.piece.numel * leaf.itemsize_bytes]
        into = tensors[placement.want]
        place(into, whole(leaf.shape), placement.piece, placement.region, piece, leaf.dtype)

    wants = [(leaf, whole(leaf.shape)) for leaf in specs]
    fetch(store, plan_restore(wants, index_chunks(fragments)), put, commit.at)
    found = {leaf.name: bytes(as_bytes_view(t)) for leaf, t in zip(specs, tensors, strict=True)}
    return found | read_values(store, fragments, commit.at)


def test_nobody_has_changed_the_golden_run():
    """It was released: whoever changes the format adds another one."""
    files = {
        str(path.relative_to(RUN)): sha256(path.read_bytes()) for path in RUN.rglob("*") if path.is_file()
    }

    assert files == EXPECTED["files"]
    assert sum(path.stat().st_size for path in V1.rglob("*") if path.is_file()) < 300 << 10


def test_the_second_reader_is_independent():
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert not {name for name in names if name.split(".")[0] in ("ftckpt", "tests", "torch", "msgspec")}


# --- which steps ---------------------------------------------------------------------------------


def test_both_readers_find_the_same_commits_on_the_lineage():
    run = independent_reader.Run(RUN)
    seen = look(LocalStore(RUN))
    lineage = [(step, attempt) for step, attempt in EXPECTED["lineage"]]

    assert run.lineage() == lineage == [At(at.step, at.attempt) for at in seen.lineage]
    assert run.readable() == READABLE == [At(at.step, at.attempt) for at in sorted(seen.view.readable)]
    assert seen.view.aborted == {Position(*at) for at in EXPECTED["aborted"]}
    assert seen.view.collected == {Position(*at) for at in EXPECTED["collected"]}
    with ftckpt.open(RUN) as opened:
        assert [(commit.step, commit.attempt) for commit in opened.commits()] == lineage


def test_steps_that_are_given_up_collected_or_absent_are_not_readable():
    run = independent_reader.Run(RUN)

    assert not {At(7, 3), At(1, 1), At(5, 1), At(8, 3)} & set(run.readable())
    for at in (At(7, 3), At(8, 3)):
        with pytest.raises(independent_reader.Unreadable):
            run.read(at)


# --- what is in them -----------------------------------------------------------------------------


@every_step
def test_the_independent_reader_finds_every_tensor_and_value_as_it_was(steps, at):
    told = EXPECTED["steps"][f"{at.step}-{at.attempt}"]
    found = steps[at]
    tensors = {
        name: in_one_line(leaf.dtype, leaf.shape, leaf.data)
        for name, leaf in found.leaves.items()
        if leaf.kind == "tensor"
    }
    trees = {name: shortened(tree) for name, tree in found.trees.items() if name in told["values"]}

    assert tensors == told["tensors"]
    assert trees == told["values"]
    assert set(found.trees) - set(trees) == {"ftckpt", "optim"}
    assert found.trees["ftckpt"]["tree"]["step"] == at.step


@every_step
def test_todays_code_reads_the_same_bytes(steps, at):
    found = steps[at]
    store = LocalStore(RUN)
    commit = look(store).commits[Position(*at)]

    leaves = every_leaf(store, commit)

    assert leaves == {name: leaf.data for name, leaf in found.leaves.items()}
    for name, tree in found.trees.items():
        assert describe(unpack(leaves[name])) == describe(tree)


def test_todays_code_restores_every_step_of_the_lineage():
    for step, attempt in EXPECTED["lineage"]:
        told = EXPECTED["steps"][f"{step}-{attempt}"]
        live = Golden()
        live.train(99)

        ftckpt.restore(RUN, live.state, step=step)
        found = live.expected()

        mine = {kind: {n: v for n, v in told[kind].items() if "@g0.1" not in n} for kind in told}
        if attempt == 3:  # two ranks saved what is each rank's own: one rank keeps what it has
            own = {"plain.mine.1@g0.0", "plain.mine@g0.0", "cursor.at@g0.0", "cursor@g0.0", "rng@g0.0"}
            mine = {kind: {n: v for n, v in mine[kind].items() if n not in own} for kind in mine}
            found = {kind: {n: v for n, v in found[kind].items() if n not in own} for kind in found}
        assert found == mine


def test_todays_code_finds_nothing_wrong_with_it():
    with ftckpt.open(RUN) as run:
        assert run.verify() == []
        assert {str(entry.status) for entry in run.entries()} == {
            "readable",
            "orphan",
            "aborted",
            "collected",
        }


# --- that it has everything -----------------------------------------------------------------------


def test_every_codec_chains_reuse_and_boxes_are_in_it(steps):
    codecs = sum((step.codecs for step in steps.values()), Counter[int]())
    newest = steps[At(6, 3)]
    fragments = read_fragments(LocalStore(RUN), look(LocalStore(RUN)).commits[Position(6, 3)])
    rows = [leaf for part in fragments for leaf in part.leaves if leaf.name == "sharded.rows"]

    assert set(codecs) == {0, 1, 2, 3}
    assert max(step.longest_chain for step in steps.values()) >= 2
    assert {key.split("/")[1] for key in newest.packs} == {"000001", "000003"}
    assert [box.offset for leaf in rows for box in leaf.boxes] == [(0, 0), (6, 0)]


def test_every_dtype_and_every_tag_is_in_it(steps):
    dtypes = {leaf.dtype for leaf in steps[At(0, 1)].leaves.values()}
    plain = describe(steps[At(6, 2)].trees["plain"]["tree"])
    assert plain == EXPECTED["plain"]
    assert dtypes == set(ITEMSIZE_BYTES)
    assert set(_tags(plain)) - {"float", "bytes"} == {
        *(
            "tuple",
            "dict",
            "OrderedDict",
            "Counter",
            "set",
            "frozenset",
            "deque",
            "complex",
            "range",
            "slice",
        ),
        *("numpy.dtype", "scalar", "array", "torch.dtype", "torch.Size", "torch.device", "tensor"),
    }
    assert str(2**200) in canonical(plain)


def _tags(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from node
        node = list(node.values())
    for item in node if isinstance(node, list) else ():
        yield from _tags(item)
