"""Entering a run: which attempt this job belongs to, and restoring what that attempt's start names.

Knows supervisors, living peers and nobody at all as the three who can say which attempt it is. Changes
nothing of a session: it returns what was found, and the session takes it over.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ftckpt.agent import drain_first
from ftckpt.attempts import adopt, find_run, look, read_start
from ftckpt.begin import Begun, begin, this_process
from ftckpt.capture import reseed
from ftckpt.elastic.launch import Launch
from ftckpt.errors import ObjectNotFound, SettingsError
from ftckpt.events import Event, Events
from ftckpt.lineage import trained
from ftckpt.manifest import Commit, Ref, Start
from ftckpt.plan.asked import Asked
from ftckpt.policy import Ends
from ftckpt.ranks import Ranks, tell, together
from ftckpt.restoring import read_ref, restore_into
from ftckpt.session.exactness import exactness
from ftckpt.session.pacing import Pacing
from ftckpt.session.settings import Members, Settings
from ftckpt.store import open_store
from ftckpt.store.api import ObjectStore
from ftckpt.store.nearest import NearestStore
from ftckpt.tiers import Tier

INTERNAL = "ftckpt"
"""The component that belongs to the session itself."""


@dataclass(frozen=True, slots=True)
class Found:
    """The attempt of this job. ``fresh``: this life of the group was there when it began. ``nonce``: what rank
    0 finds in its start, where other ranks have to find the same.
    """

    attempt: int
    incarnation: str
    fresh: bool = True
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """What an attempt's start named, and what of it is now in the state."""

    parent: Ref
    commit: Commit
    rng_restored: bool


