from __future__ import annotations

import json

import pytest

from tests.support.procs import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_group_of_two_ranks_repeats_itself_and_trains_what_one_rank_trains():
    """
    FSDP2 on gloo. Sums inside a group have another order than on one rank, so that comparison is
    close and not exact; everything else is.
    """
    result = run_ranks("tests/grpo/fsdp_rank.py", 2, timeout_s=260).check()

    ranks = [json.loads(output.splitlines()[-1]) for output in result.outputs]
    for rank in ranks:
        assert rank["sharded"] and rank["moments_sharded"] and rank["repeats"]
        assert rank["buffer_full"] and rank["buffer_equal"]
        assert rank["slots_generated"] == 2 * 2
        assert rank["digests"] == ranks[0]["digests"]
    figures, alone = ranks[0]["figures"], ranks[0]["alone"]
    assert figures[0]["reward"] == alone[0]["reward"]  # the same weights, prompts and draws
    for name in ("loss", "grad_norm", "value_loss", "kl"):
        assert [one[name] for one in figures[:2]] == pytest.approx(
            [one[name] for one in alone[:2]], rel=1e-3, abs=1e-5
        )
    assert ranks[1]["figures"] == []
