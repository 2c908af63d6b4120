"""What a person can get wrong: one clear error each, of a kind they would catch, and nothing lost."""

from __future__ import annotations

import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import ftckpt
from ftckpt.elastic import Launch
from ftckpt.errors import (
    AccessDenied,
    FtckptError,
    NoCommit,
    RunNotFound,
    SaveFailed,
    SettingsError,
    StateMismatch,
    StepNotFound,
    StoreFull,
    UnknownFormat,
    UnsupportedValue,
)
from ftckpt.events import silent
from ftckpt.manifest import RunRecord, encode
from tests.session.toy import Heard, Toy, objects, straight
from tests.support.procs import run_ranks, wait_until


def enter(uri, state=None, **options):
    toy = Toy(seed=9)
    with ftckpt.Session(uri, toy.state if state is None else state, events=silent, **options) as session:
        return session.restored, toy


# --- addresses, steps, settings ------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["", "  ", "s3://", "file://x"])
def test_an_address_without_a_meaning_is_refused(uri):
    with pytest.raises(SettingsError) as refusal:
        enter(uri)
    assert isinstance(refusal.value, ValueError)


def test_with_on_empty_error_an_address_without_a_run_is_refused(tmp_path):
    for uri in (tmp_path, tmp_path / "rnu", f"memory://{tmp_path.name}"):
        with pytest.raises(RunNotFound, match="may be mistyped") as refusal:
            enter(uri, on_empty="error")
        assert isinstance(refusal.value, FileNotFoundError)
    assert list(tmp_path.iterdir()) == []


def test_an_absent_step_is_refused_and_no_attempt_is_claimed(two_steps):
    before = objects(two_steps)
    with pytest.raises(StepNotFound, match="readable steps, newest first: 20, 10, 0") as refusal:
        enter(two_steps, step=15)
    assert isinstance(refusal.value, LookupError) and objects(two_steps) == before


