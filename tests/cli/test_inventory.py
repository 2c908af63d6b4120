"""``show``: what a commit holds, by component and codec, and what it does not hold."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch

import ftckpt
from ftckpt.codec import Codec
from ftckpt.events import silent
from ftckpt.layout import commit_key
from ftckpt.manifest import Commit, Position, decode, encode
from ftckpt.session import Session
from tests.cli.conftest import Cli


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 2 of a bf16 model that changes a little each time, beside a frozen one."""
    run = tmp_path_factory.mktemp("inventory") / "run"
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 64, dtype=torch.bfloat16)
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    reference = ftckpt.Frozen({"w": torch.randn(4096)})
    state = {"actor": model, "optim": optim, "reference": reference, "mine": ftckpt.PerRank({"n": 1})}
    with Session(run, state, codec=Codec("delta"), save_every=1, keep=None, events=silent) as session:
        for _ in session.steps(until=2):
            session._at.handle.wait(30)
            model(torch.randn(8, 512, dtype=torch.bfloat16)).square().mean().backward()
            optim.step()
    return run


def test_the_inventory_adds_up_to_what_the_commit_says(cli: Cli, learned: Path) -> None:
    shown = cli("show", learned, "--json").json

    for name, part in shown["inventory"].items():
        summary = shown["components"][name]
        for key in ("leaves", "raw_bytes", "stored_bytes", "reused_bytes"):
            assert part[key] == summary[key], (name, key)
        written = part["codecs"].values()
        assert sum(one["raw_bytes"] for one in written) + part["reused_bytes"] == part["raw_bytes"]
        assert sum(one["stored_bytes"] for one in written) == part["stored_bytes"]


def test_what_each_codec_made_of_a_component_is_told(cli: Cli, learned: Path) -> None:
    """A small step leaves most bits of bf16 weights as they are; a frozen component costs nothing."""
    parts = cli("show", learned, "--json").json["inventory"]

    delta = parts["actor"]["codecs"]["xor+planes+zstd"]
    assert delta["chunks"] >= 1 and delta["ratio"] < 0.7
    assert parts["actor"]["longest_chain"] == 2
    reference = parts["reference"]
    assert reference["reused_bytes"] > 4 * 4096 and "planes+zstd" not in reference["codecs"]
    assert parts["mine"]["owners"] == parts["rng"]["owners"] == ["g0.0"]


def test_people_see_one_line_a_component(cli: Cli, learned: Path) -> None:
    shown = cli("show", learned).out

    assert re.search(r"^actor +3 .* 2  .*xor\+planes\+zstd 1 × 0\.\d\d", shown, re.MULTILINE), shown
    assert re.search(r"^mine .*own of 1 rank", shown, re.MULTILINE), shown


def test_people_and_programs_are_told_what_the_commit_does_not_hold(cli: Cli, learned: Path) -> None:
    shown, told = cli("show", learned).out, cli("show", learned, "--json").json["left_out"]

    assert "not in it  code, environment and data files" in shown
    assert any(line.startswith("gradients: 2 parameters of actor") for line in told)
    assert any("rollouts that are not in the state" in line for line in told)
    assert not any("optimizer state" in line for line in told)


def test_a_commit_of_a_writer_that_did_not_say_reads_as_before(cli: Cli, run: Path) -> None:
    """An older version's record has no such field, and a newer one's fields are let pass."""
    path = run / commit_key(Position(3, 2))
    record = decode(Commit, path.read_bytes(), "")
    path.chmod(0o644)
    path.write_bytes(encode(msgspec.structs.replace(record, left_out=())))

    shown = cli("show", run)

    assert shown.code == 0 and "not in it  (its writer did not say)" in shown.out
