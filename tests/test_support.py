"""The helpers that the other tests stand on."""

from __future__ import annotations

import signal
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from tests.support.procs import run_ranks, start_ranks, wait_until


def s3_store(weed):
    return S3Store.from_url(
        weed.uri("support"), client_options={"allow_http": True}, config={}, **_keys(weed)
    )


def _keys(weed):
    return {
        "endpoint": weed.endpoint,
        "access_key_id": weed.access_key,
        "secret_access_key": weed.secret_key,
        "region": weed.region,
    }


def test_ranks_find_each_other_and_their_output_comes_back():
    result = run_ranks("tests/ranks/sum_of_ranks.py", 3, timeout_s=50).check()

    assert result.exit_codes == (0, 0, 0)
    assert all("sum 3" in output for output in result.outputs)


def test_ranks_that_hang_are_killed_at_the_deadline():
    with start_ranks("tests/ranks/sum_of_ranks.py", 2, "hang", timeout_s=30) as gang:
        gang.wait_for_output(1, "joined")
        pids = [gang.pid(0), gang.pid(1)]
        gang.kill9(0)
        gang._deadline_s = 0.0  # the deadline has come

        result = gang.wait()

    assert result.timed_out
    assert result.exit_codes == (-signal.SIGKILL, -signal.SIGKILL)
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
    with pytest.raises(AssertionError, match="joined"):
        result.check()


def test_a_condition_that_never_comes_true_says_what_was_waited_for():
    with pytest.raises(AssertionError, match="a miracle"):
        wait_until(lambda: False, 0.05, "a miracle")


def test_the_s3_server_keeps_its_objects_over_kill_9_and_a_restart(weed):
    obstore.put(s3_store(weed), "a", b"bytes", mode="create")

    weed.kill9()
    weed.restart()

    assert bytes(obstore.get(s3_store(weed), "a").bytes()) == b"bytes"


def test_the_s3_server_refuses_a_second_create(weed):
    obstore.put(s3_store(weed), "b", b"first", mode="create")

    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(s3_store(weed), "b", b"second", mode="create")


def test_the_standard_variables_lead_to_the_s3_server(s3):
    store = S3Store(s3.bucket, prefix="support")

    obstore.put(store, "c", b"found")

    assert bytes(obstore.get(s3_store(s3), "c").bytes()) == b"found"
