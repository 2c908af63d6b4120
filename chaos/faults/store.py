"""A store that fails when it is told to: the wrapper with which every crash point is visited.

``FaultyStore`` counts the calls that reach it and looks each up in a plan, a list of ``Fault``
values. A fault says which calls it meets and what happens around them. The same plan and the same
calls always give the same outcome; with several threads the order of calls is theirs, the numbering
is not torn. Faults that meet one call are nested, the first of the plan outermost.

To visit every crash point of some work::

    counted = FaultyStore(open_store("memory://counted"))
    work(counted)
    for n in range(1, len(counted.log) + 1):
        for when in ("before", "after"):
            store = FaultyStore(fresh(), [Fault(Die(when), nth=n)])
            with suppress(Crash):
                work(store)
            look at what a reader of store.inner sees

``delete`` of several keys arrives as one call per key, so that dying between two of them is a
crash point as well.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from ftckpt.clock import Clock, SystemClock
from ftckpt.errors import StoreTimeout, StoreUnavailable
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore

Op = Literal["create", "read", "size", "scan", "delete", "overwrite"]
When = Literal["before", "after"]


class Crash(BaseException):
    """The process is gone, as far as the code under test can tell. Not an ``Exception``: nothing that
    handles errors may swallow it.
    """


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it reached the store. ``number`` counts from 1; for a scan, ``key`` is the prefix."""

    number: int
    op: Op
    key: str
    body: Buffer | None = field(default=None, repr=False, compare=False)
    """What a ``create`` or ``overwrite`` was given; not kept in the log."""


Proceed = Callable[[Call], Any]


class Action(Protocol):
    """What happens around a call. ``proceed(call)`` lets it (or an altered one) take effect."""

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """``do`` for the calls that match ``op`` and whose key begins with ``prefix``.

    Of those, only the ``nth`` (from 1) and the ``times - 1`` after it, when ``nth`` is given; and only
    a ``chance`` of them, drawn from ``seed`` and their number, when that is given.
    """

    do: Action
    op: Op | None = None
    prefix: str = ""
    nth: int | None = None
    times: int = 1
    chance: float | None = None
    seed: int = 0

    def matches(self, call: Call) -> bool:
        return self.op in (None, call.op) and call.key.startswith(self.prefix)

    def fires(self, nth: int) -> bool:
        """Whether the ``nth`` matching call is met."""
        if self.nth is not None and not self.nth <= nth < self.nth + self.times:
            return False
        return self.chance is None or _draw(self.seed, nth) < self.chance


# --- what can happen: an action about one kind of call lets the others pass ---------------------


@dataclass(frozen=True, slots=True)
class Fail:
    """The call raises; with ``when="after"`` it has taken effect and only the answer is lost."""

    when: When = "before"
    error: BaseException | None = None
    """Default: a connection that broke."""

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if self.when == "after":
            proceed(call)
        raise self.error or StoreUnavailable(
            f"{call.op} {call.key}: injected fault ({self.when} the effect)", op=call.op, key=call.key
        )


@dataclass(frozen=True, slots=True)
class TimeOut:
    """No answer in ``after_s``; the call may have taken effect."""

    when: When = "after"
    after_s: float = 0.0

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if self.when == "after":
            proceed(call)
        clock.sleep(self.after_s)
        raise StoreTimeout(f"{call.op} {call.key}: injected timeout", op=call.op, key=call.key)


@dataclass(frozen=True, slots=True)
class Delay:
    """The call takes longer, before or after its effect."""

    seconds: float
    when: When = "before"

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if self.when == "before":
            clock.sleep(self.seconds)
            return proceed(call)
        result = proceed(call)
        clock.sleep(self.seconds)
        return result


@dataclass(frozen=True, slots=True)
class Die:
    """The code under test ends here, in this process: raises ``Crash``."""

    when: When = "before"

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if self.when == "after":
            proceed(call)
        raise Crash(f"crashed {self.when} call {call.number}: {call.op} {call.key}")


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL for the whole process, really."""

    when: When = "before"

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if self.when == "after":
            proceed(call)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable: the process was killed")


@dataclass(frozen=True, slots=True)
class Lose:
    """A store that lies: says yes to a ``create`` or ``delete`` and does nothing."""

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        return None if call.op in ("create", "delete") else proceed(call)


@dataclass(frozen=True, slots=True)
class CutRead:
    """A read's body ends after ``keep`` of its bytes: with an error, or in silence."""

    keep: float = 0.5
    silent: bool = False

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if call.op != "read":
            return proceed(call)
        body = bytes(proceed(call))
        short = body[: int(len(body) * self.keep)]
        if self.silent:
            return short
        raise StoreUnavailable(
            f"{call.op} {call.key}: injected fault: the body ended after {len(short)} of {len(body)} bytes",
            op=call.op,
            key=call.key,
        )


