"""``gc``: what it deletes, and what it does not without being told."""

from __future__ import annotations

from pathlib import Path

from ftckpt.attempts import pin
from ftckpt.layout import intent_key
from ftckpt.manifest import Intent, Position, encode
from ftckpt.store import LocalStore
from tests.cli.conftest import Cli


def statuses(cli: Cli, run: Path) -> dict[tuple[int, int], str]:
    lines = cli("ls", run, "--json", "--all").json["commits"]
    return {(line["step"], line["attempt"]): line["status"] for line in lines}


def test_without_keep_no_commit_is_deleted(cli: Cli, run: Path) -> None:
    before = statuses(cli, run)

    ran = cli("gc", run, "--json")

    assert ran.code == 0 and ran.json["collected"] == []
    assert statuses(cli, run) == before


def test_a_dry_run_says_what_would_go_and_deletes_nothing(cli: Cli, run: Path) -> None:
    before = sorted(run.rglob("*"))

    ran = cli("gc", run, "--keep", 1, "--abandoned", "--dry-run")

    assert ran.code == 0
    assert "would delete step 0 of attempt 1" in ran.out
    assert sorted(run.rglob("*")) == before


def test_keep_and_keep_every_and_pins_decide(cli: Cli, run: Path) -> None:
    """Attempt 2 is pinned to where it began, step 2, and the tip that it left is pinned too."""
    ran = cli("gc", run, "--keep", 1, "--keep-every", 100, "--abandoned", "--json")

    assert [(at["step"], at["attempt"]) for at in ran.json["collected"]] == [(1, 1)]
    assert {pin["kind"] for pin in ran.json["pins"]} == {"start", "tip"}
    assert statuses(cli, run)[1, 1] == "collected"
    assert cli("verify", run).code == 0


def test_a_dropped_pin_lets_its_commit_go(cli: Cli, run: Path) -> None:
    pin(LocalStore(str(run)), "mine", Position(1, 1), "reader", "a reader that died")
    assert (1, 1) not in {(at["step"], at["attempt"]) for at in _collected(cli, run)}

    dropped = cli("gc", run, "--drop-pin", "mine", "--json")

    assert dropped.code == 0 and dropped.json["dropped_pins"] == ["mine"]
    assert (1, 1) in {(at["step"], at["attempt"]) for at in _collected(cli, run)}


def test_a_dropped_intent_is_gone_and_an_unknown_one_is_an_error(cli: Cli, run: Path) -> None:
    LocalStore(str(run)).create(intent_key("dead"), encode(Intent(intent="dead", victims=((0, 1),))))
    assert "collection dead is open" in cli("gc", run).out

    dropped, again = cli("gc", run, "--drop-intent", "dead"), cli("gc", run, "--drop-intent", "dead")

    assert (dropped.code, again.code) == (0, 1)
    assert again.err.startswith("ObjectNotFound: ") and "nothing was changed" in again.err


def test_a_kept_commit_that_cannot_be_read_stops_it(cli: Cli, run: Path) -> None:
    next((run / "fragments/000002/000000000003").iterdir()).unlink()

    ran = cli("gc", run, "--keep", 2)

    assert ran.code == 1
    assert ran.err.startswith("GcStopped: ")
    assert "collected" not in statuses(cli, run).values()


def _collected(cli: Cli, run: Path) -> list[dict[str, int]]:
    return cli("gc", run, "--keep", 1, "--dry-run", "--json").json["collected"]
