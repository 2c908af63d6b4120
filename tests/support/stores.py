"""A simulated store under actors that take turns: interleavings as values.

Each actor is real code (a job, a resumer, a collector) on its own thread, but only one runs at a
time: every store call and every sleep hands the turn back, and the test says who goes on and what
becomes of the call. So a schedule is written down line by line, or drawn from a seed, and the same
schedule always gives the same outcome::

    sim = Sim()
    sim.actor("job", lambda store, clock: ...)
    sim.until("job", "create", "commits/")      # about to commit; nothing happened yet
    sim.step("job", "delay")                    # the PUT is on its way, the answer is a timeout
    sim.finish("job")
    sim.land()                                  # now it arrives

What can become of a call: ``ok``; ``lose`` (it took effect, the answer was lost); ``delay`` (it takes
effect later, the answer was lost); ``fail`` (refused, nothing happened); ``die`` and ``die after``
(the actor is gone, before or after the effect).

Time is shared and stands still until somebody sleeps. Pools that read many objects at once, and
probes, do not hand the turn back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from ftckpt.chaos.faults.store import Crash
from ftckpt.clock import Clock
from ftckpt.errors import AlreadyExists, ObjectNotFound, StoreError, StoreTimeout, StoreUnavailable
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore

Fate = Literal["ok", "lose", "delay", "fail", "die", "die after"]
Body = Callable[[ObjectStore, Clock], Any]

STUCK_S = 30.0
_TOGETHER = ("ftckpt-read", "ftckpt-probe")
"""Threads of pools whose calls come in any order; their calls are part of their actor's turn."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The call an actor is about to make. A sleep is one too; ``wake_s`` is when it ends."""

    op: str
    key: str
    wake_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.op} {self.key}"


@dataclass(slots=True)
class Actor:
    """One thread of control, its next call, and how it ended."""

    name: str
    pending: Pending | None = None
    fate: Fate = "ok"
    dead: bool = False
    ended: bool = False
    result: Any = None
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Sim:
    """Objects, a clock, the creates that are still on their way, and the actors."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.delayed: list[tuple[str, bytes]] = []
        self.actors: dict[str, Actor] = {}
        self.trace: list[str] = []
        self.now_s = 0.0
        self._lock = threading.RLock()
        self._arrived = threading.Semaphore(0)

    @property
    def store(self) -> SimStore:
        """The store as nobody's: calls take effect at once. For arranging and for looking."""
        return SimStore(self, None)

    def actor(self, name: str, body: Body) -> None:
        """Start an actor; it runs until its first call."""
        assert name not in self.actors, name
        actor = self.actors[name] = Actor(name)

        def run() -> None:
            try:
                actor.result = body(SimStore(self, actor), SimClock(self, actor))
            except BaseException as error:
                actor.error = error
            actor.ended = True
            self._arrived.release()

        threading.Thread(target=run, name=f"actor-{name}", daemon=True).start()
        self._wait_for(actor)

    def pending(self, name: str) -> Pending | None:
        """What the actor is about to do; ``None`` once it ended."""
        return self.actors[name].pending

    def step(self, name: str, fate: Fate = "ok") -> None:
        """Let the actor make its call, and run on until the next."""
        actor = self.actors[name]
        assert actor.pending is not None, f"{name} has ended\n{self.story()}"
        self.trace.append(f"{name}: {actor.pending}{'' if fate == 'ok' else f'  [{fate}]'}")
        self.now_s = max(self.now_s, actor.pending.wake_s)
        actor.dead = fate in ("die", "die after")
        actor.fate, actor.pending = fate, None
        actor.go.release()
        self._wait_for(actor)

    def until(self, name: str, op: str, prefix: str = "") -> None:
        """Run the actor up to, not including, its next call of that kind."""
        actor = self.actors[name]
        while (call := actor.pending) is not None:
            if call.op == op and call.key.startswith(prefix):
                return
            self.step(name)
        raise AssertionError(f"{name} ended before {op} {prefix}: {actor.error!r}\n{self.story()}")

    def finish(self, name: str) -> Any:
        """Run the actor to its end, alone; its result, or its error raised."""
        actor = self.actors[name]
        while actor.pending is not None:
            self.step(name)
        if actor.error is not None:
            raise actor.error
        return actor.result

    def kill(self, name: str) -> None:
        """The actor is gone before its next call."""
        actor = self.actors[name]
        while actor.pending is not None:  # what its last threads still try fails too
            self.step(name, "die")

    def end(self) -> None:
        """Kill whoever is left."""
        for name in self.actors:
            self.kill(name)

    def land(self, number: int | None = None) -> None:
        """Let one delayed create arrive, or all of them."""
        which = range(len(self.delayed)) if number is None else [number]
        for key, body in [self.delayed[index] for index in which]:
            self.trace.append(f"lands: {key}")
            self.objects.setdefault(key, body)
        self.delayed = [late for index, late in enumerate(self.delayed) if index not in which]

    def explore(
        self, seed: int, *, fates: dict[Fate, float] | None = None, mortal: Sequence[str] = ()
    ) -> None:
        """Run everybody to the end in an order drawn from ``seed``. ``fates`` gives the chance of each
        fate of a create; who is ``mortal`` also dies now and then.
        """
        rng = Random(seed)
        chances = fates or {}
        last = ""
        while live := [a for a in self.actors.values() if a.pending is not None]:
            if self.delayed and rng.random() < 0.1:
                self.land(rng.randrange(len(self.delayed)))
            awake = [a.name for a in live if a.pending is not None and a.pending.wake_s <= self.now_s]
            if not awake or rng.random() < 0.02:
                sleepers = [a.pending.wake_s for a in live if a.pending and a.pending.wake_s > self.now_s]
                self.now_s = min(sleepers, default=self.now_s)
                continue
            if last not in awake or rng.random() < 0.3:
                last = rng.choice(awake)
            call, fate = self.actors[last].pending, "ok"
            assert call is not None
            if call.op == "create":
                fate = rng.choices(["ok", *chances], [1 - sum(chances.values()), *chances.values()])[0]
            if last in mortal and rng.random() < 0.01:
                fate = rng.choice(["die", "die after"])
            self.step(last, fate)  # type: ignore[arg-type]
        self.land()

    def story(self) -> str:
        """The schedule so far, one call a line."""
        return "\n".join(self.trace[-200:])

    def _wait_for(self, actor: Actor) -> None:
        assert self._arrived.acquire(timeout=STUCK_S), f"{actor.name} is stuck\n{self.story()}"

    def _turn(self, actor: Actor | None, call: Pending, effect: Callable[[], Any], body: bytes = b"") -> Any:
        """What an actor's thread does at a call: hand over the turn, wait for it, meet the call's fate."""
        together = threading.current_thread().name.startswith(_TOGETHER) or call.key.startswith("probes")
        if actor is None or together:
            if actor is not None and actor.dead:
                raise Crash(f"{actor.name} is dead")
            with self._lock:
                return effect()
        if actor.dead:
            raise Crash(f"{actor.name} is dead")
        actor.pending = call
        self._arrived.release()
        assert actor.go.acquire(timeout=20 * STUCK_S), f"{actor.name} was left waiting at {call}"
        match actor.fate:
            case "ok":
                return effect()
            case "lose":
                effect()
            case "delay":
                assert call.op == "create", call
                self.delayed.append((call.key, body))
            case "fail":
                raise StoreUnavailable(f"{call}: refused", op=call.op, key=call.key)
            case "die" | "die after":
                if actor.fate == "die after":
                    effect()
                raise Crash(f"{actor.name} died at {call}")
        raise StoreTimeout(f"{call}: no answer", op=call.op, key=call.key)


