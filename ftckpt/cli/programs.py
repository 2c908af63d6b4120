"""Whether a command can be started: its folder, its executable, and the script or module it names.

Knows how Python reads its own command line. Other programs are only looked for, not read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftckpt.begin import recorded
from ftckpt.errors import CommandNotFound

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?(\.exe)?")
_LOOK_WITHIN_S = 60.0
_LOOK = """
import sys
path, name = None, ""
for part in sys.argv[1].split("."):
    name = f"{name}.{part}".lstrip(".")
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        sys.exit(3)
    path = spec.submodule_search_locations
    if path is None:
        path = []
"""
"""Finds a module without importing anything: a package may take seconds, or a GPU."""


@dataclass(frozen=True, slots=True)
class PythonTarget:
    """What a Python command line runs; ``flags`` are the interpreter's own, before it."""

    kind: Literal["script", "module", "code", "stdin"]
    name: str
    flags: tuple[str, ...]


def python_target(arguments: Sequence[str]) -> PythonTarget:
    """Read what follows the interpreter on a command line, as the interpreter does. Pure."""
    at = 0
    while at < len(arguments):
        argument, flags = arguments[at], tuple(arguments[:at])
        if argument == "-":
            break
        if not argument.startswith("-"):
            return PythonTarget("script", argument, flags)
        at += 2 if argument == "--check-hash-based-pycs" else 1
        if argument.startswith("--"):
            continue
        for position, letter in enumerate(argument[1:], 2):
            if letter not in "mcXW":
                continue
            value = argument[position:]
            if not value:
                value, at = (arguments[at] if at < len(arguments) else ""), at + 1
            if letter in "mc":
                rest = argument[: position - 1]
                return PythonTarget(
                    "module" if letter == "m" else "code", value, flags + ((rest,) if len(rest) > 1 else ())
                )
            break
    return PythonTarget("stdin", "-", tuple(arguments))


def check_command(
    command: Sequence[str], cwd: str, environ: Mapping[str, str], *, whose: str, advice: str
) -> None:
    """Refuse a command that cannot be started. Starts nothing but, for ``-m``, a look for the module.

    ``whose`` begins the message ("the command of attempt 3"); ``advice`` ends it.

    Raises:
        CommandNotFound: names what is missing, and where it was looked for.
    """

    def missing(what: str) -> CommandNotFound:
        return CommandNotFound(
            f"CommandNotFound: {whose} cannot be started: {what}\n"
            f"  the command is {recorded(command)}, in {cwd}\n"
            f"  nothing was started, claimed or changed; {advice}",
            command=list(command),
            cwd=cwd,
        )

    if not command:
        raise missing("it is empty")
    folder = Path(cwd)
    if not folder.is_dir():
        raise missing(f"the folder {cwd} does not exist")
    program = command[0]
    named = str(folder / program) if "/" in program else program
    found = shutil.which(named, path=environ.get("PATH"))
    if found is None:
        raise missing(f"there is no executable {program!r}" + ("" if "/" in program else " on PATH"))
    if not _PYTHON.fullmatch(Path(program).name):
        return
    target = python_target(command[1:])
    if target.kind == "script" and not (folder / target.name).exists():
        raise missing(f"the script {folder / target.name} does not exist")
    if target.kind == "stdin":
        raise missing("its program came from standard input, which nobody recorded")
    if target.kind == "module" and not _has_module(found, target, cwd, environ):
        raise missing(f"{program} finds no module {target.name!r}")


def _has_module(python: str, target: PythonTarget, cwd: str, environ: Mapping[str, str]) -> bool:
    done = subprocess.run(
        [python, *target.flags, "-c", _LOOK, target.name],
        cwd=cwd,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_LOOK_WITHIN_S,
        check=False,
    )
    return done.returncode == 0
