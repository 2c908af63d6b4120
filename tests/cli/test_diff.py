"""``ftckpt diff`` of a small run: its answers and its exit codes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_reading import a_pack, flip


def test_a_step_and_its_copy_are_equal(cli: Cli, made: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(made, tmp_path / "copy")

    ran = cli("diff", f"{made}@2", f"{copy}@2")

    assert ran.code == 0
    assert ran.out.endswith("equal; 0 B were read\n")


def test_two_steps_of_one_run_differ_in_what_was_trained(cli: Cli, made: Path) -> None:
    ran = cli("diff", f"{made}@1", "@2", "--leaves")

    assert ran.code == 1
    assert re.search(r"^model +1 +2 +0 +0 +\S+$", ran.out, re.MULTILINE)
    assert re.search(r"^buffer +1 +0 +0 +0 *$", ran.out, re.MULTILINE)
    assert re.search(r"^model\.weight +changed +12 +\S+ *$", ran.out, re.MULTILINE)
    assert re.search(r"ftckpt\.step +1 → 2$", ran.out, re.MULTILINE)


def test_without_a_step_the_newest_is_meant(cli: Cli, made: Path) -> None:
    ran = cli("diff", made, f"{made}@latest", "--json")

    assert ran.code == 0
    assert ran.json["equal"] and ran.json["a"]["step"] == ran.json["b"]["step"] == 3


def test_diff_speaks_json(cli: Cli, made: Path) -> None:
    ran = cli("diff", f"{made}@1", "@2", "--json")

    leaf = next(leaf for leaf in ran.json["leaves"] if leaf["name"] == "model.bias")
    assert ran.code == 1 and ran.json["equal"] is False
    assert leaf["verdict"] == "changed" and leaf["max_abs"] > 0 and leaf["a"]["shape"] == [3]
    assert {part["name"] for part in ran.json["components"]} >= {"model", "optim", "buffer"}


@pytest.mark.parametrize("broken", ["absent step", "damage"])
def test_what_cannot_be_compared_is_neither_equal_nor_different(cli: Cli, run: Path, broken: str) -> None:
    if broken == "damage":
        flip(a_pack(run, 1, 2))

    ran = cli("diff", f"{run}@1", "@99" if broken == "absent step" else "@2", "--json")

    assert ran.code == 2
    assert ran.json["error"] == ("StepNotFound" if broken == "absent step" else "ChunkCorrupt")


def test_help_says_what_the_exit_codes_mean(cli: Cli) -> None:
    said = " ".join(cli("diff", "--help").out.split())

    assert "Exits with 0 when everything is equal, with 1 when anything differs, and with 2" in said
