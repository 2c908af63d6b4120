"""``save_every``: what a session saves, by a clock that is wound by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

import ftckpt
from ftckpt.chaos.faults.store import Fault, FaultyStore, Pause
from ftckpt.clock import HandClock
from ftckpt.errors import SettingsError
from ftckpt.events import silent
from ftckpt.policy import Policy
from ftckpt.session.pace import Pace
from ftckpt.store import open_store
from tests.session.toy import Heard, Toy
from tests.support.procs import run_ranks, wait_until


def saved(folder, until, *, step_s=10.0, **options) -> tuple[list[int], Heard]:
    """Train steps of ``step_s`` seconds each; the steps that were committed, and what was heard."""
    toy, heard, clock = Toy(), Heard(), HandClock()
    with ftckpt.Session(folder, toy.state, keep=None, events=heard, clock=clock, **options) as session:
        for step in session.steps(until=until):
            if session._at.handle is not None:
                session._at.handle.wait(20)
            toy.train(step)
            clock.sleep(step_s)
    return sorted(event["step"] for event in heard.named("save.committed")), heard


def test_seconds_are_counted_from_the_last_save(tmp_path):
    steps, _ = saved(tmp_path / "run", 10, save_every="25s")

    assert steps == [0, 3, 6, 9, 10]


def test_continuous_saves_begin_at_the_first_boundary_after_the_last_is_durable(tmp_path):
    """The save of step 1 is held back over two boundaries; those do not begin another."""
    pause, toy, heard = Pause(timeout_s=30), Toy(), Heard()
    fault = Fault(pause, op="create", prefix="packs/000001/000000000001")
    store = FaultyStore(open_store(tmp_path / "run"), [fault])
    options = {"save_every": "continuous", "keep": None, "events": heard, "store": store}
    with ftckpt.Session("ignored", toy.state, **options) as session:
        for step in session.steps(until=5):
            if step == 1 or step > 3:
                wait_until(lambda: session._at.handle.done, 20, "the last save to end")
            toy.train(step)
            if step == 3:
                assert pause.arrived.wait(20)
                pause.release()
                wait_until(lambda: session._at.handle.done, 20, "the save of step 1 to end")

    assert sorted(event["step"] for event in heard.named("save.committed")) == [0, 1, 3, 4, 5]


def test_auto_follows_the_given_time_between_failures_and_says_why(tmp_path):
    """No time passes in ``save()`` by this clock, so saves cost nothing: one at every boundary."""
    steps, heard = saved(tmp_path / "run", 4, save_every="auto", mtbf_s=3600)

    assert steps == [0, 1, 2, 3, 4]
    (told,) = heard.named("save.interval")
    assert "a failure every 60 min was given" in told["why"][0]
    assert "a save costs 0 ms of training" in told["why"][1]


def paced(mtbf_s: float, *, stall_s: float, beside_s: float, durable_s: float, steps: int = 400) -> list[int]:
    """The steps that ``auto`` saves when steps take 10 s, and ``beside_s`` more beside a save."""
    clock = HandClock()
    pace = Pace(Policy("auto"), clock, silent, mtbf_s)
    saved, done_s = [], None
    for step in range(1, steps):
        under_way = done_s is not None
        pace.step_begins(under_way=under_way)
        clock.sleep(10 + beside_s * under_way)
        pace.step_ended()
        if done_s is not None and clock.now_s() >= done_s:
            pace.durable(durable_s)
            done_s = None
        if pace.due(step, under_way=done_s is not None):
            clock.sleep(stall_s)
            pace.saved(stall_s)
            saved.append(step)
            done_s = clock.now_s() + durable_s
    return saved


@pytest.mark.parametrize(
    "costs, apart",
    [
        ({"stall_s": 8, "beside_s": 0, "durable_s": 5}, 13),  # sqrt(2 * 8 * 1000) = 126 s
        ({"stall_s": 0, "beside_s": 8, "durable_s": 5}, 13),  # the same lost in slower steps
        ({"stall_s": 0.5, "beside_s": 0, "durable_s": 5}, 4),  # sqrt(2 * 0.5 * 1000) = 32 s
        ({"stall_s": 0.5, "beside_s": 0, "durable_s": 95}, 10),  # two saves never overlap
    ],
)
def test_auto_settles_at_the_interval_that_the_costs_ask_for(costs, apart):
    saved = paced(1000, **costs)

    assert saved[0] == 1
    found = {later - earlier for earlier, later in pairwise(saved[3:])}
    assert found <= {apart - 1, apart, apart + 1}, saved


def test_auto_counts_how_often_the_attempts_of_a_run_ended(tmp_path):
    saved(tmp_path / "run", 6)
    saved(tmp_path / "run", 12)

    _, heard = saved(tmp_path / "run", 15, save_every="auto")

    (told,) = heard.named("save.interval")
    assert "2 earlier attempts ended within 14 steps of 10 s: a failure every 70 s" in told["why"][0]


def test_a_time_between_failures_without_auto_means_nothing(tmp_path):
    with pytest.raises(SettingsError, match='without save_every="auto"'):
        ftckpt.Session(tmp_path, {}, save_every=5, mtbf_s=60)


@pytest.mark.timeout(150)
def test_ranks_whose_clocks_differ_save_the_same_steps(tmp_path):
    """Rank 0 alone looks at its clock; what it decides is done by both after the next step."""
    gang = run_ranks("tests/ranks/session_policy.py", 2, tmp_path / "run", timeout_s=120).check()

    assert gang.outputs[0] == gang.outputs[1]
    assert gang.outputs[0].split() == ["0", "4", "8", "12", "13"]
