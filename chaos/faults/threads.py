"""Threads that die: an exception thrown into a thread from outside, wherever it is.

The interpreter raises it when the thread next runs Python code, inside a call or between two. Knows
names of threads; nothing of what they do.
"""

from __future__ import annotations

import ctypes
import threading


def threads_named(prefix: str) -> list[threading.Thread]:
    """Those that live now."""
    return [t for t in threading.enumerate() if t.name.startswith(prefix) and t.is_alive()]


def kill_threads(prefix: str, error: type[BaseException] = SystemExit) -> list[threading.Thread]:
    """Throw ``error`` into every thread whose name begins with ``prefix``; returns those threads.

    A thread that waits in C code hears of it when its wait ends.
    """
    hit = threads_named(prefix)
    for thread in hit:
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
    return hit
