"""A small run, made by a real session, and ``ftckpt`` as a function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.attempts import claim
from ftckpt.cli import main
from ftckpt.commit import abort
from ftckpt.events import silent
from ftckpt.manifest import Position
from ftckpt.session import Session
from ftckpt.store import LocalStore


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left: its exit code, and what it printed where."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON document that it must be."""
        return json.loads(self.out)


Cli = Callable[..., Ran]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """``cli("ls", run, "--json")``: one command in this process."""

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        seen = capsys.readouterr()
        return Ran(code, seen.out, seen.err)

    return call


def tiny_state() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optim = torch.optim.AdamW(model.parameters())
    return {"model": model, "optim": optim, "buffer": {"cursor": 7, "best": float("-inf"), "raw": b"\x01"}}


def train(uri: Path, until: int, **settings: Any) -> None:
    """Steps up to ``until``, every one of them committed."""
    state = tiny_state()
    with Session(uri, state, save_every=1, keep=None, events=silent, **settings) as ckpt:
        for _ in ckpt.steps(until=until):
            state["model"](torch.ones(2, 4)).sum().backward()
            state["optim"].step()
            state["optim"].zero_grad()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 3 of attempt 1; attempt 2 went on from step 2, committed 3 and gave up 4."""
    run = tmp_path_factory.mktemp("made") / "run"
    train(run, until=3)
    train(run, until=3, step=2)
    abort(LocalStore(str(run)), Position(4, 2), "a member died")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of ``made`` to break."""
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def recorded(run: Path, tmp_path: Path) -> Callable[..., Path]:
    """The run, last started by the command given."""

    def record(*command: object, cwd: Path = tmp_path, groups: int = 1) -> Path:
        claim(
            LocalStore(str(run)),
            nonce="0" * 32,
            host="elsewhere",
            pid=1,
            command=[str(part) for part in command],
            cwd=str(cwd),
            groups=groups,
            nproc=1,
        )
        return run

    return record


def claims(run: Path) -> list[str]:
    """Names of the claims that a local run holds."""
    return sorted(path.name for path in (run / "attempts").iterdir())
