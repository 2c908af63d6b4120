"""Signals that ask a job to stop: the handler only sets a flag; the next boundary acts on it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """SIGTERM and SIGUSR1 only set a flag, in the process that entered the session."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.seen = False
        self._pid = 0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take over the signals, when on the main thread; elsewhere they cannot be."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def remove(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.seen = True
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
