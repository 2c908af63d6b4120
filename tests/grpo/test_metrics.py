from __future__ import annotations

import io
import json

from ftckpt.integrations.grpo.metrics import JsonlMetrics, PlainMetrics, Several, open_metrics


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    before, after = JsonlMetrics(tmp_path), JsonlMetrics(tmp_path)
    for step in (1, 2, 3, 4, 5):
        before.write(step, {"reward": 0.1})

    for step in (4, 5, 6):  # restored to step 3
        after.write(step, {"reward": 0.2})

    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[3])["reward"] == 0.2


def test_groups_that_take_turns_at_being_first_write_one_history(tmp_path):
    one, other = JsonlMetrics(tmp_path), JsonlMetrics(tmp_path)

    for writer, step in ((one, 1), (one, 2), (other, 3), (one, 4), (one, 5)):
        writer.write(step, {"reward": 0.1})

    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_line_that_a_death_cut_in_half_is_dropped(tmp_path):
    JsonlMetrics(tmp_path).write(1, {"reward": 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')

    JsonlMetrics(tmp_path).write(2, {"reward": 0.1})

    assert steps(tmp_path) == [1, 2]


def test_without_a_terminal_a_step_is_one_line(tmp_path):
    stream = io.StringIO()

    metrics = open_metrics(str(tmp_path), stream)
    metrics.write(3, {"reward": 0.25, "lr": 5e-4})
    metrics.close()

    assert isinstance(metrics, Several)
    assert stream.getvalue() == "step 3  reward 0.250  lr 5.00e-04\n"
    assert steps(tmp_path) == [3]
    assert isinstance(open_metrics("", stream), PlainMetrics)
