"""A replica group in a torchft quorum: who takes part in a step, its gradient, its vote.

Knows torchft's Manager and the slots' fixed tree. Refuses to know models, optimizers, stores and
attempts' rules: state is a ``HealState``, and what a lost attempt means is the session's business.

Recommended ways of torchft that this relies on (docs/design/0003-supervisor.md has the supervisor's half):
sync quorum, so that a healed group takes part with real gradients in the same step and nobody
exports state during a forward; errors go to the Manager, so that the vote fails and the step is
repeated; a process-group timeout above twice the slowest heal, or healing livelocks.
"""

from __future__ import annotations

import gc
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, TCPStore  # torch.distributed re-exports them untyped
from torchft import Manager, ProcessGroupGloo

from ftckpt.bounds import DAY_S, SHORTEST_S, require_number
from ftckpt.elastic import hello as hi
from ftckpt.elastic.heal import KEY, HealState, HealTransport
from ftckpt.elastic.hello import Hello
from ftckpt.elastic.launch import Launch, open_status
from ftckpt.errors import MembershipError, SettingsError
from ftckpt.events import Event, Events, both, silent
from ftckpt.membership import Member, Membership
from ftckpt.slots import Node, Turn, check_slots, finish, share, subtrees, sum_subtree, walk

SEGMENT_ELEMS = 4 << 20
"""Partial sums are exchanged this many elements at a time: the memory of a reduce on top of its own
partials is participants x subtrees x this."""
ADDRESS_BYTES = 256
STATELESS = -1
"""The step of a group that joined but holds no state yet: behind every other, so nobody heals from it."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each wait may take. They must stand in this order, or a heal can never finish, or a
    slow peer is a crash: refused otherwise.
    """

    heal_s: float
    join_s: float
    heartbeat_s: float
    group_s: float
    quorum_s: float
    connect_s: float

    def __post_init__(self) -> None:
        for name in Timeouts.__slots__:
            require_number(f"timeout {name}", getattr(self, name), low=SHORTEST_S, high=DAY_S)
        if self.group_s < 2 * self.heal_s:
            raise SettingsError(
                f"pg_timeout_s {self.group_s:g} is below twice heal_time_s {self.heal_s:g}\n"
                "  healthy groups would give up a step while a peer is still healing, and so for ever",
                pg_timeout_s=self.group_s,
                heal_time_s=self.heal_s,
            )
        least_s = self.group_s + self.join_s + self.heartbeat_s
        if self.quorum_s <= least_s:
            raise SettingsError(
                f"quorum_timeout_s {self.quorum_s:g} must be above pg_timeout_s + join_timeout_s + "
                f"heartbeat_timeout_s = {least_s:g}\n"
                "  a group that waits for a slow peer would crash instead",
                quorum_timeout_s=self.quorum_s,
            )


