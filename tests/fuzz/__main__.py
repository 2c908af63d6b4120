"""``make fuzz [FOR=60]``: feed every decoder with damage for some seconds, and say how much it took.

Each target runs in a process of its own, half of its time under hypothesis, whose inputs are built from
structure, and half under atheris, which follows branches, where that is installed. A violation is an error
without a name, memory beyond 64 MiB for one input, or ten seconds; its input is kept in a file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

MEMORY_BYTES = 64 << 20
INPUT_S = 10.0


class Violation(AssertionError):
    """What no input may do."""


@dataclass(slots=True)
class Count:
    """Inputs so far, those that decoded, and the one that did what none may."""

    inputs: int = 0
    decoded: int = 0
    violation: str = ""
    body: bytes = b""


def one(target: Target, data: bytes, count: Count) -> None:
    """Try an input. Raises ``Violation``."""
    data = data[: target.most]
    begun_s, before_kib = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trouble = ""
    try:
        count.decoded += target.check(data)
    except BaseException as error:
        trouble = f"{type(error).__name__}: {str(error)[:300]}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) << 10
    took_s = time.monotonic() - begun_s
    count.inputs += 1
    if not trouble and grown > MEMORY_BYTES:
        trouble = f"{grown >> 20} MiB for {len(data)} bytes"
    if not trouble and took_s > INPUT_S:
        trouble = f"{took_s:.1f} s for {len(data)} bytes"
    if trouble:
        count.violation, count.body = trouble, data
        raise Violation(trouble)


def under_hypothesis(target: Target, for_s: float, seed: int, count: Count) -> None:
    """Inputs that hypothesis draws: bytes as they come, and seeds for inputs with structure."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    quiet = settings(
        max_examples=400,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    crafted = st.integers(0, 1 << 64).map(lambda number: target.craft(Random(number)))
    inputs = st.one_of(crafted, crafted, crafted, st.binary(max_size=300))
    end_s = 0.0
    while not end_s or time.monotonic() < end_s:

        @seeded(seed)
        @quiet
        @given(inputs)
        def batch(data: bytes) -> None:
            nonlocal end_s
            end_s = end_s or time.monotonic() + for_s  # its own start takes some seconds
            if time.monotonic() < end_s:
                one(target, data, count)

        batch()
        seed += 1


def under_atheris(target: Target, for_s: float, seed: int, tell: Callable[[], None], count: Count) -> None:
    """Inputs that libFuzzer makes of the seeds. Does not return: libFuzzer ends the process."""
    import atheris

    with tempfile.TemporaryDirectory() as folder:
        for number, body in enumerate(target.seeds):
            (Path(folder) / f"{number:04d}").write_bytes(body)

        def test(data: bytes) -> None:
            try:
                one(target, data, count)
            finally:
                if count.violation or time.monotonic() >= end_s:
                    tell()

        end_s = time.monotonic() + for_s
        options = [
            f"-seed={seed + 1}",
            f"-max_total_time={int(for_s) + 5}",
            "-timeout=30",
            "-rss_limit_mb=4096",
        ]
        options += [f"-max_len={min(target.most, 1 << 14)}", "-verbosity=0", "-print_final_stats=0"]
        atheris.Setup([sys.argv[0], *options, folder], test, enable_python_coverage=True)
        atheris.Fuzz()


def _tell(engine: str, count: Count, keep: Path) -> None:
    if count.violation:
        keep.mkdir(parents=True, exist_ok=True)
        place = keep / f"{int(time.time())}-{engine}.bin"
        place.write_bytes(count.body)
        count.violation += f"  [{place}]"
    print(f"RESULT\t{count.inputs}\t{count.decoded}\t{count.violation}", flush=True)


def child(names: list[str], engine: str, each_s: float, seed: int, keep: Path) -> None:
    """Every target under one engine, each in a fork of this process, which has loaded everything once."""
    if engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=["ftckpt"], enable_loader_override=False):
            from tests.fuzz.targets import every_target
    else:
        from tests.fuzz.targets import every_target
    targets = every_target()
    for name in names:
        print(f"BEGIN\t{name}", flush=True)
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                _alone(targets[name](), engine, each_s, seed, keep)
            os._exit(9)
        _, status = os.waitpid(pid, 0)
        print(f"END\t{os.waitstatus_to_exitcode(status)}", flush=True)


def _alone(target: Target, engine: str, for_s: float, seed: int, keep: Path) -> None:
    count = Count()

    def end() -> None:
        _tell(engine, count, keep)
        os._exit(0)

    if engine == "atheris":
        under_atheris(target, for_s, seed, end, count)
        return
    try:
        under_hypothesis(target, for_s, seed, count)
    except BaseException as error:  # what hypothesis makes of a violation, or its own trouble
        count.violation = count.violation or repr(error)[:500]
    end()


def main() -> int:
    options = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="in all, over both engines")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="targets whose name holds this")
    options.add_argument("--keep", type=Path, default=Path(".fuzz"), help="where violations go")
    options.add_argument("--engine", choices=["hypothesis", "atheris"], help="only this one")
    options.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        child(given.child, given.engine, given.seconds, given.seed, given.keep)
        return 0
    from tests.fuzz.targets import every_target

    names = [name for name in every_target() if given.only in name]
    engines = ["hypothesis", *(["atheris"] if find_spec("atheris") else [])]
    engines = [engine for engine in engines if given.engine in (None, engine)]
    each_s = max(1.0, given.seconds / len(names) / len(engines))
    print(f"{'target':28}{'engine':12}{'inputs':>10}{'decoded':>10}  violations", flush=True)
    with ThreadPoolExecutor(len(engines)) as pool:
        every = list(pool.map(lambda engine: _engine(engine, names, each_s, given), engines))
    inputs, bad = (sum(part) for part in zip(*every, strict=True))
    print(f"{inputs} inputs over {len(names)} targets, {bad} {'violation' if bad == 1 else 'violations'}")
    return 1 if bad else 0


def _engine(engine: str, names: list[str], each_s: float, given: argparse.Namespace) -> tuple[int, int]:
    """Run the targets under one engine and print a line each. Inputs and violations."""
    command = [sys.executable, "-m", "tests.fuzz", "--child", *names, "--engine", engine]
    command += ["--seconds", str(each_s), "--seed", str(given.seed), "--keep", str(given.keep)]
    total = bad = 0
    name, result = "", None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            what, *fields = line.rstrip("\n").split("\t", 3)
            if what == "BEGIN":
                name, result = fields[0], None
            elif what == "RESULT":
                result = fields
            elif what == "END":
                inputs, decoded, trouble = result or ("0", "0", f"the process ended with {fields[0]}")
                total, bad = total + int(inputs), bad + bool(trouble)
                print(f"{name:28}{engine:12}{inputs:>10}{decoded:>10}  {trouble or 'none'}", flush=True)
    return total, bad + bool(process.returncode)


if __name__ == "__main__":
    sys.exit(main())
