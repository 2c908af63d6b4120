"""A bounded number of threads whose death is noticed.

What a call raises comes to whoever waits for its result. A thread that dies outside of any call (an
exception thrown into it, an interpreter that gave out) takes the call it had just fetched down in
silence: whoever waits here looks at the threads now and then, and is told. (An executor of the
standard library waits for ever then, for the result and for its own end.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from ftckpt.errors import SaveFailed

P = ParamSpec("P")
T = TypeVar("T")

LOOK_EVERY_S = 1.0


class Workers:
    """At most ``count`` threads, started when needed and ended on leaving. Calls that have not begun by
    then are dropped.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have it done by one of the threads, in the order of submitting."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                done = call(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(done)

        self._queue.put(work)
        if len(self._threads) < self._count:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def result(self, future: Future[T]) -> T:
        """What a call returns or raises.

        Raises:
            SaveFailed: a thread died, so the call may never be made.
        """
        while True:
            try:
                return future.result(LOOK_EVERY_S)
            except TimeoutError:
                if future.done():  # the call's own
                    return future.result()
                self._check()

    def acquire(self, slots: threading.Semaphore) -> None:
        """Take a slot that a call of these threads gives back; raises as ``result`` does."""
        while not slots.acquire(timeout=LOOK_EVERY_S):
            self._check()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # or the last result is kept until the next call

    def _check(self) -> None:
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead:
            raise SaveFailed(
                f"SaveFailed: {dead[0]}, a thread of this save, died\n"
                "  what it had to do was not done; the next save begins with new threads",
                thread=dead[0],
            )
