"""A session's nearest tier: what it leaves there for the agent, and how it waits for the far store.

The save engine writes into the tier as into any store; here is what it tells on the side.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ftckpt import layout
from ftckpt.attempts import create_owned
from ftckpt.clock import SystemClock
from ftckpt.colocation import HostBudget
from ftckpt.commit import Expected, Patience, read_commit
from ftckpt.elastic.keeper import AgentKeeper
from ftckpt.errors import SettingsError
from ftckpt.events import Event, Events
from ftckpt.layout import Writer
from ftckpt.manifest import FORMAT, Commit, Fragment, Position, Ref, Saving, Staging, encode
from ftckpt.ranks import Ranks, tell, together
from ftckpt.retention import Keep
from ftckpt.snapshot import Live, StagingPool
from ftckpt.staging import Kept, StagingFile
from ftckpt.store.api import ObjectStore
from ftckpt.tiers import Life, Tier, is_shared, leave_mark, mirror, remove_mark, wait_until_settled
from ftckpt.writer import SaveJob

KEEPER_PERIOD_S = 0.5


def nearest(tiers: Sequence[str] | None, uri: str, told: str | None) -> str | None:
    """The tier on this machine: of ``tiers``, nearest first, the far store may come last or be left out.
    ``told`` is what the supervisor says when the trainer says nothing.

    Raises:
        SettingsError: there is more than one.
    """
    if tiers is None:
        return told
    near = [tier for number, tier in enumerate(tiers) if not (number == len(tiers) - 1 and tier == uri)]
    if len(near) > 1:
        raise SettingsError(
            f"SettingsError: tiers={list(tiers)!r} names {len(near)} tiers beside the run's own address {uri}\n"
            "  give one folder of this machine, nearest first, and the run's address last or not at all",
            tiers=tuple(tiers),
        )
    return near[0] if near else None


def agree_on_sharing(tier: Tier, ranks: Ranks, *, one_machine: bool) -> bool:
    """Whether all who write a step do it in this very tier. Collective."""
    nonce = ""
    with together(ranks, "looking at the tier"):
        if ranks.rank == 0:
            nonce = leave_mark(tier.store)
    told = str(tell(ranks, {"mark": nonce})["mark"])
    found = False
    with together(ranks, "looking at the tier"):
        found = is_shared(tier.store, told)
    everybody = all(ranks.gather(b"1" if found else b""))
    with together(ranks, "looking at the tier"):
        if ranks.rank == 0:
            remove_mark(tier.store, nonce)
    return everybody and one_machine


@dataclass(frozen=True, slots=True)
class TierJournal:
    """What this writer's saves leave in its tier."""

    near: ObjectStore
    me: Writer
    shared: bool
    keep: Keep

    def begin(self, job: SaveJob, expected: Expected) -> None:
        note = Saving(
            format=FORMAT,
            attempt=expected.at.attempt,
            step=expected.at.step,
            writer=str(self.me),
            quorum=expected.quorum,
            members=expected.members,
            writers=tuple(map(str, expected.writers)),
            parent=expected.parent,
            shared=self.shared,
            keep_last=self.keep.last,
            keep_every=self.keep.every,
        )
        create_owned(self.near, layout.save_key(expected.at, self.me), encode(note))

    def holds(self, parent: Ref) -> bool:
        if not self.shared:
            return True
        found = read_commit(self.near, parent.at)
        if found is None or found[1] != parent:
            return False
        lost = layout.tombstone_key(parent.at)
        return all(info.key != lost for info in self.near.scan(layout.COLLECTED))

    def staged(self, at: Position) -> Collection[str]:
        prefix = f"{layout.STAGED}/{at.attempt:06d}/{at.step:012d}"
        writers = (layout.parse_writer(info.key) for info in self.near.scan(prefix))
        return {writer.incarnation for writer in writers if writer is not None}


@dataclass(slots=True)
class Tiered:
    """One writer's use of a tier, from entering to leaving the session."""

    tier: Tier
    far: ObjectStore
    shared: bool
    journal: TierJournal
    events: Events
    _life: Life
    _file: StagingFile
    _agent: str
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def keep_agent(self, keeper: AgentKeeper) -> None:
        """See to it from now on, on a thread of its own, that an agent is at work."""

        def work() -> None:
            while not self._stop.is_set():
                keeper.look()
                self._stop.wait(KEEPER_PERIOD_S)

        self._thread = threading.Thread(target=work, name="ftckpt-agent-keeper", daemon=True)
        self._thread.start()

    def pool(self, budget_bytes: int | None, shared: HostBudget | None) -> StagingPool:
        """Blocks that outlive this process, and that the file never takes back."""
        return StagingPool(budget_bytes, self._file.allocate, shared, keeps=True)

    def keep(self, live: Live, job: SaveJob, pool: StagingPool) -> Kept:
        """A snapshot that the agent can finish."""
        journal, expected = self.journal, job.expected
        partial = Fragment(
            format=FORMAT,
            attempt=expected.at.attempt,
            step=expected.at.step,
            writer=str(journal.me),
            quorum=expected.quorum,
            members=expected.members,
            parent=None,
            guarantee=job.guarantee,
            why=job.why,
            left_out=job.left_out,
        )
        note = Staging(
            format=FORMAT,
            partial=partial,
            spans=(),
            writers=tuple(map(str, expected.writers)),
            shared=journal.shared,
            keep_last=journal.keep.last,
            keep_every=journal.keep.every,
        )
        return Kept(live, note, journal.near, journal.me, pool, self._file, SystemClock(), self.events)

    def durable(self, commit: Commit, timeout_s: float | None) -> Commit:
        """Wait until the far store has what the tier has."""
        if not self.shared:
            return commit
        return wait_until_settled(self.far, commit.at, SystemClock(), timeout_s, Patience())

    def report(self) -> None:
        """At a boundary: say so when the agent died, and when another took its place."""
        now = self.tier.agent_name()
        if now == self._agent:
            return
        if self._agent:
            name = "session.agent_replaced" if now else "session.agent_died"
            self.events(Event(name, {"tier": str(self.tier.folder), "agent": now or self._agent}))
        self._agent = now or self._agent

    def close(self) -> None:
        """Give the sign of life back: what is left is the agent's."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(KEEPER_PERIOD_S * 10)
        self._file.close()
        self._life.__exit__()
        self.tier.store.close()
        self.far.close()


def enter_tier(
    tier: Tier, far: ObjectStore, ranks: Ranks, me: Writer, keep: Keep, *, one_machine: bool, events: Events
) -> Tiered:
    """Make the tier this run, as the far store has it now, and live in it. Collective."""
    with together(ranks, "looking at the tier"):
        mirror(far, tier.store)
    shared = agree_on_sharing(tier, ranks, one_machine=one_machine)
    life = tier.life(me)
    with together(ranks, "entering the tier"):
        life.__enter__()
        file = StagingFile(tier.staging_path(me))
    journal = TierJournal(tier.store, me, shared, keep)
    return Tiered(tier, far, shared, journal, events, life, file, tier.agent_name())
