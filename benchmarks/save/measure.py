"""What a piece of work costs this process: seconds, computing, and memory beyond what it had before."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Numbers = dict[str, float]
"""What one case measured, by name; units last in the names."""


@dataclass(slots=True)
class Cost:
    """Filled when the work is done. ``extra_bytes`` is the highest resident size meanwhile, less what
    was resident before.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    extra_bytes: int = 0

    def numbers(self) -> Numbers:
        return {"commit_s": self.seconds, "cpu_s": self.cpu_s, "extra_bytes": self.extra_bytes}


@contextmanager
def costs() -> Iterator[Cost]:
    """Around the work."""
    cost = Cost()
    before_bytes = resident_bytes()
    begun_s, begun_cpu_s = time.monotonic(), cpu_s()
    try:
        yield cost
    finally:
        cost.seconds = time.monotonic() - begun_s
        cost.cpu_s = cpu_s() - begun_cpu_s
        cost.extra_bytes = max(0, peak_bytes() - before_bytes)


def resident_bytes() -> int:
    """What is resident now, once all that was freed is given back; from here on the peak is taken."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_bytes("VmRSS")


def peak_bytes() -> int:
    """The highest resident size since then."""
    return _resident_bytes("VmHWM")


def cpu_s() -> float:
    """Seconds of computing of this process and of those that it waited for, the kernel's included."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def idle_ticks() -> int:
    """Hundredths of seconds for which cores of this machine had nothing to do, since it was started."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[4])


def idle_cores_between(ticks: int, seconds: float) -> float:
    """How many cores had nothing to do on average in the seconds since ``ticks`` was taken."""
    return (idle_ticks() - ticks) / (os.sysconf("SC_CLK_TCK") * seconds)


def _resident_bytes(line: str) -> int:
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line):
            return int(text.split()[1]) * 1024
    raise AssertionError(line)
