"""What a fence leaves in a tier, and what it does when there is no room for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftckpt.agent.finish import finish_share
from ftckpt.capture import capture
from ftckpt.clock import SystemClock
from ftckpt.commit import Expected, Patience, read_commit
from ftckpt.errors import ObjectDamaged
from ftckpt.events import Event
from ftckpt.layout import Writer, staged_key
from ftckpt.manifest import FORMAT, Fragment, Position, Staging, decode
from ftckpt.plan.assign import Place, plan_save
from ftckpt.reader import check_commit
from ftckpt.retention import Keep
from ftckpt.session.tiered import TierJournal
from ftckpt.snapshot import Live, StagingPool
from ftckpt.staging import Kept, StagingFile
from ftckpt.store.local import LocalStore
from ftckpt.tiers import mirror
from ftckpt.writer import SaveEngine, SaveJob, WriteSettings, write_share
from tests.protocol.world import start_job, writer
from tests.support.procs import wait_until
from tests.support.stores import Sim
from tests.tiers.world import Near, agent

AT = Position(3, 1)
ME, OTHER = Writer("g0", 0, "a" * 32), Writer("g0", 0, "b" * 32)
CHUNK_BYTES = 1024


class Staged:
    """A snapshot of a model and its optimizer, kept in a tier."""

    def __init__(
        self, folder, budget_bytes: int | None = None, me: Writer = ME, writers: tuple[Writer, ...] = (ME,)
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        leaves = capture(
            {"model": self.model, "optim": self.optim, "plain": {"n": 1}}, group="g0", rank=0, world=1
        )
        tasks = plan_save(
            [leaf.holding for leaf in leaves], Place(writers.index(me), len(writers), 0), CHUNK_BYTES
        )
        self.store = LocalStore(folder / "tier")
        self.path = folder / f"staging-{me}"
        self.file = StagingFile(self.path)
        self.pool = StagingPool(budget_bytes, self.file.allocate)
        self.events: list[Event] = []
        partial = Fragment(
            format=FORMAT,
            attempt=1,
            step=3,
            writer=str(ME),
            quorum=1,
            members="m",
            parent=None,
            guarantee="E2",
        )
        note = Staging(format=FORMAT, partial=partial, spans=(), writers=tuple(map(str, writers)))
        live = Live(leaves, tasks, self.pool, SystemClock())
        self.kept = Kept(live, note, self.store, me, self.pool, self.file, SystemClock(), self.events.append)

    def change(self) -> None:
        for value in self.model.state_dict().values():
            value.add_(1)

    def write(self, store: LocalStore) -> Fragment:
        """What the save engine does with it."""
        save = Expected(AT, None, 1, "m", (ME,))
        return write_share(store, SaveJob(save, self.kept, "E2"), save, ME, WriteSettings(), {})

    @property
    def note(self) -> Staging | None:
        keys = [info.key for info in self.store.scan("staged")]
        assert keys in ([], [staged_key(AT, ME)])
        return decode(Staging, bytes(self.store.read(keys[0])), keys[0]) if keys else None

    def finish(self) -> Fragment:
        """What an agent does with it, once the process is dead."""
        assert self.note is not None
        return finish_share(self.store, self.note, memoryview(self.path.read_bytes()), None, OTHER)


@pytest.fixture
def staged(tmp_path) -> Staged:
    return Staged(tmp_path)


def content(fragment: Fragment) -> dict:
    """Leaf, offset and span of every chunk, with the digest of its raw bytes."""
    return {
        (leaf.name, record.offset, chunk.start, chunk.stop): chunk.raw
        for leaf in fragment.leaves
        for record in leaf.boxes
        for chunk in record.chunks
    }


def test_what_is_staged_is_the_state_before_the_fence_whoever_finishes_it(staged, tmp_path):
    staged.kept.fence(5.0)
    staged.change()

    by_agent = staged.finish()
    by_trainer = staged.write(LocalStore(tmp_path / "other"))

    assert content(by_agent) == content(by_trainer)
    assert (by_agent.writer, by_agent.guarantee) == (str(ME), "E2")
    assert [leaf.name for leaf in by_agent.leaves] == [leaf.name for leaf in by_trainer.leaves]
    assert {pack.key.rpartition("/")[2] for pack in by_agent.packs} == {f"{OTHER}-000000"}


def test_what_is_durable_is_named_and_not_staged_again(staged):
    written = staged.write(staged.store)

    done = staged.kept.fence(5.0)
    staged.change()

    assert done.staged_bytes == 0
    assert staged.note is not None and staged.note.spans == ()
    assert staged.finish() == written


def test_the_note_goes_with_the_save_and_the_memory_is_used_again(staged):
    staged.kept.fence(5.0)
    used_bytes = staged.pool.used_bytes

    staged.kept.close()

    assert used_bytes > 0 == staged.pool.used_bytes
    assert staged.note is None
    assert not staged.kept.is_live


def test_a_fence_after_the_save_has_ended_leaves_nothing(staged):
    staged.kept.close()

    staged.kept.fence(5.0)

    assert staged.note is None


def test_without_room_for_the_note_the_save_goes_on_and_says_what_it_lacks(tmp_path):
    """The chunks were read, and so need no staging for this process; only the process must not die."""
    staged = Staged(tmp_path, budget_bytes=64)
    for number in range(len(staged.kept.tasks)):
        staged.kept.read(number)

    staged.kept.fence(0.1)

    (event,) = staged.events
    assert event.name == "save.warning" and "staging_bytes" in event.fields["why"]
    assert staged.note is None
    assert not staged.kept.is_live


def test_a_staging_file_that_changed_is_not_believed(staged):
    staged.kept.fence(5.0)
    staged.path.write_bytes(bytes(len(staged.path.read_bytes())))

    with pytest.raises(ObjectDamaged, match="does not hold elements"):
        staged.finish()


def test_blocks_of_a_file_lie_where_it_says(tmp_path):
    file = StagingFile(tmp_path / "file")
    blocks = [file.allocate(size) for size in (3, 5000, 2 << 20, 7)]

    for number, block in enumerate(blocks):
        block.fill(number + 1)

    body = (tmp_path / "file").read_bytes()
    places = [(file.offset_of(block), block.size) for block in blocks]
    assert [set(body[at : at + size]) for at, size in places] == [{1}, {2}, {3}, {4}]
    file.close()
    assert not (tmp_path / "file").exists()


def test_a_living_writer_commits_with_the_share_that_an_agent_finished_for_a_dead_one(tmp_path):
    """The quorum has said already that the other one is gone; without its note the step would be given up."""
    far = Sim().store
    start_job(far)
    dead, alive = writer(0), writer(1)
    writers = (dead, alive)
    gone, here = Staged(tmp_path, me=dead, writers=writers), Staged(tmp_path, me=alive, writers=writers)
    mirror(far, here.store)
    gone.kept.fence(5.0)
    near = Near(here.store, {str(alive)}, {str(dead): gone.path.read_bytes()})
    engine = SaveEngine(
        here.store,
        alive,
        parent=None,
        settings=WriteSettings(patience=Patience(deadline_s=30.0, takeover_s=0.1)),
        journal=TierJournal(here.store, alive, shared=True, keep=Keep()),
    )
    engine.lose(frozenset([dead.incarnation]))
    engine.start()

    handle = engine.submit(SaveJob(Expected(AT, None, 1, "m", writers), here.kept))
    wait_until(lambda: bool(list(here.store.scan("fragments"))), 30.0, "the living one's share")
    waits = agent(near, far).drain()
    commit = handle.wait(30.0)
    drained = agent(near, far).drain()
    engine.close(30.0)

    assert waits.waiting == (AT,)
    assert len(commit.fragments) == 2
    assert drained.committed == (AT,)
    assert check_commit(far, read_commit(far, AT)[0])
