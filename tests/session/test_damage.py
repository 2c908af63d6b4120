"""Bytes that changed in the store: a restore refuses, and no live tensor ever holds a wrong value."""

from __future__ import annotations

import pickle  # noqa: TID251 - to see that nobody reads it
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.errors import CorruptError, FtckptError, RestoreIncomplete
from ftckpt.events import silent
from ftckpt.reader import read_fragments
from tests.session.toy import Toy, copy_with, objects, of_step, run, straight

TRIALS = 200


def test_no_flipped_or_cut_byte_ever_shows_in_the_live_state(tmp_path):
    """Every object of a run again and again, one byte flipped or the rest cut off at a random place.
    What the newest step needs is refused; what it does not need changes nothing. After a refusal every
    element is as it was before or as it was saved, plain values are as they were, and no
    ``load_state_dict`` was called."""
    folder, draw = tmp_path / "run", random.Random(20)
    run(folder, 20, chunk_bytes=256)
    saved, refusals = straight(20), []
    keys = objects(folder)
    needed = set(of_step(folder, 20)) | {"run.json"} | set(objects(folder, "starts"))
    toy = Toy(seed=9)
    before, plain = {n: t.clone() for n, t in toy.tensors().items()}, toy.plain()
    for trial in range(TRIALS):
        key = keys[trial % len(keys)]
        whole = (folder / key).read_bytes()
        (folder / key).write_bytes(damaged(whole, draw))
        try:
            ftckpt.restore(folder, toy.state)
        except FtckptError as error:
            refusals.append((key, error))
            for name, tensor in toy.tensors().items():
                assert same_or_saved(tensor, before.get(name), saved.tensors()[name]), (key, name)
            assert toy.plain() == plain and toy.cursor.loads == 0, key
        else:
            assert key not in needed or is_of_the_session_alone(folder, key), key
            assert {k: v for k, v in toy.bits().items() if k != "rng"} == {
                k: v for k, v in saved.bits().items() if k != "rng"
            }
            toy = Toy(seed=9)
        finally:
            (folder / key).write_bytes(whole)
        with torch.no_grad():
            for name, tensor in toy.tensors().items():
                tensor.copy_(before[name])

    incomplete = [error for _, error in refusals if isinstance(error, RestoreIncomplete)]
    assert incomplete and all(set(e.components) <= {"actor", "optim", "buffer"} for e in incomplete)
    assert {key for key, _ in refusals} >= needed - {"run.json"}


def is_of_the_session_alone(folder: Path, key: str) -> bool:
    """Whether what is damaged is the state of generators, or a session's own: nothing that this restores."""
    with ftckpt.open(folder) as found:
        problems = [problem for problem in found.verify(20) if problem.key == key]
    leaves = {problem.error.facts.get("leaf") for problem in problems}
    return bool(leaves) and leaves <= {"rng@g0.0", "ftckpt"}


def damaged(whole: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(whole))
    if draw.random() < 0.3:
        return whole[:at]
    return whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :]


def same_or_saved(tensor: torch.Tensor, before: torch.Tensor | None, saved: torch.Tensor) -> bool:
    old = torch.zeros_like(tensor) if before is None else before
    return bool(((tensor == old) | (tensor == saved)).all())


def test_a_session_whose_restore_broke_off_is_not_entered(tmp_path):
    """It names what it had begun to overwrite, refuses to be used, and a fall-back restores all of it."""
    folder, toy = tmp_path / "run", Toy(seed=9)
    run(folder, 20, chunk_bytes=256)
    (key,) = [key for key in of_step(folder, 20) if key.startswith("packs")]
    body = bytearray((folder / key).read_bytes())
    where = last_chunk_of_tensors(folder)
    body[where] ^= 1
    (folder / key).write_bytes(bytes(body))
    plain = toy.plain()

    session = ftckpt.Session(folder, toy.state, events=silent)
    with pytest.raises(RestoreIncomplete) as refusal, session:
        raise AssertionError("entered")

    assert set(refusal.value.components) & {"actor", "buffer", "optim"} and refusal.value.step == 20
    assert isinstance(refusal.value, RuntimeError) and isinstance(refusal.value.__cause__, CorruptError)
    assert toy.plain() == plain and toy.cursor.loads == 0
    for act in (lambda: session.save(1), lambda: next(session.steps(until=99)), lambda: session.attempt):
        with pytest.raises(RuntimeError, match="use a Session as a context"):
            act()
    with ftckpt.Session(folder, toy.state, events=silent, fallback=True) as session:
        assert session.restored.step == 10 and toy.bits() == straight(10).bits()


def last_chunk_of_tensors(folder: Path) -> int:
    """A byte of the last chunk in the newest pack that belongs to a tensor."""
    with ftckpt.open(folder) as found:
        fragments = read_fragments(found.store, found.latest())
    chunks = [
        chunk
        for fragment in fragments
        for leaf in fragment.leaves
        if leaf.kind == "tensor"
        for box in leaf.boxes
        for chunk in box.chunks
        if fragment.packs[chunk.pack].key.startswith("packs/000001/000000000020")
    ]
    return max(chunk.offset for chunk in chunks)


# --- N1 ------------------------------------------------------------------------------------------


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_in_place_of_any_object_runs_nothing(two_steps, tmp_path):
    """N1: every object of the run in turn: load, look, verify and resume refuse or do not need it."""
    trap = tmp_path / "it-ran"
    for protocol in (2, 5):
        body = pickle.dumps(Payload(trap), protocol)
        for key in objects(two_steps):
            folder = copy_with(two_steps, tmp_path / "copy", key, body)
            needed = key in {*of_step(two_steps, 20), "run.json"}
            for act in (restore, look, verify, enter):
                refused = False
                with suppress(FtckptError):
                    refused = True
                    act(folder)
                    refused = False
                assert refused or not needed or act in (look, verify), (key, act)
    assert not trap.exists()


def restore(folder):
    ftckpt.restore(folder, Toy().state)


def look(folder):
    with ftckpt.open(folder) as found:
        found.entries()
        found.attempts()
        found.leaves()
        found.tensor("actor.0.weight")


def verify(folder):
    with ftckpt.open(folder) as found:
        assert found.verify()


def enter(folder):
    with ftckpt.Session(folder, Toy().state, events=silent):
        pass
