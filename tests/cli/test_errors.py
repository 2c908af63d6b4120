"""What a person can get wrong, and what a store can do to them: one clear message, exit 1, nothing lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftckpt.manifest import Commit, RunRecord, decode, encode
from tests.cli.conftest import Cli, claims
from tests.support.procs import free_port
from tests.support.weed import Weed

READERS = [("ls",), ("show",), ("verify",), ("gc",), ("resume",)]


def overwrite(path: Path, body: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(body)


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_a_mistyped_address_is_an_error_and_nothing_is_created(cli: Cli, tmp_path: Path, command) -> None:
    ran = cli(*command, tmp_path / "mistyped")

    assert ran.code == 1 and ran.out == ""
    assert ran.err.startswith("RunNotFound: ") and "Traceback" not in ran.err
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("command", [*READERS, ("run", "--", "true")], ids=" ".join)
@pytest.mark.parametrize("address", ["", "  "])
def test_an_empty_address_is_an_error(cli: Cli, command, address: str) -> None:
    ran = cli(command[0], address, *command[1:])

    assert ran.code == 1
    assert ran.err.startswith("RunNotFound: the address of the run is empty")


def test_an_existing_empty_folder_is_no_run(cli: Cli, tmp_path: Path) -> None:
    ran = cli("resume", tmp_path, "--json")

    assert ran.code == 1
    assert ran.json["error"] == "RunNotFound" and str(tmp_path) in ran.json["uri"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["show", "verify", "resume"])
def test_an_absent_step_is_an_error_that_names_those_there_are(cli: Cli, recorded, command: str) -> None:
    run = recorded("true")
    before = claims(run)

    ran = cli(command, run, "--step", 99, "--json")

    assert ran.code == 1
    assert ran.json["error"] == "StepNotFound" and ran.json["step"] == 99
    assert "3, 2, 1, 0" in ran.err
    assert claims(run) == before


@pytest.mark.parametrize("command", [("resume",), ("run", "--", "true")], ids=" ".join)
def test_commits_that_cannot_be_read_are_never_a_reason_to_begin_anew(cli: Cli, recorded, command) -> None:
    run = recorded("true")
    before = claims(run)
    for commit in (run / "commits").iterdir():
        overwrite(commit, commit.read_bytes()[:-40])

    ran = cli(command[0], run, *command[1:])

    assert ran.code == 1
    assert "RecordCorrupt" in ran.err and "no older commit is left" in ran.err
    assert claims(run) == before


@pytest.mark.parametrize("command", [*READERS, ("run", "--", "true")], ids=" ".join)
def test_a_run_of_a_newer_format_is_refused(cli: Cli, run: Path, command) -> None:
    overwrite(run / "run.json", encode(RunRecord(format=2, run="later")))

    ran = cli(command[0], run, *command[1:])

    assert ran.code == 1
    assert ran.err.startswith("UnknownFormat: ") and "Traceback" not in ran.err


def test_a_commit_of_a_newer_format_is_refused(cli: Cli, run: Path) -> None:
    path = run / "commits/000000000003-000002"
    commit = decode(Commit, path.read_bytes(), "x")
    fields = {name: getattr(commit, name) for name in Commit.__struct_fields__}
    overwrite(path, encode(Commit(**{**fields, "format": 2})))

    for command in ("ls", "show", "verify", "resume"):
        ran = cli(command, run)

        assert (command, ran.code) == (command, 1)
        assert "UnknownFormat" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("ls",),
        ("show", "RUN", "--step", "-1"),
        ("show", "RUN", "--step", "two"),
        ("show", "RUN", "--value", "x", "--leaves"),
        ("ls", "RUN", "--store-option", "hunter2"),
        ("gc", "RUN", "--keep", "0"),
        ("gc", "RUN", "--keep-every", "10"),
        ("gc", "RUN", "--drop-pin", "x", "--keep", "1"),
        ("run", "RUN"),
        ("run", "RUN", "--groups", "0", "--", "true"),
        ("run", "RUN", "true", "--lr", "1"),
        ("no-such-command", "RUN"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_repeats_no_secret(cli: Cli, arguments) -> None:
    ran = cli(*arguments)

    assert ran.code == 2
    assert "Usage: ftckpt" in ran.err + ran.out
    assert "hunter2" not in ran.err + ran.out


def test_more_groups_needed_than_there_are_is_refused_before_anything_is_claimed(cli: Cli, tmp_path) -> None:
    ran = cli("run", tmp_path / "new", "--groups", 2, "--min-groups", 3, "--", "true")

    assert ran.code == 1
    assert ran.err.startswith("SettingsError: ")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["run", "resume", "ls", "show", "verify", "gc"])
def test_help_teaches_by_an_example(cli: Cli, command: str) -> None:
    ran = cli(command, "--help")

    assert ran.code == 0
    assert f"Example: ftckpt {command} " in ran.out


def test_help_lists_the_commands_that_exist_and_no_others(cli: Cli) -> None:
    ran = cli("--help")

    named = [
        line.split()[0] for line in ran.out.partition("Commands:\n")[2].splitlines() if line[2:3].strip()
    ]
    own = ["run", "resume", "ls", "show", "verify", "diff", "copy", "fork", "export", "import", "gc", "agent"]
    assert named[: len(own)] == own
    assert "audit" not in named and "scale" not in named


def test_other_packages_join_by_entry_point(cli: Cli, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ftckpt.commands]\nguest = guest_commands:app\n")
    (tmp_path / "guest_commands.py").write_text(
        "import typer\napp = typer.Typer()\n"
        "@app.command()\ndef hello(name: str) -> None:\n    'Say hello.'\n    print('hello', name)\n"
        "@app.command()\ndef bye() -> None:\n    print('bye')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    assert cli("guest", "hello", "you").out == "hello you\n"
    assert "guest" in cli("--help").out


# --- buckets --------------------------------------------------------------------------------------


@pytest.fixture
def on_s3(s3: Weed, made: Path) -> Weed:
    """The server holds the run at ``uri("cli")``."""
    import obstore
    from obstore.store import S3Store

    bucket = S3Store(
        s3.bucket,
        endpoint=s3.endpoint,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        region=s3.region,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    for path in made.rglob("*"):
        if path.is_file():
            obstore.put(bucket, f"cli/{path.relative_to(made)}", path.read_bytes())
    return s3


def test_a_run_in_a_bucket_reads_like_one_in_a_folder(cli: Cli, on_s3: Weed, made: Path) -> None:
    in_bucket, in_folder = cli("ls", on_s3.uri("cli"), "--json"), cli("ls", made, "--json")

    assert in_bucket.code == 0
    assert in_bucket.json["commits"] == in_folder.json["commits"]
    assert cli("verify", on_s3.uri("cli")).code == 0


@pytest.mark.parametrize("command", [("ls",), ("resume",), ("run", "--", "true")], ids=" ".join)
def test_wrong_credentials_are_one_message_that_does_not_repeat_them(cli: Cli, s3: Weed, command) -> None:
    secret = ["--store-option", "access_key_id=someone", "--store-option", "secret_access_key=hunter2hunter2"]

    ran = cli(command[0], s3.uri("cli"), *secret, "--json", *command[1:])

    assert ran.code == 1
    assert ran.err.startswith("AccessDenied: ") and "Traceback" not in ran.err
    assert ran.out.splitlines()[-1].count('"error": "AccessDenied"') == 1
    assert "hunter2" not in ran.out + ran.err


@pytest.mark.parametrize("command", [("ls",), ("resume",), ("run", "--", "true")], ids=" ".join)
def test_an_endpoint_that_is_down_is_one_message(cli: Cli, s3: Weed, monkeypatch, command) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")

    ran = cli(command[0], s3.uri("cli"), *command[1:])

    assert ran.code == 1 and ran.out == ""
    assert "StoreUnavailable: " in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("command", [("ls",), ("resume",), ("run", "--", "true")], ids=" ".join)
def test_a_bucket_that_does_not_exist_is_one_message(cli: Cli, s3: Weed, command) -> None:
    ran = cli(command[0], "s3://no-such-bucket-here/run", *command[1:])

    assert ran.code == 1 and ran.out == ""
    assert ran.err.startswith("BucketNotFound: ") and "Traceback" not in ran.err


def test_credentials_reach_the_ranks_and_nothing_that_is_written(
    cli: Cli, s3: Weed, monkeypatch, tmp_path
) -> None:
    for name in s3.env:
        monkeypatch.delenv(name)
    options = {
        "endpoint_url": s3.endpoint,
        "access_key_id": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "allow_http": "true",
        "region": s3.region,
    }
    flags = [part for key, value in options.items() for part in ("--store-option", f"{key}={value}")]
    check = tmp_path / "check.sh"
    check.write_text(f'test "$AWS_SECRET_ACCESS_KEY" = {s3.secret_key}\n')

    ran = cli("run", s3.uri("secrets"), *flags, "--", "sh", check)
    listed = cli("ls", s3.uri("secrets"), *flags, "--json", "--attempts")

    assert ran.code == listed.code == 0
    assert listed.json["attempts"][0]["command"] == ["sh", str(check)]
    assert s3.secret_key not in ran.out + ran.err + listed.out


def test_a_store_option_that_ranks_cannot_be_told_is_refused(cli: Cli, s3: Weed) -> None:
    ran = cli("run", s3.uri("options"), "--store-option", "max_calls=4", "--", "true")

    assert ran.code == 1 and "max_calls" in ran.err
    assert cli("ls", s3.uri("options")).code == 1  # nothing was begun


def test_a_read_only_copy_reads_well(cli: Cli, run: Path) -> None:
    copy = Path(shutil.copytree(run, run.parent / "copy"))
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    assert cli("verify", copy).code == 0
