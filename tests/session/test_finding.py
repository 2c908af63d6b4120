"""Kind A of the cases: a step is readable as a whole or not at all, and nothing begins anew in silence."""

from __future__ import annotations

import shutil

import pytest

import ftckpt
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore
from ftckpt.errors import (
    AccessDenied,
    CorruptError,
    FtckptError,
    NoCommit,
    RunNotFound,
    SaveError,
    StepNotFound,
    StoreFull,
)
from ftckpt.store import open_store
from tests.session.toy import Heard, Toy, copy_with, objects, of_step, run, straight


@pytest.fixture(scope="module")
def reference() -> dict[int, dict]:
    return {step: straight(step).bits() for step in (0, 10, 20)}


def enter(uri, **options):
    """What a fresh process finds live after entering: its bits, what it went on from, what it heard."""
    toy, heard = Toy(seed=9), Heard()
    with ftckpt.Session(uri, toy.state, events=heard, **options) as session:
        return toy.bits(), session.restored, heard


def damages(folder, step):
    """Every object of a step: gone, cut in half, empty, and with a tail."""
    for key in of_step(folder, step):
        whole = (folder / key).read_bytes()
        for body in (None, whole[: len(whole) // 2], b"", whole + b"\n"):
            if body is not None or not key.startswith("commits"):
                yield key, body


def test_a_damaged_newest_step_is_an_error_that_names_the_next_older_good_one(two_steps, tmp_path):
    """A1, A8: without leave to fall back, a step that cannot be read is never passed over."""
    for key, body in damages(two_steps, 20):
        folder = copy_with(two_steps, tmp_path / "copy", key, body)
        before = objects(folder)

        with pytest.raises(CorruptError) as refusal:
            enter(folder)

        assert refusal.value.step == 20, key
        assert "step 10 is the next older one" in str(refusal.value)
        assert objects(folder) == before, "a refusal claims no attempt"


def test_with_fallback_the_older_step_is_restored_and_what_was_skipped_is_told(
    two_steps, tmp_path, reference
):
    """A1: for every object of step 20, missing or cut: step 10 is loaded, step 20 reported with the reason."""
    for key, body in damages(two_steps, 20):
        folder = copy_with(two_steps, tmp_path / "copy", key, body)

        bits, restored, heard = enter(folder, fallback=True)

        assert restored.step == 10 and bits == reference[10], key
        (begun,) = heard.named("attempt.begun")
        assert [line.split(":")[0] for line in begun["skipped"]] == ["step 20"], (key, begun)


def test_a_step_without_its_commit_record_never_was(two_steps, tmp_path, reference):
    """A1, A2: packs and fragments without the record, which is written last, are not a step."""
    (key,) = [key for key in of_step(two_steps, 20) if key.startswith("commits")]
    folder = copy_with(two_steps, tmp_path / "copy", key, None)

    with ftckpt.open(folder) as found:
        assert [commit.step for commit in found.commits()] == [10, 0]
    bits, restored, _ = enter(folder)

    assert restored.step == 10 and bits == reference[10]


def test_no_component_is_ever_taken_from_another_step(two_steps, tmp_path, reference):
    """A3, A9: data position and weights come from one commit. The newest step loses the part that holds
    the cursor; a newer one that was never committed has a cursor of its own."""
    shutil.copytree(two_steps / "packs/000001/000000000020", two_steps / "packs/000001/000000000021")
    shutil.copytree(two_steps / "fragments/000001/000000000020", two_steps / "fragments/000001/000000000021")
    bits, restored, _ = enter(shutil.copytree(two_steps, tmp_path / "uncommitted"))
    assert restored.step == 20 and bits == reference[20]

    (key,) = [key for key in of_step(two_steps, 20) if key.startswith("packs")]
    folder = copy_with(two_steps, tmp_path / "copy", key, None)
    toy = Toy(seed=9)
    before = toy.bits()
    with pytest.raises(CorruptError), ftckpt.Session(folder, toy.state):
        pass
    assert toy.bits() == before and toy.cursor.loads == 0


def test_whoever_restores_a_part_gets_it_from_one_commit_too(two_steps, reference):
    """A9: components that are asked for one by one come from the commit that was named."""
    for step in (10, 20):
        actor, cursor = Toy(seed=9), Toy(seed=9)
        ftckpt.restore(two_steps, {"actor": actor.actor}, step=step)
        ftckpt.restore(two_steps, {"cursor": cursor.cursor}, step=step)

        assert cursor.plain()["cursor"] == reference[step]["cursor"]
        names = [name for name in reference[step] if name.startswith("actor.")]
        assert {name: actor.bits()[name] for name in names} == {n: reference[step][n] for n in names}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("store", ["folder", "memory", "file"])
def test_the_step_found_afterwards_is_the_last_one_saved(tmp_path, store, codec, wait):
    """A5: however it was saved, nothing has to be written, moved or renamed to make it the latest."""
    uri = {
        "folder": tmp_path / "run",
        "memory": f"memory://{tmp_path.name}-{codec}-{wait}",
        "file": f"file://{tmp_path}/run",
    }[store]
    toy = Toy()
    with ftckpt.Session(uri, toy.state, codec=codec) as session:
        for step in range(1, 4):
            toy.train(step)
            handle = session.save(step)
            if wait:
                assert handle.wait(30).step == step

    bits, restored, _ = enter(uri)

    assert restored.step == 3 and bits == toy.bits()


def test_an_explicit_step_is_restored_as_it_was(two_steps, reference):
    bits, restored, _ = enter(two_steps, step=10)

    assert restored.step == 10 and bits == reference[10]
    with ftckpt.open(two_steps) as found:
        assert {(e.at.step, e.status) for e in found.entries()} >= {(10, "readable"), (20, "orphan")}


def test_a_copied_run_is_complete_wherever_it_lies(two_steps, tmp_path, s3, reference):
    """A6: the proof of completeness travels with the bytes: folder to bucket and back."""
    bucket = s3.uri(f"copied-{tmp_path.name}")
    for source, goal in ((str(two_steps), bucket), (bucket, str(tmp_path / "back"))):
        copy_store(source, goal)
        with ftckpt.open(goal) as found:
            assert [commit.step for commit in found.commits()] == [20, 10, 0]
            assert found.verify() == []

    bits, restored, heard = enter(str(tmp_path / "back"), keep=1)

    assert restored.step == 20 and bits == reference[20]
    assert not heard.named("gc.failed")
    assert enter(bucket)[0] == reference[20]


def copy_store(source, goal) -> None:
    here, there = open_store(source), open_store(goal)
    for prefix in sorted({key.partition("/")[0] for key in (info.key for info in here.scan(""))}):
        for info in here.scan("" if prefix == "run.json" else prefix):
            if info.key.partition("/")[0] == prefix:
                there.create(info.key, bytes(here.read(info.key)))
    here.close()
    there.close()


# --- A7: nothing valid is found ------------------------------------------------------------------


def test_an_empty_folder_begins_anew_only_with_leave_and_aloud(tmp_path):
    """A7 (i)"""
    with pytest.raises(RunNotFound, match="no run at"):
        enter(tmp_path / "run", on_empty="error")
    assert not (tmp_path / "run").exists()

    _, restored, heard = enter(tmp_path / "run")

    assert restored is None and heard.named("run.new")


@pytest.mark.parametrize("on_empty", ["start", "error"])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_run_with_only_broken_steps_is_an_error(two_steps, on_empty, fallback):
    """A7 (ii): commits that exist but cannot be read are never taken for none."""
    for key in objects(two_steps, "commits"):
        (two_steps / key).write_bytes(b"")
    before = objects(two_steps)

    with pytest.raises(CorruptError):
        enter(two_steps, on_empty=on_empty, fallback=fallback)

    assert objects(two_steps) == before


@pytest.mark.parametrize("on_empty", ["start", "error"])
def test_an_absent_step_is_an_error_that_lists_those_there_are(two_steps, tmp_path, on_empty):
    """A7 (iii)"""
    with pytest.raises(StepNotFound, match="20, 10, 0") as refusal:
        enter(two_steps, step=99, on_empty=on_empty)
    assert isinstance(refusal.value, LookupError) and refusal.value.step == 99

    with pytest.raises((RunNotFound, StepNotFound)):
        enter(tmp_path / "absent", step=99, on_empty=on_empty)
    with pytest.raises(StepNotFound):
        ftckpt.restore(two_steps, {"actor": Toy().actor}, step=99)


def test_a_mistyped_address_is_an_error_and_stays_empty(tmp_path):
    """A7 (iv)"""
    for act in (
        lambda uri: enter(uri, on_empty="error"),
        ftckpt.open,
        lambda uri: ftckpt.restore(uri, {"actor": Toy().actor}),
    ):
        with pytest.raises(RunNotFound) as refusal:
            act(tmp_path / "rnu")
        assert isinstance(refusal.value, FileNotFoundError)
        assert list(tmp_path.iterdir()) == []


def test_a_run_whose_every_save_failed_has_no_commit_and_says_so(tmp_path):
    """A7: claimed and begun, yet nothing readable: anew with leave, and aloud."""
    store = FaultyStore(open_store(tmp_path / "run"), [Fault(Fail(error=StoreFull("full")), prefix="packs")])
    toy = Toy()
    with pytest.raises(SaveError), ftckpt.Session("ignored", toy.state, store=store):
        pass

    with pytest.raises(NoCommit):
        enter(tmp_path / "run", on_empty="error")
    _, restored, heard = enter(tmp_path / "run")

    assert restored is None and heard.named("run.anew")


# --- A8: writes that fail half-way ---------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [StoreFull, AccessDenied])
def test_a_failed_write_at_any_point_leaves_the_step_before(tmp_path, when, error, reference):
    """A8, K1: the n-th create of the save of step 20 fails, for every n: the step before it loads, or,
    where only the answer was lost, the new one."""
    clean = tmp_path / "clean"
    run(clean, 10)
    counted = save_20(shutil.copytree(clean, tmp_path / "counted"), [])
    creates = [call for call in counted.log if call.op == "create" and of_20(call.key)]
    assert len(creates) == 3, creates

    for nth, call in enumerate(creates, 1):
        folder = shutil.copytree(clean, tmp_path / f"run-{nth}")
        fault = Fault(Fail(when, error(f"injected: {call.key}")), op="create", prefix=call.key.split("/")[0])
        save_20(folder, [fault])

        bits, restored, _ = enter(folder)

        assert restored.step in ((10,) if when == "before" else (10, 20)), call
        assert bits == reference[restored.step]


def of_20(key: str) -> bool:
    return "000000000020" in key


def save_20(folder, plan) -> FaultyStore:
    """Go on to step 20 and save it, on a store that fails once training has begun."""
    toy, store = Toy(seed=9), FaultyStore(open_store(folder))
    try:
        with ftckpt.Session("ignored", toy.state, store=store, keep=1, deadline_s=60) as session:
            for step in session.steps(until=20):
                toy.train(step)
                if step == 20:
                    store.plan = plan
    except FtckptError:
        pass
    return store
