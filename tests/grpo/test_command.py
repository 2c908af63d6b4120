"""The command as a person runs it, on a real store, with the real session."""

from __future__ import annotations

import json

import pytest

from ftckpt.integrations.grpo.__main__ import main

SMALL = (
    "--critic --task-size 48 --prompts-per-step 8 --samples-per-prompt 2 --warmup-sft-steps 5 --save-every 2"
)


def train(run, folder, steps, *more):
    return main(
        [
            str(run),
            *SMALL.split(),
            f"--steps={steps}",
            f"--digest={folder}/digest.json",
            f"--out={folder}",
            *more,
        ]
    )


@pytest.mark.timeout(200)
def test_a_run_that_stopped_goes_on_to_the_same_bits(tmp_path, capsys):
    """It stops after step 3, in the middle of a generation batch."""
    assert train(tmp_path / "straight", tmp_path / "s", 6) == 0
    assert train(tmp_path / "stopped", tmp_path / "t", 3) == 0

    assert train(tmp_path / "stopped", tmp_path / "t", 6, f"--events={tmp_path}/events.jsonl") == 0

    straight, stopped = (json.loads((tmp_path / x / "digest.json").read_text()) for x in "st")
    assert straight == stopped
    assert straight["step"] == 6 and straight["sampler"]["position"] == 24
    lines = [
        [json.loads(line) for line in (tmp_path / x / "metrics.jsonl").read_text().splitlines()] for x in "st"
    ]
    for one in (*lines[0], *lines[1]):
        del one["step_s"]
    assert lines[0] == lines[1]
    assert "attempt.begun" in (tmp_path / "events.jsonl").read_text()
    assert capsys.readouterr().out.count("step 4 ") == 2


def test_a_resume_with_other_prompts_is_one_clear_message_and_changes_nothing(tmp_path, capsys):
    assert train(tmp_path / "run", tmp_path, 2) == 0
    before = (tmp_path / "metrics.jsonl").read_text()

    code = train(tmp_path / "run", tmp_path, 4, "--seed=1")

    message = capsys.readouterr().err
    assert code == 1
    assert "seed" in message and "Traceback" not in message
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "no RUN was given"),
        (["RUN", "--slots", "3"], "--slots 3 is not a power of two"),
        (["RUN", "--model", "no-such"], "neither tiny nor smollm2"),
        (["RUN", "--task", "no-such"], "no data set 'no-such'"),
        (["RUN", "--task", "basic_arithmetic", "--task-options", "x=1"], "no data set 'basic_arithmetic'"),
    ],
)
def test_a_wrong_setting_is_one_clear_message(argv, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    code = main(argv)

    assert code == 2
    message = capsys.readouterr().err
    assert message.startswith("SettingsError: ") and says in message
    assert not list(tmp_path.iterdir())


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--num-iterations" in text and "--digest" in text and "RUN" in text