@dataclass(frozen=True, slots=True)
class Joining:
    """One process on its way into a run. ``address`` is the run's as it is from any folder."""

    store: ObjectStore
    tier: Tier | None
    ranks: Ranks
    launch: Launch
    group: Members | None
    settings: Settings
    address: str
    events: Events

    def find_attempt(self) -> Found:
        """The attempt that the supervisor began, or that living peers carry, or a new one."""
        if self.group is not None and self.launch.attempt is None:
            self.group.join()
            return self._ask_peers(self.group)
        told: Mapping[str, object] = {}
        with together(self.ranks, "beginning the attempt"):
            if self.ranks.rank == 0:
                attempt = self._given() or self._claim()
                nonce = self._start(attempt).nonce if self.ranks.world > 1 else ""
                told = {"attempt": attempt, "incarnation": uuid.uuid4().hex, "nonce": nonce}
        told = tell(self.ranks, told)
        return Found(int(str(told["attempt"])), str(told["incarnation"]), nonce=str(told["nonce"]))

    def _ask_peers(self, group: Members) -> Found:
        """Schedule 14 of the protocol: an attempt that anybody carries is gone on with. Only where
        nobody carries one does the first member claim it, and tells the others.
        """
        while True:
            carried = group.ask()
            attempt = adopt(carried)
            if attempt is not None:
                return Found(attempt, group.incarnation, fresh=False)
            told: Mapping[str, object] = {}
            with together(self.ranks, "beginning the attempt"):
                if self.ranks.rank == 0:
                    mine = self._claim(groups=len(carried)) if group.index == 0 else None
                    told = {"attempt": group.spread(mine)}
            told = tell(self.ranks, told)
            if told["attempt"] is not None:
                return Found(int(str(told["attempt"])), group.incarnation)

    def _given(self) -> int | None:
        """The attempt that the supervisor began, if there is one."""
        if self.launch.attempt is not None:
            _check_address(self.store, self.launch)
            find_run(self.store)
        return self.launch.attempt

    def _claim(self, groups: int = 1) -> int:
        if self.tier is not None:
            drain_first(self.tier, self.store, self.events)
        begun: Begun = begin(
            self.store,
            replace(this_process(groups, self.launch.world), settings=self._recorded()),
            name=uuid.uuid4().hex,
            step=self.settings.step,
            on_empty=self.settings.on_empty,
            fallback=self.settings.fallback,
            events=self.events,
        )
        return begun.claim.attempt

    def _recorded(self) -> dict[str, str]:
        """What `ftckpt resume` wants to know besides the command."""
        tier = {} if self.tier is None else {"tier": str(self.tier.folder)}
        return {"run": self.address, **tier}

    def ends(self, attempt: int) -> Ends:
        """How often this job ended before, where the policy asks; a collective of the ranks."""
        found = Ends(0, 0)
        if self.settings.save_every.kind == "auto" and self.settings.mtbf_s is None:
            with together(self.ranks, "counting earlier attempts"):
                if self.ranks.rank == 0:
                    found = Ends(*trained(look(self.store).view, attempt))
        return found

    def restore(self, state: Mapping[str, object], found: Found) -> Restored | None:
        """Overwrite ``state`` with exactly what this attempt's start names; ``None``: it begins from
        nothing, and nothing was changed.
        """
        attempt, start = found.attempt, self._start(found.attempt, found.nonce)
        parent = start.parent
        if parent is None:
            return None
        commit = read_ref(self.store, parent)
        groups_known = self.group is None or self.launch.attempt is not None
        near = [] if self.tier is None else [self.tier.store]
        pacing = Pacing(commit.step, self.events)
        done = restore_into(
            NearestStore([*near, self.store], self.events),
            commit,
            state,
            group=self.launch.group,
            rank=self.ranks.rank,
            world=self.ranks.world,
            asked=Asked(rename=self.settings.rename, idle=True),
            groups=start.groups if groups_known else None,
            internal=INTERNAL,
            events=self.events,
            progress=pacing,
        )
        values: Any = done.values.get(INTERNAL, {})
        internal: dict[str, Any] = values.get("tree", {})
        if self.group is not None and internal.get("manager"):
            self.group.load_state_dict(internal["manager"])
        if not done.rng_restored:
            reseed(self.settings.run_seed, commit.step, self.ranks.rank)
        guarantee, why = exactness(self.settings, commit, rng_restored=done.rng_restored, groups=1)
        self.events(
            Event(
                "session.restored",
                {
                    "step": commit.step,
                    "attempt": attempt,
                    "from_attempt": commit.attempt,
                    "bytes": done.fetched_bytes,
                    "seconds": round(pacing.seconds, 3),
                    "bytes_s": pacing.bytes_s,
                    "guarantee": guarantee,
                    "why": list(why),
                    "notes": list(done.notes),
                },
            )
        )
        return Restored(parent, commit, done.rng_restored)

    def _start(self, attempt: int, nonce: str = "") -> Start:
        """The start of this attempt; with ``nonce``, the very one that rank 0 sees."""
        try:
            start = read_start(self.store, attempt)
        except ObjectNotFound as error:
            if nonce:
                raise self._other_store(attempt) from error
            raise SettingsError(
                f"SettingsError: attempt {attempt} of {self.store.uri} was claimed but never began\n"
                "  nothing was changed; start the job with `ftckpt run` or `ftckpt resume`",
                attempt=attempt,
            ) from error
        if nonce and start.nonce != nonce:
            raise self._other_store(attempt)
        return start

    def _other_store(self, attempt: int) -> SettingsError:
        return SettingsError(
            f"SettingsError: rank {self.ranks.rank} does not find at {self.store.uri} what rank 0 sees there\n"
            "  nothing was restored or saved. Every rank needs the same store: a folder must be one that all "
            "machines share, not a disk of each; or use a bucket",
            attempt=attempt,
            rank=self.ranks.rank,
        )


def _check_address(store: ObjectStore, launch: Launch) -> None:
    """A supervised session saves to the run that its supervisor began the attempt of, and no other."""
    if launch.run is None:
        return
    told = open_store(launch.run, allow_unconditional=True)
    if told.uri != store.uri:
        raise SettingsError(
            f"SettingsError: this process was started for the run at {told.uri}, but its session is for {store.uri}\n"
            "  attempts of one run mean nothing in another; nothing was changed in either\n"
            "  a run that was copied or moved keeps its old command: give the new address in the command, "
            "`ftckpt run NEW -- COMMAND`, or take it from FTCKPT_RUN",
            told=told.uri,
            uri=store.uri,
        )