class ReplicaGroup:
    """This process's membership; a ``slots.SlotGroup``. One thread calls it.

    Order of life: the constructor does nothing; ``open`` once, when the state has been restored or
    built (or, where no supervisor says which attempt this is: ``join``, ``ask``, ``spread``, ``settle``);
    then ``begin``, ``exchange`` and ``reduce``, ``vote``, once a step; ``close``.
    With several ranks in the group all of them make the same calls, and torch.distributed is
    initialised inside the group before ``open``.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        slots: int,
        heal_time_s: float = 30.0,
        join_timeout_s: float = 5.0,
        heartbeat_timeout_s: float = 1.0,
        pg_timeout_s: float | None = None,
        quorum_timeout_s: float | None = None,
        connect_timeout_s: float = 10.0,
        max_failed_votes: int = 20,
        events: Events = silent,
        incarnation: str | None = None,
    ) -> None:
        if launch.lighthouse is None:
            raise SettingsError(
                f"group {launch.group} was told of no lighthouse (TORCHFT_LIGHTHOUSE)\n"
                "  start it with `ftckpt run`, or train alone with ftckpt.slots.Alone"
            )
        group_s = max(2 * heal_time_s, 10.0) if pg_timeout_s is None else pg_timeout_s
        least_s = group_s + join_timeout_s + heartbeat_timeout_s
        self._timeouts = Timeouts(
            heal_s=heal_time_s,
            join_s=join_timeout_s,
            heartbeat_s=heartbeat_timeout_s,
            group_s=group_s,
            quorum_s=max(least_s + 30.0, 120.0) if quorum_timeout_s is None else quorum_timeout_s,
            connect_s=connect_timeout_s,
        )
        self._launch = launch
        self._slots = check_slots(slots)
        self._max_failed_votes = max_failed_votes
        self._events = events
        self._incarnation = uuid.uuid4().hex if incarnation is None else uuid.UUID(incarnation).hex
        self._pg = _Gloo(timeout=timedelta(seconds=group_s))
        self._manager: Any = None
        self._transport: Any = None
        self._store: TCPStore | None = None
        self._inner: dist.ProcessGroup | None = None
        self._membership: Membership | None = None
        self._peers: tuple[Hello, ...] = ()
        self._attempt = launch.attempt
        self._batches_committed = 0
        self._saved_step: int | None = None
        self._wishes: set[str] = set()
        self._agreed: frozenset[str] = frozenset()
        self._on_turn: Callable[[Turn], None] = lambda _turn: None
        self._carries = not launch.rejoin
        self._was_healed = False
        self._healed_now = False
        self._turn: Turn | None = None
        self._last_vote: bool | None = None
        self._failed_votes = 0

    # --- what others ask -----------------------------------------------------------------------

    @property
    def launch(self) -> Launch:
        """How this process was started."""
        return self._launch

    @property
    def total_slots(self) -> int:
        return self._slots

    @property
    def expected_slots(self) -> range:
        """None before the first quorum: a rejoining group is healed before it generates anything."""
        if self._membership is None:
            return range(0)
        return share(self._slots, len(self._membership.members), self._membership.index)

    @property
    def membership(self) -> Membership:
        """The last quorum's. Asserts that there was one."""
        assert self._membership is not None, "begin a turn first"
        return self._membership

    @property
    def peers(self) -> tuple[Hello, ...]:
        """What every member of the last quorum said of itself, in quorum order."""
        return self._peers

    @property
    def attempt(self) -> int | None:
        """The attempt of this group: the launch's, or what ``open`` was told."""
        return self._attempt

    @property
    def incarnation(self) -> str:
        """This life of the group, the same on all its ranks from ``open`` on."""
        return self._incarnation

    @property
    def carries(self) -> bool:
        """Whether this group's state never left its attempt: it was not restarted inside it, or was
        since in a quorum with a member of which that is true. Where it is False after ``begin``,
        nobody in the quorum has the state of this attempt any more.
        """
        return self._carries

    @property
    def was_healed(self) -> bool:
        """Whether a peer gave us its state at some time in this life."""
        return self._was_healed

    @property
    def finished_step(self) -> int:
        """The last step whose vote passed, or the step of the state it was opened with."""
        return int(self._open().current_step())

    @property
    def last_vote(self) -> bool | None:
        return self._last_vote

    @property
    def failed_votes_in_a_row(self) -> int:
        return self._failed_votes

    def register_save(self, step: int) -> None:
        """Remember that a save of ``step`` has begun here; peers hear of it in the next turn."""
        self._saved_step = step

    @property
    def peers_saved(self) -> int | None:
        """The last step that any member of the quorum, this one included, registered a save of."""
        return max((h.saved_step for h in self._peers if h.saved_step is not None), default=None)

    def wish(self, word: str) -> None:
        """Wish that all do something together (``hello.WISHES``): in the next turn everybody knows,
        all in the same turn. Forgotten once a turn in which it was known has passed its vote.
        """
        assert word in hi.WISHES, word
        self._wishes.add(word)

    @property
    def agreed(self) -> frozenset[str]:
        """What any rank of any member wished for before the turn under way, or that just ended."""
        return self._agreed

    def state_dict(self) -> dict[str, int]:
        """The Manager's part of a commit."""
        if self._manager is None:
            return {"step": 0, "batches_committed": self._batches_committed}
        return {key: int(value) for key, value in self._manager.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over a commit's part before ``settle``, which says the step."""
        assert self._manager is None or self.finished_step == STATELESS, "later the state comes from peers"
        self._batches_committed = int(state["batches_committed"])

    # --- life ----------------------------------------------------------------------------------

    def open(
        self,
        *,
        step: int,
        heal: HealState,
        attempt: int | None = None,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        """``join`` and ``settle`` in one, for a group that was told its attempt by a supervisor."""
        self.join()
        self.settle(step=step, heal=heal, attempt=attempt, on_turn=on_turn)

    def join(self) -> None:
        """Send heartbeats from now on: peers wait for this group. It has no state yet, so no peer is
        ever healed from it, and it takes part in no step before ``settle``.

        With several ranks this is a collective of the group. Raises ``MembershipError`` when the
        lighthouse cannot be reached.
        """
        assert self._manager is None, "join once"
        launch, timeouts = self._launch, self._timeouts
        if launch.rank == 0 and launch.status is not None:
            self._events = both(self._events, open_status(launch))
        logging.getLogger("torchft.manager").addFilter(_worth_reading)
        host, port = self._meet()
        transport = HealTransport(launch.host, self._attempt, timeouts.group_s)
        transport.start()
        try:
            manager = Manager(
                pg=self._pg,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,
                use_async_quorum=False,
                timeout=timedelta(seconds=timeouts.group_s),
                quorum_timeout=timedelta(seconds=timeouts.quorum_s),
                connect_timeout=timedelta(seconds=timeouts.connect_s),
                rank=launch.rank,
                world_size=launch.world,
                store_addr=host,
                store_port=port,
                lighthouse_addr=launch.lighthouse,
                replica_id=launch.group,
                hostname=launch.host,
                checkpoint_transport=transport,
                init_sync=True,
                quorum_retries=max(1, int(timeouts.quorum_s)),
            )
        except Exception as e:
            transport.shutdown()
            raise MembershipError(
                f"group {launch.group} cannot join the lighthouse at {launch.lighthouse}: {e}\n"
                "  nothing was changed; is the supervisor still running?",
                lighthouse=launch.lighthouse,
            ) from e
        manager.load_state_dict({"step": STATELESS, "batches_committed": self._batches_committed})
        self._manager, self._transport = manager, transport

    def ask(self) -> tuple[int | None, ...]:
        """Between ``join`` and ``settle``: the attempt that each member of a quorum carries, in quorum
        order; ``index`` is ours. Peers that are training repeat their turn, nothing is computed.

        Raises ``MembershipError`` as ``begin`` does.
        """
        manager = self._open()
        while True:
            self._quorum(manager, STATELESS + 1, allow_heal=False)
            hellos = self._hear(manager, ready=False)
            if self._agree(not isinstance(hellos, str)) and not isinstance(hellos, str):
                self._peers = hellos
                return tuple(hello.attempt for hello in hellos)
            self._fail(hellos if isinstance(hellos, str) else "another rank of this group has lost its peers")
            self.vote()

    @property
    def index(self) -> int:
        """Our place in the last quorum."""
        assert self._pg.seat is not None, "ask or begin first"
        return self._pg.seat.rank

    def spread(self, attempt: int | None) -> int | None:
        """After ``ask``: everybody gives what they claimed, and learns what any of them did; ``None``
        when nobody did, or a peer was lost on the way: ask again. Called by rank 0 of every member.
        """
        self._attempt = attempt
        mine = torch.tensor([hi.NONE if attempt is None else attempt], dtype=torch.int64)
        try:
            told = max(int(one) for one in self._gather_or_raise(mine, len(self._peers)))
        except Exception as e:
            self._fail(_text(e))
            return attempt
        return None if told == hi.NONE else told

    def settle(
        self,
        *,
        step: int,
        heal: HealState,
        attempt: int | None = None,
        on_turn: Callable[[Turn], None] | None = None,
        carries: bool = True,
    ) -> None:
        """Take part from now on, so build and restore everything first. ``step`` is the finished step
        of the state we hold. ``on_turn`` is called by ``begin`` when the quorum is known and healed,
        before the turn is handed to the trainer. ``carries=False``: the attempt is older than this
        life of the group, which must be healed before its state counts as the attempt's.
        """
        manager = self._open()
        self._carries = self._carries and carries
        if attempt is not None:
            self._attempt = self._transport.attempt = attempt
        if on_turn is not None:
            self._on_turn = on_turn

        def load(state: dict[str, object]) -> None:
            heal.load(state)
            self._healed_now = self._was_healed = True

        manager.register_state_dict_fn(KEY, load, heal.save)
        manager.load_state_dict({"step": step, "batches_committed": self._batches_committed})

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave the quorum. Waits at most ``timeout_s``; what still hangs then ends with the process."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        self._batches_committed = int(manager.batches_committed())

        def leave() -> None:
            manager.shutdown(wait=False)
            self._pg.abort(errored=False)

        leaving = threading.Thread(target=leave, name="ftckpt-leave", daemon=True)
        leaving.start()
        leaving.join(timeout_s)

    # --- a turn --------------------------------------------------------------------------------

    def begin(self, step: int) -> Turn:
        """As ``SlotGroup.begin``. Turns that break before anything was computed are repeated here.

        Raises:
            MembershipError: no quorum in ``quorum_timeout_s``, too many broken turns in a row, or
                this group has no place in the quorum (its attempt is over, its name is taken).
        """
        manager = self._open()
        finished = int(manager.current_step())
        assert step == finished + 1, f"step {step} cannot follow the finished step {finished}"
        self._healed_now = False
        while True:
            self._quorum(manager, finished + 1)
            problem = self._greet(manager)
            if self._agree(problem is None):
                return self._begun(int(manager.current_step()) + 1)
            self._fail(problem or "another rank of this group has lost its peers")
            self.vote()

    def exchange(self, turn: Turn, mine: Mapping[int, Tensor]) -> Tensor:
        assert turn is self._turn, "the turn is over"
        assert sorted(mine) == list(turn.slots), (sorted(mine), turn.slots)
        parties = len(turn.participants)
        try:
            example = self._example(mine, parties)
        except Exception as e:
            self._fail(_text(e))
            example = _Example((0,), torch.uint8, "cpu")
        zeros = torch.zeros((self._slots, *example.shape), dtype=example.dtype, device=example.device)
        if parties == 1:
            return torch.stack([mine[slot] for slot in turn.slots])
        shares = [share(self._slots, parties, index) for index in range(parties)]
        rows = torch.zeros(
            (max(map(len, shares)), zeros[0].numel() * zeros.element_size()), dtype=torch.uint8
        )
        for row, slot in enumerate(turn.slots):
            rows[row] = _as_bytes(mine[slot])
        everything = self._gather(rows) if not self._errored() else None
        if not self._agree(everything is not None) or everything is None:
            self._fail("another rank of this group has lost its peers")
            return zeros
        packed = torch.cat([everything[index][: len(part)] for index, part in enumerate(shares)])
        return packed.reshape(-1).view(example.dtype).reshape(zeros.shape).to(example.device)

    def reduce(self, turn: Turn, gradient: Callable[[int], Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        assert turn is self._turn, "the turn is over"
        if self._errored():
            return torch.zeros(numel, dtype=dtype)
        mine: dict[Node, Tensor] = {}
        for node in subtrees(turn.slots, self._slots):
            partial = sum_subtree(node, gradient)
            assert partial.shape == (numel,) and partial.dtype == dtype, (partial.shape, partial.dtype)
            mine[node] = partial
        total = self._finish(mine, len(turn.participants), numel, dtype)
        if not self._agree(total is not None) or total is None:
            self._fail("another rank of this group has lost its peers")
            return torch.zeros(numel, dtype=dtype)
        return total

    def vote(self) -> bool:
        """As ``SlotGroup.vote``. Raises ``MembershipError`` when too many votes failed in a row."""
        manager = self._open()
        error = manager.errored()
        try:
            passed = bool(manager.should_commit())
        except Exception as e:
            raise MembershipError(
                f"group {self._launch.group} could not vote on step {self.finished_step + 1}: {e}\n"
                "  a rank of this group is gone or hangs; the group must be restarted as a whole",
                step=self.finished_step + 1,
            ) from e
        turn, self._turn = self._turn, None
        self._last_vote = passed
        if passed:
            self._wishes -= self._agreed
        self._failed_votes = 0 if passed else self._failed_votes + 1
        step = self.finished_step if passed else self.finished_step + 1
        reason = "" if error is None else str(error.original_exception)
        healed = turn is not None and turn.healed
        self._tell(
            "voted", step=step, vote=passed, healed=healed, reason=reason, finished_step=self.finished_step
        )
        if not passed and self._failed_votes >= self._max_failed_votes:
            raise MembershipError(
                f"the vote on step {step} failed {self._failed_votes} times in a row, last: {reason}\n"
                f"  step {self.finished_step} is intact in memory and what was committed stays readable",
                step=step,
                failed_votes=self._failed_votes,
            )
        return passed

    # --- how -----------------------------------------------------------------------------------

    def _open(self) -> Any:
        assert self._manager is not None, "open first"
        return self._manager

    def _errored(self) -> bool:
        return self._open().errored() is not None

    def _begun(self, step: int) -> Turn:
        membership = self.membership
        self._turn = Turn(
            step, self.expected_slots, membership.groups, membership.index, healed=self._healed_now
        )
        self._agreed = self._wished()
        self._tell("begun", step=step, healed=self._healed_now)
        self._on_turn(self._turn)
        return self._turn

    def _quorum(self, manager: Any, step: int, *, allow_heal: bool = True) -> None:
        self._tell("asked", step=step)
        try:
            manager.start_quorum(allow_heal=allow_heal)
        except Exception as e:
            raise MembershipError(
                f"group {self._launch.group} got no quorum for step {step}: {e}\n"
                f"  the lighthouse is {self._launch.lighthouse}; what was committed stays readable",
                step=step,
            ) from e

    def _greet(self, manager: Any) -> str | None:
        """Introduce everybody to everybody. Returns what is wrong with this quorum, if anything."""
        error = manager.errored()
        hellos = self._hear(manager, ready=error is None)
        if isinstance(hellos, str):
            return hellos
        problem = hi.judge(hellos, self.index)
        if problem is not None:
            return problem if error is None else str(error.original_exception)
        self._peers = hellos
        self._carries = any(h.carries for h in hellos)
        seat = self._pg.seat
        assert seat is not None
        self._membership = Membership(seat.quorum_id, tuple(h.member for h in hellos), seat.rank)
        return None

    def _hear(self, manager: Any, *, ready: bool) -> tuple[Hello, ...] | str:
        """What everybody in this quorum says of itself, or why they could not be heard."""
        seat, error = self._pg.seat, manager.errored()
        if seat is None or not self._pg.usable:
            return "the process group could not be formed" if error is None else str(error.original_exception)
        mine = Hello(
            Member(self._launch.group, self._incarnation),
            self._attempt,
            self._launch.life,
            int(manager.current_step()),
            self._saved_step,
            self._carries,
            ready=ready,
            wishes=frozenset(self._wishes),
        )
        record = torch.frombuffer(bytearray(hi.pack(mine)), dtype=torch.uint8)
        try:
            records = self._gather_or_raise(record, seat.world)
            return tuple(hi.unpack(bytes(r.numpy().tobytes())) for r in records)
        except MembershipError:
            raise
        except Exception as e:
            return _text(e)

    def _example(self, mine: Mapping[int, Tensor], parties: int) -> _Example:
        """Shape and dtype of the payloads; a member without slots must ask the others."""
        first = next(iter(mine.values()), None)
        known = None if first is None else _Example(tuple(first.shape), first.dtype, str(first.device))
        for slot, payload in mine.items():
            assert known is not None
            assert (tuple(payload.shape), payload.dtype) == (known.shape, known.dtype), (
                f"slot {slot}: {payload.shape}"
            )
        if parties <= self._slots:
            assert known is not None, "at least one slot a group"
            return known
        record = torch.full((2 + MAX_DIMS,), -1, dtype=torch.int64)
        if known is not None:
            assert len(known.shape) <= MAX_DIMS, known.shape
            record[0], record[1] = DTYPES.index(known.dtype), len(known.shape)
            for at, extent in enumerate(known.shape):
                record[2 + at] = extent
        if self._errored():
            raise MembershipError("the turn has failed")
        told = next(r.tolist() for r in self._gather_or_raise(record, parties) if int(r[0]) >= 0)
        shape = tuple(int(extent) for extent in told[2 : 2 + int(told[1])])
        return known or _Example(shape, DTYPES[int(told[0])], "cpu")

    def _finish(
        self, mine: Mapping[Node, Tensor], parties: int, numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Exchange partial sums and finish the tree, a segment at a time."""
        if parties == 1:
            return finish(mine, self._slots)
        where: dict[Node, tuple[int, int]] = {}
        counts = [0] * parties
        for index, node in walk(self._slots, parties):
            where[node] = (index, counts[index])
            counts[index] += 1
        device = next((partial.device for partial in mine.values()), torch.device("cpu"))
        total = torch.empty(numel, dtype=dtype)
        for start in range(0, numel, SEGMENT_ELEMS):
            stop = min(start + SEGMENT_ELEMS, numel)
            rows = torch.zeros(max(counts), stop - start, dtype=dtype)
            for row, partial in enumerate(mine.values()):
                rows[row] = partial[start:stop]
            everything = self._gather(rows)
            if everything is None:
                return None
            total[start:stop] = finish({n: everything[i][k] for n, (i, k) in where.items()}, self._slots)
        return total.to(device)

    def _gather(self, mine: Tensor) -> list[Tensor] | None:
        """Everybody's tensor, or ``None`` and the turn has failed."""
        try:
            return self._gather_or_raise(mine, len(self.membership.members))
        except Exception as e:
            self._fail(_text(e))
            return None

    def _gather_or_raise(self, mine: Tensor, parties: int) -> list[Tensor]:
        if parties == 1:
            return [mine]
        raw = _as_bytes(mine)
        found = [torch.empty_like(raw) for _ in range(parties)]
        self._pg.allgather([found], [raw], AllgatherOptions()).wait()
        return [f.view(mine.dtype).reshape(mine.shape) for f in found]

    def _fail(self, why: str) -> None:
        """Make the vote fail, and close our connections so that live peers learn of it at once
        instead of after a timeout. The exception is a fresh one: a traceback would keep the dead
        work, and with it the sockets, alive.
        """
        manager = self._open()
        if manager.errored() is None:
            manager.report_error(MembershipError(why))
        if self._pg.usable:
            self._pg.abort()
            gc.collect()

    def _agree(self, fine: bool) -> bool:
        """Whether all ranks of this group are fine. Without it one rank would skip a forward in
        which the others wait for it.
        """
        if self._inner is None:
            return fine
        flag = torch.tensor([int(fine)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._inner)
        return bool(flag.item())

    def _wished(self) -> frozenset[str]:
        """Everybody's wishes, on every rank: each rank heard those of its own peers only."""
        bits = hi.to_bits({wish for h in self._peers for wish in h.wishes})
        if self._inner is not None:
            flags = torch.tensor([bits >> i & 1 for i in range(len(hi.WISHES))])
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._inner)
            bits = sum(int(flag) << i for i, flag in enumerate(flags.tolist()))
        return hi.from_bits(bits)

    def _meet(self) -> tuple[str, int]:
        """A TCPStore for the Manager, hosted by rank 0, and one incarnation for all ranks."""
        launch = self._launch
        if launch.world == 1:
            self._store = TCPStore(launch.host, 0, is_master=True, wait_for_workers=False)
            return launch.host, self._store.port
        if not dist.is_initialized() or dist.get_world_size() != launch.world:
            raise SettingsError(
                f"group {launch.group} has {launch.world} ranks, but torch.distributed is not initialised with as many\n"
                "  call torch.distributed.init_process_group() inside the group before the session begins"
            )
        self._inner = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=self._timeouts.group_s), group_desc="ftckpt"
        )
        told = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8)
        if launch.rank == 0:
            self._store = TCPStore(launch.host, 0, is_master=True, wait_for_workers=False)
            text = f"{self._incarnation} {self._store.port} {launch.host}".encode()
            told[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(told, group=self._inner, group_src=0)
        self._incarnation, port, host = bytes(told.numpy().tobytes()).rstrip(b"\0").decode().split(" ")
        return host, int(port)

    def _tell(self, phase: str, **fields: object) -> None:
        membership = self._membership
        self._events(
            Event(
                "group.turn",
                {
                    "phase": phase,
                    "group": self._launch.group,
                    "rank": self._launch.rank,
                    "life": self._launch.life,
                    "attempt": self._attempt,
                    "quorum_id": None if membership is None else membership.quorum_id,
                    "participants": [] if membership is None else list(membership.groups),
                    "carries": self._carries,
                    **fields,
                },
            )
        )


@dataclass(frozen=True, slots=True)
class _Example:
    """What every payload of an exchange looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class _Seat:
    """Our place in the process group of one quorum."""

    quorum_id: int
    rank: int
    world: int


class _Gloo(ProcessGroupGloo):  # type: ignore[misc]  # torchft is untyped
    """torchft's gloo group, which also remembers what it was configured for and whether it lives."""

    seat: _Seat | None = None
    usable: bool = False

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        self.usable = False
        super().configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )
        self.seat = _Seat(quorum_id or 0, rank, world_size)
        self.usable = True

    def abort(self, errored: bool = True) -> None:
        self.usable = False
        super().abort(errored)


MAX_DIMS = 8
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""Element types that payloads may have when there are more participants than slots."""


def _worth_reading(record: logging.LogRecord) -> bool:
    """Not torchft's warning, at every quorum, that there is no NCCL recorder on a CPU."""
    return "NCCL flight recorder" not in record.getMessage()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _text(e: BaseException) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
