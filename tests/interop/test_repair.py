"""Repair: what is brought back, what is not, and what a death at any call leaves."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import pytest

import ftckpt
from ftckpt.attempts import look
from ftckpt.chaos.faults.store import Call, Crash, Fault, FaultyStore
from ftckpt.clock import HandClock
from ftckpt.copying import copy
from ftckpt.errors import NotSameRun, ObjectDamaged, RunNotFound
from ftckpt.events import silent
from ftckpt.manifest import Commit, Fragment, Position, RunRecord, decode, encode
from ftckpt.repair import Mended, Repaired, repair
from ftckpt.run import Run
from ftckpt.store import open_store
from ftckpt.store.api import ObjectStore
from ftckpt.store.retry import RetryStore
from tests.protocol.test_crash_points import Meet, each_way, every_call
from tests.protocol.test_damage import damaged
from tests.protocol.world import Saver, read_all, run_of, start_job, state_at
from tests.support.stores import Sim


@dataclass
class Pair:
    """A run and a copy of it. ``whole`` is what the run was before anybody broke it."""

    run: Sim
    copy: Sim
    whole: dict[str, bytes]

    def repair(self, *sources: ObjectStore, step: int | None = None) -> Repaired:
        return repair(self.run.store, sources or [self.copy.store], step=step)

    def only(self, prefix: str) -> str:
        """The one key that begins so."""
        (key,) = [key for key in self.whole if key.startswith(prefix)]
        return key


@pytest.fixture
def pair() -> Pair:
    """Attempt 1 saved 0 and 1, attempt 2 saved 2."""
    sim, other = Sim(), Sim()
    run_of(sim.store, HandClock(), 0, 1)
    run_of(sim.store, HandClock(), 2)
    copy(sim.store, other.store)
    return Pair(sim, other, dict(sim.objects))


def is_whole(sim: Sim) -> bool:
    seen = look(sim.store)
    return Run(sim.store).verify() == [] and all(
        read_all(sim.store, seen.commits[at]) == state_at(at.step) for at in seen.lineage
    )


REPAIRABLE = ("run.json", "attempts/", "starts/", "commits/", "fragments/", "packs/")


def test_nothing_to_repair_changes_nothing(pair):
    assert pair.repair() == Repaired((), ())
    assert pair.run.objects == pair.whole


@pytest.mark.parametrize("kind", REPAIRABLE)
def test_an_object_that_is_damaged_anywhere_is_brought_back_byte_for_byte(pair, kind):
    """One byte flipped, or cut, at random places. What is not named by the digest of another record, and
    of which neither body nor seal is left, is proven by what it shares with others."""
    draw = Random(kind)
    for key in [key for key in pair.whole if key.startswith(kind)]:
        for _ in range(4):
            pair.run.objects[key] = damaged(pair.whole[key], draw)

            done = pair.repair()

            assert done == Repaired((Mended(key, "sim://run"),), ()), key
            assert pair.run.objects == pair.whole


@pytest.mark.parametrize("kind", ["run.json", "attempts/", "starts/", "fragments/", "packs/"])
def test_an_object_that_is_lost_is_brought_back(pair, kind):
    for key in [key for key in pair.whole if key.startswith(kind)]:
        del pair.run.objects[key]

        done = pair.repair()

        assert [one.key for one in done.mended] == [key] and done.left == ()
        assert pair.run.objects == pair.whole


@pytest.mark.parametrize("seed", range(12))
def test_damage_in_many_places_at_once_is_brought_back_from_the_top_down(pair, seed):
    """Records prove the objects below them, so each round proves more."""
    draw = Random(seed)
    keys = [key for key in pair.whole if key.startswith(REPAIRABLE)]
    for key in draw.sample(keys, k=len(keys) // 2):
        body = pair.whole[key]
        at = draw.randrange(len(body))
        pair.run.objects[key] = body[:at] + bytes([body[at] ^ 0x40]) + body[at + 1 :]

    done = pair.repair()

    assert done.left == ()
    assert pair.run.objects == pair.whole and is_whole(pair.run)


def test_one_step_is_repaired_and_the_others_are_left_alone(pair):
    packs = {step: pair.only(f"packs/00000{a}/{step:012d}/") for step, a in ((1, 1), (2, 2))}
    for key in packs.values():
        pair.run.objects[key] = b""

    done = pair.repair(step=1)

    assert [one.key for one in done.mended] == [packs[1]] and done.left == ()
    assert pair.run.objects[packs[2]] == b""


def test_a_damaged_commit_record_of_the_asked_step_is_repaired(pair):
    key = "commits/000000000002-000002"
    pair.run.objects[key] = pair.whole[key][:-1]

    assert [one.key for one in pair.repair(step=2).mended] == [key]
    assert pair.run.objects == pair.whole


def test_the_first_place_with_proven_bytes_is_taken(pair):
    key = pair.only("packs/000002/")
    third = Sim()
    third.objects = dict(pair.copy.objects)
    pair.run.objects[key] = pair.copy.objects[key] = pair.whole[key][:-1] + b"?"

    done = pair.repair(pair.copy.store, third.store)

    assert len(done.mended) == 1 and done.left == ()
    assert pair.run.objects == pair.whole


def test_what_no_place_has_stays_and_is_named_with_the_reason(pair):
    good, bad, gone = (
        pair.only("packs/000001/000000000000"),
        pair.only("packs/000001/000000000001"),
        pair.only("packs/000002"),
    )
    for key in (good, bad, gone):
        pair.run.objects[key] = b"?"
    pair.copy.objects[bad] = pair.whole[bad][:-1] + b"?"
    del pair.copy.objects[gone]

    done = pair.repair()

    assert [one.key for one in done.mended] == [good]
    why = {left.problem.key: left.why for left in done.left}
    assert "not those that the records name" in why[bad] and "not there" in why[gone]
    assert pair.run.objects[bad] == pair.run.objects[gone] == b"?"


def test_another_run_is_never_a_source(pair):
    other = Sim()
    run_of(other.store, HandClock(), 0, 1)
    other.objects["run.json"] = encode(RunRecord(format=1, run="other"))
    pair.run.objects[pair.only("packs/000002/")] = b""
    before = dict(pair.run.objects)

    with pytest.raises(NotSameRun):
        pair.repair(pair.copy.store, other.store)

    assert pair.run.objects == before


def test_a_damaged_run_record_is_not_brought_back_beside_a_source_of_another_run(pair):
    other = Sim()
    run_of(other.store, HandClock(), 0, 1)
    other.objects["run.json"] = encode(RunRecord(format=1, run="other"))
    pair.run.objects["run.json"] = b"{"
    before = dict(pair.run.objects)

    with pytest.raises(NotSameRun):
        pair.repair(pair.copy.store, other.store)

    assert pair.run.objects == before


def test_a_copy_that_went_on_by_itself_gives_what_it_shares_and_nothing_else(pair):
    """Both call their newest attempt 3; only one of them is this run's."""
    for sim, life in ((pair.run, "d"), (pair.copy, "e")):
        begun = start_job(sim.store, life)
        with Saver(sim.store, HandClock(), 3, begun.start.parent, life=life, salt=life) as saver:
            saver.save(3)
    own, shared = "commits/000000000003-000003", pair.only("packs/000002/")
    before = dict(pair.run.objects)
    pair.run.objects |= {own: b"?" * 900, "starts/000003": b"?" * 900, shared: b""}

    done = pair.repair()

    assert [one.key for one in done.mended] == []
    assert {left.problem.key for left in done.left} == {"starts/000003", own}
    pair.run.objects["starts/000003"] = before["starts/000003"]
    done = pair.repair()
    assert [one.key for one in done.mended] == [shared]
    assert {left.problem.key for left in done.left} == {own}
    assert pair.run.objects == {**before, own: b"?" * 900}