@pytest.mark.parametrize(
    "options",
    [
        {"save_every": 0},
        {"save_every": 1.5},
        {"keep": 0},
        {"keep": -1},
        {"on_empty": "anew"},
        {"stage": "lazy!"},
        {"deadline_s": 0},
        {"max_failed_saves": True},
        {"codec": "lz4"},
        {"chunk_bytes": -1},
        {"tiers": [None]},
        {"tiers": [1]},
        {"tiers": "/dev/shm/run"},
        {"tiers": 3},
        {"store_options": "x"},
        {"store_options": []},
        {"budget": 3},
        {"clock": 3},
        {"launch": 3},
        {"store": 3},
        {"replica_group": 3},
        {"yield_to": 3},
        {"events": None},
        {"rename": 3},
        {"start_agent": "no"},
        {"allow_unconditional": 1},
        {"derives_seeds": 0},
        {"verify_snapshot": "x"},
        {"check_replicas": "x"},
        {"fallback": "x"},
    ],
    ids=str,
)
def test_a_setting_without_a_meaning_is_refused_before_anything_is_opened(tmp_path, options):
    with pytest.raises(SettingsError) as refusal:
        ftckpt.Session(tmp_path / "run", {}, **options)
    assert isinstance(refusal.value, ValueError)
    assert next(iter(options)).split("_")[0] in str(refusal.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("state", [None, [], torch.nn.Linear(2, 2), torch.ones(2)], ids=repr)
def test_a_state_that_names_nothing_is_refused_with_an_example(two_steps, state):
    before = objects(two_steps)
    for use in (lambda: ftckpt.Session(two_steps, state), lambda: ftckpt.restore(two_steps, state)):
        with pytest.raises(SettingsError, match=r'\{"actor": model') as refusal:
            use()
        assert type(state).__name__ in str(refusal.value) and len(str(refusal.value).splitlines()) == 2
    assert objects(two_steps) == before


@pytest.mark.parametrize(
    "options",
    [
        {"uri": 3},
        {"uri": b"/tmp"},
        {"only": 3},
        {"rename": 3},
        {"strict": "no"},
        {"tiers": None},
        {"tiers": [1]},
        {"store_options": "x"},
        {"events": 3},
        {"progress": 3},
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused_by_restore_and_open(two_steps, options):
    with pytest.raises(SettingsError, match=next(iter(options))):
        ftckpt.restore(**{"uri": two_steps, "state": {}} | options)
    if {"uri", "store_options"} & set(options):
        with pytest.raises(SettingsError, match=next(iter(options))):
            ftckpt.open(**{"uri": str(two_steps)} | options)


def test_a_component_may_not_have_the_name_of_the_sessions_own(tmp_path):
    with pytest.raises(SettingsError, match="ftckpt"):
        ftckpt.Session(tmp_path, {"ftckpt": 1})
    with pytest.raises(UnsupportedValue, match="rng"):
        enter(tmp_path / "run", {"rng": 1})
    assert not (tmp_path / "run").exists()


# --- folders -------------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, options: str):
    """A file system of its own at ``folder``; skips where mounting is not allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_read_only_folder_is_one_clear_error_and_can_still_be_read(two_steps, tmp_path):
    with mounted(tmp_path / "ro", "size=8m"):
        folder = Path(shutil.copytree(two_steps, tmp_path / "ro" / "run"))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "ro")], check=True)
        before = objects(folder)

        with pytest.raises(AccessDenied) as refusal:
            enter(folder)

        assert isinstance(refusal.value, PermissionError) and isinstance(refusal.value, OSError)
        toy = Toy(seed=9)
        assert ftckpt.restore(folder, toy.state).step == 20
        assert toy.tensors()["actor.0.weight"].equal(straight(20).tensors()["actor.0.weight"])
        assert objects(folder) == before


def test_a_full_disk_costs_the_save_and_neither_the_training_nor_the_commit_before(tmp_path):
    """K7: no space at a save: told with its reason, the previous step intact; with room again it goes on."""
    with mounted(tmp_path / "disk", "size=1m"):
        folder, heard, state = tmp_path / "disk" / "run", Heard(), {"t": torch.arange(2000.0)}
        ballast = tmp_path / "disk" / "ballast"
        with ftckpt.Session(folder, state, save_every=1, keep=1, codec="raw", events=heard) as session:
            wait_until(lambda: heard.named("save.committed"), 20, "step 0")
            fill(ballast)
            for step in session.steps(until=5):
                state["t"] += step
                if step == 2:
                    wait_until(lambda: heard.named("save.failed"), 20, "a save to fail")
                    (told, *_) = heard.named("save.failed")
                    with ftckpt.open(folder) as found:
                        assert found.latest().step == 0 and found.verify() == []
                    ballast.unlink()

        assert "space" in told["error"]
        with ftckpt.open(folder) as found:
            assert found.latest().step == 5 and found.verify() == []
        restored = {"t": torch.zeros(2000)}
        ftckpt.restore(folder, restored)
        assert torch.equal(restored["t"], torch.arange(2000.0) + 15)


@pytest.mark.timeout(60)
def test_a_disk_that_goes_away_costs_the_saves_and_not_the_training(tmp_path):
    """The run's folder is behind a link, as to a mounted disk: what cannot be made again is told at once."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    toy, heard = Toy(), Heard()
    session = ftckpt.Session(tmp_path / "runs" / "one", toy.state, save_every=1, keep=None, events=heard)
    with session:
        for step in session.steps(until=8):
            toy.train(step)
            if step == 2:
                wait_until(lambda: heard.named("save.committed"), 20, "a commit")
                (tmp_path / "disk").rename(tmp_path / "gone")
            if step == 4:
                wait_until(lambda: heard.named("save.failed"), 20, "a save to fail")
                (tmp_path / "gone").rename(tmp_path / "disk")

    assert any("is its disk mounted?" in event["error"] for event in heard.named("save.failed"))
    with ftckpt.open(tmp_path / "runs" / "one") as found:
        assert found.commits()[0].step == 8 and found.verify() == []


def test_a_full_disk_at_the_last_save_is_raised(tmp_path):
    with mounted(tmp_path / "disk", "size=1m"):
        folder, state = tmp_path / "disk" / "run", {"t": torch.arange(2000.0)}
        with pytest.raises(SaveFailed) as failure:  # noqa: SIM117
            with ftckpt.Session(folder, state, codec="raw", events=silent) as session:
                for _ in session.steps(until=3):
                    state["t"] += 1
                    session._at.handle.wait(20)  # step 0 is there before the disk is full
                    fill(tmp_path / "disk" / "ballast")

        assert isinstance(failure.value.__cause__, StoreFull) and isinstance(failure.value, RuntimeError)
        with ftckpt.open(folder) as found:
            assert found.latest().step == 0 and found.verify() == []


def fill(path: Path) -> None:
    """Write until there is no space left."""
    with path.open("ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(b"\0" * 512)
        except OSError:
            pass


# --- formats and values --------------------------------------------------------------------------


def test_a_run_of_a_newer_format_is_refused_by_every_way_in(two_steps):
    (two_steps / "run.json").write_bytes(encode(RunRecord(format=2, run="later")))
    before = objects(two_steps)

    for act in (enter, ftckpt.open, lambda uri: ftckpt.restore(uri, Toy().state)):
        with pytest.raises(UnknownFormat) as refusal:
            act(two_steps)
        assert isinstance(refusal.value, ValueError) and "2" in str(refusal.value)
    assert objects(two_steps) == before


class Point(NamedTuple):
    x: int
    y: int


UNSUPPORTED = {
    "a generator": (lambda: {"a": {"deep": [1, iter(())]}}, "a.deep.1"),
    "a function": (lambda: {"a": {"f": lambda: 1}}, "a.f"),
    "a lock": (lambda: {"a": {"lock": threading.Lock()}}, "a.lock"),
    "an object": (lambda: {"a": {"object": object()}}, "a.object"),
    "a named tuple": (lambda: {"a": Point(1, 2)}, "a"),
    "a class": (lambda: {"a": {"kind": Point}}, "a.kind"),
    "a quantised tensor": (
        lambda: {"a": {"t": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}},
        "a.t",
    ),
    "a sparse tensor": (lambda: {"a": {"t": torch.ones(2).to_sparse()}}, "a.t"),
    "a tensor without memory": (lambda: {"a": {"t": torch.ones(2, device="meta")}}, "a.t"),
    "a module inside a value": (lambda: {"a": {"m": torch.nn.Linear(1, 1)}}, "a.m"),
    "an optimizer of nobody's parameters": (
        lambda: {"optim": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)},
        "optim.param_groups.0.params.0",
    ),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_saved_is_refused_by_its_full_name_before_anything_is_written(tmp_path, what):
    make, leaf = UNSUPPORTED[what]

    with pytest.raises(UnsupportedValue) as refusal:
        enter(tmp_path / "run", make())

    assert refusal.value.leaf == leaf and leaf in str(refusal.value)
    assert isinstance(refusal.value, TypeError)
    assert not (tmp_path / "run").exists()


def test_a_value_that_turns_unsupported_later_stops_the_save_and_leaves_the_commits(tmp_path):
    toy = Toy()
    with pytest.raises(UnsupportedValue, match=r"buffer\.log\.0"):  # noqa: SIM117
        with ftckpt.Session(tmp_path / "run", toy.state, events=silent) as session:
            session.save(1).wait(20)
            toy.state["buffer"]["log"].append(object())
            session.save(2)

    with ftckpt.open(tmp_path / "run") as found:
        assert [commit.step for commit in found.commits()] == [1, 0] and found.verify() == []


def test_a_state_of_another_shape_is_refused_by_every_name_and_nothing_changes(two_steps):
    toy = Toy(seed=9, width=7)
    before = toy.bits()

    with pytest.raises(StateMismatch) as refusal, ftckpt.Session(two_steps, toy.state, events=silent):
        pass

    assert isinstance(refusal.value, ValueError)
    assert {line.split(":")[0] for line in refusal.value.changed} >= {"actor.0.weight", "actor.2.weight"}
    assert toy.bits() == before


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_missing_and_extra_components_are_refused_by_name(two_steps, change):
    toy = Toy(seed=9)
    if change == "missing":
        toy.state["critic"] = {"t": torch.zeros(1)}
    else:
        del toy.state["cursor"]
    name = {"missing": "critic", "extra": "cursor"}[change]
    before = toy.bits()

    with pytest.raises(StateMismatch, match=name), ftckpt.Session(two_steps, toy.state, events=silent):
        pass

    assert toy.bits() == before


def test_a_run_without_a_commit_is_refused_when_only_a_resume_was_meant(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes(encode(RunRecord(format=1, run="empty")))

    with pytest.raises(NoCommit) as refusal:
        enter(tmp_path / "run", on_empty="error")

    assert isinstance(refusal.value, LookupError)
    assert objects(tmp_path / "run") == ["run.json"]


def test_a_step_is_saved_once_and_steps_only_go_up(tmp_path):
    with ftckpt.Session(tmp_path / "run", {"n": {"x": 1}}, events=silent) as session:
        session.save(2).wait(20)
        for step in (2, 1, 0):
            with pytest.raises(SaveFailed, match="cannot be saved after step 2"):
                session.save(step)
        assert session.save(3).wait(20).step == 3


def test_every_refusal_is_an_error_of_ftckpt(two_steps):
    """One ``except`` catches them all."""
    assert all(
        issubclass(kind, FtckptError)
        for kind in (AccessDenied, NoCommit, RunNotFound, SaveFailed, SettingsError, StateMismatch)
    )
    with pytest.raises(FtckptError):
        enter(two_steps, step=10**9)


# --- misuse that must not be silent ---------------------------------------------------------------


@pytest.mark.parametrize("step", ["x", True, -1, 10**30, 1.5])
def test_a_step_that_is_no_step_is_refused_at_the_call(tmp_path, step):
    with ftckpt.Session(tmp_path / "run", {"t": torch.ones(2)}) as session:
        with pytest.raises(SettingsError, match="cannot be saved"):
            session.save(step)
        session.save(1).wait(30)

    assert ftckpt.open(str(tmp_path / "run")).latest().step == 1


def test_a_session_that_is_not_entered_says_so(tmp_path):
    with pytest.raises(ftckpt.FtckptError, match="as a context"):
        ftckpt.Session(tmp_path / "run", {"t": torch.ones(2)}).save(1)


@pytest.mark.timeout(150)
def test_a_fork_of_the_process_that_entered_is_told_so_and_leaves_the_run_alone(tmp_path):
    """No thread of the session lives there: what would wait for one is refused, and nothing is written."""
    gang = run_ranks("tests/ranks/session_in_a_fork.py", 1, tmp_path, timeout_s=140).check()

    (told,) = gang.outputs
    for what in ("save", "wait", "steps", "attempt", "yielding"):
        assert f"{what}: NotEntered: " in told, told
    assert "optimizer step: fine" in told and "left\n" in told and "child 0" in told, told
    assert steps_of(tmp_path / "run") == [3, 2, 1, 0]


def steps_of(folder: Path) -> list[int]:
    with ftckpt.open(folder) as found:
        assert found.verify() == []
        return [commit.step for commit in found.commits()]


def test_a_supervised_session_saves_to_the_run_it_was_started_for_and_no_other(tmp_path):
    """A copied run keeps its command, which names the original: attempts must not cross."""
    for name in ("original", "copy"):
        with ftckpt.Session(tmp_path / name, {"t": torch.ones(2)}) as session:
            session.save(1).wait(30)
    launch = Launch(run=str(tmp_path / "copy"), attempt=1)

    with pytest.raises(SettingsError, match="started for the run"):
        ftckpt.Session(tmp_path / "original", {"t": torch.ones(2)}, launch=launch).__enter__()


def test_threads_that_save_at_once_never_harm_a_commit(tmp_path):
    """Lower steps that come late are refused; what is offered verifies."""
    refused = []

    def save(session, step):
        try:
            session.save(step)
        except SaveFailed as error:
            refused.append(error)

    with ftckpt.Session(tmp_path / "run", {"t": torch.ones(2)}, keep=2) as session:
        threads = [threading.Thread(target=save, args=(session, step)) for step in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run = ftckpt.open(str(tmp_path / "run"))
    assert run.verify() == []
    assert run.latest().step == 8 - len([e for e in refused if e.facts["step"] == 8])


def test_verify_names_a_byte_that_only_a_collected_step_needed_and_records_that_are_gone(tmp_path):
    frozen, moving = torch.arange(4096.0), torch.zeros(4096)
    with ftckpt.Session(tmp_path / "run", {"f": frozen, "m": moving}, keep=1, codec="raw") as session:
        for step in (1, 2, 3):
            moving.normal_()
            session.save(step).wait(30)
    run = ftckpt.open(str(tmp_path / "run"))
    assert run.verify() == []
    pack = next((tmp_path / "run" / "packs/000001/000000000000").iterdir())
    body = bytearray(pack.read_bytes())
    hole = bytes(4096 * 4)
    at = bytes(body).find(hole)
    assert at >= 0, "step 0 stored the zeros that nothing needs any more"
    body[at + 100] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(body)

    assert [problem.key for problem in run.verify()] == [f"packs/000001/000000000000/{pack.name}"]

    (tmp_path / "run/starts/000001").unlink()
    assert "starts/000001" in [problem.key for problem in run.verify()]
