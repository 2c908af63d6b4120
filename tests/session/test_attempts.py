"""Two jobs of one run, and what a commit promises."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import ftckpt
from ftckpt.chaos.faults.store import Fault, FaultyStore, Pause
from ftckpt.elastic.launch import Launch
from ftckpt.errors import Fenced, SaveAborted
from ftckpt.events import JsonLines, both, silent
from ftckpt.store import open_store
from tests.session.toy import Heard, Toy, objects, run, straight
from tests.support.procs import wait_until

# --- a zombie ------------------------------------------------------------------------------------


def test_an_older_attempt_is_fenced_at_its_boundary_and_disturbs_nothing(tmp_path):
    """Two sessions of one run alive at once: the older writes on, is told, and stops; what it wrote is on
    no lineage; the newer trains to the same bits as a run that was alone."""
    old_toy, new_toy, heard = Toy(), Toy(seed=9), Heard()
    old = ftckpt.Session(tmp_path / "run", old_toy.state, save_every=1, keep=None, events=heard)
    with pytest.raises(Fenced) as fenced, old:
        steps = old.steps(until=100)
        for _ in range(5):
            old_toy.train(next(steps))
        wait_until(lambda: len(heard.named("save.committed")) == 5, 20, "steps 0 to 4 of the older")
        rng = torch.get_rng_state()
        new = ftckpt.Session(tmp_path / "run", new_toy.state, save_every=1, keep=None, events=silent)
        new.__enter__()
        assert new.attempt == 2 and new.restored.step == 4
        torch.set_rng_state(rng)
        for _ in range(95):
            old_toy.train(next(steps))
            wait_until(lambda: heard.named("save.failed") or heard.named("save.committed")[5:], 20)
        raise AssertionError("the older attempt was never told")

    assert fenced.value.attempt == 1 and fenced.value.newest == 2
    assert "no lineage" in str(fenced.value) and isinstance(fenced.value, RuntimeError)
    for step in new.steps(until=8):
        new_toy.train(step)
    new.__exit__(None, None, None)
    with ftckpt.open(tmp_path / "run") as found:
        lineage = [(commit.step, commit.attempt) for commit in found.commits()]
        assert lineage == [(8, 2), (7, 2), (6, 2), (5, 2), (4, 1), (3, 1), (2, 1), (1, 1), (0, 1)]
        orphans = {(e.at.step, e.at.attempt) for e in found.entries() if e.status == "orphan"}
        assert (5, 1) in orphans and all(attempt == 1 for _, attempt in orphans)
        assert found.verify() == []


@pytest.mark.parametrize("keep, outcome", [(None, "orphan"), (3, "aborted")])
def test_the_bits_of_the_newer_are_those_of_a_run_that_was_alone(tmp_path, keep, outcome):
    """The older's record arrives after the newer has trained on: too late to count, and, where the newer
    has collected, too late to exist.
    """
    pause, old_toy = Pause(), Toy()
    slow = Fault(pause, op="create", prefix="commits/000000000003-000001")
    store = FaultyStore(open_store(tmp_path / "run"), [slow])
    with pytest.raises(Fenced), ftckpt.Session("ignored", old_toy.state, store=store, events=silent) as old:
        for step in range(1, 4):
            old_toy.train(step)
            handle = old.save(step)
            if step < 3:
                handle.wait(20)
        assert pause.arrived.wait(20)

        newer = run(tmp_path / "run", 6, Toy(seed=9), keep=keep)

        pause.release()
        with pytest.raises((Fenced, SaveAborted)):
            handle.wait(20)
        old.save(4).wait(20)

    assert newer.bits() == straight(6).bits()
    with ftckpt.open(tmp_path / "run") as found:
        assert [(commit.step, commit.attempt) for commit in found.commits()][:2] == [(6, 2), (2, 1)]
        assert {e.status for e in found.entries() if e.at.attempt == 1 and e.at.step == 3} == {outcome}


def test_a_fenced_attempt_collects_nothing_of_the_newer_ones(tmp_path):
    """It learns that it is fenced from its handle, and again on leaving, if nobody asked the handle."""
    toy = Toy()
    with pytest.raises(Fenced, match="attempt 2 of"):  # noqa: SIM117
        with ftckpt.Session(tmp_path / "run", toy.state, keep=1, events=silent) as old:
            old.save(1).wait(20)
            run(tmp_path / "run", 3, Toy(seed=9), save_every=1, keep=5)
            before = objects(tmp_path / "run", "commits/", "packs/000002")
            with pytest.raises(Fenced):
                old.save(2).wait(20)
            old.save(3)

    assert set(before) <= set(objects(tmp_path / "run"))
    with ftckpt.open(tmp_path / "run") as found:
        assert found.latest().attempt == 2 and found.verify() == []


# --- guarantee classes ---------------------------------------------------------------------------


def guarantee_of(uri, **options) -> tuple[str, tuple[str, ...]]:
    run(uri, 1, **options)
    with ftckpt.open(uri) as found:
        return found.latest().guarantee, found.latest().why


def test_a_commit_says_how_exact_it_is_and_why_not_better(tmp_path):
    assert guarantee_of(tmp_path / "exact") == ("E1", ())
    torch.use_deterministic_algorithms(False)

    guarantee, why = guarantee_of(tmp_path / "fast")

    assert guarantee == "E3" and "use_deterministic_algorithms" in why[0]


def test_a_resume_is_never_called_better_than_what_it_went_on_from(tmp_path):
    torch.use_deterministic_algorithms(False)
    guarantee_of(tmp_path / "run")
    torch.use_deterministic_algorithms(True)

    run(tmp_path / "run", 2, Toy(seed=2))

    with ftckpt.open(tmp_path / "run") as found:
        assert found.latest().step == 2 and found.latest().guarantee == "E3"


def test_a_resume_says_its_class_aloud(tmp_path, caplog):
    run(tmp_path / "run", 1)
    heard, log = Heard(), tmp_path / "events"

    with log.open("w") as stream, caplog.at_level(logging.INFO, "ftckpt"):
        options = {"events": both(heard, JsonLines(stream))}
        with ftckpt.Session(tmp_path / "run", Toy().state, **options):
            pass
        with ftckpt.Session(tmp_path / "run", Toy().state):
            pass

    (told,) = heard.named("session.restored")
    assert told["guarantee"] == "E1" and told["step"] == 1
    assert [
        line["guarantee"] for line in map(json.loads, log.read_text().splitlines()) if "guarantee" in line
    ] == ["E1"]
    assert "guarantee=E1" in caplog.text


@pytest.mark.parametrize("derives, wanted", [(False, "E3"), (True, "E1")])
def test_generators_of_another_topology_are_reseeded_and_lower_the_class(tmp_path, derives, wanted):
    """Saved by rank 0 of group a, restored by group b: reseeded from (run seed, step, rank), said aloud;
    a trainer that derives its seeds loses nothing by it."""
    draws, heard = [], Heard()
    options = {"derives_seeds": derives, "events": heard}
    run(tmp_path / "run", 1, launch=Launch(group="a"), **options)
    for seed in (5, 6):
        toy = Toy(seed)
        with ftckpt.Session(tmp_path / "run", toy.state, launch=Launch(group="b"), step=1, **options):
            draws.append(torch.rand(4).tolist())

    assert draws[0] == draws[1], "the same (run seed, step, rank) gives the same draws"
    told = heard.named("session.restored")
    assert [event["guarantee"] for event in told] == [wanted, wanted]
    assert all("random" in str(event["notes"]) or "rng" in str(event["notes"]) for event in told)
    toy = Toy(seed=7)
    run(tmp_path / "run", 3, toy, launch=Launch(group="b"), **options)
    with ftckpt.open(tmp_path / "run") as found:
        assert found.latest().step == 3 and found.latest().guarantee == wanted
        assert bool(found.latest().why) is not derives