def test_an_address_that_holds_nothing_stays_empty(pair):
    empty = Sim()

    with pytest.raises(RunNotFound):
        repair(empty.store, [pair.copy.store])
    with pytest.raises(RunNotFound, match="to repair from"):
        repair(pair.run.store, [empty.store])

    assert empty.objects == {}


def test_run_json_that_nothing_proves_is_not_made(pair):
    for key in [key for key in pair.run.objects if key.startswith(("attempts", "run.json"))]:
        pair.run.objects[key] = b"?" * 99

    done = pair.repair()

    assert done.mended == () and "nothing here proves" in done.left[0].why
    assert pair.run.objects["run.json"] == b"?" * 99


@pytest.mark.parametrize("kind", ["collected", "gc"])
def test_what_means_something_by_being_there_is_never_touched(pair, kind):
    key = f"{kind}/000000000000-000001" if kind == "collected" else "gc/x"
    pair.run.objects[key] = b"damaged"
    pair.copy.objects[key] = b"other"

    done = pair.repair()

    assert {left.problem.key for left in done.left} == {key} and "not repaired" in done.left[0].why
    assert pair.run.objects[key] == b"damaged"


def test_records_that_contradict_their_bytes_are_not_repaired_from_a_copy_that_agrees(pair):
    """Sealed rightly, wrong all the same: two chunks name one another's bytes, here and in the copy."""
    at = Position(2, 2)
    commit = look(pair.run.store).commits[at]
    key = commit.fragments[0].key
    fragment = decode(Fragment, pair.whole[key], key)
    first, *rest = fragment.leaves
    box = first.boxes[0]
    moved = msgspec.structs.replace(box.chunks[0], raw=bytes(16), stored=bytes(16))
    box = msgspec.structs.replace(box, chunks=(moved, *box.chunks[1:]))
    crafted = encode(
        msgspec.structs.replace(fragment, leaves=(msgspec.structs.replace(first, boxes=(box,)), *rest))
    )
    from ftckpt.manifest import digest_of

    ref = msgspec.structs.replace(commit.fragments[0], size=len(crafted), digest=digest_of(crafted))
    record = encode(msgspec.structs.replace(commit, fragments=(ref, *commit.fragments[1:])))
    for sim in (pair.run, pair.copy):
        sim.objects |= {key: crafted, f"commits/{2:012d}-{2:06d}": record}
    before = dict(pair.run.objects)

    done = pair.repair()

    assert done.mended == () and "the same bytes are there" in done.left[0].why
    assert pair.run.objects == before


