"""What a supervisor tells a rank."""

from __future__ import annotations

import json

import pytest

from ftckpt.elastic.launch import Launch, open_status
from ftckpt.errors import SettingsError
from ftckpt.events import Event, silent


def test_an_empty_environment_is_one_process_that_nobody_supervises():
    assert Launch.from_env({}) == Launch(
        run=None, attempt=None, group="g0", lighthouse=None, rank=0, world=1, rejoin=False, life=0
    )


def test_everything_that_a_supervisor_says_is_read():
    env = {
        "FTCKPT_RUN": "s3://b/r",
        "FTCKPT_ATTEMPT": "3",
        "FTCKPT_GROUP": "g7",
        "FTCKPT_REJOIN": "2",
        "FTCKPT_HOST": "10.0.0.7",
        "FTCKPT_STATUS": "/tmp/s",
        "TORCHFT_LIGHTHOUSE": "http://h:1",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
    }

    assert Launch.from_env(env) == Launch(
        "s3://b/r", 3, "g7", "http://h:1", 1, 2, 1, rejoin=True, life=2, host="10.0.0.7", status="/tmp/s"
    )


@pytest.mark.parametrize(
    "env",
    [
        {"FTCKPT_ATTEMPT": "zero"},
        {"FTCKPT_ATTEMPT": "0"},
        {"FTCKPT_ATTEMPT": "-1"},
        {"FTCKPT_REJOIN": "yes"},
        {"FTCKPT_GROUP": "a/b"},
        {"FTCKPT_GROUP": "g" * 49},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "0"},
        {"TORCHFT_TIMEOUT_SEC": "3"},
        {"TORCHFT_QUORUM_RETRIES": "0"},
    ],
)
def test_a_value_without_a_meaning_is_refused(env):
    with pytest.raises(SettingsError):
        Launch.from_env(env)


def test_status_events_are_appended_as_json_lines(tmp_path):
    path = tmp_path / "status"

    open_status(Launch(status=str(path)))(Event("group.turn", {"step": 3}))

    assert json.loads(path.read_text()) | {"unix_s": 0} == {"event": "group.turn", "step": 3, "unix_s": 0}


def test_without_a_status_file_events_go_nowhere():
    assert open_status(Launch()) is silent


def test_a_status_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(SettingsError, match="FTCKPT_STATUS"):
        open_status(Launch(status=str(tmp_path / "absent" / "status")))
