"""``ftckpt copy`` and ``ftckpt fork`` of a small run, and what the other commands make of the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.run import open_run
from tests.cli.conftest import Cli, train
from tests.cli.test_reading import a_pack, flip


def test_a_copy_is_the_run_for_every_command(cli: Cli, made: Path, tmp_path: Path) -> None:
    ran = cli("copy", made, tmp_path / "copy")

    assert ran.code == 0 and ran.err == ""
    assert "5 steps up to 3" in ran.out
    listed = [cli("ls", run, "--json").json["commits"] for run in (made, tmp_path / "copy")]
    assert [line for line in listed[0] if line["status"] != "aborted"] == listed[1]
    assert cli("verify", tmp_path / "copy").code == 0
    assert cli("diff", made, f"{tmp_path / 'copy'}@latest").code == 0


def test_copying_again_copies_nothing_twice(cli: Cli, made: Path, tmp_path: Path) -> None:
    first = cli("copy", made, tmp_path / "copy", "--json").json

    again = cli("copy", made, tmp_path / "copy", "--json").json

    assert again["steps"] == first["steps"] == [0, 1, 2, 3, 3]
    assert (again["copied_bytes"], again["found_bytes"]) == (0, first["copied_bytes"])


def test_one_step_can_be_copied_to_a_bucket_and_back(cli: Cli, made: Path, tmp_path: Path, s3) -> None:
    there = s3.uri("cli-copy/run")

    assert cli("copy", made, there, "--step", 2).code == 0
    assert cli("copy", there, tmp_path / "back").code == 0

    assert [line["step"] for line in cli("ls", tmp_path / "back", "--json").json["commits"]] == [2]
    assert cli("diff", f"{made}@2", f"{tmp_path / 'back'}@2").code == 0


def test_inside_one_bucket_packs_do_not_come_through_here(cli: Cli, made: Path, s3) -> None:
    cli("copy", made, s3.uri("cli-within/run"))

    copied = cli("copy", s3.uri("cli-within/run"), s3.uri("cli-within/copy"))
    forked = cli("fork", s3.uri("cli-within/run"), s3.uri("cli-within/fork"), "--stream")

    assert copied.code == forked.code == 0
    for name in ("copy", "fork"):
        assert cli("verify", s3.uri(f"cli-within/{name}")).code == 0


def test_a_fork_trains_on_as_a_run_of_its_own(cli: Cli, made: Path, tmp_path: Path) -> None:
    ran = cli("fork", made, tmp_path / "fork", "--step", 1, "--json")
    train(tmp_path / "fork", until=2)

    assert ran.code == 0 and ran.json["steps"] == [1]
    lines = cli("ls", tmp_path / "fork", "--json", "--attempts").json
    assert [(line["step"], line["attempt"]) for line in lines["commits"]] == [(2, 2), (1, 1)]
    assert lines["attempts"][1]["parent"] == {"step": 1, "attempt": 1}
    assert cli("diff", f"{made}@2", f"{tmp_path / 'fork'}@2", "--json").json["components"][2]["changed"] == 0
    with open_run(str(made)) as parent:
        assert [commit.step for commit in parent.commits()] == [3, 2, 1, 0]


def test_a_place_with_another_run_is_refused(cli: Cli, made: Path, tmp_path: Path) -> None:
    train(tmp_path / "other", until=1)

    for command in ("copy", "fork"):
        ran = cli(command, made, tmp_path / "other", "--json")

        assert ran.code == 1
        assert ran.json["error"] == "NotSameRun" and "was left alone" in ran.err


def test_damage_is_an_error_and_the_place_is_no_run(cli: Cli, run: Path, tmp_path: Path) -> None:
    flip(a_pack(run, 1, 0))

    ran = cli("copy", run, tmp_path / "copy")

    assert ran.code == 1 and ran.err.startswith("ObjectDamaged: packs/000001/000000000000")
    assert cli("ls", tmp_path / "copy").err.startswith("RunNotFound")
    with pytest.raises(ValueError, match="has not ended"):
        train(tmp_path / "copy", until=1)


def test_a_mistyped_source_creates_nothing(cli: Cli, tmp_path: Path) -> None:
    for command in ("copy", "fork"):
        ran = cli(command, tmp_path / "absent", tmp_path / "dest")

        assert ran.code == 1 and ran.err.startswith("RunNotFound")
    assert list(tmp_path.iterdir()) == []


# --- verify --repair ------------------------------------------------------------------------------


def test_a_run_is_repaired_from_its_copy(cli: Cli, run: Path, tmp_path: Path) -> None:
    cli("copy", run, tmp_path / "copy")
    flip(a_pack(run, 1, 0))
    flip(run / "commits/000000000001-000001", 40)
    a_pack(run, 2, 3).unlink()
    assert cli("verify", run).code == 1

    ran = cli("verify", run, "--repair", "--from", tmp_path / "copy")

    assert ran.code == 0 and ran.out.count("repaired packs/") == 2
    assert ran.out.splitlines()[-1].endswith("3 objects repaired, all good")
    assert cli("verify", run).code == 0
    assert cli("verify", run, "--repair", "--from", tmp_path / "copy", "--json").json == {
        "run": f"file://{run}",
        "step": None,
        "ok": True,
        "repaired": [],
        "problems": [],
    }


def test_what_stays_damaged_is_named_with_the_reason(cli: Cli, run: Path, tmp_path: Path) -> None:
    cli("copy", run, tmp_path / "copy")
    for place in (run, tmp_path / "copy"):
        flip(a_pack(place, 1, 0))
    flip(a_pack(run, 1, 1))

    ran = cli("verify", run, "--repair", "--from", tmp_path / "copy", "--step", 1, "--json")
    people = cli("verify", run, "--repair", "--from", tmp_path / "copy")

    assert ran.code == people.code == 1
    assert [line["key"].split("/")[2] for line in ran.json["repaired"]] == ["000000000001"]
    assert all(line["key"].split("/")[2] == "000000000000" for line in ran.json["problems"])
    assert "  not repaired: " in people.out and "0 objects repaired, " in people.out


def test_a_run_is_repaired_from_the_tier_of_its_machine(cli: Cli, tmp_path: Path) -> None:
    tier, far = tmp_path / "tier", tmp_path / "far"
    train(far, until=2, tiers=[str(tier)], deadline_s=20)
    for step in (0, 2):
        flip(a_pack(far, 1, step))

    ran = cli("verify", far, "--repair", "--tier", tier, "--json")

    assert ran.code == 0 and {line["from"] for line in ran.json["repaired"]} == {f"file://{tier}"}
    assert len(ran.json["repaired"]) == 2 and cli("verify", far).code == 0


def test_repairing_is_asked_for_with_a_place_to_repair_from(cli: Cli, made: Path, tmp_path: Path) -> None:
    assert cli("verify", made, "--repair").code == 2
    assert cli("verify", made, "--from", made).code == 2
    absent = cli("verify", made, "--repair", "--from", tmp_path / "absent")
    assert absent.code == 1 and "to repair from" in absent.err and not (tmp_path / "absent").exists()


@pytest.mark.timeout(180)
def test_the_page_on_repair_does_what_it_says(cli: Cli, tmp_path: Path) -> None:
    """docs/howto/repair.md, command by command, on a damaged run with a tier and an older copy."""
    page = (Path(__file__).parents[2] / "docs/howto/repair.md").read_text(encoding="utf-8")
    run, copy, tier = tmp_path / "run", tmp_path / "copy", tmp_path / "tier"
    train(run, until=2, tiers=[str(tier)], deadline_s=20)
    cli("copy", run, copy)
    commands = [line.split()[1:] for line in page.splitlines() if line.startswith("ftckpt ")]
    places = {"s3://bucket/runs/grpo-1": run, "/backup/grpo-1": copy, "/dev/shm/ftckpt/grpo-1": tier}
    look, from_copy, from_tier = ([places.get(word, word) for word in words] for words in commands)

    assert cli(*look).code == 0
    for repair in (from_copy, from_tier):
        flip(a_pack(run, 1, 1))
        assert cli(*look).code == 1
        ran = cli(*repair)
        assert ran.code == 0 and "1 object repaired, all good" in ran.out
    train(copy, until=3)  # it goes on by itself, and is a source all the same
    flip(a_pack(run, 1, 2))
    assert cli(*from_copy, "--step", 2).code == 0
    train(tmp_path / "other", until=1)
    refused = cli("verify", run, "--repair", "--from", tmp_path / "other")
    assert refused.code == 1 and refused.err.startswith("NotSameRun")


def test_a_step_whose_commit_is_gone_is_brought_back_by_a_copy(cli: Cli, run: Path, tmp_path: Path) -> None:
    cli("copy", run, tmp_path / "copy")
    (run / "commits/000000000001-000001").unlink()

    repaired = cli("verify", run, "--repair", "--from", tmp_path / "copy", "--json").json
    steps = [line["step"] for line in cli("ls", run, "--json").json["commits"]]
    copied = cli("copy", tmp_path / "copy", run)

    assert repaired["repaired"] == [] and 1 not in steps
    assert copied.code == 0 and cli("verify", run).code == 0
    assert 1 in [line["step"] for line in cli("ls", run, "--json").json["commits"]]