@dataclass(frozen=True, slots=True)
class CutCreate:
    """A store that keeps only the beginning of a body and says that all is well."""

    keep: float = 0.5

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if call.op != "create":
            return proceed(call)
        body = _body(call)
        return proceed(replace(call, body=body[: int(len(body) * self.keep)]))


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One byte is other than it was, on the way in (``create``) or out (``read``)."""

    at: int = 0
    """Which byte; from the end when negative, modulo the length."""
    mask: int = 0x01

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if call.op == "create":
            return proceed(replace(call, body=self._flip(_body(call))))
        result = proceed(call)
        return self._flip(bytes(result)) if call.op == "read" else result

    def _flip(self, body: bytes) -> bytes:
        if not body:
            return body
        flipped = bytearray(body)
        flipped[self.at % len(body)] ^= self.mask
        return bytes(flipped)


class Pause:
    """The call stops, before or after its effect, until ``release`` is called.

    ``arrived`` is set once a call waits here: a test waits for it, does what must happen meanwhile,
    and releases. Gives up after ``timeout_s`` so that a test's mistake is no hang.
    """

    def __init__(self, when: When = "before", *, timeout_s: float = 30.0) -> None:
        self.when = when
        self.arrived = threading.Event()
        self._go = threading.Event()
        self._timeout_s = timeout_s

    def release(self) -> None:
        self._go.set()

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        if self.when == "before":
            self._wait(call)
            return proceed(call)
        result = proceed(call)
        self._wait(call)
        return result

    def _wait(self, call: Call) -> None:
        self.arrived.set()
        assert self._go.wait(self._timeout_s), f"nobody released {call}"


@dataclass(frozen=True, slots=True)
class Run:
    """Anything else: ``effect(call)`` before the call goes on. May raise."""

    effect: Callable[[Call], None]

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        self.effect(call)
        return proceed(call)


# --- the store ----------------------------------------------------------------------------------


class FaultyStore:
    """``inner`` with the faults of ``plan``. ``log`` holds every call that arrived, in order.

    The plan may be replaced between calls (``store.plan = [...]``); counts begin anew then.
    """

    def __init__(self, inner: ObjectStore, plan: Sequence[Fault] = (), *, clock: Clock | None = None) -> None:
        self.inner = inner
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._log: list[Call] = []
        self._plan = tuple(plan)
        self._counts = [0] * len(self._plan)

    def __repr__(self) -> str:
        return f"FaultyStore({self.inner!r}, {len(self._plan)} faults)"

    @property
    def plan(self) -> Sequence[Fault]:
        return self._plan

    @plan.setter
    def plan(self, plan: Sequence[Fault]) -> None:
        with self._lock:
            self._plan = tuple(plan)
            self._counts = [0] * len(self._plan)

    @property
    def log(self) -> Sequence[Call]:
        """A copy: the calls so far."""
        with self._lock:
            return tuple(self._log)

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def conditional_create(self) -> bool:
        return self.inner.conditional_create

    def create(self, key: str, body: Buffer) -> None:
        self._meet("create", key, lambda call: self.inner.create(key, _given(call)), body)

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        body: bytes | memoryview = self._meet("read", key, lambda _: self.inner.read(key, at))
        return body

    def size(self, key: str) -> int:
        return int(self._meet("size", key, lambda _: self.inner.size(key)))

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = self._meet("scan", prefix, lambda _: list(self.inner.scan(prefix)))
        return iter(found)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._meet("delete", key, lambda call: self.inner.delete([call.key]))

    def overwrite(self, key: str, body: Buffer) -> None:
        self._meet("overwrite", key, lambda call: self.inner.overwrite(key, _given(call)), body)

    def close(self) -> None:
        self.inner.close()

    def _meet(self, op: Op, key: str, effect: Proceed, body: Buffer | None = None) -> Any:
        with self._lock:
            logged = Call(len(self._log) + 1, op, key)
            self._log.append(logged)
            actions = [
                fault.do for index, fault in enumerate(self._plan) if self._fires(index, fault, logged)
            ]
        proceed = effect
        for action in reversed(actions):
            proceed = _nested(action, proceed, self._clock)
        return proceed(replace(logged, body=body))

    def _fires(self, index: int, fault: Fault, call: Call) -> bool:
        if not fault.matches(call):
            return False
        self._counts[index] += 1
        return fault.fires(self._counts[index])


def _nested(action: Action, proceed: Proceed, clock: Clock) -> Proceed:
    return lambda call: action.around(call, proceed, clock)


def _given(call: Call) -> Buffer:
    assert call.body is not None, call
    return call.body


def _body(call: Call) -> bytes:
    return bytes(_given(call))


def _draw(seed: int, nth: int) -> float:
    """Uniform in [0, 1), the same for the same numbers, whatever thread asks in whatever order."""
    digest = hashlib.blake2b(f"{seed}/{nth}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
