"""Where the seconds and bytes of one save went, stage by stage, and in which stage it failed.

Counts only: what they are told as, and to whom, is the business of whoever saves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Stage = Literal[
    "capture", "queued", "prepare", "fence", "yielded", "read", "encode", "put", "put_wait", "settle"
]
"""In the order of a save: taken on the trainer's thread (the stall); waiting for earlier saves; learning
the parent; trainer held back by a fence; holding back for a
rollout engine; read from live or staged memory; hashed and encoded; put;
encoders held back by puts; waiting for the others' shares and for the commit.
"""


STAGES: tuple[Stage, ...] = get_args(Stage)


class Meter:
    """Of one save; used from any thread. Seconds that several threads spend at once add up."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seconds: dict[Stage, float] = {}
        self._bytes: dict[Stage, int] = {}
        self.begun_s = now_s()
        self.failed_in: Stage | None = None
        """The stage that failed first."""

    def add(self, stage: Stage, seconds: float = 0.0, size_bytes: int = 0) -> None:
        """Count what a stage took and how many bytes went through it."""
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
            self._bytes[stage] = self._bytes.get(stage, 0) + size_bytes

    @contextmanager
    def spent(self, stage: Stage, size_bytes: int = 0) -> Iterator[None]:
        """Around a part of a stage; what it raises is counted as this stage's failure."""
        begun_s = self._now_s()
        try:
            yield
        except BaseException as error:
            self.fail(getattr(error, "stage", stage))
            raise
        finally:
            self.add(stage, self._now_s() - begun_s, size_bytes)

    def fail(self, stage: Stage) -> None:
        """Note where it failed; only the first counts."""
        with self._lock:
            self.failed_in = self.failed_in or stage

    def seconds(self, stage: Stage) -> float:
        """What a stage took so far, to a tenth of a millisecond."""
        with self._lock:
            return round(self._seconds.get(stage, 0.0), 4)

    def bytes(self, stage: Stage) -> int:
        """What went through a stage so far."""
        with self._lock:
            return self._bytes.get(stage, 0)

    @property
    def age_s(self) -> float:
        """Since the save was asked for."""
        return round(self._now_s() - self.begun_s, 4)
