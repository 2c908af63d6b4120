"""The session: a context around a trainer that restores, saves at step boundaries, and stops well.

It ties the rooms together and decides nothing about bytes or order. ``save`` never blocks on the
store. Everything that goes wrong in the background is heard of at the next boundary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from ftckpt.begin import OnEmpty
from ftckpt.births import no_collecting
from ftckpt.bounds import DAY_S, SHORTEST_S, require_flag, require_number
from ftckpt.capture import Fences, LiveLeaf, capture, left_out, left_out_now, module_leaves
from ftckpt.clock import Clock, SystemClock
from ftckpt.codec import Codec
from ftckpt.colocation import Gate, HostBudget
from ftckpt.commit import Expected, Patience
from ftckpt.elastic.keeper import AgentKeeper
from ftckpt.elastic.launch import Launch, open_status, store_environ
from ftckpt.errors import (
    AttemptWentBack,
    NotEntered,
    SaveError,
    SaveFailed,
    SettingsError,
    StateMismatch,
    TooManyFailedSaves,
    first_line,
)
from ftckpt.events import Event, Events, both, to_logging
from ftckpt.layout import Writer
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import MAX_STEP, Commit, Guarantee, Position
from ftckpt.membership import Membership, alone
from ftckpt.meter import Meter
from ftckpt.plan.asked import Rename, renames
from ftckpt.plan.assign import DEFAULT_CHUNK_BYTES, Place, plan_save
from ftckpt.policy import SaveEvery, parse
from ftckpt.ranks import Ranks, agree, ranks_here, together
from ftckpt.retention import Keep
from ftckpt.session.alike import digest, require_alike
from ftckpt.session.exactness import exactness
from ftckpt.session.heal import LiveState
from ftckpt.session.inside import Inside
from ftckpt.session.joining import INTERNAL, Joining, Restored
from ftckpt.session.once import is_step
from ftckpt.session.pace import Pace
from ftckpt.session.settings import Members, Settings, require_given
from ftckpt.session.stop import StopSignal
from ftckpt.session.tiered import Tiered, enter_tier, nearest
from ftckpt.snapshot import StagingPool
from ftckpt.store import open_store
from ftckpt.store.api import ObjectStore
from ftckpt.tiers import Tier, open_tier
from ftckpt.writer import NOWHERE, Failure, SaveEngine, SaveHandle, SaveJob, WriteSettings, at_once, fitted

if TYPE_CHECKING:
    from ftckpt.slots import Turn


@dataclass(slots=True)
class _Progress:
    """Where the session stands. ``finished`` is the last finished step."""

    finished: int = 0
    saved: int | None = None
    handle: SaveHandle | None = None
    restored: Commit | None = None
    rng_restored: bool = True
    membership: Membership | None = None
    owed: bool = False
    looked: bool = False
    modules: frozenset[str] = frozenset()


class Session:
    """Checkpoints of ``state`` under ``uri``.

    ``state`` maps component names to modules, optimizers, schedulers, tensors, nested plain values,
    or objects with ``state_dict``/``load_state_dict``. Entering restores it if the run has a commit
    (on every rank, to the same step), and commits step 0 if it has none. The constructor does no I/O.

    Args:
        uri: a folder or bucket address; see ``ftckpt.store.open_store``.
        save_every: save after every that many steps; or, after that many seconds (``"90s"``, ``"15m"``, a
            ``timedelta``); ``"continuous"``: at the first boundary after the last save is readable;
            ``"auto"``: at the interval that loses least time, from what saves cost and how often this
            job fails (``mtbf_s``, or what the run's attempts show), told as ``save.interval``;
            ``None``: only the first, the last, and when asked.
        keep: how many commits to keep (an int, a ``Keep``, or ``None`` for all).
        on_empty: what to do when the run has no commit at all: ``"start"`` from nothing, or ``"error"``.
        step: go on from this step instead of the newest.
        fallback: pass over commits that cannot be read, saying so, instead of stopping.
        rename: names as saved to names here, for a state whose parts have other names now; see ``restore``.
            It may stay: a rule that fits nothing any more does nothing.
        replica_group: the membership, when replica groups train together.
        tiers: a folder of this machine that saves go to first, and from there to ``uri`` by an agent.
        start_agent: start that agent, if nobody does; a supervisor always does.
        max_failed_saves: raise at a boundary after that many failed saves in a row; ``None``: never.
        store_options: settings of the store; ``AWS_*`` variables otherwise.
        events: who hears what happens; the standard logger ``ftckpt`` otherwise.
        yield_to: asked before every chunk and every PUT: while it returns true, saves hold back, for at
            most 30 s at a stretch; see also ``yielding``. Quick, and called from the saver's threads.
        budget: host memory for staging that others use too; asked for every block (``SharedBudget``).
        clock: tells the time for ``save_every`` and for what saves and steps are measured to take.

    Raises on entering: ``RunNotFound``/``NoCommit`` (with ``on_empty="error"``), ``StepNotFound``,
    ``CorruptError``, ``StateMismatch``, ``RestoreIncomplete``, ``UnsupportedValue``,
    ``SettingsDiffer``, ``AttemptTaken``, ``StoreError``. Nothing is trained then, nothing is lost.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        state: Mapping[str, object],
        *,
        save_every: SaveEvery = None,
        mtbf_s: float | None = None,
        keep: int | Keep | None = 3,
        on_empty: OnEmpty = "start",
        step: int | None = None,
        fallback: bool = False,
        rename: Rename | None = None,
        replica_group: Members | None = None,
        stage: Literal["lazy", "eager"] = "lazy",
        verify_snapshot: bool = False,
        fence_deadline_s: float = 60.0,
        codec: Literal["auto", "raw", "zstd", "planes", "delta"] | Codec = "auto",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        staging_bytes: int | None = None,
        run_seed: int = 0,
        derives_seeds: bool = False,
        max_failed_saves: int | None = None,
        check_replicas: bool = True,
        deadline_s: float = 300.0,
        tiers: Sequence[str | os.PathLike[str]] | None = None,
        start_agent: bool = True,
        store_options: Mapping[str, object] | None = None,
        allow_unconditional: bool = False,
        retry_deadline_s: float = 60.0,
        events: Events = to_logging,
        store: ObjectStore | None = None,
        launch: Launch | None = None,
        clock: Clock | None = None,
        yield_to: Callable[[], bool] | None = None,
        budget: HostBudget | None = None,
    ) -> None:
        require_given(
            uri=uri,
            state=state,
            events=events,
            tiers=tiers,
            store_options=store_options,
            rename=rename,
            launch=launch,
            store=store,
            clock=clock,
            yield_to=yield_to,
            budget=budget,
            replica_group=replica_group,
        )
        require_flag("start_agent", start_agent)
        require_flag("allow_unconditional", allow_unconditional)
        if INTERNAL in state:
            raise SettingsError(
                f"SettingsError: the component name {INTERNAL!r} belongs to the session itself"
            )
        self.state = state
        self.settings = Settings(
            save_every=parse(save_every),
            mtbf_s=mtbf_s,
            keep=keep if isinstance(keep, Keep) else Keep(last=keep),
            on_empty=on_empty,
            step=step,
            fallback=fallback,
            rename=renames(rename),
            stage=stage,
            verify_snapshot=verify_snapshot,
            fence_deadline_s=fence_deadline_s,
            codec=codec if isinstance(codec, Codec) else Codec(codec),
            chunk_bytes=chunk_bytes,
            staging_bytes=staging_bytes,
            run_seed=run_seed,
            derives_seeds=derives_seeds,
            max_failed_saves=max_failed_saves,
            check_replicas=check_replicas,
            deadline_s=deadline_s,
        )
        require_number("retry_deadline_s", retry_deadline_s, low=SHORTEST_S, high=DAY_S)
        self._uri = os.fspath(uri)
        self._tiers = None if tiers is None else tuple(os.fspath(tier) for tier in tiers)
        self._start_agent = start_agent and store is None
        self._store_options, self._one_writer = dict(store_options or {}), allow_unconditional
        self._open_store: Callable[[], ObjectStore] = lambda: (
            store
            or open_store(
                self._uri,
                options=store_options,
                allow_unconditional=allow_unconditional,
                retry_deadline_s=retry_deadline_s,
                events=events,
            )
        )
        self._group = replica_group
        self._launch = launch or (replica_group.launch if replica_group else Launch.from_env())
        self._events = events
        self._at = _Progress()
        self._clock = clock or SystemClock()
        if budget is not None and stage == "eager":
            raise SettingsError(
                'SettingsError: a budget bounds what fences stage; stage="eager" copies everything in save()\n'
                '  use stage="lazy", or staging_bytes for a bound of its own',
                setting="budget",
            )
        self._yield_to, self._budget = yield_to, budget
        self._stop = StopSignal()
        self._entered: Inside | None = None

    # --- what a trainer sees --------------------------------------------------------------------

    @property
    def restored(self) -> Commit | None:
        """The commit this session went on from; ``None`` when it began anew."""
        return self._at.restored

    @property
    def attempt(self) -> int:
        """This job's attempt of the run."""
        return self._inside().attempt

    @property
    def finished_step(self) -> int:
        """The last finished optimizer step."""
        return self._group.finished_step if self._group and self._entered else self._at.finished

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM or SIGUSR1 came: the next boundary saves, waits and ends the loop."""
        return self._stop.seen

    def steps(self, until: int) -> Iterator[int]:
        """Yield the step to train next, from the one after the restored one up to ``until``.

        The same step comes again after a failed vote. The caller's body trains it; asking for the
        next is the boundary, where due saves begin and what failed in the background is heard of.
        Leaving the loop normally saves the last step and waits for it.

        Raises before the first: ``StateMismatch``, when modules were wrapped or changed since the session was
        entered. After it: ``UnsupportedValue``, when what the optimizers began to hold cannot be saved. At a
        boundary: ``Fenced``, ``TooManyFailedSaves``, and on the last ``SaveError``.
        """
        if not self._at.looked:  # later its own training may have registered more
            self._check_modules()
        while self.finished_step < until:
            step = self.finished_step + 1
            self._inside().pace.step_begins(under_way=self._under_way())
            yield step
            self._inside().pace.step_ended()
            passed = self._group.last_vote if self._group else True
            if passed:
                self._finish(self.finished_step if self._group else step)
                self._look_once()
            if self._boundary(last=self.finished_step >= until):
                break
        self._save_last()

    def _look(self, ranks: Ranks) -> dict[str, LeafSpec]:
        """Look at the whole state as a save would, which refuses what cannot be saved. What its modules hold,
        by name.
        """
        leaves = capture(self.state, group=self._launch.group, rank=ranks.rank, world=ranks.world)
        return module_leaves(self.state, leaves)

    def _look_once(self) -> None:
        """After a first step, when optimizers have their state: it is refused now, not at a far first save."""
        if not self._at.looked:
            self._at.looked = True
            self._look(self._inside().ranks)

    def _check_modules(self) -> None:
        """Before training: what was restored is what will be trained, not something wrapped around it since."""
        before, now = self._at.modules, frozenset(self._look(self._inside().ranks))
        if before != now:
            new, gone = sorted(now - before), sorted(before - now)
            raise StateMismatch(
                "StateMismatch: the modules of the state are not what they were when the session was entered\n"
                f"  new since: {', '.join(new[:12]) or 'nothing'}; gone: {', '.join(gone[:12]) or 'nothing'}\n"
                "  what was restored may not be what would be trained; nothing was saved of it\n"
                "  wrap, add adapters and tie before the session is entered",
                new=tuple(new),
                gone=tuple(gone),
            )

    def save(self, step: int | None = None) -> SaveHandle:
        """Begin a save of the state as it is now; returns without waiting for the store.

        ``step`` defaults to the last finished step. Call it between optimizer steps, on every rank.
        Parameters and optimizer state are read while the trainer goes on (``stage="lazy"``): optimizer
        steps and ``load_state_dict`` are waited for, and so is what stands in ``mutating()``. Writes
        that no hook sees are invisible: through ``.data``, NumPy or ``untyped_storage()``, and by fused kernels
        that are called as functions (``torch._fused_adamw_``). Put them into ``mutating()``.

        Raises:
            UnsupportedValue: something in the state cannot be saved faithfully; it is named.
            SaveFailed: this step was saved already.
            NotEntered: this is another process than the one that entered the session, such as a fork of it.
        """
        return self._save_here(step, last=False)

    def _save_here(self, step: int | None, *, last: bool) -> SaveHandle:
        """``last``: no training follows; the save waits for those before it, where another is given up."""
        inside = self._inside()
        with inside.saving:
            return self._save(inside, step, last=last)

    def _save(self, inside: Inside, step: int | None, *, last: bool) -> SaveHandle:
        step = self.finished_step if step is None else step
        if not is_step(step):
            raise SettingsError(
                f"SettingsError: step {step!r} cannot be saved; a step is a whole number from 0 to {MAX_STEP}",
                step=step,
            )
        saved = self._at.saved
        if saved is not None and step <= saved:
            raise SaveFailed(
                f"SaveFailed: step {step} cannot be saved after step {saved}\n"
                "  a step is saved once, and steps only go up; nothing was changed",
                step=step,
                last=saved,
            )
        self._finish(max(self._at.finished, step))
        expected, meter = self._expected(step), Meter(self._clock.now_s)
        try:
            with meter.spent("capture"), no_collecting():
                job = self._job(expected, meter)
        except Exception as error:
            if len(expected.writers) > 1:  # the others need not wait for a share that will not come
                inside.engine.submit(SaveJob(expected, None, trouble=first_line(error), meter=meter))
                self._at.saved = step
            raise
        handle = inside.engine.submit(job, last=last)
        inside.pace.saved(meter.age_s)
        self._at.saved, self._at.handle, self._at.owed = step, handle, False
        if self._group is not None:
            self._group.register_save(step)
        return handle

    # --- entering and leaving -------------------------------------------------------------------

    def __enter__(self) -> Self:
        assert self._entered is None, "a session is entered once"
        ranks = ranks_here(self._launch.world)
        agree(ranks, self._shared_settings())
        with together(ranks, "looking at the state") as told:
            modules = self._look(ranks)
            told.mine = digest(modules)
        require_alike(ranks, told.everybodys, modules)
        self._at.modules = frozenset(modules)
        with together(ranks, "opening the store"):
            store = self._open_store()
            address = nearest(self._tiers, self._uri, self._launch.tier)
            tier = None if address is None else open_tier(address, self._events)
        try:
            self._enter(store, tier, ranks)
        except BaseException:
            if self._entered is None:
                if self._group is not None:
                    self._group.close()
                store.close()
            raise
        try:
            if self._group is None and self._at.restored is None:
                self.save(0)
        except BaseException as trouble:
            self.__exit__(type(trouble), trouble, trouble.__traceback__)
            raise
        return self

    def _enter(self, store: ObjectStore, tier: Tier | None, ranks: Ranks) -> None:
        """Begin an attempt and restore what it starts from, on all ranks or on none."""
        if ranks.rank == 0 and self._launch.status is not None:
            self._events = both(self._events, open_status(self._launch))
        joining = Joining(
            store, tier, ranks, self._launch, self._group, self.settings, self._address(), self._events
        )
        found = joining.find_attempt()
        restored: Restored | None = None
        with together(ranks, "restoring"):
            restored = joining.restore(self.state, found)
        if restored is not None:
            commit = self._at.restored = restored.commit
            self._at.finished = self._at.saved = commit.step
            self._at.rng_restored = restored.rng_restored
        attempt, incarnation = found.attempt, found.incarnation
        self._at.membership = alone(self._launch.group, incarnation)
        if self._group is not None:
            if self._launch.attempt is not None:
                self._group.join()
            self._group.settle(
                step=self._at.finished,
                heal=LiveState(self.state, self._launch.group, ranks.rank, ranks.world, self._before_change),
                attempt=attempt,
                on_turn=self._at_turn,
                carries=found.fresh,
            )
            incarnation, self._at.membership = self._group.incarnation, None
        pace = Pace(
            self.settings.save_every, self._clock, self._events, self.settings.mtbf_s, joining.ends(attempt)
        )
        me = Writer(self._launch.group, ranks.rank, incarnation)
        tiered = None if tier is None else self._enter_tier(store, tier, ranks, me)
        ledger = store if tiered is None or not tiered.shared else tiered.tier.store
        patience = Patience(deadline_s=self.settings.deadline_s)
        engine = SaveEngine(
            store if tiered is None else tiered.tier.store,
            me,
            parent=restored.parent if restored is not None else None,
            settings=fitted(
                WriteSettings(codec=self.settings.codec, patience=patience), len(os.sched_getaffinity(0))
            ),
            events=self._events,
            on_commit=self._committed,
            ledger=ledger,
            journal=NOWHERE if tiered is None else tiered.journal,
            durable=at_once if tiered is None else tiered.durable,
        )
        own_bytes, shared = self.settings.staging_bytes, self._budget
        pool = StagingPool(own_bytes, shared=shared) if tiered is None else tiered.pool(own_bytes, shared)
        inside = Inside(ledger, ranks, attempt, me, engine, self.settings, self._events, pool, pace, tiered)
        inside.gate = Gate(self._yield_to)
        self._entered = inside
        engine.start()
        inside.left_out = left_out(self.state)
        inside.watch(Fences(self.state, self._before_change, inside.foreign))
        self._stop.install()

    def _enter_tier(self, store: ObjectStore, tier: Tier, ranks: Ranks, me: Writer) -> Tiered:
        """Live in the tier, with an agent beside."""
        one_machine = self._group is None or self._launch.tier is not None
        tiered = enter_tier(
            tier, store, ranks, me, self.settings.keep, one_machine=one_machine, events=self._events
        )
        if self._start_agent and self._launch.local_rank == 0 and self._launch.tier is None:
            environ = {**os.environ, **store_environ(self._store_options)}
            keeper = AgentKeeper(tier, self._address(), environ, self._events, one_writer=self._one_writer)
            tiered.keep_agent(keeper)
        return tiered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        inside = self._entered
        if inside is not None and inside.is_elsewhere:  # the run is the other process's: leave it alone
            self._stop.remove()
            self._entered = None
            return
        inside = self._inside()
        self._stop.remove()
        try:
            failed = self._drain(inside)
            if error is not None and failed is not None and failed is not error:
                error.add_note(f"and a save in the background failed: {failed}")
            elif error is None and failed is not None:
                raise failed
        finally:
            if inside.fences is not None:
                inside.fences.remove()
            self._entered = None
            inside.pool.close()
            if self._group is not None:
                self._group.close()
            if inside.tiered is not None:
                inside.tiered.close()
            inside.store.close()

    def _drain(self, inside: Inside) -> BaseException | None:
        """Finish what is under way. What the last save failed with, unless a boundary or
        ``SaveHandle.wait`` told it before.
        """
        inside.gate.take_away()
        try:
            inside.engine.close(self.settings.deadline_s * 2)
        except TimeoutError as error:
            return _not_ended(self._at.saved, error)
        inside.janitor_done()
        errors = [failure.error for failure in inside.engine.outcome().failures]
        handle = self._at.handle
        failed = handle.error if handle is not None and not handle.heard else None
        return failed if any(failed is one for one in errors) else None

    # --- how ------------------------------------------------------------------------------------

    def _inside(self) -> Inside:
        if self._entered is None:
            raise NotEntered("use a Session as a context: `with ftckpt.Session(...) as ckpt:`")
        self._entered.require_here()
        return self._entered

    def _shared_settings(self) -> dict[str, object]:
        shared: dict[str, object] = {name: repr(getattr(self.settings, name)) for name in Settings.__slots__}
        return {"uri": self._uri, "components": sorted(map(str, self.state)), **shared}

    def _address(self) -> str:
        """The run's address as it is from any folder, for the record."""
        return self._uri if "://" in self._uri else str(Path(self._uri).absolute())

    def _finish(self, step: int) -> None:
        """Note a finished step; a supervisor hears of it (from the group, where there is one)."""
        if step > self._at.finished and self._group is None:
            self._events(Event("session.step", {"step": step}))
        self._at.finished = step

    def _capture(self, step: int) -> tuple[LiveLeaf, ...]:
        inside = self._inside()
        manager = self._group.state_dict() if self._group is not None else None
        internal = {"step": step, "run_seed": self.settings.run_seed, "manager": manager}
        return capture(
            {**self.state, INTERNAL: internal},
            group=self._launch.group,
            rank=inside.ranks.rank,
            world=inside.ranks.world,
        )

    def _expected(self, step: int) -> Expected:
        """What a save of this step is: who takes part in it, with this rank's membership."""
        inside = self._inside()
        membership = self._members()
        return Expected(
            at=Position(step, inside.attempt),
            parent=None,
            quorum=membership.quorum_id,
            members=membership.digest(),
            writers=tuple(
                Writer(member.group, rank, member.incarnation)
                for member in membership.members
                for rank in range(inside.ranks.world)
            ),
        )

    def _members(self) -> Membership:
        membership = self._group.membership if self._group is not None else self._at.membership
        assert membership is not None
        return membership

    def _job(self, expected: Expected, meter: Meter) -> SaveJob:
        inside, membership = self._inside(), self._members()
        leaves = self._capture(expected.at.step)
        place_ = Place(membership.index, len(membership.members), inside.ranks.rank)
        guarantee, why = self._exactness(len(membership.members))
        job = SaveJob(expected, None, guarantee=guarantee, why=why, meter=meter)
        job = replace(
            job,
            gate=inside.gate,
            updates=inside.updates(),
            left_out=(*inside.left_out, *left_out_now(self.state)),
        )
        tasks = plan_save([leaf.holding for leaf in leaves], place_, self.settings.chunk_bytes)
        try:
            return replace(job, snapshot=inside.snapshot(job, leaves, tasks, place_.participants))
        except SaveFailed as error:
            meter.fail("capture")
            return replace(job, trouble=error.message)

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """Put around anything that writes, moves or offloads captured parameters or optimizer state
        without an optimizer step or ``load_state_dict``.

        A save that still reads live memory stages the rest of it first; see ``fence_deadline_s``.
        """
        self._before_change("session.mutating")
        yield

    @contextmanager
    def yielding(self, deadline_s: float = 30.0) -> Iterator[None]:
        """Put around what must have the machine for itself, such as an engine that wakes up or generates.

        No chunk is read and no PUT begins meanwhile, for at most ``deadline_s``; what is under way ends.
        Staging memory that is not in use is let go of. Fences go on: an optimizer step inside may stage.
        From any thread; contexts may overlap.
        """
        require_number("deadline_s", deadline_s, low=SHORTEST_S, high=DAY_S)
        with self._inside().yielding(deadline_s):
            yield

    def _before_change(self, what: str, *, frozen_too: bool = True) -> None:
        """The fence, on the thread that is about to change captured memory."""
        if self._entered is not None and not self._entered.is_elsewhere:
            self._entered.fence(what, frozen_too=frozen_too)

    def _exactness(self, groups: int) -> tuple[Guarantee, tuple[str, ...]]:
        at = self._at
        return exactness(self.settings, at.restored, rng_restored=at.rng_restored, groups=groups)

    def _at_turn(self, turn: Turn) -> None:
        """The quorum of a turn is known: look at who is there, before anything is computed."""
        inside, group = self._inside(), self._group
        assert group is not None
        if not group.carries:
            raise AttemptWentBack(
                f"AttemptWentBack: nobody in the quorum holds the state of attempt {inside.attempt} any more\n"
                "  going on from the store would take this attempt back; it needs a new attempt\n"
                "  committed steps are safe: the supervisor, or `ftckpt resume`, begins the next attempt",
                attempt=inside.attempt,
            )
        before, now = self._at.membership, group.membership
        if before is not None:
            inside.engine.lose(
                frozenset(m.incarnation for m in before.members) - {m.incarnation for m in now.members}
            )
        self._at.membership = now
        if turn.healed:
            self._at.finished = turn.step - 1
            self._at.saved = group.peers_saved
            at = Position(group.peers_saved, inside.attempt) if group.peers_saved is not None else None
            inside.engine.healed(at)
            self._events(Event("session.healed", {"step": turn.step - 1, "attempt": inside.attempt}))
        if turn.step == 1 and self._at.restored is None and group.peers_saved is None:
            self.save(0)

    def _boundary(self, *, last: bool = False) -> bool:
        """Between two steps: hear of the background, save what is due. True: end the loop. ``last``: it ends
        anyway.
        """
        inside, settings = self._inside(), self.settings
        outcome = inside.engine.outcome()
        if inside.tiered is not None:
            inside.tiered.report()
        for failure in outcome.failures:
            told = {"step": failure.step, "stage": failure.stage, "error": str(failure.error)}
            self._events(Event("session.save_failed", told))
            if isinstance(failure.error, SaveError):
                self._at.owed = True
        for stale in outcome.stale:
            where = {"step": stale.step, "component": stale.component}
            self._events(Event("session.stale", {**where, "why": stale.why}))
        for seconds in outcome.durable_s:
            inside.pace.durable(seconds)
        if outcome.fenced is not None:
            raise outcome.fenced
        limit = settings.max_failed_saves
        if limit is not None and outcome.failed_in_row >= limit:
            raise TooManyFailedSaves(
                f"TooManyFailedSaves: {outcome.failed_in_row} saves in a row failed, the limit is {limit}\n"
                f"  last reason: {_reason(outcome.failures)}\n"
                f"  the newest commit is {'step ' + str(outcome.last.step) if outcome.last else 'the restored one'}",
                failed=outcome.failed_in_row,
            )
        step = self._at.finished
        stop = self._should_stop(step)
        if self._at.saved is not None and step <= self._at.saved:
            return stop
        if self._due(step):
            self._save_here(step, last=last or stop)
        return stop

    def _due(self, step: int) -> bool:
        """Whether all participants save now. Step numbers they all see alike. What clocks say, and that
        a failed save is owed, is told first, so that all save after the next step; alone, at once.
        """
        inside, policy = self._inside(), self.settings.save_every
        asks = not policy.measures_time or inside.ranks.rank == 0
        due = asks and inside.pace.due(step, under_way=self._under_way())
        if due and not policy.measures_time:
            return True
        wanted = due or (self._at.owed and not self._under_way() and not inside.engine.stalled)
        if self._group is not None:
            agreed = "save" in self._group.agreed and bool(self._group.last_vote)
            if wanted and not agreed:
                self._group.wish("save")
            return agreed
        if inside.ranks.world == 1:
            return wanted
        called = inside.ranks.posted(f"save {inside.attempt} {step}")
        if wanted and not called:
            inside.ranks.post(f"save {inside.attempt} {step + 1}")
        return called

    def _under_way(self) -> bool:
        """Whether a save is: the last one is the last to end."""
        return self._at.handle is not None and not self._at.handle.done

    def _should_stop(self, step: int) -> bool:
        if self._group is not None:
            if self._stop.seen:
                self._group.wish("stop")
            return "stop" in self._group.agreed and bool(self._group.last_vote)
        ranks = self._inside().ranks
        told = (
            ranks.stop_at(step if ranks.world == 1 else step + 1) if self._stop.seen else ranks.stop_at(None)
        )
        return told is not None and step >= told

    def _save_last(self) -> None:
        """Save the last step, if it is not, and wait for it."""
        step = self._at.finished
        if self._at.saved is None or step > self._at.saved:
            self._save_here(step, last=True)
        if self._at.handle is not None:
            try:
                self._at.handle.wait(self.settings.deadline_s * 2)
            except TimeoutError as error:
                raise _not_ended(step, error) from error

    def _committed(self, commit: Commit) -> None:
        """On the engine's thread, after a commit is acknowledged: its first writer collects."""
        inside = self._entered
        if inside is None or not commit.fragments:
            return
        if commit.fragments[0].key.endswith(f"/{inside.me}"):
            inside.collect_soon(self.settings.keep)


def _not_ended(step: int | None, cause: TimeoutError) -> SaveFailed:
    return SaveFailed(
        f"SaveFailed: step {step} is not known to be saved: {cause}\n"
        "  a call to the store may hang; should it return, what was begun is given up or committed, never half\n"
        "  earlier commits are intact: `ftckpt ls` says which there are",
        step=step,
    )


def _reason(failures: Sequence[Failure]) -> str:
    """What the last of these saves failed with, and in which stage."""
    if not failures:
        return "see the log"
    return f"{first_line(failures[-1].error)} (in its stage {failures[-1].stage!r})"