def test_a_commit_whose_parent_is_another_one_is_named_by_verify(pair):
    """A whole step of another run, put where this run's step was."""
    other = Sim()
    run_of(other.store, HandClock(), 0, 1)
    run_of(other.store, HandClock(), 2)
    key = "commits/000000000002-000002"
    foreign = decode(Commit, other.objects[key], key)
    pair.run.objects[key] = encode(
        msgspec.structs.replace(foreign, parent=msgspec.structs.replace(foreign.parent, digest="0" * 32))
    )

    problems = Run(pair.run.store).verify()

    assert [p.key for p in problems] == [key] and isinstance(problems[0].error, ObjectDamaged)
    assert "goes on from another" in problems[0].error.message


# --- deaths ---------------------------------------------------------------------------------------


@each_way
def test_a_death_at_any_call_leaves_damage_or_good_bytes_and_the_next_try_ends_it(pair, how):
    broken = {
        "run.json": b"?" + pair.whole["run.json"],
        "starts/000002": pair.whole["starts/000002"][:-1],
        "commits/000000000001-000001": b"",
        pair.only("fragments/000002"): b"",
        pair.only("packs/000002"): pair.whole[pair.only("packs/000002")][1:],
    }
    lost = pair.only("packs/000001/000000000001")
    points, mended_from = 0, list[dict[str, bytes]]()
    for nth in itertools.count(1):
        pair.run.objects = {**pair.whole, **broken}
        del pair.run.objects[lost]
        meet = Meet(nth, how, every_call)
        stores = [
            RetryStore(FaultyStore(sim.store, [Fault(meet)]), deadline_s=9, clock=HandClock(), events=silent)
            for sim in (pair.run, pair.copy)
        ]
        told = f"call {nth}, {how}"

        try:
            repair(stores[0], stores[1:])
        except Crash:
            assert how != "lost", told
        for key, body in pair.run.objects.items():
            assert body in (pair.whole[key], broken.get(key)), told
        assert pair.whole.keys() - pair.run.objects.keys() <= {lost}, told
        if pair.run.objects not in mended_from:
            mended_from.append(dict(pair.run.objects))
            assert pair.repair().left == (), told

            assert pair.run.objects == pair.whole, told
        if meet.met is None:
            break
        points += 1

    assert points > 100 and len(mended_from) > (0 if how == "lost" else 5)


def test_a_reader_never_finds_a_key_free_while_it_is_repaired(pair):
    """What deletes first would show a lineage without its newest step in between."""
    key, seen = "commits/000000000002-000002", []

    class Watch:
        def around(self, call: Call, proceed: Callable, clock: object) -> object:
            seen.append(key in pair.run.objects)
            result = proceed(call)
            seen.append(key in pair.run.objects)
            return result

    pair.run.objects[key] = b""
    repair(FaultyStore(pair.run.store, [Fault(Watch())]), [pair.copy.store])

    assert all(seen) and pair.run.objects == pair.whole


def test_nobody_else_overwrites():
    """Create-only is the law for everybody but repair and the stores themselves."""
    calls = set()
    for path in Path(ftckpt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "overwrite":
                calls.add(path.relative_to(Path(ftckpt.__file__).parent).parts[0])

    assert calls == {"repair.py", "store"}


def test_a_bucket_is_repaired_from_a_folder(pair, s3, tmp_path):
    far, near = open_store(s3.uri("repair/run")), open_store(tmp_path / "copy")
    broken = {pair.only("packs/000002"): b"?", pair.only("commits/000000000001"): b"?"}
    for key, body in {**pair.whole, **broken}.items():
        far.create(key, body)
    copy(pair.copy.store, near)

    done = repair(far, [near])

    assert {one.key for one in done.mended} == set(broken) and done.left == ()
    assert {info.key: bytes(far.read(info.key)) for info in far.scan("")} == pair.whole
