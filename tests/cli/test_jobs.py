"""``run`` and ``resume``: real supervisors over real processes."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftckpt.attempts import read_claim
from ftckpt.layout import claim_key
from ftckpt.manifest import Claim, encode
from ftckpt.store import LocalStore
from tests.cli.conftest import Cli, claims
from tests.cli.test_reading import a_pack, flip
from tests.support.procs import kill_tree, spawn, wait_until

SCRIPT = Path(__file__).with_name("train.py")
WITHIN_S = 110.0
"""Far more than needed: starting a trainer takes half a minute on a machine that does much else."""


@pytest.mark.slow
@pytest.mark.timeout(2 * WITHIN_S + 20)
def test_a_plain_loop_that_loses_everything_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    """
    The trainer is killed (the supervisor begins attempt 2), then the whole job is (resume begins
    attempt 3). The undisturbed one is a plain ``python train.py`` that nobody supervises.
    """
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    for folder in (calm, wild):
        folder.mkdir()
        shutil.copy(SCRIPT, folder)
    (calm / "go").touch()
    (wild / "suicide").touch()
    log, again = tmp_path / "wild.log", tmp_path / "again.log"
    ftckpt = [sys.executable, "-m", "ftckpt.cli"]
    trainers = [[sys.executable, str(folder / "train.py"), str(folder)] for folder in (calm, wild)]

    with ExitStack() as stack:

        def start(argv: list[str], output: Path, **env: str) -> subprocess.Popen[bytes]:
            process = spawn(argv, output, env)
            stack.callback(kill_tree, process)
            return process

        alone = start(trainers[0], tmp_path / "calm.log", FTCKPT_RUN=str(calm / "run"))
        job = start([*ftckpt, "run", str(wild / "run"), "--", *trainers[1]], log)
        committed = wild / "run/commits/000000000006-000002"
        wait_until(lambda: committed.exists() or job.poll() is not None, WITHIN_S, log.read_text)
        told = log.read_text()
        assert "g0 died: killed by SIGKILL" in told and "goes on from step 3 of attempt 1" in told, told
        kill_tree(job)
        (wild / "go").touch()
        resumed = start([*ftckpt, "resume", str(wild / "run"), "--json"], again)
        wait_until(lambda: None not in (resumed.poll(), alone.poll()), WITHIN_S, again.read_text)

    events = [json.loads(line) for line in again.read_text().splitlines()]
    parent = next(event for event in events if event["event"] == "attempt.goes_on")
    assert resumed.returncode == alone.returncode == 0
    assert (parent["attempt"], parent["step"], parent["from_attempt"]) == (3, 6, 2)
    assert events[-1]["event"] == "job.finished"
    assert (wild / "digest").read_text() == (calm / "digest").read_text()


def test_run_records_what_resume_needs(cli: Cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "say.sh").write_text('echo "group $FTCKPT_GROUP rank $RANK run $FTCKPT_RUN"\n')

    ran = cli("run", "new", "--groups", 2, "--nproc", 2, "--min-groups", 2, "--", "sh", "say.sh")

    assert ran.code == 0, ran.err
    assert f"there is no run at file://{tmp_path}/new yet: starting one" in ran.out
    found = read_claim(LocalStore(str(tmp_path / "new")), 1)
    assert (found.command, found.cwd) == (("sh", "say.sh"), str(tmp_path))
    assert (found.groups, found.nproc) == (2, 2)
    assert found.settings == {"min_groups": "2", "run": str(tmp_path / "new")}
    lines = {line for line in ran.out.splitlines() if " rank " in line}
    assert f"[g1.1] group g1 rank 1 run {tmp_path}/new" in lines and len(lines) == 4


def test_resume_takes_other_counts_and_needs_no_folder_but_the_recorded_one(
    cli: Cli, recorded, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "say.sh").write_text('echo "attempt $FTCKPT_ATTEMPT in $(pwd)"\n')
    run = recorded("sh", "say.sh", groups=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    ran = cli("resume", os.path.relpath(run), "--groups", 1, "--nproc", 2)

    assert ran.code == 0, ran.err
    assert "goes on from step 3 of attempt 2, guarantee E3" in ran.out
    assert "not better: torch.use_deterministic_algorithms is off" in ran.out
    assert f"[g0.1] attempt 4 in {tmp_path}" in ran.out and "[g1" not in ran.out
    assert read_claim(LocalStore(str(run)), 4).nproc == 2


def test_run_goes_on_with_a_run_that_has_commits_and_says_so(cli: Cli, run: Path) -> None:
    ran = cli("run", run, "--", "true")

    assert ran.code == 0
    assert "attempt 3 of" in ran.out and "goes on from step 3 of attempt 2" in ran.out


def test_resume_goes_on_from_an_older_step_when_asked(cli: Cli, recorded) -> None:
    run = recorded("true")

    ran = cli("resume", run, "--step", 1, "--json")

    events = {event["event"]: event for event in map(json.loads, ran.out.splitlines())}
    assert ran.code == 0
    assert events["attempt.goes_on"]["step"] == 1 and events["job.finished"]["attempt"] == 4


def test_resume_passes_over_damage_only_when_allowed_and_says_what(cli: Cli, recorded) -> None:
    run = recorded("true")
    flip(a_pack(run, 2, 3), 40)

    allowed = cli("resume", run, "--fallback")

    assert allowed.code == 0
    assert "goes on from step 2 of attempt 1" in allowed.out
    assert "passed over step 3: ChunkCorrupt" in allowed.out


def test_resume_of_an_incomplete_commit_stops_and_names_the_older_one(cli: Cli, recorded) -> None:
    run = recorded("true")
    a_pack(run, 2, 3).unlink()
    before = claims(run)

    refused = cli("resume", run)

    assert refused.code == 1
    assert "ObjectDamaged" in refused.err and "--step 2" in refused.err
    assert claims(run) == before


@pytest.mark.parametrize(
    "command, what",
    [
        (["no-such-trainer", "x"], "no executable 'no-such-trainer'"),
        ([sys.executable, "gone.py"], "gone.py does not exist"),
        ([sys.executable, "-m", "gone.module"], "no module 'gone.module'"),
    ],
)
def test_resume_of_a_command_that_is_gone_changes_nothing(cli: Cli, recorded, command, what) -> None:
    run = recorded(*command)
    before = claims(run)

    ran = cli("resume", run, "--json")

    assert ran.code == 1
    assert ran.json["error"] == "CommandNotFound" and ran.json["command"] == command
    assert "the command of attempt 3 cannot be started" in ran.err and what in ran.err
    assert claims(run) == before


def test_resume_in_a_folder_that_is_gone_changes_nothing(cli: Cli, recorded, tmp_path: Path) -> None:
    ran = cli("resume", recorded("true", cwd=tmp_path / "gone"))

    assert ran.code == 1 and "/gone does not exist" in ran.err


def test_run_refuses_a_command_that_is_not_there_before_it_claims(cli: Cli, tmp_path: Path) -> None:
    ran = cli("run", tmp_path / "new", "--", sys.executable, "gone.py")

    assert ran.code == 1
    assert ran.err.startswith("CommandNotFound: this command cannot be started")
    assert not (tmp_path / "new").exists()


def test_a_run_that_was_claimed_but_never_committed_is_not_resumed(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", tmp_path / "new", "--", "true").code == 0

    ran = cli("resume", tmp_path / "new")

    assert ran.code == 1
    assert ran.err.startswith("NoCommit: ")
    assert claims(tmp_path / "new") == ["000001"]


def test_two_supervisors_do_not_take_turns(cli: Cli, tmp_path: Path) -> None:
    """While attempt 1 trains, somebody else claims attempt 2; our trainer then dies."""
    theirs = tmp_path / "claim"
    theirs.write_bytes(
        encode(Claim(attempt=2, nonce="1" * 32, host="b", pid=1, command=("x",), cwd="/", groups=1, nproc=1))
    )
    (tmp_path / "zombie.sh").write_text(f"cp {theirs} {tmp_path / 'run' / claim_key(2)}\nexit 1\n")

    ran = cli("run", tmp_path / "run", "--", "sh", tmp_path / "zombie.sh")

    assert ran.code == 1
    assert "Fenced: attempt 2" in ran.err
    assert claims(tmp_path / "run") == ["000001", "000002"]


def test_a_command_that_always_fails_ends_the_job_with_a_reason(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "fail.sh").write_text("exit 7\n")

    ran = cli("run", tmp_path / "run", "--json", "--", "sh", tmp_path / "fail.sh")

    last = json.loads(ran.out.splitlines()[-1])
    assert ran.code == 1
    assert last["event"] == "job.failed" and "exit code 7" in last["reason"]


def test_on_a_terminal_the_groups_are_shown_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "wait.sh").write_text("echo hello from the rank; sleep 1\n")
    ours, theirs = pty.openpty()

    argv = [sys.executable, "-m", "ftckpt.cli", "run", str(tmp_path / "run"), "--", "sh", "wait.sh"]
    job = subprocess.Popen(argv, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # Linux says so when the last process lets go of the terminal
            break
    os.close(ours)

    assert job.wait(timeout=30) == 0
    text = seen.decode()
    assert "[g0.0] hello from the rank" in text and "finished in attempt 1" in text
    assert "doing" in text and "processes" in text


def test_resume_of_a_run_that_was_moved_says_so_before_it_claims_anything(
    cli: Cli, tmp_path: Path, monkeypatch
) -> None:
    """The recorded command names the old address, whether as it was typed or in full."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import sys, torch, ftckpt\n"
        "with ftckpt.Session(sys.argv[1], {'t': torch.ones(2)}) as session:\n"
        "    session.save(1).wait(60)\n"
    )
    assert cli("run", "old", "--", sys.executable, "train.py", "old").code == 0
    (tmp_path / "old").rename(tmp_path / "new")

    ran = cli("resume", "new")

    assert ran.code == 1
    assert "names another address" in ran.err, ran.err
    assert not (tmp_path / "new/attempts/000002").exists()
