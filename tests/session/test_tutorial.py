"""The programs of docs/tutorial/plain_loop.md, as a reader would run them: start, kill, start again."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.procs import ROOT, start_ranks

PAGE = ROOT / "docs/tutorial/plain_loop.md"
LIMIT_S = 100


@pytest.mark.timeout(2 * LIMIT_S)
def test_the_plain_loop_survives_a_kill_and_ends_in_the_same_digits(tmp_path, monkeypatch, capsys):
    train, look = programs(tmp_path)

    def output(program: Path, uri: Path) -> list[str]:
        monkeypatch.setattr(sys, "argv", [str(program), str(uri)])
        runpy.run_path(str(program), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    undisturbed = output(train, tmp_path / "undisturbed")
    with start_ranks(slowly(train), 1, tmp_path / "killed", timeout_s=LIMIT_S) as gang:
        gang.wait_for_output(0, "step 12")
        gang.kill9(0)
    resumed = output(train, tmp_path / "killed")

    assert undisturbed[0] == "goes on after step 0"
    assert resumed[0] in ("goes on after step 5", "goes on after step 10")
    assert resumed[1] == undisturbed[1]
    assert output(look, tmp_path / "killed")[1:] == ["E1", "torch.Size([32, 8])", "[]"]


def programs(folder: Path) -> list[Path]:
    """The Python blocks of the page, as files. The first is to be of about twenty lines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    paths = [folder / name for name in ("train.py", "look.py")]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block)
    assert len([line for line in blocks[0].splitlines() if line]) <= 24
    return paths


def slowly(train: Path) -> Path:
    """The same program, which says where it is and takes its time, so that it can be killed on the way."""
    text = train.read_text()
    line = "        schedule.step()\n"
    assert line in text
    slow = train.with_name("slow.py")
    slow.write_text(
        text.replace(line, f'{line}        print("step", step, flush=True); __import__("time").sleep(0.2)\n')
    )
    return slow
