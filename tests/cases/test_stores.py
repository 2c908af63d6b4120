"""J8, J10 to J12 and J15 to J18: the same run on every kind of store, one PUT an object, and errors that are
told in the order in which they matter.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.chaos.faults.gateway import Cut, Gateway
from ftckpt.chaos.faults.store import Die, Fail, Fault, FaultyStore
from ftckpt.errors import FtckptError, ObjectNotFound, SaveFailed, StoreFull
from ftckpt.events import silent
from ftckpt.store import open_store
from tests.session.toy import Heard, Toy, straight

KINDS = ["local", "memory", "s3", "fsspec+s3", "fsspec+file"]


def address(kind: str, tmp_path: Path, weed) -> str:
    name = uuid.uuid4().hex
    match kind:
        case "local":
            return str(tmp_path / name)
        case "memory":
            return f"memory://{name}"
        case "fsspec+file":
            return f"fsspec+file://{tmp_path}/{name}"
        case _:
            return f"{kind}://{weed.bucket}/{name}"


@pytest.fixture
def gateway(weed) -> Iterator[Gateway]:
    with Gateway(weed) as opened:
        yield opened


def plain(key: str) -> str:
    """A key without what differs from life to life."""
    return re.sub(r"[0-9a-f]{32}", "*", key)


def keys(uri: str) -> list[str]:
    store = open_store(uri, allow_unconditional=True)
    return sorted(plain(info.key) for info in store.scan("") if not info.key.startswith("probes"))


# --- J8, J18: every kind of store ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_run_is_saved_resumed_and_verified_on_every_kind_of_store(kind, tmp_path, s3):
    """J8: no store is asked for what it does not have (a descriptor to sync, a rename, a folder)."""
    uri = address(kind, tmp_path, s3)
    options = {"save_every": 2, "events": silent, "keep": None, "allow_unconditional": True}
    torch.use_deterministic_algorithms(True)
    try:
        for until in (4, 6):
            toy = Toy()
            with ftckpt.Session(uri, toy.state, **options) as session:
                for step in session.steps(until=until):
                    toy.train(step)
        wanted = straight(6)
    finally:
        torch.use_deterministic_algorithms(False)

    assert toy.bits() == wanted.bits()
    found = Toy(seed=3)
    assert ftckpt.restore(uri, found.state).step == 6
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensors()[name], tensor)


def test_a_retried_run_has_the_same_objects_on_every_kind_of_store(tmp_path, s3):
    """J18: objects are put by their whole keys, so that doing a thing again nests nothing."""
    listed = []
    for kind in KINDS:
        uri = address(kind, tmp_path, s3)
        for until in (2, 4):
            toy = Toy()
            with ftckpt.Session(
                uri, toy.state, save_every=2, events=silent, keep=None, allow_unconditional=True
            ) as session:
                for step in session.steps(until=until):
                    toy.train(step)
        listed.append(keys(uri))

    assert all(one == listed[0] for one in listed[1:])
    assert all(key.count("/") <= 3 for key in listed[0])


# --- J10, J11: one PUT an object -----------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_no_upload_has_parts_that_could_be_left_behind(gateway, weed, scheme):
    """J10, J11: a body far above any client's part size is one PUT: no limit of parts to meet, nothing
    to abort, and nothing that a kill leaves open."""
    store = open_store(
        f"{scheme}://{weed.bucket}/{uuid.uuid4().hex}",
        options={"endpoint_url": gateway.endpoint, "access_key_id": "a-key", "secret_access_key": "a-secret"},
        environ={},
    )
    body = bytes(24 << 20)

    store.create("packs/a", body)

    assert store.size("packs/a") == len(body)
    puts = [asked for asked in gateway.log if asked.method in ("PUT", "POST")]
    assert [asked.method for asked in puts] == ["PUT"] and puts[0].size_bytes >= len(body)
    assert not any("uploads" in asked.query or "partNumber" in asked.query for asked in gateway.log)


def test_packs_stay_below_the_largest_single_put_whatever_the_state(tmp_path):
    """J10: the size of an object is chosen before its first byte, from bounds far below 5 GiB."""
    sizes = []
    for chunk_bytes in (1 << 10, 4 << 20, 1 << 30):
        folder = tmp_path / str(chunk_bytes)
        state = {"t": torch.arange(6 << 20)}
        with ftckpt.Session(folder, state, events=silent, chunk_bytes=chunk_bytes, codec="raw"):
            pass
        sizes += [path.stat().st_size for path in folder.glob("packs/*/*/*")]

    assert max(sizes) <= max(128 << 20, 48 << 20) and sum(sizes) >= 3 * (48 << 20)


# --- J12 on the wire -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_bodies_that_break_off_on_the_wire_are_asked_for_again(gateway, weed, seed):
    """J12: the connection closes after a part of the body, for a third of all reads."""
    uri = weed.uri(uuid.uuid4().hex)
    options = {"endpoint_url": gateway.endpoint, "access_key_id": "a-key", "secret_access_key": "a-secret"}
    state = {"t": torch.arange(200_000)}
    with ftckpt.Session(uri, state, store_options=options, events=silent, codec="raw", chunk_bytes=1 << 16):
        pass
    cuts = []

    def rule(asked):
        if asked.method == "GET" and not asked.is_listing and (asked.number + seed) % 3 == 0:
            cuts.append(asked)
            return Cut(0.1 + 0.4 * seed)
        return None

    gateway.rule = rule
    found = {"t": torch.zeros(200_000, dtype=torch.int64)}
    ftckpt.restore(uri, found, store_options=options)

    assert cuts and torch.equal(found["t"], state["t"])


# --- J15: the first error comes first -------------------------------------------------------------


@pytest.mark.parametrize("second", [StoreFull("still full"), ObjectNotFound("404"), SaveFailed("odd")])
def test_an_error_while_giving_up_is_attached_and_never_hides_the_first(tmp_path, second):
    """J15: the pack does not fit; telling the others fails too."""
    toy = Toy()
    plan = [
        Fault(Fail(error=StoreFull("the disk is full")), op="create", prefix="packs/000001/000000000001"),
        Fault(Fail(error=second), op="create", prefix="fragments/000001/000000000001"),
    ]
    store = FaultyStore(open_store(tmp_path / "run"), plan)
    with ftckpt.Session("ignored", toy.state, store=store, events=silent) as session:
        with pytest.raises(SaveFailed, match="the disk is full") as caught:
            session.save(1).wait(30)
        first = caught.value.__cause__
        assert isinstance(first, StoreFull) and "the disk is full" in str(first)
        assert any(str(second) in note for note in first.__notes__)
        assert session.save(2).wait(30).step == 2


# --- J16, J17 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["packs", "fragments", "commits"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_is_there_as_a_whole_or_not_at_all(tmp_path, prefix, when):
    """J16: several objects are no transaction of the store; the one commit record decides."""
    toy, heard = Toy(), Heard()
    store = FaultyStore(open_store(tmp_path / "run"))
    with suppress(BaseException), ftckpt.Session("ignored", toy.state, store=store, events=heard) as session:
        session.save(1).wait(30)
        toy.train(2)
        store.plan = [
            Fault(Die(when), op="create", prefix=f"{prefix}/000001/000000000002"),
            Fault(Die(when), op="create", prefix="commits/000000000002"),
            Fault(Die("before"), op="create", prefix="fragments/000001/000000000002", nth=2),
        ]
        session.save(2).wait(30)

    with ftckpt.open(tmp_path / "run") as run:
        steps = [commit.step for commit in run.commits()]
        assert steps in ([1, 0], [2, 1, 0]) and run.verify() == []
        assert (steps[0] == 2) == (prefix == "commits" and when == "after")


def test_two_jobs_that_are_pointed_at_one_address_never_mix_their_objects(s3):
    """J17: both save step 10 at once: one owns the run, the other is told; every object is one writer's."""
    uri = s3.uri(uuid.uuid4().hex)
    outcomes: list[str] = []
    both = threading.Barrier(2, timeout=60)

    def job(fill: float) -> None:
        state = {"t": torch.full((1000,), fill)}
        try:
            with ftckpt.Session(uri, state, events=silent, deadline_s=20) as session:
                both.wait()
                state["t"] += 1
                session.save(10).wait(40)
                outcomes.append(f"saved {fill}")
        except (FtckptError, threading.BrokenBarrierError) as error:
            both.abort()
            outcomes.append(type(error).__name__)

    jobs = [threading.Thread(target=job, args=(fill,)) for fill in (1.0, 2.0)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join(120)

    assert len(outcomes) == 2 and sum(text.startswith("saved") for text in outcomes) <= 1, outcomes
    with ftckpt.open(uri) as run:
        assert run.verify() == []
        for commit in run.commits():
            found = {"t": torch.zeros(1000)}
            ftckpt.restore(uri, found, step=commit.step)
            assert len(found["t"].unique()) == 1