class SimStore:
    """The shared objects as one actor sees them; linearizable, as the contract asks."""

    def __init__(self, sim: Sim, actor: Actor | None) -> None:
        self._sim = sim
        self._actor = actor

    @property
    def uri(self) -> str:
        return "sim://run"

    @property
    def conditional_create(self) -> bool:
        return True

    def create(self, key: str, body: Buffer) -> None:
        copy = bytes(body)

        def effect() -> None:
            if key in self._sim.objects:
                raise AlreadyExists(f"create {key}: exists", op="create", key=key)
            self._sim.objects[key] = copy

        self._sim._turn(self._actor, Pending("create", key), effect, copy)

    def read(self, key: str, at: ByteRange | None = None) -> bytes:
        def effect() -> bytes:
            body = self._found("read", key)
            if at is None:
                return body
            if at.end > len(body):
                raise StoreError(f"read {key}: {len(body)} bytes", op="read", key=key, size_bytes=len(body))
            return body[at.start : at.end]

        found: bytes = self._sim._turn(self._actor, Pending("read", key), effect)
        return found

    def size(self, key: str) -> int:
        return int(self._sim._turn(self._actor, Pending("size", key), lambda: len(self._found("size", key))))

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        def effect() -> list[ObjectInfo]:
            return [
                ObjectInfo(key, len(body))
                for key, body in sorted(self._sim.objects.items())
                if not prefix or key.startswith(f"{prefix}/")
            ]

        found: list[ObjectInfo] = self._sim._turn(self._actor, Pending("scan", prefix), effect)
        return iter(found)

    def delete(self, keys: Sequence[str]) -> None:
        """Key by key, a turn each: deleting many is not atomic."""
        for key in keys:
            self._sim._turn(
                self._actor, Pending("delete", key), lambda key=key: self._sim.objects.pop(key, None)
            )

    def overwrite(self, key: str, body: Buffer) -> None:
        copy = bytes(body)
        self._sim._turn(self._actor, Pending("overwrite", key), lambda: self._sim.objects.update({key: copy}))

    def close(self) -> None:
        pass

    def _found(self, op: str, key: str) -> bytes:
        if key not in self._sim.objects:
            raise ObjectNotFound(f"{op} {key}: absent", op=op, key=key)
        return self._sim.objects[key]


class SimClock:
    """The shared time. Sleeping is a call: others may go on, and time moves to its end."""

    def __init__(self, sim: Sim, actor: Actor) -> None:
        self._sim = sim
        self._actor = actor

    def now_s(self) -> float:
        return self._sim.now_s

    def sleep(self, seconds: float) -> None:
        call = Pending("sleep", f"{seconds:g} s", self._sim.now_s + seconds)
        self._sim._turn(self._actor, call, lambda: None)


class CheckThenPutStore(SimStore):
    """A store whose create looks, and then writes over whatever came meanwhile, as several
    file systems behind a common interface do. ``racers`` creates that meet in the gap all win.
    """

    def __init__(self, racers: int) -> None:
        super().__init__(Sim(), None)
        self._gap = threading.Barrier(racers)

    def create(self, key: str, body: Buffer) -> None:
        if key in self._sim.objects:
            raise AlreadyExists(f"create {key}: exists", op="create", key=key)
        if key.startswith("probes"):
            self._gap.wait(timeout=STUCK_S)
        self._sim.objects[key] = bytes(body)
