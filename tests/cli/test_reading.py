"""``ls``, ``show`` and ``verify`` of a small run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.cli.common import to_json
from ftckpt.layout import tombstone_key
from ftckpt.manifest import Position, Tombstone, encode
from ftckpt.store import LocalStore
from tests.cli.conftest import Cli
from tests.support.procs import ROOT


def a_pack(run: Path, attempt: int, step: int) -> Path:
    return next((run / f"packs/{attempt:06d}/{step:012d}").iterdir())


def flip(path: Path, at: int = 0) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(body)


def test_ls_shows_every_commit_and_what_became_of_it(cli: Cli, made: Path) -> None:
    listed = cli("ls", made)

    assert listed.code == 0
    assert [line.split()[:3] for line in listed.out.splitlines()[2:]] == [
        ["4", "2", "aborted"],
        ["3", "2", "readable"],
        ["3", "1", "orphan"],
        ["2", "1", "readable"],
        ["1", "1", "readable"],
        ["0", "1", "readable"],
    ]
    assert "a member died" in listed.out


def test_ls_speaks_json(cli: Cli, made: Path) -> None:
    listed = cli("ls", made, "--json", "--attempts")

    newest = listed.json["commits"][1]
    assert (newest["step"], newest["attempt"], newest["status"]) == (3, 2, "readable")
    assert newest["groups"] == ["g0"] and newest["guarantee"] == "E3"
    assert newest["raw_bytes"] == newest["stored_bytes"] + newest["reused_bytes"]
    assert [attempt["parent"] for attempt in listed.json["attempts"]] == [None, {"step": 2, "attempt": 1}]
    assert listed.err == ""


def test_ls_shows_what_each_attempt_went_on_from(cli: Cli, made: Path) -> None:
    listed = cli("ls", made, "--attempts")

    assert re.search(r"^ +1 +nothing +1 × 1", listed.out, re.MULTILINE)
    assert re.search(r"^ +2 +step 2 of attempt 1 +1 × 1", listed.out, re.MULTILINE)


def test_ls_shows_a_damaged_commit_as_such_and_lists_the_others(cli: Cli, run: Path) -> None:
    flip(run / "commits/000000000001-000001")

    listed = cli("ls", run)

    assert listed.code == 0
    assert re.search(r"^ +1 +1 +damaged .*000000000001-000001", listed.out, re.MULTILINE)
    assert listed.out.count("readable") == 3


def test_ls_shows_collected_commits_only_when_asked(cli: Cli, run: Path) -> None:
    at = Position(0, 1)
    tombstone = Tombstone(step=0, attempt=1, intent="i")
    LocalStore(str(run)).create(tombstone_key(at), encode(tombstone))

    usual, everything = cli("ls", run, "--json").json, cli("ls", run, "--json", "--all").json

    assert [line["status"] for line in everything["commits"]][-1] == "collected"
    assert everything["commits"][:-1] == usual["commits"]


def test_show_tells_what_a_commit_holds_and_who_wrote_it(cli: Cli, made: Path) -> None:
    shown = cli("show", made, "--step", 2)

    assert shown.code == 0
    assert shown.out.startswith("step 2 of attempt 1 of ")
    for part in ("guarantee  E3", "not better: torch.use_deterministic", "written by g0.0.", "command  "):
        assert part in shown.out
    assert re.search(r"^optim +7 ", shown.out, re.MULTILINE)


def test_show_speaks_json_with_every_leaf(cli: Cli, made: Path) -> None:
    shown = cli("show", made, "--json", "--leaves", "--attempts").json

    weight = next(leaf for leaf in shown["leaves"] if leaf["name"] == "model.weight")
    assert (weight["dtype"], weight["shape"]) == ("float32", [3, 4])
    assert (shown["step"], shown["attempt"], shown["parent"]["step"]) == (3, 2, 2)
    assert shown["written_by"]["attempt"] == 2 and len(shown["attempts"]) == 2
    assert len(shown["writers"]) == 1


def test_show_lists_leaves_for_people_too(cli: Cli, made: Path) -> None:
    shown = cli("show", made, "--leaves", "--attempts")

    assert re.search(r"^optim\.state\.model\.weight\.exp_avg +tensor +float32 +3×4$", shown.out, re.MULTILINE)
    assert "step 2 of attempt 1" in shown.out


def test_show_prints_the_plain_values_of_a_component(cli: Cli, made: Path) -> None:
    shown = cli("show", made, "--value", "buffer")
    as_json = cli("show", made, "--value", "buffer", "--json")

    assert shown.out == "{'cursor': 7, 'best': -inf, 'raw': b'\\x01'}\n"
    assert as_json.json == {"component": "buffer", "value": {"cursor": 7, "best": "-inf", "raw": "01"}}


def test_show_of_an_unknown_component_names_those_there_are(cli: Cli, made: Path) -> None:
    shown = cli("show", made, "--value", "bufer")

    assert (shown.code, shown.out) == (1, "")
    assert "StateMismatch" in shown.err and "buffer" in shown.err


def test_verify_finds_a_good_run_good(cli: Cli, made: Path) -> None:
    whole, one = cli("verify", made), cli("verify", made, "--step", 1, "--json")

    assert whole.code == one.code == 0
    assert "5 commits checked, all good" in whole.out
    assert one.json["ok"] is True and one.json["steps"] == [1] and one.json["problems"] == []


def test_verify_names_a_bad_chunk_and_a_bad_record(cli: Cli, run: Path) -> None:
    bad_pack = a_pack(run, 2, 3)
    flip(bad_pack, 40)
    flip(run / "attempts/000001")

    checked, told = cli("verify", run, "--json"), cli("verify", run)

    assert checked.code == told.code == 1
    keys = {problem["key"] for problem in checked.json["problems"]}
    assert keys == {str(bad_pack.relative_to(run)), "attempts/000001"}
    assert all(key in told.out for key in keys) and "2 problems" in told.out
    assert {problem["step"] for problem in checked.json["problems"]} == {3, None}


def test_verify_names_a_fragment_that_is_gone(cli: Cli, run: Path) -> None:
    fragment = next((run / "fragments/000001/000000000001").iterdir())
    fragment.unlink()

    checked = cli("verify", run, "--json")

    assert checked.code == 1
    assert str(fragment.relative_to(run)) in {problem["key"] for problem in checked.json["problems"]}


def test_a_real_process_prints_json_alone_and_errors_without_a_traceback(made: Path, tmp_path: Path) -> None:
    """Beside ``main`` as a function, the program itself."""
    good, bad = (
        subprocess.run(
            [sys.executable, "-m", "ftckpt.cli", "ls", str(where), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for where in (made, tmp_path / "mistyped")
    )

    assert (good.returncode, good.stderr) == (0, "")
    assert len(json.loads(good.stdout)["commits"]) == 6
    assert bad.returncode == 1 and "Traceback" not in bad.stderr
    assert bad.stderr.startswith("RunNotFound: ")
    assert json.loads(bad.stdout)["error"] == "RunNotFound"


@pytest.mark.parametrize(
    "value, said",
    [
        (float("nan"), "nan"),
        ({1: (b"\xff", {2})}, {"1": ["ff", [2]]}),
        (Position(3, 2), {"step": 3, "attempt": 2}),
        (complex(1, 2), "(1+2j)"),
    ],
)
def test_whatever_a_record_holds_can_be_said_in_json(value: object, said: object) -> None:
    assert to_json(value) == said
    json.dumps(to_json(value), allow_nan=False)
