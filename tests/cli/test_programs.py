"""Whether a recorded command can still be started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ftckpt.cli.programs import check_command, python_target
from ftckpt.errors import CommandNotFound


@pytest.mark.parametrize(
    "line, kind, name, flags",
    [
        ("train.py --lr 1", "script", "train.py", ()),
        ("-u -X faulthandler train.py -m x", "script", "train.py", ("-u", "-X", "faulthandler")),
        ("-Wignore -m pkg.train a", "module", "pkg.train", ("-Wignore",)),
        ("-um pkg", "module", "pkg", ("-u",)),
        ("-mpkg", "module", "pkg", ()),
        ("-W error -c pass", "code", "pass", ("-W", "error")),
        ("--check-hash-based-pycs never x.py", "script", "x.py", ("--check-hash-based-pycs", "never")),
        ("-u -", "stdin", "-", ("-u", "-")),
        ("", "stdin", "-", ()),
    ],
)
def test_a_python_command_line_is_read_as_python_reads_it(line, kind, name, flags) -> None:
    target = python_target(line.split())

    assert (target.kind, target.name, target.flags) == (kind, name, flags)


def check(command: list[str], cwd: Path) -> None:
    check_command(command, str(cwd), os.environ, whose="the command", advice="think again")


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", "true"],
        [sys.executable, "train.py"],
        [sys.executable, "-m", "json.tool"],
        [sys.executable, "-m", "local"],
        [sys.executable, "-m", "ftckpt.integrations.grpo"],
        [sys.executable, "-c", "pass"],
        ["./tool.sh"],
    ],
    ids=" ".join,
)
def test_what_exists_is_accepted(command: list[str], tmp_path: Path) -> None:
    for name in ("train.py", "local.py", "tool.sh"):
        (tmp_path / name).write_text("raise SystemExit('never run')\n")
    (tmp_path / "tool.sh").chmod(0o755)

    check(command, tmp_path)


@pytest.mark.parametrize(
    "command, what",
    [
        (["no-such-program"], "no executable 'no-such-program' on PATH"),
        (["./tool.sh"], "no executable './tool.sh'"),
        ([sys.executable, "gone.py"], "gone.py does not exist"),
        ([sys.executable, "-m", "no_such.module"], "finds no module 'no_such.module'"),
        ([sys.executable, "-m", "json.no_such"], "finds no module 'json.no_such'"),
        ([sys.executable, "-"], "standard input"),
        ([], "it is empty"),
    ],
)
def test_what_is_missing_is_named(command: list[str], what: str, tmp_path: Path) -> None:
    with pytest.raises(CommandNotFound) as refused:
        check(command, tmp_path)

    assert what in str(refused.value)
    assert refused.value.facts["cwd"] == str(tmp_path)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandNotFound, match=r"the folder .*/gone does not exist"):
        check(["true"], tmp_path / "gone")
